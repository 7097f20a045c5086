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
  event_log& events() noexcept { return events_; }
  const event_log& events() const noexcept { return events_; }
  uint64_t stored() const noexcept { return stored_; }
  uint64_t evicted() const noexcept { return evicted_; }
  /// Blocks of group g in node r; no_block where a group of first tokens has nothing.
  std::span<const block_id> blocks_of(node_id r, int32_t g) const noexcept {
    const group_geometry& x = geo_.group[g];
    return {blocks_.data() + index(r) * per_node() + static_cast<size_t>(x.unit_offset),
            static_cast<size_t>(x.per_unit)};
  }

  /// Writes the blocks of group g along `path` to `out`; returns how many. Requires: room for them.
  int32_t list_blocks(std::span<const node_id> path, int32_t g, std::span<block_id> out) const noexcept;

  /// Longest cached prefix of `tokens`, in nodes; changes nothing. Cost: O(tokens).
  int32_t match(const scope_ids& s, std::span<const token_id> tokens, std::span<node_id> out) const noexcept;

  /// One more sequence holds all nodes of `path`, which begins at a first unit or below a node that this
  /// sequence holds. Cost: O(path), a few instructions per node.
  void pin_path(std::span<const node_id> path, uint64_t now) noexcept;
  /// One sequence less holds them.
  void unpin_path(std::span<const node_id> path, uint64_t now) noexcept;

  /// Indexes one unit below `parent` and pins it; `mine` are the blocks that hold it, all groups behind each
  /// other. If the unit is there already, `fresh` is false and the caller should use the node's blocks.
  /// `no_node` if the index is full of pinned nodes.
  inserted store(pools<A>& pool, scope_table& scopes, int32_t scope, node_id parent,
                 std::span<const token_id> tokens, std::span<const block_id> mine, int32_t lane,
                 uint64_t now) noexcept;

  /// Evicts one node, of `lane` if that is not negative and has one, else of the lane with most cached
  /// blocks. False when nothing is evictable. Cost: O(1) for a monotone policy with one lane.
  bool evict_one(pools<A>& pool, scope_table& scopes, int32_t lane, uint64_t now) noexcept;

 private:
  struct node_state {
    node_meta meta;
    int32_t pins;
    int32_t lane;
  };
  size_t per_node() const noexcept { return static_cast<size_t>(geo_.blocks_per_unit); }
  // Calls act(nodes of one lane, lane) for each run of nodes, in order.
  template <class Act>
  void by_lane(std::span<const node_id> path, Act act) const noexcept;
  void enter_path(std::span<const node_id> path) noexcept;
  void leave_path(std::span<const node_id> path) noexcept;
  node_id victim(const pools<A>& pool, int32_t lane) const noexcept;
  void evict(pools<A>& pool, scope_table& scopes, node_id r, uint64_t now) noexcept;

  geometry geo_{};
  bool one_lane_ = true;
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
  one_lane_ = lanes == 1;
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
int32_t nodes<A, E, X>::list_blocks(std::span<const node_id> path, int32_t g,
                                    std::span<block_id> out) const noexcept {
  if (path.empty()) return 0;  // without an index there are no block lists to point into
  const auto step = per_node();
  const auto each = static_cast<size_t>(geo_.group[g].per_unit);
  const block_id* from = blocks_.data() + geo_.group[g].unit_offset;
  block_id* to = out.data();
  if (geo_.group[g].first_only) path = path.first(1);
  if (each == 1) {
    for (const node_id r : path) *to++ = from[index(r) * step];
  } else {
    for (const node_id r : path) to = std::copy_n(from + index(r) * step, each, to);
  }
  return static_cast<int32_t>(to - out.data());
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
    const int32_t depth = parent == no_node ? 0 : state_[index(parent)].meta.depth + 1;
    n = {{.last = now, .born = now, .uses = 1, .depth = depth}, 1, lane};
    block_id* b = blocks_.data() + index(in.node) * per_node();
    std::copy(mine.begin(), mine.end(), b);
    for (int32_t g = 0; g < geo_.groups; ++g) {
      for (const block_id x : blocks_of(in.node, g)) {
        if (x != no_block) pool.pool(g).index(x);
      }
    }
    scopes.hold(scope);
    events_.add(KVC_EVENT_STORED, in.node, parent, depth, scope, now);
    ++stored_;
  }
  if (!in.fresh) pin_path({&in.node, 1}, now);
  return in;
}

// A pinned node's ancestors are pinned, so the nodes that nobody held are the end of the path.
template <block_allocator A, eviction_policy E, prefix_index X>
void nodes<A, E, X>::pin_path(std::span<const node_id> path, uint64_t now) noexcept {
  size_t held = 0;
  for (const node_id r : path) {
    node_state& n = state_[index(r)];
    n.meta.last = now;
    ++n.meta.uses;
    held += n.pins++ != 0;
  }
  leave_path(path.subspan(held));
}

template <block_allocator A, eviction_policy E, prefix_index X>
void nodes<A, E, X>::unpin_path(std::span<const node_id> path, uint64_t now) noexcept {
  size_t held = 0;
  for (const node_id r : path) {
    node_state& n = state_[index(r)];
    if (!KVCACHE_CONTRACT(n.pins > 0)) return;
    if (--n.pins != 0) {
      ++held;
    } else {
      n.meta.last = now;
    }
  }
  enter_path(path.subspan(held));
}

template <block_allocator A, eviction_policy E, prefix_index X>
template <class Act>
void nodes<A, E, X>::by_lane(std::span<const node_id> path, Act act) const noexcept {
  for (size_t end = path.size(); end > 0;) {
    const int32_t lane = one_lane_ ? 0 : state_[index(path[end - 1])].lane;
    size_t from = one_lane_ ? 0 : end - 1;
    while (from > 0 && state_[index(path[from - 1])].lane == lane) --from;
    act(path.subspan(from, end - from), lane);
    end = from;
  }
}

// Candidates of a monotone policy are all of them, of another one the last if it is a leaf.
template <block_allocator A, eviction_policy E, prefix_index X>
void nodes<A, E, X>::enter_path(std::span<const node_id> path) noexcept {
  if (!evict_.monotone()) {
    if (path.empty() || !tree_.leaf(path.back())) return;
    const node_state& n = state_[index(path.back())];
    evict_.enter(path.back(), n.lane, n.meta);
  } else if (takes_paths(evict_)) {
    if constexpr (path_eviction_policy<E>) {
      by_lane(path, [&](std::span<const node_id> run, int32_t lane) { evict_.enter_path(run, lane); });
    }
  } else {
    for (size_t i = path.size(); i-- > 0;) {
      const node_state& n = state_[index(path[i])];
      evict_.enter(path[i], n.lane, n.meta);
    }
  }
}

template <block_allocator A, eviction_policy E, prefix_index X>
void nodes<A, E, X>::leave_path(std::span<const node_id> path) noexcept {
  if (!evict_.monotone()) {
    if (!path.empty() && tree_.leaf(path.back())) evict_.leave(path.back(), lane(path.back()));
  } else if (takes_paths(evict_)) {
    if constexpr (path_eviction_policy<E>) {
      by_lane(path, [&](std::span<const node_id> run, int32_t lane) { evict_.leave_path(run, lane); });
    }
  } else {
    for (const node_id r : path) evict_.leave(r, lane(r));
  }
}

template <block_allocator A, eviction_policy E, prefix_index X>
node_id nodes<A, E, X>::victim(const pools<A>& pool, int32_t lane) const noexcept {
  node_id r = lane >= 0 || one_lane_ ? evict_.victim(one_lane_ ? 0 : lane) : no_node;
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
  evict_.leave(r, state_[index(r)].lane);
  const node_id parent = tree_.parent(r);
  const int32_t scope = tree_.scope_of(r);
  events_.add(KVC_EVENT_REMOVED, r, parent, state_[index(r)].meta.depth, scope, now);
  scopes.drop(scope);
  tree_.erase(r);
  for (int32_t g = 0; g < geo_.groups; ++g) {
    const std::span<const block_id> b = blocks_of(r, g);
    for (size_t i = b.size(); i-- > 0;) {
      if (b[i] != no_block) pool.unindex(g, b[i]);
    }
  }
  ++evicted_;
  if (parent != no_node && !evict_.monotone() && state_[index(parent)].pins == 0 && tree_.leaf(parent)) {
    evict_.enter(parent, state_[index(parent)].lane, state_[index(parent)].meta);
  }
}

}  // namespace kvcache::detail
