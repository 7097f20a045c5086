// SPDX-License-Identifier: Apache-2.0
#include "task.hpp"

#include <algorithm>
#include <utility>

#include "generators.hpp"
#include "user_tasks.hpp"

namespace lab {
namespace {

using engine::specials;
using trials_or_error = engine::result<std::vector<trial>>;

constexpr task_info all_tasks[] = {
    {"passkey", measure::correct, true, false, "a key of five digits, from shallow to deep in filler text"},
    {"two_keys", measure::correct, true, false, "two keys, one of them asked for"},
    {"first_turn", measure::correct, true, false,
     "a key told in the first turn of a chat, asked for in the last"},
    {"repeat", measure::tokens, true, true, "a passage, later a part of it again"},
    {"key_values", measure::nll, true, false, "lines 'the code of x is 1234', one asked for"},
    {"induction", measure::nll, true, false, "random tokens, then the same again"},
    {"word_copy", measure::tokens, true, false, "random words, then the same again"},
    {"edits", measure::nll, true, false,
     "a list again with every fourth word replaced: each step needs earlier ones"},
    {"sums", measure::nll, true, false, "running sums: each step needs the one before"},
    {"trace", measure::correct, true, false, "a chain of three variables in filler text"},
    {"frequent", measure::correct, true, false, "the word that occurs most often"},
    {"recall", measure::correct, false, false, "a user's name, city or colour after other turns"},
    {"pattern", measure::correct, false, false, "short prompts with a rule: a control, little to drop"},
    {"kl", measure::kl, true, true, "running text: divergence from the full cache"},
    {"user", measure::correct, false, false, "the user's own trials, from JSONL"},
};

// The rows that predict the answer. Without a question it was compressed too, and the row that predicts the
// first answer token lies in front of the compression.
continuation answered(std::span<const token_id> question, std::span<const token_id> answer) {
  continuation out;
  out.feed.assign(question.begin(), question.end());
  out.feed.insert(out.feed.end(), answer.begin(), answer.end() - 1);
  out.targets.assign(out.feed.size(), unscored);
  const std::size_t first = question.empty() ? 1 : 0;
  const std::size_t row = question.empty() ? 0 : question.size() - 1;
  for (std::size_t i = first; i < answer.size(); ++i) out.targets[row + i - first] = answer[i];
  return out;
}

struct token_parts {
  std::vector<token_id> context, question;
  std::vector<std::vector<token_id>> answers;
  std::size_t right = 0;
};

trial assemble(std::string name, token_parts parts, bool question_inside) {
  if (parts.question.empty()) {
    parts.question.push_back(parts.context.back());
    parts.context.pop_back();
  }
  trial out;
  out.name = std::move(name);
  out.right = parts.right;
  for (const auto& answer : parts.answers) {
    continuation floor = answered(parts.question, answer);
    out.options.push_back(question_inside ? answered({}, answer) : floor);
    // The floor answers for the same tokens.
    if (question_inside) floor.targets[parts.question.size() - 1] = unscored;
    out.without_context.push_back(std::move(floor));
  }
  out.context = std::move(parts.context);
  if (question_inside) out.context.insert(out.context.end(), parts.question.begin(), parts.question.end());
  return out;
}

trial from_text(const engine::tokenizer& text, std::string name, const prompt_text& made, bool inside) {
  token_parts parts;
  parts.context = text.encode(made.context, specials::parse);
  parts.question = text.encode(made.question, specials::parse);
  parts.answers = {text.encode(made.answer, specials::parse)};
  return assemble(std::move(name), std::move(parts), inside);
}

// Sentences of filler that make a pass key prompt of about `length` tokens: measured at five lengths, between
// them in proportion.
int sentences_for(int length) {
  constexpr std::pair<int, int> known[] = {{64, 1},    {256, 17},   {512, 38},
                                           {1024, 84}, {2048, 178}, {4096, 360}};
  const std::pair<int, int>* to = std::begin(known) + 1;
  while (to + 1 != std::end(known) && to->first < length) ++to;
  const auto& [low, fewer] = *(to - 1);
  const auto& [high, more] = *to;
  return std::max(1, fewer + (length - low) * (more - fewer) / (high - low));
}

// 50, 150, ... 950 for ten trials; the middle for one.
int depth_of(int index, int trials) {
  return trials == 1 ? 500 : 50 + 900 * index / (trials - 1);
}

prompt_text filler_prompt(const task_request& r, std::uint64_t seed, int depth) {
  // The second key takes 35 tokens; turns of a chat make sentences longer and begin with 100 tokens.
  const int sentences = r.task == "two_keys"     ? sentences_for(r.length - 35)
                        : r.task == "first_turn" ? std::max(1, (r.length - 100) * 2 / 27)
                                                 : sentences_for(r.length);
  if (r.task == "passkey") return pass_key(seed, sentences, depth, key_style::chat_sp);
  if (r.task == "two_keys") return two_keys(seed, sentences, depth);
  if (r.task == "first_turn") return first_turn(seed, sentences);
  return variable_trace(seed, 2, sentences);
}

prompt_text list_prompt(const task_request& r, std::uint64_t seed) {
  const int length = r.length;
  if (r.task == "key_values") return key_values(seed, std::clamp(length / 13, 2, 64), line_style::plain);
  if (r.task == "word_copy") return word_copy(seed, std::max(2, length * 14 / 15));
  if (r.task == "edits") return edited_copy(seed, std::max(8, length * 6 / 7), 4);
  if (r.task == "sums") return running_sums(seed, std::max(4, length * 7 / 30));
  return frequent_word(seed, std::max(6, length * 2 / 5));
}

prompt_text short_prompt(const task_request& r, std::uint64_t seed, int index) {
  if (r.task == "pattern") return pattern(seed, static_cast<rule>(index % 5));
  return recall(seed, 2 + index % 7, static_cast<fact>(index % 3));
}

trials_or_error generated(const task_request& r, const task_info& info, const engine::tokenizer& text) {
  std::vector<trial> out;
  const bool deep = r.task == "passkey" || r.task == "two_keys";
  const bool filled = deep || r.task == "first_turn" || r.task == "trace";
  for (int i = 0; i < r.trials; ++i) {
    const int length = info.has_length ? r.length : 0;
    const std::uint64_t seed =
        r.seed * 1000003u + 1000u * static_cast<std::uint64_t>(length) + static_cast<std::uint64_t>(i);
    const int depth = depth_of(i, r.trials);
    const prompt_text made = filled            ? filler_prompt(r, seed, depth)
                             : info.has_length ? list_prompt(r, seed)
                                               : short_prompt(r, seed, i);
    std::string name = deep ? "depth " + std::to_string(depth) : "seed " + std::to_string(seed);
    out.push_back(from_text(text, std::move(name), made, r.question_inside));
  }
  return out;
}

trials_or_error induction(const task_request& r) {
  std::vector<trial> out;
  constexpr int given = 8;
  if (r.length < 2 * given)
    return engine::error{engine::failure::usage, "bad_value", "--length", std::to_string(r.length), {}, -1};
  for (int i = 0; i < r.trials; ++i) {
    const std::uint64_t seed =
        r.seed * 1000003u + 1000u * static_cast<std::uint64_t>(r.length) + static_cast<std::uint64_t>(i);
    token_parts parts;
    parts.context = induction_ids(seed, r.length);
    parts.question.assign(parts.context.begin(), parts.context.begin() + given);
    const auto last = std::min<std::ptrdiff_t>(r.length, given + r.score);
    parts.answers = {{parts.context.begin() + given, parts.context.begin() + last}};
    out.push_back(assemble("seed " + std::to_string(seed), std::move(parts), r.question_inside));
  }
  return out;
}

engine::error too_short(const task_request& r, int needed) {
  engine::error e = engine::bad_input(
      "too_short", "text.tokens", std::to_string(r.text.size()) + ", " + std::to_string(needed) + " needed");
  e.file = r.text_name;
  return e;
}

int cut_trials(const task_request& r) {
  return r.starts.empty() ? r.trials : static_cast<int>(r.starts.size());
}

// Text that trials of `span` tokens need.
int needed_tokens(const task_request& r, int span) {
  return span + (r.starts.empty() ? 0 : *std::max_element(r.starts.begin(), r.starts.end()));
}

// Where trial `index` begins, so that all of them cover the text evenly. `span`: tokens of one.
int start_of(const task_request& r, int index, int span) {
  if (!r.starts.empty()) return r.starts[static_cast<std::size_t>(index)];
  const auto room = static_cast<std::int64_t>(r.text.size()) - span;
  return r.trials == 1 ? 0 : static_cast<int>(room * index / (r.trials - 1));
}

// A passage, then a part of it again: the first 16 tokens of the part are given. Where the passage is longer
// than what is scored, the part begins deeper from trial to trial.
trials_or_error repeated(const task_request& r) {
  constexpr int given = 16;
  const int part = std::min(r.length, given + r.score);
  if (r.length < 2 * given)
    return engine::error{engine::failure::usage, "bad_value", "--length", std::to_string(r.length), {}, -1};
  const int needed = needed_tokens(r, r.length);
  if (static_cast<std::int64_t>(r.text.size()) < needed) return too_short(r, needed);
  std::vector<trial> out;
  const int trials = cut_trials(r);
  for (int i = 0; i < trials; ++i) {
    const auto passage = r.text.subspan(static_cast<std::size_t>(start_of(r, i, r.length)),
                                        static_cast<std::size_t>(r.length));
    const int deep = trials == 1 ? 0 : (r.length - part) * i / (trials - 1);
    const auto again = passage.subspan(static_cast<std::size_t>(deep), static_cast<std::size_t>(part));
    token_parts parts;
    parts.context.assign(passage.begin(), passage.end());
    parts.question.assign(again.begin(), again.begin() + given);
    parts.answers = {{again.begin() + given, again.end()}};
    out.push_back(assemble("passage " + std::to_string(i), std::move(parts), r.question_inside));
  }
  return out;
}

// Prompt, then the text that follows it: each of its rows is compared, and predicts the next token.
trials_or_error running_text(const task_request& r) {
  const int span = r.length + r.score;
  const int needed = needed_tokens(r, span);
  const int trials = cut_trials(r);
  if (static_cast<std::int64_t>(r.text.size()) < needed) return too_short(r, needed);
  std::vector<trial> out;
  for (int i = 0; i < trials; ++i) {
    const auto start = static_cast<std::size_t>(start_of(r, i, span));
    const auto prompt = r.text.subspan(start, static_cast<std::size_t>(r.length));
    const auto rest = r.text.subspan(start + static_cast<std::size_t>(r.length));
    continuation next;
    next.feed.assign(rest.begin(), rest.begin() + r.score);
    for (std::size_t row = 0; row < next.feed.size(); ++row)
      next.targets.push_back(row + 1 < rest.size() ? rest[row + 1] : unscored);
    trial& made = out.emplace_back();
    made.name = "start " + std::to_string(start);
    made.context.assign(prompt.begin(), prompt.end());
    made.without_context = {next};
    made.options = {std::move(next)};
  }
  return out;
}

}  // namespace

std::string_view name_of(measure m) {
  constexpr std::string_view names[] = {"correct", "tokens", "nll", "kl"};
  return names[static_cast<std::size_t>(m)];
}

std::span<const task_info> tasks() {
  return all_tasks;
}

const task_info* find_task(std::string_view name) {
  const auto same = [name](const task_info& task) { return task.name == name; };
  const auto at = std::find_if(std::begin(all_tasks), std::end(all_tasks), same);
  return at == std::end(all_tasks) ? nullptr : at;
}

trials_or_error make_trials(const task_request& r, const engine::tokenizer& text) {
  const task_info* info = find_task(r.task);
  if (info == nullptr) return engine::error{engine::failure::usage, "bad_value", "--task", r.task, {}, -1};
  if (info->needs_text && r.text.empty())
    return engine::error{
        engine::failure::usage, "missing", "--text-file", r.task + " cuts its trials out of a text", {}, -1};
  if (r.task == "kl") return running_text(r);
  if (r.task == "repeat") return repeated(r);
  if (r.task == "induction") return induction(r);
  if (r.task == "user") {
    auto own = read_user_tasks(r.user_tasks, text);
    if (!own) return own.error();
    std::vector<trial> out;
    for (user_task& task : *own) {
      token_parts parts{std::move(task.prompt), std::move(task.question), std::move(task.options),
                        task.right};
      out.push_back(assemble("line " + std::to_string(task.line), std::move(parts), r.question_inside));
    }
    return out;
  }
  return generated(r, *info, text);
}

}  // namespace lab
