// SPDX-License-Identifier: Apache-2.0
#pragma once

// Why a hit rate is as low as it is: the workload, too little room, or routing that spreads what belongs
// together.

#include <cstdint>
#include <string>

#include "replay/replay.hpp"

namespace kvcache::cli {

/// Where the hits went. ceiling = lost_to_capacity + lost_to_routing + the hits of the run itself.
struct loss_summary {
  hit_count ceiling;           ///< one cache without bound: nothing finds more
  hit_count lost_to_capacity;  ///< ceiling minus one worker that has all the room
  hit_count lost_to_routing;   ///< that minus the workers of the run; may be negative, 0 for one worker
  std::int64_t requests = 0;
  std::int64_t share_less_than_block = 0;  ///< share less than one whole block with any earlier request
  std::int64_t shorter_than_block = 0;     ///< of these: could not, the prompt is shorter than a block

  /// In words, one sentence a line: "12.3 % of the requests share less than one block (512 tokens) with ...".
  std::string text(const traffic& of) const;
};

/// Replays what is missing (unbounded, and one worker where `run` had several) beside `run`. For ttl the
/// ceiling is that of lru and lost_to_capacity what its time costs. Fails: as `replay`.
loss_summary summarize(const traffic& of, const replay_options& how, const replay_result& run,
                       const replay_progress& tell = {});

}  // namespace kvcache::cli
