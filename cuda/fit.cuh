// SPDX-License-Identifier: Apache-2.0
#pragma once
// The scale and minimum of a group of values, as quant/affine.hpp and quant/fp8.hpp choose them, clip
// searches included. Half a warp takes a group: lane l holds the sums of values l, l + 16, ... that a search
// compares, the 16 lanes of affine.hpp, and they are folded in its order. So every bit is the CPU's.
#include "codes.cuh"

namespace kvcache::detail::gpu {

inline constexpr int32_t group_lanes = 16;

struct value_limits {
  float least, largest;  ///< least > largest: there is no value
};
KVCACHE_DEVICE value_limits no_limits() {
  return {-minus_infinity(), minus_infinity()};
}
KVCACHE_DEVICE value_limits joined_limits(value_limits a, value_limits b) {
  return {b.least < a.least ? b.least : a.least, b.largest > a.largest ? b.largest : a.largest};
}
/// Over the 16 lanes of a group, known to all of them. Called by the whole warp.
KVCACHE_DEVICE value_limits folded_limits(value_limits v) {
  for (uint32_t x = group_lanes / 2; x > 0; x /= 2) {
    v = joined_limits(v, {shuffle_xor(v.least, x), shuffle_xor(v.largest, x)});
  }
  return v;
}

// ---- levels for a range ----

/// f16 patterns as integers in the order of their values; both zeros are 0.
KVCACHE_DEVICE int32_t half_order(uint16_t v) {
  return (v & 0x8000u) != 0 ? -static_cast<int32_t>(v & 0x7fffu) : static_cast<int32_t>(v);
}
KVCACHE_DEVICE uint16_t half_at(int32_t order) {
  return static_cast<uint16_t>(order < 0 ? 0x8000 - order : order);
}
/// Largest f16 <= v, smallest f16 >= v.
KVCACHE_DEVICE uint16_t half_below(float v) {
  const uint16_t near = narrow1<half_kind::f16>(v);
  return half_at(half_order(near) - (widen<half_kind::f16>(near) > v ? 1 : 0));
}
KVCACHE_DEVICE uint16_t half_above(float v) {
  const uint16_t near = narrow1<half_kind::f16>(v);
  return half_at(half_order(near) + (widen<half_kind::f16>(near) < v ? 1 : 0));
}

/// Whether the highest level of a grid lies below `largest`: exact in double, which has room for all bits.
KVCACHE_DEVICE bool falls_short(float zero, uint16_t scale, int32_t most, double largest) {
  return static_cast<double>(zero) + static_cast<double>(widen<half_kind::f16>(scale)) * most < largest;
}
KVCACHE_DEVICE code_levels min_max_levels(value_limits r, int32_t most) {
  code_levels out{0, half_below(r.least)};
  const float zero = widen<half_kind::f16>(out.zero);
  if (r.largest == r.least && zero == r.least) return out;
  out.scale = half_above(div_rn(add_rn(r.largest, -zero), static_cast<float>(most)));
  while (falls_short(zero, out.scale, most, r.largest)) out.scale = half_at(half_order(out.scale) + 1);
  return out;
}
KVCACHE_DEVICE code_levels symmetric_levels(float magnitude, int32_t most) {
  code_levels out{0, 0};
  if (magnitude == 0.0f) return out;
  out.scale = half_above(div_rn(mul_rn(magnitude, 2.0f), static_cast<float>(most)));
  const double reach = 2.0 * static_cast<double>(magnitude);
  while (falls_short(0.0f, out.scale, most, reach)) out.scale = half_at(half_order(out.scale) + 1);
  return out;
}
KVCACHE_DEVICE code_levels small_float_levels(float magnitude, int32_t type) {
  if (magnitude == 0.0f) return {0, 0};
  const float scale = div_rn(magnitude, type == KVC_E4M3 ? 448.0f : 57344.0f);
  return {half_above(scale > 0x1p-14f ? scale : 0x1p-14f), 0};
}

// ---- candidates of a search ----

KVCACHE_DEVICE int32_t candidates_of(const code_form& f, int32_t clip) {
  if (clip == KVC_CLIP_NONE || is_small_float(f.type)) return 1;
  return clip == KVC_CLIP_TWO_SIDED && !f.symmetric ? 16 : 7;
}
KVCACHE_DEVICE float middle_factor(int32_t k) {
  return k == 0   ? 1.0f
         : k == 1 ? 0.93f
         : k == 2 ? 0.86f
         : k == 3 ? 0.79f
         : k == 4 ? 0.72f
         : k == 5 ? 0.64f
                  : 0.56f;
}
KVCACHE_DEVICE float end_factor(int32_t k) {
  return k == 0 ? 1.0f : k == 1 ? 0.86f : k == 2 ? 0.72f : 0.58f;
}
/// Pairs of numbers in 0 ... 3 with a sum in 0 ... 6.
KVCACHE_DEVICE int32_t pairs_of_sum(int32_t sum) {
  return sum <= 3 ? sum + 1 : 7 - sum;
}
/// The range with its ends at these parts of their distance from the middle.
KVCACHE_DEVICE value_limits shrunk(value_limits r, float low, float high) {
  const float middle = mul_rn(0.5f, add_rn(r.least, r.largest));
  const float half = mul_rn(0.5f, add_rn(r.largest, -r.least));
  const float from = fused(-low, half, middle), to = fused(high, half, middle);
  return {low == 1.0f || from < r.least ? r.least : from, high == 1.0f || to > r.largest ? r.largest : to};
}
/// The levels that a search tries at step k: 0 is the whole range, then the widest first.
KVCACHE_DEVICE code_levels candidate(const code_form& f, int32_t clip, value_limits r, int32_t k) {
  const float magnitude = -r.least > r.largest ? -r.least : r.largest;
  if (is_small_float(f.type)) return small_float_levels(magnitude, f.type);
  const int32_t most = top_code(f.type);
  if (f.symmetric) return symmetric_levels(mul_rn(middle_factor(k), magnitude), most);
  if (k == 0) return min_max_levels(r, most);
  if (clip == KVC_CLIP_MIDDLE) return min_max_levels(shrunk(r, middle_factor(k), middle_factor(k)), most);
  int32_t sum = 0, rest = k;  // pairs (low, high) in the order of their sum, then of low
  for (; rest >= pairs_of_sum(sum); ++sum) rest -= pairs_of_sum(sum);
  const int32_t low = rest + (sum > 3 ? sum - 3 : 0);
  return min_max_levels(shrunk(r, end_factor(low), end_factor(sum - low)), most);
}

// ---- the values of a group ----

/// Limits of values(i) for i in [skip, size); lane = 0 ... 15.
template <class Values>
KVCACHE_DEVICE value_limits limits_of(const Values& values, int32_t skip, int32_t size, int32_t lane) {
  value_limits r = no_limits();
  for (int32_t i = lane; i < size; i += group_lanes) {
    if (i < skip) continue;
    const float x = values(i);
    r = joined_limits(r, {x, x});
  }
  return r;
}
/// What a search compares, known to all lanes of the group. Called by the whole warp.
template <class Values>
KVCACHE_DEVICE float squared_error(const code_form& f, code_levels levels, const Values& values, int32_t skip,
                                   int32_t size, int32_t lane) {
  const code_grid g = grid_of(f, levels);
  float sum = 0.0f;
  for (int32_t i = lane; i < size; i += group_lanes) {
    if (i < skip) continue;
    const float x = values(i);
    const float e = add_rn(x, -decoded(f, g, encoded(f, g, x)));
    sum = fused(e, e, sum);
  }
  for (uint32_t x = group_lanes / 2; x > 0; x /= 2) sum = add_rn(sum, shuffle_xor(sum, x));
  return sum;
}
/// The levels of a group, known to all its lanes. Called by the whole warp; its halves may take groups of
/// different sizes.
template <class Values>
KVCACHE_DEVICE code_levels fitted(const code_form& f, int32_t clip, const Values& values, int32_t skip,
                                  int32_t size, int32_t lane) {
  value_limits r = folded_limits(limits_of(values, skip, size, lane));
  if (r.least > r.largest) r = {0.0f, 0.0f};
  const code_levels whole = candidate(f, clip, r, 0);
  const int32_t n = candidates_of(f, clip);
  if (n == 1) return whole;
  code_levels best = whole;
  float least_error = squared_error(f, whole, values, skip, size, lane);
  for (int32_t k = 1; k < n; ++k) {
    const code_levels levels = candidate(f, clip, r, k);
    const float error = squared_error(f, levels, values, skip, size, lane);
    if (!(error < least_error)) continue;
    best = levels;
    least_error = error;
  }
  return whole.scale == 0 ? whole : best;
}

}  // namespace kvcache::detail::gpu
