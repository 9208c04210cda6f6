// The operators that torch.ops.spmd_rl offers; stream: the CUDA stream's handle, 0 on the CPU.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(spmd_rl, library) {
  library.def("copy_segments(Tensor[] sources, Tensor(a!) target, Tensor segments, int stream=0) -> ()");
  library.def("copy_slices(Tensor[] sources, Tensor(a!)[] targets, Tensor slices, int stream=0) -> ()");
  library.def("deliver(Tensor[] columns, Tensor(a!)[] targets, Tensor lengths, Tensor row_bytes, Tensor target_of, "
              "Tensor places) -> ()");
  library.def("divide(Tensor ids, Tensor source, Tensor lengths, float linear, float quadratic, bool keep_groups, "
              "bool equal_counts, float slack, bool may_stay, int source_slots, int slots) -> (Tensor, Tensor, Tensor)");
  library.def("lay_out(Tensor lengths, Tensor row_bytes, Tensor order, Tensor bins_of, int bins) -> (Tensor, Tensor)");
  library.def("meet(Tensor(a!) counter, int expected, float seconds) -> bool");
  library.def("partition(Tensor costs, int slots, bool equal_counts) -> Tensor");
}
