// SPDX-License-Identifier: Apache-2.0
#pragma once

// Everything that one call of `kvcache replay` finds out: a row for each policy, capacity, time and route,
// the optimum beside them, the curve, and what follows from it in words. Numbers only; the document, the text
// and the report are made of it.
//
//   trace ──> traffic ──> run_study ──> study ──┬─> to_document ──> JSON, text
//                                               └─> report/: SVG, HTML

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "output.hpp"
#include "replay/curve.hpp"
#include "replay/replay.hpp"
#include "replay/summary.hpp"
#include "trace/read.hpp"
#include "units.hpp"

namespace kvcache::cli {

/// What a token of a model takes: turns bytes into blocks and back.
struct token_size {
  std::string model;
  std::string kv;
  std::int64_t bytes = 0;  ///< of one token in all layers
};

/// What to find out.
struct study_request {
  std::vector<std::string> files;
  std::vector<std::string> policies{"lru"};
  std::vector<std::string> capacities;  ///< as written; none: chosen from the trace
  std::vector<double> ttls;             ///< seconds, for timed policies whose text has none
  std::int32_t workers = 1;
  std::vector<route> routes{route::round_robin};
  std::uint64_t seed = 0;
  bool optimum = true;  ///< a row of belady for each capacity
  bool curve = false;   ///< the curve is asked for, not only where it bends
  double sample = 1;    ///< share of the blocks that the curve looks at
  read_options reading;
  std::optional<token_size> size;
  std::string command;  ///< the command line, for the report
};

/// One run and what it lost.
struct study_row {
  replay_result result;
  bool asked = true;           ///< else the optimum beside the rows that were
  hit_count lost_to_capacity;  ///< as in summary.hpp
  hit_count lost_to_routing;   ///< as in summary.hpp
  std::int64_t optimum_tokens =
      -1;  ///< hit_tokens of one worker under belady with the same room; -1: unknown

  /// Not under a policy that knows the future.
  bool online = true;
  std::vector<std::int64_t> windows;  ///< hit tokens by time, as study::windows
};

/// A trace in numbers.
struct trace_facts {
  std::string format;
  std::int64_t requests = 0, blocks = 0, unique_blocks = 0, tokens = 0;
  std::int64_t longest = 0;  ///< blocks of the longest request
  std::int32_t block_tokens = 0;
  double seconds = 0;         ///< from the first request to the last
  std::int64_t sessions = 0;  ///< 0: the trace does not say
};

/// What was found out.
struct study {
  study_request asked;
  trace_facts source;
  std::vector<study_row> rows;  ///< policy by policy, of each all capacities, of each all times, then routes
  loss_summary summary;         ///< of the workload: ceiling and what is shared
  hit_curve curve;
  curve_point knee;
  std::vector<std::int64_t> windows;  ///< prompt tokens in equal parts of the trace's time, or of its
                                      ///< requests where it has none
  std::vector<std::string> findings;  ///< sentences: what is lost where
  std::vector<std::string> advice;    ///< sentences: what to do
  std::vector<std::string> notes;     ///< of the reader and of the command
};

/// Runs it. Fails: error (usage) naming option and value where a capacity does not suit the trace, and as
/// `replay`.
study run_study(const traffic& of, study_request request, progress& meter);

/// Writes findings and advice. Requires: everything else is there.
void conclude(study& s);

/// The document, schema kvcache.replay.v1 (docs/replay.md names every field).
json to_document(const study& s);
/// The document for people.
std::string replay_text(const json& document);

/// The share of tokens, in percent.
inline double percent_of(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

/// "4M", "1.5k", "300": k is 2^10 tokens, M 2^20.
std::string tokens_text(std::int64_t tokens);
/// "8,192 blocks (4M tokens)", with a model "8,192 blocks (4M tokens, 0.50 GiB)", "no bound".
std::string room_text(const study& s, std::int64_t capacity_blocks);
/// The policy of a row with its time, and its route where there are several: "ttl 60 s with random".
std::string row_name(const study& s, const study_row& row);

}  // namespace kvcache::cli
