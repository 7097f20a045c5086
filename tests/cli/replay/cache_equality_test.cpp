// SPDX-License-Identifier: Apache-2.0
// The replay against the cache that engines link: the same prompts, opened, computed, committed and closed
// one after the other, hit the same blocks under every policy.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kvcache/cache.hpp"
#include "kvcache/evict/parse.hpp"
#include "random_trace.hpp"
#include "replay/replay.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using cli::replay;
using cli::trace;

namespace {

struct totals {
  int64_t hits = 0, evicted = 0, cached = 0;
};

/// Blocks of one token each. The cache never answers with a whole prompt, so each is a token longer than what
/// is stored, and there is a block more than `room`.
totals serve(const trace& t, const char* policy, int32_t room) {
  const parsed_eviction choice = parse_eviction(policy);
  REQUIRE(choice.ok());
  const group_config group{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                           .block_size = 1,
                           .total = {room + 1}};
  auto c = basic_cache<dynamic>::create({.groups = {&group, 1}, .max_sequences = 1, .max_nodes = room},
                                        make_eviction(choice.value));
  REQUIRE(c);
  totals sum;
  for (const cli::request& r : t.requests) {
    c->set_time(static_cast<uint64_t>(r.time_us) * 1000);
    const std::span<const int32_t> units = t.units_of(r);
    std::vector<token_id> prompt(units.begin(), units.end());
    prompt.push_back(-1);
    auto s = c->open(prompt, scope::shared());
    REQUIRE(s);
    sum.hits += s->reused();
    REQUIRE(s->extend(static_cast<int32_t>(prompt.size()) - s->held()));
    const auto stored = s->commit(std::span<const token_id>(prompt).first(units.size()));
    REQUIRE(stored);
    REQUIRE(*stored == r.count);
    REQUIRE(s->close());
  }
  sum.evicted = static_cast<int64_t>(c->count().nodes_evicted);
  sum.cached = c->count().nodes;
  return sum;
}

}  // namespace

TEST_CASE("the replay hits what the cache of the library hits, under every policy", "[replay]") {
  std::mt19937_64 random(test::test_seed("cache", 31));
  for (int64_t i = 0; i < test::effort(1000); ++i) {
    const auto any = [&](int least, int most) { return least + int(random() % uint64_t(most - least + 1)); };
    const trace t = test::random_trace(random, {any(1, 60), any(1, 8), any(1, 4), any(2, 12)});
    const cli::traffic ready(t);
    // The cache refuses what is longer than itself; the replay would keep the first blocks.
    const int32_t room = std::max(1, ready.longest()) + any(0, 12);
    for (const char* policy : {"lru", "fifo", "lfu", "slru", "priority", "ttl:0", "ttl:3", "gdsf:even=4",
                               "s3_fifo", "s3_fifo:small=30,uses=1", "two_q", "two_q:in=50,out=100"}) {
      CAPTURE(i, policy, room);
      const totals real = serve(t, policy, room);
      cli::replay_options o;
      o.policy = policy;
      o.capacity_blocks = room;
      const cli::replay_result r = replay(ready, o);
      CHECK(r.hit_blocks == real.hits);
      CHECK(r.evictions == real.evicted);
      CHECK(r.resident_end == real.cached);
    }
  }
}
