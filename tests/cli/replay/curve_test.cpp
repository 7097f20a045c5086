// SPDX-License-Identifier: Apache-2.0
// The curve beside direct replays, and where it bends.
#include "replay/curve.hpp"

#include <catch2/catch.hpp>
#include <cmath>

#include "error.hpp"
#include "random_trace.hpp"
#include "support/environment.hpp"

using namespace kvcache::cli;
using kvcache::test::add;
using kvcache::test::random_trace;

namespace {

hit_curve made_of(std::vector<curve_point> points) {
  hit_curve c;
  c.points = std::move(points);
  return c;
}

}  // namespace

TEST_CASE("the exact curve equals lru at every capacity from the longest request on", "[curve]") {
  std::mt19937_64 random(kvcache::test::test_seed("curve", 21));
  for (std::int64_t i = 0; i < kvcache::test::effort(3000); ++i) {
    const auto any = [&](int least, int most) {
      return least + int(random() % std::uint64_t(most - least + 1));
    };
    const trace t = random_trace(random, {any(0, 50), any(1, 8), any(1, 4), any(2, 12)});
    const traffic ready(t);
    const hit_curve c = lru_curve(ready);
    REQUIRE(c.exact_from == ready.longest());
    for (std::int64_t capacity = c.exact_from; capacity <= ready.nodes() + 1; ++capacity) {
      replay_options o;
      o.capacity_blocks = capacity;
      const replay_result direct = replay(ready, o);
      CAPTURE(i, capacity);
      REQUIRE(c.at(capacity).hit_blocks == direct.hit_blocks);
      REQUIRE(c.at(capacity).hit_tokens == direct.hit_tokens);
    }
    REQUIRE(c.at(-1).hit_blocks == ready.ceiling().blocks);
    REQUIRE(c.at(-1).hit_tokens == ready.ceiling().tokens);
    REQUIRE(c.at(0).hit_blocks == 0);
    for (std::size_t k = 1; k < c.points.size(); ++k) {
      REQUIRE(c.points[k - 1].capacity_blocks < c.points[k].capacity_blocks);
      REQUIRE(c.points[k - 1].hit_blocks < c.points[k].hit_blocks);
    }
  }
}

TEST_CASE("a curve bends where it is farthest above its chord", "[curve]") {
  CHECK(made_of({{0, 0, 0}, {10, 80, 800}, {20, 90, 900}, {100, 100, 1000}}).knee().capacity_blocks == 10);
  CHECK(made_of({{0, 0, 0}, {50, 10, 10}, {60, 95, 95}, {100, 100, 100}}).knee().capacity_blocks == 60);
  // A straight line does not bend, nor does one that only sags.
  CHECK(made_of({{0, 0, 0}, {50, 50, 50}, {100, 100, 100}}).knee().capacity_blocks == 0);
  CHECK(made_of({{0, 0, 0}, {90, 10, 10}, {100, 100, 100}}).knee().capacity_blocks == 0);
  CHECK(made_of({{0, 0, 0}}).knee().capacity_blocks == 0);
  // Of two points equally far the lower.
  CHECK(made_of({{0, 0, 0}, {10, 50, 50}, {20, 60, 60}, {100, 100, 100}}).knee().capacity_blocks == 10);
}

TEST_CASE("a share of the ceiling has a least capacity", "[curve]") {
  const hit_curve c = made_of({{0, 0, 0}, {10, 80, 800}, {20, 90, 900}, {100, 100, 1000}});
  CHECK(c.capacity_for(0) == 0);
  CHECK(c.capacity_for(0.5) == 10);
  CHECK(c.capacity_for(0.8) == 10);
  CHECK(c.capacity_for(0.81) == 20);
  CHECK(c.capacity_for(1) == 100);
}

TEST_CASE("a thinned curve keeps its ends and only has points of the whole one", "[curve]") {
  std::vector<curve_point> points{{0, 0, 0}};
  for (std::int64_t i = 1; i <= 1000; ++i) points.push_back({3 * i, 2 * i, 7 * i});
  const hit_curve c = made_of(points);
  for (const std::size_t most : {2u, 3u, 10u, 100u, 1001u, 5000u}) {
    const std::vector<curve_point> some = c.thinned(most);
    CAPTURE(most);
    CHECK(some.size() <= most);
    CHECK(some.size() >= std::min<std::size_t>(most, 2));
    CHECK(some.front().capacity_blocks == 0);
    CHECK(some.back().capacity_blocks == 3000);
    for (const curve_point& p : some) CHECK(c.at(p.capacity_blocks).hit_blocks == p.hit_blocks);
  }
  CHECK(made_of({{0, 0, 0}}).thinned(10).size() == 1);
}

TEST_CASE("a sampled curve is repeatable, and close when nearly all is sampled", "[curve]") {
  std::mt19937_64 random(kvcache::test::test_seed("sampled", 22));
  const trace t = random_trace(random, {3000, 12, 3, 7});
  const traffic ready(t);
  const hit_curve exact = lru_curve(ready);
  const hit_curve most = lru_curve(ready, 0.999, 5);
  const hit_curve again = lru_curve(ready, 0.999, 5);
  REQUIRE(most.points.size() == again.points.size());
  for (std::int64_t c = 1; c < ready.nodes(); c += 7) {
    CHECK(most.at(c).hit_blocks == again.at(c).hit_blocks);
    CHECK(std::abs(most.at(c).hit_blocks - exact.at(c).hit_blocks) < ready.blocks() / 50);
    CHECK(std::abs(most.at(c).hit_tokens - exact.at(c).hit_tokens) < ready.tokens() / 50);
  }
}

TEST_CASE("a rate that is none is refused", "[curve]") {
  trace t;
  t.block_tokens = 4;
  add(t, 0, 8, {0, 1});
  const traffic ready(t);
  for (const double rate : {0.0, -0.1, 1.1, double(NAN)}) {
    CHECK_THROWS_AS(lru_curve(ready, rate), error);
  }
  CHECK(lru_curve(ready, 1e-9).at(-1).hit_blocks == 0);  // nothing sampled, nothing hit
}
