// SPDX-License-Identifier: Apache-2.0
#pragma once
// States of online softmax and what is done with them outside the kernels: fold the lanes, join two states,
// write a row. Compiled once, without fused multiply-add, so every target shares these bits. Online softmax
// and the joining rule: Milakov and Gimelshein, "Online normalizer calculation for softmax", section 3.
#include <cmath>
#include <cstdint>
#include <limits>

#include "element.hpp"
#include "exp2.hpp"
#include "kernel.hpp"

namespace kvcache::detail {

inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// Sum of a row's lanes as a fixed tree.
inline float fold_lanes(const float* lanes) noexcept {
  float t[sum_lanes];
  std::memcpy(t, lanes, sizeof t);
  for (int32_t step = sum_lanes / 2; step > 0; step /= 2) {
    for (int32_t i = 0; i < step; ++i) t[i] += t[i + step];
  }
  return t[0];
}

/// A state whose accumulator is elsewhere. Without keys it is exactly (-infinity, 0).
struct state {
  float max = minus_infinity;
  float sum = 0;
  bool empty() const noexcept { return max == minus_infinity && sum == 0; }
};

/// total += part, for unnormalised accumulators of `dim` channels.
inline void join(state& total, float* total_acc, state part, const float* acc, int32_t dim) noexcept {
  if (part.empty()) return;
  if (total.empty()) {
    total = part;
    std::memcpy(total_acc, acc, sizeof(float) * static_cast<size_t>(dim));
    return;
  }
  const float top = total.max > part.max ? total.max : part.max;
  const float a = exp2_weight(total.max - top), b = exp2_weight(part.max - top);
  total = {top, total.sum * a + part.sum * b};
  for (int32_t d = 0; d < dim; ++d) total_acc[d] = total_acc[d] * a + acc[d] * b;
}

/// Normalises a state into one output row (null: none), with the sink's logit (times log2 e) in the
/// denominator. Returns the row's log-sum-exp, base 2.
inline float finish(state s, const float* acc, const float* sink_logit, std::byte* to, int32_t type,
                    int32_t dim) noexcept {
  float factor = 0, lse = minus_infinity;
  if (!s.empty()) {
    const float sink = sink_logit != nullptr ? *sink_logit * log2_e : minus_infinity;
    const float top = s.max > sink ? s.max : sink;
    const float w = exp2_weight(s.max - top);
    const float sum = sink_logit != nullptr ? s.sum * w + exp2_weight(sink - top) : s.sum;
    factor = w / sum;
    lse = static_cast<float>(double{top} + std::log2(double{sum}));
  } else if (sink_logit != nullptr) {
    lse = *sink_logit * log2_e;
  }
  if (to == nullptr) return lse;
  with_type(type, [&](auto* tag) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    const bool none = s.empty();
    for (int32_t d = 0; d < dim; ++d) {
      write(to + d * int64_t{sizeof(T)}, narrow<T>(none ? 0.0f : acc[d] * factor));
    }
  });
  return lse;
}

inline std::byte* out_row(const kvc_out& out, int64_t row, int64_t head) noexcept {
  return out.o == nullptr ? nullptr : bytes_of(out.o) + row * out.row_stride + head * out.head_stride;
}
inline float* lse_of(const kvc_out& out, int64_t row, int64_t head) noexcept {
  return out.lse2 + row * (out.lse_row_stride != 0 ? out.lse_row_stride : out.heads) + head;
}

}  // namespace kvcache::detail
