// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is kept of repeated measurements.
#include <algorithm>
#include <vector>

namespace kvcache::gpu_check {

struct spread {
  double median = 0, low = 0, high = 0;
};

/// Of an odd number the middle one, of an even number the mean of both in the middle. Of nothing 0.
inline spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  const double middle = n % 2 != 0 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
  return {middle, values.front(), values.back()};
}

/// Bytes in microseconds as GB/s; 0 if no time passed.
inline double gb_per_second(double bytes, double microseconds) {
  return microseconds > 0 ? bytes / microseconds / 1e3 : 0;
}

}  // namespace kvcache::gpu_check
