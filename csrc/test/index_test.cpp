// Runs the index functions exactly as the CUDA kernels do, warp by warp and lane by lane, on random tables. Built with
// the address and undefined-behaviour sanitizers: an access out of bounds or misaligned ends the program, a byte that
// is written twice, not at all, or outside its range is found here.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../index.h"
#include "../partition.h"

using namespace spmd_rl;

namespace {

std::mt19937_64 random_engine;

int64_t between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random_engine() % static_cast<uint64_t>(high - low + 1));
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Memory of its own, so that the address sanitizer knows where it ends; `shift` sets its alignment.
struct Block {
  std::vector<uint8_t> memory;
  int64_t shift;
  Block(int64_t size, int64_t offset) : memory(static_cast<size_t>(size + offset)), shift(offset) {
    for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random_engine());
  }
  uint8_t* data() { return memory.data() + shift; }
};

int64_t some_size() {
  const int64_t kind = between(0, 5);
  return kind == 0 ? between(1, 3) : kind == 1 ? between(1, 40) : kind == 2 ? between(1, 3) * kChunk : between(1, 9000);
}

template <typename Entry, typename Copy>
void for_each_warp(const std::vector<Entry>& table, int64_t chunks, Copy copy) {
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto count = static_cast<int64_t>(table.size());
    const int64_t k = entry_of(table.data(), count, chunk);
    require(table[static_cast<size_t>(k)].first_chunk <= chunk, "entry begins behind the chunk");
    require(k + 1 == count || table[static_cast<size_t>(k + 1)].first_chunk > chunk, "entry ends before the chunk");
    for (int lane = 0; lane < kLanes; ++lane) copy(table[static_cast<size_t>(k)], chunk, lane);
  }
}

void segments_once() {
  const int64_t room = between(1, 60000);
  Block source(room, between(0, 31)), target(room, between(0, 31));
  const std::vector<uint8_t> before = target.memory;
  std::vector<uint8_t> want = before;
  std::vector<Segment> table;
  int64_t place = 0, chunks = 0;
  while (true) {
    place += between(0, 3);
    const int64_t size = some_size();
    if (place + size > room) break;
    const int64_t begin = between(0, room - size);
    table.push_back({source.data() + begin, target.data() + place, size, chunks});
    std::memcpy(want.data() + target.shift + place, source.data() + begin, static_cast<size_t>(size));
    chunks += chunks_of(size);
    place += size;
  }
  if (table.empty()) return;
  for_each_warp(table, chunks, [](const Segment& entry, int64_t chunk, int lane) { copy_run(run_of(entry, chunk), lane); });
  require(target.memory == want, "segments: wrong bytes");
}

// Every byte of a run is written by exactly one lane: each lane alone, onto a canvas of marks.
void lanes_share_a_run() {
  const int64_t size = between(0, 700);
  Block source(size, between(0, 31)), target(size, between(0, 31));
  std::vector<int> writers(static_cast<size_t>(size), 0);
  for (int64_t n = 0; n < size; ++n) source.data()[n] = 1;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int64_t n = 0; n < size; ++n) target.data()[n] = 0;
    copy_run({source.data(), target.data(), size}, lane);
    for (int64_t n = 0; n < size; ++n) writers[static_cast<size_t>(n)] += target.data()[n];
  }
  for (const int count : writers) require(count == 1, "a byte is written by none or several lanes");
}

void slices_once(int64_t from_bytes, int64_t to_bytes) {
  const bool casts = from_bytes != to_bytes;
  const int64_t room = between(64, 30000);
  Block source(room * from_bytes, from_bytes * between(0, 7)), target(room * to_bytes, to_bytes * between(0, 7));
  std::vector<uint8_t> want = target.memory;
  std::vector<Slice> table;
  int64_t place = 0, chunks = 0;
  for (int turn = 0; turn < 6; ++turn) {
    const int64_t rows = between(1, 5), columns = between(1, room / 8);
    const int64_t from_stride = columns + between(0, 5), to_stride = columns + between(0, 5);
    const int64_t from_span = (rows - 1) * from_stride + columns, to_span = (rows - 1) * to_stride + columns;
    if (from_span > room || place + to_span > room) continue;
    const int64_t begin = between(0, room - from_span);
    table.push_back({source.data() + begin * from_bytes, target.data() + place * to_bytes, from_stride, to_stride, rows,
                     columns, chunks});
    chunks += rows * slice_chunks_per_row(columns, from_bytes);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; ++column) {
        const uint8_t* from = source.data() + (begin + row * from_stride + column) * from_bytes;
        uint8_t* to = want.data() + target.shift + (place + row * to_stride + column) * to_bytes;
        if (casts) {
          uint32_t bits;
          std::memcpy(&bits, from, 4);
          const uint16_t half = bfloat16_of(bits);
          std::memcpy(to, &half, 2);
        } else {
          std::memcpy(to, from, static_cast<size_t>(to_bytes));
        }
      }
    place += to_span + between(0, 3);
  }
  if (table.empty()) return;
  for_each_warp(table, chunks, [&](const Slice& entry, int64_t chunk, int lane) {
    Run run = run_of(entry, chunk, from_bytes, to_bytes);
    if (casts) {
      cast_run(run, lane);
    } else {
      run.size *= from_bytes;
      copy_run(run, lane);
    }
  });
  require(target.memory == want, "slices: wrong bytes");
}

void partition_once() {
  const int64_t items = between(0, 300), slots = between(1, 20);
  const bool equal_counts = between(0, 1) == 1;
  std::vector<double> costs(static_cast<size_t>(items)), loads(static_cast<size_t>(slots), 0.0);
  std::vector<int64_t> slot_of(static_cast<size_t>(items), -1), counts(static_cast<size_t>(slots), 0);
  double total = 0, largest = 0;
  for (double& cost : costs) {
    cost = std::floor(std::exp(static_cast<double>(between(0, 8000)) / 1000.0)) - 1;
    total += cost;
    largest = std::fmax(largest, cost);
  }
  partition(costs.data(), items, slots, equal_counts, slot_of.data());
  for (int64_t item = 0; item < items; ++item) {
    const int64_t slot = slot_of[static_cast<size_t>(item)];
    require(slot >= 0 && slot < slots, "an item has no slot");
    loads[static_cast<size_t>(slot)] += costs[static_cast<size_t>(item)];
    ++counts[static_cast<size_t>(slot)];
  }
  for (const double load : loads)  // longest first never exceeds the mean by more than one item
    require(equal_counts || load <= total / static_cast<double>(slots) + largest + 1e-9, "a slot is overloaded");
  for (const int64_t count : counts)
    require(!equal_counts || (count >= items / slots && count <= (items + slots - 1) / slots), "unequal counts");
}

}  // namespace

int main(int argc, char** argv) {
  const int turns = argc > 1 ? std::atoi(argv[1]) : 200;
  for (int turn = 0; turn < turns; ++turn) {
    random_engine.seed(static_cast<uint64_t>(turn));
    segments_once();
    lanes_share_a_run();
    for (const int64_t bytes : {1, 2, 4, 8}) slices_once(bytes, bytes);
    slices_once(4, 2);
    partition_once();
  }
  std::printf("%d turns passed\n", turns);
}
