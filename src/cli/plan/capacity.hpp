// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a batch takes and what a memory holds: by the library's own geometry, and for windows by pools that
// keep no more than the window.

#include <optional>
#include <vector>

#include "plan/plan.hpp"

namespace kvcache::cli {

/// What the planner and the tests ask of a cache configuration.
struct capacity_question {
  std::int32_t context = 1;
  std::int32_t batch = 1;
  std::optional<std::int64_t> memory;  ///< for the cache alone
};

/// The configuration that the answers are about: capacity as given, sequences as many as are to fit, all
/// else as the library's defaults.
cache_config config_of(const std::vector<group_config>& groups, std::int64_t memory, std::int32_t sequences);

/// Answers of the library's geometry. max_batch is the largest number of sequences for which a cache that is
/// configured for so many holds them all; blocks and max_context are those of a cache for `batch` sequences.
holding library_holding(const std::vector<group_config>& groups, const capacity_question& q);

/// The same with pools of windows that hold a ring of ceil(window / block) blocks per sequence; packed, one
/// more, as a sealed block goes only as a whole.
holding windowed_holding(const std::vector<pool>& pools, const capacity_question& q);

}  // namespace kvcache::cli
