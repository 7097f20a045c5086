// SPDX-License-Identifier: Apache-2.0
// No fault.
#include <benchmark/benchmark.h>

static void works(benchmark::State& state) {
  for (auto _ : state) benchmark::ClobberMemory();
}
BENCHMARK(works);
