// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every policy in every task at every length, with its controls:
//
//   full     the whole cache: what can be reached          none     the question alone: what is known anyway
//   random   as many bytes as the policy, by lot, thrice    window   as many bytes as the policy, the last
//
// Trials are the unit of work. What a results file has already is not computed again.

#include <chrono>
#include <string>
#include <vector>

#include "settings.hpp"
#include "summary.hpp"

namespace lab {

struct matrix_plan {
  std::vector<std::string> policies;
  std::vector<std::string> tasks;
  std::vector<int> lengths;
  bool controls = true;  ///< random and window, which cost as much as the policies
};

/// One configuration in one task at one length.
struct matrix_row {
  std::string policy;   ///< as text; of a control, the policy it stands beside; empty for full and none
  std::string control;  ///< "full", "none", "random", "window"; empty: the policy itself
  int draws = 1;        ///< scores per trial: more than one lot
  std::vector<trial_score> trials;  ///< [trials][draws]
};

/// Lots per trial of the random control. One alone may be lucky.
constexpr int random_draws = 3;

/// One task at one length.
struct matrix_group {
  std::string task;
  int length = 0;
  engine::json settings;
  int longest = 0;               ///< tokens of context of the longest trial
  int shortest = 0;              ///< and of the shortest
  std::vector<matrix_row> rows;  ///< full, none, then each policy and its controls

  const matrix_row* find(const std::string& policy, const std::string& control) const;
};

/// Says on stderr how far the work is, about once a second, and how long the rest will take.
class progress {
 public:
  /// `total`: work to do, in any unit.
  explicit progress(double total) : total_(total), start_(clock::now()), last_(start_) {}
  void add(double work, const std::string& what);

 private:
  using clock = std::chrono::steady_clock;
  double total_;
  double done_ = 0;
  clock::time_point start_, last_;
};

/// Runs what `store` does not have. Fails: as the bench, make_trials and the store.
engine::result<std::vector<matrix_group>> run_matrix(const lab_options& options, const laboratory& lab,
                                                     const matrix_plan& plan, bench& where,
                                                     result_store& store);

/// The control's policy text for a policy that holds `bytes`, where one token of the full cache takes
/// `token_bytes`. Blocks of `block` tokens are whole: the nearest number of them.
std::string window_of(std::size_t bytes, double token_bytes, int block);
std::string random_of(std::size_t bytes, double token_bytes, int block, std::uint64_t seed);

}  // namespace lab
