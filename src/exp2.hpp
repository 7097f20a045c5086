// SPDX-License-Identifier: Apache-2.0
#pragma once
// The transcendental functions of attention as fixed sequences of IEEE operations, so that every vector
// width and the scalar form give the same bits. The vector forms in kernel_simd.cpp repeat these steps.
#include <bit>
#include <cmath>
#include <cstdint>

namespace kvcache::detail {

/// Minimax fit of (2^f - 1) / f over [-1/2, 1/2] with relative error below 2e-9.
inline constexpr float exp2_c[6] = {0x1.62e430p-1f, 0x1.ebfbdcp-3f,  0x1.c6aee8p-5f,
                                    0x1.3b2d4cp-7f, 0x1.5f3e52p-10f, 0x1.41fbbcp-13f};
/// Minimax fit of (tanh(y) / y - 1) / y^2 in y^2 for |y| <= 0.625 with relative error below 5e-9.
inline constexpr float tanh_c[5] = {-0x1.555534p-2f, 0x1.11074cp-3f, -0x1.b8405ap-5f, 0x1.523bc8p-6f,
                                    -0x1.762d7ap-8f};
inline constexpr float exp2_min = -126.0f;       ///< below, 2^x counts as 0
inline constexpr float round_magic = 0x1.8p23f;  ///< adding it rounds to an integer
inline constexpr float tanh_small = 0.625f;      ///< polynomial below, exponential above
inline constexpr float tanh_large = 9.0f;        ///< tanh is 1 from here on
inline constexpr float two_log2_e = 2.88539008177792681472f;

/// 2^x for x in [-126, 127]; NaN stays NaN.
inline float exp2_core(float x) noexcept {
  const float shifted = x + round_magic;
  const float f = x - (shifted - round_magic);
  float p = exp2_c[5];
  for (int i = 4; i >= 0; --i) p = std::fma(p, f, exp2_c[i]);
  p = std::fma(p, f, 1.0f);
  const uint32_t n = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(round_magic);
  return p * std::bit_cast<float>((n + 127u) << 23);
}

/// 2^x for x <= 0, and 0 below exp2_min.
inline float exp2_weight(float x) noexcept {
  const float y = exp2_core(exp2_min > x ? exp2_min : x);
  return x < exp2_min ? 0.0f : y;
}

inline float tanh_fixed(float y) noexcept {
  const float a = std::fabs(y);
  const float e = exp2_core((tanh_large < a ? tanh_large : a) * two_log2_e);
  const float big = 1.0f - 2.0f / (e + 1.0f);
  const float y2 = y * y;
  float p = tanh_c[4];
  for (int i = 3; i >= 0; --i) p = std::fma(p, y2, tanh_c[i]);
  const float small = std::fma(y * y2, p, y);
  return a < tanh_small ? small : std::copysign(big, y);
}

}  // namespace kvcache::detail
