// SPDX-License-Identifier: Apache-2.0
#pragma once
// Formats by name: for each budget of bits the recipe that lost least. All keep the first token exact; those
// of integers have K per channel with a minimum, one scale per channel and block, and V per token, and rotate
// both, so they need a head dim that is a power of two (or hadamard=none). Bits per value at blocks of 64
// tokens, 1,024 tokens and head dim 64:
//
//   kv8   K8 V8 symmetric              8.391      kv3   K3 V3, V clipped        3.516
//   kv6   K8 V4                        6.516      kv2   K2 V2, both clipped     2.516
//   kv5   K5 V4                        5.016      fp8   e4m3, both per token    8.266
//   kv4   K4 V4                        4.516
#include <string_view>

#include "kvcache/quant/format.hpp"

namespace kvcache {

/// A format with a name.
struct format_preset {
  const char* name = "";  ///< as in a text
  kv_format format{};     ///< what it stands for
};

namespace detail {
constexpr kv_format rotated_preset(code k, code v, bool v_symmetric = false,
                                   clip_search k_clip = clip_search::none,
                                   clip_search v_clip = clip_search::none) noexcept {
  return {.k = {k, scale_axis::channel, 0, false, k_clip, true},
          .v = {v, scale_axis::token, 64, v_symmetric, v_clip, true},
          .residual = 0,
          .exempt = 1};
}
}  // namespace detail

/// Every preset, best first.
inline constexpr format_preset format_presets[] = {
    {"kv8", detail::rotated_preset(code::int8, code::int8, true)},
    {"kv6", detail::rotated_preset(code::int8, code::int4)},
    {"kv5", detail::rotated_preset(code::int5, code::int4)},
    {"kv4", detail::rotated_preset(code::int4, code::int4)},
    {"kv3", detail::rotated_preset(code::int3, code::int3, false, clip_search::none, clip_search::middle)},
    {"kv2",
     detail::rotated_preset(code::int2, code::int2, false, clip_search::two_sided, clip_search::two_sided)},
    {"fp8", {.k = {.codes = code::e4m3}, .v = {.codes = code::e4m3}, .residual = 0, .exempt = 1}},
};

/// The preset of that name; null if there is none.
constexpr const format_preset* find_preset(std::string_view name) noexcept {
  for (const format_preset& p : format_presets) {
    if (name == p.name) return &p;
  }
  return nullptr;
}

}  // namespace kvcache
