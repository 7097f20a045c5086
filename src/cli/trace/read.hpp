// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reading request traces. The format is recognised by content, never by name: Mooncake-style JSON lines, raw
// sessions of kv-cache-tester ("weka"), the Azure CSV, the event log of Tair's cache manager, token ids, and
// KV events as vLLM publishes them; each plain or packed with zstd. docs/traces.md says what each format
// holds. A file streams through a buffer of fixed size; what stays in memory is the trace itself.

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "trace/trace.hpp"

namespace kvcache::cli {

/// Whether equal ids in two files mean equal blocks.
enum class id_scope {
  automatic,  ///< as the format says: ids of a weka session are its own, all others are shared
  shared,     ///< equal ids are equal blocks, whatever file they are in
  per_file,   ///< files share nothing
};

/// How to read a trace where the file leaves it open.
struct read_options {
  std::int32_t block_tokens = 0;  ///< tokens of a block; 0: what the file says, else what its lengths tell
  id_scope ids = id_scope::automatic;
  std::int64_t session_gap_us = 0;        ///< the i-th file of session-relative times starts at i times this
  std::int64_t store_gap_us = 1'000'000;  ///< KV events: stores of one chain closer than this are one request
};

/// How far reading has come.
struct read_progress {
  std::int64_t bytes = 0;     ///< read from all files so far, as they lie on disk
  std::int64_t total = 0;     ///< size of all files; 0 where that is unknown (a pipe)
  std::int64_t requests = 0;  ///< found so far
};

/// Called now and then while a trace is read, about every megabyte.
using progress_callback = std::function<void(const read_progress&)>;

/// Reads one trace from all files, merged by time; ties keep the order of the files, then of their lines.
/// Fails: throws `error` (bad_input) with file, line, field and value; there is never half a trace.
trace read_trace(std::span<const std::string> paths, const read_options& options = {},
                 const progress_callback& progress = {});

/// The same, of bytes in memory, packed or not. `name` stands for the file in errors.
trace read_trace_bytes(std::span<const char> bytes, const std::string& name,
                       const read_options& options = {});

}  // namespace kvcache::cli
