// SPDX-License-Identifier: Apache-2.0
#pragma once
// Storage types of 16 bits and their exact conversions to and from float. They hold values, they do not
// compute: widen, work in float, narrow once.
//
//   f16   s eeeee mmmmmmmmmm      IEEE 754 binary16, subnormals kept
//   bf16  s eeeeeeee mmmmmmm      upper half of a float
//
// Narrowing rounds to nearest, ties to even; past the largest value it gives infinity. A NaN stays a NaN:
// sign and leading payload bits are kept, and it comes out quiet, as the processors' own conversions do.
#include <bit>
#include <cstdint>
#include <limits>

namespace kvcache {

/// IEEE half precision as stored: 11 significant bits, largest finite value 65504.
struct f16 {
  uint16_t bits = 0;                                              ///< s eeeee mmmmmmmmmm
  friend constexpr bool operator==(f16, f16) noexcept = default;  ///< equal bits, so NaN equals itself
};

/// Brain float as stored: 8 significant bits, the range of float.
struct bf16 {
  uint16_t bits = 0;                                                ///< s eeeeeeee mmmmmmm
  friend constexpr bool operator==(bf16, bf16) noexcept = default;  ///< equal bits, so NaN equals itself
};

/// Itself, for code generic over storage types.
constexpr float to_float(float v) noexcept {
  return v;
}

/// The same value, exactly; a NaN comes out quiet.
constexpr float to_float(bf16 v) noexcept {
  uint32_t wide = uint32_t{v.bits} << 16;
  if ((wide & 0x7fffffffu) > 0x7f800000u) wide |= 0x00400000u;
  return std::bit_cast<float>(wide);
}

/// The same value, exactly, subnormals included; a NaN comes out quiet.
constexpr float to_float(f16 v) noexcept {
  const uint32_t sign = uint32_t{v.bits & 0x8000u} << 16;
  const uint32_t magnitude = v.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    const uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | quiet);
  }
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude + (112u << 10)) << 13));
  // Subnormal: the integer magnitude times 2^-24, both exact in float.
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

/// The nearest bf16, ties to even; beyond the largest one infinity.
constexpr bf16 to_bf16(float v) noexcept {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x0040u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

/// The nearest f16, ties to even; from 65520 on infinity, at and below 2^-25 zero, the sign kept.
constexpr f16 to_f16(float v) noexcept {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  if (magnitude >= 0x38800000u) {                                                // normal: re-bias, round
    const uint32_t rounded = magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | (rounded >> 13))};
  }
  if (magnitude <= 0x33000000u) return {static_cast<uint16_t>(sign)};  // at most half the smallest subnormal
  // Subnormal: shift the significand to units of 2^-24 and round the part that falls off.
  const uint32_t shift = 126u - (magnitude >> 23);
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = significand >> shift;
  const uint32_t lost = significand & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  return {static_cast<uint16_t>(sign | (kept + (lost > half || (lost == half && (kept & 1u)))))};
}

/// The stored form of a float in type T, for code generic over storage types.
template <class T>
constexpr T narrow(float v) noexcept;
/// Stored as it is.
template <>
constexpr float narrow<float>(float v) noexcept {
  return v;
}
/// Rounded once, as to_f16 does.
template <>
constexpr f16 narrow<f16>(float v) noexcept {
  return to_f16(v);
}
/// Rounded once, as to_bf16 does.
template <>
constexpr bf16 narrow<bf16>(float v) noexcept {
  return to_bf16(v);
}

static_assert(sizeof(f16) == 2 && sizeof(bf16) == 2);
static_assert(std::numeric_limits<float>::is_iec559 && sizeof(float) == 4);
static_assert(to_f16(65504.0f).bits == 0x7bff && to_f16(65520.0f).bits == 0x7c00);
static_assert(to_float(f16{0x0001}) == 0x1p-24f && to_float(f16{0x3c00}) == 1.0f);
static_assert(to_bf16(1.0f).bits == 0x3f80);

}  // namespace kvcache
