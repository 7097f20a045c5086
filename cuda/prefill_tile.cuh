// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one warp of the prefill kernel computes: one or two bands of 16 packed query rows (on M) against a
// staged tile of 64 keys. Two bands share every fragment of K and V, which halves the reads of shared memory
// per product; with one alone they would take longer than the tensor cores. Query fragments are read again
// from shared memory at each step where the registers are needed for accumulators. Dao, "FlashAttention-2",
// section 3.3.
#include "warp_tile.cuh"

namespace kvcache::detail::gpu {

/// As chunk_pairs_on, for many steps from one address: four addresses and distances that instructions hold.
template <int Dim>
KVCACHE_DEVICE uint32_t chunk_pairs_from(uint32_t address, uint32_t pairs) {
  return Dim % 64 == 0 ? (address ^ ((pairs & 3u) << 5)) + (pairs >> 2) * 128 : address + (pairs << 5);
}

/// Scores, weights and accumulators of 16 packed query rows.
template <int Dim>
struct prefill_band : warp_softmax<Dim, true, prefill_tokens> {
  using base = warp_softmax<Dim, true, prefill_tokens>;
  using base::minus_top;
  using base::score;
  using base::sum;

  /// As weigh, with the weights in the registers of the scores. `factor` is above 0.
  KVCACHE_DEVICE void weigh_in_place(float factor) {
    float top[2] = {minus_infinity(), minus_infinity()};
    KVCACHE_UNROLL
    for (int n = 0; n < base::score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) top[i / 2] = larger(score[n][i], top[i / 2]);
    }
    const bool passed = fused(top[0], factor, minus_top[0]) > float(lift_above) ||
                        fused(top[1], factor, minus_top[1]) > float(lift_above);
    if (warp_any(passed)) base::lift(factor);
    KVCACHE_UNROLL
    for (int n = 0; n < base::score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        score[n][i] = fast_exp2(fused(score[n][i], factor, minus_top[i / 2]));
        sum[i / 2] += score[n][i];
      }
    }
  }
};

template <half_kind Kind, int Dim>
struct prefill_tile {
  static constexpr int bands = prefill_rows(Dim) / (warps_of_block * 16);
  static constexpr int rows = bands * 16;  ///< of the warp
  static constexpr int halves = prefill_tokens / 16;
  static constexpr int steps = Dim / 16;
  static constexpr bool held = Dim <= 64;  ///< query fragments stay in registers
  static constexpr half_kind kind = Kind;

  prefill_band<Dim> band[bands];
  uint32_t q[held ? steps : 1][bands][4];
  uint32_t weight[bands][halves][4];

  /// Of the warp's packed rows, the one of a band and state.
  static KVCACHE_DEVICE int32_t row_of(int m, int r, uint32_t lane) {
    return static_cast<int32_t>(prefill_band<Dim>::row_of_state(r, lane)) + m * 16;
  }

  /// No key was seen.
  KVCACHE_DEVICE void start() {
    KVCACHE_UNROLL
    for (int m = 0; m < bands; ++m) band[m].clear();
  }

  /// Takes the query fragments that stay. `queries`: the warp's rows in shared memory.
  KVCACHE_DEVICE void hold_queries(uint32_t queries, uint32_t lane) {
    if constexpr (held) {
      KVCACHE_UNROLL
      for (int step = 0; step < steps; ++step) read_queries(q[step], queries + row_in_turn(lane), step);
    }
  }

  /// Scores of the tile's keys.
  KVCACHE_DEVICE void multiply_keys(uint32_t k_stage, uint32_t queries, uint32_t lane) {
    KVCACHE_UNROLL
    for (int m = 0; m < bands; ++m) {
      KVCACHE_UNROLL
      for (int n = 0; n < 2 * halves; ++n) {
        KVCACHE_UNROLL
        for (int i = 0; i < 4; ++i) band[m].score[n][i] = 0;
      }
    }
    const uint32_t here = anew(lane);  // addresses are cheaper to compute than to keep
    const uint32_t k_row = k_stage + row_apart(here), q_row = queries + row_in_turn(here);
    KVCACHE_UNROLL
    for (int step = 0; step < steps; ++step) {
      uint32_t(&a)[bands][4] = q[held ? step : 0];
      if constexpr (!held) read_queries(a, q_row, step);
      const uint32_t at = chunk_pairs_from<Dim>(k_row, step);
      KVCACHE_UNROLL
      for (int h = 0; h < halves; ++h) {
        uint32_t k[4];
        ldmatrix4(k, at + h * 16 * staged_row(Dim));
        KVCACHE_UNROLL
        for (int m = 0; m < bands; ++m) {
          mma<Kind>(band[m].score[2 * h], a[m], k[0], k[1]);
          mma<Kind>(band[m].score[2 * h + 1], a[m], k[2], k[3]);
        }
      }
    }
  }

  /// Rounds the weights to what the tensor cores multiply; half the registers.
  KVCACHE_DEVICE void pack_weights() {
    KVCACHE_UNROLL
    for (int m = 0; m < bands; ++m) {
      KVCACHE_UNROLL
      for (int h = 0; h < halves; ++h) {
        KVCACHE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float(&s)[4] = band[m].score[2 * h + i / 2];
          weight[m][h][i] = anew(pack2<Kind>(s[i % 2 * 2], s[i % 2 * 2 + 1]));
        }
      }
    }
  }

  /// out += weights * values.
  KVCACHE_DEVICE void multiply_values(uint32_t v_stage, uint32_t lane) {
    const uint32_t v_row = v_stage + row_in_turn(anew(lane));
    KVCACHE_UNROLL
    for (int c = 0; c < Dim / 16; ++c) {
      const uint32_t at = chunk_pairs_from<Dim>(v_row, c);
      KVCACHE_UNROLL
      for (int h = 0; h < halves; ++h) {
        uint32_t v[4];
        ldmatrix4_transposed(v, at + h * 16 * staged_row(Dim));
        KVCACHE_UNROLL
        for (int m = 0; m < bands; ++m) {
          mma<Kind>(band[m].out[2 * c], weight[m][h], v[0], v[1]);
          mma<Kind>(band[m].out[2 * c + 1], weight[m][h], v[2], v[3]);
        }
      }
    }
  }

 private:
  /// This lane's row in ldmatrix: rows 0..15, then their second chunks; or rows by 8, second chunks in
  /// between.
  static KVCACHE_DEVICE uint32_t row_in_turn(uint32_t lane) { return staged_at<Dim>(lane & 15u, lane >> 4); }
  static KVCACHE_DEVICE uint32_t row_apart(uint32_t lane) {
    return staged_at<Dim>((lane & 7u) + (lane >> 4) * 8, lane >> 3 & 1u);
  }

  KVCACHE_DEVICE void read_queries(uint32_t (&a)[bands][4], uint32_t q_row, int step) const {
    const uint32_t at = chunk_pairs_from<Dim>(q_row, step);
    KVCACHE_UNROLL
    for (int m = 0; m < bands; ++m) ldmatrix4(a[m], at + m * 16 * staged_row(Dim));
  }
};

}  // namespace kvcache::detail::gpu
