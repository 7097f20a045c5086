// SPDX-License-Identifier: Apache-2.0
#pragma once
// Least frequently used, the older one first among equals.
#include <algorithm>

#include "kvcache/evict/ranked.hpp"

namespace kvcache {

/// Ranks by uses first and by the last access among equals.
struct lfu_key {
  /// | uses, 24 bits, saturating | clock of the last access, 40 bits |
  static uint64_t key(const node_meta& m) noexcept {
    constexpr uint64_t clock_bits = 40;  // 10^12 opens and closes before the order among equals wraps
    return uint64_t{std::min<uint32_t>(m.uses, (1u << 24) - 1)} << clock_bits |
           (m.last & ((uint64_t{1} << clock_bits) - 1));
  }
};

/// Evicts the leaf that the fewest sequences have held. Cost: O(log candidates).
using lfu = ranked<lfu_key>;
static_assert(eviction_policy<lfu>);

}  // namespace kvcache
