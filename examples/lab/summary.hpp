// SPDX-License-Identifier: Apache-2.0
#pragma once

// From trials to a figure, what it is worth, and whether it may be quoted at all.

#include <span>
#include <string>
#include <vector>

#include "program.hpp"
#include "score.hpp"

namespace lab {

/// All trials of one configuration in one task.
struct summary {
  int trials = 0;          ///< scores: trials times draws
  int correct = 0;         ///< of them
  interval correct_share;  ///< Wilson
  interval tokens;         ///< share of answer tokens that are the most likely ones; bootstrap
  interval nll;            ///< per token; bootstrap
  interval kl;             ///< per row; bootstrap; not-a-number where nothing was compared
  double kl_p99 = 0;
  double top1 = 0;
  double top5 = 0;
  double bytes_held = 0;  ///< mean over the trials, as the next ones
  double bytes_full = 0;
  double bytes_state = 0;
  double values_held = 0;
};

/// `draws`: scores per trial, which lie side by side; a trial counts once, with their mean.
summary summarise(std::span<const trial_score> trials, int draws = 1);
interval figure(const summary& s, measure m);

/// Whether the full cache solves the task, which is what a loss can be seen against.
struct gate {
  bool open = false;
  std::string threshold;  ///< "full cache correct in 8 of 10 (Wilson 0.490 to 0.943), at least 0.80 needed"
};

constexpr double gate_correct = 0.8;  ///< share of trials, or of tokens
constexpr double gate_nats = 1.0;     ///< that the context must be worth, per token

gate check_gate(measure m, const summary& full, const summary& none);

/// How much of what the context is worth is left: 1 as good as the full cache, 0 as bad as no context.
double quality(measure m, const summary& full, const summary& none, const summary& s);

/// Two configurations on the same trials.
struct contrast {
  interval difference;  ///< first minus second, in the measure's unit; paired bootstrap
  /// "better", "worse": the interval does not hold zero. "too few trials": nothing can be said.
  const char* verdict = "no difference shown";
};

/// `b` may have several draws per trial; their mean counts. Fails: bad_input "not_comparable" when the trials
/// are not the same.
engine::result<contrast> compare_trials(measure m, std::span<const trial_score> a,
                                        std::span<const trial_score> b);

/// Divergence by distance from the compression: rows 1-16, 17-64, 65-256 and further.
engine::json by_distance(std::span<const trial_score> trials);

engine::json to_json(const interval& i);
engine::json to_json(const summary& s);
engine::json to_json(const trial_score& s);
engine::result<trial_score> score_from_json(const engine::json& j);

}  // namespace lab
