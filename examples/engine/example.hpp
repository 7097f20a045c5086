// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the example programs have in common. Each one makes claims about the library, checks them in the run
// that prints them, and ends with one line that states the result:
//
//   figures ── report ──> --json: one document        exit code 0: every claim held
//   claims  ──┘      └──> else: text, last line       exit code 1: one did not, or the program could not run

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "program.hpp"
#include "runner.hpp"

namespace engine {

/// Text for a person, figures for a program, and the claims that were checked.
class report {
 public:
  explicit report(const common_options& options) : options_(&options) {}

  /// What --json prints besides the claims.
  json figures = json::object();

  /// As printf; nothing under --json.
  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) const;

  /// Records whether a claim holds. `what` is a sentence that is true when it does.
  void claim(const std::string& what, bool holds);

  bool all_hold() const { return failed_.empty(); }

  /// Prints the last line, or which claim failed, and makes the document.
  json finish(const std::string& name, const std::string& last_line) const;

 private:
  const common_options* options_;
  json claims_ = json::array();
  std::vector<std::string> failed_;
};

/// run_program for an example. `body` returns the line that states the result.
int run_example(command_line& line, int argc, char** argv, const common_options& options,
                const std::function<result<std::string>(report&)>& body);

/// A generation, and one number that stands for all logits behind it (see chain() in scheduler.hpp): if it is
/// equal, every logit of every step has the same bits.
struct recorded {
  generation made;
  std::uint64_t bits = 0;

  bool same_answer(const recorded& other) const { return made.ids == other.made.ids && bits == other.bits; }
};

/// generate(), silently. Goes on after an end token, so that all answers have the same length.
result<recorded> record(loaded& parts, cache_kind& cache, std::span<const token_id> prompt,
                        const cache_scope& scope, int max_new, int chunk, const sampling& how = {});

/// One step in which each of several sequences takes one token. Row i of logits predicts what follows
/// tokens[i].
status advance(llama_model& model, cache_kind& cache, std::span<const int> slots,
               std::span<const token_id> tokens, std::vector<float>& logits);

/// Row `row` of a step's logits.
std::span<const float> row_of(std::span<const float> logits, const llama_model& model, std::size_t row);

/// How far logits are from those they should be.
struct damage {
  double kl = 0;           ///< mean over the rows, in nats, from the right distribution to this one
  double nll = 0;          ///< mean negative log-likelihood of the text, by this one
  double same_choice = 0;  ///< share of rows with the same most likely token
  double difference = 0;   ///< largest of a logit
};

/// right, got: [text][vocabulary], row i predicts text[i + 1]. Requires: at least two rows.
damage compare(const llama_model& model, std::span<const float> right, std::span<const float> got,
               std::span<const token_id> text);

/// The middle value; the lower one of an even number. Requires: not empty.
double median(std::vector<double> values);

/// As printf, into a string.
[[gnu::format(printf, 1, 2)]] std::string formatted(const char* format, ...);

/// 12,345
std::string thousands(std::int64_t n);

/// The text on one line, at most `most` bytes of it.
std::string one_line(std::string text, std::size_t most = 72);

}  // namespace engine
