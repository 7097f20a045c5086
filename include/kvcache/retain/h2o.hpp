// SPDX-License-Identifier: Apache-2.0
#pragma once
// Heavy hitters and recent tokens. Paper: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative
// Inference of Large Language Models", section 4 (algorithm 1).
#include <cstdint>
#include <limits>
#include <span>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"
#include "kvcache/retain/policy_keys.hpp"

namespace kvcache {

/// Keeps the last `recent` tokens and, of those before them, the `heavy` ones that all queries so far gave
/// most attention; each kv head its own, by the sum over its query heads. A new token starts at 0, hence
/// `recent` is at least 1: without it the newcomer would always be the one to go.
/// Cost: one number per token and query head; every query of the prompt must be seen.
struct h2o {
  int32_t heavy = 64;   ///< tokens kept by attention
  int32_t recent = 64;  ///< last tokens, kept in any case
  int32_t every = 1;    ///< while decoding, drops so many at a time

  /// Sums over all queries.
  static constexpr observe needs = observe::column_sums;
  /// As in text.
  static constexpr const char* name = "h2o";
  /// Settings.
  static constexpr policy_key<h2o> keys[] = {
      {"heavy", &h2o::heavy}, {"recent", &h2o::recent, 1}, {"every", &h2o::every, 1}};

  /// To heavy + recent tokens.
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, heavy + recent, 0, recent, every, drop_form::overwrite);
  }
  /// All of the prompt: each of its queries counts.
  constexpr int32_t must_recompute() const noexcept { return std::numeric_limits<int32_t>::max(); }
  /// All queries.
  constexpr watch_options watch() const noexcept { return {}; }
  /// The sum over the group.
  constexpr void score(const observation& o, std::span<float> out) const noexcept { add_group(o, out); }
};
static_assert(token_scorer<h2o>);

}  // namespace kvcache
