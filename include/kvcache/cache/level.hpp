// SPDX-License-Identifier: Apache-2.0
#pragma once
// How important a request says its cached prefix is, and for how long.
#include <cstdint>

namespace kvcache {

/// Options of one sequence.
struct open_options {
  int32_t account = 0;    ///< which is charged
  int32_t recompute = 1;  ///< last tokens of the prompt that must not come from the cache; at least 1
  /// Level of importance of what the sequence finds and commits, from −32,768 to 32,767, for a policy that
  /// heeds it (`priority_levels`): a lower one goes first. A prefix that several requests use has the highest
  /// level of theirs.
  int32_t priority = 0;
  uint32_t priority_ms = 0;  ///< how long after each use that holds, then the level is 0; 0 = for ever
};

namespace detail {

/// A level and how long it holds after a use.
struct retention_level {
  int32_t priority = 0;
  uint32_t ms = 0;  // 0 = for ever

  constexpr bool operator==(const retention_level&) const noexcept = default;
  /// Lower level, or an equal one that holds for less long.
  constexpr bool operator<(const retention_level& o) const noexcept {
    return priority != o.priority ? priority < o.priority : ms - 1 < o.ms - 1;  // unsigned: 0 is the longest
  }
  /// Whether it has ended at `now`, after a use at `used`, both in ns.
  constexpr bool over(uint64_t used, uint64_t now) const noexcept {
    return ms != 0 && now > used && now - used > uint64_t{ms} * 1'000'000;
  }
};

}  // namespace detail

}  // namespace kvcache
