#include "partition.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#ifndef SPMD_RL_WITHOUT_TORCH
#include "table.h"
#endif

namespace spmd_rl {
namespace {

constexpr double kGoodEnough = 1.0002;  // GOOD_ENOUGH in spmd_rl/ops/partition.py

struct Key {
  uint64_t bits;
  int64_t item;
};

// Items by falling cost, equal ones by rising number: radix sort of the bits, which for doubles >= 0 are ordered as
// the numbers are. Bytes that are the same everywhere (most, for small whole numbers) cost no pass.
std::vector<Key> by_falling_cost(const double* costs, int64_t items) {
  std::vector<Key> keys(static_cast<size_t>(items)), other(static_cast<size_t>(items));
  std::vector<std::array<int64_t, 256>> counts(8);
  for (auto& histogram : counts) histogram.fill(0);
  for (int64_t item = 0; item < items; ++item) {
    const double cost = costs[item] + 0.0;  // -0.0 becomes 0.0
    uint64_t bits;
    std::memcpy(&bits, &cost, sizeof bits);
    bits = ~bits;
    keys[static_cast<size_t>(item)] = {bits, item};
    for (size_t byte = 0; byte < 8; ++byte) ++counts[byte][(bits >> (8 * byte)) & 255];
  }
  for (size_t byte = 0; byte < 8; ++byte) {
    auto& histogram = counts[byte];
    if (items == 0 || histogram[(keys[0].bits >> (8 * byte)) & 255] == items) continue;
    int64_t before = 0;
    for (int64_t& count : histogram) before += std::exchange(count, before);
    for (const Key& key : keys) other[static_cast<size_t>(histogram[(key.bits >> (8 * byte)) & 255]++)] = key;
    keys.swap(other);
  }
  return keys;
}

struct Slot {
  double load;
  int64_t count;
  int64_t number;

  bool operator<(const Slot& that) const {
    if (load != that.load) return load < that.load;
    if (count != that.count) return count < that.count;
    return number < that.number;
  }
};

// A heap with the least slot on top, whose top can be changed in place.
class LeastFirst {
 public:
  explicit LeastFirst(int64_t slots) {
    for (int64_t slot = 0; slot < slots; ++slot) heap_.push_back({0.0, 0, slot});
  }
  Slot& top() { return heap_.front(); }
  void drop_top() {
    heap_.front() = heap_.back();
    heap_.pop_back();
    sink();
  }
  void sink() {
    size_t hole = 0;
    if (heap_.empty()) return;
    const Slot moved = heap_[0];
    for (size_t child = 1; child < heap_.size(); child = 2 * hole + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < moved)) break;
      heap_[hole] = heap_[child];
      hole = child;
    }
    heap_[hole] = moved;
  }

 private:
  std::vector<Slot> heap_;
};

using Members = std::vector<std::vector<int64_t>>;

void exchange_pairs(const double* costs, std::vector<double>& loads, Members& members, bool equal_counts) {
  const size_t slots = loads.size();
  double sum = 0.0;
  for (const double load : loads) sum += load;
  const double mean = sum / static_cast<double>(slots);
  for (size_t turn = 0; turn < 2 * slots; ++turn) {
    size_t high = 0, low = 0;
    for (size_t slot = 1; slot < slots; ++slot) {
      if (loads[slot] > loads[high]) high = slot;
      if (loads[slot] < loads[low]) low = slot;
    }
    const double gap = loads[high] - loads[low];
    if (loads[high] <= kGoodEnough * mean) return;
    auto &giving = members[high], &taking = members[low];
    double best = gap;
    int64_t give = -1, take = -1;
    for (size_t place = 0; place < giving.size(); ++place) {
      const double cost = costs[giving[place]];
      for (int64_t other = equal_counts ? 0 : -1; other < static_cast<int64_t>(taking.size()); ++other) {
        const double moved = cost - (other >= 0 ? costs[taking[static_cast<size_t>(other)]] : 0.0);
        const double off = std::fabs(gap - 2 * moved);
        if (off < best) {
          best = off;
          give = static_cast<int64_t>(place);
          take = other;
        }
      }
    }
    if (give < 0) return;
    const int64_t item = giving[static_cast<size_t>(give)];
    giving.erase(giving.begin() + give);
    double moved = costs[item];
    if (take >= 0) {
      const int64_t back = taking[static_cast<size_t>(take)];
      taking.erase(taking.begin() + take);
      moved -= costs[back];
      giving.push_back(back);
    }
    taking.push_back(item);
    loads[high] -= moved;
    loads[low] += moved;
  }
}

}  // namespace

void partition(const double* costs, int64_t items, int64_t slots, bool equal_counts, int64_t* slot_of) {
  const int64_t least = items / slots;
  int64_t extra = items % slots;
  std::vector<double> loads(static_cast<size_t>(slots), 0.0);
  Members members(static_cast<size_t>(slots));
  for (auto& list : members) list.reserve(static_cast<size_t>(least + least / 8 + 1));
  LeastFirst heap(slots);
  for (const Key& key : by_falling_cost(costs, items)) {
    while (equal_counts && heap.top().count >= least + (extra > 0)) heap.drop_top();
    Slot& slot = heap.top();
    if (slot.count == least) --extra;
    slot.load += costs[key.item];
    ++slot.count;
    loads[static_cast<size_t>(slot.number)] = slot.load;
    members[static_cast<size_t>(slot.number)].push_back(key.item);
    heap.sink();
  }
  exchange_pairs(costs, loads, members, equal_counts);
  for (int64_t slot = 0; slot < slots; ++slot)
    for (const int64_t item : members[static_cast<size_t>(slot)]) slot_of[item] = slot;
}

}  // namespace spmd_rl

#ifndef SPMD_RL_WITHOUT_TORCH
namespace {

torch::stable::Tensor partition_op(torch::stable::Tensor costs, int64_t slots, bool equal_counts) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(costs.scalar_type() == ScalarType::Double && costs.dim() == 1 && costs.is_contiguous(),
                  "costs must be a contiguous float64 vector");
  STD_TORCH_CHECK(slots >= 1, "at least one slot is needed, not ", slots);
  const double* values = costs.const_data_ptr<double>();
  for (int64_t item = 0; item < costs.numel(); ++item)
    STD_TORCH_CHECK(values[item] >= 0 && std::isfinite(values[item]), "cost ", item, " is negative or not finite");
  auto slot_of = torch::stable::new_empty(costs, {costs.numel()}, ScalarType::Long);
  spmd_rl::partition(values, costs.numel(), slots, equal_counts, slot_of.mutable_data_ptr<int64_t>());
  return slot_of;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spmd_rl, CPU, library) { library.impl("partition", TORCH_BOX(&partition_op)); }
#endif
