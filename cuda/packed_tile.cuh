// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one warp computes over codes, as warp_tile.cuh does over f16. Scales never meet a code:
//
//   K by channel   q . k = sum (q s) c + sum q z     the query is multiplied by the scales of each run of 32
//                                                    slots, the second sum is one number per query row
//   K by slot      q . k = s (sum q c)
//   V by slot      sum w v = sum (w s) c + sum w z   the second sum is one number per row and channel group
//
// Products with codes and the sums over them are those of mma, in float; what is rounded is the query, the
// query times a scale, and the weight times a scale, to f16. Why this
// order of sums: docs/decisions/0021.
#include "packed_stream.cuh"
#include "warp_tile.cuh"

namespace kvcache::detail::gpu {

/// Weights reach twice 2^weight_bits: times V's largest scale, of values from one end of f16's range to the
/// other, they are just within f16, and weights of 2^-20 and less are still numbers when a scale is small.
constexpr int weight_bits(packed_code v) {
  return v == packed_code::e4m3 ? 7 : v == packed_code::u8 ? 5 : 1;
}

template <packed_code K, packed_code V, int Dim, bool Wide>
struct packed_shape {
  static constexpr int tokens = packed_tokens(K);
  static constexpr int pieces = (Dim + 31) / 32;  ///< of 32 channels
  static constexpr int out_parts = V == packed_code::u4 ? 2 * pieces : Dim / 16;
  using softmax = online_softmax<Wide, Wide ? tokens / 8 : tokens / 16, Wide ? 2 * out_parts : out_parts,
                                 weight_bits(V) + 1, most_value_groups(Dim), weight_bits(V)>;
};

template <packed_code K, packed_code V, int Dim, bool Wide>
struct packed_tile : packed_shape<K, V, Dim, Wide>::softmax {
  using shape = packed_shape<K, V, Dim, Wide>;
  using base = typename shape::softmax;
  using stream = packed_stream<K, V, Dim>;
  using base::minus_top;
  using base::more;
  using base::out;
  using base::score;
  using base::sum;
  static constexpr int tokens = shape::tokens;
  static constexpr int steps = Dim / 16;
  static constexpr int q_words = Wide ? 4 : 2;
  static constexpr int each = Wide ? 2 : 1;  ///< fragments of results per part
  static constexpr int parts_k = tokens / 16;

  uint32_t q[steps][q_words];
  uint32_t lane, k_offset, v_offset;

  static KVCACHE_DEVICE uint32_t token_of(int n, int i, uint32_t lane) {
    return Wide ? column_at<bits_of(K)>(n / 2, n % 2, lane % 4 * 2 + (i & 1))
                : column_at<bits_of(K)>(n, i >> 1, lane / 4);
  }
  static KVCACHE_DEVICE uint32_t channel_of(int n, int i, uint32_t lane) {
    return Wide ? column_at<bits_of(V)>(n / 2, n % 2, lane % 4 * 2 + (i & 1))
                : column_at<bits_of(V)>(n, i >> 1, lane / 4);
  }
  /// Whether element i of fragment n belongs to the upper half of a pair.
  static KVCACHE_DEVICE constexpr int high_of(int n, int i) { return Wide ? n % 2 : i >> 1; }

  /// Takes the query rows out of shared memory, in the order of K's channels.
  KVCACHE_DEVICE void start(uint32_t queries, uint32_t lane_) {
    lane = anew(lane_);
    k_offset = anew((lane >> 3 & 1u) * (packed_units * 128) + (lane >> 4) * 128 +
                    (((lane & 7u) ^ ((lane >> 4) << 2)) << 4));
    v_offset = anew(stream::row_at(lane));
    const uint32_t first = queries + staged_at<Dim>(lane / 4, lane / 2 % 2) + lane % 2 * 8;
    KVCACHE_UNROLL
    for (int step = 0; step < steps; ++step) {
      const uint32_t at = chunk_pairs_on<Dim>(first, step);
      ld_shared2(at, q[step][0], q[step][Wide ? 2 : 1]);
      if constexpr (Wide) ld_shared2(at + 8 * staged_row(Dim), q[step][1], q[step][3]);
    }
  }

  /// score = dot products of the tile's keys with the query rows.
  KVCACHE_DEVICE void multiply_keys(uint32_t stage) {
    KVCACHE_UNROLL
    for (int n = 0; n < base::score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) score[n][i] = 0;
    }
    const uint32_t scales = stage + stream::k_scales;
    if constexpr (by_channel(K)) {
      float zero[stream::runs][4] = {};
      KVCACHE_UNROLL
      for (int step = 0; step < steps; ++step) multiply_step<true>(stage, scales, step, zero);
      finish_channels(zero);
    } else {
      float none[1][4];
      KVCACHE_UNROLL
      for (int step = 0; step < steps; ++step) multiply_step<false>(stage, scales, step, none);
      finish_slots(scales);
    }
  }

  /// Writes the accumulators as plain sums, [row][channel] with `pitch` floats from row to row.
  KVCACHE_DEVICE void store_sums(uint32_t to, uint32_t pitch, const packed_params& p) {
    float zero[2] = {0, 0};
    KVCACHE_UNROLL
    for (int n = 0; n < base::out_tiles; ++n) {
      const int piece = n / (2 * each);
      if (V != packed_code::e4m3 && n % (2 * each) == 0 && (p.group_starts >> piece & 1u) != 0) {
        KVCACHE_UNROLL
        for (int r = 0; r < 2; ++r) zero[r] = base::over_lanes(more[r][piece]) * p.value_zero;
      }
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int r = base::state_of(i);
        const uint32_t channel = channel_of(n, i, lane);
        const float value = fused(out[n][i], v_parts::unit(high_of(n, i)), zero[r]);
        if (channel < Dim) st_shared(to + (base::row_of_state(r, lane) * pitch + channel) * 4, value);
      }
    }
  }

  /// out += weights * values, more += weights * minima.
  KVCACHE_DEVICE void multiply_values(uint32_t stage, const packed_params& p) {
    uint32_t w[parts_k][4], group = 0;
    KVCACHE_UNROLL
    for (int piece = 0; piece < shape::pieces; ++piece) {
      if (piece == 0 || (p.group_starts >> piece & 1u) != 0) weigh_group(stage, p, piece, group++, w);
      KVCACHE_UNROLL
      for (int c = 0; c < 32 / chunk_channels; ++c) {
        const int chunk = piece * (32 / chunk_channels) + c;
        if (chunk * chunk_channels < Dim) multiply_chunk(stage, chunk, w);
      }
    }
  }

 private:
  static constexpr int chunk_channels = 128 / bits_of(V);
  using k_parts = code_parts<K>;
  using v_parts = code_parts<V>;

  /// Adds 16 channels' products of all slots.
  template <bool Fold, int Runs>
  KVCACHE_DEVICE void multiply_step(uint32_t stage, uint32_t scales, int step, float (&zero)[Runs][4]) {
    uint32_t codes[4];
    ldmatrix4_transposed(codes, stage + k_offset + step * 512);
    uint32_t folded[q_words];
    KVCACHE_UNROLL
    for (int unit = 0; unit < packed_units; ++unit) {
      if (Fold && (unit == 0 || Runs == 2)) {
        fold(scales + (Runs == 2 ? unit : 0) * 4 * Dim + step * 32 + lane % 4 * 8, step, folded,
             zero[Runs == 2 ? unit : 0]);
      }
      KVCACHE_UNROLL
      for (int part = 0; part < k_parts::parts; ++part) {
        const auto f = k_parts::fragment_of(codes[2 * unit], codes[2 * unit + 1], part);
        multiply_part<Wide>(&score[(unit * k_parts::parts + part) * each], f.a, Fold ? folded : q[step]);
      }
    }
  }

  /// The query times the scales of 16 channels, and its product with their minima.
  KVCACHE_DEVICE void fold(uint32_t at, int step, uint32_t (&folded)[q_words], float (&zero)[4]) const {
    uint32_t s[2], z[2];
    ld_shared2(at, s[0], s[1]);
    ld_shared2(at + 2 * Dim, z[0], z[1]);
    KVCACHE_UNROLL
    for (int i = 0; i < q_words; ++i) folded[i] = mul2(q[step][i], s[Wide ? i / 2 : i]);
    if constexpr (Wide) {
      mma<half_kind::f16>(zero, q[step], z[0], z[1]);
    } else {
      const uint32_t rows[4] = {z[0], z[0], z[1], z[1]};
      mma<half_kind::f16>(zero, rows, q[step][0], q[step][1]);
    }
  }

  /// Sums of products with codes become scores.
  template <int Runs>
  KVCACHE_DEVICE void finish_channels(const float (&zero)[Runs][4]) {
    KVCACHE_UNROLL
    for (int n = 0; n < base::score_tiles; ++n) {
      const int run = Runs == 2 ? n / (base::score_tiles / 2) : 0;
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float z = zero[run][Wide ? (i >> 1) * 2 : i & 1];
        score[n][i] = fused(score[n][i], k_parts::unit(high_of(n, i)), z);
      }
    }
  }
  KVCACHE_DEVICE void finish_slots(uint32_t scales) {
    KVCACHE_UNROLL
    for (int n = 0; n < base::score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (!Wide && (i & 1) != 0) continue;  // two query rows of one slot
        const float s = widen<half_kind::f16>(ld_shared16(scales + token_of(n, i, lane) * 2)) *
                        k_parts::unit(high_of(n, i));
        score[n][i] *= s;
        if (!Wide) score[n][i + 1] *= s;
      }
    }
  }

  /// Weights times a number per slot, f16 numbers `pitch` bytes apart.
  KVCACHE_DEVICE void times_slots(float (&to)[base::score_tiles][4], uint32_t from, uint32_t pitch) const {
    KVCACHE_UNROLL
    for (int n = 0; n < base::score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (!Wide && (i & 1) != 0) continue;  // two query rows of one slot
        const float s = widen<half_kind::f16>(ld_shared16(from + token_of(n, i, lane) * pitch));
        to[n][i] = score[n][i] * s;
        if (!Wide) to[n][i + 1] = score[n][i + 1] * s;
      }
    }
  }
  KVCACHE_DEVICE void add_up(const float (&from)[base::score_tiles][4], int piece) {
    KVCACHE_UNROLL
    for (int n = 0; n < base::score_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) more[base::state_of(i)][piece] += from[n][i];
    }
  }

  /// Weights times the scales of a group of channels as fragments, and what the minima add.
  KVCACHE_DEVICE void weigh_group(uint32_t stage, const packed_params& p, int piece, uint32_t group,
                                  uint32_t (&w)[parts_k][4]) {
    const uint32_t pitch = static_cast<uint32_t>(p.value_groups) * 2;
    const uint32_t scales = stage + stream::v_scales + group * 2, zeros = stage + stream::v_zeros + group * 2;
    float weight[base::score_tiles][4];
    times_slots(weight, scales, pitch);
    if constexpr (V != packed_code::e4m3) {
      if (p.v.zero != nullptr) {
        float minima[base::score_tiles][4];
        times_slots(minima, zeros, pitch);
        add_up(minima, piece);
      } else {
        add_up(weight, piece);
      }
    }
    KVCACHE_UNROLL
    for (int h = 0; h < parts_k; ++h) {
      if constexpr (Wide) {
        KVCACHE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float(&s)[4] = weight[2 * h + i / 2];
          w[h][i] = pack2<half_kind::f16>(s[i % 2 * 2], s[i % 2 * 2 + 1]);
        }
      } else {
        w[h][0] = movmatrix(pack2<half_kind::f16>(weight[h][0], weight[h][1]));
        w[h][1] = movmatrix(pack2<half_kind::f16>(weight[h][2], weight[h][3]));
      }
    }
  }

  /// Adds all slots' products of a chunk's channels.
  KVCACHE_DEVICE void multiply_chunk(uint32_t stage, int chunk, const uint32_t (&w)[parts_k][4]) {
    const uint32_t at = stream::chunk_on(stage + v_offset, chunk);
    KVCACHE_UNROLL
    for (int pair = 0; pair < parts_k / 2; ++pair) {
      uint32_t codes[4];
      ldmatrix4_transposed(codes, at + pair * 32 * stream::pitch * 16);
      KVCACHE_UNROLL
      for (int half = 0; half < 2; ++half) {
        KVCACHE_UNROLL
        for (int part = 0; part < v_parts::parts; ++part) {
          const auto f = v_parts::fragment_of(codes[2 * half], codes[2 * half + 1], part);
          multiply_part<Wide>(&out[(chunk * v_parts::parts + part) * each], f.a, w[2 * pair + half]);
        }
      }
    }
  }
};

}  // namespace kvcache::detail::gpu
