// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a codec is: it packs one cell, the values of one head of one block, once, and unpacks it as often as
// it is read. The model that does nothing is `exact`; affine.hpp, fp8.hpp and hadamard.hpp hold the others.
//
//   values    [tokens][dim] floats, of K and of V alike
//   codes     rows of bits; scale, zero   f16 each: format.hpp draws all three
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvcache/core/numeric.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/quant/format.hpp"

namespace kvcache {

/// What a cell holds.
struct cell_shape {
  bool keys = false;   ///< K: a row of codes per channel; V: per slot
  int32_t tokens = 0;  ///< block size
  int32_t dim = 0;     ///< values of one token
  int32_t exempt = 0;  ///< leading tokens that are kept elsewhere: not looked at, code 0
};

/// Where the scales and the minima of a cell lie.
struct cell_scales {
  f16* scale = nullptr;  ///< [scales_of_cell]
  f16* zero = nullptr;   ///< the minima, [scales_of_cell]; unused where the format has none
};

/// The scales of head `head` in the part of a block that `l` describes. `side`: its first byte.
inline cell_scales scales_of(const side_layout& l, std::byte* side, int32_t head) noexcept {
  std::byte* at = side + head * l.scale_stride;
  return {reinterpret_cast<f16*>(at + l.scale),
          l.minimum != 0 ? reinterpret_cast<f16*>(at + l.minimum) : nullptr};
}

/// Largest magnitude of a value that is packed; beyond it a scale would not be an f16.
inline constexpr float largest_packed = 65504.0f;

/// A way to pack a cell. Invariant: packing the same values gives the same bytes, whatever else is packed
/// beside them. `pack` fails with bad_argument "value" and the value's flat index if one is NaN, infinite
/// or beyond largest_packed, and has written nothing then.
template <class C>
concept cell_codec = requires(const C& c, const cell_shape& s, const float* values, std::byte* codes,
                              const std::byte* packed, f16* to, const f16* from, float* out) {
  { c.pack(s, values, codes, to, to) }
  noexcept->std::same_as<status>;
  { c.unpack(s, packed, from, from, out) }
  noexcept->std::same_as<void>;
};

/// Checks a cell's values as every codec's `pack` does first. Exempt tokens are not looked at. Fails:
/// bad_argument "value" with the flat index of the first that cannot be packed.
inline status check_values(const cell_shape& s, const float* values) noexcept {
  const int64_t all = int64_t{s.tokens} * s.dim;
  for (int64_t i = int64_t{s.exempt} * s.dim; i < all; ++i) {
    const float v = values[i];
    if (!(v >= -largest_packed && v <= largest_packed)) return {errc::bad_argument, "value", i};
  }
  return {};
}

/// The codec that keeps what it is given, as T: a cell is [tokens][dim] values of T, exempt ones too.
template <class T = f16>
struct exact {
  /// Stores each value as the nearest T.
  status pack(const cell_shape& s, const float* values, std::byte* codes, f16*, f16*) const noexcept {
    if (status bad = check_values({s.keys, s.tokens, s.dim, 0}, values); !bad) return bad;
    for (int64_t i = 0; i < int64_t{s.tokens} * s.dim; ++i) {
      const T stored = narrow<T>(values[i]);
      std::memcpy(codes + i * static_cast<int64_t>(sizeof(T)), &stored, sizeof(T));
    }
    return {};
  }
  /// Widens each value.
  void unpack(const cell_shape& s, const std::byte* codes, const f16*, const f16*,
              float* values) const noexcept {
    for (int64_t i = 0; i < int64_t{s.tokens} * s.dim; ++i) {
      T stored;
      std::memcpy(&stored, codes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
      values[i] = to_float(stored);
    }
  }
};

static_assert(cell_codec<exact<>>);

}  // namespace kvcache
