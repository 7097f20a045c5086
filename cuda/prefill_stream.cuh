// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the warps of a prefill block share: the staged query rows, the stages of keys and values, which go
// round as
//
//   stage   A: K(i)    B: V(i)    C: K(i+1)      each warp copies 16 of a tile's 64 tokens; one barrier of
//           A: V(i+1)  B: V(i)    C: K(i+1)      the block per half step, which says both that the next half
//           A: V(i+1)  B: K(i+2)  C: K(i+1)      step is there and that the last one's stage is free
//
// and, per warp, notes of its place. With two stages (wide heads) A holds keys and B values, one half step
// ahead. In shared memory:   query rows | stages | notes of warp 3, 2, 1, 0.
#include "decode.cuh"
#include "prefill_tile.cuh"

namespace kvcache::detail::gpu {

/// Where a warp keeps its place: in shared memory, as registers are needed for scores and accumulators.
struct warp_notes {
  uint32_t at;

  /// All lanes write the same.
  KVCACHE_DEVICE void write(const decode_place& a) const {
    const int32_t words[] = {a.first, a.last, a.hot_first, a.hot_last, a.first_packed,
                             a.rows,  a.head, a.length,    a.sequence};
    KVCACHE_UNROLL
    for (int i = 0; i < 9; ++i) st_shared(at + i * 4, static_cast<uint32_t>(words[i]));
    st_shared(at + 40, static_cast<uint32_t>(a.first_row));
    st_shared(at + 44, static_cast<uint32_t>(static_cast<uint64_t>(a.first_row) >> 32));
    warp_barrier();
  }
  KVCACHE_DEVICE int32_t word(int i) const { return static_cast<int32_t>(ld_shared_word(at + i * 4)); }
  KVCACHE_DEVICE int32_t length() const { return word(7); }
  KVCACHE_DEVICE int64_t sequence() const { return word(8); }
  KVCACHE_DEVICE bool sees(int32_t tile) const { return word(0) <= tile && tile < word(1); }
  KVCACHE_DEVICE bool sees_whole(int32_t tile) const { return word(2) <= tile && tile < word(3); }
  /// Which tokens of the next tile can be read; seen by the warp after its next barrier.
  KVCACHE_DEVICE void write_present(uint64_t present) const {
    st_shared(at + 48, static_cast<uint32_t>(present));
    st_shared(at + 52, static_cast<uint32_t>(present >> 32));
  }
  KVCACHE_DEVICE uint64_t present() const {
    return static_cast<uint64_t>(ld_shared_word(at + 52)) << 32 | ld_shared_word(at + 48);
  }
  /// The rows; not the tiles.
  KVCACHE_DEVICE decode_place rows() const {
    decode_place a;
    a.first_packed = word(4);
    a.rows = word(5);
    a.head = word(6);
    a.length = word(7);
    a.sequence = word(8);
    a.first_row =
        static_cast<int64_t>(static_cast<uint64_t>(ld_shared_word(at + 44)) << 32 | ld_shared_word(at + 40));
    return a;
  }
};

template <int Dim>
KVCACHE_DEVICE warp_notes notes_of(uint32_t warp) {
  return {shared_base() + prefill_shared_bytes(Dim) - (warp + 1) * prefill_note_bytes};
}

/// Packs the query rows of the tile into shared memory, a row per thread, rows that are not there as zeros:
/// as a part of the first commit group where rows are on 16 bytes and of the planes' type.
template <half_kind Kind, int Dim>
KVCACHE_DEVICE void stage_rows(const decode_params& p, const decode_place& a, uint32_t stage) {
  constexpr int32_t type = Kind == half_kind::f16 ? KVC_F16 : KVC_BF16;
  const auto address = reinterpret_cast<uintptr_t>(p.q.data);
  const bool plain =
      p.q.type == type &&
      ((address | static_cast<uint64_t>(p.q.row_stride) | static_cast<uint64_t>(p.q.head_stride)) & 15u) == 0;
  const auto x = static_cast<int32_t>(thread_index());
  if (x >= prefill_rows(Dim)) return;
  const int32_t packed = a.first_packed + x;
  const bool there = packed < a.rows * p.group;
  const char* row = p.q.data;
  if (there) row = row_of(p.q, a.first_row + packed / p.group, a.head * p.group + packed % p.group);
  if (plain) {
    KVCACHE_UNROLL
    for (int c = 0; c < Dim / 8; ++c) cp_async16(stage + staged_at<Dim>(x, c), row + c * 16, there);
    return;
  }
  KVCACHE_NO_UNROLL
  for (int i = 0; i < Dim / 2; ++i) {
    uint32_t both = 0;
    if (there) {
      both = pack2<Kind>(load_value(row, p.q.type, 2 * i), load_value(row, p.q.type, 2 * i + 1));
    }
    st_shared(stage + staged_at<Dim>(x, i / 4) + i % 4 * 4, both);
  }
}

/// The stages of a block. A is the one whose keys are read.
template <int Dim>
struct stage_ring {
  static constexpr int ahead = prefill_stages(Dim) - 1;  ///< half steps under way
  static constexpr uint32_t first = prefill_rows(Dim) * staged_row(Dim);
  static constexpr uint32_t last = first + ahead * prefill_stage_bytes(Dim);

  uint32_t a;

  KVCACHE_DEVICE void start() { a = shared_base() + first; }
  KVCACHE_DEVICE uint32_t b() const { return after(a); }
  KVCACHE_DEVICE uint32_t c() const { return after(after(a)); }
  KVCACHE_DEVICE void turn() { a = after(after(anew(a))); }

 private:
  static KVCACHE_DEVICE uint32_t after(uint32_t stage) {
    return stage == shared_base() + last ? shared_base() + first : stage + prefill_stage_bytes(Dim);
  }
};

/// What a warp knows of the tiles that the block stages: where its own 16 tokens of a tile lie, and which of
/// all 64 are there.
template <int Dim>
struct shared_stream {
  using run_stream = tile_stream<Dim, 16>;

  /// Ids of the blocks of a tile's tokens: a lane has those of tokens `lane` and `lane + 32`.
  struct tile_ids {
    int32_t id[2];
  };
  run_stream runs;
  uint32_t warp;  ///< also: of the four runs of a tile, the one that this warp copies

  KVCACHE_DEVICE void start(const decode_params& p, const decode_place& a, uint32_t warp_, uint32_t lane) {
    runs.start(p, a.sequence, a.head, a.length, a.last * warps_of_block, lane);
    warp = warp_;
  }

  /// Whether a tile is the block's.
  KVCACHE_DEVICE bool has(int32_t tile) const { return tile * warps_of_block < runs.last; }

  KVCACHE_DEVICE tile_ids fetch(const decode_params& p, const warp_notes& notes, int32_t tile) const {
    const int32_t length = notes.length();
    const int32_t* table = p.table + notes.sequence() * p.table_stride;
    tile_ids ids;
    KVCACHE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int32_t token = tile * prefill_tokens + h * 32 + static_cast<int32_t>(runs.lane);
      ids.id[h] = has(tile) && token < length ? table[token >> runs.block_shift] : -1;
    }
    return ids;
  }

  /// Which of the tile's tokens can be read.
  KVCACHE_DEVICE uint64_t present(const tile_ids& ids) const {
    const auto pool = static_cast<uint32_t>(runs.blocks);
    const uint32_t low = warp_ballot(static_cast<uint32_t>(ids.id[0]) < pool);
    const uint32_t high = warp_ballot(static_cast<uint32_t>(ids.id[1]) < pool);
    return static_cast<uint64_t>(high) << 32 | low;
  }

  /// Starts the copy of this warp's share of a tile.
  KVCACHE_DEVICE void copy(const stream_plane& from, int32_t tile, const tile_ids& ids,
                           uint32_t stage) const {
    const auto mine = static_cast<uint32_t>(warp < 2 ? ids.id[0] : ids.id[1]);
    const auto id = static_cast<int32_t>(shuffle(mine, warp % 2 * 16 + runs.lane % 16));
    const int32_t run = tile * warps_of_block + static_cast<int32_t>(warp);
    runs.copy(from, runs.locate(run, id), stage + warp * (16 * staged_row(Dim)));
  }

  /// Everything that is under way before the first tile: queries, K, and V where there is a stage for it.
  template <half_kind Kind>
  KVCACHE_DEVICE tile_ids begin(const decode_params& p, const decode_place& a, const warp_notes& notes,
                                const stage_ring<Dim>& stages) const {
    tile_ids ids = fetch(p, notes, a.first);
    stage_rows<Kind, Dim>(p, a, shared_base());
    copy(runs.k, a.first, ids, stages.a);
    notes.write_present(present(ids));
    if constexpr (stage_ring<Dim>::ahead == 2) {
      copy(runs.v, a.first, ids, stages.b());
      ids = fetch(p, notes, a.first + 1);
    }
    return ids;
  }

  /// Starts what follows the keys of a tile: the next keys, or the values.
  KVCACHE_DEVICE void after_keys_came(const decode_params& p, const warp_notes& notes, int32_t tile,
                                      tile_ids& ids, const stage_ring<Dim>& stages) const {
    if constexpr (stage_ring<Dim>::ahead == 2) {
      copy(runs.k, tile + 1, ids, stages.c());
    } else {
      copy(runs.v, tile, ids, stages.b());
      ids = fetch(p, notes, tile + 1);
    }
  }
  /// Starts what follows the values: the next values, or the next keys.
  KVCACHE_DEVICE void after_values_came(const decode_params& p, const warp_notes& notes, int32_t tile,
                                        tile_ids& ids, const stage_ring<Dim>& stages) const {
    constexpr bool deep = stage_ring<Dim>::ahead == 2;
    copy(deep ? runs.v : runs.k, tile + 1, ids, stages.a);
    notes.write_present(present(ids));
    if constexpr (deep) ids = fetch(p, notes, tile + 2);
  }
};

}  // namespace kvcache::detail::gpu
