// Copies on the CPU.

#include <algorithm>
#include <cstring>

#include "table.h"
#include "vector_copy.h"

namespace spmd_rl {
namespace {

constexpr int64_t kGrain = 128;  // chunks that a thread takes at least: below half a megabyte threads cost more

constexpr int64_t kCached = 1 << 21;  // bytes; more does not stay in the caches until it is used

// The bytes of chunks [begin, end), in as few copies as there are segments in them.
void copy_chunks(const Table<Segment>& table, int64_t begin, int64_t end) {
  const bool streams = table.bytes > kCached;
  const auto count = static_cast<int64_t>(table.entries.size());
  for (int64_t k = entry_of(table.entries.data(), count, begin); k < count; ++k) {
    const Segment& segment = table.entries[static_cast<size_t>(k)];
    if (segment.first_chunk >= end) break;
    const int64_t first = std::max<int64_t>(begin - segment.first_chunk, 0) * kChunk;
    const int64_t last = std::min((end - segment.first_chunk) * kChunk, segment.size);
    (streams ? stream_row : copy_row)(segment.to + first, segment.from + first, last - first);
  }
  if (streams) finish_streaming();
}

void cast_elements(const Run& run) {
  for (int64_t place = 0; place < run.size; ++place) {
    uint32_t bits;
    std::memcpy(&bits, run.from + 4 * place, 4);
    const uint16_t cast = bfloat16_of(bits);
    std::memcpy(run.to + 2 * place, &cast, 2);
  }
}

void slice_chunks(const SliceTable& table, int64_t begin, int64_t end) {
  const auto count = static_cast<int64_t>(table.entries.size());
  int64_t k = entry_of(table.entries.data(), count, begin);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    while (k + 1 < count && table.entries[static_cast<size_t>(k + 1)].first_chunk <= chunk) ++k;
    const Run run = run_of(table.entries[static_cast<size_t>(k)], chunk, table.from_bytes, table.to_bytes);
    if (table.casts)
      cast_elements(run);
    else
      copy_row(run.to, run.from, run.size * table.from_bytes);
  }
}

void copy_segments_cpu(std::vector<Tensor> sources, Tensor target, Tensor segments, int64_t /*stream*/) {
  const SegmentList list(sources, target, segments);
  if (torch::stable::get_num_threads() == 1 || list.bytes() < kGrain * kChunk) {
    for (int64_t k = 0; k < list.count(); ++k) copy_row(list.to(k), list.from(k), list.size(k));
    return;
  }
  copy_table(list.table());
}

void copy_slices_cpu(std::vector<Tensor> sources, std::vector<Tensor> targets, Tensor slices, int64_t /*stream*/) {
  const SliceTable table = slice_table(sources, targets, slices);
  if (table.chunks)
    torch::stable::parallel_for(0, table.chunks, kGrain,
                                [&](int64_t begin, int64_t end) { slice_chunks(table, begin, end); });
}

}  // namespace

void copy_table(const Table<Segment>& table) {
  if (torch::stable::get_num_threads() == 1 || table.bytes < kGrain * kChunk)
    copy_chunks(table, 0, table.chunks);
  else
    torch::stable::parallel_for(0, table.chunks, kGrain,
                                [&](int64_t begin, int64_t end) { copy_chunks(table, begin, end); });
}

}  // namespace spmd_rl

STABLE_TORCH_LIBRARY_IMPL(spmd_rl, CPU, library) {
  library.impl("copy_segments", TORCH_BOX(&spmd_rl::copy_segments_cpu));
  library.impl("copy_slices", TORCH_BOX(&spmd_rl::copy_slices_cpu));
}
