// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stream of sealed tiles that one warp reads: codes, scales and minima, as they lie in the block, by
// cp.async. A stage holds K or V of a tile:
//
//   K   matrices of 8 channels x 16 bytes, 128 bytes each, [step of 16 channels][m][unit]; channel 4 a + 2 m
//       + b of a step (b < 2) is row 2 a + b of matrix m, so that a lane of mma holds four channels that are
//       neighbours, and so are their scales; then, by channel, scales [channel], minima [channel], for each
//       32 slots; or a scale per slot
//   V   rows of codes in the order in which keys lie in fragments of scores: row 16 h + 8 e + i holds the
//   slot
//       column_at(h, e, i); then scales [slot][group] and minima
//
// Slots that are not there (past the end, absent block, id outside the pool) are not read. As codes, scales
// and minima of V they are 0, since a weight of 0 does not silence a NaN.
#include <type_traits>

#include "packed_fragments.cuh"

namespace kvcache::detail::gpu {

template <packed_code K, packed_code V, int Dim>
struct packed_stream {
  static constexpr int tokens = packed_tokens(K);
  static constexpr int bits_k = bits_of(K);
  static constexpr int runs = tokens / 32;  ///< runs of 32 slots, each in one block
  static constexpr int chunks = value_chunks(V, Dim), pitch = value_pitch(V, Dim);
  static constexpr bool spread = swizzled(chunks) && chunks <= 32;
  static constexpr int value_rows = tokens * chunks / 32;  ///< copies of V of a warp
  static constexpr int k_scales = packed_k_bytes(Dim);
  static constexpr int v_scales = packed_v_bytes(K, V, Dim);
  static constexpr int v_zeros = v_scales + packed_v_scale_bytes(K, Dim) / 2;

  /// A tile whose copies can start.
  struct located {
    int32_t tile;
    int32_t own;    ///< block of the lane's unit of K, 0 if there is none
    uint32_t good;  ///< bits of the units that can be read
    int32_t id[runs];
  };

  /// Of the head. Data begin at the lane's channel of K, at its slot and chunk of V; scales at its chunk.
  packed_plane k, v;
  const char* v_scale;  ///< for half of the lanes the minima
  const int32_t* table;
  int32_t blocks, block_shift, groups;
  uint32_t inside_mask;
  int32_t end;          ///< slots that are read from sealed blocks
  int32_t whole_tiles;  ///< tiles before it
  int32_t last;         ///< first tile that is not the block's
  uint32_t lane;
  uint32_t k_to, v_to, v_scale_to;  ///< where the lane's chunks go
  int32_t v_token;
  bool dense;           ///< rows of V lie behind each other
  uint32_t has_scales;  ///< the lane copies scales or minima of V

  KVCACHE_DEVICE void start(const packed_params& p, int64_t sequence, int32_t head, int32_t end_,
                            int32_t last_tile, uint32_t lane_) {
    lane = anew(lane_);
    k = of_head(p.k, head);
    v = of_head(p.v, head);
    table = anew(p.table + sequence * p.table_stride);
    blocks = p.blocks;
    block_shift = p.at.block_shift;
    inside_mask = anew((1u << block_shift) - 1);
    groups = p.value_groups;
    end = end_;
    whole_tiles = end / tokens;
    last = last_tile;
    // 8 lanes write 8 different 16-byte columns of the banks: rows 0..3 of unit 0 and 4..7 of unit 1, or the
    // other way round.
    const uint32_t unit = lane & 1u, m = lane >> 3 & 1u, row = (lane >> 4) * 4 + (lane >> 1 & 3u);
    k_to = anew((m * packed_units + unit) * 128 + ((row ^ (unit << 2)) << 4));
    k.data = anew(k.data + far(static_cast<int32_t>(row / 2 * 4 + m * 2 + row % 2), k.row_stride));
    if (by_channel(K)) {
      constexpr uint32_t per_array = Dim / 8;
      const uint32_t y = lane % (2 * per_array);
      k.scale = anew((y < per_array ? k.scale : k.zero) + y % per_array * 16);
    } else {
      k.scale = anew(k.scale + lane * 16);
    }
    v_token = static_cast<int32_t>(slot_of_row(lane / chunks));
    v_to = anew(chunk_on(row_at(lane / chunks), lane % chunks));
    dense = v.row_stride == chunks * 16;
    if (spread) v.data += far(v_token, v.row_stride) + lane % chunks * 16;
    v.data = anew(v.data);
    const uint32_t chunk = lane & 15u;
    v_scale = anew((lane < 16 || v.zero == nullptr ? v.scale : v.zero) + chunk * 16);
    v_scale_to = anew((lane < 16 ? v_scales : v_zeros) + chunk * 16);
    has_scales =
        anew(chunk < 4u * static_cast<uint32_t>(groups) && (lane < 16 || v.zero != nullptr) ? 1u : 0u);
  }

  /// Block id of this lane's unit of a tile, -1 if there is none.
  KVCACHE_DEVICE int32_t fetch(int32_t tile) const {
    const int32_t slot = tile * tokens + static_cast<int32_t>(lane & 1u) * unit_tokens(K);
    return tile < last && slot < end ? ld_constant(table + (slot >> block_shift)) : -1;
  }
  KVCACHE_DEVICE located locate(int32_t tile, int32_t id) const {
    const bool good = static_cast<uint32_t>(id) < static_cast<uint32_t>(blocks);
    located t;
    t.tile = tile;
    t.own = good ? id : 0;
    t.good = warp_ballot(good) & 3u;
    KVCACHE_UNROLL
    for (int run = 0; run < runs; ++run) {
      t.id[run] = static_cast<int32_t>(shuffle(static_cast<uint32_t>(t.own), run));
    }
    return t;
  }
  /// Bits of the slots of a tile that can be read.
  using bits = std::conditional_t<tokens == 64, uint64_t, uint32_t>;
  KVCACHE_DEVICE bits present(const located& t) const {
    constexpr bits unit = (bits{1} << unit_tokens(K)) - 1;
    const bits there = ((t.good & 1u) != 0 ? unit : 0) | ((t.good & 2u) != 0 ? unit << unit_tokens(K) : 0);
    const int32_t left = end - t.tile * tokens;
    return left >= tokens ? there : left > 0 ? there & ((bits{1} << left) - 1) : 0;
  }
  KVCACHE_DEVICE bool whole(const located& t) const { return t.good == 3u && t.tile < whole_tiles; }

  KVCACHE_DEVICE void copy_keys(const located& t, uint32_t stage) const {
    if (t.good == 3u) {
      keys<true>(t, stage);
    } else if (t.tile < last) {
      keys<false>(t, stage);
    }
    cp_async_commit();
  }
  KVCACHE_DEVICE void copy_values(const located& t, uint32_t stage) const {
    if (spread && dense && whole(t)) {
      rows<true>(t, stage);
      value_scales(t, stage);
    } else if (t.tile < last) {
      if constexpr (spread) {
        rows<false>(t, stage);
      } else {
        scattered(t, stage);
      }
      value_scales(t, stage);
    }
    cp_async_commit();
  }

  /// Clears scales and minima of slots that were copied along but are not in use.
  KVCACHE_DEVICE void clear_tail(const located& t, uint32_t stage) const {
    const auto tile = static_cast<int32_t>(anew(static_cast<uint32_t>(t.tile)));
    const int32_t left = most(end - tile * tokens, 0);
    for (int32_t i = left * groups + static_cast<int32_t>(lane); i < tokens * groups; i += 32) {
      st_shared16(stage + v_scales + i * 2, 0);
      st_shared16(stage + v_zeros + i * 2, 0);
    }
  }

 private:
  static KVCACHE_DEVICE packed_plane of_head(packed_plane p, int32_t head) {
    p.data += far(head, p.head_stride);
    p.scale += far(head, p.scale_head_stride);
    if (p.zero != nullptr) p.zero += far(head, p.scale_head_stride);
    return p;
  }
  /// A slot's number in its block. Requires: the slots from there on that are asked for lie in one block.
  KVCACHE_DEVICE int32_t inside(const located& t, int32_t token) const {
    return static_cast<int32_t>(static_cast<uint32_t>(t.tile * tokens + token) & inside_mask);
  }
  /// With 8 bits both units are of one run, the first of them is there if any is.
  KVCACHE_DEVICE bool readable(const located& t, int run) const { return (t.good >> run & 1u) != 0; }
  /// Slot of a staged row of V: a permutation of bits.
  static KVCACHE_BOTH constexpr uint32_t slot_of_row(uint32_t row) {
    return column_at<bits_k>(row / 16, row / 8 % 2, row % 8);
  }
  /// What a chunk's number is mixed with.
  static KVCACHE_BOTH constexpr uint32_t mixed(uint32_t row) {
    return chunks >= 8 ? row % 8 : chunks == 4 ? row / 2 % 4 : chunks == 2 ? row / 4 % 2 : 0;
  }

 public:
  /// Byte offset of the first chunk of a staged row of V; the others by chunk_on.
  static KVCACHE_BOTH constexpr uint32_t row_at(uint32_t row) {
    return row * pitch * 16 + (spread ? mixed(row) << 4 : 0);
  }
  static KVCACHE_DEVICE uint32_t chunk_on(uint32_t at, uint32_t chunk) {
    return spread ? at ^ (chunk << 4) : at + (chunk << 4);
  }

 private:
  /// Offsets are products of 32-bit numbers, in 64 bits.
  static KVCACHE_DEVICE uint64_t far(int32_t id, uint32_t stride) {
    return static_cast<uint64_t>(static_cast<uint32_t>(id)) * stride;
  }

  template <bool Full>
  KVCACHE_DEVICE void keys(const located& t, uint32_t stage) const {
    const auto slot = static_cast<uint32_t>(inside(t, static_cast<int32_t>(lane & 1u) * unit_tokens(K)));
    const char* p = k.data + far(t.own, k.block_stride) + slot * bits_k / 8;
    const bool real = (t.good >> (lane & 1u) & 1u) != 0;
    const uint32_t to = stage + k_to;
    KVCACHE_UNROLL
    for (int step = 0; step < Dim / 16; ++step) {
      copy<Full>(to + step * 512, p + far(16 * step, k.row_stride), real);
    }
    if constexpr (by_channel(K)) {
      channel_scales(t, stage);
    } else {
      const char* s = k.scale + far(t.id[0], k.scale_block_stride) + static_cast<uint32_t>(inside(t, 0)) * 2;
      cp_async16_if(lane < tokens * 2 / 16, stage + k_scales + lane * 16, s, readable(t, 0));
    }
  }

  KVCACHE_DEVICE void channel_scales(const located& t, uint32_t stage) const {
    constexpr uint32_t all = Dim / 4;  // chunks of a run: scales, then minima
    if constexpr (all <= 32) {
      constexpr uint32_t at_once = 32 / all < runs ? 32 / all : runs;
      KVCACHE_UNROLL
      for (uint32_t first = 0; first < runs; first += at_once) {
        const uint32_t run = at_once == 1 ? first : first + (lane / all < at_once ? lane / all : at_once - 1);
        const char* from = k.scale + far(run == 0 ? t.id[0] : t.id[runs - 1], k.scale_block_stride);
        cp_async16_if(lane < all * at_once, stage + k_scales + (first * all + lane) * 16, from,
                      readable(t, static_cast<int>(run)));
      }
    } else {
      KVCACHE_UNROLL
      for (uint32_t run = 0; run < runs; ++run) {
        const uint64_t block = far(t.id[run], k.scale_block_stride);
        KVCACHE_UNROLL
        for (uint32_t first = 0; first < all; first += 32) {
          const char* array = first < all / 2 ? k.scale : k.zero + lane * 16;
          cp_async16(stage + k_scales + (run * all + first + lane) * 16,
                     array + block + first % (all / 2) * 16, readable(t, static_cast<int>(run)));
        }
      }
    }
  }

  KVCACHE_DEVICE void value_scales(const located& t, uint32_t stage) const {
    const auto pitch = static_cast<uint32_t>(groups) * 2;  // of a slot
    KVCACHE_UNROLL
    for (int run = 0; run < runs; ++run) {
      const char* from =
          v_scale + far(t.id[run], v.scale_block_stride) + static_cast<uint32_t>(inside(t, run * 32)) * pitch;
      const uint32_t to = stage + v_scale_to + run * 32 * pitch;
      cp_async16_if(has_scales != 0, to, from, readable(t, run));
      if constexpr (most_value_groups(Dim) > 4) {
        const bool more = has_scales != 0 && 16 + (lane & 15u) < 4u * static_cast<uint32_t>(groups);
        cp_async16_if(more, to + 256, from + 256, readable(t, run));
      }
    }
  }

  /// Where a warp copies whole rows at once; offsets between them are constants. Full: all slots are there,
  /// and rows lie behind each other.
  template <bool Full>
  KVCACHE_DEVICE void rows(const located& t, uint32_t stage) const {
    constexpr uint32_t at_once = 32 / chunks;
    const uint32_t to = stage + v_to, row_stride = Full ? chunks * 16 : v.row_stride;
    const char* base[runs];
    KVCACHE_UNROLL
    for (int run = 0; run < runs; ++run) {
      base[run] = v.data + far(t.id[run], v.block_stride) + far(inside(t, run * 32), row_stride);
    }
    KVCACHE_UNROLL
    for (int j = 0; j < value_rows; ++j) {
      const uint32_t row = j * at_once, token = slot_of_row(row);  // of lane 0
      const uint32_t at = (to ^ (mixed(row) << 4)) + row * pitch * 16;
      const int run = static_cast<int>(row / 32);
      const int32_t slot = t.tile * tokens + static_cast<int32_t>(token) + v_token;
      copy<Full>(at, base[run] + far(static_cast<int32_t>(token % 32), row_stride),
                 readable(t, run) && slot < end);
    }
  }

  template <bool Full>
  static KVCACHE_DEVICE void copy(uint32_t to, const char* from, bool real) {
    if constexpr (Full) {
      cp_async16(to, from);
    } else {
      cp_async16(to, from, real);
    }
  }

  /// Any number of chunks.
  KVCACHE_DEVICE void scattered(const located& t, uint32_t stage) const {
    KVCACHE_NO_UNROLL
    for (uint32_t i = lane; i < tokens * chunks; i += 32) {
      const uint32_t row = i / chunks, chunk = i % chunks, token = slot_of_row(row);
      const int run = static_cast<int>(token / 32);
      const int32_t id = run == 0 ? t.id[0] : t.id[runs - 1];
      const char* from = v.data + far(id, v.block_stride) +
                         far(inside(t, static_cast<int32_t>(token)), v.row_stride) + chunk * 16;
      const int32_t slot = t.tile * tokens + static_cast<int32_t>(token);
      cp_async16(stage + chunk_on(row_at(row), chunk), from, readable(t, run) && slot < end);
    }
  }
};

}  // namespace kvcache::detail::gpu
