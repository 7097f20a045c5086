// SPDX-License-Identifier: Apache-2.0
#pragma once
// First in, first out: what was stored first goes first, used or not.
#include "kvcache/evict/ranked.hpp"

namespace kvcache {

/// Ranks by the insertion.
struct fifo_key {
  /// Logical clock of the insertion.
  static uint64_t key(const node_meta& m) noexcept { return m.born; }
};

/// Evicts the leaf that was stored first. Cost: O(log candidates).
using fifo = ranked<fifo_key>;
static_assert(eviction_policy<fifo>);

}  // namespace kvcache
