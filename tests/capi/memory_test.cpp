// SPDX-License-Identifier: Apache-2.0
// Host memory: every request that creation or reset makes may be refused, and nothing else makes one.
#include <catch2/catch.hpp>

#include "../cache/host_memory.hpp"
#include "kvcache/kvcache.h"

namespace {

namespace host_memory = kvcache::test::host_memory;

struct settings {
  kvc_group_config groups[2]{};
  kvc_cache_config config{};
  int32_t limits[2] = {50, 50};
  settings() {
    for (kvc_group_config& g : groups) {
      g.struct_size = sizeof g;
      g.block_size = 4;
      g.layers = g.kv_heads = 1;
      g.head_dim_k = 8;
      g.total = 24;
    }
    groups[1].format.lossy = 1;
    config.struct_size = sizeof config;
    config.n_groups = 2;
    config.groups = groups;
    config.eviction = "lfu";
    config.account_limits = limits;
    config.n_accounts = 2;
    config.max_sequences = 4;
    config.max_events = 100;
  }
};

int32_t use(kvc_cache cache) {
  kvc_scope scope{};
  scope.struct_size = sizeof scope;
  scope.kind = KVC_SCOPE_SHARED;
  int32_t text[21], wrong = 0, n = 0;
  for (int32_t i = 0; i < 21; ++i) text[i] = i;
  for (int32_t round = 0; round < 20; ++round) {
    kvc_sequence a{}, b{};
    text[13] = round;
    wrong += kvc_open(cache, &scope, text, 21, nullptr, &a, &n, nullptr) != KVC_OK;
    wrong += kvc_extend(cache, a, 21 - n, 0, nullptr, nullptr) != KVC_OK;
    wrong += kvc_settle(cache, a, nullptr) != KVC_OK;
    wrong += kvc_commit(cache, a, text, 21, &n, nullptr) != KVC_OK;
    wrong += kvc_fork(cache, a, &b, nullptr) != KVC_OK;
    wrong += kvc_extend(cache, b, 1, 0, nullptr, nullptr) != KVC_OK;
    wrong += kvc_assign(cache, a, b, nullptr, nullptr) != KVC_OK;
    wrong += kvc_extend(cache, b, 1000, 0, nullptr, nullptr) != KVC_TOO_LONG;
    wrong += kvc_truncate(cache, b, 9, &n, nullptr) != KVC_OK;
    wrong += kvc_close(cache, a, nullptr) != KVC_OK;
    wrong += kvc_close(cache, b, nullptr) != KVC_OK;
    wrong += kvc_cache_evict(cache, 1, nullptr, nullptr) != KVC_OK;
    wrong += kvc_cache_end_step(cache, nullptr) != KVC_OK;
  }
  return wrong;
}

}  // namespace

TEST_CASE("creation answers every refusal of memory and keeps nothing") {
  const settings s;
  const int64_t before = host_memory::outstanding();
  int64_t n = 0;
  for (bool done = false; !done; ++n) {
    const int64_t refused = host_memory::refused();
    kvc_cache cache{};
    kvc_error error{};
    host_memory::refuse(n);
    const kvc_status status = kvc_cache_create(&s.config, &cache, &error);
    host_memory::refuse(-1);
    done = host_memory::refused() == refused;
    INFO("request " << n << ": " << kvc_field_text(error.field));
    REQUIRE(status == (done ? KVC_OK : KVC_OUT_OF_MEMORY));
    if (done) REQUIRE(kvc_cache_destroy(cache, nullptr) == KVC_OK);
    REQUIRE(host_memory::outstanding() == before);
  }
  CHECK(n > 25);
}

TEST_CASE("a reset that is refused memory leaves the cache as it was") {
  const settings s;
  kvc_cache cache{};
  REQUIRE(kvc_cache_create(&s.config, &cache, nullptr) == KVC_OK);
  REQUIRE(use(cache) == 0);
  kvc_stats before{}, after{};
  before.struct_size = after.struct_size = sizeof before;
  REQUIRE(kvc_cache_count(cache, &before, nullptr) == KVC_OK);
  int64_t n = 0;
  for (bool done = false; !done; ++n) {
    const int64_t refused = host_memory::refused();
    host_memory::refuse(n);
    const kvc_status status = kvc_cache_reset(cache, nullptr);
    host_memory::refuse(-1);
    done = host_memory::refused() == refused;
    REQUIRE(status == (done ? KVC_OK : KVC_OUT_OF_MEMORY));
    REQUIRE(kvc_cache_count(cache, &after, nullptr) == KVC_OK);
    REQUIRE((after.nodes_stored == before.nodes_stored) == !done);
  }
  CHECK(n > 25);
  REQUIRE(use(cache) == 0);
  REQUIRE(kvc_cache_destroy(cache, nullptr) == KVC_OK);
}

TEST_CASE("nothing is allocated between creation and destruction") {
  const settings s;
  kvc_cache cache{};
  REQUIRE(kvc_cache_create(&s.config, &cache, nullptr) == KVC_OK);
  const int64_t before = host_memory::requests();
  const int32_t wrong = use(cache);
  CHECK(host_memory::requests() == before);
  CHECK(wrong == 0);
  REQUIRE(kvc_cache_destroy(cache, nullptr) == KVC_OK);
}
