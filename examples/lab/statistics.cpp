// SPDX-License-Identifier: Apache-2.0
#include "statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sampling.hpp"

namespace lab {

namespace {

// In order; ties go to the lower token. One look at most logits: few are among the largest so far.
std::vector<engine::token_id> five_largest(std::span<const float> logits) {
  constexpr std::size_t most = 5;
  std::vector<engine::token_id> out;
  const auto at = [&](engine::token_id id) { return logits[static_cast<std::size_t>(id)]; };
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (out.size() == most && !(logits[i] > at(out.back()))) continue;
    if (out.size() == most) out.pop_back();
    const auto smaller = [&](engine::token_id id) { return at(id) < logits[i]; };
    out.insert(std::find_if(out.begin(), out.end(), smaller), static_cast<engine::token_id>(i));
  }
  return out;
}

}  // namespace

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
  return compare_rows(full, engine::log_sum_exp(full), other, engine::log_sum_exp(other));
}

row_difference compare_rows(std::span<const float> full, double sum_full, std::span<const float> other,
                            double sum_other) {
  row_difference out;
  for (std::size_t i = 0; i < full.size(); ++i) {
    const double log_p = full[i] - sum_full;
    out.kl += std::exp(log_p) * (log_p - (other[i] - sum_other));
  }
  out.kl = std::max(out.kl, 0.0);
  const auto a = five_largest(full);
  const auto b = five_largest(other);
  out.top1 = a.front() == b.front();
  for (const engine::token_id id : a) {
    if (std::find(b.begin(), b.end(), id) != b.end()) out.top5 += 1.0 / static_cast<double>(a.size());
  }
  return out;
}

}  // namespace lab
