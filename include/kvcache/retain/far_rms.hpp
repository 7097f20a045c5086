// SPDX-License-Identifier: Apache-2.0
#pragma once
// What distant queries look at is what later text will need: the root mean square of the attention that
// queries some way behind a token give it, times the size of its value. Not from a paper; measured in
// docs/retain.md.
//
//   queries   i < j + distance: local attention, says nothing about what is needed later
//             i ≥ j + distance: counted; squares weigh the few strong looks, the mean removes the advantage
//                               of old tokens, which more queries have seen
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"
#include "kvcache/retain/policy_keys.hpp"

namespace kvcache {

/// Keeps `capacity` tokens per kv head: the first `sinks`, the last `recent`, and those with the largest sum
/// over the group of sqrt(mean of squared weights of the queries at least `distance` behind) times the norm
/// of the value. Works while decoding: two numbers per token and query head, added to by each query.
struct far_rms {
  int32_t capacity = 256;  ///< tokens that stay, sinks and recent ones among them
  int32_t recent = 32;     ///< last tokens, kept in any case
  int32_t sinks = 4;       ///< first tokens, kept in any case
  int32_t distance = 32;   ///< a query counts for tokens that far before it
  int32_t every = 1;       ///< while decoding, drops so many at a time

  /// Squares of the weights of distant queries.
  static constexpr observe needs = observe::far_squares;
  /// As in text.
  static constexpr const char* name = "far_rms";
  /// Settings.
  static constexpr policy_key<far_rms> keys[] = {{"capacity", &far_rms::capacity, 1, true},
                                                 {"recent", &far_rms::recent},
                                                 {"sinks", &far_rms::sinks},
                                                 {"distance", &far_rms::distance, 1},
                                                 {"every", &far_rms::every, 1}};

  /// To `capacity` tokens.
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, capacity, sinks, recent, every);
  }
  /// All of the prompt: each of its queries counts.
  constexpr int32_t must_recompute() const noexcept { return std::numeric_limits<int32_t>::max(); }
  /// Queries from `distance` on.
  constexpr watch_options watch() const noexcept { return {.distance = distance}; }
  /// The sum over the group, times the value's norm. A token that no query counted for scores 0.
  void score(const observation& o, std::span<float> out) const noexcept {
    for (int32_t q = 0; q < o.queries; ++q) {
      const std::span<const float> squares = o.of(q);
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] += std::sqrt(squares[i] / static_cast<float>(std::max(o.seen[i], 1)));
      }
    }
    for (size_t i = 0; i < out.size(); ++i) out[i] *= o.value_norms[i];
  }
};
static_assert(token_scorer<far_rms>);

}  // namespace kvcache
