// SPDX-License-Identifier: Apache-2.0
// A drop: who stays, and the table that all heads share.
#include <algorithm>

#include "kvcache/retain/select.hpp"
#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {

// What the last step made due. If that fails it stays due.
status session_cache::parts::settle(state& s) {
  if (!s.due) return {};
  if (status done = drop(s, drop_reason::token); !done) return done;
  s.due = false;
  return {};
}

status session_cache::parts::drop(state& s, drop_reason why) {
  // For want of blocks all goes that the policy can spare, however many it would otherwise let gather.
  const keep_plan plan = s.what.policy.plan({.held = s.mean_held(),
                                             .incoming = 0,
                                             .unit = config.block_size,
                                             .prefill_end = why != drop_reason::token});
  const bool at_a_loss = s.options.at_a_loss && why != drop_reason::no_block;
  if (plan.form == drop_form::nothing) return {};
  const bool copied = packed() && config.deferred;
  if (plan.form == drop_form::whole_blocks && !copied) return cut(s, plan, at_a_loss);
  auto kept = choose(s, plan);
  if (!kept) return kept.error();
  if (takes_over(s, plan)) {
    vacate(s, *kept);
    return {};
  }
  for (std::size_t h = 0; h < kept->size(); ++h) (*kept)[h] = s.tokens[h].slots_of((*kept)[h]);
  const auto as_many = [&](const auto& list) { return list.size() == kept->front().size(); };
  status done;
  if (copied) {
    done = gather_packed(s, *kept);
  } else if (s.split()) {
    done = gather_heads(s, *kept);
  } else if (std::all_of(kept->begin(), kept->end(), as_many)) {
    done = gather_whole(s, plan, *kept, at_a_loss);
  } else {
    done = split(s, *kept);
  }
  if (!done) return done;
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      const auto& list = (*kept)[s.index(layer, h)];
      s.tokens[s.index(layer, h)].gather(list);
      s.seen.gather(layer, h, list);
    }
  }
  return {};
}

// Whether the token that goes leaves its slot to the next one. Only where all heads lose one, and nothing
// that was seen depends on the order of slots.
bool session_cache::parts::takes_over(const state& s, const keep_plan& plan) const {
  using kvcache::observe;
  const observe needs = s.what.policy.needs();
  const bool any_order =
      needs == observe::nothing || needs == observe::column_sums || needs == observe::last_row;
  return plan.form == drop_form::overwrite && s.options.in_place && any_order && !packed() &&
         !s.options.remember && !s.split() && s.what.budget.scope == kvcache::budget_scope::uniform &&
         !s.tokens[0].vacant() && plan.keep == s.tokens[0].size() - 1;
}

// kept: ranks, all but one.
void session_cache::parts::vacate(state& s, const std::vector<std::vector<std::int32_t>>& kept) {
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      const auto& list = kept[s.index(layer, h)];
      int rank = 0;
      while (rank < static_cast<int>(list.size()) && list[static_cast<std::size_t>(rank)] == rank) ++rank;
      s.seen.renew(layer, h, s.tokens[s.index(layer, h)].vacate(rank));
    }
  }
}

// Commands of other texts may have to run first.
status session_cache::parts::retain_whole(state& s, const keep_plan& plan, bool at_a_loss) {
  auto done = s.whole.retain(plan, 0, at_a_loss);
  if (!done && done.error().code == kvcache::errc::busy && whole.seals().empty()) {
    run_commands();
    done = s.whole.retain(plan, 0, at_a_loss);
  }
  return done ? status() : to_error(done.error());
}

status session_cache::parts::cut(state& s, const keep_plan& plan, bool at_a_loss) {
  if (s.split()) return cannot_run("unsupported", "policy", "whole blocks of heads of different lengths");
  if (!s.tokens[0].ordered()) return cannot_run("unsupported", "policy", "whole blocks of slots in no order");
  const int drop = s.slots() - plan.keep;
  // A step that was refused may have left room behind, which is no part of the plan.
  if (s.whole.held() > s.slots()) (void)s.whole.truncate(s.slots());
  if (status done = retain_whole(s, plan, at_a_loss); !done) return done;
  run_commands();
  for (head_slots& head : s.tokens) head.erase(plan.sinks, drop);
  return {};
}

// Ranks that stay, [layers * kv_heads]: protection and ties go by the order of the text, not of slots.
result<std::vector<std::vector<std::int32_t>>> session_cache::parts::choose(state& s, const keep_plan& plan) {
  auto score = scores(s);
  if (!score) return score.error();
  std::vector<std::vector<std::int32_t>> pinned(s.tokens.size());
  std::vector<kvcache::head_scores> all(s.tokens.size());
  std::size_t slots = 0;
  std::size_t longest = 0;
  for (std::size_t h = 0; h < all.size(); ++h) {
    const auto positions = s.tokens[h].positions();
    (*score)[h] = s.tokens[h].by_rank((*score)[h]);
    for (const int p : s.options.pinned) {
      const auto at = std::lower_bound(positions.begin(), positions.end(), p);
      if (at != positions.end() && *at == p)
        pinned[h].push_back(static_cast<std::int32_t>(at - positions.begin()));
    }
    all[h] = {(*score)[h], {plan.sinks, plan.recent, pinned[h]}};
    slots += positions.size();
    longest = std::max(longest, positions.size());
  }
  kvcache::budget_rule rule = s.what.budget;
  int heads_per_layer = config.shape.kv_heads;
  // Heads that keep the same tokens are one head of a layer.
  const std::size_t step = s.what.policy.whole_layer() ? static_cast<std::size_t>(heads_per_layer) : 1;
  if (step > 1) {
    heads_per_layer = 1;
    for (std::size_t i = 0; i * step < all.size(); ++i) all[i] = all[i * step];
    all.resize(all.size() / step);
  }
  std::vector<kvcache::ranked_slot> ranking(slots);
  std::vector<std::int32_t> scratch(longest), list(longest), counts(all.size());
  const auto divided =
      kvcache::divide_budget(rule, all, heads_per_layer, plan.keep, {ranking, scratch, list}, counts);
  if (!divided) return to_error(divided);
  std::vector<std::vector<std::int32_t>> kept(s.tokens.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto n = kvcache::select_slots(all[i].scores, all[i].safe, counts[i], scratch, list);
    if (!n) return to_error(n.error());
    for (std::size_t h = i * step; h < (i + 1) * step; ++h) kept[h].assign(list.begin(), list.begin() + *n);
  }
  return kept;
}

status session_cache::parts::gather_whole(state& s, const keep_plan& plan,
                                          const std::vector<std::vector<std::int32_t>>& kept,
                                          bool at_a_loss) {
  keep_plan exact = plan;
  exact.form = drop_form::gather;
  exact.keep = static_cast<std::int32_t>(kept.front().size());
  exact.sinks = exact.recent = 0;  // said by the lists
  if (status done = retain_whole(s, exact, at_a_loss); !done) return done;
  std::vector<std::int32_t> lists;
  for (const auto& list : kept) lists.insert(lists.end(), list.begin(), list.end());
  std::vector<kvc_keep> keeps(static_cast<std::size_t>(config.max_sequences));
  keeps[static_cast<std::size_t>(s.whole.place())] = {lists.data(), exact.keep,
                                                      std::int64_t{exact.keep} * config.shape.kv_heads};
  run_commands(keeps);
  return {};
}

}  // namespace engine
