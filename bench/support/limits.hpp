// SPDX-License-Identifier: Apache-2.0
#pragma once
// Physical limits that several benchmarks compare with.
#include <benchmark/benchmark.h>

#include <vector>

#include "support/traffic.hpp"

namespace bench {

/// Loads that each need the result of the one before, at random places of an array: the cycle through all its
/// cache lines in random order.
class random_loads {
 public:
  explicit random_loads(size_t bytes) : next_(std::max<size_t>(bytes / sizeof(line), 2)) {
    const std::vector<int32_t> order = shuffled(static_cast<int32_t>(next_.size()));
    for (size_t i = 0; i < order.size(); ++i) {
      next_[static_cast<size_t>(order[i])].next = static_cast<size_t>(order[(i + 1) % order.size()]);
    }
  }
  void run(int64_t loads) {
    for (int64_t i = 0; i < loads; ++i) at_ = next_[at_].next;
    benchmark::DoNotOptimize(at_);
  }

 private:
  struct alignas(64) line {
    size_t next;
  };
  std::vector<line> next_;
  size_t at_ = 0;
};

}  // namespace bench
