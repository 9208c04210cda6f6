// Index arithmetic shared by the CPU loops and the CUDA kernels. Nothing here knows torch or CUDA: the host tests run
// the very functions that a GPU would run, lane by lane.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SPMD_RL_BOTH __host__ __device__ __forceinline__
#else
#define SPMD_RL_BOTH inline
#endif

namespace spmd_rl {

// Work is dealt out in chunks: at most so many bytes, copied by one warp (or one turn of a CPU thread).
constexpr int64_t kChunk = 4096;
constexpr int kLanes = 32;

SPMD_RL_BOTH int64_t chunks_of(int64_t bytes) { return (bytes + kChunk - 1) / kChunk; }

// One byte range to copy. first_chunk: number of chunks of all segments before it.
struct Segment {
  const uint8_t* from;
  uint8_t* to;
  int64_t size;
  int64_t first_chunk;
};

// `rows` rows of `columns` elements each; strides and columns in elements. first_chunk: of all slices before it.
struct Slice {
  const uint8_t* from;
  uint8_t* to;
  int64_t from_stride;
  int64_t to_stride;
  int64_t rows;
  int64_t columns;
  int64_t first_chunk;
};

// The last entry whose first chunk is not behind `chunk`. Entries without chunks must not be in the table.
template <typename Entry>
SPMD_RL_BOTH int64_t entry_of(const Entry* table, int64_t count, int64_t chunk) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (table[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// A consecutive run of bytes (segments) or elements (slices) that one warp copies.
struct Run {
  const uint8_t* from;
  uint8_t* to;
  int64_t size;
};

SPMD_RL_BOTH Run run_of(const Segment& segment, int64_t chunk) {
  const int64_t offset = (chunk - segment.first_chunk) * kChunk;
  const int64_t left = segment.size - offset;
  return {segment.from + offset, segment.to + offset, left < kChunk ? left : kChunk};
}

// Elements of one chunk of a slice's row, so that neither side exceeds kChunk bytes by much.
SPMD_RL_BOTH int64_t slice_chunks_per_row(int64_t columns, int64_t from_bytes) { return chunks_of(columns * from_bytes); }

SPMD_RL_BOTH Run run_of(const Slice& slice, int64_t chunk, int64_t from_bytes, int64_t to_bytes) {
  const int64_t per_row = slice_chunks_per_row(slice.columns, from_bytes);
  const int64_t local = chunk - slice.first_chunk;
  const int64_t row = local / per_row;
  const int64_t column = (local % per_row) * (kChunk / from_bytes);
  const int64_t left = slice.columns - column;
  const int64_t most = kChunk / from_bytes;
  return {slice.from + (row * slice.from_stride + column) * from_bytes,
          slice.to + (row * slice.to_stride + column) * to_bytes, left < most ? left : most};
}

// A unit of memory access. It may stand for the bytes of any other type (GCC's strict aliasing).
#define SPMD_RL_WORD(bytes) __attribute__((may_alias, aligned(bytes)))
template <int Width>
struct Word;
template <>
struct SPMD_RL_WORD(16) Word<16> {
  uint32_t part[4];
};
template <>
struct SPMD_RL_WORD(8) Word<8> {
  uint32_t part[2];
};
template <>
struct SPMD_RL_WORD(4) Word<4> {
  uint32_t part[1];
};
template <>
struct SPMD_RL_WORD(2) Word<2> {
  uint16_t part[1];
};
template <>
struct SPMD_RL_WORD(1) Word<1> {
  uint8_t part[1];
};

// How a run is cut for accesses of `width` bytes: single bytes until `to` is aligned, whole words, single bytes.
struct Cut {
  int64_t head;
  int64_t words;
  int width;
};

SPMD_RL_BOTH Cut cut_of(const Run& run) {
  const uintptr_t apart = reinterpret_cast<uintptr_t>(run.from) ^ reinterpret_cast<uintptr_t>(run.to);
  const int width = (apart & 15) == 0 ? 16 : (apart & 7) == 0 ? 8 : (apart & 3) == 0 ? 4 : (apart & 1) == 0 ? 2 : 1;
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(run.to) & (width - 1));
  if (head > run.size) head = run.size;
  return {head, (run.size - head) / width, width};
}

// Lane `lane` of kLanes copies its part of the words; four loads are under way before the first store.
template <int Width>
SPMD_RL_BOTH void copy_words(const uint8_t* from, uint8_t* to, int64_t words, int lane) {
  const auto* source = reinterpret_cast<const Word<Width>*>(from);
  auto* target = reinterpret_cast<Word<Width>*>(to);
  int64_t place = lane;
  for (; place + 3 * kLanes < words; place += 4 * kLanes) {
    const Word<Width> a = source[place];
    const Word<Width> b = source[place + kLanes];
    const Word<Width> c = source[place + 2 * kLanes];
    const Word<Width> d = source[place + 3 * kLanes];
    target[place] = a;
    target[place + kLanes] = b;
    target[place + 2 * kLanes] = c;
    target[place + 3 * kLanes] = d;
  }
  for (; place < words; place += kLanes) target[place] = source[place];
}

// Lane `lane` of kLanes copies its part of a run of bytes. Together the lanes write every byte exactly once.
SPMD_RL_BOTH void copy_run(const Run& run, int lane) {
  const Cut cut = cut_of(run);
  for (int64_t place = lane; place < cut.head; place += kLanes) run.to[place] = run.from[place];
  const uint8_t* from = run.from + cut.head;
  uint8_t* to = run.to + cut.head;
  switch (cut.width) {
    case 16: copy_words<16>(from, to, cut.words, lane); break;
    case 8: copy_words<8>(from, to, cut.words, lane); break;
    case 4: copy_words<4>(from, to, cut.words, lane); break;
    case 2: copy_words<2>(from, to, cut.words, lane); break;
    default: copy_words<1>(from, to, cut.words, lane); break;
  }
  for (int64_t place = cut.head + cut.words * cut.width + lane; place < run.size; place += kLanes)
    run.to[place] = run.from[place];
}

// float32 to bfloat16, to the nearest, ties to even; NaN stays NaN.
SPMD_RL_BOTH uint16_t bfloat16_of(uint32_t bits) {
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded >> 16);
}

// Lane `lane` of kLanes casts its part of a run of run.size elements. Four at a time where both sides allow it.
SPMD_RL_BOTH void cast_run(const Run& run, int lane) {
  const auto* from = reinterpret_cast<const Word<4>*>(run.from);
  auto* to = reinterpret_cast<Word<2>*>(run.to);
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(run.from) & 15) / 4;
  if (head > run.size) head = run.size;
  const bool wide = (reinterpret_cast<uintptr_t>(to + head) & 7) == 0;
  const int64_t quads = wide ? (run.size - head) / 4 : 0;
  for (int64_t place = lane; place < head; place += kLanes) to[place].part[0] = bfloat16_of(from[place].part[0]);
  const auto* sources = reinterpret_cast<const Word<16>*>(from + head);
  auto* targets = reinterpret_cast<Word<8>*>(to + head);
  for (int64_t place = lane; place < quads; place += kLanes) {
    const Word<16> four = sources[place];
    Word<8> packed;
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = bfloat16_of(four.part[2 * half]), high = bfloat16_of(four.part[2 * half + 1]);
      packed.part[half] = low | (high << 16);
    }
    targets[place] = packed;
  }
  for (int64_t place = head + 4 * quads + lane; place < run.size; place += kLanes)
    to[place].part[0] = bfloat16_of(from[place].part[0]);
}

}  // namespace spmd_rl
