// SPDX-License-Identifier: Apache-2.0
// The replay beside a naive one, on many small traces; and what it refuses.
#include "replay/replay.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <set>
#include <string>

#include "error.hpp"
#include "naive.hpp"
#include "random_trace.hpp"
#include "replay/curve.hpp"
#include "replay/summary.hpp"
#include "support/environment.hpp"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

using namespace kvcache::cli;
using kvcache::test::add;
using kvcache::test::random_trace;
using kvcache::test::trace_shape;

namespace {

const std::vector<std::string> leaf_policies{"lru",      "fifo",   "lfu",          "slru",
                                             "priority", "belady", "belady_bypass"};

replay_options options(const std::string& policy, std::int64_t capacity, int workers = 1,
                       const std::string& by = "round_robin") {
  replay_options o;
  o.policy = policy;
  o.capacity_blocks = capacity;
  o.workers = workers;
  o.routing = route_of(by);
  return o;
}

void same(const replay_result& got, const naive::outcome& expected) {
  CHECK(got.hit_blocks == expected.hit_blocks);
  CHECK(got.hit_tokens == expected.hit_tokens);
  CHECK(got.requests_with_hit == expected.requests_with_hit);
  CHECK(got.evictions == expected.evictions);
  CHECK(got.resident_end == expected.resident_end);
  CHECK(got.mean_resident_blocks == Approx(expected.mean_resident).margin(1e-9));
}

trace_shape any_shape(std::mt19937_64& random) {
  const auto any = [&](int least, int most) {
    return least + int(random() % std::uint64_t(most - least + 1));
  };
  return {any(0, 40), any(1, 8), any(1, 4), any(2, 12)};
}

/// The failure that `act` ends with.
template <class Act>
error failure_of(Act act) {
  try {
    act();
  } catch (const error& e) {
    return e;
  }
  FAIL("nothing was refused");
  return {failure::usage, "", "", ""};
}

trace chain(std::initializer_list<std::vector<std::int32_t>> paths) {
  trace t;
  t.block_tokens = 4;
  for (const auto& p : paths) add(t, std::int64_t(t.requests.size()), 4 * std::int64_t(p.size()), p);
  return t;
}

}  // namespace

TEST_CASE("every leaf policy finds what a naive replay of the definitions finds", "[replay]") {
  std::mt19937_64 random(kvcache::test::test_seed("replay", 7));
  for (std::int64_t i = 0; i < kvcache::test::effort(8000); ++i) {
    const trace t = random_trace(random, any_shape(random));
    const naive::forest f(t);
    const traffic ready(t);
    REQUIRE(ready.nodes() == f.nodes());
    const auto capacity = std::int64_t(random() % 14);
    for (const std::string& policy : leaf_policies) {
      CAPTURE(i, policy, capacity);
      same(replay(ready, options(policy, capacity)), naive::replay(t, f, policy, capacity));
      // The same with an ordered set, which the large traces need.
      const naive::outcome quick = naive::replay(t, f, policy, capacity, 1, "round_robin", true);
      same(replay(ready, options(policy, capacity)), quick);
    }
  }
}

TEST_CASE("workers and routes find what a naive replay of them finds", "[replay]") {
  std::mt19937_64 random(kvcache::test::test_seed("routes", 8));
  for (std::int64_t i = 0; i < kvcache::test::effort(4000); ++i) {
    const trace t = random_trace(random, any_shape(random));
    const naive::forest f(t);
    const traffic ready(t);
    const auto capacity = std::int64_t(random() % 30);
    const int workers = 1 + int(random() % 5);
    for (const char* by : {"round_robin", "prefix_affinity", "affinity_load"}) {
      for (const char* policy : {"lru", "lfu"}) {
        CAPTURE(i, policy, capacity, workers, by);
        same(replay(ready, options(policy, capacity, workers, by)),
             naive::replay(t, f, policy, capacity, workers, by));
      }
    }
  }
}

TEST_CASE("blocks that live for a time are hits up to its last moment", "[replay]") {
  std::mt19937_64 random(kvcache::test::test_seed("ttl", 9));
  for (std::int64_t i = 0; i < kvcache::test::effort(4000); ++i) {
    const trace t = random_trace(random, any_shape(random));
    if (t.requests.empty() || t.requests.back().time_us == t.requests.front().time_us) continue;
    const naive::forest f(t);
    const auto life = std::int64_t(random() % 9);
    CAPTURE(i, life);
    replay_options o = options("ttl", -1);
    o.ttl_s = double(life) * 1e-6;
    same(replay(traffic(t), o), naive::ttl(t, f, life));
    // While nothing runs out, the order is that of lru.
    o.ttl_s = 1;
    o.capacity_blocks = life;
    same(replay(traffic(t), o), naive::replay(t, f, "lru", life));
  }
}

TEST_CASE("no choice of victims finds more than Belady's, pinned or with bypass", "[replay]") {
  std::mt19937_64 random(kvcache::test::test_seed("belady", 10));
  std::int64_t cases = 0;
  for (std::int64_t i = 0; cases < kvcache::test::effort(5000); ++i) {
    const trace t = random_trace(random, {2 + int(random() % 9), 4, 2, 6});
    const naive::forest f(t);
    if (f.nodes() > 11) continue;
    ++cases;
    const traffic ready(t);
    const auto capacity = std::int64_t(random() % 7);
    CAPTURE(i, capacity);
    CHECK(replay(ready, options("belady_pinned", capacity)).hit_blocks ==
          naive::best_of_all(f, capacity, false).hits());
    CHECK(replay(ready, options("belady_bypass", capacity)).hit_blocks ==
          naive::best_of_all(f, capacity, true).hits());
  }
}

TEST_CASE("no policy finds more than Belady's, and with room for all every one finds all", "[replay]") {
  std::mt19937_64 random(kvcache::test::test_seed("bounds", 11));
  for (std::int64_t i = 0; i < kvcache::test::effort(500); ++i) {
    const trace t = random_trace(random, any_shape(random));
    const traffic ready(t);
    const auto capacity = std::int64_t(random() % 20);
    const std::int64_t best = replay(ready, options("belady", capacity)).hit_blocks;
    CHECK(best <= replay(ready, options("belady_bypass", capacity)).hit_blocks);
    for (const policy_info& p : policies()) {
      CAPTURE(i, p.name, capacity);
      replay_options o = options(p.name, capacity);
      if (p.timed) o.ttl_s = 1000;
      const replay_result r = replay(ready, o);
      if (std::string(p.name) != "belady_bypass") CHECK(r.hit_blocks <= best);
      CHECK(r.resident_end <= capacity);
      for (const std::int64_t room : {std::int64_t{-1}, std::int64_t{ready.nodes()}, std::int64_t{1} << 62}) {
        o.capacity_blocks = room;
        const replay_result all = replay(ready, o);
        CHECK(all.hit_blocks == ready.ceiling().blocks);
        CHECK(all.hit_tokens == ready.ceiling().tokens);
        CHECK(all.requests_with_hit == ready.ceiling().requests);
        CHECK(all.evictions == 0);
        CHECK(all.resident_end == ready.nodes());
        CHECK(all.capacity_blocks == room);
      }
    }
  }
}

TEST_CASE("a request that is longer than the cache leaves its first blocks there", "[replay]") {
  const trace t = chain({{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, {5}, {0, 1, 2}});
  const replay_result r = replay(traffic(t), options("lru", 3));
  CHECK(r.hit_blocks == 3 + 2);
  CHECK(r.resident_end == 3);
  CHECK(r.evictions == 2);  // the third block for {5}, and {5}
}

TEST_CASE("an id that occurs twice in a request is two blocks", "[replay]") {
  const trace t = chain({{0, 0, 1}, {0, 0, 0}, {0, 1}});
  const traffic ready(t);
  CHECK(ready.nodes() == 5);
  CHECK(ready.ceiling().blocks == 2 + 1);
}

TEST_CASE("tokens of hits never exceed the prompt, and ids without chains are told apart", "[replay]") {
  trace t;
  t.block_tokens = 512;
  add(t, 0, 700, {0, 1});
  add(t, 1, 700, {0, 1});
  add(t, 2, 100, {0});
  add(t, 3, 600, {2, 1});
  const replay_result r = replay(traffic(t), options("lru", -1));
  CHECK(r.hit_blocks == 3);
  CHECK(r.hit_tokens == 700 + 100);
  CHECK(r.requests_with_hit == 2);
}

TEST_CASE("random routes repeat with their seed and differ without", "[replay]") {
  std::mt19937_64 random(1);
  const trace t = random_trace(random, {400, 8, 3, 9});
  const traffic ready(t);
  replay_options o = options("lru", 40, 4, "random");
  std::set<std::int64_t> hits;
  for (o.seed = 0; o.seed < 10; ++o.seed) {
    const std::int64_t h = replay(ready, o).hit_blocks;
    CHECK(replay(ready, o).hit_blocks == h);
    hits.insert(h);
  }
  CHECK(hits.size() > 1);
}

TEST_CASE("a trace without requests or without blocks replays to nothing", "[replay]") {
  trace none;
  none.block_tokens = 16;
  trace empty = none;
  add(empty, 0, 5, {});
  add(empty, 3, 7, {});
  for (const trace* t : {&none, &empty}) {
    const traffic ready(*t);
    for (const policy_info& p : policies()) {
      for (const std::int64_t capacity : {-1, 0, 3}) {
        replay_options o = options(p.name, capacity, 2, "prefix_affinity");
        o.ttl_s = 1;
        const replay_result r = replay(ready, o);
        CHECK(r.hit_blocks + r.evictions + r.resident_end == 0);
      }
    }
  }
}

TEST_CASE("the losses add up to the ceiling", "[replay]") {
  std::mt19937_64 random(kvcache::test::test_seed("losses", 12));
  const trace t = random_trace(random, {300, 8, 3, 9});
  const traffic ready(t);
  const replay_options o = options("lru", 24, 3, "round_robin");
  const replay_result run = replay(ready, o);
  const loss_summary s = summarize(ready, o, run);
  CHECK(s.ceiling.blocks == s.lost_to_capacity.blocks + s.lost_to_routing.blocks + run.hit_blocks);
  CHECK(s.ceiling.tokens == s.lost_to_capacity.tokens + s.lost_to_routing.tokens + run.hit_tokens);
  CHECK(s.lost_to_capacity.blocks == s.ceiling.blocks - replay(ready, options("lru", 24)).hit_blocks);
  CHECK(summarize(ready, options("lru", 24), replay(ready, options("lru", 24))).lost_to_routing.blocks == 0);
}

TEST_CASE("the summary says which share of the requests could never hit", "[replay]") {
  trace t = chain({{0, 1}, {0, 2}, {3}, {}});
  t.requests.back().input_tokens = 3;
  const traffic ready(t);
  const replay_options o = options("lru", -1);
  const loss_summary s = summarize(ready, o, replay(ready, o));
  CHECK(s.requests == 4);
  CHECK(s.share_less_than_block == 3);
  CHECK(s.shorter_than_block == 1);
  CHECK(s.text(ready).find("75.0 % of the requests share less than one block (4 tokens)") !=
        std::string::npos);
}

TEST_CASE("a wrong policy, route, capacity, time or number of workers is named", "[replay]") {
  const trace t = chain({{0, 1}});
  const traffic ready(t);
  const auto refused = [&](const replay_options& o) { return failure_of([&] { replay(ready, o); }); };
  const auto is = [](const error& e, const char* code, const char* field, const char* value) {
    CHECK(e.kind == failure::usage);
    CHECK(e.code == code);
    CHECK(e.field == field);
    CHECK(e.value == value);
  };
  is(refused(options("mru", 4)), "unknown_policy", "policy", "mru");
  is(refused(options("", 4)), "unknown_policy", "policy", "");
  is(failure_of([] { route_of("nearest"); }), "unknown_route", "route", "nearest");
  is(refused(options("lru", -2)), "bad_value", "capacity", "-2");
  is(refused(options("lru", 4, 0)), "bad_value", "workers", "0");
  is(refused(options("lru", 4, 4097)), "bad_value", "workers", "4097");
  is(refused(options("ttl", -1)), "missing", "ttl", "");
  replay_options o = options("ttl", -1);
  o.ttl_s = -3;
  is(refused(o), "bad_value", "ttl", "-3.000000");
  o.ttl_s = std::numeric_limits<double>::quiet_NaN();
  CHECK(refused(o).field == "ttl");
  o.ttl_s = 1e300;
  CHECK(refused(o).field == "ttl");
}

TEST_CASE("a trace of lengths only cannot be replayed, and says so", "[replay]") {
  trace t;
  add(t, 0, 500, {});
  const error e = failure_of([&] { traffic ready(t); });
  CHECK(e.kind == failure::bad_input);
  CHECK(e.code == "lengths_only");
  CHECK(e.field == "block_tokens");
}

TEST_CASE("progress never falls and ends at the total", "[replay]") {
  std::mt19937_64 random(3);
  const trace t = random_trace(random, {300, 8, 3, 9});
  const traffic ready(t);
  std::int64_t last = -1, calls = 0, total = 0;
  replay(ready, options("lru", 9), [&](std::int64_t done, std::int64_t of) {
    CHECK(done >= last);
    CHECK(done <= of);
    last = done;
    total = of;
    ++calls;
  });
  CHECK(last == ready.blocks());
  CHECK(total == ready.blocks());
  CHECK(calls > 2);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if !defined(__has_feature)
#define KVCACHE_TEST_LIMITS_MEMORY
#elif !__has_feature(address_sanitizer) && !__has_feature(thread_sanitizer)
#define KVCACHE_TEST_LIMITS_MEMORY
#endif
#endif
#ifdef KVCACHE_TEST_LIMITS_MEMORY
TEST_CASE("refused memory is an error of its own, not a crash", "[replay]") {
  trace t;
  t.block_tokens = 4;
  std::vector<std::int32_t> ids(2'000'000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t(i);
  add(t, 0, 4 * std::int64_t(ids.size()), ids);
  const traffic ready(t);
  for (const char* policy : {"lru", "lfu", "ttl", "belady_bypass"}) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      const rlimit little{64 << 20, 64 << 20};
      setrlimit(RLIMIT_AS, &little);
      int code = 1;
      try {
        replay_options o = options(policy, -1, 8);
        o.ttl_s = 1;
        replay(ready, o);
      } catch (const error& e) {
        code = e.kind == failure::cannot_run && e.code == "out_of_memory" ? 0 : 2;
      }
      _exit(code);
    }
    int ended = -1;
    REQUIRE(waitpid(child, &ended, 0) == child);
    CAPTURE(policy);
    CHECK((WIFEXITED(ended) && WEXITSTATUS(ended) == 0));
  }
}

#if defined(__GLIBC__)
namespace {

std::int64_t bytes_in_use() {
  const struct mallinfo2 m = mallinfo2();
  return std::int64_t(m.uordblks) + std::int64_t(m.hblkhd);
}

/// Most bytes while `act`, which takes a replay_progress, runs.
template <class Act>
std::int64_t peak_of(Act act) {
  const std::int64_t before = bytes_in_use();
  std::int64_t most = 0;
  act([&](std::int64_t, std::int64_t) { most = std::max(most, bytes_in_use() - before); });
  return most;
}

}  // namespace

TEST_CASE("a replay takes no more than 128 bytes per distinct block beside the trace", "[replay]") {
  trace t;
  t.block_tokens = 4;
  std::vector<std::int32_t> ids(500);
  for (std::int32_t r = 0; r < 1000; ++r) {
    // Each request goes on with the first half of the one before.
    for (std::int32_t i = 250; i < 500; ++i) ids[std::size_t(i)] = 250 * r + i;
    add(t, r, 2000, ids);
    std::rotate(ids.begin() + 100, ids.begin() + 350, ids.end());
  }
  std::int64_t nodes = 0;
  const std::int64_t of_traffic =
      peak_of([&](const replay_progress& tell) { nodes = traffic(t, tell).nodes(); });
  REQUIRE(nodes > 200'000);
  CHECK(of_traffic <= 128 * nodes);
  const traffic ready(t);
  for (const char* policy : {"lru", "fifo", "lfu", "slru", "ttl:9", "gdsf", "belady", "belady_bypass"}) {
    CAPTURE(policy, nodes);
    CHECK(peak_of([&](const replay_progress& tell) { replay(ready, options(policy, -1), tell); }) <=
          128 * nodes);
  }
  CHECK(peak_of([&](const replay_progress& tell) { lru_curve(ready, 1, 0, tell); }) <= 128 * nodes);
  CHECK(peak_of([&](const replay_progress& tell) { lru_curve(ready, 0.01, 0, tell); }) <= 3 * nodes);
}
#endif
#endif
