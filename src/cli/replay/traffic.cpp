// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <new>

#include "replay/path.hpp"
#include "replay/replay.hpp"

namespace kvcache::cli {

traffic::traffic(const trace& of, const replay_progress& tell) : source_(&of) {
  if (of.block_tokens <= 0) {
    throw error(failure::bad_input, "lengths_only", "block_tokens", std::to_string(of.block_tokens));
  }
  if (of.requests.size() >= std::size_t{std::numeric_limits<std::int32_t>::max()}) {
    throw error(failure::cannot_run, "too_large", "requests", std::to_string(of.requests.size()));
  }
  for (const request& r : of.requests) {
    longest_ = std::max(longest_, r.count);
    tokens_ += r.input_tokens;
  }
  // Ids that are chained in the file are nodes already; others may be several nodes each.
  std::int64_t most = std::min<std::int64_t>(of.distinct, blocks());
  while (!count(most, tell)) most = std::min(2 * most + 1, blocks());
}

// One cache without bound, which counts nodes and hits. False when there are more than `most` nodes.
bool traffic::count(std::int64_t most, const replay_progress& tell) {
  radix_tree tree = tree_of(most);
  std::vector<node_id> path(static_cast<std::size_t>(longest_));
  ceiling_ = {};
  teller told(tell, blocks());
  for (const request& r : source_->requests) {
    told.at(r.first);
    const std::span<const std::int32_t> units = source_->units_of(r);
    const std::int32_t hit = tree.match(0, no_node, units, path);
    if (extend_path(tree, units, path, hit, r.count) != r.count) return false;
    ceiling_.blocks += hit;
    ceiling_.tokens += tokens_of(r, hit);
    ceiling_.requests += hit > 0;
  }
  nodes_ = tree.size();
  told.end();
  return true;
}

std::span<const next_use> traffic::next_uses(std::size_t r) const {
  if (future_ == nullptr) look_ahead();
  // The runs were written from the last request to the first.
  const auto from = static_cast<std::size_t>(future_->first[r]);
  const auto to = r == 0 ? future_->runs.size() : static_cast<std::size_t>(future_->first[r - 1]);
  return std::span(future_->runs).subspan(from, to - from);
}

void traffic::look_ahead() const {
  constexpr std::int32_t never = std::numeric_limits<std::int32_t>::max();
  radix_tree tree = tree_of(nodes_);
  std::vector<node_id> path(static_cast<std::size_t>(longest_));
  for (const request& r : source_->requests) {
    const std::span<const std::int32_t> units = source_->units_of(r);
    extend_path(tree, units, path, tree.match(0, no_node, units, path), r.count);
  }
  std::vector<std::int32_t> next(static_cast<std::size_t>(nodes_), never);
  auto found = std::make_unique<future>();
  found->first.resize(source_->requests.size());
  for (std::size_t r = source_->requests.size(); r-- > 0;) {
    const request& now = source_->requests[r];
    found->first[r] = static_cast<std::int64_t>(found->runs.size());
    tree.match(0, no_node, source_->units_of(now), path);
    next_use run;
    for (std::int32_t i = 0; i < now.count; ++i) {
      std::int32_t& of_node = next[index(path[static_cast<std::size_t>(i)])];
      if (run.length > 0 && run.request != of_node) {
        found->runs.push_back(run);
        run.length = 0;
      }
      run.request = of_node;
      ++run.length;
      of_node = static_cast<std::int32_t>(r);
    }
    if (run.length > 0) found->runs.push_back(run);
  }
  future_ = std::move(found);
}

}  // namespace kvcache::cli
