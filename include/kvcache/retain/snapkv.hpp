// SPDX-License-Identifier: Apache-2.0
#pragma once
// The last queries of the prompt vote on what stays. Paper: Li et al., "SnapKV: LLM Knows What You are
// Looking for Before Generation", section 4.
//
//   votes    . . 9 . . . 2 . . .     sums over the window's queries, then over the group
//   pooled   . 9 9 9 . 2 2 2 . .     kernel 3, max: neighbours of a hit come with it
//   kept       ^ ^ ^                 ties to the lower position
#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"
#include "kvcache/retain/policy_keys.hpp"

namespace kvcache {

/// Keeps `capacity` tokens per kv head: the last `window` and those before it that the window's queries gave
/// most attention, pooled over `kernel` neighbours. The group's votes are summed before pooling (one of the
/// published variants; it matters for max pooling only). Meant for the end of a prompt; while decoding the
/// vote is taken again whenever `every` tokens have come.
/// Cost: keeps the last `window` queries; one pass of them over all keys when it decides.
struct snapkv {
  /// Values of `pool`.
  enum : int32_t { max_pool, avg_pool };
  int32_t capacity = 256;   ///< tokens that stay, the window among them
  int32_t window = 32;      ///< last queries, which vote, and whose tokens stay
  int32_t kernel = 7;       ///< width of the pooling, odd; 1 = none
  int32_t pool = max_pool;  ///< largest or mean of the neighbours
  int32_t every = 1;        ///< while decoding, drops so many at a time

  /// Votes of the last queries.
  static constexpr observe needs = observe::votes;
  /// As in text.
  static constexpr const char* name = "snapkv";
  /// Settings.
  static constexpr policy_key<snapkv> keys[] = {{"capacity", &snapkv::capacity, 1, true},
                                                {"window", &snapkv::window, 1},
                                                {"kernel", &snapkv::kernel, 1},
                                                {"pool", &snapkv::pool, 0, false, "max|avg"},
                                                {"every", &snapkv::every, 1}};

  /// To `capacity` tokens.
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, capacity, 0, window, every);
  }
  /// The window: its queries vote.
  constexpr int32_t must_recompute() const noexcept { return window; }
  /// The window.
  constexpr watch_options watch() const noexcept { return {.queries = window}; }
  /// Pooled votes of the slots before the window. The zeros beyond the ends count in a mean, as in the
  /// authors' code.
  void score(const observation& o, std::span<float> out) const noexcept {
    const int32_t candidates = std::max(o.held - window, 0);
    const int32_t before = kernel / 2;
    for (int32_t i = 0; i < candidates; ++i) {
      const int32_t first = std::max(i - before, 0);
      const int32_t last = std::min(i - before + kernel, candidates);
      float sum = 0;
      float most = -std::numeric_limits<float>::infinity();
      for (int32_t j = first; j < last; ++j) {
        float vote = 0;
        for (int32_t q = 0; q < o.queries; ++q) vote += o.of(q)[static_cast<size_t>(j)];
        sum += vote;
        most = std::max(most, vote);
      }
      out[static_cast<size_t>(i)] = pool == avg_pool ? sum / static_cast<float>(kernel) : most;
    }
  }
};
static_assert(token_scorer<snapkv>);

}  // namespace kvcache
