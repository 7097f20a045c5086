// SPDX-License-Identifier: Apache-2.0
#include "kvcache/plan.hpp"

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kvcache/attend/host_planes.hpp"
#include "kvcache/blocks/contiguous.hpp"
#include "kvcache/cache.hpp"

namespace kvc = kvcache;

namespace {

kvc::group_shape gqa(int32_t layers, int32_t heads, int32_t dim, kvc::element type = kvc::element::f16) {
  return {.layers = layers, .kv_heads = heads, .head_dim_k = dim, .head_dim_v = dim, .type = type};
}

// Opens sequences of `tokens` each until the cache refuses.
template <class Cache>
int32_t fill(Cache& cache, int32_t tokens) {
  std::vector<typename Cache::sequence> held;
  for (;;) {
    auto s = cache.open({}, kvc::scope::shared());
    if (!s || !s->extend(tokens)) return static_cast<int32_t>(held.size());
    held.push_back(std::move(*s));
  }
}

struct reserved : kvc::serving {
  using allocator_type = kvc::contiguous;
};

}  // namespace

TEST_CASE("bytes per token agree with published figures") {
  // 80 layers of head dim 128 in 16 bit: MHA with 64 heads, GQA with 8, MQA with 1.
  CHECK(kvc::bytes_per_token(gqa(80, 64, 128)).count == 2560 * 1024);
  CHECK(kvc::bytes_per_token(gqa(80, 8, 128)).count == 320 * 1024);
  CHECK(kvc::bytes_per_token(gqa(80, 1, 128)).count == 40 * 1024);
  // Llama 3 8B: 32 layers, 8 kv heads of 128.
  CHECK(kvc::bytes_per_token(gqa(32, 8, 128)).count == 128 * 1024);
  // SmolLM2-135M: 11,520 values.
  CHECK(kvc::bytes_per_token(gqa(30, 3, 64, kvc::element::f32)).count == 46080);
  CHECK(kvc::bytes_per_token(gqa(30, 3, 64)).count == 23040);
  // An MLA latent stores 512 + 64 values once; V is its first 512.
  const kvc::group_shape mla{
      .layers = 1, .kv_heads = 1, .head_dim_k = 576, .head_dim_v = 512, .v_aliases_k = true};
  CHECK(kvc::values_per_token_layer(mla) == 576);
}

TEST_CASE("borrowed layers store nothing") {
  const int32_t owner[] = {0, 1, 0, 1};
  kvc::model_shape m{.layers = 4, .q_heads = 8, .kv_heads = 2, .head_dim = 64, .layer_owner = owner};
  CHECK(kvc::group_of(m).layers == 2);
  const auto geo = kvc::resolve({.shape = m, .capacity = kvc::mebibytes(1)});
  REQUIRE(geo);
  CHECK(kvc::bytes_per_token(*geo).count == 2 * 2 * 2 * 64 * 2);
}

TEST_CASE("the planner predicts exactly what the allocator hands out") {
  for (const int32_t block : {1, 8, 16, 32, 128}) {
    for (const int32_t tokens : {1, 7, 16, 17, 100, 333}) {
      const kvc::cache_config config{.shape = {.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 64},
                                     .block_size = block,
                                     .capacity = kvc::mebibytes(3)};
      auto cache = kvc::cache::create(config);
      REQUIRE(cache);
      CAPTURE(block, tokens);
      CHECK(fill(*cache, tokens) == kvc::max_batch(cache->shape(), tokens));
      auto one = cache->open({}, kvc::scope::shared());
      REQUIRE(one);
      REQUIRE(one->extend(tokens));
      const auto used = static_cast<int64_t>(cache->count().blocks_used);
      CHECK(used == kvc::blocks_for(cache->shape(), 0, tokens));
      CHECK(used * 3 * 2 * 2 * 64 * 2 * block == kvc::sequence_bytes(cache->shape(), tokens).count);
    }
  }
}

TEST_CASE("the planner predicts the longest context of a batch") {
  for (const int32_t batch : {1, 2, 3, 7}) {
    auto cache = kvc::cache::create({.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64},
                                     .block_size = 8,
                                     .capacity = kvc::kibibytes(64)});
    REQUIRE(cache);
    const int32_t longest = kvc::max_context(cache->shape(), batch);
    CHECK(fill(*cache, longest) >= batch);
    CHECK(fill(*cache, longest + 1) < batch);
  }
}

TEST_CASE("the planner counts reservations as the baseline takes them") {
  const kvc::group_config group[] = {
      {.shape = gqa(2, 2, 64), .block_size = 16, .total = kvc::blocks{64}, .reserve = 200}};
  auto cache = kvc::basic_cache<reserved>::create({.groups = group, .max_sequence_tokens = 208});
  REQUIRE(!cache);  // 64 blocks are not a whole number of 13-block regions
  CHECK(std::string(cache.error().field) == "total");
  const kvc::group_config whole[] = {
      {.shape = gqa(2, 2, 64), .block_size = 16, .total = kvc::blocks{65}, .reserve = 200}};
  cache = kvc::basic_cache<reserved>::create({.groups = whole, .max_sequence_tokens = 208});
  REQUIRE(cache);
  CHECK(kvc::max_batch(cache->shape(), 5) == 5);
  CHECK(fill(*cache, 5) == 5);
}

TEST_CASE("planes have exactly the bytes that the planner says") {
  for (const auto type : {kvc::element::f32, kvc::element::f16, kvc::element::bf16}) {
    const kvc::group_shape shape = gqa(3, 2, 64, type);
    const kvc::group_config groups[] = {{.shape = shape, .block_size = 32, .total = kvc::blocks{7}}};
    const auto geo = kvc::resolve({.groups = groups});
    REQUIRE(geo);
    auto planes =
        kvc::host_planes::create({.shape = shape, .block_size = 32, .blocks = 7, .layer_owner = {}});
    REQUIRE(planes);
    CHECK(planes->size() == geo->memory());
  }
}

TEST_CASE("two groups get room for the same number of tokens") {
  const kvc::group_config groups[] = {{.shape = gqa(2, 4, 128), .block_size = 32},
                                      {.shape = gqa(6, 1, 64), .block_size = 16}};
  const auto geo = kvc::resolve({.capacity = kvc::mebibytes(8), .groups = groups});
  REQUIRE(geo);
  CHECK(geo->group[0].total * 32 == geo->group[1].total * 16);
  CHECK(geo->memory() <= kvc::mebibytes(8));
  const kvc::bytes unit{kvc::bytes_per_token(*geo).count * geo->unit};
  CHECK((geo->memory() + unit) > kvc::mebibytes(8));
}

TEST_CASE("the regime follows from batch and context") {
  // Llama 3 8B in 16 bit: 8.03e9 parameters; at batch 32 x 8k the cache is 2.14 times the weights.
  const kvc::bytes weights = kvc::weight_bytes(8'030'261'248, 16);
  const auto step = kvc::decode_step(gqa(32, 8, 128), weights, 32, 8192);
  CHECK(step.cache_over_weights() == Approx(2.14).margin(0.005));
  CHECK(step.dominated_by() == kvc::regime::cache_dominated);
  CHECK(step.factor(0, 1) == Approx(1 - 0.32).margin(0.005));  // weights for nothing save a third
  CHECK(step.factor(1, 0.5) < step.factor(0.5, 1));
  const auto one = kvc::decode_step(gqa(32, 8, 128), weights, 1, 2048);
  CHECK(one.dominated_by() == kvc::regime::weight_dominated);
  CHECK(one.seconds(3.35e12) == Approx((16.06e9 + 0.268e9) / 3.35e12).epsilon(0.01));
}
