// SPDX-License-Identifier: Apache-2.0
// What a router or a metrics exporter sees of the prefix index: it can mirror the index from the events
// alone.
#include <catch2/catch.hpp>
#include <map>
#include <random>
#include <vector>

#include "kvcache/cache.hpp"
#include "support/environment.hpp"

namespace kvc = kvcache;

namespace {

constexpr int block = 4;

kvc::cache make(int blocks, int max_events = 256) {
  const kvc::group_config groups[] = {
      {.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 64, .head_dim_v = 64},
       .block_size = block,
       .total = kvc::blocks{blocks}}};
  auto made = kvc::cache::create({.groups = groups, .max_sequences = 8, .max_events = max_events});
  REQUIRE(made);
  return std::move(*made);
}

std::vector<kvc::token_id> text(int tokens, int seed) {
  std::vector<kvc::token_id> t;
  for (int i = 0; i < tokens; ++i) t.push_back(seed * 1000 + i);
  return t;
}

// Computes, commits and closes one prompt.
void serve(kvc::cache& cache, const std::vector<kvc::token_id>& prompt) {
  auto s = cache.open(prompt, kvc::scope::shared());
  REQUIRE(s);
  REQUIRE(s->extend(static_cast<int32_t>(prompt.size()) - s->held()));
  REQUIRE(s->commit(prompt));
}

// Replays events and fails when a parent is unknown, an id is stored twice or removed while unknown or a
// parent.
struct mirror {
  struct unit {
    int32_t parent;
    int children;
    std::vector<kvc::token_id> tokens;
  };
  std::map<int32_t, unit> units;

  void replay(const kvc::cache& cache) {
    for (const kvc_event& e : cache.events()) {
      CHECK(e.tier == 0);
      if (e.kind == KVC_EVENT_STORED) {
        REQUIRE(units.count(e.node) == 0);
        if (e.parent >= 0) {
          REQUIRE(units.count(e.parent) == 1);
          ++units[e.parent].children;
        }
        const auto t = cache.tokens(kvc::node_id{e.node});
        units[e.node] = {e.parent, 0, {t.begin(), t.end()}};
        int depth = 0;
        for (int32_t p = e.parent; p >= 0; p = units[p].parent) ++depth;
        CHECK(e.depth == depth);
      } else {
        REQUIRE(e.kind == KVC_EVENT_REMOVED);
        REQUIRE(units.count(e.node) == 1);
        CHECK(units[e.node].parent == e.parent);
        CHECK(units[e.node].children == 0);
        if (e.parent >= 0) --units[e.parent].children;
        units.erase(e.node);
      }
    }
  }
};

}  // namespace

// T13
TEST_CASE("storing n units announces n, and storing others in a full pool removes n before it stores n") {
  for (const int n : {2, 3, 10}) {
    auto cache = make(n);
    serve(cache, text(n * block, 1));
    CHECK(static_cast<int>(cache.events().size()) == n);
    for (const kvc_event& e : cache.events()) CHECK(e.kind == KVC_EVENT_STORED);
    cache.end_step();
    CHECK(cache.events().empty());
    serve(cache, text(n * block, 2));
    const auto events = cache.events();
    REQUIRE(static_cast<int>(events.size()) == 2 * n);
    for (int i = 0; i < 2 * n; ++i) {
      CHECK(events[static_cast<size_t>(i)].kind == (i < n ? KVC_EVENT_REMOVED : KVC_EVENT_STORED));
    }
  }
}

// C17
TEST_CASE("a partially cached prompt announces only the rest, below a parent that was announced") {
  auto cache = make(32);
  mirror m;
  serve(cache, text(5 * block, 1));
  m.replay(cache);
  cache.end_step();
  auto longer = text(8 * block, 1);
  serve(cache, longer);
  CHECK(cache.events().size() == 3);
  m.replay(cache);
  CHECK(m.units.size() == 8);
}

// S5, B28: events and index agree at every moment
TEST_CASE("a mirror built from events alone equals the index under random traffic") {
  std::mt19937 random(static_cast<unsigned>(kvcache::test::test_seed("events", 7)));
  auto cache = make(24);
  mirror m;
  for (int i = 0; i < 2000; ++i) {
    auto prompt = text(4 + static_cast<int>(random() % 40), static_cast<int>(random() % 6));
    if (random() % 2 != 0) prompt[prompt.size() / 2] = -5;
    serve(cache, prompt);
    m.replay(cache);
    cache.end_step();
    REQUIRE(m.units.size() == cache.count().nodes);
    for (const auto& [id, unit] : m.units) {
      const auto t = cache.tokens(kvc::node_id{id});
      REQUIRE(std::vector<kvc::token_id>(t.begin(), t.end()) == unit.tokens);
    }
  }
  CHECK(cache.count().events_lost == 0);
  CHECK(cache.count().nodes_stored - cache.count().nodes_evicted == cache.count().nodes);
}

TEST_CASE("events that do not fit are counted, and a log of size 0 loses nothing") {
  auto small = make(16, 3);
  serve(small, text(5 * block, 1));
  CHECK(small.events().size() == 3);
  CHECK(small.count().events_lost == 2);
  small.end_step();
  CHECK(small.count().events_lost == 2);
  auto none = make(16, 0);
  serve(none, text(5 * block, 1));
  CHECK(none.events().empty());
  CHECK(none.count().events_lost == 0);
}

TEST_CASE("a refused call announces nothing") {
  auto cache = make(4);
  serve(cache, text(2 * block, 1));
  cache.end_step();
  auto holder = cache.open(text(12, 3), kvc::scope::shared());
  REQUIRE(holder);
  REQUIRE(holder->extend(8));
  cache.end_step();
  auto s = cache.open(text(12, 2), kvc::scope::shared());
  REQUIRE(s);
  CHECK(s->extend(12).error().code == kvc::errc::out_of_blocks);
  CHECK(cache.events().empty());
}
