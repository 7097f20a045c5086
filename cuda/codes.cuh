// SPDX-License-Identifier: Apache-2.0
#pragma once
// Codes as quant/format.hpp draws them: where those of a cell and their scales lie, how single codes and
// whole words of them are made and read, and the numbers they stand for. The arithmetic is that of
// quant/affine.hpp and quant/fp8.hpp, operation for operation, so that the bits are the CPU's.
#include "code_params.hpp"
#include "element.cuh"

namespace kvcache::detail::gpu {

KVCACHE_DEVICE bool is_code_type(int32_t type) {
  return type >= KVC_E4M3 && type <= KVC_U2;
}
KVCACHE_DEVICE bool is_small_float(int32_t type) {
  return type == KVC_E4M3 || type == KVC_E5M2;
}
KVCACHE_DEVICE int32_t code_width(int32_t type) {
  return type <= KVC_U8   ? 8
         : type == KVC_U6 ? 6
         : type == KVC_U5 ? 5
         : type == KVC_U4 ? 4
         : type == KVC_U3 ? 3
                          : 2;
}
/// Largest integer code.
KVCACHE_DEVICE int32_t top_code(int32_t type) {
  return (1 << code_width(type)) - 1;
}

/// One (block, head) cell: its shape and which of its values share a scale.
struct code_form {
  int32_t tokens, dim;
  int32_t type, kind, group;
  bool keys;       ///< a row of codes holds the slots of a channel, else the channels of a slot
  bool symmetric;  ///< integer codes without a minimum

  KVCACHE_DEVICE int32_t rows() const { return keys ? dim : tokens; }
  KVCACHE_DEVICE int32_t columns() const { return keys ? tokens : dim; }
  /// 4-byte words of a row.
  KVCACHE_DEVICE int32_t words() const { return (columns() + 31) / 32 * code_width(type); }
  /// Groups along the axis that shares scales.
  KVCACHE_DEVICE int32_t groups() const {
    return ((kind == KVC_SCALE_TOKEN ? dim : tokens) + group - 1) / group;
  }
  KVCACHE_DEVICE int32_t scales() const {
    return kind == KVC_SCALE_TOKEN ? tokens * groups() : kind == KVC_SCALE_CHANNEL ? dim * groups() : 1;
  }
  /// Place of a value's scale among those of the cell.
  KVCACHE_DEVICE int32_t scale_index(int32_t token, int32_t channel) const {
    if (kind == KVC_SCALE_TOKEN) {
      return keys ? channel / group * tokens + token : token * groups() + channel / group;
    }
    if (kind == KVC_SCALE_CHANNEL) {
      return keys ? channel * groups() + token / group : token / group * dim + channel;
    }
    return 0;
  }
};
KVCACHE_DEVICE code_form form_of(const coded_plane& p, bool keys, int32_t tokens, int32_t dim) {
  return {tokens, dim, p.type, p.kind, p.group, keys, p.zero == nullptr && !is_small_float(p.type)};
}

KVCACHE_DEVICE char* code_cell_of(const coded_plane& p, int64_t block, int64_t head) {
  return p.data + block * p.block_stride + head * p.head_stride;
}
/// Byte of the first scale, and minimum, of a cell.
KVCACHE_DEVICE int64_t scale_offset(const coded_plane& p, int64_t block, int64_t head) {
  return block * p.scale_block_stride + head * p.scale_head_stride;
}

// ---- numbers ----

/// A group's scale and minimum as stored: two f16.
struct code_levels {
  uint16_t scale, zero;
};
/// The same, ready for use: `inverse` is 1 / scale, or 0.
struct code_grid {
  float scale, zero, inverse;
};
KVCACHE_DEVICE code_grid grid_of(const code_form& f, code_levels l) {
  code_grid g;
  g.scale = widen<half_kind::f16>(l.scale);
  g.zero = widen<half_kind::f16>(l.zero);
  if (f.symmetric) g.zero = mul_rn(mul_rn(-0.5f, static_cast<float>(top_code(f.type))), g.scale);
  g.inverse = g.scale > 0.0f ? div_rn(1.0f, g.scale) : 0.0f;
  return g;
}

/// What is packed of a value: f16's range, and 0 for what is no number. The CPU refuses such values instead.
KVCACHE_DEVICE float packable(float x) {
  constexpr float largest = 65504.0f;
  const float inside = x < largest ? x : largest;
  if (x != x) return 0.0f;
  return inside > -largest ? inside : -largest;
}

/// The nearest small float, ties to even, not past the largest. Requires: no NaN.
KVCACHE_DEVICE uint32_t small_float(int32_t type, float v) {
  const uint32_t digits = type == KVC_E4M3 ? 3 : 2, bias = type == KVC_E4M3 ? 7 : 15;
  const uint32_t largest = type == KVC_E4M3 ? 0x7e : 0x7b;
  const uint32_t u = bits_of(v), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  uint32_t code = 0;
  if (magnitude >= (128u - bias) << 23) {  // normal: re-bias, round
    const uint32_t drop = 23u - digits, moved = magnitude - ((127u - bias) << 23);
    code = (moved + (1u << (drop - 1u)) - 1u + ((moved >> drop) & 1u)) >> drop;
  } else {  // subnormal: in units of the smallest one, rounded by adding 2^23
    const float unit = float_of((126u + bias + digits) << 23);
    code = bits_of(add_rn(mul_rn(float_of(magnitude), unit), 8388608.0f)) & 0xffu;
  }
  return sign | (code < largest ? code : largest);
}
KVCACHE_DEVICE float small_float_value(int32_t type, uint32_t code) {
  if (type == KVC_E5M2) return widen<half_kind::f16>(static_cast<uint16_t>(code << 8));
  const uint32_t sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return float_of(sign | 0x7fc00000u);
  if (magnitude >= 0x08u) return float_of(sign | ((magnitude + (120u << 3)) << 20));
  const float value = mul_rn(static_cast<float>(magnitude), 0.001953125f);  // subnormal: in 2^-9
  return float_of(sign | bits_of(value));
}

/// The nearest whole number in 0 ... most, ties to even.
KVCACHE_DEVICE uint32_t round_to_code(float v, float most) {
  const float inside = v > 0.0f ? (v < most ? v : most) : 0.0f;
  return bits_of(add_rn(inside, 8388608.0f)) & 0xffu;
}
KVCACHE_DEVICE uint32_t encoded(const code_form& f, const code_grid& g, float x) {
  if (is_small_float(f.type)) return g.inverse == 0.0f ? 0 : small_float(f.type, mul_rn(x, g.inverse));
  const auto most = static_cast<float>(top_code(f.type));
  if (!f.symmetric) return round_to_code(mul_rn(add_rn(x, -g.zero), g.inverse), most);
  return g.inverse > 0.0f ? round_to_code(fused(x, g.inverse, mul_rn(0.5f, most)), most) : 0;
}
KVCACHE_DEVICE float decoded(const code_form& f, const code_grid& g, uint32_t code) {
  if (is_small_float(f.type)) return mul_rn(small_float_value(f.type, code), g.scale);
  return fused(static_cast<float>(code), g.scale, g.zero);
}

// ---- rows ----

/// Which bits of 32 codes a word holds: `width` bits from bit `low` on, the word's number in that part.
struct word_part {
  int32_t width, low, word;
};
KVCACHE_DEVICE int32_t widest_part(int32_t bits) {
  return bits >= 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1;
}
KVCACHE_DEVICE word_part part_of_word(int32_t bits, int32_t word) {
  const int32_t first = widest_part(bits);  // a part of n bits takes n words
  if (word < first) return {first, 0, word};
  return {widest_part(bits - first), first, word - first};
}

/// Word `w` of a row whose code i is code_of(i); what fills up the row is 0.
template <class Codes>
KVCACHE_DEVICE uint32_t code_word(const code_form& f, int32_t w, const Codes& code_of) {
  const int32_t bits = code_width(f.type), columns = f.columns(), first = w / bits * 32;
  const word_part part = part_of_word(bits, w % bits);
  uint32_t word = 0;
  for (int32_t k = 0; k < 32 / part.width; ++k) {
    const bool single = part.width == 1;
    const int32_t byte = k % 4, field = k / 4;
    const int32_t i = first + (single ? k : 4 * part.word + byte + field * 4 * part.width);
    const int32_t at = single ? k : 8 * byte + field * part.width;
    if (i < columns) word |= (code_of(i) >> part.low & ((1u << part.width) - 1u)) << at;
  }
  return word;
}
/// Rows begin at even addresses: cells of a format with one scale per head lie 2 bytes off.
KVCACHE_DEVICE void store_word(char* to, uint32_t word) {
  if (reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = word;
    return;
  }
  *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
  *reinterpret_cast<uint16_t*>(to + 2) = static_cast<uint16_t>(word >> 16);
}

/// Code i of a row.
KVCACHE_DEVICE uint32_t code_at(int32_t type, const char* row, int32_t i) {
  int32_t bits = code_width(type), low = 0;
  row += i / 32 * 4 * bits;
  i %= 32;
  uint32_t code = 0;
  while (bits > 0) {
    const int32_t width = widest_part(bits), bytes = 4 * width;
    const int32_t byte = width == 1 ? i / 8 : i % bytes, shift = width == 1 ? i % 8 : i / bytes * width;
    code |= ((static_cast<uint32_t>(load<uint8_t>(row + byte)) >> shift) & ((1u << width) - 1u)) << low;
    row += bytes;
    low += width;
    bits -= width;
  }
  return code;
}

}  // namespace kvcache::detail::gpu
