// memcpy for ragged rows. The C library's switches to a string instruction from about a kilobyte on, which is made for
// megabytes: rows of one to sixteen kilobytes then take half as long again. Host only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define SPMD_RL_AVX2
#endif

namespace spmd_rl {

#ifdef SPMD_RL_AVX2
// At least 64 bytes. The last block may overlap the one before: it writes the same bytes again.
__attribute__((target("avx2"))) inline void copy_avx2(uint8_t* to, const uint8_t* from, size_t size) {
  const size_t last = size - 64;
  for (size_t place = 0;; place = place + 64 < last ? place + 64 : last) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + place));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + place + 32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + place), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + place + 32), high);
    if (place == last) return;
  }
}

// The same past the caches: memory that is only written need not be read first. At least 128 bytes.
__attribute__((target("avx2"))) inline void stream_avx2(uint8_t* to, const uint8_t* from, size_t size) {
  const size_t head = static_cast<size_t>(-reinterpret_cast<uintptr_t>(to) & 63);
  copy_avx2(to, from, 64);
  size_t place = head;
  for (; place + 64 <= size; place += 64) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + place));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + place + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + place), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + place + 32), high);
  }
  if (place < size) copy_avx2(to + size - 64, from + size - 64, 64);
}
#endif

constexpr size_t kLongRow = 1 << 18;  // from here on the C library's way is the faster one

inline void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
#ifdef SPMD_RL_AVX2
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2 && size >= 64 && size < kLongRow) return copy_avx2(to, from, size);
#endif
  std::memcpy(to, from, size);
}

constexpr size_t kStreamedRow = 1 << 13;  // shorter ones are slower past the caches than through them

// A row of so many that the caches cannot hold them. `finish_streaming` makes what was written seen by others.
inline void stream_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
#ifdef SPMD_RL_AVX2
  static const bool avx2 = __builtin_cpu_supports("avx2");
  const auto size = static_cast<size_t>(bytes);
  if (avx2 && size >= kStreamedRow) return stream_avx2(to, from, size);
#endif
  copy_row(to, from, bytes);
}

inline void finish_streaming() {
#ifdef SPMD_RL_AVX2
  _mm_sfence();
#endif
}

}  // namespace spmd_rl
