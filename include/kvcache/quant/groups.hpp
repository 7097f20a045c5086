// SPDX-License-Identifier: Apache-2.0
#pragma once
// The values that share a scale, as the formats divide a cell into groups, and what every codec does with
// them: fit a grid to each, then write each value's nearest code.
//
//   a cell's values    t0 | c0 c1 c2 c3 ...     channel  c1 of t0, t1, ...        stride dim
//                      t1 | c0 c1 c2 c3 ...     token    c0, c1, ... of t1        stride 1
//                      t2 | c0 c1 c2 c3 ...     head     row after row            stride 1
//                                               tensor   all cells, one after the other
//   In each of them the exempt tokens' values come first.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvcache/core/units.hpp"
#include "kvcache/quant/codes.hpp"
#include "kvcache/quant/concept.hpp"
#include "kvcache/quant/format.hpp"

namespace kvcache {

/// Values that share a scale. Value i of part p is values[p * part_stride + i * stride].
struct value_group {
  const float* values = nullptr;  ///< the first one
  int64_t size = 0;               ///< of a part, exempt ones included
  int64_t stride = 1;             ///< from value to value, in floats
  int64_t skip = 0;               ///< leading values of a part that are exempt
  int32_t parts = 1;              ///< cells it runs through; more than 1 for a tensor only
  int64_t part_stride = 0;        ///< from cell to cell, in floats

  /// Calls f(index, value) for every value that is not exempt, in order; the index counts exempt ones too.
  template <class F>
  constexpr void each(F f) const noexcept {
    for (int32_t p = 0; p < parts; ++p) {
      const float* part = values + p * part_stride;
      for (int64_t i = skip; i < size; ++i) f(p * size + i, part[i * stride]);
    }
  }
  /// Whether all its values are exempt.
  constexpr bool empty() const noexcept { return skip >= size || parts == 0; }
};

/// A group's scale and minimum as stored.
struct stored_grid {
  f16 scale{};  ///< step between codes; 0 where all values are equal
  f16 zero{};   ///< the minimum; 0 where the format has none
  /// Equal bits.
  friend constexpr bool operator==(stored_grid, stored_grid) noexcept = default;
};

/// Least and largest value of a group, 0 and 0 if all are exempt.
struct value_range {
  float least = 0;    ///< least value
  float largest = 0;  ///< largest value
};

/// The range of a group's values; exempt ones do not count.
inline value_range range_of(const value_group& g) noexcept {
  value_range r;
  bool first = true;
  g.each([&](int64_t, float v) {
    r.least = first || v < r.least ? v : r.least;
    r.largest = first || v > r.largest ? v : r.largest;
    first = false;
  });
  return r;
}

/// The group whose scale has number `index` in a cell (layout: scales_of_cell).
constexpr value_group group_at(const side_format& f, const cell_shape& s, const float* values,
                               int32_t index) noexcept {
  if (f.axis == scale_axis::channel) {
    const int32_t size = group_of(f, s.tokens, s.dim), n = ceil_div(s.tokens, size);
    const int32_t channel = s.keys ? index / n : index % s.dim;
    const int32_t first = (s.keys ? index % n : index / s.dim) * size;
    const int32_t length = std::min(size, s.tokens - first);
    return {values + int64_t{first} * s.dim + channel, length, s.dim,
            std::clamp(s.exempt - first, 0, length)};
  }
  if (f.axis == scale_axis::token) {
    const int32_t size = group_of(f, s.tokens, s.dim), n = ceil_div(s.dim, size);
    const int32_t token = s.keys ? index % s.tokens : index / n;
    const int32_t first = (s.keys ? index / s.tokens : index % n) * size;
    const int32_t length = std::min(size, s.dim - first);
    return {values + int64_t{token} * s.dim + first, length, 1, token < s.exempt ? length : 0};
  }
  return {values, int64_t{s.tokens} * s.dim, 1, int64_t{s.exempt} * s.dim};
}

/// The number of the scale of one value in its cell.
constexpr int32_t scale_index(const side_format& f, const cell_shape& s, int32_t token,
                              int32_t channel) noexcept {
  const int32_t size =
      f.axis == scale_axis::channel || f.axis == scale_axis::token ? group_of(f, s.tokens, s.dim) : 1;
  if (f.axis == scale_axis::channel) {
    return s.keys ? channel * ceil_div(s.tokens, size) + token / size : token / size * s.dim + channel;
  }
  if (f.axis == scale_axis::token) {
    return s.keys ? channel / size * s.tokens + token : token * ceil_div(s.dim, size) + channel / size;
  }
  return 0;
}

namespace detail {

/// f16 patterns as integers in the order of their values; both zeros are 0.
constexpr int32_t f16_order(f16 v) noexcept {
  return (v.bits & 0x8000u) != 0 ? -int32_t{v.bits & 0x7fff} : int32_t{v.bits};
}
constexpr f16 f16_at(int32_t order) noexcept {
  return {static_cast<uint16_t>(order < 0 ? 0x8000 - order : order)};
}
constexpr f16 next_up(f16 v) noexcept {
  return f16_at(f16_order(v) + 1);
}
/// Largest f16 <= v, smallest f16 >= v; a zero is +0. Requires: |v| <= 65504.
constexpr f16 f16_below(float v) noexcept {
  const f16 near = to_f16(v);
  return f16_at(f16_order(near) - (to_float(near) > v));
}
constexpr f16 f16_above(float v) noexcept {
  const f16 near = to_f16(v);
  return f16_at(f16_order(near) + (to_float(near) < v));
}

/// Nearest whole number in 0 ... most, ties to even; a NaN (there is none) would give 0.
constexpr uint32_t round_code(float v, float most) noexcept {
  const float inside = v > 0.0f ? (v < most ? v : most) : 0.0f;
  return std::bit_cast<uint32_t>(inside + 0x1p23f) & 0xffu;
}

/// Fits a grid to every group of a cell.
template <class Model>
void fit_groups(const Model& m, const side_format& f, const cell_shape& s, const float* values, f16* scale,
                f16* zero) noexcept {
  const int32_t n = scales_of_cell(f, s.tokens, s.dim);
  for (int32_t i = 0; i < n; ++i) {
    const stored_grid grid = m.fit(group_at(f, s, values, i));
    scale[i] = grid.scale;
    if (has_minimum(f)) zero[i] = grid.zero;
  }
}

/// Writes every value's code; codes of exempt tokens and those that fill up a row are 0.
template <class Model>
void encode_cell(const Model& m, const side_format& f, const cell_shape& s, const float* values,
                 std::byte* codes, const f16* scale, const f16* zero) noexcept {
  const int32_t rows = s.keys ? s.dim : s.tokens, columns = s.keys ? s.tokens : s.dim;
  const int64_t row_bytes = code_row_bytes(f.codes, columns);
  std::memset(codes, 0, static_cast<size_t>(row_bytes * rows));
  int32_t held = -1;
  auto grid = m.grid({});
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t token = s.keys ? c : r, channel = s.keys ? r : c;
      if (token < s.exempt) continue;
      if (const int32_t i = scale_index(f, s, token, channel); i != held) {
        grid = m.grid({scale[i], has_minimum(f) ? zero[i] : f16{}});
        held = i;
      }
      write_code(f.codes, codes + r * row_bytes, c, m.encode(values[int64_t{token} * s.dim + channel], grid));
    }
  }
}

/// Reads every code's value.
template <class Model>
void decode_cell(const Model& m, const side_format& f, const cell_shape& s, const std::byte* codes,
                 const f16* scale, const f16* zero, float* values) noexcept {
  const int32_t rows = s.keys ? s.dim : s.tokens, columns = s.keys ? s.tokens : s.dim;
  const int64_t row_bytes = code_row_bytes(f.codes, columns);
  int32_t held = -1;
  auto grid = m.grid({});
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t token = s.keys ? c : r, channel = s.keys ? r : c;
      if (const int32_t i = scale_index(f, s, token, channel); i != held) {
        grid = m.grid({scale[i], has_minimum(f) ? zero[i] : f16{}});
        held = i;
      }
      values[int64_t{token} * s.dim + channel] = m.decode(read_code(f.codes, codes + r * row_bytes, c), grid);
    }
  }
}

}  // namespace detail

}  // namespace kvcache
