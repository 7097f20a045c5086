// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention of a few query rows over paged codes, and over what is still open, in one online softmax. Grid
// and splits are those of decode.cuh; splits are dealt out in runs of 64 slots. A block's warps first stream
// sealed tiles, then open ones, on the same accumulators. A row reads the slots before its own border packed
// and the others open (kvc_batch::row_sealed), so a tile in which rows differ is read in both forms.
#include "decode.cuh"
#include "packed_tile.cuh"

namespace kvcache::detail::gpu {

/// Where the rows of a lane read a slot: before `exempt` from the exempt space, before their border from
/// sealed blocks, from open ones behind it.
struct borders {
  int32_t row[2];
  int32_t exempt;
};
struct exempt_slots : borders {
  KVCACHE_DEVICE bool elsewhere(int /*state*/, int32_t slot) const { return slot >= exempt; }
  KVCACHE_DEVICE uint32_t wanted(int32_t /*tile*/) const { return ~0u; }
};
struct sealed_slots : borders {
  KVCACHE_DEVICE bool elsewhere(int state, int32_t slot) const { return slot < exempt || slot >= row[state]; }
};
struct open_slots : borders {
  KVCACHE_DEVICE bool elsewhere(int state, int32_t slot) const { return slot < exempt || slot < row[state]; }
  /// Open blocks need not hold the exempt slots, which a weight of 0 does not silence.
  KVCACHE_DEVICE uint32_t wanted(int32_t tile) const { return tile == 0 ? ~0u << exempt : ~0u; }
};

/// Leading slots that a sequence reads from the exempt space.
KVCACHE_DEVICE int32_t exempt_of(const packed_params& p, const decode_place& a) {
  if (p.exempt.table == nullptr) return 0;
  const auto id = static_cast<uint32_t>(p.exempt.table[a.sequence * p.exempt.table_stride]);
  return id < static_cast<uint32_t>(p.exempt.blocks) ? least(p.exempt_slots, a.length) : 0;
}

/// Slots that a query row reads from sealed blocks.
KVCACHE_DEVICE int32_t border_of(const packed_params& p, const decode_place& a, int32_t packed) {
  int32_t sealed = a.length;
  if (p.sealed != nullptr) sealed = most(least(p.sealed[a.sequence], sealed), 0);
  if (p.row_sealed == nullptr) return sealed;
  const int64_t row = a.first_row + least(packed / p.at.group, a.rows - 1);
  return most(least(p.row_sealed[row], sealed), 0);
}

/// The least and the largest border of the rows of a tile.
KVCACHE_DEVICE void borders_of(const packed_params& p, const decode_place& a, int32_t rows_of_tile,
                               int32_t& low, int32_t& high) {
  low = high = border_of(p, a, a.first_packed);
  if (p.row_sealed == nullptr) return;
  const int32_t end = least(a.first_packed + rows_of_tile, a.rows * p.at.group);
  for (int32_t x = a.first_packed + p.at.group - a.first_packed % p.at.group; x < end; x += p.at.group) {
    const int32_t at = border_of(p, a, x);
    low = least(low, at);
    high = most(high, at);
  }
}

/// The block's tiles of `tokens` slots; `a` counts in grains.
KVCACHE_DEVICE decode_place in_tiles(decode_place a, int32_t tokens) {
  const int32_t each = packed_grain / tokens;
  a.first *= each;
  a.last *= each;
  a.hot_first *= each;
  a.hot_last *= each;
  return a;
}

/// Rows of Dim floats times the Walsh-Hadamard matrix / sqrt(Dim), by all threads of the block.
template <int Dim>
KVCACHE_DEVICE void hadamard_rows(uint32_t area, int32_t rows) {
  constexpr float norm = Dim == 64 ? 0.125f : Dim == 128 ? 0.08838834764831845f : 0.0625f;
  for (int32_t step = 1; step < Dim; step *= 2) {
    block_barrier();
    for (int32_t i = static_cast<int32_t>(thread_index()); i < rows * Dim / 2; i += threads_of_block) {
      const uint32_t at = area + static_cast<uint32_t>(i / step * 2 * step + i % step) * 4;
      const float a = ld_shared(at), b = ld_shared(at + step * 4), scale = step == 1 ? norm : 1.0f;
      st_shared(at, (a + b) * scale);
      st_shared(at + step * 4, (a - b) * scale);
    }
  }
  block_barrier();
}

/// The query rows times Hadamard's matrix, as stage_queries leaves them. `area`: rows * Dim floats.
template <int Dim>
KVCACHE_DEVICE void stage_rotated(const decode_params& p, const decode_place& a, int32_t rows, uint32_t area,
                                  uint32_t queries) {
  for (int32_t i = static_cast<int32_t>(thread_index()); i < rows * Dim; i += threads_of_block) {
    const int32_t packed = a.first_packed + i / Dim;
    float v = 0;
    if (packed < a.rows * p.group) {
      const int32_t q_head = a.head * p.group + packed % p.group;
      v = load_value(row_of(p.q, a.first_row + packed / p.group, q_head), p.q.type, i % Dim);
    }
    st_shared(area + i * 4, v);
  }
  hadamard_rows<Dim>(area, rows);
  for (int32_t i = static_cast<int32_t>(thread_index()); i < rows * Dim / 2; i += threads_of_block) {
    const int32_t x = i / (Dim / 2), pair = i % (Dim / 2);
    const uint32_t both = pack2<half_kind::f16>(ld_shared(area + i * 8), ld_shared(area + i * 8 + 4));
    st_shared(queries + staged_at<Dim>(x, pair / 4) + pair % 4 * 4, both);
  }
  block_barrier();  // the area is free
}

/// Query rows that are staged already.
struct queries_staged {
  uint32_t at;
  template <class Tile>
  KVCACHE_DEVICE void take(const decode_params& /*p*/, const decode_place& /*a*/, Tile& t, uint32_t /*arena*/,
                           uint32_t lane) const {
    t.start(at, lane);
  }
};

/// All sealed tiles of a warp; as stream_tiles of decode.cuh.
template <bool Extras, int Dim, int Stage, int Stages, class Tile>
KVCACHE_DEVICE void stream_packed(const packed_params& p, const decode_place& a, Tile& t, uint32_t arena,
                                  uint32_t queries, uint32_t warp, int32_t end, const sealed_slots& slots) {
  const uint32_t lane = thread_index() % 32, stage0 = arena + warp * (Stages * Stage);
  using tiles = typename Tile::stream;
  using located = typename tiles::located;
  tiles stream;
  stream.start(p, a.sequence, a.head, end, a.last, lane);
  int32_t position[2];
  KVCACHE_UNROLL
  for (int r = 0; r < 2; ++r) {
    position[r] = position_of(p.at, a, a.first_packed + static_cast<int32_t>(Tile::row_of_state(r, lane)));
  }
  int32_t tile = a.first + static_cast<int32_t>(warp);
  const int32_t first_id = stream.fetch(tile), second_id = stream.fetch(tile + warps_of_block);
  int32_t next_id = stream.fetch(tile + 2 * warps_of_block);
  uint32_t stage_a = stage0, stage_b = stage0 + Stage, stage_c = stage_b + Stage;
  located now = stream.locate(tile, first_id);
  stream.copy_keys(now, stage_a);
  stream.copy_values(now, stage_b);
  if ((p.hadamard & KVC_HADAMARD_K) == 0) stage_queries<half_kind::f16, Dim>(p.at, a, Tile::rows, queries);
  block_barrier();
  t.start(queries, lane);
  located next = stream.locate(tile + warps_of_block, second_id);
  if constexpr (Stages == 3) stream.copy_keys(next, stage_c);
  const auto hot_first = static_cast<int32_t>(anew(static_cast<uint32_t>(a.hot_first)));
  for (; tile < a.last; tile += warps_of_block) {
    const bool full = stream.whole(now);
    cp_async_wait<Stages - 1>();
    warp_barrier();
    t.multiply_keys(stage_a);
    warp_barrier();
    if constexpr (Stages == 3) {
      stream.copy_values(next, stage_a);
    } else {
      stream.copy_keys(next, stage_a);
    }
    if (Extras || !full || tile < hot_first || tile >= a.hot_last) {
      mask_tile<Extras>(p.at, a, t, tile, stream.present(now), position, lane, slots);
    }
    t.weigh(Extras ? 1.0f : p.at.scale_log2);
    cp_async_wait<Stages - 1>();
    warp_barrier();
    if (!full) {
      stream.clear_tail(now, stage_b);
      warp_barrier();
    }
    t.multiply_values(stage_b, p);
    warp_barrier();
    now = next;
    if constexpr (Stages == 2) stream.copy_values(next, stage_b);
    next = stream.locate(tile + 2 * warps_of_block, next_id);
    if constexpr (Stages == 3) stream.copy_keys(next, stage_b);
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

/// Hands a warp's state over to a tile of open blocks, whose lanes hold other channels, through a stage.
template <int Dim, class From, class To>
KVCACHE_DEVICE void hand_over(From& from, To& to, const packed_params& p, uint32_t stage, uint32_t lane) {
  constexpr uint32_t pitch = Dim + 4;  // floats
  warp_barrier();
  from.store_sums(stage, pitch, p);
  warp_barrier();
  KVCACHE_UNROLL
  for (int n = 0; n < To::out_tiles; ++n) {
    KVCACHE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = To::row_of_state(To::state_of(i), lane);
      to.out[n][i] = ld_shared(stage + (row * pitch + To::channel_of(n, i, lane)) * 4);
    }
  }
  KVCACHE_UNROLL
  for (int r = 0; r < 2; ++r) {
    to.minus_top[r] = from.minus_top[r];
    to.sum[r] = from.sum[r];
  }
}

/// As finish_block of decode.cuh, with results turned back by Hadamard's matrix, which is its own inverse.
template <int Dim, class Tile>
KVCACHE_DEVICE void finish_rotated(const packed_params& p, const decode_place& a, Tile& t, uint32_t arena,
                                   uint32_t warp, uint32_t lane) {
  const block_states<Dim, Tile> all(arena);
  constexpr uint32_t after = warps_of_block * Tile::rows * (block_states<Dim, Tile>::pitch * 4 + 8);
  const uint32_t area = arena + after;
  t.add_lanes();
  all.store(t, warp, lane);
  block_barrier();
  float lse;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < Tile::rows * Dim; i += threads_of_block) {
    st_shared(area + i * 4, all.joined_value(i / Dim, i % Dim, lse));
  }
  hadamard_rows<Dim>(area, Tile::rows);
  for (int32_t i = static_cast<int32_t>(thread_index()); i < Tile::rows * Dim; i += threads_of_block) {
    const int32_t packed = a.first_packed + i / Dim;
    if (packed >= a.rows * p.at.group) continue;
    (void)all.joined_value(i / Dim, i % Dim, lse);
    write_value<Dim>(p.at, a, packed, i % Dim, ld_shared(area + i * 4), lse);
  }
}

/// Blocks of threads that a multiprocessor should have registers for.
constexpr int32_t packed_blocks(int32_t dim, bool wide) {
  return wide || dim > 128 ? 2 : dim <= 64 ? 4 : 3;
}

template <packed_code K, packed_code V, int Dim, bool Wide, bool Extras>
KVCACHE_KERNEL_BLOCKS(threads_of_block, packed_blocks(Dim, Wide))
decode_packed(KVCACHE_CONSTANT packed_params p) {
  using sealed_tile = packed_tile<K, V, Dim, Wide>;
  using exact_tile = warp_tile<half_kind::f16, Dim, Wide, open_tokens, true>;
  constexpr int stage = packed_stage_bytes(K, V, Dim), rows = sealed_tile::rows, steps = packed_stages(Dim);
  constexpr bool turns = (Dim & (Dim - 1)) == 0;
  static_assert(steps * stage >= rows * (Dim + 4) * 4);
  static_assert(packed_stages_bytes(K, V, Dim) >= rows * (warps_of_block * ((Dim + 4) * 4 + 8) + Dim * 4));
  decode_place a = place_of(p.at, rows);
  if (a.first_packed >= a.rows * p.at.group) return;  // the whole block
  find_tiles(p.at, a, rows, packed_grain);
  take_share(p.at, a, packed_grain);
  int32_t low, high;
  borders_of(p, a, rows, low, high);
  const uint32_t warp = shuffle(thread_index() / 32, 0), lane = thread_index() % 32;
  const uint32_t arena = shared_base(), queries = arena + packed_stages_bytes(K, V, Dim);
  borders own;
  KVCACHE_UNROLL
  for (int r = 0; r < 2; ++r) {
    own.row[r] = border_of(p, a, a.first_packed + static_cast<int32_t>(sealed_tile::row_of_state(r, lane)));
  }
  own.exempt = exempt_of(p, a);
  if constexpr (turns) {
    if ((p.hadamard & KVC_HADAMARD_K) != 0) stage_rotated<Dim>(p.at, a, rows, arena, queries);
  }
  exact_tile t;
  {
    decode_place sealed = in_tiles(a, sealed_tile::tokens);
    sealed.last = least(sealed.last, (high + sealed_tile::tokens - 1) / sealed_tile::tokens);
    sealed.hot_first = most(sealed.hot_first, own.exempt > 0 ? 1 : 0);
    sealed.hot_last = least(sealed.hot_last, low / sealed_tile::tokens);
    sealed_tile s;
    s.clear();
    stream_packed<Extras, Dim, stage, steps>(p, sealed, s, arena, queries, warp, high, sealed_slots{own});
    hand_over<Dim>(s, t, p, arena + warp * (steps * stage), lane);
    block_barrier();  // all stages are free
  }
  t.planes_bf16 = p.exact_bf16 != 0;
  if (a.first == 0 && a.first < a.last && own.exempt > 0) {
    decode_place few = a;
    few.last = 1;
    few.length = own.exempt;
    few.hot_last = 0;
    stream_tiles<Extras, Dim, stage, steps>(p.at, p.exempt, few, t, arena, warp, lane,
                                            queries_staged{queries}, exempt_slots{own});
    block_barrier();  // all stages are free
  }
  decode_place open = in_tiles(a, open_tokens);
  open.first = most(open.first, low / open_tokens);
  // Where no row has open slots nothing is read: the ids there need not be those of blocks in use.
  open.last = low < a.length ? least(open.last, (a.length + open_tokens - 1) / open_tokens) : 0;
  open.hot_first = most(open.hot_first, (most(high, own.exempt) + open_tokens - 1) / open_tokens);
  if (p.open.table != nullptr && open.first < open.last) {
    stream_tiles<Extras, Dim, stage, steps>(p.at, p.open, open, t, arena, warp, lane, queries_staged{queries},
                                            open_slots{own});
    block_barrier();  // all stages are free
  }
  if constexpr (turns) {
    if ((p.hadamard & KVC_HADAMARD_V) != 0) return finish_rotated<Dim>(p, a, t, arena, warp, lane);
  }
  finish_block<Dim>(p.at, a, t, arena, warp, lane);
}

}  // namespace kvcache::detail::gpu
