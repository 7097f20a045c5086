// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small floats with a scale: e4m3 or e5m2 (core/numeric.hpp) of x / scale, where
//
//   scale = smallest f16 >= max|x| / 448 (e5m2: / 57344), at least 2^-14; 0 where all values are 0, and the
//           codes too
//   code  = nearest small float of x * (1 / scale), both operations in float
//
// An error is relative: at most 2^-4 (e5m2: 2^-3) of the value, and 2^-10 (2^-17) scales near 0, but for the
// rounding of the two operations. So a large value costs the small ones of its group nothing until they reach
// the subnormals.
#include <algorithm>
#include <cstdint>

#include "kvcache/quant/codes.hpp"
#include "kvcache/quant/concept.hpp"
#include "kvcache/quant/format.hpp"
#include "kvcache/quant/groups.hpp"

namespace kvcache {

/// Largest value of a small float. Requires: is_fp8.
constexpr float largest_f8(code c) noexcept {
  return c == code::e4m3 ? 448.0f : 57344.0f;
}

/// The scale for values up to `magnitude`. Requires: 0 <= magnitude <= largest_packed; is_fp8.
inline stored_grid fit_fp8(float magnitude, code c) noexcept {
  if (magnitude == 0.0f) return {};
  // scale * 448 covers the range: it has at most 14 bits, and no float above it is divided down to scale.
  return {detail::f16_above(std::max(magnitude / largest_f8(c), 0x1p-14f)), {}};
}

/// A stored scale as used: `inverse` is 1 / scale, or 0.
struct fp8_grid {
  float scale = 0;    ///< value of the code that stands for 1
  float inverse = 0;  ///< its reciprocal
};

/// Small floats, as drawn above. Requires: format has e4m3 or e5m2 codes.
struct fp8 {
  side_format format{.codes = code::e4m3};  ///< codes, axis, group size

  /// The scale for a group of values.
  stored_grid fit(const value_group& g) const noexcept {
    const value_range r = range_of(g);
    return fit_fp8(std::max({-r.least, r.largest, 0.0f}), format.codes);
  }
  /// The scale, ready for use.
  fp8_grid grid(stored_grid g) const noexcept {
    const float scale = to_float(g.scale);
    return {scale, scale > 0.0f ? 1.0f / scale : 0.0f};
  }
  /// The nearest small float's code.
  uint32_t encode(float x, const fp8_grid& g) const noexcept {
    if (g.inverse == 0.0f) return 0;
    const float v = x * g.inverse;
    return format.codes == code::e4m3 ? to_f8_e4m3(v).bits : to_f8_e5m2(v).bits;
  }
  /// The code's value, exact.
  float decode(uint32_t code, const fp8_grid& g) const noexcept {
    return f8_value(format.codes, code) * g.scale;
  }

  /// Packs a cell; see cell_codec.
  status pack(const cell_shape& s, const float* values, std::byte* codes, f16* scale,
              f16* zero) const noexcept {
    if (status bad = check_values(s, values); !bad) return bad;
    detail::fit_groups(*this, format, s, values, scale, zero);
    detail::encode_cell(*this, format, s, values, codes, scale, zero);
    return {};
  }
  /// Unpacks a cell; see cell_codec. An exempt token comes out as 0.
  void unpack(const cell_shape& s, const std::byte* codes, const f16* scale, const f16* zero,
              float* values) const noexcept {
    detail::decode_cell(*this, format, s, codes, scale, zero, values);
  }
};

static_assert(cell_codec<fp8>);

}  // namespace kvcache
