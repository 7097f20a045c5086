// SPDX-License-Identifier: Apache-2.0
#pragma once
// Greedy dual with frequency: what is cheap to compute again goes first, however it ages. The units of a tree
// are alike in size and differ in cost: attending makes a token the dearer the more text lies before it.
//
//   key = floor + uses · (even + depth)      floor = key of the last victim: what is not used falls behind
//
// Paper: Cherkasova: Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy, HP
// Laboratories report HPL-98-69R1, 1998, section 3.
#include <algorithm>

#include "kvcache/evict/concept.hpp"
#include "kvcache/evict/heaps.hpp"

namespace kvcache {

/// Evicts the leaf with the lowest product of uses and cost, above the key of the last victim when it became
/// a candidate. Cost: O(log candidates). Memory: 16 bytes per candidate and 4 per node.
class gdsf {
 public:
  /// With `even` = 2,048.
  gdsf() noexcept : gdsf(2048) {}
  /// At a depth of `even` units attending costs as much as the weights do: for units of 16 tokens 2,048 is
  /// right for a model of 8 billion weights and 32 layers of 4,096 values. 0 = by depth alone.
  explicit gdsf(int32_t even) noexcept : even_(std::max(even, 0)) {}

  /// Starts over, empty. Fails: out_of_memory; then nothing has changed.
  status create(int32_t nodes, int32_t lanes) noexcept {
    fixed_array<uint64_t> fresh;
    if (!fresh.create(static_cast<size_t>(lanes))) return {errc::out_of_memory, "nodes", nodes};
    if (status s = heaps_.create(nodes, lanes); !s) return s;
    floor_ = std::move(fresh);
    return {};
  }
  /// No: a parent that many used long ago may be worth less than its child.
  static constexpr bool monotone() noexcept { return false; }
  /// Puts `r` into the heap of `lane`. Cost: O(log candidates).
  void enter(node_id r, int32_t lane, const node_meta& m) noexcept {
    const uint64_t uses = std::clamp<uint32_t>(m.uses, 1, 1u << 20);
    const auto cost = static_cast<uint64_t>(int64_t{even_} + m.depth + 1);
    heaps_.add(r, lane, floor_[static_cast<size_t>(lane)] + uses * cost);
  }
  /// Takes `r` out of the heap of `lane`. Cost: O(log candidates).
  void leave(node_id r, int32_t lane) noexcept { heaps_.remove(r, lane); }
  /// The candidate with the smallest key; `no_node` if there is none. Cost: O(1).
  node_id victim(int32_t lane) const noexcept { return heaps_.first(lane); }
  /// Nothing has to be moved.
  void settle(int32_t) noexcept {}
  /// Takes `r` out; later candidates are ranked from its key on.
  void evicted(node_id r, int32_t lane, const node_meta&) noexcept {
    floor_[static_cast<size_t>(lane)] = heaps_.key(r, lane);
    heaps_.remove(r, lane);
  }

 private:
  detail::lane_heaps heaps_;
  fixed_array<uint64_t> floor_;  // [lane]
  int32_t even_;
};

static_assert(learning_eviction_policy<gdsf>);

}  // namespace kvcache
