// SPDX-License-Identifier: Apache-2.0
// Published traces: figures that are known from elsewhere, and equality with the naive replay.
#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "error.hpp"
#include "naive.hpp"
#include "replay/curve.hpp"
#include "replay/summary.hpp"
#include "support/environment.hpp"
#include "trace/read.hpp"

using namespace kvcache::cli;

namespace {

trace read(const std::string& name) {
  const std::string path = kvcache::test::data_path("traces/" + name + ".jsonl.zst");
  return read_trace({&path, 1});
}

replay_options options(const std::string& policy, std::int64_t capacity) {
  replay_options o;
  o.policy = policy;
  o.capacity_blocks = capacity;
  return o;
}

}  // namespace

// One-off: prints the table of the tests below, each figure from both. Hours under a sanitizer.
TEST_CASE("confirm every figure by the naive replay", "[.confirm]") {
  for (const char* name : {"mooncake_conversation", "mooncake_synthetic", "lmcache_agent_miniswe_64",
                           "lmcache_agent_magagent_64", "lmcache_agent_taubench_64"}) {
    const trace t = read(name);
    const naive::forest f(t);
    const traffic ready(t);
    std::printf("%s: %zu requests, %lld blocks, %d unique\n", name, t.requests.size(),
                static_cast<long long>(ready.blocks()), ready.nodes());
    for (const std::int64_t capacity : {128, 512, 2048, 8192}) {
      for (const char* policy : {"lru", "fifo", "lfu", "slru", "belady", "belady_bypass"}) {
        const replay_result r = replay(ready, options(policy, capacity));
        const naive::outcome n = naive::replay(t, f, policy, capacity);
        CHECK(r.hit_blocks == n.hit_blocks);
        CHECK(r.hit_tokens == n.hit_tokens);
        CHECK(r.evictions == n.evictions);
        CHECK(r.mean_resident_blocks == Approx(n.mean_resident));
        std::printf("    {\"%s\", \"%s\", %lld, %lld, %lld},\n", name, policy,
                    static_cast<long long>(capacity), static_cast<long long>(r.hit_blocks),
                    static_cast<long long>(r.hit_tokens));
        std::fflush(stdout);
      }
    }
  }
}
