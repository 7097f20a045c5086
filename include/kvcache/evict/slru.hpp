// SPDX-License-Identifier: Apache-2.0
#pragma once
// Segmented LRU without a bound between the segments: what only one sequence has held is on probation and
// goes before everything that was used again, each part in order of the last access. The rule of SGLang's
// policy of this name.
//
// Paper: Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, IEEE Computer 27 (3),
// 1994, section "Segmented LRU"; there the protected segment is bounded.
#include "kvcache/evict/ranked.hpp"

namespace kvcache {

/// Ranks by the segment and by the last access within it.
struct slru_key {
  /// | protected, 1 bit | logical clock of the last access, 63 bits |
  static uint64_t key(const node_meta& m) noexcept {
    constexpr int clock_bits = 63;
    return uint64_t{m.uses >= 2} << clock_bits | (m.last & ((uint64_t{1} << clock_bits) - 1));
  }
};

/// Evicts leaves that were used once before those that were used again, least recently used first. Cost:
/// O(log candidates).
using slru = ranked<slru_key>;
static_assert(eviction_policy<slru>);

}  // namespace kvcache
