// Which slot gets which sample. The same steps, and the same numbers, as `divide_reference` in spmd_rl/data/assignment.py.
// Host only.

#include <algorithm>
#include <cmath>

#include "partition.h"
#include "table.h"

namespace spmd_rl {
namespace {

const int64_t* integers(const Tensor& tensor, int64_t size, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous() &&
                      tensor.numel() == size,
                  name, " must be ", size, " contiguous int64 on the CPU");
  return tensor.const_data_ptr<int64_t>();
}

struct Sample {
  int64_t epoch, prompt, number;  // its identity
  int64_t row;

  bool operator<(const Sample& that) const {
    if (epoch != that.epoch) return epoch < that.epoch;
    if (prompt != that.prompt) return prompt < that.prompt;
    if (number != that.number) return number < that.number;
    return row < that.row;
  }
  bool one_group(const Sample& that) const { return epoch == that.epoch && prompt == that.prompt; }
};

double imbalance(const std::vector<double>& costs, const int64_t* slot, int64_t slots) {
  std::vector<double> loads(static_cast<size_t>(slots), 0.0);
  for (size_t k = 0; k < costs.size(); ++k) loads[static_cast<size_t>(slot[k])] += costs[k];
  double sum = 0.0;
  for (const double load : loads) sum += load;
  const double mean = sum / static_cast<double>(slots);
  return mean > 0 ? *std::max_element(loads.begin(), loads.end()) / mean : 1.0;
}

// Whether items that stay in `slot` are as evenly spread as equal counts ask for.
bool even(const std::vector<int64_t>& slot, int64_t slots) {
  std::vector<int64_t> counts(static_cast<size_t>(slots), 0);
  for (const int64_t s : slot) ++counts[static_cast<size_t>(s)];
  const auto ends = std::minmax_element(counts.begin(), counts.end());
  return *ends.second - *ends.first <= 1;
}

std::tuple<Tensor, Tensor, Tensor> divide_cpu(Tensor ids, Tensor source, Tensor lengths, double linear,
                                              double quadratic, bool keep_groups, bool equal_counts, double slack,
                                              bool may_stay, int64_t source_slots, int64_t slots) {
  const int64_t count = source.numel();
  const auto size = static_cast<size_t>(count);
  const int64_t* id = integers(ids, 3 * count, "ids");
  const int64_t* from = integers(source, count, "source");
  const int64_t* length = integers(lengths, count, "lengths");
  STD_TORCH_CHECK(slots >= 1 && source_slots >= 1, "at least one slot is needed");

  std::vector<Sample> samples(size);
  for (int64_t row = 0; row < count; ++row)
    samples[static_cast<size_t>(row)] = {id[3 * row], id[3 * row + 1], id[3 * row + 2], row};
  std::sort(samples.begin(), samples.end());

  Tensor orders = torch::stable::new_empty(source, {count}), slots_of = torch::stable::new_empty(source, {count});
  Tensor figures = torch::stable::new_empty(source, {3}, ScalarType::Double);
  int64_t *order = orders.mutable_data_ptr<int64_t>(), *slot = slots_of.mutable_data_ptr<int64_t>();
  double* figure = figures.mutable_data_ptr<double>();
  figure[2] = -1.0;
  std::vector<double> costs(size);
  std::vector<int64_t> here(size), item(size), first;  // item: number of the group, or of the sample
  for (size_t k = 0; k < size; ++k) {
    const Sample& sample = samples[k];
    const int64_t row = sample.row;
    STD_TORCH_CHECK(from[row] >= 0 && from[row] < source_slots, "sample ", row, " lies in slot ", from[row], " of ",
                    source_slots);
    if (k > 0 && sample.one_group(samples[k - 1]) && sample.number == samples[k - 1].number && figure[2] < 0)
      figure[2] = static_cast<double>(k - 1);
    order[k] = row;
    here[k] = from[row];
    const auto tokens = static_cast<double>(length[row]);
    costs[k] = linear * tokens + quadratic * (tokens * tokens);
    STD_TORCH_CHECK(costs[k] >= 0 && std::isfinite(costs[k]), "costs must be finite and not negative");
    if (k == 0 || !keep_groups || !sample.one_group(samples[k - 1])) first.push_back(static_cast<int64_t>(k));
    item[k] = static_cast<int64_t>(first.size()) - 1;
  }
  figure[0] = imbalance(costs, here.data(), source_slots);

  bool stays = may_stay && figure[0] <= slack;
  std::vector<int64_t> places(first.size());  // where each item is, if it is in one piece
  for (size_t n = 0; n < first.size(); ++n) places[n] = here[static_cast<size_t>(first[n])];
  for (size_t k = 0; stays && k < size; ++k) stays = places[static_cast<size_t>(item[k])] == here[k];
  if (stays && equal_counts) stays = even(places, source_slots);
  if (!stays) {
    std::vector<double> item_costs(first.size(), 0.0);
    for (size_t k = 0; k < size; ++k) item_costs[static_cast<size_t>(item[k])] += costs[k];
    partition(item_costs.data(), static_cast<int64_t>(places.size()), slots, equal_counts, places.data());
  }
  for (size_t k = 0; k < size; ++k) slot[k] = stays ? here[k] : places[static_cast<size_t>(item[k])];
  figure[1] = imbalance(costs, slot, slots);
  return {orders, slots_of, figures};
}

}  // namespace
}  // namespace spmd_rl

STABLE_TORCH_LIBRARY_IMPL(spmd_rl, CPU, library) { library.impl("divide", TORCH_BOX(&spmd_rl::divide_cpu)); }
