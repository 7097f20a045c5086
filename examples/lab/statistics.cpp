// SPDX-License-Identifier: Apache-2.0
#include "statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sampling.hpp"

namespace lab {

interval wilson(int successes, int trials) {
  if (trials == 0) return {0, 0, 1};
  constexpr double z = 1.959963984540054;
  const double n = trials;
  const double share = successes / n;
  const double scale = 1 + z * z / n;
  const double middle = (share + z * z / (2 * n)) / scale;
  const double half = z / scale * std::sqrt(share * (1 - share) / n + z * z / (4 * n * n));
  // Where all or none succeed one bound is exact; rounding must not cross it.
  return {share, successes == 0 ? 0 : std::max(0.0, middle - half),
          successes == trials ? 1 : std::min(1.0, middle + half)};
}

double mean(std::span<const double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double quantile(std::vector<double> values, double share) {
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  const auto at = std::min(values.size(), static_cast<std::size_t>(std::max(1.0, rank))) - 1;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

interval bootstrap_mean(std::span<const double> values, std::size_t run, std::uint64_t seed, int resamples) {
  constexpr double nothing = std::numeric_limits<double>::quiet_NaN();
  interval out{mean(values), nothing, nothing};
  if (values.size() < 2 * run) return out;
  // Runs begin anywhere and go on from the front: every value is drawn as often, so the mean is not biased.
  // Paper: Politis and Romano, A circular block-resampling procedure (1992).
  const std::size_t runs = values.size() / run;
  engine::splitmix64 random(seed);
  std::vector<double> means;
  for (int sample = 0; sample < resamples; ++sample) {
    double sum = 0;
    for (std::size_t i = 0; i < runs; ++i) {
      const auto start = static_cast<std::size_t>(random.next() % values.size());
      for (std::size_t j = 0; j < run; ++j) sum += values[(start + j) % values.size()];
    }
    means.push_back(sum / static_cast<double>(runs * run));
  }
  out.low = quantile(means, 0.025);
  out.high = quantile(std::move(means), 0.975);
  return out;
}

row_difference compare_rows(std::span<const float> full, std::span<const float> other) {
  const double sum_full = engine::log_sum_exp(full);
  const double sum_other = engine::log_sum_exp(other);
  row_difference out;
  for (std::size_t i = 0; i < full.size(); ++i) {
    const double log_p = full[i] - sum_full;
    out.kl += std::exp(log_p) * (log_p - (other[i] - sum_other));
  }
  out.kl = std::max(out.kl, 0.0);
  const auto a = engine::largest(full, 5);
  const auto b = engine::largest(other, 5);
  out.top1 = a.front().first == b.front().first;
  for (const auto& [id, logit] : a) {
    const auto same = [id = id](const auto& candidate) { return candidate.first == id; };
    if (std::any_of(b.begin(), b.end(), same)) out.top5 += 1.0 / static_cast<double>(a.size());
  }
  return out;
}

double negative_log(std::span<const float> logits, engine::token_id target) {
  return engine::log_sum_exp(logits) - double(logits[static_cast<std::size_t>(target)]);
}

}  // namespace lab
