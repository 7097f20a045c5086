// SPDX-License-Identifier: Apache-2.0
#pragma once
// Contract of an eviction policy: which cached NODE of the prefix tree goes when blocks are needed.
//
// The cache hands candidates in (`enter`) and takes them back (`leave`) when they are pinned again or gone;
// the policy only ranks. A lane is an account of the cache; each lane is ranked by itself.
//
//  - monotone policies rank a parent never below its child, whatever the order of events, provided the cache
//  enters a
//    released path deepest node first. All unpinned nodes are then candidates and a list does: O(1).
//  - all others rank leaves only; a parent enters when its last child has gone.
//
// What a number per node cannot express a policy may ask for: what time it is (`timed_eviction_policy`), and
// what goes for good (`learning_eviction_policy`).
#include <concepts>
#include <cstdint>
#include <span>

#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// What a policy may know of a node. Two clocks: a logical one that ticks once per successful open and close,
/// and the time that the owner of the cache sets.
struct node_meta {
  uint64_t last = 0;         ///< logical clock of the last access (opened on, or released)
  uint64_t born = 0;         ///< logical clock of the insertion
  uint32_t uses = 0;         ///< sequences that have held it
  int32_t depth = 0;         ///< units above it; the cost of recomputing grows with it
  int32_t priority = 0;      ///< larger stays longer, where the policy heeds it; from −32,768 to 32,767
  uint32_t priority_ms = 0;  ///< how long after the last access that holds, then it is 0; 0 = for ever
  uint64_t time = 0;         ///< ns, of the last access; 0 unless the policy is timed
  uint64_t print = 0;        ///< fingerprint of the text up to its end; 0 unless the policy remembers
};

/// What the cache needs of an eviction policy. Requires: a node is entered at most once before it leaves.
// clang-format off
template <class E>
concept eviction_policy = std::movable<E> &&
    requires(E& e, const E& c, node_id r, int32_t n, const node_meta& m) {
      { e.create(n, n) } noexcept -> std::same_as<status>;  // nodes, lanes
      { c.monotone() } noexcept -> std::same_as<bool>;
      { e.enter(r, n, m) } noexcept;  // node, lane
      { e.leave(r, n) } noexcept;
      { c.victim(n) } noexcept -> std::same_as<node_id>;  // of a lane; no_node when it has no candidate. Changes nothing
    };
/// What a monotone policy may add, so that a whole path costs one call. `path` = nodes of one lane, each the
/// parent of the next: `enter_path` means entering them from the last to the first, `leave_path` that all of
/// them leave.
template <class E>
concept path_eviction_policy = eviction_policy<E> &&
    requires(E& e, std::span<const node_id> path, int32_t lane) {
      { e.enter_path(path, lane) } noexcept;
      { e.leave_path(path, lane) } noexcept;
    };
/// What a policy may add to whom time matters. `advance` says what time it is, in ns, never less than before.
/// `expired` names a candidate of a lane that must go although nothing is short, `no_node` if none.
template <class E>
concept timed_eviction_policy = eviction_policy<E> &&
    requires(E& e, const E& c, uint64_t now, int32_t lane) {
      { e.advance(now) } noexcept;
      { c.expired(lane) } noexcept -> std::same_as<node_id>;
    };
/// What a policy may add that learns from what goes. `settle`: the victim of the lane is about to be taken, so
/// the policy may move its candidates. `evicted`: in place of `leave`, the candidate goes for good, and its id
/// will be given to something else.
template <class E>
concept learning_eviction_policy = eviction_policy<E> &&
    requires(E& e, node_id r, int32_t lane, const node_meta& m) {
      { e.settle(lane) } noexcept;
      { e.evicted(r, lane, m) } noexcept;
    };
/// What it may add to that if it knows a text again that it saw go, by `node_meta::print`. `stored`: a node was
/// added; it is entered later.
template <class E>
concept remembering_eviction_policy = learning_eviction_policy<E> &&
    requires(E& e, node_id r, int32_t lane, const node_meta& m) {
      { e.stored(r, lane, m) } noexcept;
    };
// clang-format on

namespace detail {

// A policy behind a type of its own (`any_eviction`) knows at run time what it can do.
template <eviction_policy E>
bool takes_paths(const E& e) noexcept {
  if constexpr (requires { e.takes_paths(); }) {
    return e.takes_paths();
  } else {
    return path_eviction_policy<E>;
  }
}
template <eviction_policy E>
bool timed(const E& e) noexcept {
  if constexpr (requires { e.timed(); }) {
    return e.timed();
  } else {
    return timed_eviction_policy<E>;
  }
}
template <eviction_policy E>
bool learns(const E& e) noexcept {
  if constexpr (requires { e.learns(); }) {
    return e.learns();
  } else {
    return learning_eviction_policy<E>;
  }
}

template <eviction_policy E>
bool remembers(const E& e) noexcept {
  if constexpr (requires { e.remembers(); }) {
    return e.remembers();
  } else {
    return remembering_eviction_policy<E>;
  }
}

// What a policy did not add does nothing.
template <eviction_policy E>
void tell_time(E& e, uint64_t now) noexcept {
  if constexpr (timed_eviction_policy<E>) e.advance(now);
}
template <eviction_policy E>
node_id expired_of(const E& e, int32_t lane) noexcept {
  if constexpr (timed_eviction_policy<E>) {
    return e.expired(lane);
  } else {
    return no_node;
  }
}
template <eviction_policy E>
void tell_stored(E& e, node_id r, int32_t lane, const node_meta& m) noexcept {
  if constexpr (remembering_eviction_policy<E>) e.stored(r, lane, m);
}
template <eviction_policy E>
void tell_settle(E& e, int32_t lane) noexcept {
  if constexpr (learning_eviction_policy<E>) e.settle(lane);
}
template <eviction_policy E>
void tell_evicted(E& e, node_id r, int32_t lane, const node_meta& m) noexcept {
  if constexpr (learning_eviction_policy<E>) {
    e.evicted(r, lane, m);
  } else {
    e.leave(r, lane);
  }
}

}  // namespace detail

}  // namespace kvcache
