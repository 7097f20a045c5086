// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes requests of KV events. An engine tells of the blocks that it filled, and which block came before; so
// the whole prefix of what a request computed can be told, block by block back to its start.
//
//   BlockStored [c d] parent b       parent_: a ◄─ b ◄─ c ◄─ d         request: a b c d
//   BlockStored [e]   parent d       shortly after: the same request goes on: a b c d e
//
// A request whose blocks were all cached fills none and is not seen.

#include <cstdint>
#include <map>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "trace/builder.hpp"
#include "trace/scanner.hpp"

namespace kvcache::cli {

/// One event, its hashes already turned into the numbers of the trace's ids.
struct kv_event {
  enum class kind { stored, other };
  kind is = kind::other;
  std::vector<std::int32_t> blocks;
  std::int32_t parent = -1;        ///< -1: the first block is the start of a text
  std::int64_t tokens = -1;        ///< how many ids of tokens came with it; -1: none
  std::int64_t block_tokens = -1;  ///< -1: not said
  std::int64_t group = 0;          ///< group of layers that it is about
  bool on_device = true;           ///< false: the blocks are on a lower tier
};

/// Puts events together, and the requests they make into a trace.
class event_chains {
 public:
  event_chains(scanner& in, trace_builder& out) : in_(in), out_(out) {}

  /// A batch of events of one engine, all at one time. Fails: `error` if time falls.
  void batch(std::int64_t line, std::int64_t time_us, std::int64_t rank);
  /// The next event of the batch. Fails: `error`.
  void add(std::int64_t line, const kv_event& event);
  /// The number that a publisher gave to its batch; those that are missing are counted.
  void sequence(std::int64_t number);
  /// The file has ended. Fails: `error` if it carries too little.
  void finish();

 private:
  struct pending {
    std::int64_t start_us, last_us;
    std::int32_t tip;  ///< its last block
  };
  static constexpr std::int32_t unseen = -2;

  bool link(std::int64_t line, const kv_event& event);
  void check_size(std::int64_t line, const kv_event& event);
  void emit(const pending& p);
  void add_notes();

  scanner& in_;
  trace_builder& out_;
  std::vector<std::int32_t> parent_;                    // by number of the block
  std::vector<pending> requests_;                       // in the order in which they started
  std::unordered_map<std::int32_t, std::size_t> open_;  // last block -> request
  std::map<std::int64_t, std::int64_t> last_time_;      // by rank
  std::vector<std::int32_t> path_;
  std::int64_t block_tokens_ = 0, time_us_ = 0, next_sequence_ = -1, missing_batches_ = 0;
  std::int64_t events_ = 0, stored_ = 0, orphans_ = 0, elsewhere_ = 0, other_groups_ = 0;
};

}  // namespace kvcache::cli
