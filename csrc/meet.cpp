// Ranks of one machine meet at a counter in memory that they share: a barrier of a few microseconds, without sockets.

#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "table.h"

namespace {

using Clock = std::chrono::steady_clock;
using Counter = std::atomic<uint32_t>;
static_assert(sizeof(Counter) == sizeof(int32_t) && Counter::is_always_lock_free, "the counter is a futex word");

constexpr std::chrono::microseconds kEager{50};  // the others are usually close: sleeping and waking costs as much

// Sleeps until the counter is no longer `seen`, is woken, or `left` has passed.
void sleep_while(Counter& counter, uint32_t seen, std::chrono::nanoseconds left) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  const timespec limit{static_cast<time_t>(seconds.count()), static_cast<long>((left - seconds).count())};
  syscall(SYS_futex, &counter, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

// Counts the caller in and waits until `expected` have come since the counter was 0 (modulo 2^32); false: too late.
bool meet(Counter& counter, uint32_t expected, std::chrono::nanoseconds limit) {
  // Release: what this rank wrote before is seen by whoever sees its arrival. Acquire: and the other way round.
  uint32_t seen = counter.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (seen == expected) {
    syscall(SYS_futex, &counter, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    return true;
  }
  const auto begun = Clock::now();
  while (static_cast<int32_t>(seen - expected) < 0) {  // others may have gone on to the next meeting
    const auto waited = Clock::now() - begun;
    if (waited >= limit) return false;
    if (waited < kEager)
      sched_yield();
    else
      sleep_while(counter, seen, limit - waited);
    seen = counter.load(std::memory_order_acquire);
  }
  return true;
}

bool meet_op(torch::stable::Tensor counter, int64_t expected, double seconds) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(counter.scalar_type() == ScalarType::Int && counter.numel() == 1, "counter must be one int32");
  STD_TORCH_CHECK(seconds >= 0 && seconds < 1e9, "a time limit of ", seconds, " s");
  const auto limit = std::chrono::nanoseconds(static_cast<int64_t>(1e9 * seconds));
  auto* word = reinterpret_cast<Counter*>(counter.mutable_data_ptr<int32_t>());
  return meet(*word, static_cast<uint32_t>(expected), limit);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spmd_rl, CPU, library) { library.impl("meet", TORCH_BOX(&meet_op)); }
