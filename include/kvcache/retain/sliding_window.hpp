// SPDX-License-Identifier: Apache-2.0
#pragma once
// The last tokens only: what a window costs a model that was not trained with one. The control of the other
// policies.
#include <cstdint>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"
#include "kvcache/retain/policy_keys.hpp"

namespace kvcache {

/// Keeps the last `window` tokens, to the token; keys keep their angles. The next query sees them and itself.
struct sliding_window {
  int32_t window = 256;  ///< tokens that stay

  /// Lengths suffice.
  static constexpr observe needs = observe::nothing;
  /// As in text.
  static constexpr const char* name = "window";
  /// Settings.
  static constexpr policy_key<sliding_window> keys[] = {{"window", &sliding_window::window, 1, true}};

  /// All but the last ones go.
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, window, 0, window, 1, drop_form::overwrite);
  }
  /// The last token: its logits are wanted.
  constexpr int32_t must_recompute() const noexcept { return 1; }
};
static_assert(retention_policy<sliding_window>);

}  // namespace kvcache
