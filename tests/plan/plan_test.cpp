// SPDX-License-Identifier: Apache-2.0
#include "kvcache/plan.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <string>
#include <vector>

#include "kvcache/attend/host_planes.hpp"
#include "kvcache/blocks/contiguous.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/cache/packed.hpp"
#include "kvcache/quant/presets.hpp"
#include "kvcache/quant/sizes.hpp"
#include "support/environment.hpp"

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

TEST_CASE("the planner counts packed, open and exempt blocks of any format as pools and planes have them") {
  std::mt19937 random(static_cast<uint32_t>(kvc::test::test_seed("plan", 5)));
  const auto pick = [&](auto... of) {
    const int32_t values[] = {of...};
    return values[random() % (sizeof...(of))];
  };
  int lossy_caches = 0;
  for (int64_t round = kvc::test::effort(300); round > 0; --round) {
    const kvc::group_shape shape = gqa(pick(1, 2, 3), pick(1, 2, 3), pick(8, 64, 128));
    const int32_t block = pick(32, 64, 128);
    std::vector<kvc::kv_format> layers(static_cast<size_t>(random() % 2 == 0 ? 1 : shape.layers));
    const int32_t residual = pick(0, 1, 31, 32, 100), exempt = pick(0, 1, 2, 4);
    for (kvc::kv_format& f : layers) {
      for (kvc::side_format* side : {&f.k, &f.v}) {
        const int32_t code = pick(0, 3, 4, 5, 6, 7, 8, 9, 10);
        side->codes = static_cast<kvc::code>(code);
        if (code == 0) continue;
        side->axis = static_cast<kvc::scale_axis>(pick(0, 1, 2, 3));
        side->group_size = pick(0, 8, 32);
        side->symmetric = code > 4 && pick(0, 1) == 1;
      }
      f.residual = residual;
      f.exempt = exempt;
    }
    auto set = kvc::packed_groups(shape, block, layers);
    REQUIRE(set);
    set->group[0].total = kvc::blocks{24};
    auto cache = kvc::cache::create({.groups = set->span(), .max_sequences = 4});
    REQUIRE(cache);
    const kvc::geometry& geo = cache->shape();
    const bool lossy = geo.group[0].format.lossy;
    lossy_caches += lossy;
    // Bytes of everything.
    const auto of_planes =
        kvc::host_planes::size_of({.shape = shape,
                                   .block_size = block,
                                   .blocks = 24,
                                   .formats = layers,
                                   .open_blocks = geo.group[0].open,
                                   .exempt_blocks = geo.groups > 1 ? geo.group[1].total : 0});
    CHECK(of_planes == geo.memory());
    const kvc::block_parts parts = kvc::parts_of(layers, shape, block);
    CHECK(parts.total() == kvc::block_bytes(shape, block, geo.group[0].format));
    // Blocks of a sequence, step by step.
    auto s = cache->open({}, kvc::scope::shared());
    REQUIRE(s);
    int32_t most = 0;
    for (int32_t tokens = 0; tokens < 400;) {
      const int32_t n = pick(1, 1, 7, 64, 100);
      REQUIRE(s->extend(n));
      tokens += n;
      const auto open = [&] {
        const auto t = s->open_table();
        return static_cast<int32_t>(t.size()) -
               static_cast<int32_t>(std::count(t.begin(), t.end(), kvc::no_block));
      };
      CHECK(open() == kvc::open_blocks_for(geo, 0, tokens, n));
      CHECK(open() <= kvc::most_open_blocks(geo, 0, n));
      cache->end_step();
      CHECK(open() == kvc::open_blocks_for(geo, 0, tokens));
      CHECK(kvc::sequence_open_bytes(geo, tokens).count ==
            open() * kvc::bytes_per_token(shape).count * block);
      most = std::max(most, open());
      int64_t held = 0;
      for (int32_t g = 0; g < geo.groups; ++g) {
        const auto used = static_cast<int32_t>(s->table(g).size());
        CHECK(used == kvc::blocks_for(geo, g, tokens));
        CHECK(used == cache->pool(g).used_blocks());
        held += used * kvc::block_bytes(shape, geo.group[g].block_size, geo.group[g].format).count;
      }
      CHECK(held == kvc::sequence_bytes(geo, tokens).count);
    }
    CHECK(most <= kvc::most_open_blocks(geo, 0));
    if (!lossy || layers.size() != 1) continue;
    // Bits per value are the same bytes, without the filling.
    const int64_t full = 1024 / block;
    const kvc::block_parts one = kvc::parts_of(layers, gqa(1, shape.kv_heads, shape.head_dim_k), block);
    const double bits = 8.0 *
                        static_cast<double>(full * (one.total().count - one.filling.count) +
                                            kvc::exempt_bytes(layers[0], shape)) /
                        static_cast<double>(kvc::values_per_token_layer(shape) * 1024);
    CHECK(kvc::bits_per_value(layers[0], shape, block, 1024) == Approx(bits).epsilon(1e-12));
  }
  CHECK(lossy_caches > 1);
}

TEST_CASE("one sequence holds as many open blocks as the residual and the block in use take") {
  const kvc::kv_format kv4 = kvc::find_preset("kv4")->format;
  auto set = kvc::packed_groups(gqa(2, 2, 64), 64, {&kv4, 1});
  REQUIRE(set);
  set->group[0].total = kvc::blocks{8};
  auto geo = kvc::resolve({.groups = set->span(), .max_sequences = 2});
  REQUIRE(geo);
  CHECK(kvc::most_open_blocks(*geo, 0) == 1);  // residual 0: only the block in use
  CHECK(kvc::most_open_blocks(*geo, 0, 1) == 1);
  CHECK(kvc::most_open_blocks(*geo, 0, 512) == 9);
  geo->group[0].format.residual = 32;
  CHECK(kvc::most_open_blocks(*geo, 0) == 2);
  const kvc::block_parts parts = kvc::parts_of({&kv4, 1}, gqa(2, 2, 64), 64);
  CHECK(parts.codes.count == 2 * 2 * 2 * 64 * 64 / 2);  // layers, heads, sides
  CHECK(parts.scales.count == 2 * 2 * (64 + 64) * 2);   // a half float per channel of K and per token of V
  CHECK(parts.minima.count == parts.scales.count);
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
