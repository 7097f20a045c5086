// SPDX-License-Identifier: Apache-2.0
#pragma once
// How far one core reads and multiplies at the same time: the least a decode kernel could do. Every value of
// a block is loaded once, widened where it is 16 bits wide, and multiplied into as many independent sums as
// there are query heads; lines are asked for some way ahead, across the borders of blocks. No softmax, no
// tables within a block, no weights, nothing stored.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "support/machine.hpp"

namespace bench {

/// Where to read, what to ask for meanwhile, and how far ahead, in bytes.
struct mixed_block {
  const void* at;
  const void* next;  ///< the block that comes after
  size_t bytes, ahead;
};

#if defined(__x86_64__)
namespace detail {

// A vector is multiplied into G of `sums`; two of these for a line of f16.
#define KVCACHE_BENCH_MIXED(vector, zero, set1, load, widen, fma, store, n)           \
  vector w[G], sum[2 * G];                                                            \
  for (int g = 0; g < G; ++g) w[g] = set1(0.5f + float(g));                           \
  for (vector & s : sum) s = zero();                                                  \
  const char* p = static_cast<const char*>(b.at);                                     \
  const char* next = static_cast<const char*>(b.next);                                \
  constexpr size_t value = Half ? 2 : 4, step = n * value;                            \
  for (size_t i = 0; i + 64 <= b.bytes; i += 64) {                                    \
    const size_t later = i + b.ahead;                                                 \
    __builtin_prefetch(later < b.bytes ? p + later : next + (later - b.bytes), 0, 3); \
    for (size_t k = 0; k < 64; k += step) {                                           \
      vector x;                                                                       \
      if constexpr (Half) {                                                           \
        x = widen(p + i + k);                                                         \
      } else {                                                                        \
        x = load(reinterpret_cast<const float*>(p + i + k));                          \
      }                                                                               \
      for (int g = 0; g < G; ++g) {                                                   \
        vector& s = sum[k / step % 2 * G + size_t(g)];                                \
        s = fma(x, w[g], s);                                                          \
      }                                                                               \
    }                                                                                 \
  }                                                                                   \
  float out[16];                                                                      \
  for (const vector& s : sum) {                                                       \
    store(out, s);                                                                    \
    benchmark::DoNotOptimize(out[0]);                                                 \
  }
__attribute__((target("avx512f"))) inline __m512 widen_512(const char* p) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
__attribute__((target("avx2,fma,f16c"))) inline __m256 widen_256(const char* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <int G, bool Half>
__attribute__((target("avx512f"))) void mixed_512(const mixed_block& b) {
  KVCACHE_BENCH_MIXED(__m512, _mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, widen_512, _mm512_fmadd_ps,
                      _mm512_storeu_ps, 16)
}
template <int G, bool Half>
__attribute__((target("avx2,fma,f16c"))) void mixed_256(const mixed_block& b) {
  KVCACHE_BENCH_MIXED(__m256, _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, widen_256, _mm256_fmadd_ps,
                      _mm256_storeu_ps, 8)
}
#undef KVCACHE_BENCH_MIXED

template <int G>
void mixed(const mixed_block& b, bool half) {
  if (wide()) return half ? mixed_512<G, true>(b) : mixed_512<G, false>(b);
  half ? mixed_256<G, true>(b) : mixed_256<G, false>(b);
}

}  // namespace detail
#endif

/// Reads a block and multiplies each value `group` times. False where it is not known how: other processors,
/// other groups than 1, 3, 4 and 8.
inline bool read_and_multiply([[maybe_unused]] const mixed_block& b, [[maybe_unused]] int group,
                              [[maybe_unused]] bool half) {
#if defined(__x86_64__)
  if (!detail::wide() && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return false;
  switch (group) {
    case 1:
      return detail::mixed<1>(b, half), true;
    case 3:
      return detail::mixed<3>(b, half), true;
    case 4:
      return detail::mixed<4>(b, half), true;
    case 8:
      return detail::mixed<8>(b, half), true;
    default:
      return false;
  }
#else
  return false;
#endif
}

}  // namespace bench
