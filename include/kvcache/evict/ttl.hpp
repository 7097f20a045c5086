// SPDX-License-Identifier: Apache-2.0
#pragma once
// Time to live: what nobody has used for a while goes, although nothing is short. While it lives, least
// recently used goes first if blocks are needed, as time passes for all alike.
#include "kvcache/evict/lru.hpp"

namespace kvcache {

/// Evicts what was released longest ago, and whatever was released more than `after` ago: a prefix that is
/// used again exactly `after` ns later is still there. Without a time that is set nothing expires. Cost: O(1)
/// per node. Memory: 16 bytes per node.
class ttl {
 public:
  /// Nothing expires.
  ttl() noexcept = default;
  /// Lives `after` ns after its last use.
  explicit ttl(uint64_t after) noexcept : after_(after) {}

  /// Starts over, empty. Fails: out_of_memory; then nothing has changed.
  status create(int32_t nodes, int32_t lanes) noexcept {
    fixed_array<uint64_t> fresh;
    if (!fresh.create(static_cast<size_t>(nodes))) return {errc::out_of_memory, "nodes", nodes};
    if (status s = list_.create(nodes, lanes); !s) return s;
    released_ = std::move(fresh);
    now_ = 0;
    return {};
  }
  /// Yes: as `lru`.
  static constexpr bool monotone() noexcept { return true; }
  /// Says what time it is, in ns, never less than before. Cost: O(1).
  void advance(uint64_t now) noexcept { now_ = now; }
  /// A candidate released now.
  void enter(node_id r, int32_t lane, const node_meta& m) noexcept {
    released_[index(r)] = now_;
    list_.enter(r, lane, m);
  }
  /// No candidate any more.
  void leave(node_id r, int32_t lane) noexcept { list_.leave(r, lane); }
  /// Enters a path released now, the last node first. Cost: O(nodes).
  void enter_path(std::span<const node_id> path, int32_t lane) noexcept {
    for (const node_id r : path) released_[index(r)] = now_;
    list_.enter_path(path, lane);
  }
  /// Takes a path out.
  void leave_path(std::span<const node_id> path, int32_t lane) noexcept { list_.leave_path(path, lane); }
  /// What was released longest ago; `no_node` without a candidate.
  node_id victim(int32_t lane) const noexcept { return list_.victim(lane); }
  /// The same if its time is over; else `no_node`.
  node_id expired(int32_t lane) const noexcept {
    const node_id r = list_.victim(lane);
    return r != no_node && now_ - released_[index(r)] > after_ ? r : no_node;
  }

 private:
  lru list_;
  fixed_array<uint64_t> released_;  // when
  uint64_t after_ = UINT64_MAX;
  uint64_t now_ = 0;
};

static_assert(path_eviction_policy<ttl>);
static_assert(timed_eviction_policy<ttl>);

}  // namespace kvcache
