// SPDX-License-Identifier: Apache-2.0
#pragma once

// One trial, put to several cache configurations. The prompt is computed once by the full cache and forked:
//
//   context ──> full ──fork──> feed ──> rows       right by definition: the others are compared with these
//                 └────fork──> compress ──> feed ──> rows      every one-shot policy
//   context ──> stream policy ──> feed ──> rows                in force from the first token: its own run

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "statistics.hpp"
#include "task.hpp"

namespace lab {

/// When a policy acts.
enum class mode {
  oneshot,  ///< once, when the full cache has computed the context
  stream,   ///< from the first token on
};
std::string_view name_of(mode m);

/// One text in a cache, as far as the lab sees it.
class subject {
 public:
  virtual ~subject() = default;

  /// Appends tokens. rows: [tokens][vocabulary], what each of them predicts; null: not wanted.
  virtual engine::status feed(std::span<const token_id> tokens, std::vector<float>* rows) = 0;
  /// The context is complete: a one-shot policy acts.
  virtual engine::status compress() = 0;
  /// A second text with the same content, which goes on under `policy`.
  virtual engine::result<std::unique_ptr<subject>> fork(const std::string& policy) = 0;

  virtual std::size_t bytes_held() const = 0;   ///< by the text, at the moment
  virtual std::size_t bytes_full() const = 0;   ///< the full cache's for a text of this length
  virtual std::size_t values_held() const = 0;  ///< numbers stored, keys and values of all heads and layers
  virtual std::size_t bytes_state() const = 0;  ///< what the policy itself has to remember from now on
};

/// Where subjects come from.
class bench {
 public:
  virtual ~bench() = default;
  virtual int vocabulary() const = 0;
  /// Numbers of one token over all layers, keys and values.
  virtual std::size_t values_per_token() const = 0;
  /// Bytes of one token in the full cache.
  virtual std::size_t bytes_per_token() const = 0;
  /// Tokens of a block: what is held is held in these.
  virtual int block_tokens() const { return 1; }
  /// Whether a text of the full cache goes on under `policy`; if not, it is computed anew.
  virtual bool forks(const std::string&) const { return true; }
  /// Bits of a number in a packed block, exact tokens included; 0 where nothing is packed.
  virtual double sealed_bits(const std::string&) const { return 0; }
  /// Calls body(0) ... body(n - 1), in any order, perhaps at the same time.
  virtual void each(int n, const std::function<void(int)>& body) {
    for (int i = 0; i < n; ++i) body(i);
  }
  /// An empty text. Fails: usage, naming the key, for a policy that is no good.
  virtual engine::result<std::unique_ptr<subject>> open(const std::string& policy, mode how,
                                                        int max_tokens) = 0;
};

/// What one trial showed of one configuration.
struct trial_score {
  std::string trial;
  bool correct = false;  ///< the right option, or every scored answer token, is the most likely one
  int tokens = 0;        ///< of the right option that were scored
  int tokens_right = 0;
  std::vector<double> right;   ///< of each scored token, 1: it is the most likely one
  std::vector<double> nll;     ///< of each scored token of the right option
  std::vector<double> kl;      ///< from the full cache, for each row of the right option
  std::vector<double> top1;    ///< 1: same most likely token
  std::vector<double> top5;    ///< share of the five most likely ones that are the same
  std::size_t bytes_held = 0;  ///< when the context was complete and the policy had acted
  std::size_t bytes_full = 0;
  std::size_t bytes_state = 0;  ///< of the policy, besides
  std::size_t values_held = 0;
};

/// Rows for each option of a trial: [option][row][vocabulary].
struct option_rows {
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<double>> sums;  ///< [option][row] log-sum-exp
};

/// Scores options whose rows are known. `full`: rows to compare with, or null.
trial_score score_rows(const trial& t, std::span<const continuation> options, const option_rows& rows,
                       const option_rows* full, bench& where);

/// Puts one trial to configurations, one after the other.
class trial_run {
 public:
  trial_run(bench& where, const trial& t) : bench_(where), trial_(t) {}

  /// The full cache.
  engine::result<trial_score> full();
  /// No context: the question alone. Requires: full() was called.
  engine::result<trial_score> none();
  /// Requires: full() was called.
  engine::result<trial_score> policy(const std::string& text, mode how);

 private:
  engine::result<option_rows> feed_options(subject& held, std::span<const continuation> options);
  engine::result<trial_score> go_on(subject& held);
  int max_tokens() const;

  bench& bench_;
  const trial& trial_;
  std::unique_ptr<subject> prefilled_;  ///< full cache, holds the context
  option_rows full_rows_;
};

}  // namespace lab
