// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tokens that recent queries found important stay important. Paper: Liu et al., "Scissorhands: Exploiting the
// Persistence of Importance Hypothesis for LLM KV Cache Compression at Test Time", section 4 (algorithm 2).
// The published method trains no predictor: a count of hits is the prediction. A trained one takes its place
// as a scorer of one's own (docs/retain.md).
#include <algorithm>
#include <cstdint>
#include <span>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"
#include "kvcache/retain/policy_keys.hpp"

namespace kvcache {

/// Keeps the last `recent` tokens and, up to `capacity`, those that the largest share of the last `history`
/// queries hit: gave at least an equal part of their attention. The share is of the queries that could see
/// the token. Cost: keeps the last `history` queries; one pass of them over all keys when it decides.
struct scissorhands {
  int32_t capacity = 256;  ///< tokens that stay, the recent ones among them
  int32_t recent = 10;     ///< last tokens, kept in any case
  int32_t history = 400;   ///< last queries, which count
  int32_t every = 1;       ///< while decoding, drops so many at a time

  /// Hits of the last queries.
  static constexpr observe needs = observe::hits;
  /// As in text.
  static constexpr const char* name = "scissorhands";
  /// Settings.
  static constexpr policy_key<scissorhands> keys[] = {{"capacity", &scissorhands::capacity, 1, true},
                                                      {"recent", &scissorhands::recent},
                                                      {"history", &scissorhands::history, 1},
                                                      {"every", &scissorhands::every, 1}};

  /// To `capacity` tokens.
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, capacity, 0, recent, every);
  }
  /// The history.
  constexpr int32_t must_recompute() const noexcept { return history; }
  /// The history.
  constexpr watch_options watch() const noexcept { return {.queries = history}; }
  /// Hits per query that could have hit.
  constexpr void score(const observation& o, std::span<float> out) const noexcept {
    add_group(o, out);
    for (size_t i = 0; i < out.size(); ++i) out[i] /= static_cast<float>(std::max(o.seen[i], 1));
  }
};
static_assert(token_scorer<scissorhands>);

}  // namespace kvcache
