// SPDX-License-Identifier: Apache-2.0
#pragma once

// Hits of lru at every capacity, from one pass over the trace: a block is a hit in a cache that is at least
// as large as its place in the order of recency (Mattson et al., "Evaluation techniques for storage
// hierarchies", IBM Systems Journal 9, 1970). Exact, or from a sample of the blocks (SHARDS: Waldspurger et
// al., "Efficient MRC Construction with SHARDS", FAST 2015, fixed rate).

#include <cstdint>
#include <vector>

#include "replay/replay.hpp"

namespace kvcache::cli {

/// A capacity and what it would have hit.
struct curve_point {
  std::int64_t capacity_blocks = 0;
  std::int64_t hit_blocks = 0;
  std::int64_t hit_tokens = 0;
};

/// Hits by capacity: a step function that never falls.
struct hit_curve {
  double rate = 1;                  ///< share of the blocks that were looked at; 1: all, the curve is exact
  std::int64_t exact_from = 0;      ///< from this capacity on (the longest request) equal to `replay`'s lru
  std::vector<curve_point> points;  ///< each capacity at which the hits rise; the first is {0, 0, 0}

  /// Hits of a cache of so many blocks; -1: without bound. Cost: O(log points).
  curve_point at(std::int64_t capacity_blocks) const;
  /// The least capacity that hits at least `share` (0 to 1) of the blocks that the unbounded cache hits.
  std::int64_t capacity_for(double share) const;
  /// Where it bends: the point farthest above the straight line from the first point to the last. Up to there
  /// a block brings more hits than on average, beyond it fewer (Satopää et al., "Finding a 'Kneedle' in a
  /// Haystack", ICDCSW 2011, section III, without smoothing). The lower capacity among equals.
  curve_point knee() const;
  /// At most `most` (at least 2) of the points, the first and the last among them, evenly spread over the
  /// logarithm of the capacity: what a plot or a table needs.
  std::vector<curve_point> thinned(std::size_t most) const;
};

/// The curve of a trace. `rate` in (0, 1]: 1 is exact and runs on the library's tree; less samples the blocks
/// by a hash that `seed` varies and needs memory for the sampled ones only. Fails: error (usage) for a rate
/// out of range, (cannot_run) when memory is refused.
hit_curve lru_curve(const traffic& of, double rate = 1, std::uint64_t seed = 0,
                    const replay_progress& tell = {});

}  // namespace kvcache::cli
