// SPDX-License-Identifier: Apache-2.0
// From scores to what a policy adds up, written once with Highway as kernel_simd.cpp is. A tile's sums stay
// in registers while its rows are added in order; every slot has a sum of its own, so nothing depends on the
// width of a vector.
#include "kernel.hpp"
#include "simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "score_simd.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <cstring>

#include "simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

void fold(const fold_rows&, float*);

/// A vector of what is added: `v` is its place in the tile.
template <int Kind>
HWY_INLINE vec_f amount(vec_f score, vec_f lse, vec_f least, uint64_t counted, int32_t v) {
  const tag_f d;
  auto w = exp2_weight(hn::Min(hn::Zero(d), hn::Sub(score, lse)));
  if constexpr (Kind == KVC_SCORE_SQUARE) w = hn::Mul(w, w);
  if constexpr (Kind == KVC_SCORE_HIT) w = hn::IfThenElseZero(hn::Ge(w, least), hn::Set(d, 1.0f));
  if (counted == ~uint64_t{0}) return w;
  const uint64_t bits = counted >> (v * lanes);
  uint8_t raw[8];
  std::memcpy(raw, &bits, sizeof raw);
  return hn::IfThenElseZero(hn::LoadMaskBits(d, raw), w);
}

template <int Kind>
HWY_NOINLINE void fold_kind(const fold_rows& r, float* HWY_RESTRICT to) {
  const tag_f d;
  vec_f sum[key_vectors];
  for (int32_t v = 0; v < key_vectors; ++v) sum[v] = hn::LoadU(d, to + v * lanes);
  for (int32_t row = 0; row < r.rows; ++row) {
    const uint64_t counted = r.counted[row * r.counted_stride];
    if (counted == 0) continue;
    const float* scores = r.scores + row * r.score_stride;
    const auto lse = hn::Set(d, r.lse2[row * r.lse_stride]);
    const auto least = hn::Set(d, Kind == KVC_SCORE_HIT ? r.least[row * r.least_stride] : 0.0f);
    for (int32_t v = 0; v < key_vectors; ++v) {
      const auto add = amount<Kind>(hn::LoadU(d, scores + v * lanes), lse, least, counted, v);
      sum[v] = hn::Add(sum[v], add);
    }
  }
  for (int32_t v = 0; v < key_vectors; ++v) hn::StoreU(sum[v], d, to + v * lanes);
}

void fold(const fold_rows& r, float* sum) {
  if (r.kind == KVC_SCORE_WEIGHT) return fold_kind<KVC_SCORE_WEIGHT>(r, sum);
  if (r.kind == KVC_SCORE_SQUARE) return fold_kind<KVC_SCORE_SQUARE>(r, sum);
  fold_kind<KVC_SCORE_HIT>(r, sum);
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
