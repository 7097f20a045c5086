// SPDX-License-Identifier: Apache-2.0
#pragma once
// One code of a row, read and written where format.hpp says that its bits lie, and the number it stands for.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kvcache/core/numeric.hpp"
#include "kvcache/quant/format.hpp"

namespace kvcache {

/// Largest integer code: 2^bits - 1. Requires: an integer code.
constexpr int32_t largest_code(code c) noexcept {
  return (1 << code_bits(c)) - 1;
}

namespace detail {

/// Bytes that a part of `width` bits takes for 32 codes, and where in them code j of the 32 lies.
struct code_part {
  int32_t byte = 0;
  int32_t shift = 0;
};
constexpr code_part part_of(int32_t width, int32_t j) noexcept {
  const int32_t bytes = 4 * width;
  if (width == 1) return {j / 8, j % 8};
  return {j % bytes, j / bytes * width};
}

/// The widest part of `bits` that is left: 8, 4, 2 or 1.
constexpr int32_t widest_part(int32_t bits) noexcept {
  return bits >= 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1;
}

}  // namespace detail

/// Code `i` of a row. Requires: `row` holds code_row_bytes of more than i codes; packed, not exact.
inline uint32_t read_code(code c, const std::byte* row, int32_t i) noexcept {
  row += int64_t{i / 32} * 4 * code_bits(c);
  uint32_t out = 0;
  for (int32_t bits = code_bits(c), low = 0; bits > 0;) {
    const int32_t width = detail::widest_part(bits);
    const auto at = detail::part_of(width, i % 32);
    out |= ((std::to_integer<uint32_t>(row[at.byte]) >> at.shift) & ((1u << width) - 1u)) << low;
    row += 4 * width;
    low += width;
    bits -= width;
  }
  return out;
}

/// Sets code `i` of a row and leaves the others as they are. Requires: as read_code; the code fits its bits.
inline void write_code(code c, std::byte* row, int32_t i, uint32_t value) noexcept {
  row += int64_t{i / 32} * 4 * code_bits(c);
  for (int32_t bits = code_bits(c); bits > 0;) {
    const int32_t width = detail::widest_part(bits);
    const auto at = detail::part_of(width, i % 32);
    const uint32_t mask = (1u << width) - 1u;
    const uint32_t kept = std::to_integer<uint32_t>(row[at.byte]) & ~(mask << at.shift);
    row[at.byte] = static_cast<std::byte>(kept | (value & mask) << at.shift);
    value >>= width;
    row += 4 * width;
    bits -= width;
  }
}

/// The number an integer code stands for: `zero` is the minimum, or that of symmetric_zero.
inline float value_of(uint32_t code, float scale, float zero) noexcept {
  return std::fma(static_cast<float>(code), scale, zero);
}

/// What value_of takes as `zero` for a symmetric code: the lowest level, exact in float.
constexpr float symmetric_zero(code c, float scale) noexcept {
  return -0.5f * static_cast<float>(largest_code(c)) * scale;
}

/// The number a small float stands for, without its scale. Requires: is_fp8.
constexpr float f8_value(code c, uint32_t bits) noexcept {
  const auto stored = static_cast<uint8_t>(bits);
  return c == code::e4m3 ? to_float(f8_e4m3{stored}) : to_float(f8_e5m2{stored});
}

}  // namespace kvcache
