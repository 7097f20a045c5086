// SPDX-License-Identifier: Apache-2.0
#pragma once
// What decode kernels over packed blocks are told, and how much room they take. See params.hpp.
#include "params.hpp"

namespace kvcache::detail::gpu {

/// Codes of sealed blocks that decode kernels read.
enum class packed_code { e4m3, u8, u4 };

KVCACHE_BOTH constexpr int32_t bits_of(packed_code c) {
  return c == packed_code::u4 ? 4 : 8;
}
/// Whether K has a scale and a minimum per channel; else one scale per slot.
KVCACHE_BOTH constexpr bool by_channel(packed_code c) {
  return c != packed_code::e4m3;
}

inline constexpr int32_t packed_grain = 64;  ///< slots: what splits are dealt out in
inline constexpr int32_t open_tokens = 16;   ///< keys of a tile of open blocks
inline constexpr int32_t packed_units = 2;   ///< 16-byte chunks of a channel's codes that a tile takes

/// Slots of a chunk of K codes. A chunk, or unit, never leaves its block.
KVCACHE_BOTH constexpr int32_t unit_tokens(packed_code k) {
  return 128 / bits_of(k);
}
/// Keys of a tile of sealed blocks.
KVCACHE_BOTH constexpr int32_t packed_tokens(packed_code k) {
  return packed_units * unit_tokens(k);
}
/// 16-byte chunks of a slot's V codes, and from slot to slot where they are staged: without conflicts of
/// banks by swizzling where that is a power of two, by an odd distance elsewhere.
KVCACHE_BOTH constexpr int32_t value_chunks(packed_code v, int32_t dim) {
  return v == packed_code::u4 ? (dim + 31) / 32 : dim / 16;
}
KVCACHE_BOTH constexpr bool swizzled(int32_t chunks) {
  return (chunks & (chunks - 1)) == 0;
}
KVCACHE_BOTH constexpr int32_t value_pitch(packed_code v, int32_t dim) {
  const int32_t chunks = value_chunks(v, dim);
  return swizzled(chunks) ? chunks : chunks | 1;
}
/// Groups of a slot's channels that may have scales of their own.
KVCACHE_BOTH constexpr int32_t most_value_groups(int32_t dim) {
  return (dim + 31) / 32;
}

KVCACHE_BOTH constexpr int32_t packed_k_bytes(int32_t dim) {
  return dim * packed_units * 16;
}
/// Scales, then minima.
KVCACHE_BOTH constexpr int32_t packed_k_scale_bytes(packed_code k, int32_t dim) {
  if (!by_channel(k)) return 2 * packed_tokens(k);
  return packed_tokens(k) / 32 * 2 * 2 * dim;
}
KVCACHE_BOTH constexpr int32_t packed_v_bytes(packed_code k, packed_code v, int32_t dim) {
  return packed_tokens(k) * value_pitch(v, dim) * 16;
}
KVCACHE_BOTH constexpr int32_t packed_v_scale_bytes(packed_code k, int32_t dim) {
  return packed_tokens(k) * most_value_groups(dim) * 2 * 2;
}
/// A half step: K or V of a tile, sealed or open.
KVCACHE_BOTH constexpr int32_t packed_stage_bytes(packed_code k, packed_code v, int32_t dim) {
  const int32_t of_k = packed_k_bytes(dim) + packed_k_scale_bytes(k, dim);
  const int32_t of_v = packed_v_bytes(k, v, dim) + packed_v_scale_bytes(k, dim);
  const int32_t open = open_tokens * staged_row(dim);
  const int32_t most = of_k > of_v ? (of_k > open ? of_k : open) : (of_v > open ? of_v : open);
  return (most + 127) / 128 * 128;
}
/// Half steps that a warp has room for; wide heads have two, so that every device has room for their stages.
KVCACHE_BOTH constexpr int32_t packed_stages(int32_t dim) {
  return dim > 128 ? 2 : stages;
}
/// Shared memory of a block: the stages of all warps, and the query rows.
KVCACHE_BOTH constexpr int32_t packed_stages_bytes(packed_code k, packed_code v, int32_t dim) {
  return warps_of_block * packed_stages(dim) * packed_stage_bytes(k, v, dim);
}
KVCACHE_BOTH constexpr int32_t packed_shared_bytes(packed_code k, packed_code v, int32_t dim, bool wide) {
  return packed_stages_bytes(k, v, dim) + (wide ? wide_rows : narrow_rows) * staged_row(dim);
}

/// K or V of sealed blocks: rows of codes (a channel's of K, a slot's of V), and scales of a block and head.
struct packed_plane {
  const char* data;
  const char* scale;
  const char* zero;  ///< minima; null where there are none
  uint32_t block_stride, head_stride, row_stride;
  uint32_t scale_block_stride, scale_head_stride;
};

/// Blocks of values beside the sealed ones: the open space, or the exempt first slots.
struct exact_space {
  plane_view k, v;
  const int32_t* table;  ///< null: there is none
  int64_t table_stride;
  int32_t block_shift, blocks, regular;  ///< as in decode_params
};

struct packed_params {
  decode_params at;  ///< all but its planes and table
  packed_plane k, v;
  const int32_t* table;  ///< of sealed blocks
  int64_t table_stride;
  int32_t blocks;
  exact_space open, exempt;
  const int32_t* sealed;      ///< [n]; null: all slots
  const int32_t* row_sealed;  ///< [rows]; null: as sealed
  int32_t exempt_slots;       ///< leading slots read from the exempt space, if the sequence has a block there
  int32_t exact_bf16;         ///< open and exempt planes hold bf16, else f16
  int32_t value_groups;       ///< of a slot's channels
  uint32_t group_starts;      ///< bit i: a group begins with the i-th 32 channels
  float value_zero;           ///< factor of the sums of minima; without those, of the sums of scales
  int32_t hadamard;           ///< KVC_HADAMARD_*
};

}  // namespace kvcache::detail::gpu
