// SPDX-License-Identifier: Apache-2.0
#pragma once
// The cached prefixes: for every node of the index its blocks of all groups, who pins it, and its place in
// the eviction order. Everything above speaks nodes; only here do nodes become blocks.
//
//   node n ── blocks_[n * blocks_per_unit + ...]   group 0: b b | group 1: b | ...
//          ── state_[n]: pins, lane, meta          pins == 0 ⇔ a candidate, or an inner node waiting to
//          become a leaf
#include <cstdint>
#include <span>

#include "kvcache/cache/config.hpp"
#include "kvcache/cache/events.hpp"
#include "kvcache/cache/pools.hpp"
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/evict/concept.hpp"
#include "kvcache/prefix/concept.hpp"
#include "kvcache/prefix/scope.hpp"

namespace kvcache::detail {

/// Invariant: a pinned node's ancestors are pinned; every cached block lies only in unpinned nodes, so
/// evicting all of these frees all cached blocks.
template <block_allocator A, eviction_policy E, prefix_index X>
class nodes {
 public:
  status create(const geometry& geo, int32_t lanes, E evict) noexcept;

  const X& tree() const noexcept { return tree_; }
  int32_t unit() const noexcept { return tree_.unit(); }
  int32_t pins(node_id r) const noexcept { return state_[index(r)].pins; }
  int32_t lane(node_id r) const noexcept { return state_[index(r)].lane; }
  bool monotone() const noexcept { return evict_.monotone(); }
  bool queued(node_id r) const noexcept { return state_[index(r)].queued != 0; }
  event_log& events() noexcept { return events_; }
  const event_log& events() const noexcept { return events_; }
  uint64_t stored() const noexcept { return stored_; }
  uint64_t evicted() const noexcept { return evicted_; }
  /// Blocks of group g in node r.
  std::span<const block_id> blocks_of(node_id r, int32_t g) const noexcept {
    const group_geometry& x = geo_.group[g];
    return {blocks_.data() + index(r) * per_node() + static_cast<size_t>(x.unit_offset),
            static_cast<size_t>(x.per_unit)};
  }

  /// Longest cached prefix of `tokens`, in nodes; changes nothing. Cost: O(tokens).
  int32_t match(const scope_ids& s, std::span<const token_id> tokens, std::span<node_id> out) const noexcept;

  void pin(node_id r, uint64_t now) noexcept {
    node_state& n = state_[index(r)];
    n.meta.last = now;
    ++n.meta.uses;
    if (n.pins++ == 0) leave(r, n);
  }
  void unpin(node_id r, uint64_t now) noexcept {
    node_state& n = state_[index(r)];
    if (!KVCACHE_CONTRACT(n.pins > 0)) return;
    if (--n.pins != 0) return;
    n.meta.last = now;
    if (evict_.monotone() || tree_.leaf(r)) enter(r, n);
  }

  /// Indexes one unit below `parent` and pins it; `mine` are the blocks that hold it, all groups behind each
  /// other. If the unit is there already, `fresh` is false and the caller should use the node's blocks.
  /// `no_node` if the index is full of pinned nodes.
  inserted store(pools<A>& pool, scope_table& scopes, int32_t scope, node_id parent,
                 std::span<const token_id> tokens, std::span<const block_id> mine, int32_t lane,
                 uint64_t now) noexcept;

  /// Evicts one node, of `lane` if it has one, else of the lane with most cached blocks.
  /// False when nothing is evictable. Cost: O(1) for a monotone policy with one lane.
  bool evict_one(pools<A>& pool, scope_table& scopes, int32_t lane, uint64_t now) noexcept;

 private:
  struct node_state {
    node_meta meta;
    int32_t pins;
    int32_t lane : 31;
    uint32_t queued : 1;
  };
  size_t per_node() const noexcept { return static_cast<size_t>(geo_.blocks_per_unit); }
  void enter(node_id r, node_state& n) noexcept {
    n.queued = 1;
    evict_.enter(r, n.lane, n.meta);
  }
  void leave(node_id r, node_state& n) noexcept {
    if (n.queued == 0) return;
    n.queued = 0;
    evict_.leave(r, n.lane);
  }
  node_id victim(const pools<A>& pool, int32_t lane) const noexcept;
  void evict(pools<A>& pool, scope_table& scopes, node_id r, uint64_t now) noexcept;

  geometry geo_{};
  X tree_;
  E evict_;
  fixed_array<node_state> state_;
  fixed_array<block_id> blocks_;
  event_log events_;
  uint64_t stored_ = 0;
  uint64_t evicted_ = 0;
};

template <block_allocator A, eviction_policy E, prefix_index X>
status nodes<A, E, X>::create(const geometry& geo, int32_t lanes, E evict) noexcept {
  geo_ = geo;
  evict_ = std::move(evict);
  if (status s = tree_.create(geo.nodes, geo.unit); !s) return s;
  if (status s = evict_.create(geo.nodes, lanes); !s) return s;
  if (!events_.create(geo.max_events)) return {errc::out_of_memory, "max_events", geo.max_events};
  const auto n = static_cast<size_t>(geo.nodes);
  if (!state_.create(n) || !blocks_.create(n * per_node())) {
    return {errc::out_of_memory, "max_nodes", geo.nodes};
  }
  return {};
}

template <block_allocator A, eviction_policy E, prefix_index X>
int32_t nodes<A, E, X>::match(const scope_ids& s, std::span<const token_id> tokens,
                              std::span<node_id> out) const noexcept {
  int32_t n = 0;
  node_id parent = no_node;
  for (int32_t i = 0; i < s.count; ++i) {
    const int64_t end = i + 1 < s.count ? s.first_unit[i + 1] : INT32_MAX;
    const size_t stop = std::min(tokens.size(), static_cast<size_t>(end * unit()));
    const auto from = static_cast<size_t>(int64_t{n} * unit());
    if (from >= stop) continue;
    const int32_t got =
        tree_.match(s.id[i], parent, tokens.subspan(from, stop - from), out.subspan(static_cast<size_t>(n)));
    n += got;
    if (got > 0) parent = out[static_cast<size_t>(n - 1)];
    if (static_cast<size_t>(int64_t{n} * unit()) < stop) break;
  }
  return n;
}

template <block_allocator A, eviction_policy E, prefix_index X>
inserted nodes<A, E, X>::store(pools<A>& pool, scope_table& scopes, int32_t scope, node_id parent,
                               std::span<const token_id> tokens, std::span<const block_id> mine, int32_t lane,
                               uint64_t now) noexcept {
  inserted in = tree_.insert(scope, parent, tokens);
  // The parent is pinned by the caller, so making room cannot take the path that is being extended.
  if (in.node == no_node && evict_one(pool, scopes, lane, now)) in = tree_.insert(scope, parent, tokens);
  if (in.node == no_node) return in;
  if (in.fresh) {
    node_state& n = state_[index(in.node)];
    n = {};
    n.lane = lane;
    n.meta.born = now;
    n.meta.depth = parent == no_node ? 0 : state_[index(parent)].meta.depth + 1;
    block_id* b = blocks_.data() + index(in.node) * per_node();
    std::copy(mine.begin(), mine.end(), b);
    for (int32_t g = 0; g < geo_.groups; ++g) {
      for (const block_id x : blocks_of(in.node, g)) pool.pool(g).index(x);
    }
    scopes.hold(scope);
    events_.add(KVC_EVENT_STORED, in.node, parent, n.meta.depth, scope, now);
    ++stored_;
  }
  pin(in.node, now);
  return in;
}

template <block_allocator A, eviction_policy E, prefix_index X>
node_id nodes<A, E, X>::victim(const pools<A>& pool, int32_t lane) const noexcept {
  node_id r = evict_.victim(lane);
  if (r == no_node && pool.accounts() > 1) {
    int32_t most = -1;
    for (int32_t a = 0; a < pool.accounts(); ++a) {
      if (const node_id v = evict_.victim(a); v != no_node && pool.cached(a) > most) {
        most = pool.cached(a);
        r = v;
      }
    }
  }
  // A lane's oldest node may carry another lane's nodes; those become unreachable with it, so they go first.
  if (r != no_node) {
    while (!tree_.leaf(r)) r = tree_.first_child(r);
  }
  return r;
}

template <block_allocator A, eviction_policy E, prefix_index X>
bool nodes<A, E, X>::evict_one(pools<A>& pool, scope_table& scopes, int32_t lane, uint64_t now) noexcept {
  const node_id r = victim(pool, lane);
  if (r == no_node) return false;
  evict(pool, scopes, r, now);
  return true;
}

template <block_allocator A, eviction_policy E, prefix_index X>
void nodes<A, E, X>::evict(pools<A>& pool, scope_table& scopes, node_id r, uint64_t now) noexcept {
  if (!KVCACHE_CONTRACT(state_[index(r)].pins == 0)) return;
  leave(r, state_[index(r)]);
  const node_id parent = tree_.parent(r);
  const int32_t scope = tree_.scope_of(r);
  events_.add(KVC_EVENT_REMOVED, r, parent, state_[index(r)].meta.depth, scope, now);
  scopes.drop(scope);
  tree_.erase(r);
  for (int32_t g = 0; g < geo_.groups; ++g) {
    const std::span<const block_id> b = blocks_of(r, g);
    for (size_t i = b.size(); i-- > 0;) pool.unindex(g, b[i]);
  }
  ++evicted_;
  if (parent != no_node && state_[index(parent)].pins == 0 && state_[index(parent)].queued == 0 &&
      tree_.leaf(parent)) {
    enter(parent, state_[index(parent)]);
  }
}

}  // namespace kvcache::detail
