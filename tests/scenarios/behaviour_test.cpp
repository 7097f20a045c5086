// SPDX-License-Identifier: Apache-2.0
// Behaviour that public cache managers pin down, restated. Numbers of tokens, hits and blocks bind; ids and
// free orders are this library's own. The id of each scenario is that of README.md.
#include "scenarios/fixture.hpp"

using namespace kvcache;
using namespace kvcache::test;

TEST_CASE("a second request shares the full units of a common prefix and takes only its tail") {  // T1
  cache c = make(10);
  const text common = tokens(48, 1000);
  const sequence a = prefill(c, common + tokens(7, 5000));
  CHECK(a.reused() == 0);
  CHECK(a.table().size() == 4);
  CHECK(a.committed() == 48);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(c.pool().indexed(a.table()[i]) == (i < 3));
    CHECK(c.pool().shares(a.table()[i]) == 1);
  }
  const sequence b = prefill(c, common + tokens(5, 6000));
  CHECK(b.reused() == 48);
  REQUIRE(b.table().size() == 4);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(b.table()[i] == a.table()[i]);
    CHECK(c.pool().shares(a.table()[i]) == 2);
  }
  CHECK(b.table()[3] != a.table()[3]);
  CHECK(c.count().blocks_free == 5);
  sound(c);
}

TEST_CASE("a prefix outlives its users and a request for the whole pool evicts all of it") {  // T1c
  cache c = make(10);
  const text common = tokens(48, 1000);
  store(c, common + tokens(7, 5000));
  store(c, common + tokens(5, 6000));
  {
    const sequence s = prefill(c, common + tokens(6, 7000));
    CHECK(s.reused() == 48);
    CHECK(s.table().size() == 4);
    CHECK(c.count().blocks_free == 6);
  }
  CHECK(c.count().blocks_cached == 3);
  const sequence d = prefill(c, tokens(160, 20000));
  CHECK(d.reused() == 0);
  CHECK(d.table().size() == 10);
  CHECK(c.count().blocks_free + c.count().blocks_cached == 0);
  CHECK(c.count().nodes_evicted == 3);
  CHECK(cached(c, common) == 0);
  sound(c);
}

TEST_CASE(
    "appending inside the last block takes none, passing its end takes one and publishes the full one") {  // T3
  cache c = make(10);
  text t = tokens(55, 1000);
  sequence s = prefill(c, t);
  CHECK(s.table().size() == 4);
  t = t + tokens(4, 2000);
  REQUIRE(s.extend(4));
  REQUIRE(s.commit(t));
  CHECK(s.table().size() == 4);
  CHECK_FALSE(c.pool().indexed(s.table()[3]));
  t = t + tokens(19, 3000);
  REQUIRE(s.extend(19));
  REQUIRE(s.commit(t));
  CHECK(s.table().size() == 5);
  CHECK(c.pool().indexed(s.table()[3]));
  CHECK_FALSE(c.pool().indexed(s.table()[4]));
  sound(c);
}

TEST_CASE("a block that is taken from the cache carries no trace of what it held") {  // T5, B37
  cache c = make(1);
  store(c, tokens(16, 1000));
  CHECK(c.count().blocks_cached == 1);
  const sequence b = prefill(c, tokens(15, 2000));
  REQUIRE(b.table().size() == 1);
  CHECK_FALSE(c.pool().indexed(b.table()[0]));
  CHECK(cached(c, tokens(16, 1000)) == 0);
  CHECK(c.count().nodes == 0);
  sound(c);
}

TEST_CASE("without an index every block comes back and nothing ever hits") {  // T7
  cache c = make(4, 4, {.nodes = -1});
  {
    const sequence s = prefill(c, tokens(10, 1000));
    CHECK(s.table().size() == 3);
    CHECK(s.committed() == 0);
  }
  CHECK(c.count().blocks_free == 4);
  sequence s = prefill(c, tokens(10, 1000) + tokens(6, 2000));
  CHECK(s.reused() == 0);
  CHECK(s.table().size() == 4);
  auto more = c.open(tokens(4, 3000), scope::shared());
  REQUIRE(more);
  refused(more->extend(4).error(), errc::out_of_blocks, "blocks");
  sound(c);
}

TEST_CASE(
    "a request that pins its hit and cannot get the rest is refused and leaves everything as it was") {  // T11,
                                                                                                         // B17
  cache c = make(10);
  const text t = tokens(96, 1000);
  store(c, t);
  const sequence user = prefill(c, first(t, 48) + tokens(1, 9000));  // 3 blocks in use and one of its own
  const sequence other = prefill(c, tokens(16, 5000));
  CHECK(c.count().blocks_free + c.count().blocks_cached == 5);
  const auto before = whereabouts(c.count());
  const auto order = free_list(c);
  std::vector<block_id> hit;
  {
    auto s = c.open(t + tokens(40, 7000), scope::shared());
    REQUIRE(s);
    CHECK(s->reused() == 96);
    hit = ids(s->table());
    refused(s->extend(48).error(), errc::out_of_blocks, "blocks");
    CHECK(s->held() == 96);
    CHECK(ids(s->table()) == hit);
    CHECK(free_list(c) == order);
    sound(c);
  }
  CHECK(whereabouts(c.count()) == before);
  CHECK(free_list(c) == order);
  REQUIRE(hit.size() == 6);
  for (size_t i = 0; i < 6; ++i) CHECK(c.pool().shares(hit[i]) == (i < 3 ? 1 : 0));
  CHECK(cached(c, t) == 96);
  CHECK(c.count().refusals == 1);
  sound(c);
}

TEST_CASE(
    "a full pool stores, evicts and stores again each unit exactly once") {  // T13, without its event queue
  for (const int32_t n : {2, 3, 10}) {
    cache c = make(n);
    store(c, tokens(static_cast<size_t>(16 * n), 1000));
    CHECK(c.count().nodes_stored == static_cast<uint64_t>(n));
    CHECK(c.count().nodes_evicted == 0);
    store(c, tokens(static_cast<size_t>(16 * n), 50000));
    CHECK(c.count().nodes_stored == static_cast<uint64_t>(2 * n));
    CHECK(c.count().nodes_evicted == static_cast<uint64_t>(n));
    CHECK(c.count().nodes == static_cast<uint64_t>(n));
    sound(c);
  }
}

TEST_CASE("a model that must recompute one block more than the last token gets one block less") {  // T14
  cache c = make(10);
  const text t = tokens(48, 1000);
  store(c, t);
  CHECK(c.open(t, scope::shared(), {.recompute = 17})->reused() == 16);
  CHECK(c.open(first(t, 37), scope::shared(), {.recompute = 17})->reused() == 16);
  CHECK(c.open(t, scope::shared(), {.recompute = 1})->reused() == 32);
  CHECK(c.open(t, scope::shared(), {.recompute = 1000})->reused() == 0);
  refused(c.open(t, scope::shared(), {.recompute = 0}).error(), errc::bad_argument, "recompute");
  sound(c);
}

TEST_CASE(
    "groups with blocks of 32 and 16 hit by whole units of 32") {  // T16, both groups with full attention
  const group_config gs[] = {group_of_blocks(8, 32), group_of_blocks(16, 16)};
  cache c = make(gs);
  const text t = tokens(112, 1000);
  store(c, t);
  CHECK(c.count().nodes == 3);
  const auto s = c.open(t + tokens(1, 9000), scope::shared());
  REQUIRE(s);
  CHECK(s->reused() == 96);
  CHECK(s->table(0).size() == 3);
  CHECK(s->table(1).size() == 6);
  sound(c);
}

TEST_CASE("a block that the hit brings back from the cache needs no new one") {  // T20
  cache c = make(2);
  const text t = tokens(16, 1000);
  store(c, t);
  CHECK(c.pool().admit(2));  // both blocks may be taken, the cached one included
  const sequence s = prefill(c, t + tokens(10, 2000));
  CHECK(s.reused() == 16);
  CHECK(s.table().size() == 2);
  CHECK(c.count().nodes_evicted == 0);
  CHECK(c.count().tokens_extended == 16 + 10);
  sound(c);
}

TEST_CASE("slots that the table already covers take no block") {  // T22
  cache c = make(10);
  sequence s = prefill(c, tokens(33, 1000));
  CHECK(s.table().size() == 3);
  const auto order = free_list(c);
  REQUIRE(s.extend(0));
  REQUIRE(s.extend(15));
  CHECK(s.table().size() == 3);
  CHECK(free_list(c) == order);
  REQUIRE(s.truncate(34));
  REQUIRE(s.extend(14));
  CHECK(s.table().size() == 3);
  CHECK(free_list(c) == order);
}

TEST_CASE("a shorter key matches part of a longer one and splits nothing") {  // S1
  cache c = make(8, 1);
  store(c, {1, 2, 3});
  CHECK(c.count().nodes_stored == 3);
  CHECK(cached(c, {1, 2}) == 2);
  const auto s = c.open(text{1, 2, 9}, scope::shared());
  REQUIRE(s);
  CHECK(s->reused() == 2);
  CHECK(c.count().nodes == 3);
  REQUIRE(s->table().size() == 2);
  CHECK(raw(s->table()[0]) == 0);  // the blocks that were stored, in their order
  CHECK(raw(s->table()[1]) == 1);
  CHECK(c.count().blocks_cached == 1);
  sound(c);
}

TEST_CASE("making room frees what was asked, counts it, and gives it to the asker") {  // S5
  cache c = make(10);
  for (token_id i = 0; i < 5; ++i) store(c, tokens(32, 1000 * (i + 1)));
  CHECK(c.count().blocks_cached == 10);
  for (int32_t n = 1; n <= 4; ++n) {
    const uint64_t before = c.count().nodes_evicted;
    auto s = c.open(tokens(16, 90000), scope::shared());
    REQUIRE(s->extend(16 * n));
    CHECK(s->table().size() == static_cast<size_t>(n));
    CHECK(c.count().nodes_evicted + c.count().blocks_free >= before);
    sound(c);
  }
  CHECK(c.count().nodes_evicted == 4);
  CHECK(c.count().blocks_free == 4);
  CHECK(c.count().blocks_cached == 6);
}

TEST_CASE("queries follow two branches to their ends with the values stored first") {  // S7
  for (const int32_t page : {1, 2}) {
    cache c = make(16, page);
    const text a{1, 2, 3, 4, 5, 6, 7, 8}, b{1, 2, 9, 10};
    store(c, a);
    store(c, b);
    const uint64_t total = c.count().blocks_cached * static_cast<uint64_t>(page);
    CHECK(total == 10);
    CHECK(cached(c, {1, 2, 3, 4, 90, 91}) == 4);
    CHECK(cached(c, {1, 2, 3, 4, 5, 6, 90, 91}) == 6);
    CHECK(cached(c, a) == 8);
    CHECK(cached(c, b) == 4);
    CHECK(c.count().blocks_cached * static_cast<uint64_t>(page) == total);
    const auto on_a = c.open(a + text{0}, scope::shared());
    const auto on_b = c.open(b + text{0}, scope::shared());
    const auto common = static_cast<size_t>(2 / page);
    for (size_t i = 0; i < on_a->table().size(); ++i) CHECK(raw(on_a->table()[i]) == static_cast<int32_t>(i));
    for (size_t i = 0; i < common; ++i) CHECK(on_b->table()[i] == on_a->table()[i]);
    for (size_t i = common; i < on_b->table().size(); ++i) CHECK(raw(on_b->table()[i]) >= 8 / page);
    sound(c);
  }
}

TEST_CASE("a unit shared by two texts is stored once") {  // S9
  cache c = make(8, 2);
  store(c, {1, 2, 3, 4});
  store(c, {1, 2, 5, 6});
  CHECK(c.count().nodes == 3);
  CHECK(c.count().nodes_stored == 3);
  CHECK(c.count().blocks_cached == 3);
  CHECK(c.count().blocks_free == 5);
}

TEST_CASE("a text that shares its beginning is found whole: the first one's slots, then its own") {  // S11
  cache c = make(12, 1);
  const text a{1, 2, 3, 4, 5, 6}, b{1, 2, 3, 4, 7, 8, 9, 10};
  std::vector<block_id> of_a, of_b;
  of_a = ids(prefill(c, a).table());
  of_b = ids(prefill(c, b).table());
  const auto s = c.open(b + text{0}, scope::shared());
  REQUIRE(s->table().size() == 8);
  for (size_t i = 0; i < 4; ++i) CHECK(s->table()[i] == of_a[i]);
  for (size_t i = 4; i < 8; ++i) CHECK(s->table()[i] == of_b[i]);
}

TEST_CASE("blocks that were just given back are available at once and survive no reset") {  // S13: nothing is
                                                                                            // freed lazily
  cache c = make(5);
  {
    const sequence s = prefill(c, tokens(75, 1000));
    CHECK(c.count().blocks_used == 5);
  }
  CHECK(c.count().blocks_free + c.count().blocks_cached == 5);
  sequence s = prefill(c, tokens(75, 2000));
  CHECK(s.table().size() == 5);
  refused(c.reset(), errc::busy, "sequences");
  REQUIRE(s.close());
  REQUIRE(c.reset());
  CHECK(c.count().blocks_free == 5);
  CHECK(c.count().blocks_cached == 0);
  CHECK(cached(c, tokens(75, 2000)) == 0);
}

TEST_CASE("evicting ahead of demand takes the oldest that nobody holds, of every account, and no more") {
  const int32_t limits[] = {10, 10};
  cache c = make(10, 16, {}, limits);
  store(c, tokens(16, 1000), scope::shared(), {.account = 0});
  store(c, tokens(32, 2000), scope::shared(), {.account = 1});
  const sequence held = prefill(c, tokens(32, 3000), scope::shared(), {.account = 1});
  CHECK(c.evict(0) == 0);
  CHECK(c.evict(-1) == 0);
  CHECK(c.evict(INT32_MIN) == 0);
  CHECK(c.count().blocks_cached == 3);
  CHECK(c.evict(1) == 1);  // of the account that has most in the cache, a leaf
  CHECK(cached(c, tokens(32, 2000)) == 16);
  CHECK(cached(c, tokens(16, 1000)) == 16);
  CHECK(c.charged(1) == 3);
  sound(c);
  CHECK(c.evict(INT32_MAX) == 2);
  CHECK(c.count().blocks_cached == 0);
  CHECK(c.count().blocks_free == 8);
  CHECK(c.charged(0) == 0);
  CHECK(c.charged(1) == 2);
  CHECK(c.evict(1) == 0);  // the rest is held
  CHECK(cached(c, tokens(32, 3000)) == 32);
  sound(c);
}

TEST_CASE("the blocks of a hit are listed as open would put them into a table, group by group") {
  const group_config groups[] = {group_of_blocks(20, 4), group_of_blocks(10, 8)};
  cache c = make(groups);
  store(c, tokens(24, 1000));
  std::vector<node_id> path(3);
  REQUIRE(c.peek(tokens(25, 1000), scope::shared(), path) == 24);
  std::vector<block_id> small(6), large(3);
  CHECK(c.list_blocks(path, small, 0) == 6);
  CHECK(c.list_blocks(path, large, 1) == 3);
  const auto again = c.open(tokens(25, 1000), scope::shared());
  CHECK(std::equal(small.begin(), small.end(), again->table(0).begin(), again->table(0).end()));
  CHECK(std::equal(large.begin(), large.end(), again->table(1).begin(), again->table(1).end()));
}
