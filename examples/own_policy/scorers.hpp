// SPDX-License-Identifier: Apache-2.0
#pragma once

// Two policies of a user's own. All there is to write is a plan (how many stay) and a score (which).

#include <cmath>
#include <cstdint>
#include <span>

#include "kvcache/retain/any_retention.hpp"

namespace own {

using namespace kvcache;

// [last_look]
/// Keeps what the last query looks at, the same tokens for all heads of a layer: the rule of TOVA (Oren et
/// al.: Transformers are Multi-State RNNs, 2024, section 3.2), written anew.
struct last_look {
  int32_t capacity = 64;
  static constexpr observe needs = observe::last_row;
  static constexpr bool whole_layer = true;
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, capacity, 0, 0, 1);
  }
  constexpr int32_t must_recompute() const noexcept { return 1; }
  constexpr watch_options watch() const noexcept { return {.queries = 1}; }
  constexpr void score(const observation& o, std::span<float> out) const noexcept { add_group(o, out); }
};
static_assert(token_scorer<last_look>);
// [last_look]

// [trained]
/// Scissorhands (Liu et al., 2023, section 4) with a predictor in the place of its count of hits. The
/// published method trains none: importance persists, so the hits of the past are the prediction. Whoever has
/// trained one hands in its weights; they must outlive the policy.
struct trained {
  const float* weights = nullptr;  ///< [3] of: share of queries that hit, log of the token's age, |value|
  int32_t capacity = 64;
  static constexpr observe needs = observe::hits;
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, capacity, 0, 10, 1);
  }
  constexpr int32_t must_recompute() const noexcept { return 400; }
  constexpr watch_options watch() const noexcept { return {.queries = 400}; }
  void score(const observation& o, std::span<float> out) const noexcept {
    add_group(o, out);
    for (size_t i = 0; i < out.size(); ++i) {
      const float age = static_cast<float>(o.positions.back() - o.positions[i] + 1);
      out[i] = weights[0] * (out[i] / static_cast<float>(o.seen[i] > 0 ? o.seen[i] : 1)) +
               weights[1] * std::log(age) + weights[2] * o.value_norms[i];
    }
  }
};
static_assert(token_scorer<trained>);
// [trained]

}  // namespace own
