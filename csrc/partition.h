// Divide items of known cost among slots, the largest slot as small as a good heuristic gets it. Host only.
#pragma once

#include <cstdint>

namespace spmd_rl {

// slot_of[n] = slot of item n; costs: finite, >= 0. The same numbers as `partition_reference` in spmd_rl/ops: every
// floating-point sum is made in the same order.
void partition(const double* costs, int64_t items, int64_t slots, bool equal_counts, int64_t* slot_of);

}  // namespace spmd_rl
