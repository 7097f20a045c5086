// SPDX-License-Identifier: Apache-2.0
#pragma once
// The attention of the last query decides. Paper: Oren et al., "Transformers are Multi-State RNNs", section
// 3.2 (TOVA).
#include <cstdint>
#include <span>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"
#include "kvcache/retain/policy_keys.hpp"

namespace kvcache {

/// Keeps the `capacity` tokens that the last query gives most attention, by the mean over all heads of a
/// layer, the same for all of them. Nothing is safe: the newest token competes too. Cost: one query over the
/// keys.
struct tova {
  int32_t capacity = 256;  ///< tokens that stay
  int32_t every = 1;       ///< while decoding, drops so many at a time

  /// The last query's weights.
  static constexpr observe needs = observe::last_row;
  /// One choice per layer.
  static constexpr bool whole_layer = true;
  /// As in text.
  static constexpr const char* name = "tova";
  /// Settings.
  static constexpr policy_key<tova> keys[] = {{"capacity", &tova::capacity, 1, true},
                                              {"every", &tova::every, 1}};

  /// To `capacity` tokens.
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, capacity, 0, 0, every, drop_form::overwrite);
  }
  /// The last token.
  constexpr int32_t must_recompute() const noexcept { return 1; }
  /// One query.
  constexpr watch_options watch() const noexcept { return {.queries = 1}; }
  /// The sum over the group; heads are added up by who selects.
  constexpr void score(const observation& o, std::span<float> out) const noexcept { add_group(o, out); }
};
static_assert(token_scorer<tova> && keeps_whole_layer<tova>());

}  // namespace kvcache
