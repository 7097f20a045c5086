// SPDX-License-Identifier: Apache-2.0
#pragma once
// Levels of importance that the engine states per request, for a while or for ever: a lower level goes first,
// and within a level what was used least recently. A level that is over counts as 0, the default.
//
//   level -1:  d0 d1      goes first       each level in order of the last access
//   level  0:  a0 a1 a2
//   level  5:  s0 s1      goes last        s1 for 60 s: then it goes on between a1 and a2, where its last
//                                          access puts it
#include <algorithm>

#include "kvcache/evict/ranked.hpp"

namespace kvcache {

/// Ranks by level and by the last access within it; durations are not heeded.
struct priority_key {
  /// | level + 2^15, 16 bits | logical clock of the last access, 48 bits |
  static uint64_t key(const node_meta& m) noexcept { return key(m.priority, m.last); }
  /// The same of a level, which is cut off where it does not fit, and a clock.
  static uint64_t key(int32_t level, uint64_t last) noexcept {
    const int32_t fit = std::clamp(level, -(1 << 15), (1 << 15) - 1);
    return static_cast<uint64_t>(fit + (1 << 15)) << clock_bits | (last & clock_mask);
  }
  static constexpr int clock_bits = 48;                                    ///< of the last access
  static constexpr uint64_t clock_mask = (uint64_t{1} << clock_bits) - 1;  ///< its place in a key
};

/// Evicts the leaf of the lowest level, least recently used first, and gives a level up when its time is
/// over. Cost: O(log candidates); per level given up as well. Memory: 16 bytes per candidate, twice that with
/// a duration, and 8 per node.
class priority_levels {
 public:
  /// Starts over, empty. Fails: out_of_memory; then nothing has changed.
  status create(int32_t nodes, int32_t lanes) noexcept {
    detail::lane_heaps fresh;
    if (status s = fresh.create(nodes, lanes); !s) return s;
    if (status s = order_.create(nodes, lanes); !s) return s;
    until_ = std::move(fresh);
    now_ = 0;
    return {};
  }
  /// No: a parent may have a lower level than its child.
  static constexpr bool monotone() noexcept { return false; }
  /// Says what time it is, in ns, never less than before: levels whose last moment has passed end. Cost:
  /// O(lanes) and O(log candidates) per level that ends.
  void advance(uint64_t now) noexcept {
    now_ = now;
    for (int32_t lane = 0; lane < until_.lanes(); ++lane) {
      while (!until_.empty(lane) && until_.first_key(lane) < now) end_level(until_.first(lane), lane);
    }
  }
  /// A candidate of the level that it has now.
  void enter(node_id r, int32_t lane, const node_meta& m) noexcept {
    const bool ends = m.priority != 0 && m.priority_ms != 0;
    const uint64_t until = m.time + uint64_t{m.priority_ms} * 1'000'000;
    const bool over = ends && until < now_;
    order_.add(r, lane, priority_key::key(over ? 0 : m.priority, m.last));
    if (ends && !over) until_.add(r, lane, until);
  }
  /// No candidate any more.
  void leave(node_id r, int32_t lane) noexcept {
    order_.remove(r, lane);
    if (until_.contains(r, lane)) until_.remove(r, lane);
  }
  /// The candidate of the lowest level that was used least recently; `no_node` if there is none. Cost: O(1).
  node_id victim(int32_t lane) const noexcept { return order_.first(lane); }
  /// None: a level that is over makes nothing go before it must.
  static node_id expired(int32_t) noexcept { return no_node; }

 private:
  void end_level(node_id r, int32_t lane) noexcept {
    until_.remove(r, lane);
    const uint64_t last = order_.key(r, lane) & priority_key::clock_mask;
    order_.remove(r, lane);
    order_.add(r, lane, priority_key::key(0, last));
  }

  detail::lane_heaps order_;
  detail::lane_heaps until_;  // by the last moment of the level
  uint64_t now_ = 0;
};

static_assert(timed_eviction_policy<priority_levels>);

}  // namespace kvcache
