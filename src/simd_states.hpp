// SPDX-License-Identifier: Apache-2.0
// From scores to weights, and the states of online softmax. Included once per instruction set, after
// simd.hpp.
#include "state.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

/// f(tag, c) for the vectors of `dim` channels, a multiple of 8.
template <class F>
HWY_INLINE void each_vector(int32_t dim, F&& f) {
  int32_t c = 0;
  for (; c + lanes <= dim; c += lanes) f(tag_f(), c);
  if constexpr (lanes > 8) {
    if (c < dim) f(tag_8(), c);
  }
}

// ---- weights ----

/// A vector of scores, capped and masked.
HWY_INLINE vec_f admit(vec_f s, int32_t v, uint64_t seen, float cap_log2) {
  const tag_f d;
  if (cap_log2 != 0) s = hn::Mul(hn::Set(d, cap_log2), tanh_fixed(s));
  if (seen == ~uint64_t{0}) return s;
  const uint64_t bits = seen >> (v * lanes);
  uint8_t raw[8];
  std::memcpy(raw, &bits, sizeof raw);
  return hn::IfThenElse(hn::LoadMaskBits(d, raw), s, hn::Set(d, -HUGE_VALF));
}

/// Caps and masks a row's scores in place; returns their maximum and `top`.
HWY_INLINE float admit_row(float* HWY_RESTRICT w, uint64_t seen, float cap_log2, float top) {
  const tag_f d;
  const bool as_they_are = cap_log2 == 0 && seen == ~uint64_t{0};
  auto highest = hn::Set(d, top);
  for (int32_t v = 0; v < key_vectors; ++v) {
    auto s = hn::LoadU(d, w + v * lanes);
    if (!as_they_are) {
      s = admit(s, v, seen, cap_log2);
      hn::StoreU(s, d, w + v * lanes);
    }
    highest = hn::Max(highest, s);
  }
  return hn::GetLane(hn::MaxOfLanes(d, highest));
}

/// Scores to weights, given their maximum `top`: weights, lane sums, rescaled accumulators.
HWY_INLINE void soften(float* HWY_RESTRICT w, float top, float& max, float* HWY_RESTRICT sums,
                       float* HWY_RESTRICT acc, int32_t dim_v) {
  const tag_f d;
  vec_f s[key_vectors];
  const auto base = hn::Set(d, top);
  for (int32_t v = 0; v < key_vectors; ++v) {
    s[v] = exp2_weight(hn::Sub(hn::LoadU(d, w + v * lanes), base));
    hn::StoreU(s[v], d, w + v * lanes);
  }
  const float shrink = top == max ? 1.0f : detail::exp2_weight(max - top);
  max = top;
  constexpr int32_t per = sum_lanes / lanes;
  for (int32_t i = 0; i < per; ++i) {
    const auto sum = hn::Add(hn::Add(s[i], s[per + i]), hn::Add(s[2 * per + i], s[3 * per + i]));
    const auto before = hn::LoadU(d, sums + i * lanes);
    hn::StoreU(hn::MulAdd(before, hn::Set(d, shrink), sum), d, sums + i * lanes);
  }
  if (shrink == 1.0f) return;
  each_vector(dim_v, [&](auto tag, int32_t c) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(tag, acc + c), hn::Set(tag, shrink)), tag, acc + c);
  });
}

// ---- states ----

/// Bit for bit what join() does with one state after the other: no fused multiply-add.
void join_states(const joined_states& j) {
  const tag_f d;
  for (int64_t first = 0; first < j.count; first += lanes) {
    const int64_t n = std::min<int64_t>(lanes, j.count - first);
    state total[lanes], part[lanes];
    float max[lanes] = {}, part_max[lanes] = {}, a[lanes], b[lanes];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = (first + i) * j.part_step;
      total[i] = {j.max[first + i], j.sum[first + i]};
      part[i] = {j.part_max[at], j.part_sum[at]};
      max[i] = total[i].max;
      part_max[i] = part[i].max;
    }
    const auto x = hn::LoadU(d, max), y = hn::LoadU(d, part_max);
    const auto top = hn::IfThenElse(hn::Gt(x, y), x, y);
    hn::StoreU(exp2_weight(hn::Sub(x, top)), d, a);
    hn::StoreU(exp2_weight(hn::Sub(y, top)), d, b);
    hn::StoreU(top, d, max);
    for (int64_t i = 0; i < n; ++i) {
      if (part[i].empty()) continue;
      float* acc = j.acc + (first + i) * j.dim;
      const float* from = j.part_acc + (first + i) * j.part_step * j.dim;
      if (total[i].empty()) {
        j.max[first + i] = part[i].max;
        j.sum[first + i] = part[i].sum;
        std::memcpy(acc, from, sizeof(float) * static_cast<size_t>(j.dim));
        continue;
      }
      j.max[first + i] = max[i];
      j.sum[first + i] = total[i].sum * a[i] + part[i].sum * b[i];
      each_vector(j.dim, [&](auto tag, int32_t c) HWY_ATTR {
        const auto before = hn::Mul(hn::LoadU(tag, acc + c), hn::Set(tag, a[i]));
        hn::StoreU(hn::Add(before, hn::Mul(hn::LoadU(tag, from + c), hn::Set(tag, b[i]))), tag, acc + c);
      });
    }
  }
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
