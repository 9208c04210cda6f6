// Ragged rows of many columns that move as a whole: where each one lies, and the copy itself. Host only.

#include "table.h"

namespace spmd_rl {
namespace {

constexpr int64_t kAlign = 16;  // ALIGN in spmd_rl/ops/rows.py

struct Matrix {
  const int64_t* at;
  int64_t rows, columns;
  const int64_t* row(int64_t k) const { return at + k * columns; }
};

Matrix matrix(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long && tensor.dim() == 2 &&
                      tensor.is_contiguous(),
                  name, " must be a contiguous int64 matrix on the CPU");
  return {tensor.const_data_ptr<int64_t>(), tensor.size(0), tensor.size(1)};
}

const int64_t* vector(const Tensor& tensor, int64_t size, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long && tensor.dim() == 1 &&
                      tensor.is_contiguous() && tensor.numel() == size,
                  name, " must be a contiguous int64 vector of ", size, " on the CPU");
  return tensor.const_data_ptr<int64_t>();
}

std::tuple<Tensor, Tensor> lay_out_cpu(Tensor lengths, Tensor row_bytes, Tensor order, Tensor bins_of, int64_t bins) {
  const Matrix length = matrix(lengths, "lengths");
  const int64_t columns = length.columns, count = order.numel();
  const int64_t* bytes = vector(row_bytes, columns, "row_bytes");
  const int64_t* row = vector(order, count, "order");
  const int64_t* bin = vector(bins_of, count, "bins");
  STD_TORCH_CHECK(bins >= 0, "a negative number of bins");
  Tensor places = torch::stable::new_empty(lengths, {count, columns});
  Tensor starts = torch::stable::new_empty(lengths, {bins, columns + 1});
  int64_t* place = places.mutable_data_ptr<int64_t>();
  int64_t* start = starts.mutable_data_ptr<int64_t>();
  for (int64_t k = 0; k < bins * (columns + 1); ++k) start[k] = 0;
  for (int64_t k = 0; k < count; ++k) {
    STD_TORCH_CHECK(row[k] >= 0 && row[k] < length.rows, "order names row ", row[k], " of ", length.rows);
    STD_TORCH_CHECK(bin[k] < bins, "bin ", bin[k], " of ", bins);
    if (bin[k] < 0) continue;
    const int64_t* held = length.row(row[k]);
    int64_t* total = start + bin[k] * (columns + 1);
    for (int64_t c = 0; c < columns; ++c) total[c] += held[c] * bytes[c];
  }
  for (int64_t b = 0; b < bins; ++b) {
    int64_t *total = start + b * (columns + 1), begin = 0;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t size = total[c];
      total[c] = begin;
      begin += (size + kAlign - 1) / kAlign * kAlign;
    }
    total[columns] = begin;
  }
  std::vector<int64_t> next(start, start + bins * (columns + 1));
  for (int64_t k = 0; k < count; ++k) {
    const int64_t* held = length.row(row[k]);
    int64_t* cursor = bin[k] < 0 ? nullptr : next.data() + bin[k] * (columns + 1);
    for (int64_t c = 0; c < columns; ++c) {
      place[k * columns + c] = cursor ? cursor[c] : -1;
      if (cursor) cursor[c] += held[c] * bytes[c];
    }
  }
  return {places, starts};
}

// A column or a target as plain memory.
const uint8_t* memory(const Tensor& tensor, const char* name, size_t number) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(), name, " ", number, " must be contiguous, on the CPU");
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

int64_t size_of(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

void deliver_cpu(std::vector<Tensor> columns, std::vector<Tensor> targets, Tensor lengths, Tensor row_bytes,
                 Tensor target_of, Tensor places) {
  const Matrix length = matrix(lengths, "lengths"), place = matrix(places, "places");
  const int64_t* bytes = vector(row_bytes, length.columns, "row_bytes");
  const int64_t* target = vector(target_of, length.rows, "targets");
  STD_TORCH_CHECK(place.rows == length.rows && place.columns == length.columns &&
                      length.columns == static_cast<int64_t>(columns.size()),
                  "lengths, places and columns do not belong together");
  std::vector<uint8_t*> to(targets.size());
  for (size_t n = 0; n < targets.size(); ++n) to[n] = const_cast<uint8_t*>(memory(targets[n], "target", n));
  const auto known = static_cast<int64_t>(targets.size());
  Table<Segment> table;
  table.entries.reserve(static_cast<size_t>(length.rows * length.columns));
  for (size_t number = 0; number < columns.size(); ++number) {  // each column is read from end to end
    const auto c = static_cast<int64_t>(number);
    const uint8_t* from = memory(columns[number], "column", number);
    const int64_t held = size_of(columns[number]);
    int64_t begin = 0;
    for (int64_t s = 0; s < length.rows; ++s) {
      const int64_t size = length.row(s)[c] * bytes[c], at = place.row(s)[c];
      STD_TORCH_CHECK(size >= 0 && size <= held - begin, "row ", s, " lies outside column ", c);
      STD_TORCH_CHECK(target[s] < known, "row ", s, " goes to target ", target[s], " of ", known);
      if (target[s] >= 0 && size > 0) {
        const int64_t room = size_of(targets[static_cast<size_t>(target[s])]);
        STD_TORCH_CHECK(at >= 0 && at <= room && size <= room - at, "row ", s, " of column ", c,
                        " lies outside target ", target[s]);
        table.entries.push_back({from + begin, to[static_cast<size_t>(target[s])] + at, size, table.chunks});
        table.chunks += chunks_of(size);
        table.bytes += size;
      }
      begin += size;
    }
  }
  copy_table(table);
}

}  // namespace
}  // namespace spmd_rl

STABLE_TORCH_LIBRARY_IMPL(spmd_rl, CPU, library) {
  library.impl("lay_out", TORCH_BOX(&spmd_rl::lay_out_cpu));
  library.impl("deliver", TORCH_BOX(&spmd_rl::deliver_cpu));
}
