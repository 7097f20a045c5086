// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one warp computes over f16 or bf16: scores of a staged tile of keys against its packed query rows, and
// the sum of the staged values weighted by softmax_tile.cuh. Work on tiles of mma: Dao, "FlashAttention-2",
// section 3.
#include "softmax_tile.cuh"

namespace kvcache::detail::gpu {

inline constexpr int lift_above = 8;  ///< weights reach 256, which f16 and bf16 hold as exactly as 1

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

template <int Dim, bool Wide, int Tokens>
using warp_softmax =
    online_softmax<Wide, Wide ? Tokens / 8 : Tokens / 16, Wide ? Dim / 8 : Dim / 16, lift_above>;

/// With Mixed the planes may hold bf16 while Kind is f16.
template <half_kind Kind, int Dim, bool Wide, int Tokens = tile_tokens(Dim), bool Mixed = false>
struct warp_tile : warp_softmax<Dim, Wide, Tokens> {
  using base = warp_softmax<Dim, Wide, Tokens>;
  using base::out;
  using base::score;
  static constexpr int tokens = Tokens;
  static constexpr int halves = tokens / 16;
  static constexpr int steps = Dim / 16;  ///< of the dot products
  static constexpr int score_tiles = base::score_tiles;
  static constexpr int out_tiles = base::out_tiles;
  static constexpr int q_words = Wide ? 4 : 2;
  static constexpr half_kind kind = Kind;
  static_assert(!Wide || has_wide(Dim));

  uint32_t q[steps][q_words];
  uint32_t k_offset, v_offset;  ///< of this lane's row in ldmatrix
  bool planes_bf16 = false;     ///< with Mixed

  /// Token of element i of score tile n, for the lane.
  static KVCACHE_DEVICE uint32_t token_of(int n, int i, uint32_t lane) {
    return Wide ? n * 8 + lane % 4 * 2 + (i & 1) : n * 16 + lane / 4 + (i >> 1) * 8;
  }
  /// Channel of element i of out tile n.
  static KVCACHE_DEVICE uint32_t channel_of(int n, int i, uint32_t lane) {
    return Wide ? n * 8 + lane % 4 * 2 + (i & 1) : n * 16 + lane / 4 + (i >> 1) * 8;
  }

  /// Takes the query rows out of shared memory.
  KVCACHE_DEVICE void start(uint32_t q_stage, uint32_t lane) {
    const uint32_t near = lane & 15u, high = lane >> 4;  // rows 0..15, second chunk
    const uint32_t apart = (lane & 7u) + high * 8,
                   odd = lane >> 3 & 1u;  // rows by 8, second chunk in between
    k_offset = Wide ? staged_at<Dim>(apart, odd) : staged_at<Dim>(near, high);
    v_offset = Wide ? staged_at<Dim>(near, high) : staged_at<Dim>(apart, odd);
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
        convert(k);
        if constexpr (Wide) {
          mma<Kind>(score[2 * h], q[step], k[0], k[1]);
          mma<Kind>(score[2 * h + 1], q[step], k[2], k[3]);
        } else {
          mma<Kind>(score[h], k, q[step][0], q[step][1]);
        }
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
        convert(v);
        if constexpr (Wide) {
          mma<Kind>(out[2 * c], w[h], v[0], v[1]);
          mma<Kind>(out[2 * c + 1], w[h], v[2], v[3]);
        } else {
          mma<Kind>(out[c], v, w[h][0], w[h][1]);
        }
      }
    }
  }

 private:
  KVCACHE_DEVICE void convert(uint32_t (&pairs)[4]) const {
    if constexpr (Mixed) {
      if (!planes_bf16) return;
      KVCACHE_UNROLL
      for (uint32_t& x : pairs) {
        x = pack2<Kind>(widen<half_kind::bf16>(static_cast<uint16_t>(x)),
                        widen<half_kind::bf16>(static_cast<uint16_t>(x >> 16)));
      }
    }
  }
};

}  // namespace kvcache::detail::gpu
