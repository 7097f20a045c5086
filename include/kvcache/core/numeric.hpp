// SPDX-License-Identifier: Apache-2.0
#pragma once
// Storage types of 16 and 8 bits and their exact conversions to and from float. They hold values, they do
// not compute: widen, work in float, narrow once.
//
//   f16      s eeeee mmmmmmmmmm   IEEE 754 binary16, subnormals kept
//   bf16     s eeeeeeee mmmmmmm   upper half of a float
//   f8_e4m3  s eeee mmm           bias 7, no infinity, NaN only where all seven bits are set ("e4m3fn")
//   f8_e5m2  s eeeee mm           upper half of an f16, infinity and NaN included
//
// Narrowing rounds to nearest, ties to even. Past the largest value 16 bits give infinity, 8 bits the largest
// value: they saturate, for an infinity too. A NaN stays a NaN: 16 bits keep sign and leading payload bits,
// and it comes out quiet, as the processors' own conversions do; 8 bits keep the sign. (Micikevicius and
// others: FP8 Formats for Deep Learning, 2022, section 3.)
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

/// Small float as stored: 4 significant bits, largest value 448.
struct f8_e4m3 {
  uint8_t bits = 0;  ///< s eeee mmm
  friend constexpr bool operator==(f8_e4m3,
                                   f8_e4m3) noexcept = default;  ///< equal bits, so NaN equals itself
};

/// Small float as stored: 3 significant bits, largest finite value 57344.
struct f8_e5m2 {
  uint8_t bits = 0;  ///< s eeeee mm
  friend constexpr bool operator==(f8_e5m2,
                                   f8_e5m2) noexcept = default;  ///< equal bits, so NaN equals itself
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

/// The same value, exactly; 0x7f and 0xff are NaN.
constexpr float to_float(f8_e4m3 v) noexcept {
  const uint32_t sign = uint32_t{v.bits & 0x80u} << 24;
  const uint32_t magnitude = v.bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude >= 0x08u) return std::bit_cast<float>(sign | ((magnitude + (120u << 3)) << 20));
  const float value = static_cast<float>(magnitude) * 0x1p-9f;  // subnormal
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

/// The same value, exactly; a NaN comes out quiet.
constexpr float to_float(f8_e5m2 v) noexcept {
  return to_float(f16{static_cast<uint16_t>(v.bits << 8)});
}

namespace detail {
/// Sign and magnitude of a float of 8 bits: `digits` stored ones, the exponent's bias, the largest code.
constexpr uint8_t narrow8(float v, uint32_t digits, uint32_t bias, uint32_t largest) noexcept {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  const uint32_t sign = (u >> 24) & 0x80u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  uint32_t code = 0;
  if (magnitude >= (128u - bias) << 23) {  // normal: re-bias, round
    const uint32_t drop = 23u - digits;
    const uint32_t moved = magnitude - ((127u - bias) << 23);
    code = (moved + (1u << (drop - 1u)) - 1u + ((moved >> drop) & 1u)) >> drop;
  } else {  // subnormal: in units of the smallest one, rounded by adding 2^23
    const float unit = std::bit_cast<float>((126u + bias + digits) << 23);
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * unit + 0x1p23f) & 0xffu;
  }
  return static_cast<uint8_t>(sign | (code < largest ? code : largest));
}
}  // namespace detail

/// The nearest f8_e4m3, ties to even; past 448, and for an infinity, 448.
constexpr f8_e4m3 to_f8_e4m3(float v) noexcept {
  return {detail::narrow8(v, 3, 7, 0x7e)};
}

/// The nearest f8_e5m2, ties to even; past 57344, and for an infinity, 57344.
constexpr f8_e5m2 to_f8_e5m2(float v) noexcept {
  return {detail::narrow8(v, 2, 15, 0x7b)};
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

/// Rounded once, as to_f8_e4m3 does.
template <>
constexpr f8_e4m3 narrow<f8_e4m3>(float v) noexcept {
  return to_f8_e4m3(v);
}
/// Rounded once, as to_f8_e5m2 does.
template <>
constexpr f8_e5m2 narrow<f8_e5m2>(float v) noexcept {
  return to_f8_e5m2(v);
}

static_assert(sizeof(f16) == 2 && sizeof(bf16) == 2 && sizeof(f8_e4m3) == 1 && sizeof(f8_e5m2) == 1);
static_assert(std::numeric_limits<float>::is_iec559 && sizeof(float) == 4);
static_assert(to_f16(65504.0f).bits == 0x7bff && to_f16(65520.0f).bits == 0x7c00);
static_assert(to_float(f16{0x0001}) == 0x1p-24f && to_float(f16{0x3c00}) == 1.0f);
static_assert(to_bf16(1.0f).bits == 0x3f80);
static_assert(to_f8_e4m3(1.0f).bits == 0x38 && to_f8_e4m3(465.0f).bits == 0x7e);
static_assert(to_f8_e5m2(1.0f).bits == 0x3c && to_f8_e5m2(65504.0f).bits == 0x7b);

}  // namespace kvcache
