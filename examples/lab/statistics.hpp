// SPDX-License-Identifier: Apache-2.0
#pragma once

// How sure a figure is, and how far two distributions are apart.

#include <cstdint>
#include <span>
#include <vector>

#include "kv_backend.hpp"

namespace lab {

/// A figure and the bounds it lies between with 95 % confidence.
struct interval {
  double value = 0;
  double low = 0;
  double high = 0;
};

/// Share of successes. Paper: Wilson, Probable Inference, JASA 22 (1927). No trials: 0 to 1.
interval wilson(int successes, int trials);

/// Mean of `values`; bounds from `resamples` bootstrap samples of runs of `run` neighbours, since neighbours
/// in one text are alike. One run gives no bounds: low and high are then not-a-number. Seeded.
interval bootstrap_mean(std::span<const double> values, std::size_t run = 1, std::uint64_t seed = 1,
                        int resamples = 2000);

double mean(std::span<const double> values);

/// The value that `share` of the values do not exceed (nearest rank). Requires: not empty, 0 < share <= 1.
double quantile(std::vector<double> values, double share);

/// What one row of logits says, and how it differs from the row of the full cache. Sums in double.
struct row_difference {
  double kl = 0;      ///< from the full cache's distribution to this one, in nats; not negative
  bool top1 = false;  ///< same most likely token
  double top5 = 0;    ///< share of the full cache's five most likely tokens that are among this one's
};

row_difference compare_rows(std::span<const float> full, std::span<const float> other);

/// The same with the rows' log-sum-exps, which whoever compares many rows knows.
row_difference compare_rows(std::span<const float> full, double sum_full, std::span<const float> other,
                            double sum_other);

}  // namespace lab
