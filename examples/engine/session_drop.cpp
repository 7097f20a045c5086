// SPDX-License-Identifier: Apache-2.0
// A drop: who stays, and the table that all heads share.
#include <algorithm>

#include "kvcache/retain/select.hpp"
#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {

status session_cache::parts::drop(state& s, bool prefill_end) {
  const keep_plan plan = s.what.policy.plan(
      {.held = s.mean_held(), .incoming = 0, .unit = config.block_size, .prefill_end = prefill_end});
  if (plan.form == drop_form::nothing) return {};
  if (plan.form == drop_form::whole_blocks) return cut(s, plan);
  auto kept = choose(s, plan);
  if (!kept) return kept.error();
  const auto as_many = [&](const auto& list) { return list.size() == kept->front().size(); };
  status done;
  if (s.split()) {
    done = gather_heads(s, *kept);
  } else if (std::all_of(kept->begin(), kept->end(), as_many)) {
    done = gather_whole(s, plan, *kept);
  } else {
    done = split(s, *kept);
  }
  if (!done) return done;
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      const auto& list = (*kept)[s.index(layer, h)];
      auto& positions = s.positions[s.index(layer, h)];
      for (std::size_t t = 0; t < list.size(); ++t)
        positions[t] = positions[static_cast<std::size_t>(list[t])];
      positions.resize(list.size());
      s.seen.gather(layer, h, list);
    }
  }
  return {};
}

status session_cache::parts::cut(state& s, const keep_plan& plan) {
  if (s.split()) return cannot_run("unsupported", "policy", "whole blocks of heads of different lengths");
  const int drop = static_cast<int>(s.positions[0].size()) - plan.keep;
  if (auto done = s.whole.retain(plan, 0, s.options.at_a_loss); !done) return to_error(done.error());
  run_commands();
  for (auto& p : s.positions) p.erase(p.begin() + plan.sinks, p.begin() + plan.sinks + drop);
  return {};
}

// Keep-lists [layers * kv_heads].
result<std::vector<std::vector<std::int32_t>>> session_cache::parts::choose(state& s, const keep_plan& plan) {
  const auto score = scores(s);
  if (!score) return score.error();
  std::vector<std::vector<std::int32_t>> pinned(s.positions.size());
  std::vector<kvcache::head_scores> all(s.positions.size());
  std::size_t slots = 0;
  std::size_t longest = 0;
  for (std::size_t h = 0; h < all.size(); ++h) {
    const auto& positions = s.positions[h];
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
  std::vector<std::vector<std::int32_t>> kept(s.positions.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto n = kvcache::select_slots(all[i].scores, all[i].safe, counts[i], scratch, list);
    if (!n) return to_error(n.error());
    for (std::size_t h = i * step; h < (i + 1) * step; ++h) kept[h].assign(list.begin(), list.begin() + *n);
  }
  return kept;
}

status session_cache::parts::gather_whole(state& s, const keep_plan& plan,
                                          const std::vector<std::vector<std::int32_t>>& kept) {
  keep_plan exact = plan;
  exact.keep = static_cast<std::int32_t>(kept.front().size());
  exact.sinks = exact.recent = 0;  // said by the lists
  if (auto done = s.whole.retain(exact, 0, s.options.at_a_loss); !done) return to_error(done.error());
  std::vector<std::int32_t> lists;
  for (const auto& list : kept) lists.insert(lists.end(), list.begin(), list.end());
  std::vector<kvc_keep> keeps(static_cast<std::size_t>(config.max_sequences));
  keeps[static_cast<std::size_t>(s.whole.place())] = {lists.data(), exact.keep,
                                                      std::int64_t{exact.keep} * config.shape.kv_heads};
  run_commands(keeps);
  return {};
}

}  // namespace engine
