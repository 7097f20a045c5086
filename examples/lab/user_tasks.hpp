// SPDX-License-Identifier: Apache-2.0
#pragma once

// A user's own trials. One JSON object per line; blank lines are skipped, unknown keys refused:
//
//   {"prompt": "...", "answer": "..."}                                judged by likelihood
//   {"prompt": "...", "options": ["...", "..."], "right": 1}          forced choice; right counts from 0
//   "question": "..."    optional: behind the prompt, fed after the compression
//   "chat": true         optional: the markers of the chat form inside the texts stand for their tokens

#include <string_view>
#include <vector>

#include "error.hpp"
#include "tokenizer.hpp"

namespace lab {

struct user_task {
  int line = 0;
  std::vector<engine::token_id> prompt;
  std::vector<engine::token_id> question;
  std::vector<std::vector<engine::token_id>> options;  ///< one: an answer
  std::size_t right = 0;
};

/// Fails: bad_input naming line and field: "not_json", "missing", "unknown_key", "bad_type", "bad_value".
engine::result<std::vector<user_task>> read_user_tasks(std::string_view jsonl, const engine::tokenizer& text);

}  // namespace lab
