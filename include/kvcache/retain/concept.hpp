// SPDX-License-Identifier: Apache-2.0
#pragma once
// Contract of a retention policy: which TOKENS of a live sequence stay. It has two halves that never meet on
// the hot path:
//
//   plan    HOW MANY stay and in which form: a function of lengths alone, so that the cache accounts for its
//           blocks without an answer from the device
//   score   WHICH stay: computed where keys and attention are, per layer and kv head; the highest scores stay
//
//   slots   0 ...... sinks ............................. held − recent ....... held
//           | protected |  candidates: the best by score  |  protected       |
#include <concepts>
#include <cstdint>
#include <span>

namespace kvcache {

/// How tokens leave.
enum class drop_form : uint8_t {
  nothing,       ///< all stay
  whole_blocks,  ///< the blocks behind the sinks are given back; nothing moves but the sinks' angles
  /// The next token takes the slot of one that goes, per kv head another: nothing moves and no block changes
  /// hands. Slots are then in no order of the text, so only for scores that judge each slot by itself, from
  /// weights of queries that saw all of them: column sums and the last row.
  overwrite,
  gather,  ///< those that stay are moved together, each kv head its own
};

/// What a plan is made from, in tokens.
struct retain_lengths {
  int32_t held = 0;          ///< slots in use
  int32_t incoming = 0;      ///< slots that the next step adds
  int32_t unit = 1;          ///< granularity of `drop_form::whole_blocks`: the largest block size
  bool prefill_end = false;  ///< the prompt has just been computed
};

/// How many slots stay: `keep` per kv head, among them the first `sinks` and the last `recent`.
struct keep_plan {
  drop_form form = drop_form::nothing;  ///< how the others leave
  int32_t keep = 0;                     ///< slots that stay
  int32_t sinks = 0;                    ///< leading slots that stay in any case
  int32_t recent = 0;                   ///< trailing slots that stay in any case
  /// Turn the keys of the sinks towards the window by as many positions as were dropped, so that distances in
  /// the cache are those of a text without the gap (`drop_form::whole_blocks` only).
  bool move_sinks = false;

  /// Equal in every number.
  constexpr bool operator==(const keep_plan&) const noexcept = default;
};

/// What a policy needs to see of the attention, beyond lengths.
enum class observe : uint8_t {
  nothing,      ///< positions suffice
  column_sums,  ///< every query's weights, summed per key
  votes,        ///< the weights of the last queries of the prompt
  last_row,     ///< the weights of the last query
  hits,         ///< how often the last queries gave a key at least an equal part of their weight
  far_squares,  ///< squares of the weights of queries that are far behind the key
  moved,        ///< weights of the prompt's queries turned to the positions that follow it
};

/// What the cache and the data plane need of a retention policy. A policy is a small value.
// clang-format off
template <class R>
concept retention_policy = std::copyable<R> && requires(const R& r, const retain_lengths& n) {
  { R::needs } -> std::convertible_to<observe>;
  { r.plan(n) } noexcept -> std::same_as<keep_plan>;
  { r.must_recompute() } noexcept -> std::same_as<int32_t>;  // last tokens of a prompt that may not come from the cache
};
// clang-format on

/// Drops nothing.
struct keep_all {
  /// Lengths suffice.
  static constexpr observe needs = observe::nothing;
  /// Nothing goes.
  constexpr keep_plan plan(const retain_lengths&) const noexcept { return {}; }
  /// The last token: its logits are wanted.
  constexpr int32_t must_recompute() const noexcept { return 1; }
};
static_assert(retention_policy<keep_all>);

}  // namespace kvcache
