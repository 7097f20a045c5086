// SPDX-License-Identifier: Apache-2.0
// What this machine can do: reading and copying memory of several sizes, comparing tokens, loading from
// random places, multiplying and adding, reading the clock. The other benchmarks measure their own limit
// beside their work; this table says what kind of machine it was.
#include <cstring>
#include <string>

#include "support/limits.hpp"
#include "support/machine.hpp"
#include "support/rounds.hpp"

namespace {

using namespace bench;

constexpr size_t kib = 1024, mib = 1024 * kib;

size_t large() {
  return quick() ? 64 * mib : 1024 * mib;
}

void read(benchmark::State& state, size_t bytes, int threads) {
  crew team(threads);
  std::vector<char> data(bytes, 1);
  const size_t part = bytes / static_cast<size_t>(threads);
  const int64_t times = static_cast<int64_t>(std::max<size_t>(1, 16 * mib / bytes));
  rounds work;
  for (auto _ : state) {
    state.SetIterationTime(work.time(static_cast<int64_t>(bytes / kib) * times, [&] {
      team.each(threads, [&](int t) {
        for (int64_t i = 0; i < times; ++i) read_bytes(data.data() + static_cast<size_t>(t) * part, part);
      });
    }));
  }
  report(state, "ns/KiB", work, no_target());
}

void copy(benchmark::State& state, int threads) {
  crew team(threads);
  const size_t bytes = large() / 2;
  std::vector<char> from(bytes, 1), to(bytes, 2);
  const size_t part = bytes / static_cast<size_t>(threads);
  rounds work;
  for (auto _ : state) {
    state.SetIterationTime(work.time(static_cast<int64_t>(bytes / kib), [&] {
      team.each(threads, [&](int t) {
        const size_t at = static_cast<size_t>(t) * part;
        std::memcpy(to.data() + at, from.data() + at, part);
        benchmark::ClobberMemory();
      });
    }));
  }
  report(state, "ns/KiB copied", work, no_target());
}

void compare(benchmark::State& state, size_t count) {
  const text a = tokens(1, count), b = a;
  rounds work;
  for (auto _ : state) {
    bool equal = true;
    state.SetIterationTime(work.time(100, [&] {
      for (int i = 0; i < 100; ++i) {
        equal &= std::memcmp(a.data(), b.data(), count * sizeof(a[0])) == 0;
        benchmark::ClobberMemory();
      }
    }));
    if (failed(state, equal, "differ")) return;
  }
  report(state, "ns/call", work, no_target());
}

void load(benchmark::State& state, size_t bytes) {
  random_loads loads(bytes);
  rounds work;
  for (auto _ : state) {
    state.SetIterationTime(work.time(10000, [&] { loads.run(10000); }));
  }
  report(state, "ns/load", work, no_target());
}

void multiply_add(benchmark::State& state, int threads) {
  crew team(threads);
  rounds work;
  for (auto _ : state) {
    const double start = seconds_now(2);
    work.add(1000 * fma_ns_per_flop(team));
    state.SetIterationTime(seconds_now(2) - start);
  }
  if (failed(state, work.median() > 0, "no fused multiply-add known here")) return;
  report(state, "ns/kFLOP", work, no_target());
}

void clock_read(benchmark::State& state) {
  rounds work;
  for (auto _ : state) {
    state.SetIterationTime(work.time(1000, [] {
      for (int i = 0; i < 1000; ++i) benchmark::DoNotOptimize(std::chrono::steady_clock::now());
    }));
  }
  report(state, "ns/call", work, no_target());
}

const int registered = [] {
  const auto row = [](const std::string& name, auto run) {
    benchmark::RegisterBenchmark(("limits/" + name).c_str(), run)->UseManualTime();
  };
  for (const int t : {1, 2}) {
    const std::string tail = "/t" + std::to_string(t);
    row("read_large" + tail, [t](benchmark::State& s) { read(s, large(), t); });
    row("read_32MiB" + tail, [t](benchmark::State& s) { read(s, 32 * mib, t); });
    row("read_1MiB" + tail, [t](benchmark::State& s) { read(s, mib, t); });
    row("read_32KiB" + tail, [t](benchmark::State& s) { read(s, 32 * kib, t); });
    row("memcpy_large" + tail, [t](benchmark::State& s) { copy(s, t); });
    row("fma_f32" + tail, [t](benchmark::State& s) { multiply_add(s, t); });
  }
  for (const size_t n : {16, 4096, 32768}) {
    row("memcmp_tokens_" + std::to_string(n), [n](benchmark::State& s) { compare(s, n); });
  }
  row("random_load_1MiB", [](benchmark::State& s) { load(s, mib); });
  row("random_load_32MiB", [](benchmark::State& s) { load(s, 32 * mib); });
  row("random_load_large", [](benchmark::State& s) { load(s, large()); });
  row("clock", clock_read);
  return 0;
}();

}  // namespace
