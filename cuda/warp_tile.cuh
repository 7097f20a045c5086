// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one warp computes: scores of a staged tile of keys against its packed query rows, their weights by an
// online softmax, and the weighted sum of the staged values. Two orientations of the same mathematics:
//
//            M (16)      N (8)          packed query rows
//   narrow   tokens      query rows     up to 8: every product is used, half the instructions
//   wide     query rows  tokens         up to 16
//
// The reference of the exponentials is lifted only when a score passes it by more than 8 (in log2 units), so
// that most tiles need no maximum over lanes and no rescaling; weights then reach 256, which f16 and bf16
// hold as exactly as 1. Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax",
// section 3; work on tiles of mma: Dao, "FlashAttention-2", section 3.
#include "element.cuh"

namespace kvcache::detail::gpu {

inline constexpr float nothing_seen = 3.402823466e+38f;  ///< minus the reference, before any key was seen
inline constexpr float lift_above = 8.0f;

/// Byte offset of a 16-byte chunk of a row of a staged tile.
template <int Dim>
KVCACHE_DEVICE uint32_t staged_at(uint32_t row, uint32_t chunk) {
  const uint32_t at = Dim % 64 == 0 ? chunk ^ (row & 7u) : chunk;
  return row * staged_row(Dim) + (at << 4);
}
/// The address `pairs` pairs of chunks behind one whose chunk number is below 2.
template <int Dim>
KVCACHE_DEVICE uint32_t chunk_pairs_on(uint32_t address, uint32_t pairs) {
  return Dim % 64 == 0 ? address ^ (pairs << 5) : address + (pairs << 5);
}

/// c * tanh(y / c) in log2 units; `y` is the argument of tanh.
KVCACHE_DEVICE float soft_capped(float y, float cap_log2) {
  const float a = y < 0 ? -y : y;
  const float e = fast_exp2((a < 16.0f ? a : 16.0f) * 2.88539008177792681f);
  const float t = 1.0f - 2.0f / (e + 1.0f);
  return cap_log2 * (y < 0 ? -t : t);
}

template <half_kind Kind, int Dim, bool Wide>
struct warp_tile {
  static constexpr int rows = Wide ? wide_rows : narrow_rows;
  static constexpr int tokens = tile_tokens(Dim);
  static constexpr int halves = tokens / 16;
  static constexpr int steps = Dim / 16;  ///< of the dot products
  static constexpr int score_tiles = Wide ? tokens / 8 : tokens / 16;
  static constexpr int out_tiles = Wide ? Dim / 8 : Dim / 16;
  static constexpr int q_words = Wide ? 4 : 2;
  static constexpr half_kind kind = Kind;
  static_assert(!Wide || has_wide(Dim));

  uint32_t q[steps][q_words];
  float score[score_tiles][4];
  float out[out_tiles][4];
  float minus_top[2];  ///< of the two query rows of this lane: minus the reference of the exponentials
  float sum[2];
  uint32_t k_offset, v_offset;  ///< of this lane's row in ldmatrix

  /// Which of the lane's two query rows element i of a fragment belongs to.
  static KVCACHE_BOTH constexpr int state_of(int i) { return Wide ? i >> 1 : i & 1; }
  /// Token of element i of score tile n, for the lane.
  static KVCACHE_DEVICE uint32_t token_of(int n, int i, uint32_t lane) {
    return Wide ? n * 8 + lane % 4 * 2 + (i & 1) : n * 16 + lane / 4 + (i >> 1) * 8;
  }
  /// Packed query row of state r.
  static KVCACHE_DEVICE uint32_t row_of_state(int r, uint32_t lane) {
    return Wide ? lane / 4 + r * 8 : lane % 4 * 2 + r;
  }
  /// Channel of element i of out tile n.
  static KVCACHE_DEVICE uint32_t channel_of(int n, int i, uint32_t lane) {
    return Wide ? n * 8 + lane % 4 * 2 + (i & 1) : n * 16 + lane / 4 + (i >> 1) * 8;
  }

  KVCACHE_DEVICE void start(uint32_t q_stage, uint32_t lane) {
    const uint32_t near = lane & 15u, high = lane >> 4;  // rows 0..15, second chunk
    const uint32_t apart = (lane & 7u) + high * 8,
                   odd = lane >> 3 & 1u;  // rows by 8, second chunk in between
    k_offset = Wide ? staged_at<Dim>(apart, odd) : staged_at<Dim>(near, high);
    v_offset = Wide ? staged_at<Dim>(near, high) : staged_at<Dim>(apart, odd);
    KVCACHE_UNROLL
    for (int n = 0; n < out_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) out[n][i] = 0;
    }
    minus_top[0] = minus_top[1] = nothing_seen;
    sum[0] = sum[1] = 0;
    const uint32_t q_address = q_stage + (Wide ? staged_at<Dim>(near, high) : staged_at<Dim>(lane & 7u, odd));
    KVCACHE_UNROLL
    for (int step = 0; step < steps; ++step) {
      uint32_t r[4];
      ldmatrix4(r, chunk_pairs_on<Dim>(q_address, step));
      KVCACHE_UNROLL
      for (int i = 0; i < q_words; ++i) q[step][i] = r[i];
    }
  }

  /// score = dot products of the tile's keys with the query rows.
  KVCACHE_DEVICE void multiply_keys(uint32_t k_stage) {
    KVCACHE_UNROLL
    for (int n = 0; n < score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) score[n][i] = 0;
    }
    KVCACHE_UNROLL
    for (int step = 0; step < steps; ++step) {
      const uint32_t at = chunk_pairs_on<Dim>(k_stage + k_offset, step);
      KVCACHE_UNROLL
      for (int h = 0; h < halves; ++h) {
        uint32_t k[4];
        ldmatrix4(k, at + h * 16 * staged_row(Dim));
        if constexpr (Wide) {
          mma<Kind>(score[2 * h], q[step], k[0], k[1]);
          mma<Kind>(score[2 * h + 1], q[step], k[2], k[3]);
        } else {
          mma<Kind>(score[h], k, q[step][0], q[step][1]);
        }
      }
    }
  }

  /// Turns scores into weights relative to the reference, lifting that where it must be, and adds them up.
  /// `factor` makes log2 units of scores.
  KVCACHE_DEVICE void weigh(float factor) {
    float e[score_tiles][4];
    if (warp_any(exponents(e, factor) > lift_above)) {
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

  /// out += weights * values.
  KVCACHE_DEVICE void multiply_values(uint32_t v_stage) {
    uint32_t w[halves][4];
    KVCACHE_UNROLL
    for (int h = 0; h < halves; ++h) {
      if constexpr (Wide) {
        KVCACHE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float(&s)[4] = score[2 * h + i / 2];
          w[h][i] = pack2<Kind>(s[i % 2 * 2], s[i % 2 * 2 + 1]);
        }
      } else {
        w[h][0] = movmatrix(pack2<Kind>(score[h][0], score[h][1]));
        w[h][1] = movmatrix(pack2<Kind>(score[h][2], score[h][3]));
      }
    }
    KVCACHE_UNROLL
    for (int c = 0; c < Dim / 16; ++c) {
      const uint32_t at = chunk_pairs_on<Dim>(v_stage + v_offset, c);
      KVCACHE_UNROLL
      for (int h = 0; h < halves; ++h) {
        uint32_t v[4];
        ldmatrix4_transposed(v, at + h * 16 * staged_row(Dim));
        if constexpr (Wide) {
          mma<Kind>(out[2 * c], w[h], v[0], v[1]);
          mma<Kind>(out[2 * c + 1], w[h], v[2], v[3]);
        } else {
          mma<Kind>(out[c], v, w[h][0], w[h][1]);
        }
      }
    }
  }

  /// The sums over the lanes that share query rows.
  KVCACHE_DEVICE void add_lanes() {
    KVCACHE_UNROLL
    for (int r = 0; r < 2; ++r) {
      KVCACHE_UNROLL
      for (uint32_t x = first_lane_bit; x <= last_lane_bit; x *= 2) sum[r] += shuffle_xor(sum[r], x);
    }
  }

 private:
  static constexpr uint32_t first_lane_bit = Wide ? 1 : 4, last_lane_bit = Wide ? 2 : 16;

  /// Exponents of the weights; returns the largest.
  KVCACHE_DEVICE float exponents(float (&e)[score_tiles][4], float factor) const {
    float largest = minus_infinity();
    KVCACHE_UNROLL
    for (int n = 0; n < score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        e[n][i] = fused(score[n][i], factor, minus_top[state_of(i)]);
        largest = e[n][i] > largest ? e[n][i] : largest;
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
          if (state_of(i) == r) top = score[n][i] > top ? score[n][i] : top;
        }
      }
      KVCACHE_UNROLL
      for (uint32_t x = first_lane_bit; x <= last_lane_bit; x *= 2) {
        const float other = shuffle_xor(top, x);
        top = other > top ? other : top;
      }
      const float wanted = -(top * factor);
      const float lower = wanted < minus_top[r] ? wanted : minus_top[r];
      const float scale = fast_exp2(lower - minus_top[r]);
      minus_top[r] = lower;
      sum[r] *= scale;
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
