// Checked tables of what to copy, made from the tensors that Python passes. Host only.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "index.h"

namespace spmd_rl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename Entry>
struct Table {
  std::vector<Entry> entries;
  int64_t chunks = 0;
  int64_t bytes = 0;  // that are read
};

// On the CPU; by several threads where torch has them and there is enough to do.
void copy_table(const Table<Segment>& table);

// The segments as they were passed, checked to lie inside their tensors.
class SegmentList {
 public:
  SegmentList(const std::vector<Tensor>& sources, const Tensor& target, const Tensor& segments);
  int64_t count() const { return count_; }
  int64_t bytes() const { return bytes_; }
  const uint8_t* from(int64_t k) const { return from_[static_cast<size_t>(which_[k])] + begin_[k]; }
  uint8_t* to(int64_t k) const { return to_ + place_[k]; }
  int64_t size(int64_t k) const { return size_[k]; }
  Table<Segment> table() const;

 private:
  std::vector<const uint8_t*> from_;
  uint8_t* to_;
  int64_t count_, bytes_ = 0;
  const int64_t *which_, *begin_, *place_, *size_;  // rows of the tensor `segments`
};

struct SliceTable : Table<Slice> {
  int64_t from_bytes = 1;  // of an element
  int64_t to_bytes = 1;
  bool casts = false;  // float32 to bfloat16
};

SliceTable slice_table(const std::vector<Tensor>& sources, const std::vector<Tensor>& targets, const Tensor& slices);

}  // namespace spmd_rl
