// SPDX-License-Identifier: Apache-2.0
#pragma once
// The normalised Walsh-Hadamard rotation of a row. It spreads an outlier of one channel over all of them, so
// that a scale per token loses less. It is orthonormal: rotating K and Q alike leaves every score as it is up
// to rounding, and it is its own inverse, so the output of attention over rotated V is rotated once more.
//
//   for h = 1, 2, 4, ... < dim:  each pair (i, i + h), i without bit h:  (a, b) becomes (a + b, a - b)
//   then every value times the float nearest to 1 / sqrt(dim)
//
// In float, in this order. Paper: Ashkboos and others, QuaRot, 2024, section 3.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"
#include "kvcache/quant/affine.hpp"
#include "kvcache/quant/concept.hpp"

namespace kvcache {

/// The float nearest to 1 / sqrt(dim).
inline float hadamard_factor(int32_t dim) noexcept {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
}

/// Rotates a row in place. Requires: dim is a power of two.
inline void hadamard(float* row, int32_t dim) noexcept {
  for (int32_t h = 1; h < dim; h *= 2) {
    for (int32_t i = 0; i < dim; i += 2 * h) {
      for (int32_t j = i; j < i + h; ++j) {
        const float a = row[j], b = row[j + h];
        row[j] = a + b;
        row[j + h] = a - b;
      }
    }
  }
  const float factor = hadamard_factor(dim);
  for (int32_t i = 0; i < dim; ++i) row[i] *= factor;
}

/// A codec of rotated rows: packs what Codec packs of the rotated values, and rotates back what it unpacks.
/// A cache does not use it: there, values are rotated when they are appended. Owns nothing: `scratch` is
/// memory of the caller for [tokens][dim] floats, written by pack. Fails: unsupported "hadamard" if dim is no
/// power of two; as Codec, for rotated values.
template <cell_codec Codec>
struct rotated {
  Codec codec{};             ///< packs the rotated rows
  float* scratch = nullptr;  ///< [tokens][dim]

  /// Packs a cell; see cell_codec.
  status pack(const cell_shape& s, const float* values, std::byte* codes, f16* scale,
              f16* zero) const noexcept {
    if (!is_power_of_two(s.dim)) return {errc::unsupported, "hadamard", s.dim};
    for (int32_t t = 0; t < s.tokens; ++t) {
      float* row = scratch + int64_t{t} * s.dim;
      for (int32_t i = 0; i < s.dim; ++i) row[i] = values[int64_t{t} * s.dim + i];
      if (t >= s.exempt) hadamard(row, s.dim);
    }
    return codec.pack(s, scratch, codes, scale, zero);
  }
  /// Unpacks a cell; see cell_codec.
  void unpack(const cell_shape& s, const std::byte* codes, const f16* scale, const f16* zero,
              float* values) const noexcept {
    codec.unpack(s, codes, scale, zero, values);
    for (int32_t t = 0; t < s.tokens; ++t) hadamard(values + int64_t{t} * s.dim, s.dim);
  }
};

static_assert(cell_codec<rotated<affine>>);

}  // namespace kvcache
