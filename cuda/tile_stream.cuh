// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stream of tiles that one warp reads: every fourth tile of its block's range, K and V in turn, each half
// step a commit group of cp.async into one of three stages of the warp's own:
//
//   stage   A: K(i)    B: V(i)    C: K(i+1)      scores of i are computed from A, then V(i+1) goes there;
//           A: V(i+1)  B: V(i)    C: K(i+1)      values of i are used from B, then K(i+2) goes there;
//           A: V(i+1)  B: K(i+2)  C: K(i+1)      and C, A, B take the places of A, B, C.
//
// Two half steps are always under way. No barrier but the warp's is needed. Block ids come one tile ahead,
// one lane per token; a token that is not there (past the end, absent block, id outside the pool) is staged
// as zeros, is never read, and has no bit in `present`.
#include "warp_tile.cuh"

namespace kvcache::detail::gpu {

/// Lane's view of keys or values of one head of one sequence.
struct stream_plane {
  const char* base;  ///< of the head; with regular rows already at the lane's row and chunk
  int64_t block_stride, token_stride;
};

template <int Dim, int Tokens = tile_tokens(Dim)>
struct tile_stream {
  static constexpr int tokens = Tokens;
  static constexpr int halves = tokens / 16;
  static constexpr uint32_t all_present = tokens == 32 ? ~0u : 0xffffu;
  static constexpr int chunks = Dim / 8;
  static constexpr bool whole_rows = 32 % chunks == 0;  ///< a warp copies whole rows at once
  static constexpr int rows_at_once = whole_rows ? 32 / chunks : 1;

  /// A tile whose copies can start.
  struct located {
    int32_t tile;
    uint32_t present;            ///< bits of the tokens that can be read
    int32_t id;                  ///< of the block of the lane's token; 0 if there is none
    uint32_t run_block[halves];  ///< of each 16 tokens
  };

  const int32_t* table;
  stream_plane k, v;
  int32_t block_shift, blocks;
  int32_t length;  ///< slots in use
  int32_t last;    ///< first tile that is not the block's
  uint32_t lane, to_offset;
  bool regular;  ///< 16 neighbouring tokens lie in one block, and strides fit 32 bits

  /// `p` has planes and a table: decode_params, or an exact_space of packed_params.hpp.
  template <class Space>
  KVCACHE_DEVICE void start(const Space& p, int64_t sequence, int32_t head, int32_t len, int32_t last_tile,
                            uint32_t lane_) {
    lane = lane_;
    table = p.table + sequence * p.table_stride;
    block_shift = p.block_shift;
    blocks = p.blocks;
    length = len;
    last = last_tile;
    regular = whole_rows && p.regular != 0;
    k = view(p.k, head);
    v = view(p.v, head);
    to_offset = staged_at<Dim>(lane / chunks, lane % chunks);
  }

  /// Block id of this lane's token of a tile, -1 if there is none.
  KVCACHE_DEVICE int32_t fetch(int32_t tile) const {
    const int32_t token = tile * tokens + static_cast<int32_t>(lane % tokens);
    return tile < last && token < length ? table[token >> block_shift] : -1;
  }

  /// What the ids of a tile say.
  KVCACHE_DEVICE located locate(int32_t tile, int32_t id) const {
    const bool good = static_cast<uint32_t>(id) < static_cast<uint32_t>(blocks);
    located t;
    t.tile = tile;
    t.id = good ? id : 0;
    t.present = warp_ballot(good) & all_present;
    KVCACHE_UNROLL
    for (int h = 0; h < halves; ++h) t.run_block[h] = shuffle(static_cast<uint32_t>(t.id), h * 16);
    return t;
  }

  /// Starts the copy of K or V of a tile.
  KVCACHE_DEVICE void copy(const stream_plane& from, const located& t, uint32_t stage) const {
    if (t.present == all_present && regular) {
      rows<true>(from, t, stage);
    } else if (t.tile < last) {
      if (regular) {
        rows<false>(from, t, stage);
      } else {
        scattered(from, t, stage);
      }
    }
    cp_async_commit();
  }

 private:
  KVCACHE_DEVICE stream_plane view(const plane_view& p, int32_t head) const {
    const char* base = p.data + head * p.head_stride;
    if (regular) base += (lane / chunks) * p.token_stride + lane % chunks * 16;
    return {base, p.block_stride, p.token_stride};
  }
  KVCACHE_DEVICE uint32_t inside(const located& t, uint32_t token) const {
    return (static_cast<uint32_t>(t.tile) * tokens + token) & ((1u << block_shift) - 1);
  }

  /// Runs of 16 tokens that share a block. Offsets are products of 32-bit numbers, in 64 bits.
  template <bool Full>
  KVCACHE_DEVICE void rows(const stream_plane& from, const located& t, uint32_t stage) const {
    const uint32_t to = stage + to_offset;
    const auto block_stride = static_cast<uint32_t>(from.block_stride);
    const auto token_stride = static_cast<uint32_t>(from.token_stride);
    KVCACHE_UNROLL
    for (int h = 0; h < halves; ++h) {
      const char* p = from.base + static_cast<uint64_t>(t.run_block[h]) * block_stride +
                      static_cast<uint64_t>(inside(t, h * 16)) * token_stride;
      KVCACHE_UNROLL
      for (int j = 0; j < 16 / rows_at_once; ++j) {
        const uint32_t row = h * 16 + j * rows_at_once;  // of lane 0
        const uint32_t at = (to ^ ((row & 7u) << 4)) + row * staged_row(Dim);
        const char* source =
            p + static_cast<uint64_t>(token_stride) * static_cast<uint32_t>(j * rows_at_once);
        if constexpr (Full) {
          cp_async16(at, source);
        } else {
          cp_async16(at, source, (t.present >> (row + lane / chunks) & 1u) != 0);
        }
      }
    }
  }

  /// Any block size, any row length, any stride: chunk by chunk.
  KVCACHE_DEVICE void scattered(const stream_plane& from, const located& t, uint32_t stage) const {
    KVCACHE_NO_UNROLL
    for (int i = 0; i < tokens * chunks / 32; ++i) {
      const uint32_t row = (lane + 32 * i) / chunks, chunk = (lane + 32 * i) % chunks;
      const int64_t block = shuffle(static_cast<uint32_t>(t.id), row);
      const char* p = from.base + block * from.block_stride + inside(t, row) * from.token_stride + chunk * 16;
      cp_async16(stage + staged_at<Dim>(row, chunk), p, (t.present >> row & 1u) != 0);
    }
  }
};

}  // namespace kvcache::detail::gpu
