// Checked tables of what to copy, made from the tensors that Python passes. Host only.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
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

Table<Segment> segment_table(const std::vector<Tensor>& sources, const Tensor& target, const Tensor& segments);

struct SliceTable : Table<Slice> {
  int64_t from_bytes = 1;  // of an element
  int64_t to_bytes = 1;
  bool casts = false;  // float32 to bfloat16
};

SliceTable slice_table(const std::vector<Tensor>& sources, const std::vector<Tensor>& targets, const Tensor& slices);

}  // namespace spmd_rl
