// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention sinks and a window: the first tokens of a text and the last ones stay. Paper: Xiao et al.,
// "Efficient Streaming Language Models with Attention Sinks", section 3.2.
//
//   positions=cache   | sinks |x|x|x|  window  |    whole blocks go; the sinks are turned towards the window
//   positions=text    | sinks |xxxxx| window   |    to the token; every key keeps its angle
#include <cstdint>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"
#include "kvcache/retain/policy_keys.hpp"

namespace kvcache {

/// Keeps the first `sinks` and the last `window` tokens, alike for all layers and heads. With cache positions
/// (the paper's) whole blocks go and the sinks are rounded up to whole blocks, so up to a block less one more
/// than asked for stays, at either end. Cost: none but turning the sinks.
struct streaming_llm {
  /// Values of `positions`.
  enum : int32_t { cache_positions, text_positions };
  int32_t sinks = 4;                    ///< first tokens that stay
  int32_t window = 252;                 ///< last tokens that stay
  int32_t positions = cache_positions;  ///< whether the sinks move with the window

  /// Lengths suffice.
  static constexpr observe needs = observe::nothing;
  /// As in text.
  static constexpr const char* name = "streaming_llm";
  /// Settings.
  static constexpr policy_key<streaming_llm> keys[] = {
      {"sinks", &streaming_llm::sinks},
      {"window", &streaming_llm::window, 1},
      {"positions", &streaming_llm::positions, 0, false, "cache|text"}};

  /// The blocks between sinks and window, or the tokens.
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    if (positions == text_positions) {
      return keep_at_most(n, sinks + window, sinks, window, 1, drop_form::overwrite);
    }
    keep_plan p;
    const int32_t first = (sinks + n.unit - 1) / n.unit * n.unit;
    const int32_t drop = (n.held - first - window) / n.unit * n.unit;
    if (drop <= 0) return p;
    p.form = drop_form::whole_blocks;
    p.keep = n.held - drop;
    p.sinks = first;
    p.recent = window;
    p.move_sinks = first > 0;
    return p;
  }
  /// The last token: its logits are wanted.
  constexpr int32_t must_recompute() const noexcept { return 1; }
};
static_assert(retention_policy<streaming_llm>);

}  // namespace kvcache
