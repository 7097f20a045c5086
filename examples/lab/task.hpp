// SPDX-License-Identifier: Apache-2.0
#pragma once

// What is asked of a cache. A task makes trials; a trial is tokens in two runs, with the compression between:
//
//   context            | feed                          rows of feed   0 1 2 3 4 5
//   the policy acts ---^                               targets        - - 7 3 9 2     (-: not scored)
//
// Only rows computed behind the compression count: what the full cache still saw proves nothing.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"
#include "tokenizer.hpp"

namespace lab {

using engine::token_id;

constexpr token_id unscored = -1;

/// Tokens behind the compression, and what each of their rows should predict.
struct continuation {
  std::vector<token_id> feed;
  std::vector<token_id> targets;  ///< [feed]; `unscored`: any
};

struct trial {
  std::string name;  ///< what sets it apart: "depth 350", "line 3"
  std::vector<token_id> context;
  /// One, or the options of a forced choice. The most likely one is chosen, by the sum over its targets.
  std::vector<continuation> options;
  std::size_t right = 0;  ///< which option is right
  /// What to feed for the floor that has no context: the question alone.
  std::vector<continuation> without_context;
};

/// The figure a task is judged by. The others are reported beside it.
enum class measure {
  correct,  ///< share of trials in which every answer token is the most likely one, or the right option is
  tokens,   ///< share of answer tokens that are the most likely one
  nll,      ///< negative log-likelihood of the answer, mean over its tokens, in nats
  kl,       ///< divergence from the full cache, mean over the rows, in nats
};
std::string_view name_of(measure m);
/// Whether more is better.
constexpr bool rises(measure m) {
  return m == measure::correct || m == measure::tokens;
}

struct task_info {
  std::string_view name;
  measure judged_by;
  bool has_length;  ///< false: the prompts are as long as they are
  bool needs_text;  ///< cuts its trials out of a text
  std::string_view what;
};

/// All tasks, most telling first.
std::span<const task_info> tasks();
/// Null if there is none of that name.
const task_info* find_task(std::string_view name);

struct task_request {
  std::string task;
  int length = 512;  ///< tokens of the prompt, roughly: whole sentences
  int trials = 10;
  std::uint64_t seed = 0;
  bool question_inside = false;    ///< compressed with the context, or fed behind the compression
  std::span<const token_id> text;  ///< for tasks that need one
  std::string text_name = "--text-file";
  int score = 256;          ///< rows that are scored at most, where a text goes on
  std::vector<int> starts;  ///< first token of each trial cut out of a text; empty: `trials`, spread over it
  std::string user_tasks;   ///< content of the file with the user's own trials
};

/// Fails: usage for a task or a length that does not go, bad_input for a text that is too short or a line of
/// the user's file that is wrong.
engine::result<std::vector<trial>> make_trials(const task_request& request, const engine::tokenizer& text);

}  // namespace lab
