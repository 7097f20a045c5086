// SPDX-License-Identifier: Apache-2.0
#pragma once
// A card on which calls are timed: by events, each time with an L2 cache that holds none of the data.
#include <chrono>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gpu/cases.hpp"
#include "gpu/ceiling.hpp"
#include "gpu/device.hpp"
#include "gpu/report.hpp"
#include "gpu/statistics.hpp"

namespace kvcache::gpu_check {

/// How the reason of a row begins that failed, rather than was refused.
inline constexpr const char* failed_mark = "FAILED: ";

struct bench_options {
  bool full = false;         ///< every combination
  double seconds = 120;      ///< rows that would start later are left out, and said to be
  double memory_part = 0.8;  ///< of the free memory
  int32_t times = 7;         ///< launches whose median counts
  int32_t shrink = 1;        ///< lengths and sizes divided by this: shows that it works, not how fast
};

class bench {
 public:
  explicit bench(const bench_options& o);

  /// Microseconds of `queue`, launched `times` times after two that do not count.
  template <class Queue>
  std::vector<double> timed(Queue&& queue) {
    queue();
    queue();
    std::vector<double> all;
    for (int32_t i = 0; i < options.times; ++i) {
      forget_cache();
      before_.record(stream);
      queue();
      after_.record(stream);
      all.push_back(after_.since(before_));
    }
    return all;
  }
  /// Microseconds in which the best of the reading kernels reads `bytes`, rounded up to 16.
  double read_ceiling(int64_t bytes);
  bool late() const;
  /// About half a second of reading, in which the clocks go up.
  void warm_up();

  /// The card as text: name, processors, memory, clocks, driver.
  std::vector<field> card() const;
  /// MHz of the multiprocessors while one is busy.
  double clock_now();

  bench_options options;
  device_stream stream;
  int32_t multiprocessors = 0;
  device_memory pool;  ///< planes, and what the ceilings read

 private:
  void forget_cache();

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  size_t cache_bytes_ = 0;
  device_memory other_;  ///< read between launches
  device_array<uint32_t> never_{1};
  device_event before_, after_;
  std::map<int64_t, double> ceilings_;
};

/// Device arrays of one attention call over planes in the bench's pool.
class attend_call {
 public:
  /// Fills the planes, makes tables of blocks in random order. Requires: the layer fits the pool.
  attend_call(bench& b, const attend_case& c, const kvc_kv& layer, const kvc_plan& plan);
  void append(bench& b) const;
  void attend(bench& b) const;
  /// Whether all results are finite numbers, not all of them 0.
  bool plausible(bench& b) const;

 private:
  attend_case case_;
  kvc_kv layer_;
  kvc_plan plan_;
  device_array<int32_t> table_, length_, q_start_, q_pos_;
  device_array<int64_t> slot_;
  device_memory q_, new_rows_, out_, workspace_;
};

/// A layer in the pool and its plan; or a row that says why there is none.
struct prepared {
  kvc_kv layer{};
  kvc_plan plan{};
  std::string reason;
};
prepared prepare(bench& b, const attend_case& c);

std::vector<row> measure_decode(bench& b);
std::vector<row> measure_prefill(bench& b);
std::vector<row> measure_moves(bench& b);
std::vector<row> measure_host(bench& b);

/// The case with its lengths divided by `shrink`, at least a block each.
attend_case shrunk(attend_case c, int32_t shrink);

}  // namespace kvcache::gpu_check
