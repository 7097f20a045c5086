// SPDX-License-Identifier: Apache-2.0
// The verbs of the front door: blocks (W1), publishing (W5, W6), opening and closing on a hit, a decode step
// of 256 sequences (W10), and the memory that the control plane takes.
#include <malloc.h>

#include <cstring>
#include <memory>

#include "support/rounds.hpp"
#include "support/traffic.hpp"

namespace {

using namespace bench;
using namespace kvcache;

void take_and_return_64(benchmark::State& state) {
  constexpr int64_t count = 64;
  block_pool pool;
  if (failed(state, bool(pool.create(blocks{65536})), "no pool")) return;
  std::vector<block_id> ids(count), from(count);
  rounds work, limit;
  for (auto _ : state) {
    bool done = true;
    state.SetIterationTime(work.time(1000 * count, [&] {
      for (int i = 0; i < 1000; ++i) {
        done &= bool(pool.allocate(ids));
        benchmark::DoNotOptimize(ids.data());
        pool.release(ids);
      }
    }));
    limit.time(1000 * count, [&] {  // 64 loads and stores each way
      for (int i = 0; i < 1000; ++i) {
        std::memcpy(ids.data(), from.data(), count * sizeof(block_id));
        benchmark::DoNotOptimize(ids.data());
        std::memcpy(from.data(), ids.data(), count * sizeof(block_id));
        benchmark::DoNotOptimize(from.data());
      }
    });
    if (failed(state, done && pool.free_blocks() == 65536, "blocks lost")) return;
  }
  report(state, "ns/block", work, limit, at_most_ns(3));
}

void publish(benchmark::State& state, int32_t count, int32_t length) {
  const int32_t need = count * length / block_size;
  std::unique_ptr<tree_t> t;
  uint64_t next = 0;
  rounds work, limit;
  text copy(static_cast<size_t>(length));
  for (auto _ : state) {
    if (t == nullptr || t->c.pool().free_blocks() < need) {
      t = std::make_unique<tree_t>((quick() ? 2 : 16) * need);
      next = 1 << 20;
    }
    std::vector<text> fresh;
    std::vector<sequence> open;
    for (int32_t i = 0; i < count; ++i) {
      fresh.push_back(tokens(next++, static_cast<size_t>(length)));
      auto s = t->c.open(fresh.back(), scope::shared());
      if (failed(state, s && s->extend(length), "no slots")) return;
      open.push_back(*std::move(s));
    }
    const uint64_t before = t->c.count().nodes;
    bool done = true;
    state.SetIterationTime(work.time(need, [&] {
      for (size_t i = 0; i < open.size(); ++i) {
        const auto got = open[i].commit(fresh[i]);
        done &= got && *got == length;
      }
    }));
    limit.time(need, [&] {
      for (const text& f : fresh) {
        std::memcpy(copy.data(), f.data(), f.size() * sizeof(token_id));
        benchmark::DoNotOptimize(copy.data());
      }
    });
    done &= t->c.count().nodes == before + static_cast<uint64_t>(need);
    if (failed(state, done, "not published")) return;
  }
  report(state, "ns/block", work, limit, at_most_ns(40));
}

/// Lookup, pin, share into a table; and all of that back.
void open_close(benchmark::State& state, size_t first, size_t count, int32_t hit, target bound) {
  static tree_t t(0);
  rounds work;
  for (auto _ : state) {
    bool exact = true;
    state.SetIterationTime(work.time(static_cast<int64_t>(count) * hit / block_size, [&] {
      for (size_t i = 0; i < count; ++i) {
        const auto s = t.c.open(t.texts[first + 7 * i % count], scope::shared());
        exact &= s && s->reused() == hit;
      }
    }));
    if (failed(state, exact, "a hit of another length")) return;
  }
  report(state, "ns/block", work, bound);
}

void decode_step_of_256(benchmark::State& state) {
  constexpr int32_t count = 256, steps = 64;
  cache c = make(count * 262, count);
  std::vector<sequence> running;
  for (int32_t s = 0; s < count; ++s) {
    auto q = c.open({}, scope::shared());
    if (failed(state, q && q->extend(4096 + s % 16), "no slots")) return;
    running.push_back(*std::move(q));
  }
  std::vector<int32_t> length(count), stack(4096);
  rounds work, limit;
  for (auto _ : state) {
    const uint64_t before = c.count().blocks_used;
    bool done = true;
    state.SetIterationTime(work.time(steps, [&] {
      for (int32_t k = 0; k < steps; ++k) {
        for (sequence& q : running) done &= bool(q.extend(1));
        c.end_step();
      }
    }));
    done &= c.count().blocks_used == before + steps * count / block_size;
    for (int32_t s = 0; s < count; ++s) done &= bool(running[static_cast<size_t>(s)].truncate(4096 + s % 16));
    limit.time(steps, [&] {  // 256 increments and 16 pops
      for (int32_t k = 0; k < steps; ++k) {
        for (int32_t& n : length) ++n;
        for (int32_t p = 0; p < 16; ++p) benchmark::DoNotOptimize(stack[static_cast<size_t>(k * 16 + p)]);
        benchmark::ClobberMemory();
      }
    });
    if (failed(state, done, "not extended")) return;
  }
  report(state, "ns/step", work, limit, at_most_ns(4000));
}

/// Bytes that creating a cache of `total` blocks takes from the system, not counting what the planes would
/// be.
double bytes_of(int32_t total, int32_t max_sequences, int32_t max_sequence_tokens) {
  const auto taken = [] {
    const struct mallinfo2 m = mallinfo2();
    return static_cast<double>(m.uordblks + m.hblkhd);
  };
  const double before = taken();
  const cache c = make(total, max_sequences, max_sequence_tokens);
  benchmark::DoNotOptimize(&c);
  return taken() - before;
}
void memory_per_node(benchmark::State& state) {
  constexpr int32_t nodes = 1 << 20;
  double each = 0;
  for (auto _ : state) {
    each = (bytes_of(nodes, 1, 64) - bytes_of(64, 1, 64)) / (nodes - 64);
    state.SetIterationTime(1e-3);
  }
  const double labels = block_size * sizeof(token_id);
  report(state, "bytes/node beyond its tokens", each - labels, 0, {"target_ns", 128});
}
void memory_per_table_entry(benchmark::State& state) {
  constexpr int32_t entries = 2048;
  double each = 0;
  for (auto _ : state) {
    each = (bytes_of(4096, 1024 + 1, entries * block_size) - bytes_of(4096, 1, entries * block_size)) / 1024 /
           entries;
    state.SetIterationTime(1e-3);
  }
  report(state, "bytes/table entry", each, 0, no_target());
}

BENCHMARK(take_and_return_64)->Name("W1/take_and_return_64")->UseManualTime();
BENCHMARK_CAPTURE(publish, w5, 16, 4096)->Name("W5/publish_4096")->UseManualTime();
BENCHMARK_CAPTURE(publish, w6, 4, 32768)->Name("W6/publish_32768")->UseManualTime();
BENCHMARK_CAPTURE(open_close, w2, 1000, 16, 4096, at_most_ns(10))->Name("open_close/4096")->UseManualTime();
BENCHMARK_CAPTURE(open_close, w3, 1016, 4, 32768, no_target())->Name("open_close/32768")->UseManualTime();
BENCHMARK_CAPTURE(open_close, w11, 0, 1000, 1024, no_target())->Name("open_close/1024")->UseManualTime();
BENCHMARK(decode_step_of_256)->Name("W10/decode_step_256")->UseManualTime();
BENCHMARK(memory_per_node)->Name("memory/node")->UseManualTime()->Iterations(1);
BENCHMARK(memory_per_table_entry)->Name("memory/table_entry")->UseManualTime()->Iterations(1);

}  // namespace
