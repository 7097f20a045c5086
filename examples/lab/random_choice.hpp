// SPDX-License-Identifier: Apache-2.0
#pragma once

// A control: tokens that stay are chosen by lot, for every head anew. A policy that is not better than this
// one knows nothing.

#include <bit>
#include <cstdint>
#include <span>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"

namespace lab {

/// Keeps `capacity` tokens per kv head. The lot of a token is drawn from the seed, its position and the norm
/// of its value, which differs between heads; so it stays the same while decoding.
struct random_choice {
  std::int32_t capacity = 1;
  std::uint64_t seed = 1;

  static constexpr kvcache::observe needs = kvcache::observe::nothing;

  kvcache::keep_plan plan(const kvcache::retain_lengths& n) const noexcept {
    kvcache::keep_plan p;
    if (n.held <= capacity) return p;
    p.form = kvcache::drop_form::gather;
    p.keep = capacity;
    return p;
  }
  std::int32_t must_recompute() const noexcept { return 1; }
  kvcache::watch_options watch() const noexcept { return {}; }
  void score(const kvcache::observation& o, std::span<float> out) const noexcept {
    for (std::size_t i = 0; i < out.size(); ++i) {
      std::uint64_t z = seed + 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(o.positions[i] + 1);
      z += static_cast<std::uint64_t>(std::bit_cast<std::uint32_t>(o.value_norms[i])) << 32;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      out[i] = static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-24f;
    }
  }
};
static_assert(kvcache::token_scorer<random_choice>);

}  // namespace lab
