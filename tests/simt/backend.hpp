// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CUDA part's launches, carried out by the machine: what kvc_cuda_* queue here runs at once, on the CPU.
#include <functional>
#include <string>
#include <vector>

#include "simt/machine.hpp"

namespace kvcache::simt {

/// How launches are run, and what they did. One per process: tests are single-threaded.
struct backend {
  uint32_t seed = 0;
  bool count_banks = false;
  launch_stats stats;
  int launches = 0;
  std::string fault;          ///< of the last launch that failed; it answered launch_failed
  uint32_t shared_taken = 0;  ///< bytes of shared memory that launches do not get, to make one fail
  /// Where launches are put instead of being run, as under the capture of a graph.
  std::vector<std::function<int()>>* recording = nullptr;
};
backend& the_backend();

/// What a launch answers whose kernel was at fault (cudaErrorLaunchFailure).
inline constexpr int launch_failed = 719;

}  // namespace kvcache::simt
