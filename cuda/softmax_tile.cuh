// SPDX-License-Identifier: Apache-2.0
#pragma once
// The online softmax of one warp over tiles of scores, in the fragments of mma: weights of a tile relative to
// a reference, their sums, and the accumulators that go along when the reference moves. Two orientations:
//
//            M (16)      N (8)          packed query rows
//   narrow   tokens      query rows     up to 8: every product is used, half the instructions
//   wide     query rows  tokens         up to 16
//
// The reference is lifted only when a score passes it by more than `lift_above` (in log2 units), so that most
// tiles need no maximum over lanes and no rescaling; weights then reach 2^lift_above. Online softmax: Milakov
// and Gimelshein, "Online normalizer calculation for softmax", section 3.
#include "element.cuh"

namespace kvcache::detail::gpu {

inline constexpr float nothing_seen = 3.402823466e+38f;  ///< minus the reference, before any key was seen

/// c * tanh(y / c) in log2 units; `y` is the argument of tanh.
KVCACHE_DEVICE float soft_capped(float y, float cap_log2) {
  const float a = y < 0 ? -y : y;
  const float e = fast_exp2((a < 16.0f ? a : 16.0f) * 2.88539008177792681f);
  const float t = 1.0f - 2.0f / (e + 1.0f);
  return cap_log2 * (y < 0 ? -t : t);
}

/// `Sums` sums of a lane's weighted numbers per query row are kept beside the accumulators. Below: how far
/// the reference is put below the largest score.
template <bool Wide, int ScoreTiles, int OutTiles, int LiftAbove, int Sums = 0, int Below = 0>
struct online_softmax {
  static constexpr int rows = Wide ? wide_rows : narrow_rows;
  static constexpr int score_tiles = ScoreTiles;
  static constexpr int out_tiles = OutTiles;

  float score[score_tiles][4];
  float out[out_tiles][4];
  float minus_top[2];  ///< of the two query rows of this lane: minus the reference of the exponentials
  float sum[2];
  float more[2][Sums > 0 ? Sums : 1];

  /// Which of the lane's two query rows element i of a fragment belongs to.
  static KVCACHE_BOTH constexpr int state_of(int i) { return Wide ? i >> 1 : i & 1; }
  /// Packed query row of state r.
  static KVCACHE_DEVICE uint32_t row_of_state(int r, uint32_t lane) {
    return Wide ? lane / 4 + r * 8 : lane % 4 * 2 + r;
  }

  /// No key was seen.
  KVCACHE_DEVICE void clear() {
    KVCACHE_UNROLL
    for (int n = 0; n < out_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) out[n][i] = 0;
    }
    KVCACHE_UNROLL
    for (int r = 0; r < 2; ++r) {
      minus_top[r] = nothing_seen;
      sum[r] = 0;
      KVCACHE_UNROLL
      for (int j = 0; j < Sums; ++j) more[r][j] = 0;
    }
  }

  /// Turns scores into weights relative to the reference, lifting that where it must be, and adds them up.
  /// `factor` makes log2 units of scores.
  KVCACHE_DEVICE void weigh(float factor) {
    float e[score_tiles][4];
    if (warp_any(exponents(e, factor) > float(LiftAbove))) {
      lift(factor);
      exponents(e, factor);
    }
    KVCACHE_UNROLL
    for (int n = 0; n < score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        score[n][i] = fast_exp2(e[n][i]);
        sum[state_of(i)] += score[n][i];
      }
    }
  }

  /// The sum over the lanes that share query rows.
  static KVCACHE_DEVICE float over_lanes(float v) {
    KVCACHE_UNROLL
    for (uint32_t x = first_lane_bit; x <= last_lane_bit; x *= 2) v += shuffle_xor(v, x);
    return v;
  }
  KVCACHE_DEVICE void add_lanes() {
    KVCACHE_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] = over_lanes(sum[r]);
  }

 protected:
  static constexpr uint32_t first_lane_bit = Wide ? 1 : 4, last_lane_bit = Wide ? 2 : 16;

  /// Exponents of the weights; returns the largest.
  KVCACHE_DEVICE float exponents(float (&e)[score_tiles][4], float factor) const {
    float largest = minus_infinity();
    KVCACHE_UNROLL
    for (int n = 0; n < score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        e[n][i] = fused(score[n][i], factor, minus_top[state_of(i)]);
        largest = larger(largest, e[n][i]);
      }
    }
    return largest;
  }

  /// Moves the references up to the largest score seen.
  KVCACHE_DEVICE void lift(float factor) {
    KVCACHE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float top = minus_infinity();
      KVCACHE_UNROLL
      for (int n = 0; n < score_tiles; ++n) {
        KVCACHE_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (state_of(i) == r) top = larger(top, score[n][i]);
        }
      }
      KVCACHE_UNROLL
      for (uint32_t x = first_lane_bit; x <= last_lane_bit; x *= 2) {
        const float other = shuffle_xor(top, x);
        top = other > top ? other : top;
      }
      const float wanted = Below == 0 ? -(top * factor) : float(Below) - top * factor;
      const float lower = wanted < minus_top[r] ? wanted : minus_top[r];
      const float scale = fast_exp2(lower - minus_top[r]);
      minus_top[r] = lower;
      sum[r] *= scale;
      KVCACHE_UNROLL
      for (int j = 0; j < Sums; ++j) more[r][j] *= scale;
      KVCACHE_UNROLL
      for (int n = 0; n < out_tiles; ++n) {
        KVCACHE_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (state_of(i) == r) out[n][i] *= scale;
        }
      }
    }
  }
};

}  // namespace kvcache::detail::gpu
