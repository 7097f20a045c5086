// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rotary position embedding. Angles and their sine and cosine are computed in double and rounded once, so
// position 200,000 is as exact as position 2; a table holds exactly the same floats. Paper: Su et al.,
// "RoFormer", section 3.2.2 (adjacent pairs); the half-split pairing is a permutation of the channels.
#include <cmath>
#include <cstdint>

#include "kernel.hpp"

namespace kvcache::detail {

/// Turns rows by positions; holds the frequencies of one kvc_rope for the duration of a call. With a table
/// they are seldom asked for and computed only then: a decode step makes this object twice per layer.
class rotation {
 public:
  explicit rotation(const kvc_rope& rope) noexcept : rope_(rope), ready_(rope.table_positions == 0) {
    for (int32_t i = 0; ready_ && i < rope.dims / 2; ++i) frequency_[i] = compute(i);
  }

  /// cos and sin of every pair at a position, into out[dims].
  void angles(int64_t position, float* out) const noexcept {
    for (int32_t i = 0; i < rope_.dims / 2; ++i) {
      const double angle = static_cast<double>(position) * (ready_ ? frequency_[i] : compute(i));
      out[2 * i] = static_cast<float>(std::cos(angle));
      out[2 * i + 1] = static_cast<float>(std::sin(angle));
    }
  }

  /// The same from the table where it reaches, else computed into `buffer` [max_dim].
  const float* cos_sin(int64_t position, float* buffer) const noexcept {
    if (position >= 0 && position < rope_.table_positions) return rope_.table + position * rope_.dims;
    angles(position, buffer);
    return buffer;
  }

  /// Rotates the first dims channels of x.
  void turn(float* x, const float* cos_sin) const noexcept {
    const int32_t half = rope_.dims / 2;
    const bool interleaved = rope_.style == KVC_ROPE_INTERLEAVED;
    for (int32_t i = 0; i < half; ++i) {
      float& a = x[interleaved ? 2 * i : i];
      float& b = x[interleaved ? 2 * i + 1 : i + half];
      const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
      const float turned = a * c - b * s;
      b = a * s + b * c;
      a = turned;
    }
  }

 private:
  double compute(int32_t i) const noexcept {
    return rope_.frequency != nullptr ? rope_.frequency[i]
                                      : std::pow(rope_.theta, -2.0 * i / static_cast<double>(rope_.dims));
  }

  const kvc_rope& rope_;
  bool ready_;
  double frequency_[max_dim / 2];
};

}  // namespace kvcache::detail
