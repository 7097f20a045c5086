// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernels of the command list are told. Commands travel as kernel parameters (at most 32,764 bytes),
// so that nothing has to be staged in memory that could be overwritten before it was read.
#include "params.hpp"

namespace kvcache::detail::gpu {

inline constexpr int32_t layers_at_once = 64;
inline constexpr int32_t commands_at_once = 512;
inline constexpr int32_t most_gather_ids = 4096;  ///< source and target blocks of one gather together

/// K and V of one layer: from where and to where, which may be the same planes.
struct moved_layer {
  plane_view from_k, from_v, to_k, to_v;
};

struct moved_block {
  int32_t src, dst, tokens, arg;
};

/// Commands of one stage, kind and group. Block of threads: ((command * layers + layer) * 2 + plane) * heads
/// + head.
struct run_params {
  int32_t n_commands, n_layers, kv_heads;
  int32_t bytes_k, bytes_v;  ///< of a token's channels
  int32_t zero;              ///< targets are cleared, nothing is read
  int32_t type_k;            ///< for rotation
  moved_layer layer[layers_at_once];
  moved_block command[commands_at_once];
  rope_params rope;
};

/// One gather over some layers. Block of threads: (layer * 2 + plane) * heads + head.
struct gather_params {
  int32_t n_layers, kv_heads, bytes_k, bytes_v, block_shift;
  int32_t tokens, n_src, n_dst;
  const int32_t* kept;  ///< of the first layer here
  int64_t kept_head_stride, kept_layer_stride;
  moved_layer layer[layers_at_once];
  int32_t id[most_gather_ids];  ///< n_src sources, then n_dst targets
};

static_assert(sizeof(run_params) <= 32764 && sizeof(gather_params) <= 32764);

/// Starts of these kernels; as in launch.hpp.
int32_t launch_move(const run_params& p, const launch_shape& shape, struct CUstream_st* stream) noexcept;
int32_t launch_turn(const run_params& p, const launch_shape& shape, struct CUstream_st* stream) noexcept;
int32_t launch_gather(const gather_params& p, const launch_shape& shape, struct CUstream_st* stream) noexcept;

}  // namespace kvcache::detail::gpu
