// SPDX-License-Identifier: Apache-2.0
// What threads may do at once: each its own caches, all of them the board.
#include <atomic>
#include <catch2/catch.hpp>
#include <thread>
#include <vector>

#include "check.h"
#include "support/environment.hpp"

namespace {

using kvcache::test::effort;

kvc_cache_config config_of(const kvc_group_config& group) {
  kvc_cache_config c{};
  c.struct_size = sizeof c;
  c.n_groups = 1;
  c.groups = &group;
  c.max_sequences = 4;
  return c;
}
kvc_group_config small_group() {
  kvc_group_config g{};
  g.struct_size = sizeof g;
  g.block_size = 4;
  g.layers = g.kv_heads = 1;
  g.head_dim_k = 8;
  g.total = 16;
  return g;
}
kvc_scope everyone() {
  kvc_scope s{};
  s.struct_size = sizeof s;
  s.kind = KVC_SCOPE_SHARED;
  return s;
}

}  // namespace

TEST_CASE("caches are made, used and destroyed by several threads at once") {
  std::atomic<int64_t> wrong{0};
  std::atomic<uint64_t> foreign{0};
  const int64_t rounds = effort(2000);
  const auto work = [&] {
    const kvc_group_config group = small_group();
    const kvc_cache_config config = config_of(group);
    const kvc_scope scope = everyone();
    const int32_t text[6] = {1, 2, 3, 4, 5, 6};
    for (int64_t i = 0; i < rounds; ++i) {
      kvc_cache cache{};
      kvc_sequence a{};
      wrong += kvc_cache_create(&config, &cache, nullptr) != KVC_OK;
      wrong += kvc_open(cache, &scope, text, 6, nullptr, &a, nullptr, nullptr) != KVC_OK;
      wrong += kvc_extend(cache, a, 6, 0, nullptr, nullptr) != KVC_OK;
      // A sequence that another thread has in its own cache is none of this one.
      const kvc_sequence other{foreign.exchange(a.id)};
      if (other.id != a.id) wrong += kvc_close(cache, other, nullptr) != KVC_STALE_HANDLE;
      wrong += kvc_cache_destroy(cache, nullptr) != KVC_OK;
      wrong += kvc_cache_end_step(cache, nullptr) != KVC_STALE_HANDLE;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work);
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("of two threads that destroy a cache one is told that it is stale") {
  const kvc_group_config group = small_group();
  const kvc_cache_config config = config_of(group);
  const int64_t rounds = effort(500);
  for (int64_t i = 0; i < rounds; ++i) {
    kvc_cache cache{};
    REQUIRE(kvc_cache_create(&config, &cache, nullptr) == KVC_OK);
    kvc_status first = KVC_OK;
    std::thread other([&] { first = kvc_cache_destroy(cache, nullptr); });
    const kvc_status second = kvc_cache_destroy(cache, nullptr);
    other.join();
    REQUIRE(first + second == KVC_STALE_HANDLE);
  }
}

TEST_CASE("any thread reads the board while the owner works") {
  const kvc_group_config group = small_group();
  const kvc_cache_config config = config_of(group);
  const kvc_scope scope = everyone();
  kvc_cache cache{};
  REQUIRE(kvc_cache_create(&config, &cache, nullptr) == KVC_OK);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> broken{0}, reads{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      uint64_t last = 0;
      while (!stop) {
        kvc_stats s{};
        s.struct_size = sizeof s;
        broken += kvc_cache_board(cache, &s, nullptr) != KVC_OK || s.steps < last;
        broken += s.blocks_used + s.blocks_cached + s.blocks_free + s.blocks_moving != s.blocks_total;
        last = s.steps;
        ++reads;
      }
    });
  }
  int32_t text[12];
  int64_t wrong = 0;
  const int64_t rounds = effort(20000);
  for (int64_t i = 0; i < rounds || reads < 100; ++i) {
    kvc_sequence a{};
    for (int32_t k = 0; k < 12; ++k) text[k] = static_cast<int32_t>(k + i % 5);
    int32_t reused = 0;
    wrong += kvc_open(cache, &scope, text, 12, nullptr, &a, &reused, nullptr) != KVC_OK;
    wrong += kvc_extend(cache, a, 12 - reused, 0, nullptr, nullptr) != KVC_OK;
    wrong += kvc_commit(cache, a, text, 12, nullptr, nullptr) != KVC_OK;
    wrong += kvc_close(cache, a, nullptr) != KVC_OK;
    wrong += kvc_cache_end_step(cache, nullptr) != KVC_OK;
  }
  stop = true;
  for (std::thread& t : readers) t.join();
  CHECK(wrong == 0);
  CHECK(broken == 0);
  CHECK(kvc_cache_destroy(cache, nullptr) == KVC_OK);
}
