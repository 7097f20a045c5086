// SPDX-License-Identifier: Apache-2.0
#pragma once
// Integer codes of 8, 6, 5, 4, 3 and 2 bits on evenly spaced levels. L = 2^bits - 1 is the largest code.
//
//   min/max     zero = largest f16 <= least value; scale = smallest f16 >= (largest - zero) / L, raised by
//               one f16 while zero + L scale < largest. code = rint((x - zero) * (1 / scale))
//   symmetric   levels lie at -L/2 ... L/2 times scale, none at 0 ("mid-rise"); scale = smallest f16 >=
//               2 max|x| / L, not 0. code = rint(fma(x, 1 / scale, L / 2))
//
// Codes are kept inside 0 ... L. All in float but the test for raising; rint rounds ties to even. Where scale
// is 0, the code is 0. So without a search every value is at most half a step away, but for the rounding of
// the float operations: at most 3 L 2^-24 steps and half a unit in the last place of the value read.
//
// The search (clip_search) tries narrower ranges and takes that of least squared error, of equals the widest:
//   middle      1, .93, .86, .79, .72, .64, .56 of the range, about its middle
//   two_sided   each end at 1, .86, .72 or .58 of its distance from the middle; of equally wide ones that
//               which moves the low end less comes first
//   symmetric   the seven factors on max|x|, for both searches
// A group's error is a sum of 16 lanes: value i adds fma(e, e, lane) to lane i % 16, and the lanes are folded
// (i, i + 8), (i, i + 4), (i, i + 2), (i, i + 1). An exempt value adds nothing, but counts in i.
// Paper: Liu and others, KIVI, 2024, section 3 (K per channel, V per token).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "kvcache/quant/codes.hpp"
#include "kvcache/quant/concept.hpp"
#include "kvcache/quant/format.hpp"
#include "kvcache/quant/groups.hpp"

namespace kvcache {

/// Levels that hold all of a range. Requires: |least|, |largest| <= largest_packed; least <= largest.
inline stored_grid fit_min_max(float least, float largest, int32_t most) noexcept {
  stored_grid out;
  out.zero = detail::f16_below(least);
  const float zero = to_float(out.zero);
  if (largest == least && zero == least) return out;
  out.scale = detail::f16_above((largest - zero) / static_cast<float>(most));
  while (double{zero} + double{to_float(out.scale)} * most < double{largest}) {
    out.scale = detail::next_up(out.scale);
  }
  return out;
}

/// Levels that hold -magnitude ... magnitude. Requires: 0 <= magnitude <= largest_packed.
inline stored_grid fit_symmetric(float magnitude, int32_t most) noexcept {
  stored_grid out;
  if (magnitude == 0.0f) return out;
  out.scale = detail::f16_above(magnitude * 2.0f / static_cast<float>(most));
  // Only where the quotient underflowed; else no float above scale * most is divided down to scale.
  while (double{to_float(out.scale)} * most < 2.0 * double{magnitude}) {
    out.scale = detail::next_up(out.scale);
  }
  return out;
}

/// A stored grid as used: `inverse` is 1 / scale, or 0.
struct affine_grid {
  float scale = 0;    ///< step between codes
  float zero = 0;     ///< value of code 0
  float inverse = 0;  ///< codes per unit
};

/// Integer codes on evenly spaced levels, as drawn above. Requires: format has integer codes.
struct affine {
  side_format format{.codes = code::int8};  ///< codes, axis, group size, symmetric, clip

  /// The levels for a group of values.
  stored_grid fit(const value_group& g) const noexcept {
    if (g.empty()) return {};
    return fit_range(range_of(g), [&](stored_grid candidate) { return squared_error(g, candidate); });
  }
  /// The same, from the range and from `error`, which is squared_error of a candidate over the group.
  template <class Error>
  stored_grid fit_range(value_range r, Error error) const noexcept {
    const float magnitude = std::max(-r.least, r.largest);
    const int32_t most = largest_code(format.codes);
    const stored_grid whole = format.symmetric ? fit_symmetric(std::max(magnitude, 0.0f), most)
                                               : fit_min_max(r.least, r.largest, most);
    if (format.clip == clip_search::none || whole.scale == f16{}) return whole;
    search<Error> best{error, whole, error(whole)};
    if (format.symmetric) {
      for (const float s : middle_factors) best.offer(fit_symmetric(s * magnitude, most));
    } else {
      search_range(r, most, best);
    }
    return best.grid;
  }

  /// The levels, ready for use.
  affine_grid grid(stored_grid g) const noexcept {
    const float scale = to_float(g.scale);
    return {scale, format.symmetric ? symmetric_zero(format.codes, scale) : to_float(g.zero),
            scale > 0.0f ? 1.0f / scale : 0.0f};
  }
  /// The nearest level's code.
  uint32_t encode(float x, const affine_grid& g) const noexcept {
    const auto most = static_cast<float>(largest_code(format.codes));
    if (!format.symmetric) return detail::round_code((x - g.zero) * g.inverse, most);
    return g.inverse > 0.0f ? detail::round_code(std::fma(x, g.inverse, 0.5f * most), most) : 0;
  }
  /// The level's value.
  float decode(uint32_t code, const affine_grid& g) const noexcept { return value_of(code, g.scale, g.zero); }

  /// What the search minimises: the sum over the group of (value - level)^2, in the order drawn above.
  float squared_error(const value_group& values, stored_grid stored) const noexcept {
    std::array<float, 16> lane{};
    const affine_grid g = grid(stored);
    values.each([&](int64_t i, float x) {
      const float e = x - decode(encode(x, g), g);
      float& sum = lane[static_cast<size_t>(i % 16)];
      sum = std::fma(e, e, sum);
    });
    for (size_t half = 8; half > 0; half /= 2) {
      for (size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
  }

  /// Packs a cell; see cell_codec.
  status pack(const cell_shape& s, const float* values, std::byte* codes, f16* scale,
              f16* zero) const noexcept {
    if (status bad = check_values(s, values); !bad) return bad;
    detail::fit_groups(*this, format, s, values, scale, zero);
    detail::encode_cell(*this, format, s, values, codes, scale, zero);
    return {};
  }
  /// Unpacks a cell; see cell_codec. An exempt token comes out as the value of code 0.
  void unpack(const cell_shape& s, const std::byte* codes, const f16* scale, const f16* zero,
              float* values) const noexcept {
    detail::decode_cell(*this, format, s, codes, scale, zero, values);
  }

  /// Parts of the range that `middle` tries after the whole.
  static constexpr float middle_factors[] = {0.93f, 0.86f, 0.79f, 0.72f, 0.64f, 0.56f};
  /// Parts of an end's distance from the middle that `two_sided` tries. Equal steps, so that the sum of two
  /// indices orders ranges by width.
  static constexpr float end_factors[] = {1.0f, 0.86f, 0.72f, 0.58f};

 private:
  template <class Error>
  struct search {
    Error& measure;
    stored_grid grid;
    float error;

    void offer(stored_grid candidate) noexcept {
      const float e = measure(candidate);
      if (e < error) {
        grid = candidate;
        error = e;
      }
    }
  };

  /// Min/max ranges, the widest first; the whole range has been offered.
  template <class Error>
  void search_range(value_range r, int32_t most, search<Error>& best) const noexcept {
    const float middle = 0.5f * (r.least + r.largest), half = 0.5f * (r.largest - r.least);
    const auto offer = [&](float low, float high) {
      const float least = low == 1.0f ? r.least : std::max(std::fma(-low, half, middle), r.least);
      const float largest = high == 1.0f ? r.largest : std::min(std::fma(high, half, middle), r.largest);
      best.offer(fit_min_max(least, largest, most));
    };
    if (format.clip == clip_search::middle) {
      for (const float s : middle_factors) offer(s, s);
      return;
    }
    for (int32_t sum = 1; sum <= 6; ++sum) {
      for (int32_t low = std::max(0, sum - 3); low <= std::min(3, sum); ++low) {
        offer(end_factors[low], end_factors[sum - low]);
      }
    }
  }
};

static_assert(cell_codec<affine>);

}  // namespace kvcache
