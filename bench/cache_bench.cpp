// SPDX-License-Identifier: Apache-2.0
// What the control plane costs, on workloads W1..W11 that other cache managers can be measured on too.
//
// Blocks of 16 tokens. Token i of sequence s is splitmix64((s << 32) + i) % 128000, so no two sequences share
// a first block unless said. Tree T: 1,000 texts of 1,024 tokens, 16 of 4,096 and 4 of 32,768, nothing
// pinned. A query that must hit L tokens is L + 1 tokens long.
//
// Every row reports ns_per_item (median over rounds). Where a physical limit is simple to state it is
// measured in the same run: limit_ns, and ratio = ns_per_item / limit_ns. Each row checks that the work was
// done and fails if not.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kvcache/cache.hpp"
#include "kvcache/evict/lfu.hpp"

namespace {

using namespace kvcache;
using text = std::vector<token_id>;

constexpr int32_t block_size = 16;

struct serving_lfu : serving {
  using eviction_type = lfu;
};

token_id token(uint64_t sequence, uint64_t i) {
  return static_cast<token_id>(mix64((sequence << 32) + i + 0x9e3779b97f4a7c15ull) % 128000);
}
text tokens(uint64_t sequence, size_t n, size_t from = 0) {
  text t(n);
  for (size_t i = 0; i < n; ++i) t[i] = token(sequence, from + i);
  return t;
}

/// Nanoseconds per item of one round, and the median over rounds.
class rounds {
 public:
  template <class Work>
  double time(int64_t items, Work&& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> d = std::chrono::steady_clock::now() - start;
    samples_.push_back(d.count() * 1e9 / static_cast<double>(items));
    return d.count();
  }
  double median() {
    const auto middle = samples_.begin() + static_cast<std::ptrdiff_t>(samples_.size() / 2);
    std::nth_element(samples_.begin(), middle, samples_.end());
    return samples_.empty() ? 0 : *middle;
  }

 private:
  std::vector<double> samples_;
};

void report(benchmark::State& state, rounds& work) {
  state.counters["ns_per_item"] = work.median();
}
void report(benchmark::State& state, rounds& work, rounds& limit) {
  report(state, work);
  state.counters["limit_ns"] = limit.median();
  state.counters["ratio"] = work.median() / limit.median();
}
bool failed(benchmark::State& state, bool done, const char* what) {
  if (!done) state.SkipWithError(what);
  return !done;
}

template <class Traits = serving>
basic_cache<Traits> make(int32_t total, int32_t max_sequences, int32_t max_sequence_tokens = 0) {
  const group_config g{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 64, .head_dim_v = 64},
                       .block_size = block_size,
                       .total = {total}};
  auto c = basic_cache<Traits>::create(
      {.groups = {&g, 1}, .max_sequences = max_sequences, .max_sequence_tokens = max_sequence_tokens});
  if (!c) std::abort();
  return *std::move(c);
}
template <class Traits>
bool store(basic_cache<Traits>& c, const text& t) {
  auto s = c.open(t, scope::shared());
  const auto n = static_cast<int32_t>(t.size());
  if (!s || !s->extend(n - s->held())) return false;
  const auto done = s->commit(t);
  return done && *done == n;
}

/// Tree T in a cache with `spare` more blocks, and its texts, each one token longer than what is stored.
struct tree_t {
  static constexpr int32_t blocks_of_t = 1000 * 64 + 16 * 256 + 4 * 2048;
  cache c;
  std::vector<text> short_, middle, long_;

  explicit tree_t(int32_t spare) : c(make(blocks_of_t + spare, 64)) {
    for (uint64_t s = 0; s < 1000; ++s) short_.push_back(tokens(s, 1025));
    for (uint64_t s = 1000; s < 1016; ++s) middle.push_back(tokens(s, 4097));
    for (uint64_t s = 1016; s < 1020; ++s) long_.push_back(tokens(s, 32769));
    for (const auto* of : {&short_, &middle, &long_}) {
      for (const text& t : *of) {
        if (!store(c, {t.begin(), t.end() - 1})) std::abort();
      }
    }
  }
};
tree_t& shared_tree() {
  static tree_t t(4096);
  return t;
}

// --- W1 ---------------------------------------------------------------------------------------------------

void take_and_return_64(benchmark::State& state) {
  block_pool pool;
  if (failed(state, bool(pool.create(blocks{65536})), "no pool")) return;
  std::vector<block_id> ids(64);
  rounds work;
  for (auto _ : state) {
    bool done = true;
    state.SetIterationTime(work.time(1000, [&] {
      for (int i = 0; i < 1000; ++i) {
        done &= bool(pool.allocate(ids));
        benchmark::DoNotOptimize(ids.data());
        pool.release(ids);
      }
    }));
    if (failed(state, done && pool.free_blocks() == 65536, "blocks lost")) return;
  }
  report(state, work);
}

// --- W2, W3, W11 ------------------------------------------------------------------------------------------

struct match_row {
  std::vector<const text*> query;
  int32_t hit;
  int repeat;
};
match_row row_w2() {
  match_row r{{}, 4096, 20};
  for (const text& t : shared_tree().middle) r.query.push_back(&t);
  return r;
}
match_row row_w3() {
  match_row r{{}, 32768, 20};
  for (const text& t : shared_tree().long_) r.query.push_back(&t);
  return r;
}
match_row row_w11() {
  match_row r{{}, 1024, 1};
  for (size_t s = 0; s < 1000; ++s) r.query.push_back(&shared_tree().short_[7 * s % 1000]);
  return r;
}

/// Calls ask(query) for every query; the limit is memcmp of the same tokens with a copy of them.
template <class Ask>
void match_rows(benchmark::State& state, const match_row& row, Ask ask) {
  const auto hit = static_cast<size_t>(row.hit);
  std::vector<token_id> copy(row.query.size() * hit);
  std::vector<size_t> place(row.query.size());
  for (size_t i = 0; i < row.query.size(); ++i) {  // stored in the order of the sequences, as T is
    place[i] = row.query.size() == 1000 ? 7 * i % 1000 * hit : i * hit;
    std::copy_n(row.query[i]->begin(), hit, copy.begin() + static_cast<std::ptrdiff_t>(place[i]));
  }
  const auto items = static_cast<int64_t>(row.query.size());
  rounds work, limit;
  for (auto _ : state) {
    bool exact = true;
    double seconds = 0;
    for (int k = 0; k < row.repeat; ++k) {
      seconds += work.time(items, [&] {
        for (const text* q : row.query) exact &= ask(*q) == row.hit;
      });
    }
    for (int k = 0; k < row.repeat; ++k) {
      limit.time(items, [&] {
        for (size_t i = 0; i < row.query.size(); ++i) {
          exact &= std::memcmp(row.query[i]->data(), copy.data() + place[i], hit * sizeof(token_id)) == 0;
          benchmark::ClobberMemory();
        }
      });
    }
    state.SetIterationTime(seconds);
    if (failed(state, exact, "a hit of another length")) return;
  }
  report(state, work, limit);
}
/// Lookup alone.
void match(benchmark::State& state, match_row (*row)()) {
  const cache& c = shared_tree().c;
  std::vector<node_id> nodes(2049);
  match_rows(state, row(), [&](const text& q) { return c.peek(q, scope::shared(), nodes); });
}
/// Lookup, pin, share into a table; and all of that back.
void open_close(benchmark::State& state, match_row (*row)()) {
  cache& c = shared_tree().c;
  match_rows(state, row(), [&](const text& q) {
    const auto s = c.open(q, scope::shared());
    return s ? s->reused() : -1;
  });
}

// --- W4 ---------------------------------------------------------------------------------------------------

void miss_at_4096_children(benchmark::State& state) {
  cache c = make(4096 * 16, 4);
  for (uint64_t s = 0; s < 4096; ++s) {
    if (failed(state, store(c, tokens(s, 256)), "not stored")) return;
  }
  std::vector<text> absent;
  for (uint64_t s = 100000; s < 100064; ++s) absent.push_back(tokens(s, 256));
  std::vector<node_id> nodes(16);
  rounds work;
  for (auto _ : state) {
    bool miss = true;
    state.SetIterationTime(work.time(64, [&] {
      for (const text& t : absent) miss &= c.peek(t, scope::shared(), nodes) == 0;
    }));
    if (failed(state, miss, "a hit")) return;
  }
  report(state, work);
}

// --- W5, W6 -----------------------------------------------------------------------------------------------

void publish(benchmark::State& state, int32_t count, int32_t length) {
  const int32_t need = count * length / block_size;
  std::unique_ptr<tree_t> t;
  uint64_t next = 0;
  rounds work;
  for (auto _ : state) {
    if (t == nullptr || t->c.pool().free_blocks() < need) {
      t = std::make_unique<tree_t>(16 * need);
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
    state.SetIterationTime(work.time(count, [&] {
      for (size_t i = 0; i < open.size(); ++i) {
        const auto got = open[i].commit(fresh[i]);
        done &= got && *got == length;
      }
    }));
    done &= t->c.count().nodes == before + static_cast<uint64_t>(need);
    if (failed(state, done, "not published")) return;
  }
  report(state, work);
}

// --- W7, W8, W9 -------------------------------------------------------------------------------------------

constexpr int32_t groups = 205, leaves = 200;
constexpr int32_t nodes_of_w7 = groups * (leaves + 1);

text leaf_text(int32_t group, int32_t leaf) {
  text t = tokens(static_cast<uint64_t>(group), block_size);
  const text own = tokens(1000000 + static_cast<uint64_t>(group * leaves + leaf), block_size + 1);
  t.insert(t.end(), own.begin(), own.end());
  return t;
}
/// Every block of the pool cached, unpinned.
template <class Traits>
basic_cache<Traits> tree_of_leaves(int32_t max_sequences, int32_t max_sequence_tokens) {
  auto c = make<Traits>(nodes_of_w7, max_sequences, max_sequence_tokens);
  for (int32_t g = 0; g < groups; ++g) {
    for (int32_t l = 0; l < leaves; ++l) {
      text t = leaf_text(g, l);
      t.pop_back();
      if (!store(c, t)) std::abort();
    }
  }
  if (c.count().blocks_cached != nodes_of_w7) std::abort();
  return c;
}

/// Blocks that a sequence takes from a full pool, `at_once` per call; every one of them is evicted first.
template <class Traits>
void evict(benchmark::State& state, int32_t at_once) {
  constexpr int32_t blocks_a_round = 256;
  std::unique_ptr<basic_cache<Traits>> c;
  basic_sequence<Traits> taker;
  rounds work;
  for (auto _ : state) {
    if (c == nullptr || c->count().nodes < nodes_of_w7 - 16 * blocks_a_round) {
      taker = {};
      c = std::make_unique<basic_cache<Traits>>(tree_of_leaves<Traits>(4, 0));
      auto s = c->open({}, scope::shared());
      if (failed(state, bool(s), "not opened")) return;
      taker = *std::move(s);
    }
    const uint64_t before = c->count().nodes_evicted;
    bool done = true;
    state.SetIterationTime(work.time(blocks_a_round, [&] {
      for (int32_t i = 0; i < blocks_a_round; i += at_once) done &= bool(taker.extend(at_once * block_size));
    }));
    done &= c->count().nodes_evicted == before + blocks_a_round && c->count().blocks_free == 0;
    if (failed(state, done, "not evicted")) return;
  }
  report(state, work);
}

void evict_lru(benchmark::State& state, int32_t at_once) {
  evict<serving>(state, at_once);
}
void evict_lfu(benchmark::State& state, int32_t at_once) {
  evict<serving_lfu>(state, at_once);
}

void refuse_while_all_pinned(benchmark::State& state) {
  cache c = tree_of_leaves<serving>(groups * leaves + 1, 64);
  std::vector<sequence> holders;
  holders.reserve(static_cast<size_t>(groups * leaves));
  for (int32_t g = 0; g < groups; ++g) {
    for (int32_t l = 0; l < leaves; ++l) {
      auto s = c.open(leaf_text(g, l), scope::shared());
      if (failed(state, s && s->reused() == 2 * block_size, "not held")) return;
      holders.push_back(*std::move(s));
    }
  }
  auto asker = c.open({}, scope::shared());
  if (failed(state, asker && c.count().blocks_used == nodes_of_w7, "not all pinned")) return;
  rounds work;
  for (auto _ : state) {
    bool refused = true;
    state.SetIterationTime(work.time(1000, [&] {
      for (int i = 0; i < 1000; ++i) refused &= asker->extend(1).error().code == errc::out_of_blocks;
    }));
    if (failed(state, refused && c.count().nodes_evicted == 0, "not refused")) return;
  }
  report(state, work);
}

// --- W10 --------------------------------------------------------------------------------------------------

void decode_step_of_256(benchmark::State& state) {
  constexpr int32_t count = 256, steps = 64;
  cache c = make(count * 262, count);
  std::vector<sequence> running;
  for (int32_t s = 0; s < count; ++s) {
    auto q = c.open({}, scope::shared());
    if (failed(state, q && q->extend(4096 + s % 16), "no slots")) return;
    running.push_back(*std::move(q));
  }
  rounds work;
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
    if (failed(state, done, "not extended")) return;
  }
  report(state, work);
}

BENCHMARK(take_and_return_64)->Name("W1/take_and_return_64")->UseManualTime();
BENCHMARK_CAPTURE(match, w2, &row_w2)->Name("W2/match_4096")->UseManualTime();
BENCHMARK_CAPTURE(open_close, w2, &row_w2)->Name("W2/open_close_4096")->UseManualTime();
BENCHMARK_CAPTURE(match, w3, &row_w3)->Name("W3/match_32768")->UseManualTime();
BENCHMARK_CAPTURE(open_close, w3, &row_w3)->Name("W3/open_close_32768")->UseManualTime();
BENCHMARK(miss_at_4096_children)->Name("W4/miss_4096_children")->UseManualTime();
BENCHMARK_CAPTURE(publish, w5, 16, 4096)->Name("W5/publish_4096")->UseManualTime();
BENCHMARK_CAPTURE(publish, w6, 4, 32768)->Name("W6/publish_32768")->UseManualTime();
BENCHMARK_CAPTURE(evict_lru, w7, 1)->Name("W7/evict_1_lru")->UseManualTime();
BENCHMARK_CAPTURE(evict_lfu, w7, 1)->Name("W7/evict_1_lfu")->UseManualTime();
BENCHMARK_CAPTURE(evict_lru, w8, 256)->Name("W8/evict_256_lru")->UseManualTime();
BENCHMARK_CAPTURE(evict_lfu, w8, 256)->Name("W8/evict_256_lfu")->UseManualTime();
BENCHMARK(refuse_while_all_pinned)->Name("W9/refuse_while_all_pinned")->UseManualTime();
BENCHMARK(decode_step_of_256)->Name("W10/decode_step_256")->UseManualTime();
BENCHMARK_CAPTURE(match, w11, &row_w11)->Name("W11/match_1024")->UseManualTime();
BENCHMARK_CAPTURE(open_close, w11, &row_w11)->Name("W11/open_close_1024")->UseManualTime();

}  // namespace
