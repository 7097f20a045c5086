// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prompt's own queries, turned to the positions of the text to come, say what that text will look at. Not
// from a paper; measured in docs/retain.md.
//
//   query of position   skip ............... n − 1
//                          \ spread evenly      \.
//   as if at                n ............... n + ahead − 1        over all keys, a softmax of its own
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
/// over the group of the root mean square of the moved queries' weights, times the norm of the value. For the
/// end of a prompt: needs every query again, so `every` should be large while decoding.
/// Cost: keeps all queries of the prompt; one more pass of them over all keys.
struct moved_queries {
  int32_t capacity = 256;  ///< tokens that stay, sinks and recent ones among them
  int32_t recent = 32;     ///< last tokens, kept in any case
  int32_t sinks = 4;       ///< first tokens, kept in any case
  int32_t ahead = 256;     ///< positions over which the queries are spread
  int32_t skip = 32;       ///< queries of the first positions do not count: they have seen too little
  int32_t every = 64;      ///< while decoding, drops so many at a time

  /// Squares of the weights of moved queries.
  static constexpr observe needs = observe::moved;
  /// As in text.
  static constexpr const char* name = "moved_queries";
  /// Settings.
  static constexpr policy_key<moved_queries> keys[] = {{"capacity", &moved_queries::capacity, 1, true},
                                                       {"recent", &moved_queries::recent},
                                                       {"sinks", &moved_queries::sinks},
                                                       {"ahead", &moved_queries::ahead, 1},
                                                       {"skip", &moved_queries::skip},
                                                       {"every", &moved_queries::every, 1}};

  /// To `capacity` tokens.
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, capacity, sinks, recent, every);
  }
  /// All of the prompt: each of its queries counts.
  constexpr int32_t must_recompute() const noexcept { return std::numeric_limits<int32_t>::max(); }
  /// All but the first queries, moved.
  constexpr watch_options watch() const noexcept { return {.ahead = ahead, .skip = skip}; }
  /// The sum over the group, times the value's norm.
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
static_assert(token_scorer<moved_queries>);

}  // namespace kvcache
