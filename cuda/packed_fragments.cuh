// SPDX-License-Identifier: Apache-2.0
#pragma once
// From codes to fragments of mma. ldmatrix moves pairs of bytes; transposed, a register holds two bytes of
// row 2t and two of row 2t + 1, all of column pair g (lane = 4 g + t). Rows are channels of K or slots of V,
// and a byte pair is what lies along the row: two codes of 8 bits, or four of 4. So a register falls apart
// into pairs (row 2t, row 2t + 1) of one column each, which is what mma wants, if only the columns may come
// in the order in which codes lie:
//
//   8 bits   code 2g                         | code 2g + 1                      one pair of 8 columns each
//   4 bits   code 2g        | code 2g + 16   | code 2g + 1    | code 2g + 17    (of 32 codes:
//   quant/format.hpp) part     0, high = 0    | 0, high = 1    | 1, high = 0    | 1, high = 1     8 bits:
//   part 0 only
//
// An integer code needs no conversion: as bits of an f16 it is the subnormal number code * 2^-24, and a code
// 4 bits higher 16 times that; tensor cores take subnormal numbers as they are (Fasi, Higham, Mikaitis and
// Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7, 2021), and the factors are
// put right in float afterwards.
#include "element.cuh"
#include "packed_params.hpp"

namespace kvcache::detail::gpu {

/// Number of a column of a run of 16 or 32 codes by the order of columns above.
template <int Bits>
KVCACHE_BOTH constexpr uint32_t column_at(uint32_t part, uint32_t high, uint32_t i) {
  return Bits == 8 ? part * 16 + 2 * i + high : part / 2 * 32 + 2 * i + part % 2 + 16 * high;
}

template <packed_code Code>
struct code_parts {
  static constexpr int bits = bits_of(Code);
  static constexpr int parts = bits == 8 ? 1 : 2;  ///< fragments of 16 columns in a register pair

  /// What multiplies a product with a code of the given half.
  static KVCACHE_DEVICE constexpr float unit(int high) {
    if (Code == packed_code::e4m3) return e4m3_by_hardware ? 1.0f : 0x1p8f;
    return Code == packed_code::u4 && high != 0 ? 0x1p20f : 0x1p24f;
  }

  /// Pairs of both halves of a part of one register.
  static KVCACHE_DEVICE void split(uint32_t codes, int part, uint32_t& low, uint32_t& high) {
    if constexpr (Code == packed_code::u8) {
      low = codes & 0x00ff00ffu;
      high = pick_bytes(codes, 0, 0x4341);
    } else if constexpr (Code == packed_code::u4) {
      const uint32_t at = part == 0 ? codes : codes >> 8;
      low = at & 0x000f000fu;
      high = at & 0x00f000f0u;
    } else if constexpr (e4m3_by_hardware) {
      convert4_e4m3(pick_bytes(codes, 0, 0x3120), low, high);
    } else {
      low = shifted_e4m3(codes << 8);
      high = shifted_e4m3(codes);
    }
  }

  /// e4m3 in the upper bytes of a pair as f16, divided by 256: exponent and mantissa move by one bit. The
  /// code of a NaN, which no block holds, becomes a number.
  static KVCACHE_DEVICE uint32_t shifted_e4m3(uint32_t codes) {
    return (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  }

  /// The fragments of a part of two registers, the second of which is 8 rows on: A of 16 columns, or two
  /// times B of 8.
  struct fragment {
    uint32_t a[4];  ///< low, high of the first; low, high of the second
  };
  static KVCACHE_DEVICE fragment fragment_of(uint32_t first, uint32_t second, int part) {
    fragment f;
    split(first, part, f.a[0], f.a[1]);
    split(second, part, f.a[2], f.a[3]);
    return f;
  }
};

/// d += fragment * rows: columns on M with 8 query rows, or query rows on M with the columns on N.
template <bool Wide>
KVCACHE_DEVICE void multiply_part(float (*d)[4], const uint32_t (&codes)[4], const uint32_t* q) {
  if constexpr (Wide) {
    const uint32_t rows[4] = {q[0], q[1], q[2], q[3]};
    mma<half_kind::f16>(d[0], rows, codes[0], codes[2]);
    mma<half_kind::f16>(d[1], rows, codes[1], codes[3]);
  } else {
    mma<half_kind::f16>(d[0], codes, q[0], q[1]);
  }
}

}  // namespace kvcache::detail::gpu
