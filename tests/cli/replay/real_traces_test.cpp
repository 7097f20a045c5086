// SPDX-License-Identifier: Apache-2.0
// Published traces: every known figure to the token, what other tools say of them, and the sampled curve.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "known_figures.hpp"
#include "naive.hpp"
#include "replay/curve.hpp"
#include "replay/summary.hpp"
#include "support/environment.hpp"
#include "trace/read.hpp"

using namespace kvcache::cli;
using kvcache::test::known_figure;
using kvcache::test::known_figures;

namespace {

struct loaded {
  explicit loaded(const std::string& path) : t(read_trace({&path, 1})), ready(t) {}
  trace t;
  traffic ready;
};

/// The trace, read once; null if it takes too long for a build that runs a part of the random tests only.
const loaded* find(const std::string& name) {
  static std::map<std::string, std::unique_ptr<loaded>> all;
  const auto [it, fresh] = all.try_emplace(name);
  if (!fresh) return it->second.get();
  if (name.rfind("weka", 0) == 0 && kvcache::test::effort(100) < 100) {
    WARN("shortened: " << name << " is not replayed in this build");
    return nullptr;
  }
  it->second = std::make_unique<loaded>(kvcache::test::data_path("traces") + "/" + name + ".jsonl.zst");
  return it->second.get();
}

replay_options options(const std::string& policy, std::int64_t capacity) {
  replay_options o;
  o.policy = policy;
  o.capacity_blocks = capacity;
  return o;
}

replay_result run(const loaded& l, const known_figure& k) {
  replay_options o = options(k.policy, k.capacity);
  o.workers = k.workers;
  o.routing = route_of(k.route);
  return replay(l.ready, o);
}

/// Percent of all tokens, or of all blocks.
double token_rate(const loaded& l, std::int64_t capacity) {
  return 100.0 * double(replay(l.ready, options("lru", capacity)).hit_tokens) / double(l.ready.tokens());
}
double block_rate(const loaded& l, std::int64_t capacity) {
  return 100.0 * double(replay(l.ready, options("lru", capacity)).hit_blocks) / double(l.ready.blocks());
}

}  // namespace

TEST_CASE("the hits on published traces are known to the token", "[traces]") {
  for (const known_figure& k : known_figures) {
    const loaded* l = find(k.trace);
    if (l == nullptr) continue;
    CAPTURE(k.trace, k.policy, k.capacity, k.workers, k.route);
    const replay_result r = run(*l, k);
    CHECK(r.hit_blocks == k.hit_blocks);
    CHECK(r.hit_tokens == k.hit_tokens);
  }
}

namespace {

void agrees(const loaded& l, const naive::forest& f, const known_figure& k) {
  const std::string policy = k.policy;
  const replay_result r = run(l, k);
  const naive::outcome n =
      policy.rfind("ttl:", 0) == 0
          ? naive::ttl(l.t, f, std::stoll(policy.substr(4)) * 1'000'000)
          : naive::replay(l.t, f, policy, k.capacity < 0 ? 1LL << 40 : k.capacity, k.workers, k.route, true);
  CAPTURE(k.trace, k.policy, k.capacity, k.workers, k.route);
  CHECK(n.hit_blocks == k.hit_blocks);
  CHECK(n.hit_tokens == k.hit_tokens);
  CHECK(n.requests_with_hit == r.requests_with_hit);
  CHECK(n.evictions == r.evictions);
  CHECK(n.resident_end == r.resident_end);
  CHECK(n.mean_resident == Approx(r.mean_resident_blocks));
}

}  // namespace

// The traces of agents take a minute and 4 GB; "[.confirm]" does them.
TEST_CASE("a naive replay of the published traces agrees", "[traces]") {
  std::map<std::string, std::unique_ptr<naive::forest>> forests;
  for (const known_figure& k : known_figures) {
    if (std::string(k.trace).rfind("weka", 0) == 0) continue;
    if (kvcache::test::effort(100) < 100 && std::string(k.trace).rfind("mooncake", 0) == 0) continue;
    const loaded& l = *find(k.trace);
    auto& f = forests[k.trace];
    if (f == nullptr) f = std::make_unique<naive::forest>(l.t);
    agrees(l, *f, k);
  }
}

TEST_CASE("a naive replay of the largest traces agrees", "[.confirm]") {
  for (const char* name : {"weka_cc_64_small", "weka_cc_512"}) {
    const loaded* l = find(name);
    if (l == nullptr) continue;
    const naive::forest f(l->t);
    for (const known_figure& k : known_figures) {
      if (std::string(k.trace) == name) agrees(*l, f, k);
    }
  }
}

TEST_CASE("what the traces hold is known", "[traces]") {
  const struct {
    const char* name;
    std::size_t requests;
    std::int64_t blocks, tokens;
    std::int32_t nodes, longest;
  } rows[] = {{"mooncake_conversation", 12031, 288500, 144793823, 182790, 247},
              {"mooncake_synthetic", 3993, 121877, 61194628, 43924, 374},
              {"lmcache_agent_miniswe_64", 402, 37582, 2418842, 2366, 566},
              {"lmcache_agent_magagent_64", 746, 23266, 1512159, 3735, 180},
              {"lmcache_agent_taubench_64", 471, 980, 78233, 142, 16},
              {"weka_cc_64_small", 3999, 8399859, 537717475, 336926, 13757},
              {"weka_cc_512", 46218, 10655473, 5467403989, 399146, 1746}};
  for (const auto& row : rows) {
    const loaded* l = find(row.name);
    if (l == nullptr) continue;
    CAPTURE(row.name);
    CHECK(l->t.requests.size() == row.requests);
    CHECK(l->ready.blocks() == row.blocks);
    CHECK(l->ready.tokens() == row.tokens);
    CHECK(l->ready.nodes() == row.nodes);
    CHECK(l->ready.longest() == row.longest);
  }
}

// llmtrafficlens 0.13 (token hit rate of lru by capacity) and the Mooncake paper's table of reuse (Qin et
// al., FAST 2025) round, and treat the last partial block in their own ways.
TEST_CASE("other tools say the same of the published traces", "[traces]") {
  const loaded& conversation = *find("mooncake_conversation");
  CHECK(token_rate(conversation, 2048) == Approx(5.6).margin(0.05));
  CHECK(token_rate(conversation, 8192) == Approx(18.5).margin(0.05));
  CHECK(token_rate(conversation, 32768) == Approx(34.2).margin(0.1));
  CHECK(token_rate(conversation, -1) == Approx(37.4).margin(0.05));
  CHECK(block_rate(conversation, -1) == Approx(36.6).margin(0.05));
  const loaded& synthetic = *find("mooncake_synthetic");
  CHECK(block_rate(synthetic, -1) == Approx(64.0).margin(0.05));
  CHECK(token_rate(synthetic, -1) == Approx(65.1).margin(0.05));
  // The paper's figure 9: shares of the most that can be hit, at 3 million tokens.
  CHECK(100 * token_rate(conversation, 3'000'000 / 512) / token_rate(conversation, -1) ==
        Approx(37).margin(1));
  CHECK(100 * token_rate(synthetic, 3'000'000 / 512) / token_rate(synthetic, -1) == Approx(48).margin(1));
  // At 50 million tokens nearly all that can be hit is hit.
  CHECK(token_rate(conversation, 50'000'000 / 512) / token_rate(conversation, -1) ==
        Approx(0.992).margin(0.001));
}

TEST_CASE("the exact curve equals lru on the published traces", "[traces]") {
  for (const char* name : {"mooncake_conversation", "mooncake_synthetic", "lmcache_agent_miniswe_64",
                           "lmcache_agent_magagent_64", "lmcache_agent_taubench_64", "weka_cc_64_small"}) {
    const loaded* found = find(name);
    if (found == nullptr) continue;
    const loaded& l = *found;
    const hit_curve c = lru_curve(l.ready);
    CHECK(c.at(-1).hit_blocks == l.ready.ceiling().blocks);
    CHECK(c.at(-1).hit_tokens == l.ready.ceiling().tokens);
    for (std::int64_t capacity = l.ready.longest(); capacity < l.ready.nodes(); capacity = capacity * 3 / 2) {
      CAPTURE(name, capacity);
      const replay_result r = replay(l.ready, options("lru", capacity));
      CHECK(c.at(capacity).hit_blocks == r.hit_blocks);
      CHECK(c.at(capacity).hit_tokens == r.hit_tokens);
    }
  }
}

// Bounds of docs/replay.md. A sample of 1 % of this trace is 3,400 blocks; the seeds are fixed, so nothing
// here is left to chance.
TEST_CASE("a sampled curve errs no more than is said", "[traces]") {
  const loaded* found = find("weka_cc_64_small");
  if (found == nullptr) return;
  const loaded& l = *found;
  const hit_curve exact = lru_curve(l.ready);
  for (const auto& [rate, bound] : {std::pair(0.1, 0.015), std::pair(0.01, 0.04)}) {
    double sum_of_all = 0;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      const hit_curve sampled = lru_curve(l.ready, rate, seed);
      double sum = 0;
      int points = 0;
      for (std::int64_t c = 64; c < l.ready.nodes(); c = c * 5 / 4, ++points) {
        sum += std::abs(double(sampled.at(c).hit_blocks - exact.at(c).hit_blocks));
      }
      const double mean = sum / points / double(l.ready.blocks());
      CAPTURE(rate, seed, mean);
      CHECK(mean < bound);
      sum_of_all += mean;
    }
    CHECK(sum_of_all / 5 < bound / 2);
  }
}

TEST_CASE("optimum, ceiling and losses of a published trace are in order", "[traces]") {
  const loaded& l = *find("mooncake_conversation");
  replay_options o = options("lru", 8192);
  o.workers = 4;
  const replay_result r = replay(l.ready, o);
  const loss_summary s = summarize(l.ready, o, r);
  CHECK(s.ceiling.blocks == 105710);
  CHECK(s.lost_to_capacity.blocks == 105710 - 52381);
  CHECK(s.lost_to_routing.blocks == 52381 - r.hit_blocks);
  CHECK(s.share_less_than_block == 1);  // the first; all others begin with the same block
}
