// Copies on CUDA: the same tables and the same lane functions as on the CPU; one warp per chunk.

#include <cuda_runtime.h>

#include <algorithm>

#include "table.h"

namespace spmd_rl {
namespace {

constexpr int kWarps = 4;           // per block
constexpr int64_t kPerWarp = 4;     // neighbouring chunks of one warp: their entries are found by walking on
constexpr int64_t kMaxBlocks = 1 << 30;

struct CopySegment {
  __device__ void operator()(const Segment& segment, int64_t chunk, int lane) const {
    copy_run(run_of(segment, chunk), lane);
  }
};

struct CopySlice {
  int64_t from_bytes;
  int64_t to_bytes;
  bool casts;
  __device__ void operator()(const Slice& slice, int64_t chunk, int lane) const {
    Run run = run_of(slice, chunk, from_bytes, to_bytes);
    if (casts) {
      cast_run(run, lane);
    } else {
      run.size *= from_bytes;
      copy_run(run, lane);
    }
  }
};

template <typename Entry, typename Copy>
__global__ void __launch_bounds__(kWarps* kLanes)
    copy_kernel(const Entry* __restrict__ entries, int64_t count, int64_t chunks, Copy copy) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  for (; warp * kPerWarp < chunks; warp += warps) {
    const int64_t begin = warp * kPerWarp;
    const int64_t end = begin + kPerWarp < chunks ? begin + kPerWarp : chunks;
    int64_t k = entry_of(entries, count, begin);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (k + 1 < count && entries[k + 1].first_chunk <= chunk) ++k;
      copy(entries[k], chunk, lane);
    }
  }
}

void check(cudaError_t status) {
  STD_TORCH_CHECK(status == cudaSuccess, "CUDA: ", cudaGetErrorString(status));
}

template <typename Entry, typename Copy>
void launch(const Table<Entry>& table, const Tensor& near, int64_t stream_handle, Copy copy) {
  if (table.chunks == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(near.get_device_index());
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  const auto bytes = static_cast<int64_t>(table.entries.size() * sizeof(Entry));
  // Allocated on the caller's stream, so it may be freed as soon as the kernel is launched. The copy is from pageable
  // memory: it returns when the table has been read.
  Tensor device_table = torch::stable::new_empty(near, {bytes}, ScalarType::Byte);
  check(cudaMemcpyAsync(device_table.mutable_data_ptr(), table.entries.data(), static_cast<size_t>(bytes),
                        cudaMemcpyHostToDevice, stream));
  const int64_t warps = (table.chunks + kPerWarp - 1) / kPerWarp;
  const int64_t blocks = std::min((warps + kWarps - 1) / kWarps, kMaxBlocks);
  copy_kernel<<<static_cast<unsigned>(blocks), kWarps * kLanes, 0, stream>>>(
      static_cast<const Entry*>(device_table.const_data_ptr()), static_cast<int64_t>(table.entries.size()),
      table.chunks, copy);
  check(cudaGetLastError());
}

void copy_segments_cuda(std::vector<Tensor> sources, Tensor target, Tensor segments, int64_t stream) {
  launch(SegmentList(sources, target, segments).table(), target, stream, CopySegment{});
}

void copy_slices_cuda(std::vector<Tensor> sources, std::vector<Tensor> targets, Tensor slices, int64_t stream) {
  const SliceTable table = slice_table(sources, targets, slices);
  if (table.chunks) launch(table, targets[0], stream, CopySlice{table.from_bytes, table.to_bytes, table.casts});
}

}  // namespace
}  // namespace spmd_rl

STABLE_TORCH_LIBRARY_IMPL(spmd_rl, CUDA, library) {
  library.impl("copy_segments", TORCH_BOX(&spmd_rl::copy_segments_cuda));
  library.impl("copy_slices", TORCH_BOX(&spmd_rl::copy_slices_cuda));
}
