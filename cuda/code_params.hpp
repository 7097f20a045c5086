// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernels that write, copy and read codes are told. A plane of codes as quant/format.hpp draws it;
// the same struct describes an exact plane, so that K and V are chosen independently.
#include "params.hpp"
#include "run_params.hpp"

namespace kvcache::detail::gpu {

/// K or V of one layer's sealed blocks: codes, or f16 and bf16 values as they are.
struct coded_plane {
  char* data;
  int64_t block_stride, head_stride;
  int64_t row_stride;  ///< from channel to channel of codes of K, else from slot to slot
  char* scale;         ///< f16
  char* zero;          ///< f16, null: the codes lie evenly about 0
  int64_t scale_block_stride, scale_head_stride;
  int16_t type, kind, group, clip;  ///< KVC_U4 ..., KVC_SCALE_*, values that share a scale, KVC_CLIP_*
};

/// One layer whose blocks are sealed, or copied.
struct coded_layer {
  plane_view open_k, open_v;
  coded_plane k, v;
  int32_t open_k_type, open_v_type;
};

/// Commands of one stage, kind and group. Block of threads as in run_params.
struct code_params {
  int32_t n_commands, n_layers, kv_heads, dim_k, dim_v, block;
  coded_layer layer[layers_at_once];
  moved_block command[commands_at_once];
};

/// Blocks that are turned back into floats. Block of threads: (block * 2 + plane).
struct unpack_params {
  coded_plane k, v;
  const int32_t* id;
  int32_t n, head, blocks, dim_k, dim_v, block;
  float *to_k, *to_v;  ///< null = not wanted
  int64_t to_k_stride, to_v_stride;
};

static_assert(sizeof(code_params) <= 32764);

/// Shared memory of a sealed cell: its values, a row of 16-byte chunks and one more per slot; a word per
/// scale and minimum; what the warps tell each other.
KVCACHE_BOTH constexpr int32_t sealed_row(int32_t dim) {
  return dim * 2 + 16;
}
inline constexpr int32_t seal_scratch_words = 32;
KVCACHE_BOTH constexpr int32_t seal_shared_bytes(int32_t tokens, int32_t dim, int32_t scales) {
  return tokens * sealed_row(dim) + 4 * (scales + seal_scratch_words);
}

/// Starts of these kernels; as in launch.hpp.
int32_t launch_seal(const code_params& p, const launch_shape& shape, struct CUstream_st* stream) noexcept;
int32_t launch_copy_codes(const code_params& p, const launch_shape& shape,
                          struct CUstream_st* stream) noexcept;
int32_t launch_unpack(const unpack_params& p, const launch_shape& shape, struct CUstream_st* stream) noexcept;

}  // namespace kvcache::detail::gpu
