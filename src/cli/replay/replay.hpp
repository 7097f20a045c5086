// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays a trace through the library's own prefix tree and eviction policies, ids only: what would have been
// found in a cache of so many blocks. Requests come in file order, one at a time, and take no time; outputs
// are never cached. One id of the trace is one unit of the tree, a trailing partial block counts as one, and
// no last token is held back. Every definition is in docs/replay.md.
//
//   trace ── traffic (nodes counted once) ──┬─ replay(options)    one policy, one capacity
//                                           ├─ lru_curve(rate)    lru at every capacity, curve.hpp
//                                           └─ summary            ceiling, losses, summary.hpp

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trace/trace.hpp"

namespace kvcache::cli {

/// Told now and then how many blocks of how many are done; empty for nobody.
using replay_progress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Which worker gets a request.
enum class route : std::uint8_t {
  random,           ///< any, by a generator that the seed starts
  round_robin,      ///< request r goes to worker r mod W
  prefix_affinity,  ///< the longest match; then the fewest missed blocks so far, then the lower index
  affinity_load,    ///< the fewest missed blocks, those of this request and all so far together
};

/// "random", "round_robin", "prefix_affinity" or "affinity_load".
const char* name_of(route r);
/// The route of that name. Fails: error (usage) that names the value.
route route_of(std::string_view name);

/// One policy that `replay` knows.
struct policy_info {
  const char* name = nullptr;
  bool timed = false;    ///< needs a time to live
  bool optimum = false;  ///< knows the future
};
/// All of them, in the order in which they are best listed. `belady` is `belady_pinned`.
std::span<const policy_info> policies();

/// What to replay.
struct replay_options {
  std::string policy = "lru";         ///< a name, maybe with settings: "s3_fifo:small=20,uses=1", "ttl:60"
  std::int64_t capacity_blocks = -1;  ///< of all workers together; -1: without bound
  double ttl_s = -1;  ///< seconds after its last use that a block lives; only ttl, unless its name says so
  std::int32_t workers = 1;                   ///< each has floor(capacity / workers) blocks
  route routing = route::round_robin;         ///< no matter with one worker
  std::uint64_t seed = 0;                     ///< of route::random
  std::vector<std::int32_t>* hits = nullptr;  ///< if given, gets the hit of each request, in blocks
};

/// What came out. Sums over all workers.
struct replay_result {
  std::string policy;
  std::int64_t capacity_blocks = -1;  ///< as asked for; -1: without bound
  double ttl_s = -1;                  ///< as asked for; -1 where the policy has none
  std::int32_t workers = 1;
  route routing = route::round_robin;
  std::int64_t hit_blocks = 0;         ///< leading blocks of each request that were resident when it came
  std::int64_t hit_tokens = 0;         ///< sum of min(hit · block tokens, input length)
  std::int64_t requests_with_hit = 0;  ///< with at least one such block
  std::int64_t evictions = 0;          ///< blocks that were stored and went; with bypass also at once
  std::int64_t resident_end = 0;       ///< blocks resident after the last request
  double mean_resident_blocks = 0;     ///< average over the time from the first request to the last
};

/// Hits, in blocks and in tokens, and of how many requests.
struct hit_count {
  std::int64_t blocks = 0;
  std::int64_t tokens = 0;
  std::int64_t requests = 0;
};

/// A stretch of a request's path that is next used by the same request.
struct next_use {
  std::int32_t length = 0;   ///< nodes
  std::int32_t request = 0;  ///< INT32_MAX: never again
};

/// A trace made ready: its prefix-tree nodes counted, what Belady needs found when it is first asked for.
/// The trace must outlive it. Thread safety: none.
class traffic {
 public:
  /// Fails: error (bad_input) when the trace holds lengths only, (cannot_run) when memory is refused.
  explicit traffic(const trace& of, const replay_progress& tell = {});

  const trace& source() const { return *source_; }
  std::int64_t blocks() const { return static_cast<std::int64_t>(source_->units.size()); }
  std::int64_t tokens() const { return tokens_; }        ///< sum of the input lengths
  std::int32_t nodes() const { return nodes_; }          ///< different (parent node, id): unique blocks
  std::int32_t longest() const { return longest_; }      ///< blocks of the longest request
  const hit_count& ceiling() const { return ceiling_; }  ///< hits of one cache without bound
  /// Tokens that `blocks` leading blocks of a request hold.
  std::int64_t tokens_of(const request& r, std::int64_t blocks) const {
    return std::min(blocks * source_->block_tokens, r.input_tokens);
  }
  /// The next uses along the path of request `r`, runs from its head; a run's `request` never falls from one
  /// run to the next. Cost: the first call goes through the whole trace.
  std::span<const next_use> next_uses(std::size_t r) const;

 private:
  struct future {
    std::vector<std::int64_t> first;  // [requests + 1], in runs
    std::vector<next_use> runs;
  };
  bool count(std::int64_t most, const replay_progress& tell);
  void look_ahead() const;

  const trace* source_;
  std::int64_t tokens_ = 0;
  hit_count ceiling_;
  std::int32_t nodes_ = 0;
  std::int32_t longest_ = 0;
  mutable std::unique_ptr<future> future_;
};

/// Replays the whole trace. Fails: error (usage) for an unknown policy or a value out of range, (cannot_run)
/// when memory is refused; nothing is returned then.
replay_result replay(const traffic& of, const replay_options& how, const replay_progress& tell = {});

}  // namespace kvcache::cli
