// SPDX-License-Identifier: Apache-2.0
#pragma once
// Packing by a format's numbers: one cell, or all cells of K or of V in a block, which a scale per tensor
// needs. This is the reference that faster code equals bit for bit. A format's `hadamard` is not looked at:
// rows are rotated before they are stored (hadamard.hpp).
#include <cstddef>
#include <cstdint>

#include "kvcache/core/numeric.hpp"
#include "kvcache/core/shape.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/quant/affine.hpp"
#include "kvcache/quant/concept.hpp"
#include "kvcache/quant/format.hpp"
#include "kvcache/quant/fp8.hpp"
#include "kvcache/quant/groups.hpp"

namespace kvcache {

/// The levels for a group of values under a format. Requires: packed, not exact.
inline stored_grid fit_group(const side_format& f, const value_group& g) noexcept {
  return is_fp8(f.codes) ? fp8{f}.fit(g) : affine{f}.fit(g);
}

/// Writes the codes of a cell whose scales and minima are known. Requires: finite values; packed, not exact.
inline void encode_cell(const side_format& f, const cell_shape& s, const float* values, std::byte* codes,
                        const f16* scale, const f16* zero) noexcept {
  is_fp8(f.codes) ? detail::encode_cell(fp8{f}, f, s, values, codes, scale, zero)
                  : detail::encode_cell(affine{f}, f, s, values, codes, scale, zero);
}

/// Packs the values [tokens][dim] of one head of one block. `keys`: as K, a row of codes per channel;
/// `tokens`: block size; the first `exempt` tokens are left out of the ranges and get code 0. `codes`,
/// `scale` and `zero` as drawn in format.hpp; `zero` may be null where the format has no minimum. A scale per
/// tensor is fitted to this cell alone. Fails, with nothing written: bad_argument "codes" for exact;
/// bad_argument "value" with the flat index of a value that is NaN, infinite or beyond largest_packed.
inline status pack_cell(const side_format& f, bool keys, int32_t tokens, int32_t dim, int32_t exempt,
                        const float* values, std::byte* codes, f16* scale, f16* zero) noexcept {
  const cell_shape s{keys, tokens, dim, exempt};
  if (f.codes == code::exact) return {errc::bad_argument, "codes", 0};
  return is_fp8(f.codes) ? fp8{f}.pack(s, values, codes, scale, zero)
                         : affine{f}.pack(s, values, codes, scale, zero);
}

/// Unpacks what pack_cell wrote into [tokens][dim]; exempt tokens come out as the value of code 0.
/// Requires: packed, not exact.
inline void unpack_cell(const side_format& f, bool keys, int32_t tokens, int32_t dim, const std::byte* codes,
                        const f16* scale, const f16* zero, float* values) noexcept {
  const cell_shape s{keys, tokens, dim, 0};
  if (f.codes == code::exact) return;
  is_fp8(f.codes) ? fp8{f}.unpack(s, codes, scale, zero, values)
                  : affine{f}.unpack(s, codes, scale, zero, values);
}

/// Packs K, or V, of a layer's block: `values` [kv_heads][block_size][dim], `side` the layout_of bytes.
/// Serves every axis; a scale per tensor covers all heads. Requires: valid format. Fails: as pack_cell, the
/// index counts over all heads.
inline status pack_cells(const side_format& f, const group_shape& shape, int32_t block_size, bool keys,
                         int32_t exempt, const float* values, std::byte* side) noexcept {
  if (f.codes == code::exact) return {errc::bad_argument, "codes", 0};
  const int32_t dim = keys ? shape.head_dim_k : shape.head_dim_v;
  const cell_shape s{keys, block_size, dim, exempt};
  const int64_t cell = int64_t{block_size} * dim;
  for (int32_t h = 0; h < shape.kv_heads; ++h) {
    if (status bad = check_values(s, values + h * cell); !bad) {
      return {bad.code, bad.field, bad.value + h * cell};
    }
  }
  const side_layout l = layout_of(f, shape, block_size, keys);
  if (f.axis == scale_axis::tensor) {
    const stored_grid grid = fit_group(f, {values, cell, 1, int64_t{exempt} * dim, shape.kv_heads, cell});
    const cell_scales to = scales_of(l, side, 0);
    *to.scale = grid.scale;
    if (to.zero != nullptr) *to.zero = grid.zero;
  }
  for (int32_t h = 0; h < shape.kv_heads; ++h) {
    const cell_scales to = scales_of(l, side, h);
    const int32_t own = f.axis == scale_axis::tensor ? 0 : scales_of_cell(f, block_size, dim);
    for (int32_t i = 0; i < own; ++i) {
      const stored_grid grid = fit_group(f, group_at(f, s, values + h * cell, i));
      to.scale[i] = grid.scale;
      if (to.zero != nullptr) to.zero[i] = grid.zero;
    }
    encode_cell(f, s, values + h * cell, side + h * l.head_stride, to.scale, to.zero);
  }
  return {};
}

/// Unpacks what pack_cells wrote into [kv_heads][block_size][dim].
inline void unpack_cells(const side_format& f, const group_shape& shape, int32_t block_size, bool keys,
                         const std::byte* side, float* values) noexcept {
  const int32_t dim = keys ? shape.head_dim_k : shape.head_dim_v;
  const side_layout l = layout_of(f, shape, block_size, keys);
  for (int32_t h = 0; h < shape.kv_heads; ++h) {
    const std::byte* scales = side + h * l.scale_stride;
    const auto* scale = reinterpret_cast<const f16*>(scales + l.scale);
    const auto* zero = l.minimum != 0 ? reinterpret_cast<const f16*>(scales + l.minimum) : nullptr;
    unpack_cell(f, keys, block_size, dim, side + h * l.head_stride, scale, zero,
                values + int64_t{h} * block_size * dim);
  }
}

}  // namespace kvcache
