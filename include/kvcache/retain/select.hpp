// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which slots stay, given scores: the same for every policy, so that protection, ties and budgets are
// decided in one place.
//
//   slots      0 1 2 3 4 5 6 7 8 9          budget 6
//   protected  s         p       r r        sinks, pinned, recent
//   scores       4 9 4     1 4              the best of the others fill up; ties to the lower slot
//   kept       0 1 2     5       8 9
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "kvcache/core/status.hpp"
#include "kvcache/retain/any_retention.hpp"

namespace kvcache {

/// Slots that stay in any case.
struct protection {
  int32_t sinks = 0;                ///< the first so many
  int32_t recent = 0;               ///< the last so many
  std::span<const int32_t> pinned;  ///< these, ascending and distinct
};

namespace detail {

/// Order of a slot: what is protected comes first, then the score; never NaN.
inline float rank_of(float score) noexcept {
  return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
}

/// Marks what is protected in `out` (ascending slots), at most `budget` of it: the pinned first, then the
/// sinks from the first on, then the recent ones from the last on. Returns how many.
inline int32_t protect(int32_t held, const protection& p, int32_t budget, std::span<int32_t> out) noexcept {
  const auto is_pinned = [&](int32_t i) { return std::binary_search(p.pinned.begin(), p.pinned.end(), i); };
  int32_t n = 0;
  for (const int32_t i : p.pinned) {
    if (i < held) out[static_cast<size_t>(n++)] = i;
  }
  const int32_t sinks = std::min(p.sinks, held);
  int32_t first = 0;
  for (; first < sinks && n < budget; ++first) {
    if (!is_pinned(first)) out[static_cast<size_t>(n++)] = first;
  }
  for (int32_t i = held - 1; i >= std::max(held - p.recent, first) && n < budget; --i) {
    if (!is_pinned(i)) out[static_cast<size_t>(n++)] = i;
  }
  std::sort(out.begin(), out.begin() + n);
  return n;
}

}  // namespace detail

/// Writes the `budget` slots of [0, scores.size()) that stay to `kept`, ascending: all that is protected,
/// then the highest scores, ties to the lower slot. If the budget is smaller than what is protected, the
/// pinned slots stay first, then the sinks from the first on, then the recent ones from the last on. With a
/// budget of all slots or more, all of them, whatever the scores. `scratch`: as long as scores. Returns how
/// many. Fails: bad_argument when more slots are pinned than may stay. Cost: O(slots), and sorting what
/// stays.
inline result<int32_t> select_slots(std::span<const float> scores, const protection& p, int32_t budget,
                                    std::span<int32_t> scratch, std::span<int32_t> kept) noexcept {
  const auto held = static_cast<int32_t>(scores.size());
  if (budget >= held) {
    for (int32_t i = 0; i < held; ++i) kept[static_cast<size_t>(i)] = i;
    return held;
  }
  const auto pinned = static_cast<int32_t>(p.pinned.size());
  if (budget < 0 || pinned > budget) return {errc::bad_argument, "pinned", pinned};
  const int32_t sure = detail::protect(held, p, budget, kept);
  size_t others = 0;
  for (int32_t i = 0, k = 0; i < held; ++i) {
    if (k < sure && kept[static_cast<size_t>(k)] == i) {
      ++k;
    } else {
      scratch[others++] = i;
    }
  }
  const auto wanted = static_cast<std::ptrdiff_t>(budget - sure);
  const auto better = [&](int32_t a, int32_t b) {
    const float x = detail::rank_of(scores[static_cast<size_t>(a)]);
    const float y = detail::rank_of(scores[static_cast<size_t>(b)]);
    return x != y ? x > y : a < b;
  };
  const auto begin = scratch.begin();
  const auto end = begin + static_cast<std::ptrdiff_t>(others);
  if (wanted < static_cast<std::ptrdiff_t>(others)) std::nth_element(begin, begin + wanted, end, better);
  std::copy_n(begin, wanted, kept.begin() + sure);
  std::sort(kept.begin(), kept.begin() + budget);
  return budget;
}

namespace detail {

/// The lowest of `count` scores, at most a run, of tokens before `before`; infinite if there is none.
inline float lowest_of(const float* scores, const int32_t* positions, size_t count, int32_t before) noexcept {
  constexpr size_t lanes = 16;
  constexpr float none = std::numeric_limits<float>::infinity();
  float least[lanes];
  std::fill(least, least + lanes, none);
  const auto lower = [&](size_t i, float& than) {
    const float score = positions[i] < before ? scores[i] : none;
    than = score < than ? score : than;
  };
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (size_t k = 0; k < lanes; ++k) lower(i + k, least[k]);
  }
  for (; i < count; ++i) lower(i, least[0]);
  return *std::min_element(least, least + lanes);
}

}  // namespace detail

/// The slot whose token goes where the next one takes its place (`drop_form::overwrite`): the lowest score
/// among the tokens at text positions below `before`, so that later ones are protected; of equals the highest
/// position. `positions`: as long as scores, in any order. Returns -1 if none may go. Requires: no score is
/// NaN. Cost: one pass over the slots, in vectors, and another over the few runs of them that may hold it.
inline int32_t victim_slot(std::span<const float> scores, std::span<const int32_t> positions,
                           int32_t before) noexcept {
  constexpr size_t run = 256;
  float lowest = std::numeric_limits<float>::infinity();
  int32_t victim = -1;
  for (size_t first = 0; first < scores.size(); first += run) {
    const size_t last = std::min(first + run, scores.size());
    const float here = detail::lowest_of(&scores[first], &positions[first], last - first, before);
    if (here > lowest) continue;
    if (here < lowest) victim = -1;
    lowest = here;
    for (size_t i = first; i < last; ++i) {
      if (scores[i] != lowest || positions[i] >= before) continue;
      if (victim >= 0 && positions[i] < positions[static_cast<size_t>(victim)]) continue;
      victim = static_cast<int32_t>(i);
    }
  }
  return victim;
}

/// One kv head as budgets see it.
struct head_scores {
  std::span<const float> scores;  ///< [slots]
  protection safe;                ///< what stays in any case
};

/// A slot of a head in a common ranking.
struct ranked_slot {
  float score;   ///< never NaN
  int32_t head;  ///< index among the heads ranked
  int32_t slot;  ///< of the head
};

namespace detail {

/// Divides `total` slots among `heads`: each is sure of its `least` best, the rest goes to the best slots of
/// all. Requires: counts and heads of one length; ranking has room for all slots, taken for one head's lists
/// before. Fails: as select_slots.
inline status share(std::span<const head_scores> heads, int64_t total, int32_t least,
                    std::span<ranked_slot> ranking, std::span<int32_t> scratch, std::span<int32_t> kept,
                    std::span<int32_t> counts) noexcept {
  size_t others = 0;
  int64_t given = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    const std::span<const float> scores = heads[h].scores;
    const auto sure = select_slots(scores, heads[h].safe, least, scratch, kept);
    if (!sure) return sure.error();
    counts[h] = *sure;
    given += *sure;
    const auto held = static_cast<int32_t>(scores.size());
    for (int32_t i = 0, k = 0; i < held; ++i) {
      if (k < *sure && kept[static_cast<size_t>(k)] == i) {
        ++k;
      } else {
        ranking[others++] = {rank_of(scores[static_cast<size_t>(i)]), static_cast<int32_t>(h), i};
      }
    }
  }
  const auto better = [](const ranked_slot& a, const ranked_slot& b) {
    if (a.score != b.score) return a.score > b.score;
    return a.head != b.head ? a.head < b.head : a.slot < b.slot;
  };
  const auto wanted =
      static_cast<size_t>(std::clamp<int64_t>(total - given, 0, static_cast<int64_t>(others)));
  const auto begin = ranking.begin();
  if (wanted < others) {
    std::nth_element(begin, begin + static_cast<std::ptrdiff_t>(wanted),
                     begin + static_cast<std::ptrdiff_t>(others), better);
  }
  for (size_t i = 0; i < wanted; ++i) ++counts[static_cast<size_t>(ranking[i].head)];
  return {};
}

/// The sure share of `keep`, not less than what is protected.
constexpr int32_t least_of(const budget_rule& rule, int32_t keep, const protection& p) noexcept {
  const auto part = static_cast<int32_t>(int64_t{keep} * rule.floor_above / rule.floor_below);
  const int32_t safe = p.sinks + p.recent + static_cast<int32_t>(p.pinned.size());
  return std::min(std::max(part, safe), keep);
}

}  // namespace detail

/// Memory lent to divide_budget, each at least as long as said there.
struct budget_scratch {
  std::span<ranked_slot> ranking;  ///< all slots of all heads
  std::span<int32_t> slots;        ///< slots of the longest head
  std::span<int32_t> kept;         ///< the same
};

/// How many slots each kv head keeps, so that all together keep `keep` each on average: `counts[h]`, heads in
/// the order [layer][kv head], `heads_per_layer` of them to a layer. Whatever is divided, every head keeps
/// what is protected and the sure share of the rule. The sum is exact, unless heads are too short for it.
/// Fails: as select_slots. Cost: O(slots of all heads).
inline status divide_budget(const budget_rule& rule, std::span<const head_scores> heads,
                            int32_t heads_per_layer, int32_t keep, const budget_scratch& with,
                            std::span<int32_t> counts) noexcept {
  const auto per_layer = static_cast<size_t>(heads_per_layer);
  const auto run = [&](size_t first, size_t n) {
    const int32_t least = detail::least_of(rule, keep, heads[first].safe);
    return detail::share(heads.subspan(first, n), int64_t{keep} * static_cast<int64_t>(n), least,
                         with.ranking, with.slots, with.kept, counts.subspan(first, n));
  };
  if (rule.scope == budget_scope::uniform) {
    for (size_t h = 0; h < heads.size(); ++h) {
      counts[h] = std::min(keep, static_cast<int32_t>(heads[h].scores.size()));
    }
    return {};
  }
  if (rule.scope == budget_scope::head) {
    for (size_t first = 0; first < heads.size(); first += per_layer) {
      if (status s = run(first, per_layer); !s) return s;
    }
    return {};
  }
  if (status s = run(0, heads.size()); !s) return s;
  if (rule.scope == budget_scope::global) return {};
  // What a layer won is split evenly; what does not divide goes to the lower heads.
  for (size_t first = 0; first < heads.size(); first += per_layer) {
    int32_t won = 0;
    for (size_t h = 0; h < per_layer; ++h) won += counts[first + h];
    for (size_t h = 0; h < per_layer; ++h) {
      counts[first + h] = won / heads_per_layer + (static_cast<int32_t>(h) < won % heads_per_layer ? 1 : 0);
    }
  }
  return {};
}

}  // namespace kvcache
