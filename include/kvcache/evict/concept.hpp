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
#include <concepts>
#include <cstdint>
#include <span>

#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// What a policy may know of a node. Time is a logical clock that ticks once per successful open and close.
struct node_meta {
  uint64_t last = 0;     ///< clock of the last access (opened on, or released)
  uint64_t born = 0;     ///< clock of the insertion
  uint32_t uses = 0;     ///< sequences that have held it
  int32_t depth = 0;     ///< units above it; the cost of recomputing grows with it
  int32_t priority = 0;  ///< larger stays longer, where the policy heeds it
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
// clang-format on

namespace detail {

// A policy behind a type of its own (`any_eviction`) knows at run time.
template <eviction_policy E>
bool takes_paths(const E& e) noexcept {
  if constexpr (requires { e.takes_paths(); }) {
    return e.takes_paths();
  } else {
    return path_eviction_policy<E>;
  }
}

}  // namespace detail

}  // namespace kvcache
