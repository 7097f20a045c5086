// SPDX-License-Identifier: Apache-2.0
#pragma once

// What decides a figure. Two figures may be compared only if all of it is equal; a result that is kept is
// found again by all of it.

#include <map>
#include <string>
#include <vector>

#include "program.hpp"
#include "score.hpp"

namespace lab {

/// What the command line chose.
struct lab_options {
  engine::common_options common;
  std::vector<std::string> text_files;  ///< one text: their tokens, one after the other
  std::string user_file;
  int trials = 10;
  std::uint64_t seed = 0;
  bool question_inside = false;
  mode how = mode::oneshot;
  int score = 256;
  std::vector<int> starts;  ///< of trials cut out of the text; empty: spread over it
  int batch = 1;
  int about = 0;  ///< tokens of context the user asks about; 0: not said
};

/// Model, texts and what is known of them.
struct laboratory {
  std::unique_ptr<engine::loaded> parts;
  std::string model_hash;
  std::string text_hash, user_hash;
  std::vector<token_id> text;
  std::string user_tasks;
};

/// Loads the model and reads the files the options name.
engine::result<std::unique_ptr<laboratory>> open_laboratory(const lab_options& options);

engine::result<std::vector<trial>> make_trials(const lab_options& options, const laboratory& lab,
                                               const std::string& task, int length);

/// Everything but the policy.
engine::json settings_of(const lab_options& options, const laboratory& lab, const std::string& task,
                         int length);

/// Name of the first setting in which the two differ, and both values; empty if none does.
struct setting_difference {
  std::string name, a, b;
};
setting_difference first_difference(const engine::json& a, const engine::json& b);

/// Scores by a hash of this program, all settings, policy, control and trial; in a file, one JSON object per
/// line.
class result_store {
 public:
  /// Reads what the file has; it need not exist. An incomplete last line, left by a run that was stopped, is
  /// cut off. Fails: bad_input for a damaged line, cannot_open.
  static engine::result<result_store> open(const std::string& path);
  /// In memory only.
  result_store() = default;

  static std::string key_of(const engine::json& settings, const std::string& policy,
                            const std::string& control, const std::string& trial);
  const trial_score* find(const std::string& key) const;
  /// Adds and writes at once.
  engine::status add(const std::string& key, const engine::json& about, const trial_score& score);
  std::size_t size() const { return scores_.size(); }

 private:
  std::string path_;
  std::map<std::string, trial_score> scores_;
};

}  // namespace lab
