// SPDX-License-Identifier: Apache-2.0
// Faults that other managers showed while they were benchmarked (ids P of README.md).
#include <memory>
#include <random>

#include "scenarios/counting.hpp"
#include "scenarios/fixture.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// Everything that a script of operations answers.
template <class Traits>
std::vector<int64_t> trace(basic_cache<Traits>& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> out;
  std::vector<std::pair<basic_sequence<Traits>, text>> live;
  for (int i = 0; i < 400; ++i) {
    if (random() % 3 == 0 && !live.empty()) live.erase(live.begin() + long(random() % live.size()));
    const text t = tokens(random() % 100, static_cast<token_id>(1000 * (random() % 6)));
    auto s = c.open(t, random() % 2 ? scope::shared() : scope::tenant("x"));
    out.push_back(s ? s->reused() : -static_cast<int64_t>(s.error().code));
    if (!s) continue;
    const auto e = s->extend(static_cast<int32_t>(t.size()) - s->held());
    out.push_back(e ? *e : -e.error().value);
    if (!e) continue;
    out.push_back(*s->commit(t));
    for (const block_id b : s->table()) out.push_back(raw(b));
    live.emplace_back(*std::move(s), t);
    if (i % 5 == 0) {
      if (auto f = live[random() % live.size()].first.fork()) {
        (void)f->extend(static_cast<int32_t>(random() % 40));
        for (const block_id b : f->table()) out.push_back(raw(b));
      }
      for (const kvc_command& k : c.commands().view())
        out.insert(out.end(), {k.src, k.dst, k.stage, k.tokens});
      c.end_step();
    }
  }
  live.clear();
  const stats s = c.count();
  for (const uint64_t v : whereabouts(s)) out.push_back(static_cast<int64_t>(v));
  out.insert(out.end(),
             {int64_t(s.tokens_asked), int64_t(s.tokens_reused), int64_t(s.refusals), int64_t(s.steps)});
  return out;
}

}  // namespace

TEST_CASE("keys are compared in full width") {  // P1, P9
  cache c = make(16, 4);
  const text t = tokens(8, 1);
  store(c, t);
  for (const int bit : {15, 16, 24, 30}) {
    for (size_t i = 0; i < 8; ++i) {
      text u = t;
      u[i] ^= 1 << bit;
      CHECK(cached(c, u) == static_cast<int32_t>(i / 4 * 4));
    }
  }
  text negative = t;
  negative[0] = -t[0];
  CHECK(cached(c, negative) == 0);
  store(c, t, scope::shared().weights(5));
  CHECK(cached(c, t, scope::shared().weights(5)) == 8);
  CHECK(cached(c, t, scope::shared().weights(5 + (uint64_t{1} << 32))) == 0);
}

TEMPLATE_TEST_CASE("a cache that was reset cannot be told from a new one", "", serving,
                   serving_lfu) {  // P2, promise 5
  auto fresh = make<TestType>(24, 8, {.nodes = 12, .sequences = 5});
  const auto first_run = trace(fresh, 1);
  auto used = make<TestType>(24, 8, {.nodes = 12, .sequences = 5});
  CHECK(trace(used, 2) != first_run);
  REQUIRE(used.reset());
  CHECK(trace(used, 1) == first_run);
  REQUIRE(used.reset());
  CHECK(used.count().steps == 0);
  CHECK(whereabouts(used.count()) ==
        whereabouts(make<TestType>(24, 8, {.nodes = 12, .sequences = 5}).count()));
  CHECK(used.board().read().blocks_free == 24);
}

TEST_CASE("what was used longest ago goes first, among a thousand") {  // P3
  cache c = make(1000);
  for (token_id i = 0; i < 1000; ++i) store(c, tokens(16, 100 * i));
  auto s = c.open({}, scope::shared());
  for (token_id i = 0; i < 1000; ++i) {
    REQUIRE(cached(c, tokens(16, 100 * i)) == 16);
    REQUIRE(s->extend(16));
    REQUIRE(cached(c, tokens(16, 100 * i)) == 0);
  }
}

TEST_CASE("a lookup costs by its hit, not by what lies below it, and depth is no recursion") {  // P5
  auto c = make<counting_traits<lru>>(70000, 1, {.sequences = 4});
  const text deep = tokens(30000, 1000000);
  store(c, deep);
  for (token_id i = 0; i < 20000; ++i) store(c, {deep[0], i});
  counted = {};
  CHECK(cached(c, {deep[0], -5}) == 1);
  CHECK(counted.hash == 2);
  CHECK(cached(c, deep) == 30000);
  sound(c);
}

TEST_CASE("a short hit does not warm a cold tail") {  // P6
  cache c = make(512);
  const text a = tokens(4096, 0), b = tokens(4096, 100000);
  store(c, a);
  store(c, b);
  { const auto s = c.open(first(a, 17), scope::shared()); }
  auto s = c.open({}, scope::shared());
  REQUIRE(s->extend(255 * 16));
  CHECK(cached(c, b) == 4096);
  CHECK(cached(c, a) == 16);
}

TEST_CASE("recency is counted in successful opens and closes, by no clock on the wall") {  // P7
  using traits = counting_traits<lru>;
  auto c = make<traits>(4, 16, {.sequences = 1, .sequence_tokens = 64});
  const auto now = [&] {  // the time that a store's close left
    store(c, tokens(16, 1000));
    return counting_eviction<lru>::last_stamp;
  };
  const uint64_t start = now();
  CHECK(now() == start + 2);  // one open, one close
  refused(c.open(tokens(65, 1), scope::shared()).error(), errc::too_long, "prompt");
  refused(c.open({}, scope::tenant(std::string(500, 'x'))).error(), errc::bad_argument, "scope");
  refused(c.open({}, scope::shared(), {.account = 9}).error(), errc::bad_argument, "account");
  CHECK(cached(c, tokens(16, 1000)) == 16);
  {
    auto s = c.open({}, scope::shared());
    refused(c.open({}, scope::shared()).error(), errc::out_of_sequences, "max_sequences");
    refused(s->extend(65).error(), errc::too_long, "n");
  }
  CHECK(now() == start + 6);
}
