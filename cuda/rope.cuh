// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rotary embedding of one channel. Angles are exact at any position: a turn is 2^64 parts, and position *
// step wraps around as it should. Paper: Su and others, "RoFormer", section 3.2.2.
#include "element.cuh"

namespace kvcache::detail::gpu {

struct cos_sin {
  float c, s;
};
KVCACHE_DEVICE cos_sin angle_of(const rope_params& r, int32_t position, int32_t pair) {
  if (position >= 0 && position < r.table_positions) {
    const float* at = r.table + (static_cast<int64_t>(position) * r.pairs + pair) * 2;
    return {at[0], at[1]};
  }
  const uint64_t turn = static_cast<uint64_t>(static_cast<int64_t>(position)) * r.step[pair];
  // The upper half of 2^64 is a turn backwards: the nearest multiple of 2^-31 half turns, in [-1, 1).
  const int32_t part = static_cast<int32_t>(static_cast<uint32_t>((turn + 0x80000000u) >> 32));
  cos_sin a;
  sin_cos_pi(static_cast<float>(part) * 4.656612873077393e-10f, a.s, a.c);
  return a;
}

/// Channel d of a row, rotated. Products and sums are rounded one by one, as on the CPU.
KVCACHE_DEVICE float rotated_value(const rope_params& r, const char* row, int32_t type, int32_t d,
                                   int32_t position) {
  const float own = load_value(row, type, d);
  if (d >= 2 * r.pairs) return own;
  const bool half = r.half_split != 0;
  const int32_t pair = half ? d % r.pairs : d / 2;
  const bool second = half ? d >= r.pairs : d % 2 != 0;
  const int32_t partner = half ? (second ? d - r.pairs : d + r.pairs) : d ^ 1;
  const float other = load_value(row, type, partner);
  const cos_sin a = angle_of(r, position, pair);
  if (second) return add_rn(mul_rn(other, a.s), mul_rn(own, a.c));
  return add_rn(mul_rn(own, a.c), -mul_rn(other, a.s));
}

}  // namespace kvcache::detail::gpu
