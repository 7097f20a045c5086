// SPDX-License-Identifier: Apache-2.0
#pragma once

// A request trace in memory, whatever file it came from: when each request came, how long it was, and which
// blocks of text it consists of. A block's id stands for its content; that two blocks are the same prefix
// follows from the ids before them, so ids that are chained in the file and ids that are not mean the same
// here.
//
//   requests[r] ──first,count──► units[first .. first+count)     ids 0..distinct-1, in order of first
//   appearance

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvcache::cli {

/// One request of a trace.
struct request {
  std::int64_t time_us = 0;        ///< since the first request; never falls from one request to the next
  std::int64_t input_tokens = 0;   ///< length of the prompt; what the blocks hold where the file does not say
  std::int64_t output_tokens = 0;  ///< 0 where the file does not say
  std::int64_t first = 0;          ///< its blocks in `trace::units`
  std::int32_t count = 0;          ///< how many; 0 for a prompt shorter than a block
  std::int32_t session = -1;       ///< from 0 in order of first appearance; -1 where the file does not say
};

/// A whole trace, or several read one after the other.
struct trace {
  std::string format;               ///< name of the file format: "mooncake", "weka", "tokens", ...
  std::int32_t block_tokens = 0;    ///< tokens of a full block; 0 where the file holds lengths only
  std::int32_t distinct = 0;        ///< different ids in `units`
  std::int64_t repeated_ids = 0;    ///< ids that occur twice inside one request
  std::vector<request> requests;    ///< in file order
  std::vector<std::int32_t> units;  ///< block ids of all requests, each in [0, distinct)
  std::vector<std::string> notes;   ///< what a reader should know of how it was read, one sentence each

  /// The block ids of one request.
  std::span<const std::int32_t> units_of(const request& r) const {
    return std::span(units).subspan(static_cast<std::size_t>(r.first), static_cast<std::size_t>(r.count));
  }
};

}  // namespace kvcache::cli
