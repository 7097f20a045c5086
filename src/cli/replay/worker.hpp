// SPDX-License-Identifier: Apache-2.0
#pragma once

// One cache of so many blocks: the library's tree and one of its policies, and of each node what the policy
// may know. It does what `basic_cache` does for a sequence that is opened on a prompt, committed and closed
// at once: pin the prefix, evict for the rest, index the rest, release.

#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "kvcache/core/fixed_array.hpp"
#include "kvcache/evict/ranked.hpp"
#include "replay/path.hpp"

namespace kvcache::cli {

/// Belady's optimum among leaves (Belady, "A study of replacement algorithms for a virtual-storage computer",
/// IBM Systems Journal 5, 1966): whoever is used last goes first. The replay writes minus the index of the
/// request that uses a node next into its priority, so that nearer stays longer.
struct belady_key {
  static std::uint64_t key(const node_meta& m) noexcept {
    return static_cast<std::uint64_t>(std::int64_t{m.priority} - std::numeric_limits<std::int32_t>::min());
  }
};

/// When a policy chooses.
enum class choosing : std::uint8_t {
  before,  ///< the request is indexed; its own blocks are pinned
  after,   ///< it is indexed, among its own blocks too
};

/// Invariant between requests: a prefix-closed set of at most `room` nodes; candidates are all of them
/// (monotone policy) or the leaves. Memory per node: 57 bytes and the policy's; 20 more unless the policy
/// takes whole paths, 8 where it is timed, 8 where it remembers.
template <eviction_policy E, choosing When = choosing::before, bool Future = false>
class worker {
 public:
  /// `room` in blocks, `life_us` what a timed policy was made with. Fails: error (cannot_run) when memory is
  /// refused.
  worker(const traffic& of, E policy, std::int64_t room, std::int64_t life_us);

  /// Leading blocks of `units` that are resident at `time_us`; `serve` relies on it.
  std::int32_t match(std::span<const std::int32_t> units, std::int64_t time_us) {
    if constexpr (timed) run_out(time_us);
    return hit_ = tree_.match(0, no_node, units, path_);
  }
  /// The request that was matched last is request `r` and is served here.
  void serve(const traffic& of, std::int32_t r);
  /// The trace ends.
  void finish(std::int64_t time_us) {
    if constexpr (timed) run_out(time_us);
    pass_time(time_us);
  }

  std::int64_t resident() const { return tree_.size(); }
  std::int64_t evictions() const { return evictions_; }
  double block_us() const { return block_us_; }  ///< resident blocks summed over time
  std::int64_t missed = 0;                       ///< blocks so far, for routing

 private:
  static constexpr bool timed = timed_eviction_policy<E>;
  static constexpr bool learning = learning_eviction_policy<E>;
  static constexpr bool remembering = remembering_eviction_policy<E>;
  static constexpr bool after = When == choosing::after;
  // Whether E looks at what is known of a node; a monotone policy that takes whole paths does not.
  static constexpr bool informed = !path_eviction_policy<E>;

  struct known {  // as in node_meta, the clock in requests
    std::uint32_t last, born, uses;
    std::int32_t depth, priority;
  };
  // Policies compare times and nothing else, so they are told microseconds: those of any trace fit.
  static std::uint64_t clock(std::int64_t us) { return static_cast<std::uint64_t>(us); }
  node_meta meta(node_id n) const {
    const known& k = known_[index(n)];
    node_meta m;
    m.last = k.last;
    m.born = k.born;
    m.uses = k.uses;
    m.depth = k.depth;
    m.priority = k.priority;
    if constexpr (timed) m.time = clock(used_us_[index(n)]);
    if constexpr (remembering) m.print = print_[index(n)];
    return m;
  }
  node_id at(std::int32_t i) const { return path_[static_cast<std::size_t>(i)]; }
  std::span<const node_id> path(std::int32_t from, std::int32_t to) const {
    return std::span(path_).subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from));
  }
  void pin(std::int32_t nodes, std::int32_t r);
  void know(const traffic& of, std::int32_t from, std::int32_t to, std::int32_t r);
  void tell_stored(std::span<const std::int32_t> units, std::int32_t from, std::int32_t to);
  void release(std::int32_t nodes);
  void evict_one(std::int32_t pinned) {
    if constexpr (learning) evict_.settle(0);
    evict(evict_.victim(0), pinned);
  }
  void evict(node_id gone, std::int32_t pinned);
  void run_out(std::int64_t time_us);
  void pass_time(std::int64_t time_us) {
    block_us_ += static_cast<double>(time_us - time_us_) * tree_.size();
    time_us_ = time_us;
  }

  std::int64_t room_;
  std::int64_t life_us_;
  radix_tree tree_;
  E evict_;
  fixed_array<known> known_;
  fixed_array<std::int64_t> used_us_;
  fixed_array<std::uint64_t> print_;
  std::vector<node_id> path_;
  std::int32_t hit_ = 0;
  std::int64_t time_us_ = 0;
  std::int64_t evictions_ = 0;
  double block_us_ = 0;
};

template <eviction_policy E, choosing When, bool Future>
worker<E, When, Future>::worker(const traffic& of, E policy, std::int64_t room, std::int64_t life_us)
    : room_(std::min<std::int64_t>(room, of.nodes())), life_us_(life_us), evict_(std::move(policy)) {
  const std::int64_t most = std::min<std::int64_t>(room_ + (after ? of.longest() : 0), of.nodes());
  tree_ = tree_of(most);
  const auto n = static_cast<std::size_t>(most);
  if (!evict_.create(static_cast<std::int32_t>(most), 1) || (informed && !known_.create(n)) ||
      (timed && !used_us_.create(n)) || (remembering && !print_.create(n))) {
    throw out_of_memory("capacity", most);
  }
  path_.resize(static_cast<std::size_t>(std::min<std::int64_t>(most, of.longest())));
}

template <eviction_policy E, choosing When, bool Future>
void worker<E, When, Future>::serve(const traffic& of, std::int32_t r) {
  const request& now = of.source().requests[static_cast<std::size_t>(r)];
  const std::span<const std::int32_t> units = of.source().units_of(now);
  pass_time(now.time_us);
  if constexpr (timed) evict_.advance(clock(now.time_us));
  const auto stays = after ? now.count : static_cast<std::int32_t>(std::min<std::int64_t>(now.count, room_));
  pin(hit_, r);
  if constexpr (!after) {
    while (tree_.size() + (stays - hit_) > room_) evict_one(hit_);
  }
  extend_path(tree_, units, path_, hit_, stays);
  know(of, hit_, stays, r);
  if constexpr (remembering) tell_stored(units, hit_, stays);
  release(stays);
  if constexpr (after) {
    while (tree_.size() > room_) evict_one(0);
  }
}

template <eviction_policy E, choosing When, bool Future>
void worker<E, When, Future>::pin(std::int32_t nodes, std::int32_t r) {
  if (nodes == 0) return;
  if constexpr (informed) {
    for (const node_id n : path(0, nodes)) {
      known& k = known_[index(n)];
      k.last = static_cast<std::uint32_t>(r) + 1;
      ++k.uses;
    }
  }
  if constexpr (path_eviction_policy<E>) {
    evict_.leave_path(path(0, nodes), 0);
  } else if (evict_.monotone()) {
    for (const node_id n : path(0, nodes)) evict_.leave(n, 0);
  } else if (tree_.leaf(at(nodes - 1))) {
    evict_.leave(at(nodes - 1), 0);
  }
}

// The nodes [from, to) of the path are new, and all up to there are used.
template <eviction_policy E, choosing When, bool Future>
void worker<E, When, Future>::know(const traffic& of, std::int32_t from, std::int32_t to, std::int32_t r) {
  if constexpr (informed) {
    const auto tick = static_cast<std::uint32_t>(r) + 1;
    for (std::int32_t i = from; i < to; ++i) known_[index(at(i))] = {tick, tick, 1, i, 0};
  }
  if constexpr (timed) {
    const std::int64_t now = of.source().requests[static_cast<std::size_t>(r)].time_us;
    for (const node_id n : path(0, to)) used_us_[index(n)] = now;
  }
  if constexpr (Future) {
    std::int32_t i = 0;
    for (const next_use& run : of.next_uses(static_cast<std::size_t>(r))) {
      for (const std::int32_t end = std::min(to, i + run.length); i < end; ++i) {
        known_[index(at(i))].priority = -run.request;
      }
    }
  }
}

// As the cache does, the policy may know a text again by a fingerprint of all of it.
template <eviction_policy E, choosing When, bool Future>
void worker<E, When, Future>::tell_stored(std::span<const std::int32_t> units, std::int32_t from,
                                          std::int32_t to) {
  std::uint64_t print = from == 0 ? 0 : print_[index(at(from - 1))];
  for (std::int32_t i = from; i < to; ++i) {
    print = mix64(print * 0xff51afd7ed558ccdull +
                  static_cast<std::uint32_t>(units[static_cast<std::size_t>(i)]) + 1);
    print_[index(at(i))] = print;
    evict_.stored(at(i), 0, meta(at(i)));
  }
}

template <eviction_policy E, choosing When, bool Future>
void worker<E, When, Future>::release(std::int32_t nodes) {
  if (nodes == 0) return;
  if constexpr (path_eviction_policy<E>) {
    evict_.enter_path(path(0, nodes), 0);
  } else if (evict_.monotone()) {
    for (std::int32_t i = nodes; i-- > 0;) evict_.enter(at(i), 0, meta(at(i)));
  } else if (tree_.leaf(at(nodes - 1))) {
    evict_.enter(at(nodes - 1), 0, meta(at(nodes - 1)));
  }
}

// `pinned` leading nodes of the path are no candidates, whatever happens to their children.
template <eviction_policy E, choosing When, bool Future>
void worker<E, When, Future>::evict(node_id gone, std::int32_t pinned) {
  if constexpr (learning) {
    evict_.evicted(gone, 0, meta(gone));
  } else {
    evict_.leave(gone, 0);
  }
  const node_id parent = tree_.parent(gone);
  tree_.erase(gone);
  ++evictions_;
  if constexpr (informed) {
    if (parent == no_node || evict_.monotone() || !tree_.leaf(parent)) return;
    const std::int32_t depth = known_[index(parent)].depth;
    if (depth < pinned && at(depth) == parent) return;
    evict_.enter(parent, 0, meta(parent));
  }
}

// A block goes right after the last moment at which it would still be a hit.
template <eviction_policy E, choosing When, bool Future>
void worker<E, When, Future>::run_out(std::int64_t time_us) {
  evict_.advance(clock(time_us));
  for (node_id old; (old = evict_.expired(0)) != no_node;) {
    pass_time(used_us_[index(old)] + life_us_);
    evict(old, 0);
  }
}

}  // namespace kvcache::cli
