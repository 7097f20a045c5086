// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a retention policy is shown when it scores the tokens of one kv head, and what it must say to be shown
// it. A policy that scores is a retention policy with two more members: `watch()` says which attention it
// wants to see, `score()` turns that into one number per token. Which tokens then stay is decided for all
// policies alike by select.hpp.
//
//   queries of the kv head's group      0   1   2 ... held − 1        slots of the head
//                          head 0   [  w   w   w  ...   w   ]
//                          head 1   [  w   w   w  ...   w   ]   weights, see `observe`
#include <concepts>
#include <cstdint>
#include <span>

#include "kvcache/retain/concept.hpp"

namespace kvcache {

/// Which queries an observation is made of, beyond its kind (`retention_policy::needs`).
struct watch_options {
  int32_t queries = 0;   ///< votes, hits: the last so many; moved: of all, 0 = all
  int32_t distance = 0;  ///< far_squares: queries at least so many positions behind the key count
  int32_t ahead = 0;     ///< moved: the queries are spread over so many positions behind the text
  int32_t skip = 0;      ///< moved: queries of the first positions of the text are left out
};

/// One kv head of one layer, as far as its policy asked to see it. All spans are of the slots in order.
struct observation {
  int32_t held = 0;     ///< slots of the head
  int32_t queries = 0;  ///< query heads of the group
  /// [queries][held] sums of weights (column_sums, votes, last_row), of hits, or of squares of weights
  /// (far_squares, moved).
  std::span<const float> weights;
  std::span<const int32_t> seen;       ///< [held] queries that a slot's sum was made from
  std::span<const float> value_norms;  ///< [held] Euclidean norm of the slot's value
  std::span<const int32_t> positions;  ///< [held] text position of the slot's token, ascending

  /// Sums of query head `q` of the group: [held].
  constexpr std::span<const float> of(int32_t q) const noexcept {
    return weights.subspan(static_cast<size_t>(q) * static_cast<size_t>(held), static_cast<size_t>(held));
  }
};

/// A retention policy that scores: the highest scores stay. Scores must not be NaN.
// clang-format off
template <class R>
concept token_scorer = retention_policy<R> && requires(const R& r, const observation& o, std::span<float> s) {
  { r.watch() } noexcept -> std::same_as<watch_options>;
  { r.score(o, s) } noexcept;  // s: [o.held], zero on entry
};
// clang-format on

/// Whether the heads of a layer keep the same tokens: a policy says so with `whole_layer = true`; its scores
/// are then summed over the kv heads.
template <class R>
constexpr bool keeps_whole_layer() noexcept {
  if constexpr (requires { R::whole_layer; }) {
    return R::whole_layer;
  } else {
    return false;
  }
}

/// Adds the rows of all query heads to `out` [held]: the sum over a group, which orders as its mean does.
constexpr void add_group(const observation& o, std::span<float> out) noexcept {
  for (int32_t q = 0; q < o.queries; ++q) {
    const std::span<const float> row = o.of(q);
    for (size_t i = 0; i < out.size(); ++i) out[i] += row[i];
  }
}

/// The plan of a policy with a capacity: down to `keep` tokens as soon as `every` more are held, or at the
/// end of the prompt, with the first `sinks` and the last `recent` among them as far as they fit. `one` = how
/// a single token leaves while decoding: drop_form::overwrite for a policy that allows it.
constexpr keep_plan keep_at_most(const retain_lengths& n, int32_t keep, int32_t sinks, int32_t recent,
                                 int32_t every, drop_form one = drop_form::gather) noexcept {
  if (keep < 1 || n.held <= keep) return {};
  if (!n.prefill_end && n.held - keep < every) return {};
  keep_plan p;
  p.form = !n.prefill_end && n.held - keep == 1 ? one : drop_form::gather;
  p.keep = keep;
  p.sinks = sinks < keep ? sinks : keep;
  p.recent = recent < keep - p.sinks ? recent : keep - p.sinks;
  return p;
}

}  // namespace kvcache
