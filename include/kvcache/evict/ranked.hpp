// SPDX-License-Identifier: Apache-2.0
#pragma once
// Any order that a number expresses: a policy is one function `static uint64_t key(const node_meta&)`, the
// smallest key goes first, equal keys in order of their ids.
#include "kvcache/evict/concept.hpp"
#include "kvcache/evict/heaps.hpp"

namespace kvcache {

/// A number per node, the whole of a policy. It is asked when the node becomes a candidate and must not
/// depend on anything else, so that it cannot change while the node waits.
template <class K>
concept eviction_key = requires(const node_meta& m) {
  { K::key(m) }
  noexcept->std::same_as<uint64_t>;
};

/// Evicts the leaf with the smallest key. Cost: O(log candidates). Memory: 16 bytes per candidate and 4 per
/// node.
template <eviction_key Key>
class ranked {
 public:
  /// Starts over, empty. Fails: out_of_memory; then nothing has changed.
  status create(int32_t nodes, int32_t lanes) noexcept { return heaps_.create(nodes, lanes); }
  /// No: a number may rank a parent below its child, so only leaves are candidates.
  static constexpr bool monotone() noexcept { return false; }
  /// Puts `r` into the heap of `lane`. Cost: O(log candidates).
  void enter(node_id r, int32_t lane, const node_meta& m) noexcept { heaps_.add(r, lane, Key::key(m)); }
  /// Takes `r` out of the heap of `lane`. Cost: O(log candidates).
  void leave(node_id r, int32_t lane) noexcept { heaps_.remove(r, lane); }
  /// The candidate with the smallest key; `no_node` if there is none. Cost: O(1).
  node_id victim(int32_t lane) const noexcept { return heaps_.first(lane); }

 private:
  detail::lane_heaps heaps_;
};

}  // namespace kvcache
