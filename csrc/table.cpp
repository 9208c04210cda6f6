#include "table.h"

namespace spmd_rl {
namespace {

void check_index_table(const Tensor& table, int64_t rows, const char* name) {
  STD_TORCH_CHECK(table.is_cpu() && table.scalar_type() == ScalarType::Long && table.dim() == 2 &&
                      table.size(0) == rows && table.is_contiguous(),
                  name, " must be a contiguous int64 table of ", rows, " rows on the CPU");
}

// Whether count * each elements from `offset` on, the last one of rows `stride` apart, lie in [0, length).
bool inside(int64_t offset, int64_t stride, int64_t rows, int64_t columns, int64_t length) {
  if (offset < 0 || stride < 0 || columns > length) return false;
  if (rows > 1 && stride > length) return false;
  return offset <= length && (rows - 1) <= (length - columns) / (stride > 0 ? stride : 1) &&
         (rows - 1) * stride <= length - columns - offset;
}

}  // namespace

SegmentList::SegmentList(const std::vector<Tensor>& sources, const Tensor& target, const Tensor& segments)
    : from_(sources.size()) {
  check_index_table(segments, 4, "segments");
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Byte && target.is_contiguous(), "the target must be uint8");
  std::vector<int64_t> length(sources.size());
  for (size_t number = 0; number < sources.size(); ++number) {
    const Tensor& source = sources[number];
    STD_TORCH_CHECK(source.scalar_type() == ScalarType::Byte && source.is_contiguous(), "source ", number,
                    " must be uint8");
    STD_TORCH_CHECK(source.is_cpu() == target.is_cpu(), "source ", number, " and the target must be on one device");
    from_[number] = static_cast<const uint8_t*>(source.const_data_ptr());
    length[number] = source.numel();
  }
  to_ = static_cast<uint8_t*>(target.mutable_data_ptr());
  const int64_t room = target.numel(), known = static_cast<int64_t>(sources.size());
  count_ = segments.size(1);
  which_ = segments.const_data_ptr<int64_t>();
  begin_ = which_ + count_;
  place_ = begin_ + count_;
  size_ = place_ + count_;
  for (int64_t k = 0; k < count_; ++k) {
    STD_TORCH_CHECK(which_[k] >= 0 && which_[k] < known, "segment ", k, " names source ", which_[k], " of ", known);
    const int64_t held = length[static_cast<size_t>(which_[k])];
    STD_TORCH_CHECK(size_[k] >= 0 && begin_[k] >= 0 && begin_[k] <= held && size_[k] <= held - begin_[k],
                    "a range lies outside source ", which_[k], ": segment ", k);
    STD_TORCH_CHECK(place_[k] >= 0 && place_[k] <= room && size_[k] <= room - place_[k],
                    "a range lies outside the target: segment ", k);
    bytes_ += size_[k];
  }
}

Table<Segment> SegmentList::table() const {
  Table<Segment> table;
  table.entries.reserve(static_cast<size_t>(count_));
  for (int64_t k = 0; k < count_; ++k) {
    if (size_[k] == 0) continue;
    table.entries.push_back({from(k), to(k), size_[k], table.chunks});
    table.chunks += chunks_of(size_[k]);
  }
  table.bytes = bytes_;
  return table;
}

SliceTable slice_table(const std::vector<Tensor>& sources, const std::vector<Tensor>& targets, const Tensor& slices) {
  check_index_table(slices, 8, "slices");
  SliceTable table;
  if (sources.empty() || targets.empty()) {
    STD_TORCH_CHECK(slices.size(1) == 0, "slices without sources or targets");
    return table;
  }
  const ScalarType from_type = sources[0].scalar_type(), to_type = targets[0].scalar_type();
  for (const std::vector<Tensor>* side : {&sources, &targets})
    for (const Tensor& tensor : *side) {
      STD_TORCH_CHECK(tensor.scalar_type() == (side == &sources ? from_type : to_type),
                      "all sources must have one dtype, and all targets one");
      STD_TORCH_CHECK(tensor.is_contiguous() && tensor.is_cpu() == sources[0].is_cpu(),
                      "sources and targets must be contiguous and on one device");
    }
  table.casts = from_type == ScalarType::Float && to_type == ScalarType::BFloat16;
  STD_TORCH_CHECK(table.casts || from_type == to_type, "only float32 to bfloat16 is cast");
  table.from_bytes = static_cast<int64_t>(sources[0].element_size());
  table.to_bytes = static_cast<int64_t>(targets[0].element_size());

  const int64_t count = slices.size(1);
  const int64_t* source = slices.const_data_ptr<int64_t>();
  const int64_t *from = source + count, *from_stride = from + count, *target = from_stride + count;
  const int64_t *to = target + count, *to_stride = to + count, *rows = to_stride + count, *columns = rows + count;
  for (int64_t k = 0; k < count; ++k) {
    STD_TORCH_CHECK(source[k] >= 0 && source[k] < static_cast<int64_t>(sources.size()) && target[k] >= 0 &&
                        target[k] < static_cast<int64_t>(targets.size()),
                    "slice ", k, " names source ", source[k], " of ", sources.size(), ", target ", target[k], " of ",
                    targets.size());
    const Tensor& a = sources[static_cast<size_t>(source[k])];
    const Tensor& b = targets[static_cast<size_t>(target[k])];
    STD_TORCH_CHECK(rows[k] >= 0 && columns[k] >= 0, "slice ", k, " has a negative extent");
    if (rows[k] == 0 || columns[k] == 0) continue;
    STD_TORCH_CHECK(inside(from[k], from_stride[k], rows[k], columns[k], a.numel()), "slice ", k,
                    " lies outside its source");
    STD_TORCH_CHECK(inside(to[k], to_stride[k], rows[k], columns[k], b.numel()), "slice ", k,
                    " lies outside its target");
    Slice slice{static_cast<const uint8_t*>(a.const_data_ptr()) + from[k] * table.from_bytes,
                static_cast<uint8_t*>(b.mutable_data_ptr()) + to[k] * table.to_bytes,
                from_stride[k],
                to_stride[k],
                rows[k],
                columns[k],
                table.chunks};
    if (slice.from_stride == slice.columns && slice.to_stride == slice.columns) {  // rows without gaps are one row
      slice.columns *= slice.rows;
      slice.rows = 1;
    }
    table.entries.push_back(slice);
    table.chunks += slice.rows * slice_chunks_per_row(slice.columns, table.from_bytes);
    table.bytes += slice.rows * slice.columns * table.from_bytes;
  }
  return table;
}

}  // namespace spmd_rl
