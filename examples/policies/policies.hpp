// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the examples of retention policies have in common: options, a text to read, sessions on one cache, and
// figures about them. A session (engine/session.hpp) is one text under one policy.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "example.hpp"
#include "session.hpp"

namespace policies {

using engine::token_id;

struct options {
  engine::common_options common;
  std::string text_file;
};

/// The common options without --cache, since a session is always paged; with `text`, also --text-file.
void add_options(engine::command_line& line, options& o, bool text);

/// An option for the policy the example is about. Checked at once: wrong text names key and allowed values.
void add_policy_option(engine::command_line& line, std::string& policy);

struct world {
  std::unique_ptr<engine::loaded> parts;
  std::vector<token_id> text;  ///< of --text-file
  std::unique_ptr<engine::session_cache> cache;

  engine::llama_model& model() const { return *parts->model; }
  const engine::kv_shape& shape() const { return model().shape().kv; }
};

/// Loads the model and, if there is a text, its first `tokens` tokens; opens a cache for `sessions` texts of
/// at most `longest` tokens. Fails: bad_input too_short, naming --text-file.
engine::result<world> open_world(const options& o, int tokens, int longest, int sessions);

/// A session under a policy given as text.
engine::result<engine::session> begin(const world& w, const std::string& policy,
                                      const engine::session_options& how = {});

/// The same prompt under another policy, which acts at once. Requires: `prompt` remembers its queries.
engine::result<engine::session> compressed(const engine::session& prompt, const std::string& policy);

/// A pass key hidden in filler text, in chat form, and the question for it. From the lab's generators.
struct hidden_key {
  std::vector<token_id> context, question, digits;
  std::vector<int> told;  ///< positions of the sentences that tell the key
};
hidden_key make_hidden_key(const engine::tokenizer& text, int trial);

/// How well the digits of an answer are known.
struct answer {
  double nll = 0;      ///< mean over the digits, in nats
  bool right = false;  ///< every digit is the most likely token
};

/// Asks a fork of `held`. The question's last row predicts the first digit; with `skip_first` that one is not
/// scored. Requires: skip_first if the question is empty.
engine::result<answer> ask(const world& w, const engine::session& held, std::span<const token_id> question,
                           std::span<const token_id> digits, bool skip_first = false);

/// Negative log-likelihood of `token` by a row of logits, in nats.
double nll_of(std::span<const float> row, token_id token);

/// Divergence of a row of logits from the right one, in nats.
double kl_of(std::span<const float> right, std::span<const float> row);

/// Feeds `tokens` to a fork of `s` and compares the rows with `right`, those of the full cache.
engine::result<engine::damage> read_on(const world& w, const engine::session& s,
                                       std::span<const token_id> tokens, std::span<const float> right);

/// Where in the text the kept tokens lie: a line for every three layers, 64 columns for the text, and in each
/// place the share of (layer, head, token) that is still held, from ' ' for none to '@' for all.
std::string drawing_of(const world& w, const engine::session& s);

/// Whether two kv heads of a layer hold different tokens.
bool heads_differ(const world& w, const engine::session& s);

/// "12.3 MiB"
std::string mebibytes(std::size_t bytes);

}  // namespace policies
