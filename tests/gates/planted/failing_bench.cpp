// SPDX-License-Identifier: Apache-2.0
// Fault: the benchmark gives up.
#include <benchmark/benchmark.h>

static void gives_up(benchmark::State& state) {
  state.SkipWithError("planted");
  for (auto _ : state) benchmark::ClobberMemory();
}
BENCHMARK(gives_up);
