// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernels are told: plain structs, filled on the host from the structs of the C API (host.hpp) and
// passed by value. Pointers are device pointers. Strides are bytes for planes, rows and results, elements for
// side arrays, always 64 bits.
#include <cstdint>

#if defined(__CUDACC__)
#define KVCACHE_BOTH __host__ __device__
#else
#define KVCACHE_BOTH
#endif

namespace kvcache::detail::gpu {

inline constexpr int32_t warps_of_block = 4;
inline constexpr int32_t threads_of_block = 32 * warps_of_block;
inline constexpr int32_t most_parts = 16;   ///< results that one merge joins
inline constexpr int32_t most_pairs = 128;  ///< channel pairs that rotary embedding turns
inline constexpr int32_t narrow_rows = 8;   ///< packed query rows of a tile with tokens on M
inline constexpr int32_t wide_rows = 16;    ///< the same with rows on M

/// Keys of a tile, the step of a warp. Wide heads take half, so that every device has room for the stages.
KVCACHE_BOTH constexpr int32_t tile_tokens(int32_t dim) {
  return dim > 128 ? 16 : 32;
}
/// Bytes from one token of a staged tile to the next: rows that are no multiple of 128 bytes are padded by
/// one 16-byte chunk, which makes their number odd; the others are swizzled instead.
KVCACHE_BOTH constexpr int32_t staged_row(int32_t dim) {
  return dim % 64 == 0 ? dim * 2 : dim * 2 + 16;
}
inline constexpr int32_t stages = 3;  ///< half steps (K or V of a tile) that a warp has room for
KVCACHE_BOTH constexpr int32_t stage_bytes(int32_t dim) {
  return tile_tokens(dim) * staged_row(dim);
}
/// Shared memory of a decode block: the stages of all warps. Before they are in use the query rows lie in one
/// of them, afterwards the warps' states, to be joined. 96 KiB at most, which every device has.
KVCACHE_BOTH constexpr int32_t decode_shared_bytes(int32_t dim) {
  return warps_of_block * stages * stage_bytes(dim);
}
/// Wide tiles of wide heads would not fit the registers.
KVCACHE_BOTH constexpr bool has_wide(int32_t dim) {
  return dim <= 128;
}

/// The prefill kernel: packed query rows of a block, of which each warp takes 16 or 32, keys of a tile, and
/// half steps (K or V of a tile) that the block has room for. Wide heads take half the rows, for the
/// registers.
KVCACHE_BOTH constexpr int32_t prefill_rows(int32_t dim) {
  return dim > 128 ? 64 : 128;
}
inline constexpr int32_t prefill_tokens = 64;
KVCACHE_BOTH constexpr int32_t prefill_stages(int32_t dim) {
  return dim > 128 ? 2 : 3;
}
KVCACHE_BOTH constexpr int32_t prefill_stage_bytes(int32_t dim) {
  return prefill_tokens * staged_row(dim);
}
inline constexpr int32_t prefill_note_bytes = 64;  ///< what a warp keeps of its place
/// Shared memory of a prefill block: the query rows, the stages and the notes, less than 97 KiB.
KVCACHE_BOTH constexpr int32_t prefill_shared_bytes(int32_t dim) {
  return prefill_rows(dim) * staged_row(dim) + prefill_stages(dim) * prefill_stage_bytes(dim) +
         warps_of_block * prefill_note_bytes;
}

/// Rows of queries, keys, values or results.
struct row_array {
  char* data;
  int64_t row_stride;
  int64_t head_stride;
  int32_t type;  ///< KVC_F32, KVC_F16, KVC_BF16
};

/// Keys or values where they lie; channels are contiguous.
struct plane_view {
  char* data;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
};

/// Partial states of the splits: rows of [n * partial_rows][q_heads][splits].
struct partial_view {
  float* o;     ///< [..][dim], normalised
  float* lse2;  ///< [..]
};

struct decode_params {
  row_array q, out;
  plane_view k, v;
  partial_view partial;  ///< used where splits > 1
  float* lse2;           ///< [rows][lse_row_stride], null = not wanted
  int64_t lse_row_stride;
  float* key_score;  ///< null = not wanted
  int64_t key_score_stride, key_score_head_stride;
  const int32_t* table;
  int64_t table_stride;
  const int32_t* kv_len;
  int64_t kv_len_stride, kv_len_head_stride;
  const int32_t* q_start;  ///< null: one row each
  const int32_t* q_pos;    ///< null without causal and window
  const int32_t* k_pos;    ///< null: positions are slots
  int64_t k_pos_stride, k_pos_head_stride;
  const float* sink_logit;
  float scale_log2;  ///< factor of a dot product that gives log2 units, or, capped, the argument of tanh
  float cap_log2;    ///< c * log2 e, 0 = no cap
  int32_t window;    ///< 0 = none
  int32_t causal;
  int32_t n, max_q, max_kv, kv_heads, group;
  int32_t table_columns, blocks, block_shift;
  int32_t regular;  ///< blocks of at least 16 slots, strides of blocks and tokens below 2^32
  int32_t row_tiles, splits;
  int32_t few_rows;  ///< decode takes sequences of so many rows, prefill longer ones; 0 = decode takes all
  int32_t partial_rows;  ///< rows of a sequence in `partial`
  int32_t split_keys;    ///< keys of a split at absolute borders, 0 = the visible tiles are dealt out evenly
};

/// A result over some of the keys.
struct merge_part {
  const char* o;
  const float* lse2;
  int64_t row_stride, head_stride, lse_row_stride;
  int32_t type;
};

struct merge_params {
  merge_part part[most_parts];
  int32_t n_parts;  ///< of `part`; with `splits` above 0 there is one
  int32_t splits;   ///< parts that follow each other: o by dim floats, lse2 by one
  row_array out;
  float* lse2;
  int64_t lse_row_stride;
  const float* sink_logit;
  const int32_t* q_start;  ///< rows of `part` are [n][max_q], those of out ragged; null: one for one
  int32_t max_q;           ///< rows of a sequence in the parts, 0: rows of the parts are rows of out
  int32_t only_short;      ///< sequences of more rows have no parts
  int32_t rows;            ///< of the parts
  int32_t heads, dim;
};

/// Angles as fractions of a turn: position p turns pair i by p * step[i] mod 2^64, of 2^64 parts.
struct rope_params {
  const float* table;  ///< [table_positions][pairs][2] cos, sin; null = none
  int32_t table_positions;
  int32_t pairs;  ///< 0 = no rotation
  int32_t half_split;
  uint64_t step[most_pairs];
};

struct append_params;  // append_params.hpp

struct rope_rows_params {
  row_array in, out;
  const int32_t* pos;
  int32_t rows, heads, dim;
  rope_params rope;
};

/// Size of a launch; every grid is one-dimensional.
struct launch_shape {
  uint32_t blocks;
  uint32_t threads;
  uint32_t shared_bytes;
};

}  // namespace kvcache::detail::gpu
