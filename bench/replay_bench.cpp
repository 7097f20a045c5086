// SPDX-License-Identifier: Apache-2.0
// Replaying traces (`kvcache replay`), from requests in memory: whole published traces, time per block of the
// trace. The limit is one load from a random place of as much memory as the replay keeps for the blocks that
// it holds; a row may be below it, as whole runs of blocks are compared and moved at once.
#include <cstdlib>
#include <memory>
#include <string>

#include "replay/curve.hpp"
#include "replay/replay.hpp"
#include "support/limits.hpp"
#include "support/rounds.hpp"
#include "trace/read.hpp"

namespace {

using namespace bench;
using namespace kvcache::cli;

struct loaded {
  explicit loaded(const char* name) : t(read(name)), ready(t) {}
  static trace read(const char* name) {
    const std::string path = std::string(KVCACHE_TRACES_DIR "/") + name + ".jsonl.zst";
    return read_trace({&path, 1});
  }
  trace t;
  traffic ready;
};

const loaded& conversation() {
  static const loaded l("mooncake_conversation");
  return l;
}
const loaded& agents() {
  static const loaded l("weka_cc_64_small");
  return l;
}

constexpr std::size_t bytes_per_block = 100;  // tree, policy and what a ranked policy asks for
constexpr double lru_ns = 1e9 / 15e6, ranked_ns = 1e9 / 5e6, curve_ns = 10e9 / 10.7e6;

template <class Work>
void pass(benchmark::State& state, const loaded& l, std::int64_t held, double bound, Work work_of) {
  random_loads loads(static_cast<std::size_t>(held) * bytes_per_block);
  rounds work, limit;
  for (auto _ : state) {
    bool done = false;
    state.SetIterationTime(work.time(l.ready.blocks(), [&] { done = work_of(); }));
    limit.time(l.ready.blocks(), [&] { loads.run(l.ready.blocks()); });
    if (failed(state, done, "not the hits that are known")) return;
  }
  report(state, "ns/block", work, limit, at_most_ns(bound));
}

void replayed(benchmark::State& state, const loaded& (*of)(), const char* policy, std::int64_t capacity,
              double bound) {
  const loaded& l = of();
  replay_options o;
  o.policy = policy;
  o.capacity_blocks = capacity;
  const std::int64_t known = replay(l.ready, o).hit_blocks;  // also finds the next uses, once per trace
  pass(state, l, std::min<std::int64_t>(capacity, l.ready.nodes()), bound,
       [&] { return replay(l.ready, o).hit_blocks == known; });
}

void curve(benchmark::State& state, double rate) {
  const loaded& l = agents();
  pass(state, l, static_cast<std::int64_t>(rate * l.ready.nodes()), curve_ns, [&] {
    const hit_curve c = lru_curve(l.ready, rate);
    return rate < 1 || c.at(-1).hit_blocks == l.ready.ceiling().blocks;
  });
}

void counted(benchmark::State& state) {
  const loaded& l = agents();
  pass(state, l, l.ready.nodes(), lru_ns, [&] { return traffic(l.t).nodes() == l.ready.nodes(); });
}

void add(const char* row, const loaded& (*of)(), const char* policy, std::int64_t capacity) {
  const std::string name = std::string("replay/") + row + "/" + policy;
  const bool list = std::string(policy).rfind("lru", 0) == 0 || std::string(policy).rfind("ttl", 0) == 0;
  const double bound = list ? lru_ns : ranked_ns;
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& s) {
    replayed(s, of, policy, capacity, bound);
  })->UseManualTime();
}

const bool added = [] {
  for (const char* policy : {"lru", "fifo", "lfu", "slru", "ttl:300", "priority", "gdsf", "s3_fifo", "two_q",
                             "belady", "belady_bypass"}) {
    add("conversation", &conversation, policy, 8192);
    if (!quick()) add("agents", &agents, policy, 32768);
  }
  return true;
}();

BENCHMARK(counted)->Name("replay/agents/count_unique")->UseManualTime();
BENCHMARK_CAPTURE(curve, exact, 1.0)->Name("replay/agents/curve_exact")->UseManualTime();
BENCHMARK_CAPTURE(curve, sampled, 0.01)->Name("replay/agents/curve_1_percent")->UseManualTime();

}  // namespace
