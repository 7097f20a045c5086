// SPDX-License-Identifier: Apache-2.0
#pragma once
// What storing of new rows is told: the spaces they go to, and how they are turned before.
#include "code_params.hpp"

namespace kvcache::detail::gpu {

/// One space of a layer: sealed, open or exempt. A plane without data takes nothing.
struct append_target {
  plane_view k, v;
  int32_t k_type, v_type;
  const int64_t* slot;  ///< null: nothing goes there
  int64_t slots;        ///< slot ids are in [0, slots)
  int32_t shift;        ///< log2 of the slots of a block
};

inline constexpr int32_t append_targets = 3;

struct append_params {
  row_array k, v;
  append_target to[append_targets];  ///< the first one: sealed
  coded_plane codes_k, codes_v;  ///< sealed planes of codes: they take rows at to[0].slot; data null = none
  int32_t open_k_type, open_v_type;  ///< what a row is rounded to before it becomes codes
  int64_t slot_stride, slot_head_stride;
  const int32_t* pos;
  int32_t rows, kv_heads, dim_k, dim_v, block;
  float hadamard_k, hadamard_v;  ///< 1 / sqrt(dim), 0 = not rotated
  rope_params rope;
};

/// Whether any row becomes codes.
inline bool stores_codes(const append_params& p) noexcept {
  return p.to[0].slot != nullptr && (p.codes_k.data != nullptr || p.codes_v.data != nullptr);
}

/// Shared memory of a warp: a row of floats, and the levels of its groups.
inline constexpr int32_t widest_head = 256, append_levels_bytes = widest_head / 8 * 4;
inline constexpr int32_t append_warp_bytes = widest_head * 4 + append_levels_bytes;
inline constexpr int32_t append_shared_bytes = append_warp_bytes * warps_of_block;

}  // namespace kvcache::detail::gpu
