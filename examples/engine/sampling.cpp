// SPDX-License-Identifier: Apache-2.0
#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace engine {

token_id greedy(std::span<const float> logits) {
  return static_cast<token_id>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

token_id sample(std::span<const float> logits, double temperature, splitmix64& random) {
  if (temperature <= 0) return greedy(logits);
  const double peak = logits[static_cast<std::size_t>(greedy(logits))];
  const auto weight = [&](float logit) { return std::exp((logit - peak) / temperature); };
  double total = 0;
  for (const float logit : logits) total += weight(logit);
  double left = random.uniform() * total;
  for (std::size_t id = 0; id < logits.size(); ++id) {
    left -= weight(logits[id]);
    if (left < 0) return static_cast<token_id>(id);
  }
  return greedy(logits);  // rounding used up the last weight
}

double log_sum_exp(std::span<const float> logits) {
  const double peak = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - peak);
  return peak + std::log(sum);
}

std::vector<std::pair<token_id, float>> largest(std::span<const float> logits, int count) {
  std::vector<token_id> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto wanted = std::min<std::size_t>(static_cast<std::size_t>(std::max(count, 0)), order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(wanted), order.end(),
                    [&](token_id a, token_id b) {
                      const float x = logits[static_cast<std::size_t>(a)];
                      const float y = logits[static_cast<std::size_t>(b)];
                      return x != y ? x > y : a < b;
                    });
  std::vector<std::pair<token_id, float>> out;
  for (std::size_t i = 0; i < wanted; ++i)
    out.emplace_back(order[i], logits[static_cast<std::size_t>(order[i])]);
  return out;
}

std::uint64_t fingerprint(std::span<const float> logits) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const std::byte byte : std::as_bytes(logits)) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001B3u;
  }
  return hash;
}

}  // namespace engine
