// SPDX-License-Identifier: Apache-2.0
#pragma once
// The cached prefixes: for every node of the index its blocks of all groups, who pins it, and its place in
// the eviction order. Everything above speaks nodes; only here do nodes become blocks.
//
//   node n ── blocks_[n * blocks_per_unit + ...]   group 0: b b | group 1: b | ...
//          ── state_[n]: pins, lane, uses ...      pins == 0 ⇔ a candidate, or an inner node waiting to
//          become a leaf
//          ── time_[n], print_[n]                  only for a policy that asks for them
#include <cstdint>
#include <span>

#include "kvcache/cache/config.hpp"
#include "kvcache/cache/events.hpp"
#include "kvcache/cache/level.hpp"
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

  /// Gives the nodes of a path that is about to be pinned at least this level of importance. Of equal ones
  /// the longer holds. Cost: O(path), O(1) as long as nobody states any.
  void raise(std::span<const node_id> path, retention_level level) noexcept;

  /// Indexes one unit below `parent` and pins it; `mine` are the blocks that hold it, all groups behind each
  /// other. If the unit is there already, `fresh` is false and the caller should use the node's blocks.
  /// `no_node` if the index is full of pinned nodes.
  inserted store(pools<A>& pool, scope_table& scopes, int32_t scope, node_id parent,
                 std::span<const token_id> tokens, std::span<const block_id> mine, int32_t lane,
                 retention_level level, uint64_t now) noexcept;

  /// Says what time it is, and evicts what a timed policy calls expired; returns how many. Time does not run
  /// backwards. Cost: O(lanes + nodes that go).
  int32_t set_time(pools<A>& pool, scope_table& scopes, uint64_t ns, uint64_t now) noexcept;

  /// Evicts one node, of `lane` if that is not negative and has one, else of the lane with most cached
  /// blocks. False when nothing is evictable. Cost: O(1) for a monotone policy with one lane.
  bool evict_one(pools<A>& pool, scope_table& scopes, int32_t lane, uint64_t now) noexcept;

 private:
  struct node_state {  // the first ones as in node_meta
    uint64_t last;
    uint64_t born;
    uint32_t uses;
    int32_t depth;
    retention_level level;
    int32_t pins;
    int32_t lane;
  };
  // What the policy asks for, known when the program is compiled where that can be: it is told what goes;
  // also what comes, with its print; it wants to know when a node was used.
  bool learns() const noexcept { return learning_eviction_policy<E> && learns_; }
  bool remembers() const noexcept { return remembering_eviction_policy<E> && remembers_; }
  bool dated() const noexcept { return timed_eviction_policy<E> && dated_; }
  node_meta meta(node_id r) const noexcept {
    const node_state& n = state_[index(r)];
    node_meta m{n.last, n.born, n.uses, n.depth, n.level.priority, n.level.ms};
    if (dated()) m.time = time_[index(r)];
    if (remembers()) m.print = print_[index(r)];
    return m;
  }
  uint64_t print_of(const scope_table& scopes, int32_t scope, node_id parent,
                    std::span<const token_id> tokens) const noexcept;
  void init(node_id r, const node_state& state, std::span<const block_id> mine, uint64_t print) noexcept;
  bool over(node_id r) const noexcept {
    const node_state& n = state_[index(r)];
    return dated() && n.pins == 0 && n.level.over(time_[index(r)], now_);
  }
  size_t per_node() const noexcept { return static_cast<size_t>(geo_.blocks_per_unit); }
  // Calls act(nodes of one lane, lane) for each run of nodes, in order.
  template <class Act>
  void by_lane(std::span<const node_id> path, Act act) const noexcept;
  void enter_path(std::span<const node_id> path) noexcept;
  void leave_path(std::span<const node_id> path) noexcept;
  node_id take(int32_t lane) noexcept {
    if (learns()) tell_settle(evict_, lane);
    return evict_.victim(lane);
  }
  node_id victim(const pools<A>& pool, int32_t lane) noexcept;
  node_id leaf_below(node_id r) const noexcept;
  void evict(pools<A>& pool, scope_table& scopes, node_id r, uint64_t now) noexcept;

  geometry geo_{};
  bool one_lane_ = true;
  bool learns_ = false;
  bool remembers_ = false;
  bool dated_ = false;
  bool leveled_ = false;  // somebody has stated a level
  uint64_t now_ = 0;      // ns
  X tree_;
  E evict_;
  fixed_array<node_state> state_;
  fixed_array<block_id> blocks_;
  fixed_array<uint64_t> time_;   // [node] ns of the last access
  fixed_array<uint64_t> print_;  // [node] of the text up to its end
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
  learns_ = detail::learns(evict_);
  remembers_ = detail::remembers(evict_);
  dated_ = timed(evict_) && !evict_.monotone();  // a monotone policy is told of every release
  if (!time_.create(dated_ ? n : 0) || !print_.create(remembers_ ? n : 0)) {
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
                               retention_level level, uint64_t now) noexcept {
  inserted in = tree_.insert(scope, parent, tokens);
  // The parent is pinned by the caller, so making room cannot take the path that is being extended.
  if (in.node == no_node && evict_one(pool, scopes, lane, now)) in = tree_.insert(scope, parent, tokens);
  if (in.node == no_node) return in;
  if (in.fresh) {
    const int32_t depth = parent == no_node ? 0 : state_[index(parent)].depth + 1;
    const uint64_t print = remembers() ? print_of(scopes, scope, parent, tokens) : 0;
    init(in.node, {now, now, 1, depth, level, 1, lane}, mine, print);
    for (int32_t g = 0; g < geo_.groups; ++g) {
      for (const block_id x : blocks_of(in.node, g)) {
        if (x != no_block) pool.pool(g).index(x);
      }
    }
    scopes.hold(scope);
    events_.add(KVC_EVENT_STORED, in.node, parent, depth, scope, now);
    ++stored_;
  }
  if (!in.fresh) {
    raise({&in.node, 1}, level);
    pin_path({&in.node, 1}, now);
  }
  return in;
}

template <block_allocator A, eviction_policy E, prefix_index X>
void nodes<A, E, X>::init(node_id r, const node_state& state, std::span<const block_id> mine,
                          uint64_t print) noexcept {
  state_[index(r)] = state;
  leveled_ |= state.level != retention_level{};
  std::copy(mine.begin(), mine.end(), blocks_.data() + index(r) * per_node());
  if (dated()) time_[index(r)] = now_;
  if (!remembers()) return;
  print_[index(r)] = print;
  tell_stored(evict_, r, state.lane, meta(r));
}

// Only ranks may depend on it: two texts with one print are told apart by the tree.
template <block_allocator A, eviction_policy E, prefix_index X>
uint64_t nodes<A, E, X>::print_of(const scope_table& scopes, int32_t scope, node_id parent,
                                  std::span<const token_id> tokens) const noexcept {
  uint64_t h = parent == no_node ? 0 : print_[index(parent)];
  h = mix64(h + 0x9e3779b97f4a7c15ull) ^ scopes.fingerprint(scope);
  for (const token_id t : tokens) h = mix64(h * 0xff51afd7ed558ccdull + static_cast<uint32_t>(t));
  return h;
}

template <block_allocator A, eviction_policy E, prefix_index X>
void nodes<A, E, X>::raise(std::span<const node_id> path, retention_level level) noexcept {
  leveled_ |= level != retention_level{};
  if (!leveled_) return;
  for (const node_id r : path) {
    retention_level& own = state_[index(r)].level;
    if (over(r)) own = {};
    own = std::max(own, level);
  }
}

// A pinned node's ancestors are pinned, so the nodes that nobody held are the end of the path.
template <block_allocator A, eviction_policy E, prefix_index X>
void nodes<A, E, X>::pin_path(std::span<const node_id> path, uint64_t now) noexcept {
  size_t held = 0;
  for (const node_id r : path) {
    node_state& n = state_[index(r)];
    n.last = now;
    ++n.uses;
    held += n.pins++ != 0;
  }
  if (dated()) {
    for (const node_id r : path) time_[index(r)] = now_;
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
      n.last = now;
      if (dated()) time_[index(r)] = now_;
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
    evict_.enter(path.back(), lane(path.back()), meta(path.back()));
  } else if (takes_paths(evict_)) {
    if constexpr (path_eviction_policy<E>) {
      by_lane(path, [&](std::span<const node_id> run, int32_t lane) { evict_.enter_path(run, lane); });
    }
  } else {
    for (size_t i = path.size(); i-- > 0;) evict_.enter(path[i], lane(path[i]), meta(path[i]));
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
node_id nodes<A, E, X>::victim(const pools<A>& pool, int32_t lane) noexcept {
  node_id r = lane >= 0 || one_lane_ ? take(one_lane_ ? 0 : lane) : no_node;
  if (r == no_node && pool.accounts() > 1) {
    int32_t most = -1;
    for (int32_t a = 0; a < pool.accounts(); ++a) {
      if (pool.cached(a) > most && evict_.victim(a) != no_node) {
        most = pool.cached(a);
        lane = a;
      }
    }
    if (most >= 0) r = take(lane);
  }
  return r == no_node ? no_node : leaf_below(r);
}

// A lane's oldest node may carry another lane's nodes; those become unreachable with it, so they go first.
template <block_allocator A, eviction_policy E, prefix_index X>
node_id nodes<A, E, X>::leaf_below(node_id r) const noexcept {
  while (!tree_.leaf(r)) r = tree_.first_child(r);
  return r;
}

template <block_allocator A, eviction_policy E, prefix_index X>
int32_t nodes<A, E, X>::set_time(pools<A>& pool, scope_table& scopes, uint64_t ns, uint64_t now) noexcept {
  if (!timed(evict_) || ns <= now_) return 0;
  now_ = ns;
  tell_time(evict_, ns);
  int32_t gone = 0;
  for (int32_t lane = 0; lane < pool.accounts(); ++lane) {
    for (node_id r; (r = expired_of(evict_, lane)) != no_node; ++gone)
      evict(pool, scopes, leaf_below(r), now);
  }
  return gone;
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
  if (learns()) {
    tell_evicted(evict_, r, lane(r), meta(r));
  } else {
    evict_.leave(r, lane(r));
  }
  const node_id parent = tree_.parent(r);
  const int32_t scope = tree_.scope_of(r);
  events_.add(KVC_EVENT_REMOVED, r, parent, state_[index(r)].depth, scope, now);
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
    evict_.enter(parent, lane(parent), meta(parent));
  }
}

}  // namespace kvcache::detail
