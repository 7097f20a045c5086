// SPDX-License-Identifier: Apache-2.0
#pragma once

// From logits to the next token, and the figures about logits that the programs print. Sums are in double and
// in token order, so a seed gives the same text everywhere.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kv_backend.hpp"

namespace engine {

/// splitmix64: a small generator with a known sequence for each seed.
class splitmix64 {
 public:
  explicit splitmix64(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

/// How the next token is chosen. Temperature 0 is greedy.
struct sampling {
  double temperature = 0;
  std::uint64_t seed = 0;
};

/// The token with the largest logit; the lower id on a tie.
token_id greedy(std::span<const float> logits);

/// Draws from softmax(logits / temperature); greedy when the temperature is 0.
token_id sample(std::span<const float> logits, double temperature, splitmix64& random);

/// Natural logarithm of the sum of exp(logits).
double log_sum_exp(std::span<const float> logits);

/// The `count` largest logits, largest first, ties in id order.
std::vector<std::pair<token_id, float>> largest(std::span<const float> logits, int count);

/// FNV-1a, 64 bit, of the bytes of the logits as they lie in memory: equal for equal bits.
std::uint64_t fingerprint(std::span<const float> logits);

}  // namespace engine
