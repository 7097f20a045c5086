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

  packed_plane k, v;  ///< of the head
  const int32_t* table;
  int32_t blocks, block_shift, groups;
  int32_t end;   ///< slots that are read from sealed blocks
  int32_t last;  ///< first tile that is not the block's
  uint32_t lane;
  uint32_t k_to;  ///< where the lane's chunk of a step of K goes
  int32_t k_channel, v_token;

  KVCACHE_DEVICE void start(const packed_params& p, int64_t sequence, int32_t head, int32_t end_,
                            int32_t last_tile, uint32_t lane_) {
    lane = lane_;
    k = of_head(p.k, head);
    v = of_head(p.v, head);
    table = p.table + sequence * p.table_stride;
    blocks = p.blocks;
    block_shift = p.at.block_shift;
    groups = p.value_groups;
    end = end_;
    last = last_tile;
    // 8 lanes write 8 different 16-byte columns of the banks: rows 0..3 of unit 0 and 4..7 of unit 1, or the
    // other way round.
    const uint32_t unit = lane & 1u, m = lane >> 3 & 1u, row = (lane >> 4) * 4 + (lane >> 1 & 3u);
    k_to = (m * packed_units + unit) * 128 + ((row ^ (unit << 2)) << 4);
    k_channel = static_cast<int32_t>(row / 2 * 4 + m * 2 + row % 2);
    v_token = static_cast<int32_t>(slot_of_row(lane / chunks));
  }

  /// Block id of this lane's unit of a tile, -1 if there is none.
  KVCACHE_DEVICE int32_t fetch(int32_t tile) const {
    const int32_t slot = tile * tokens + static_cast<int32_t>(lane & 1u) * unit_tokens(K);
    return tile < last && slot < end ? table[slot >> block_shift] : -1;
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
  KVCACHE_DEVICE bool whole(const located& t) const {
    return t.good == 3u && end - t.tile * tokens >= tokens;
  }

  KVCACHE_DEVICE void copy_keys(const located& t, uint32_t stage) const {
    if (t.tile < last) {
      const int32_t slot = inside(t, static_cast<int32_t>(lane & 1u) * unit_tokens(K));
      const char* p = k.data + t.own * k.block_stride + slot * bits_k / 8 + k_channel * k.row_stride;
      const int64_t on = 16 * k.row_stride;
      const bool real = (t.good >> (lane & 1u) & 1u) != 0;
      KVCACHE_UNROLL
      for (int step = 0; step < Dim / 16; ++step, p += on) cp_async16(stage + k_to + step * 512, p, real);
      if constexpr (by_channel(K)) {
        channel_scales(t, stage);
      } else if (lane < tokens * 2 / 16) {
        const char* s = k.scale + t.id[0] * k.scale_block_stride + inside(t, 0) * 2 + lane * 16;
        cp_async16(stage + k_scales + lane * 16, s, readable(t, 0));
      }
    }
    cp_async_commit();
  }

  KVCACHE_DEVICE void copy_values(const located& t, uint32_t stage) const {
    if (t.tile < last) {
      if constexpr (spread) {
        rows(t, stage);
      } else {
        scattered(t, stage);
      }
      KVCACHE_UNROLL
      for (int run = 0; run < runs; ++run) {
        const int64_t block = t.id[run] * v.scale_block_stride;
        const int32_t first = inside(t, run * 32) * groups * 2;
        const char* from = (lane < 16 ? v.scale : v.zero) + block + first;
        const uint32_t to = stage + (lane < 16 ? v_scales : v_zeros) + run * 64 * groups;
        if (lane >= 16 && v.zero == nullptr) continue;
        for (uint32_t chunk = lane & 15u; chunk < 4u * static_cast<uint32_t>(groups); chunk += 16) {
          cp_async16(to + chunk * 16, from + chunk * 16, readable(t, run));
        }
      }
    }
    cp_async_commit();
  }

  /// Clears scales and minima of slots that were copied along but are not in use.
  KVCACHE_DEVICE void clear_tail(const located& t, uint32_t stage) const {
    const int32_t left = most(end - t.tile * tokens, 0);
    for (int32_t i = left * groups + static_cast<int32_t>(lane); i < tokens * groups; i += 32) {
      st_shared16(stage + v_scales + i * 2, 0);
      st_shared16(stage + v_zeros + i * 2, 0);
    }
  }

 private:
  static KVCACHE_DEVICE packed_plane of_head(packed_plane p, int32_t head) {
    p.data += head * p.head_stride;
    p.scale += head * p.scale_head_stride;
    if (p.zero != nullptr) p.zero += head * p.scale_head_stride;
    return p;
  }
  /// A slot's number in its block. Requires: the slots from there on that are asked for lie in one block.
  KVCACHE_DEVICE int32_t inside(const located& t, int32_t token) const {
    return (t.tile * tokens + token) & ((1 << block_shift) - 1);
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
  KVCACHE_DEVICE void channel_scales(const located& t, uint32_t stage) const {
    constexpr uint32_t per_array = Dim / 8, all = runs * 2 * per_array;
    KVCACHE_UNROLL
    for (uint32_t first = 0; first < all; first += 32) {
      const uint32_t x = first + lane, run = runs == 1 ? 0 : x / (2 * per_array), y = x % (2 * per_array);
      if (all % 32 != 0 && x >= all) continue;
      const int64_t block = (run == 0 ? t.id[0] : t.id[runs - 1]) * k.scale_block_stride;
      const char* from = (y < per_array ? k.scale : k.zero) + block + y % per_array * 16;
      cp_async16(stage + k_scales + x * 16, from, readable(t, static_cast<int>(run)));
    }
  }

  /// Where a warp copies whole rows at once; offsets between them are constants.
  KVCACHE_DEVICE void rows(const located& t, uint32_t stage) const {
    constexpr uint32_t at_once = 32 / chunks;
    const uint32_t to = stage + chunk_on(row_at(lane / chunks), lane % chunks);
    const char* base[runs];
    KVCACHE_UNROLL
    for (int run = 0; run < runs; ++run) {
      base[run] = v.data + t.id[run] * v.block_stride + inside(t, run * 32) * v.row_stride +
                  v_token * v.row_stride + lane % chunks * 16;
    }
    const bool full = whole(t);
    KVCACHE_UNROLL
    for (int j = 0; j < value_rows; ++j) {
      const uint32_t row = j * at_once, token = slot_of_row(row);  // of lane 0
      const uint32_t at = (to ^ (mixed(row) << 4)) + row * pitch * 16;
      const int run = static_cast<int>(row / 32);
      const char* from = base[run] + static_cast<int64_t>(token % 32) * v.row_stride;
      const int32_t slot = t.tile * tokens + static_cast<int32_t>(token) + v_token;
      cp_async16(at, from, full || (readable(t, run) && slot < end));
    }
  }

  /// Any number of chunks.
  KVCACHE_DEVICE void scattered(const located& t, uint32_t stage) const {
    KVCACHE_NO_UNROLL
    for (uint32_t i = lane; i < tokens * chunks; i += 32) {
      const uint32_t row = i / chunks, chunk = i % chunks, token = slot_of_row(row);
      const int run = static_cast<int>(token / 32);
      const int64_t block = run == 0 ? t.id[0] : t.id[runs - 1];
      const char* from = v.data + block * v.block_stride +
                         static_cast<int64_t>(inside(t, static_cast<int32_t>(token))) * v.row_stride +
                         chunk * 16;
      const int32_t slot = t.tile * tokens + static_cast<int32_t>(token);
      cp_async16(stage + chunk_on(row_at(row), chunk), from, readable(t, run) && slot < end);
    }
  }
};

}  // namespace kvcache::detail::gpu
