// SPDX-License-Identifier: Apache-2.0
// Evicting (W7, W8) and being refused (W9) in a tree of 41,000 leaves: 205 groups of 200, 16 tokens shared by
// the group and 16 of the leaf's own, inserted group by group or in random order. The limit is one load from
// a random place of as much memory as the control plane of that tree takes.
#include <memory>
#include <string>

#include "kvcache/evict/fifo.hpp"
#include "kvcache/evict/gdsf.hpp"
#include "kvcache/evict/lfu.hpp"
#include "kvcache/evict/priority.hpp"
#include "kvcache/evict/s3_fifo.hpp"
#include "kvcache/evict/slru.hpp"
#include "kvcache/evict/ttl.hpp"
#include "kvcache/evict/two_q.hpp"
#include "support/limits.hpp"
#include "support/rounds.hpp"
#include "support/traffic.hpp"

namespace {

using namespace bench;
using namespace kvcache;

template <class E>
struct serving_by : serving {
  using eviction_type = E;
};

constexpr int32_t groups = 205, leaves = 200;
constexpr int32_t nodes_of_w7 = groups * (leaves + 1);
constexpr int32_t blocks_a_round = 256;

text leaf_text(int32_t group, int32_t leaf) {
  text t = tokens(static_cast<uint64_t>(group), block_size);
  const text own = tokens(1000000 + static_cast<uint64_t>(group * leaves + leaf), block_size + 1);
  t.insert(t.end(), own.begin(), own.end());
  return t;
}
/// Every block of the pool cached, unpinned.
template <class Traits>
basic_cache<Traits> tree_of_leaves(insertion how, int32_t max_sequences, int32_t max_sequence_tokens) {
  auto c = make<Traits>(nodes_of_w7, max_sequences, max_sequence_tokens);
  const std::vector<int32_t> order = shuffled(groups * leaves);
  for (int32_t i = 0; i < groups * leaves; ++i) {
    const int32_t k = how == insertion::in_order ? i : order[static_cast<size_t>(i)];
    text t = leaf_text(k / leaves, k % leaves);
    t.pop_back();
    if (!store(c, t)) std::abort();
  }
  if (c.count().blocks_cached != nodes_of_w7) std::abort();
  return c;
}
/// Uses every text once more, in random order, so that the order of eviction is no longer that of insertion.
template <class Traits>
void use_in_random_order(basic_cache<Traits>& c) {
  for (const int32_t k : shuffled(groups * leaves)) {
    if (!c.open(leaf_text(k / leaves, k % leaves), scope::shared())) std::abort();
  }
}

template <class Traits>
void evict(benchmark::State& state, int32_t at_once, insertion how) {
  std::unique_ptr<basic_cache<Traits>> c;
  random_loads loads(size_t{nodes_of_w7} * 128);
  rounds work, limit;
  for (auto _ : state) {
    if (c == nullptr || c->count().nodes < nodes_of_w7 - 16 * blocks_a_round) {
      c = std::make_unique<basic_cache<Traits>>(tree_of_leaves<Traits>(how, 4, 0));
      if (how == insertion::scattered) use_in_random_order(*c);
    }
    const uint64_t before = c->count().blocks_free;
    int32_t done = 0;
    state.SetIterationTime(work.time(blocks_a_round, [&] {
      for (int32_t i = 0; i < blocks_a_round; i += at_once) done += c->evict(at_once);
    }));
    limit.time(blocks_a_round, [&] { loads.run(blocks_a_round); });
    if (failed(state, done == blocks_a_round && c->count().blocks_free == before + blocks_a_round,
               "not evicted")) {
      return;
    }
  }
  // The bound is for the policy that a list can do; a heap costs O(log leaves).
  const double bound = how == insertion::in_order ? 60 : limit.median() + 30;
  const bool list = std::is_same_v<typename Traits::eviction_type, lru>;
  report(state, "ns/block", work, limit, list ? at_most_ns(bound) : no_target());
}

/// Blocks that a sequence takes from a full pool; each is evicted when it is needed.
void evict_on_demand(benchmark::State& state) {
  std::unique_ptr<cache> c;
  sequence taker;
  rounds work;
  for (auto _ : state) {
    if (c == nullptr || c->count().nodes < nodes_of_w7 - 16 * blocks_a_round) {
      taker = {};
      c = std::make_unique<cache>(tree_of_leaves<serving>(insertion::in_order, 4, 0));
      auto s = c->open({}, scope::shared());
      if (failed(state, bool(s), "not opened")) return;
      taker = *std::move(s);
    }
    const uint64_t before = c->count().nodes_evicted;
    bool done = true;
    state.SetIterationTime(work.time(blocks_a_round, [&] {
      for (int32_t i = 0; i < blocks_a_round; ++i) done &= bool(taker.extend(block_size));
    }));
    done &= c->count().nodes_evicted == before + blocks_a_round && c->count().blocks_free == 0;
    if (failed(state, done, "not evicted")) return;
  }
  report(state, "ns/block", work, no_target());
}

void refuse_while_all_pinned(benchmark::State& state) {
  cache c = tree_of_leaves<serving>(insertion::in_order, groups * leaves + 1, 64);
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
  report(state, "ns/call", work, at_most_ns(20));
}

constexpr auto in_order = insertion::in_order, scattered = insertion::scattered;

/// One and 256 at once, where the leaves went in and came back in order, and where they did not.
template <class E>
bool evict_by(const std::string& policy) {
  const auto add = [&](const std::string& row, int32_t at_once, insertion how) {
    benchmark::RegisterBenchmark((row + policy + (how == scattered ? "_shuffled" : "")).c_str(),
                                 [=](benchmark::State& s) { evict<serving_by<E>>(s, at_once, how); })
        ->UseManualTime();
  };
  for (const insertion how : {in_order, scattered}) add("W7/evict_1_", 1, how);
  for (const insertion how : {in_order, scattered}) add("W8/evict_256_", 256, how);
  return true;
}

const bool all_policies = evict_by<lru>("lru") && evict_by<lfu>("lfu") && evict_by<fifo>("fifo") &&
                          evict_by<slru>("slru") && evict_by<ttl>("ttl") &&
                          evict_by<priority_levels>("priority") && evict_by<gdsf>("gdsf") &&
                          evict_by<s3_fifo>("s3_fifo") && evict_by<two_q>("two_q");
BENCHMARK(evict_on_demand)->Name("W7/extend_evicts_1_lru")->UseManualTime();
BENCHMARK(refuse_while_all_pinned)->Name("W9/refuse_while_all_pinned")->UseManualTime();

}  // namespace
