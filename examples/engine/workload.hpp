// SPDX-License-Identifier: Apache-2.0
#pragma once

// The requests engine_serve is given: one JSON object per line (format: docs/engine.md). A line is not
// trusted; whatever is wrong with it is an error that names file, line, field and value.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler.hpp"
#include "tokenizer.hpp"

namespace engine {

/// One line, checked.
struct workload_line {
  std::int64_t line = 0;  ///< from 1
  std::string id;
  std::int64_t arrival = 0;
  std::vector<chat_message> turns;
  std::vector<std::string> agent;  ///< further user messages, each sent when the one before is answered
  int max_new = 0;
  cache_scope scope;
  int samples = 1;
  sampling how;
};

/// `path` is only used in messages. Blank lines are skipped.
/// Fails: bad_input "not_json", "missing", "unknown_key", "duplicate", "bad_type" or "bad_value".
result<std::vector<workload_line>> parse_workload(std::string_view text, const std::string& path);

/// The lines as tokens in the model's chat form. Fails: bad_input "too_long" when a prompt, or what a
/// conversation may grow to, exceeds `context` tokens; cannot_run when the vocabulary has no chat markers.
result<std::vector<job>> tokenise(std::span<const workload_line> lines, const tokenizer& text, int context,
                                  const std::string& path);

}  // namespace engine
