// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention of a few query rows over paged f16 or bf16 keys and values, split over the keys. A block takes
// one tile of packed rows (query row x query head of the group) of one sequence and kv head, and one split;
// its four warps stream every fourth tile each and join at the end. The grid is
//
//   block = ((sequence * kv_heads + head) * row_tiles + row tile) * splits + split
//
// and depends on the plan alone: lengths, tables and rows are read here. With one split results are written,
// else partial states that merge.cuh joins. Splitting over keys: Dao and others, "Flash-Decoding", 2023.
#include "tile_stream.cuh"

namespace kvcache::detail::gpu {

/// The rows and keys that a block is about.
struct decode_place {
  int32_t sequence, head, split;
  int32_t first_packed;         ///< packed row of the tile's first row
  int32_t rows;                 ///< query rows of the sequence
  int64_t first_row;            ///< the sequence's first row in q and out
  int32_t length;               ///< slots in use
  int32_t first, last;          ///< tiles
  int32_t hot_first, hot_last;  ///< tiles in which every row sees every key
};

KVCACHE_DEVICE decode_place place_of(const decode_params& p, int32_t rows_of_tile) {
  decode_place a;
  uint32_t b = block_index();
  a.split = static_cast<int32_t>(b % static_cast<uint32_t>(p.splits));
  b /= static_cast<uint32_t>(p.splits);
  a.first_packed = static_cast<int32_t>(b % static_cast<uint32_t>(p.row_tiles)) * rows_of_tile;
  b /= static_cast<uint32_t>(p.row_tiles);
  a.head = static_cast<int32_t>(b % static_cast<uint32_t>(p.kv_heads));
  a.sequence = static_cast<int32_t>(b / static_cast<uint32_t>(p.kv_heads));
  a.first_row = p.q_start != nullptr ? p.q_start[a.sequence] : a.sequence;
  a.rows = 1;
  if (p.q_start != nullptr)
    a.rows = most(least(p.q_start[a.sequence + 1] - p.q_start[a.sequence], p.max_q), 0);
  const int32_t len = p.kv_len[a.sequence * p.kv_len_stride + a.head * p.kv_len_head_stride];
  const int64_t room = static_cast<int64_t>(p.table_columns) << p.block_shift;
  a.length = most(least(len, p.max_kv), 0);
  if (a.length > room) a.length = static_cast<int32_t>(room);
  return a;
}

/// Position of the query row that a packed row belongs to.
KVCACHE_DEVICE int32_t position_of(const decode_params& p, const decode_place& a, int32_t packed) {
  if (p.q_pos == nullptr) return 0;
  return p.q_pos[a.first_row + least(packed / p.group, a.rows - 1)];
}

/// Which tiles rows with positions from `low` to `high` see, and which all of them see whole.
KVCACHE_DEVICE void tiles_of_positions(const decode_params& p, decode_place& a, int32_t low, int32_t high,
                                       int32_t tokens) {
  a.first = 0;
  a.last = (a.length + tokens - 1) / tokens;
  a.hot_first = 0;
  a.hot_last = a.last;
  const bool by_slot = p.k_pos == nullptr;
  if (p.causal != 0) {
    a.hot_last = by_slot ? least(a.hot_last, most(low + 1, 0) / tokens) : 0;
    if (by_slot) a.last = least(a.last, most(high, -1) / tokens + (high >= 0 ? 1 : 0));
  }
  if (p.window > 0) {
    const int64_t behind = static_cast<int64_t>(high) - p.window;  // the last slot that some row does not see
    if (behind >= 0) a.hot_first = static_cast<int32_t>(behind / tokens) + 1;
    const int64_t lowest = static_cast<int64_t>(low) - p.window + 1;
    if (by_slot && lowest > 0) a.first = static_cast<int32_t>(lowest / tokens);
    if (!by_slot) a.hot_last = 0;
  }
}

/// Which tiles any row sees, and which every row sees whole.
KVCACHE_DEVICE void find_tiles(const decode_params& p, decode_place& a, int32_t rows_of_tile,
                               int32_t tokens) {
  int32_t low = 0, high = 0;
  if (p.causal != 0 || p.window > 0) {
    low = high = position_of(p, a, a.first_packed);
    const int32_t end = least(a.first_packed + rows_of_tile, a.rows * p.group);
    for (int32_t x = a.first_packed + p.group - a.first_packed % p.group; x < end; x += p.group) {
      const int32_t at = position_of(p, a, x);
      low = least(low, at);
      high = most(high, at);
    }
  }
  tiles_of_positions(p, a, low, high, tokens);
}

/// The split's share of the tiles.
KVCACHE_DEVICE void take_share(const decode_params& p, decode_place& a, int32_t tokens) {
  if (p.split_keys > 0) {
    const int64_t from = static_cast<int64_t>(a.split) * (p.split_keys / tokens);
    const int64_t to = from + p.split_keys / tokens;
    if (from > a.first) a.first = from < a.last ? static_cast<int32_t>(from) : a.last;
    if (to < a.last) a.last = static_cast<int32_t>(to);
  } else if (p.splits > 1) {
    const int32_t each = (most(a.last - a.first, 0) + p.splits - 1) / p.splits;
    const int64_t from = static_cast<int64_t>(a.first) + static_cast<int64_t>(a.split) * each;
    a.first = from < a.last ? static_cast<int32_t>(from) : a.last;
    a.last = least(a.first + each, a.last);
  }
}

/// Packs the query rows of the tile into shared memory, rows that are not there as zeros.
template <half_kind Kind, int Dim>
KVCACHE_DEVICE void stage_queries(const decode_params& p, const decode_place& a, int32_t rows_of_tile,
                                  uint32_t stage) {
  constexpr int pairs = Dim / 2;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < rows_of_tile * pairs; i += threads_of_block) {
    const int32_t x = i / pairs, pair = i % pairs, packed = a.first_packed + x;
    uint32_t both = 0;
    if (packed < a.rows * p.group) {
      const int32_t q_head = a.head * p.group + packed % p.group;
      const char* row = row_of(p.q, a.first_row + packed / p.group, q_head);
      both = pack2<Kind>(load_value(row, p.q.type, 2 * pair), load_value(row, p.q.type, 2 * pair + 1));
    }
    st_shared(stage + staged_at<Dim>(x, pair / 4) + pair % 4 * 4, both);
  }
}

/// Every slot is read from the planes at hand.
struct all_slots {
  KVCACHE_DEVICE bool elsewhere(int /*state*/, int32_t /*slot*/) const { return false; }
  /// Bits of the slots of a warp's first tile that some row may read; the others are staged as zeros.
  KVCACHE_DEVICE uint32_t wanted(int32_t /*tile*/) const { return ~0u; }
};

/// Scores of keys a row does not see become -infinity, also of those it reads `elsewhere`. With Extras also:
/// scale, soft cap, score output.
template <bool Extras, class Tile, class Present, class Slots>
KVCACHE_DEVICE void mask_tile(const decode_params& p, const decode_place& a, Tile& t, int32_t tile,
                              Present present, const int32_t (&position)[2], uint32_t lane,
                              const Slots& slots) {
  KVCACHE_UNROLL
  for (int n = 0; n < Tile::score_tiles; ++n) {
    KVCACHE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t inside = Tile::token_of(n, i, lane);
      const int32_t slot = tile * Tile::tokens + static_cast<int32_t>(inside);
      const bool elsewhere = slots.elsewhere(Tile::state_of(i), slot);
      bool seen = (present >> inside & 1u) != 0 && !elsewhere;
      int32_t key = slot;
      if (Extras && p.k_pos != nullptr && seen) {
        key = p.k_pos[a.sequence * p.k_pos_stride + a.head * p.k_pos_head_stride + slot];
      }
      const int64_t behind = static_cast<int64_t>(position[Tile::state_of(i)]) - key;
      if (p.causal != 0 && behind < 0) seen = false;
      if (p.window > 0 && behind >= p.window) seen = false;
      float& s = t.score[n][i];
      if (Extras) {
        s *= p.scale_log2;
        if (p.cap_log2 > 0) s = soft_capped(s, p.cap_log2);
      }
      if (!seen) s = minus_infinity();
      if (!Extras || p.key_score == nullptr || slot >= a.length || elsewhere) continue;
      const int32_t packed =
          a.first_packed + static_cast<int32_t>(Tile::row_of_state(Tile::state_of(i), lane));
      if (packed >= a.rows * p.group) continue;
      const int64_t q_head = a.head * p.group + packed % p.group;
      p.key_score[(a.first_row + packed / p.group) * p.key_score_stride + q_head * p.key_score_head_stride +
                  slot] = s;
    }
  }
}

/// Query rows that are not staged yet: they lie in the first warp's last stage until every warp has them.
template <int Dim>
struct queries_to_stage {
  template <class Tile>
  KVCACHE_DEVICE void take(const decode_params& p, const decode_place& a, Tile& t, uint32_t arena,
                           uint32_t lane) const {
    const uint32_t queries = arena + 2 * stage_bytes(Dim);
    stage_queries<Tile::kind, Dim>(p, a, Tile::rows, queries);
    block_barrier();
    t.start(queries, lane);
    block_barrier();  // the stage is free
  }
};

/// All tiles of a warp, from blocks of `space`. With two stages K of the next tile takes the place of K, V
/// that of V, and one half step is under way where with three there are two.
template <bool Extras, int Dim, int Stage, int Stages, class Space, class Tile, class Queries, class Slots>
KVCACHE_DEVICE void stream_tiles(const decode_params& p, const Space& space, const decode_place& a, Tile& t,
                                 uint32_t arena, uint32_t warp, uint32_t lane, const Queries& queries,
                                 const Slots& slots) {
  const uint32_t stage0 = arena + warp * (Stages * Stage);
  using tiles = tile_stream<Dim, Tile::tokens>;
  tiles stream;
  stream.start(space, a.sequence, a.head, a.length, a.last, lane);
  int32_t position[2];
  KVCACHE_UNROLL
  for (int r = 0; r < 2; ++r) {
    position[r] = position_of(p, a, a.first_packed + static_cast<int32_t>(Tile::row_of_state(r, lane)));
  }
  using located = typename tiles::located;
  int32_t tile = a.first + static_cast<int32_t>(warp);
  const int32_t first_id = stream.fetch(tile), second_id = stream.fetch(tile + warps_of_block);
  int32_t next_id = stream.fetch(tile + 2 * warps_of_block);
  uint32_t stage_a = stage0, stage_b = stage0 + Stage, stage_c = stage_b + Stage;
  located at_first = stream.locate(tile, first_id);
  at_first.present &= slots.wanted(tile);
  stream.copy(stream.k, at_first, stage_a);
  stream.copy(stream.v, at_first, stage_b);
  queries.take(p, a, t, arena, lane);
  located next = stream.locate(tile + warps_of_block, second_id);
  if constexpr (Stages == 3) stream.copy(stream.k, next, stage_c);
  uint32_t present = at_first.present;
  for (; tile < a.last; tile += warps_of_block) {
    cp_async_wait<Stages - 1>();
    warp_barrier();
    t.multiply_keys(stage_a);
    warp_barrier();
    stream.copy(Stages == 3 ? stream.v : stream.k, next, stage_a);
    const bool whole = present == tiles::all_present && tile >= a.hot_first && tile < a.hot_last;
    if (Extras || !whole) mask_tile<Extras>(p, a, t, tile, present, position, lane, slots);
    t.weigh(Extras ? 1.0f : p.scale_log2);
    cp_async_wait<Stages - 1>();
    warp_barrier();
    t.multiply_values(stage_b);
    warp_barrier();
    present = next.present;
    if constexpr (Stages == 2) stream.copy(stream.v, next, stage_b);
    next = stream.locate(tile + 2 * warps_of_block, next_id);
    if constexpr (Stages == 3) stream.copy(stream.k, next, stage_b);
    next_id = stream.fetch(tile + 3 * warps_of_block);
    if constexpr (Stages == 3) {
      const uint32_t free = stage_b;
      stage_b = stage_a;
      stage_a = stage_c;
      stage_c = free;
    }
  }
  cp_async_wait<0>();
}

/// Where the warps' states lie while they are joined: accumulators [warp][row][pitch], then minus the
/// reference and the sum of each [warp][row].
template <int Dim, class Tile>
struct block_states {
  static constexpr uint32_t pitch = Dim + 4;  // floats; keeps rows apart in the banks
  uint32_t states, sums;

  explicit KVCACHE_DEVICE block_states(uint32_t arena)
      : states(arena), sums(arena + warps_of_block * Tile::rows * pitch * 4) {}

  KVCACHE_DEVICE void store(const Tile& t, uint32_t warp, uint32_t lane) const {
    KVCACHE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const uint32_t at = sums + (warp * Tile::rows + Tile::row_of_state(r, lane)) * 8;
      st_shared(at, t.minus_top[r]);  // several lanes write the same
      st_shared(at + 4, t.sum[r]);
    }
    KVCACHE_UNROLL
    for (int n = 0; n < Tile::out_tiles; ++n) {
      KVCACHE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t row = warp * Tile::rows + Tile::row_of_state(Tile::state_of(i), lane);
        st_shared(states + (row * pitch + Tile::channel_of(n, i, lane)) * 4, t.out[n][i]);
      }
    }
  }

  /// Channel d of row x over all warps, and the row's log-sum-exp.
  KVCACHE_DEVICE float joined_value(int32_t x, int32_t d, float& lse) const {
    float lowest = nothing_seen;
    for (int w = 0; w < warps_of_block; ++w) {
      const float minus_top = ld_shared(sums + (w * Tile::rows + x) * 8);
      lowest = minus_top < lowest ? minus_top : lowest;
    }
    float sum = 0, acc = 0;
    for (int w = 0; w < warps_of_block; ++w) {
      const uint32_t row = w * Tile::rows + x;
      const float part = ld_shared(sums + row * 8 + 4);
      if (!(part > 0)) continue;  // the warp saw nothing of this row
      const float weight = fast_exp2(lowest - ld_shared(sums + row * 8));
      sum += weight * part;
      acc += weight * ld_shared(states + (row * pitch + d) * 4);
    }
    lse = sum > 0 ? fast_log2(sum) - lowest : minus_infinity();
    return sum > 0 ? acc / sum : 0.0f;
  }
};

/// Writes channel d of a packed row: a partial state, or the result with its sink.
template <int Dim>
KVCACHE_DEVICE void write_value(const decode_params& p, const decode_place& a, int32_t packed, int32_t d,
                                float value, float lse) {
  const int32_t q_head = a.head * p.group + packed % p.group;
  if (p.splits > 1) {
    const int64_t row = static_cast<int64_t>(a.sequence) * p.partial_rows + packed / p.group;
    const int64_t at = (row * (p.kv_heads * p.group) + q_head) * p.splits + a.split;
    p.partial.o[at * Dim + d] = value;
    if (d == 0) p.partial.lse2[at] = lse;
    return;
  }
  const int64_t row = a.first_row + packed / p.group;
  const float sink = p.sink_logit != nullptr ? p.sink_logit[q_head] * 1.44269504088896341f : minus_infinity();
  const joined j = join(lse, sink);
  const float total = j.a + j.b;
  if (p.out.data != nullptr) {  // rounded as in merge.cuh: one split gives the bits of several
    store_value(row_of(p.out, row, q_head), p.out.type, d, total > 0 ? value * j.a / total : 0.0f);
  }
  if (d == 0 && p.lse2 != nullptr) {
    p.lse2[row * p.lse_row_stride + q_head] = total > 0 ? fast_log2(total) + j.top : minus_infinity();
  }
}

/// Joins the four warps' states and writes results or partial states.
template <int Dim, class Tile>
KVCACHE_DEVICE void finish_block(const decode_params& p, const decode_place& a, Tile& t, uint32_t arena,
                                 uint32_t warp, uint32_t lane) {
  const block_states<Dim, Tile> all(arena);
  t.add_lanes();
  all.store(t, warp, lane);
  block_barrier();
  for (int32_t i = static_cast<int32_t>(thread_index()); i < Tile::rows * Dim; i += threads_of_block) {
    const int32_t x = i / Dim, d = i % Dim, packed = a.first_packed + x;
    if (packed >= a.rows * p.group) continue;
    float lse;
    const float value = all.joined_value(x, d, lse);
    write_value<Dim>(p, a, packed, d, value, lse);
  }
}

template <half_kind Kind, int Dim, bool Wide, bool Extras>
KVCACHE_KERNEL(threads_of_block)
decode(const decode_params p) {
  using tile = warp_tile<Kind, Dim, Wide>;
  decode_place a = place_of(p, tile::rows);
  if (a.first_packed >= a.rows * p.group) return;     // the whole block
  if (p.few_rows > 0 && a.rows > p.few_rows) return;  // prefill.cuh takes the sequence
  find_tiles(p, a, tile::rows, tile::tokens);
  take_share(p, a, tile::tokens);
  const uint32_t warp = shuffle(thread_index() / 32, 0), lane = thread_index() % 32;
  const uint32_t arena = shared_base();
  tile t;
  t.clear();
  stream_tiles<Extras, Dim, stage_bytes(Dim), stages>(p, p, a, t, arena, warp, lane, queries_to_stage<Dim>{},
                                                      all_slots{});
  block_barrier();  // all stages are free
  finish_block<Dim>(p, a, t, arena, warp, lane);
}

}  // namespace kvcache::detail::gpu
