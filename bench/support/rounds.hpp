// SPDX-License-Identifier: Apache-2.0
#pragma once
// What every benchmark row reports. The row times rounds of its work and, alternating with them, rounds of
// the physical limit, so that a noisy neighbour meets both; medians are compared.
//
//   counter       meaning
//   ns_per_item   median time of one item; the label names it ("ns/block")
//   limit_ns      median time of the same item at the physical limit, where one is simple to state
//   ratio         ns_per_item / limit_ns: how many times the limit; smaller is better
//   target_ns     bound on ns_per_item, or
//   target_ratio  bound on ratio; neither where the row has no target
//
// scripts/bench.sh runs the rows several times and prints them as one table.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace bench {

/// KVCACHE_BENCH_QUICK=1: smaller working sets, fewer rows; shows that the row works, not how fast it is.
inline bool quick() {
  const char* q = std::getenv("KVCACHE_BENCH_QUICK");
  return q != nullptr && *q == '1';
}

/// Nanoseconds per item of each round, and the median over rounds.
class rounds {
 public:
  /// Runs `work` once, which does `items` items; returns the seconds it took.
  template <class Work>
  double time(int64_t items, Work&& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> d = std::chrono::steady_clock::now() - start;
    add(d.count() * 1e9 / static_cast<double>(items));
    return d.count();
  }
  void add(double ns_per_item) { samples_.push_back(ns_per_item); }
  double median() const {
    if (samples_.empty()) return 0;
    std::vector<double> s = samples_;
    const auto middle = s.begin() + static_cast<std::ptrdiff_t>(s.size() / 2);
    std::nth_element(s.begin(), middle, s.end());
    return *middle;
  }
  double best() const { return samples_.empty() ? 0 : *std::min_element(samples_.begin(), samples_.end()); }

 private:
  std::vector<double> samples_;
};

/// Bound of a row: on its time, or on its ratio to the limit.
struct target {
  const char* counter = nullptr;
  double value = 0;
};
inline target no_target() {
  return {};
}
inline target at_most_ns(double ns) {
  return {"target_ns", ns};
}
inline target at_most_ratio(double ratio) {
  return {"target_ratio", ratio};
}

/// Sets the counters of a row. `unit` names an item: "ns/block".
inline void report(benchmark::State& state, const char* unit, double ns, double limit_ns, target t) {
  state.SetLabel(unit);
  state.counters["ns_per_item"] = ns;
  if (limit_ns > 0) {
    state.counters["limit_ns"] = limit_ns;
    state.counters["ratio"] = ns / limit_ns;
  }
  if (t.counter != nullptr) state.counters[t.counter] = t.value;
}
inline void report(benchmark::State& state, const char* unit, const rounds& work, target t) {
  report(state, unit, work.median(), 0, t);
}
inline void report(benchmark::State& state, const char* unit, const rounds& work, const rounds& limit,
                   target t) {
  report(state, unit, work.median(), limit.median(), t);
}

/// True, and the row is marked as failed, unless `done`: a benchmark must have done the work it names.
inline bool failed(benchmark::State& state, bool done, const char* what) {
  if (!done) state.SkipWithError(what);
  return !done;
}

}  // namespace bench
