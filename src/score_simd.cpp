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

void fold(const fold_rows&);

/// Asks memory for what comes a few tiles after `tile`.
HWY_INLINE void ask_ahead(const float* tile) {
  constexpr int32_t tiles = 6;
  for (int32_t i = 0; i < tile_keys; i += 16) __builtin_prefetch(tile + tiles * tile_keys + i, 0, 3);
}

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
HWY_INLINE void fold_tile(const fold_rows& r, int32_t head, int64_t first) {
  const tag_f d;
  float* HWY_RESTRICT to = r.sum + head * r.sum_head_stride + first;
  vec_f sum[key_vectors];
  for (int32_t v = 0; v < key_vectors; ++v) sum[v] = hn::LoadU(d, to + v * lanes);
  if (r.ahead) ask_ahead(to);
  for (int32_t row = 0; row < r.rows; ++row) {
    const uint64_t counted = r.counted[row * r.counted_row_stride];
    if (counted == 0) continue;
    const float* scores = r.scores + head * r.score_head_stride + row * r.score_row_stride + first;
    if (r.ahead) ask_ahead(scores);
    const auto lse = hn::Set(d, r.lse2[head + row * r.lse_row_stride]);
    const auto least = hn::Set(d, Kind == KVC_SCORE_HIT ? r.least[row * r.least_row_stride] : 0.0f);
    for (int32_t v = 0; v < key_vectors; ++v) {
      const auto add = amount<Kind>(hn::LoadU(d, scores + v * lanes), lse, least, counted, v);
      sum[v] = hn::Add(sum[v], add);
    }
  }
  for (int32_t v = 0; v < key_vectors; ++v) hn::StoreU(sum[v], d, to + v * lanes);
}

template <int Kind>
HWY_NOINLINE void fold_kind(const fold_rows& r) {
  for (int32_t head = 0; head < r.heads; ++head) {
    for (int64_t tile = 0; tile < r.tiles; ++tile) fold_tile<Kind>(r, head, tile * tile_keys);
  }
}

void fold(const fold_rows& r) {
  if (r.kind == KVC_SCORE_WEIGHT) return fold_kind<KVC_SCORE_WEIGHT>(r);
  if (r.kind == KVC_SCORE_SQUARE) return fold_kind<KVC_SCORE_SQUARE>(r);
  fold_kind<KVC_SCORE_HIT>(r);
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
