// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the codecs are held against: tables of all f16 and f8 values made from their definition in double, the
// place of every bit of a code row as the drawing in format.hpp lists them, groups as sets of values, and
// data that has gone wrong elsewhere.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/quant/pack.hpp"

namespace kvcache::test {

inline constexpr code packed_codes[] = {code::e4m3, code::e5m2, code::int8, code::int6,
                                        code::int5, code::int4, code::int3, code::int2};
inline constexpr scale_axis all_axes[] = {scale_axis::tensor, scale_axis::head, scale_axis::token,
                                          scale_axis::channel};

/// A binary float from its fields: the definition, not the bit trick.
inline double field_value(bool negative, int exponent_field, int fraction, int digits, int bias) {
  const double significand =
      exponent_field == 0 ? std::ldexp(fraction, -digits) : 1 + std::ldexp(fraction, -digits);
  const double magnitude = std::ldexp(significand, std::max(exponent_field, 1) - bias);
  return negative ? -magnitude : magnitude;
}
inline double f16_value(uint16_t bits) {
  return field_value(bits >> 15, (bits >> 10) & 31, bits & 1023, 10, 15);
}
/// Value of a small float; NaN and infinity as such.
inline double f8_reference(code c, uint8_t bits) {
  if (c == code::e4m3)
    return (bits & 127) == 127 ? NAN : field_value(bits >> 7, (bits >> 3) & 15, bits & 7, 3, 7);
  if (((bits >> 2) & 31) == 31) return (bits & 3) != 0 ? NAN : bits >> 7 ? -INFINITY : INFINITY;
  return field_value(bits >> 7, (bits >> 2) & 31, bits & 3, 2, 15);
}

/// All finite f16 values, ascending, with one zero.
inline const std::vector<double>& f16_values() {
  static const std::vector<double> all = [] {
    std::vector<double> v;
    for (uint32_t u = 0; u < 65536; ++u) {
      if ((u & 0x7c00) != 0x7c00 && u != 0x8000) v.push_back(f16_value(static_cast<uint16_t>(u)));
    }
    std::sort(v.begin(), v.end());
    return v;
  }();
  return all;
}
inline double f16_floor(double x) {
  const auto& v = f16_values();
  const auto i = std::upper_bound(v.begin(), v.end(), x);
  REQUIRE(i != v.begin());
  return *std::prev(i);
}
inline double f16_ceil(double x) {
  const auto& v = f16_values();
  const auto i = std::lower_bound(v.begin(), v.end(), x);
  REQUIRE(i != v.end());
  return *i;
}

/// Where each bit of 32 codes lies: first byte and bit of code i's bit b, listed part by part as drawn.
struct bit_place {
  int byte, bit;
};
inline std::vector<std::vector<bit_place>> bit_places(code c) {
  std::vector<std::vector<bit_place>> of(32);
  int bits = code_bits(c), start = 0;
  const auto part = [&](int bytes, int codes_per_byte, int width) {
    for (int byte = 0; byte < bytes; ++byte) {
      for (int k = 0; k < codes_per_byte; ++k) {
        const int owner =
            width == 1 ? byte * 8 + k : byte + k * bytes;  // 1-bit parts: neighbours share a byte
        for (int b = 0; b < width; ++b) of[owner].push_back({start + byte, k * width + b});
      }
    }
    start += bytes;
    bits -= width;
  };
  if (bits == 8) part(32, 1, 8);
  if (bits >= 4) part(16, 2, 4);
  if (bits >= 2) part(8, 4, 2);
  if (bits >= 1) part(4, 8, 1);
  return of;
}
inline uint32_t code_at(const std::vector<std::vector<bit_place>>& places, code c, const std::byte* row,
                        int i) {
  uint32_t value = 0;
  const auto& place = places[i % 32];
  for (size_t b = 0; b < place.size(); ++b) {
    const int byte = i / 32 * 4 * code_bits(c) + place[b].byte;
    value |= (std::to_integer<uint32_t>(row[byte]) >> place[b].bit & 1) << b;
  }
  return value;
}

/// Values of a cell by the number of their scale, as flat indices in the order of the search.
inline std::map<int, std::vector<int>> groups_of(const side_format& f, const cell_shape& s) {
  std::map<int, std::vector<int>> out;
  for (int t = 0; t < s.tokens; ++t) {
    for (int c = 0; c < s.dim; ++c) {
      int number = 0;
      if (f.axis == scale_axis::channel) {
        const int g = f.group_size == 0 ? s.tokens : f.group_size;
        const int groups = (s.tokens + g - 1) / g;
        number = s.keys ? c * groups + t / g : t / g * s.dim + c;
      } else if (f.axis == scale_axis::token) {
        const int g = f.group_size == 0 ? s.dim : f.group_size;
        const int groups = (s.dim + g - 1) / g;
        number = s.keys ? c / g * s.tokens + t : t * groups + c / g;
      }
      out[number].push_back(t * s.dim + c);
    }
  }
  return out;
}

/// One packed cell with memory of exactly its size.
struct cell {
  side_format f;
  cell_shape s;
  std::vector<std::byte> codes;
  std::vector<f16> scale, zero;

  cell(const side_format& format, const cell_shape& shape) : f(format), s(shape) {
    const int rows = s.keys ? s.dim : s.tokens, columns = s.keys ? s.tokens : s.dim;
    codes.assign(static_cast<size_t>(rows * code_row_bytes(f.codes, columns)), std::byte{0xa5});
    scale.assign(static_cast<size_t>(scales_of_cell(f, s.tokens, s.dim)), f16{0x7e01});
    if (has_minimum(f)) zero = scale;
  }
  status pack(const std::vector<float>& values) {
    return pack_cell(f, s.keys, s.tokens, s.dim, s.exempt, values.data(), codes.data(), scale.data(),
                     zero.empty() ? nullptr : zero.data());
  }
  std::vector<float> unpack() const {
    std::vector<float> out(static_cast<size_t>(s.tokens) * s.dim, -12345.0f);
    unpack_cell(f, s.keys, s.tokens, s.dim, codes.data(), scale.data(), zero.empty() ? nullptr : zero.data(),
                out.data());
    return out;
  }
  bool same_bytes(const cell& o) const { return codes == o.codes && scale == o.scale && zero == o.zero; }
  /// Row and place in it of a value's code.
  const std::byte* row_of(int flat) const {
    const int columns = s.keys ? s.tokens : s.dim, row = s.keys ? flat % s.dim : flat / s.dim;
    return codes.data() + row * code_row_bytes(f.codes, columns);
  }
  int column_of(int flat) const { return s.keys ? flat / s.dim : flat % s.dim; }
};

/// Kinds of data. Every value is finite and within largest_packed.
enum class kind { normal, outlier, constant, shifted, denormal, huge, halves, two_values };
inline constexpr kind all_kinds[] = {kind::normal,   kind::outlier, kind::constant, kind::shifted,
                                     kind::denormal, kind::huge,    kind::halves,   kind::two_values};
inline std::vector<float> make_values(kind k, const cell_shape& s, std::mt19937& random) {
  std::vector<float> v(static_cast<size_t>(s.tokens) * s.dim);
  std::normal_distribution<float> normal;
  const float one = normal(random);
  for (auto& x : v) {
    x = normal(random);
    if (k == kind::constant) x = one;
    if (k == kind::shifted) x = 5.0f + 0.3f * std::abs(x);
    if (k == kind::denormal) x *= random() % 2 == 0 ? 1e-40f : 3e-8f;
    if (k == kind::huge) x = std::clamp(x * 30000.0f, -65504.0f, 65504.0f);
    if (k == kind::halves) x = to_float(to_f16(x));
    if (k == kind::two_values) x = random() % 2 == 0 ? -65504.0f : 65504.0f;
  }
  if (k == kind::outlier) v[random() % v.size()] = random() % 2 == 0 ? 300.0f : -700.0f;
  return v;
}

inline std::string told(const side_format& f, const cell_shape& s) {
  return "code " + std::to_string(static_cast<int>(f.codes)) + " axis " +
         std::to_string(static_cast<int>(f.axis)) + " group " + std::to_string(f.group_size) +
         (f.symmetric ? " symmetric" : "") + " clip " + std::to_string(static_cast<int>(f.clip)) +
         (s.keys ? " K " : " V ") + std::to_string(s.tokens) + "x" + std::to_string(s.dim) + " exempt " +
         std::to_string(s.exempt);
}

}  // namespace kvcache::test
