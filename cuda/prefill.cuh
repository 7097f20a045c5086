// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention of chunks of prompts over paged f16 or bf16 keys and values. A block of four warps takes one tile
// of packed rows (query row x query head of the group) of one sequence and kv head, 128 or, with wide heads,
// 64 of them, and walks the tiles of 64 keys that any of its rows sees, staged once for all warps
// (prefill_stream.cuh). A warp passes over tiles that its own rows do not see and masks only those that some
// row does not see whole. The grid is
//
//   block = (sequence * kv_heads + head) * row_tiles + (row_tiles - 1 - row tile)
//
// so that of a causal chunk the longest tiles start first and blocks that read the same keys are neighbours.
// It depends on the plan alone. Sequences of few rows are left to decode.cuh, by the number of their own rows
// and not by the batch's. Order of loops: Dao, "FlashAttention-2", sections 3.1 and 3.2.
#include "prefill_stream.cuh"

namespace kvcache::detail::gpu {

/// The tiles that packed rows from `first_packed` on see, worked out by all lanes of a warp together.
KVCACHE_DEVICE void find_tiles_of_rows(const decode_params& p, decode_place& a, int32_t rows, uint32_t lane) {
  int32_t low = 0, high = 0;
  if (p.causal != 0 || p.window > 0) {
    const int32_t first = a.first_packed / p.group;
    const int32_t last = least(first + (a.first_packed % p.group + rows - 1) / p.group, a.rows - 1);
    low = high = p.q_pos[a.first_row + least(first + static_cast<int32_t>(lane), last)];
    for (int32_t r = first + static_cast<int32_t>(lane) + 32; r <= last; r += 32) {
      const int32_t at = p.q_pos[a.first_row + r];
      low = least(low, at);
      high = most(high, at);
    }
    KVCACHE_UNROLL
    for (uint32_t x = 1; x < 32; x *= 2) {
      low = least(low, static_cast<int32_t>(shuffle(static_cast<uint32_t>(low), lane ^ x)));
      high = most(high, static_cast<int32_t>(shuffle(static_cast<uint32_t>(high), lane ^ x)));
    }
  }
  tiles_of_positions(p, a, low, high, prefill_tokens);
}

/// The rows that a warp is about, and the tiles they see; none if there are no rows.
template <class Tile>
KVCACHE_DEVICE decode_place place_of_warp(const decode_params& p, decode_place a, uint32_t warp,
                                          uint32_t lane) {
  a.first_packed += static_cast<int32_t>(warp) * Tile::rows;
  if (a.first_packed < a.rows * p.group) {
    find_tiles_of_rows(p, a, Tile::rows, lane);
  } else {
    a.last = 0;
  }
  return a;
}

/// Keys that a query row sees, by position: from <= position <= upto.
struct seen_range {
  int32_t from, upto;
};
KVCACHE_DEVICE seen_range range_of(const decode_params& p, const decode_place& a, int32_t packed) {
  const int32_t at = position_of(p, a, packed);
  const int64_t first = static_cast<int64_t>(at) - p.window + 1;
  return {p.window > 0 && first > INT32_MIN ? static_cast<int32_t>(first) : INT32_MIN,
          p.causal != 0 ? at : INT32_MAX};
}

/// The `n` lowest bits of 64.
KVCACHE_DEVICE uint64_t low_bits(int32_t n) {
  return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}
/// Which tokens of a tile lie in a range of slots.
KVCACHE_DEVICE uint64_t tokens_between(int32_t tile, const seen_range& range) {
  const int32_t base = tile * prefill_tokens;
  const int32_t before = least(most(most(range.from, 0) - base, 0), prefill_tokens);
  const int32_t end = least(most(most(range.upto, -1) - base, -1), prefill_tokens - 1) + 1;
  return low_bits(end) & ~low_bits(before);
}
/// The same where positions are data.
KVCACHE_DEVICE uint64_t positions_between(const decode_params& p, const decode_place& a, int32_t tile,
                                          uint64_t present, const seen_range& range, uint32_t lane) {
  const int32_t* of_tile = p.k_pos + (a.sequence * p.k_pos_stride + a.head * p.k_pos_head_stride +
                                      static_cast<int64_t>(tile) * prefill_tokens);
  uint64_t seen = 0;
  KVCACHE_NO_UNROLL
  for (uint32_t i = 0; i < prefill_tokens / 4; ++i) {  // the lane's tokens
    const uint32_t token = i / 2 * 8 + lane % 4 * 2 + i % 2;
    if ((present >> token & 1u) == 0) continue;
    const int32_t at = of_tile[token];
    if (range.from <= at && at <= range.upto) seen |= uint64_t{1} << token;
  }
  return seen;
}

/// Scores of keys that a row does not see become -infinity.
template <class Band>
KVCACHE_DEVICE void mask_row(Band& band, int r, uint64_t seen, uint32_t lane) {
  const uint64_t own = seen >> (lane % 4 * 2);  // the lane's tokens now lie at bits known to the compiler
  KVCACHE_UNROLL
  for (int n = 0; n < Band::score_tiles; ++n) {
    KVCACHE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if ((own >> (n * 8 + i) & 1u) == 0) band.score[n][2 * r + i] = minus_infinity();
    }
  }
}

/// Scale and soft cap.
template <class Band>
KVCACHE_DEVICE void scale_band(const decode_params& p, Band& band) {
  KVCACHE_UNROLL
  for (int n = 0; n < Band::score_tiles; ++n) {
    KVCACHE_UNROLL
    for (int i = 0; i < 4; ++i) {
      float& s = band.score[n][i];
      s *= p.scale_log2;
      if (p.cap_log2 > 0) s = soft_capped(s, p.cap_log2);
    }
  }
}

/// Stores the scores of a row's keys, those that it does not see as -infinity.
template <class Band>
KVCACHE_DEVICE void store_scores(const decode_params& p, const decode_place& mine, const Band& band, int r,
                                 int32_t packed, int32_t tile, uint32_t lane) {
  if (packed >= mine.rows * p.group) return;
  const int64_t q_head = mine.head * p.group + packed % p.group;
  const int32_t slot = tile * prefill_tokens + static_cast<int32_t>(lane % 4) * 2;
  float* to = p.key_score + ((mine.first_row + packed / p.group) * p.key_score_stride +
                             q_head * p.key_score_head_stride + slot);
  KVCACHE_UNROLL
  for (int n = 0; n < Band::score_tiles; ++n) {
    KVCACHE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (slot + n * 8 + i < mine.length) to[n * 8 + i] = band.score[n][2 * r + i];
    }
  }
}

/// Masks what a tile needs masked and turns scores into weights.
template <bool Extras, class Tile>
KVCACHE_DEVICE void weigh_bands(const decode_params& p, const warp_notes& notes, Tile& t, int32_t tile,
                                uint32_t lane) {
  const uint64_t present = notes.present();
  const bool by_slot = !Extras || p.k_pos == nullptr;
  const bool whole = by_slot && present == ~uint64_t{0} && notes.sees_whole(tile);
  if (Extras) {
    KVCACHE_UNROLL
    for (int m = 0; m < Tile::bands; ++m) scale_band(p, t.band[m]);
  }
  if (!whole || (Extras && p.key_score != nullptr)) {
    const decode_place mine = notes.rows();
    KVCACHE_UNROLL
    for (int m = 0; m < Tile::bands; ++m) {
      KVCACHE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int32_t packed = mine.first_packed + Tile::row_of(m, r, lane);
        const seen_range range = range_of(p, mine, packed);
        mask_row(t.band[m], r,
                 by_slot ? present & tokens_between(tile, range)
                         : positions_between(p, mine, tile, present, range, lane),
                 lane);
        if (Extras && p.key_score != nullptr) store_scores(p, mine, t.band[m], r, packed, tile, lane);
      }
    }
  }
  KVCACHE_UNROLL
  for (int m = 0; m < Tile::bands; ++m) t.band[m].weigh_in_place(Extras ? 1.0f : p.scale_log2);
}

/// All tiles of a block.
template <bool Extras, half_kind Kind, int Dim>
KVCACHE_DEVICE void walk_tiles(const decode_params& p, const decode_place& a, const warp_notes& notes,
                               prefill_tile<Kind, Dim>& t, uint32_t warp, uint32_t lane) {
  constexpr int ahead = stage_ring<Dim>::ahead;
  const uint32_t queries = shared_base() + warp * (prefill_tile<Kind, Dim>::rows * staged_row(Dim));
  stage_ring<Dim> stages;
  stages.start();
  shared_stream<Dim> stream;
  stream.start(p, a, warp, lane);
  auto ids = stream.template begin<Kind>(p, a, notes, stages);
  t.start();
  for (int32_t tile = a.first; stream.has(tile);
       tile = static_cast<int32_t>(anew(static_cast<uint32_t>(tile))) + 1) {
    cp_async_wait<ahead - 1>();
    block_barrier();  // K is there; the last V was used
    stream.after_keys_came(p, notes, tile, ids, stages);
    if (prefill_tile<Kind, Dim>::held && tile == a.first) t.hold_queries(queries, lane);
    if (notes.sees(tile)) {
      t.multiply_keys(stages.a, queries, lane);
      weigh_bands<Extras>(p, notes, t, tile, lane);
      t.pack_weights();
    }
    cp_async_wait<ahead - 1>();
    block_barrier();  // V is there; K was used
    stream.after_values_came(p, notes, tile, ids, stages);
    if (notes.sees(tile)) t.multiply_values(stages.b(), lane);
    if constexpr (ahead == 2) stages.turn();
  }
  cp_async_wait<0>();
}

/// Writes a pair of neighbouring channels.
KVCACHE_DEVICE void store_pair(char* row, int32_t type, int32_t d, float a, float b) {
  if (type != KVC_F32 && (reinterpret_cast<uintptr_t>(row) & 3u) == 0) {
    *reinterpret_cast<uint32_t*>(row + d * 2) =
        type == KVC_F16 ? pack2<half_kind::f16>(a, b) : pack2<half_kind::bf16>(a, b);
    return;
  }
  store_value(row, type, d, a);
  store_value(row, type, d + 1, b);
}

/// Writes the results of the warp's rows, each with its sink.
template <half_kind Kind, int Dim>
KVCACHE_DEVICE void write_rows(const decode_params& p, const decode_place& mine, prefill_tile<Kind, Dim>& t,
                               uint32_t lane) {
  KVCACHE_UNROLL
  for (int m = 0; m < prefill_tile<Kind, Dim>::bands; ++m) t.band[m].add_lanes();
  KVCACHE_UNROLL
  for (int m = 0; m < prefill_tile<Kind, Dim>::bands; ++m) {
    const prefill_band<Dim>& band = t.band[m];
    KVCACHE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int32_t packed = mine.first_packed + prefill_tile<Kind, Dim>::row_of(m, r, lane);
      if (packed >= mine.rows * p.group) continue;
      const int32_t q_head = mine.head * p.group + packed % p.group;
      const int64_t row = mine.first_row + packed / p.group;
      const float lse = band.sum[r] > 0 ? fast_log2(band.sum[r]) - band.minus_top[r] : minus_infinity();
      const float sink =
          p.sink_logit != nullptr ? p.sink_logit[q_head] * 1.44269504088896341f : minus_infinity();
      const joined j = join(lse, sink);
      const float total = j.a + j.b;
      const float factor = band.sum[r] > 0 && total > 0 ? j.a / total / band.sum[r] : 0.0f;
      if (p.out.data != nullptr) {
        char* to = row_of(p.out, row, q_head);
        KVCACHE_UNROLL
        for (int n = 0; n < Dim / 8; ++n) {
          store_pair(to, p.out.type, n * 8 + static_cast<int32_t>(lane % 4) * 2, band.out[n][2 * r] * factor,
                     band.out[n][2 * r + 1] * factor);
        }
      }
      if (lane % 4 == 0 && p.lse2 != nullptr) {
        p.lse2[row * p.lse_row_stride + q_head] = total > 0 ? fast_log2(total) + j.top : minus_infinity();
      }
    }
  }
}

template <half_kind Kind, int Dim, bool Extras>
KVCACHE_KERNEL(threads_of_block)
prefill(const decode_params p) {
  decode_place a = place_of(p, prefill_rows(Dim));
  a.first_packed = (p.row_tiles - 1) * prefill_rows(Dim) - a.first_packed;  // the last rows first
  if (a.rows <= p.few_rows || a.first_packed >= a.rows * p.group) return;   // the whole block
  const uint32_t warp = shuffle(thread_index() / 32, 0), lane = thread_index() % 32;
  find_tiles_of_rows(p, a, prefill_rows(Dim), lane);
  prefill_tile<Kind, Dim> t;
  const warp_notes notes = notes_of<Dim>(warp);
  notes.write(place_of_warp<prefill_tile<Kind, Dim>>(p, a, warp, lane));
  walk_tiles<Extras>(p, a, notes, t, warp, lane);
  const uint32_t again = anew(thread_index());
  write_rows(p, notes_of<Dim>(again / 32).rows(), t, again % 32);
}

}  // namespace kvcache::detail::gpu
