// SPDX-License-Identifier: Apache-2.0
// What the plan says against what a cache of the same configuration hands out, block by block.
#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "kvcache/cache.hpp"
#include "kvcache/plan.hpp"
#include "kvcache/quant/presets.hpp"
#include "plan/capacity.hpp"
#include "plan/catalogue.hpp"
#include "plan/plan.hpp"
#include "plan/source.hpp"
#include "support/environment.hpp"

namespace kvc = kvcache;
namespace cli = kvcache::cli;

namespace {

using sequences = std::vector<kvc::cache::sequence>;

// Lets sequences grow to `tokens` each, in steps of all together that are not larger than a step may be.
// Stops at the first refusal. `longest` is then what all of them have.
bool grow(kvc::cache& cache, sequences& all, int32_t& longest, int32_t tokens) {
  const auto n = static_cast<int32_t>(all.size());
  const int32_t most = kvc::cache_config{}.max_step_tokens;
  while (longest < tokens) {
    // Either all of them by a few tokens, or in turn by as much as a step allows.
    const int32_t each = std::min(tokens - longest, std::max(1, most / std::max(1, std::min(n, most))));
    int32_t in_step = 0;
    for (auto& s : all) {
      if (in_step + each > most) {
        cache.end_step();
        in_step = 0;
      }
      if (!s.extend(each)) return false;
      in_step += each;
    }
    cache.end_step();
    longest += each;
  }
  return true;
}

// A cache for `n` sequences as the plan describes it, with all of them open.
struct filled {
  std::unique_ptr<kvc::cache> cache;
  sequences all;
  int32_t longest = 0;

  filled(const std::vector<kvc::group_config>& groups, int64_t memory, int32_t n) {
    auto made = kvc::cache::create(cli::config_of(groups, memory, n));
    if (!made) return;
    cache = std::make_unique<kvc::cache>(std::move(*made));
    for (int32_t i = 0; i < n; ++i) {
      auto s = cache->open({}, kvc::scope::shared());
      REQUIRE(s);
      all.push_back(std::move(*s));
    }
  }
  bool grow_to(int32_t tokens) { return cache != nullptr && grow(*cache, all, longest, tokens); }
};

int64_t open_blocks(kvc::cache::sequence& s, int32_t group) {
  const auto table = s.open_table(group);
  return static_cast<int64_t>(table.size()) - std::count(table.begin(), table.end(), kvc::no_block);
}

// Bytes and blocks that a cache has handed out.
struct handed_out {
  int64_t bytes = 0, blocks = 0, open = 0;
};
handed_out count(filled& f) {
  handed_out out;
  const kvc::geometry& geo = f.cache->shape();
  for (int32_t g = 0; g < geo.groups; ++g) {
    const kvc::group_geometry& x = geo.group[g];
    const int64_t used = f.cache->pool(g).used_blocks();
    int64_t open = 0;
    if (x.format.lossy) {
      for (auto& s : f.all) open += open_blocks(s, g);
    }
    out.bytes += kvc::block_bytes(x.shape, x.block_size, x.format).count * used +
                 kvc::open_block_bytes(x.shape, x.block_size, x.format).count * open;
    out.blocks += x.first_only ? 0 : used;
    out.open += open;
  }
  return out;
}

int64_t total_blocks(const kvc::geometry& geo) {
  int64_t sum = 0;
  for (int32_t g = 0; g < geo.groups; ++g) sum += geo.group[g].first_only ? 0 : geo.group[g].total;
  return sum;
}

// Every number of the plan that a cache can answer.
void check_plan(const std::vector<cli::pool>& pools, const cli::capacity_question& q) {
  const std::vector<kvc::group_config> groups = cli::groups_of(pools);
  const cli::holding plan = cli::library_holding(groups, q);
  CAPTURE(q.context, q.batch, *q.memory, *plan.max_batch, *plan.max_context);

  // The largest batch: a cache for so many holds them, one for one more does not.
  const auto most = static_cast<int32_t>(*plan.max_batch);
  if (most > 0) {
    filled f(groups, *q.memory, most);
    CHECK(f.grow_to(q.context));
  }
  CHECK_FALSE(filled(groups, *q.memory, most + 1).grow_to(q.context));

  // The batch that was asked for.
  filled batch(groups, *q.memory, q.batch);
  CHECK((q.batch <= most) == batch.grow_to(q.context));
  CHECK(*plan.blocks == (batch.cache == nullptr ? 0 : total_blocks(batch.cache->shape())));
  if (q.batch <= most) {
    const handed_out held = count(batch);
    CHECK(held.bytes == plan.kv_bytes);
    CHECK(held.blocks == plan.blocks_needed);
    CHECK(held.open == plan.open_needed);
  }

  // The longest text of all of them, and not a token more.
  filled longest(groups, *q.memory, q.batch);
  const auto tokens = static_cast<int32_t>(*plan.max_context);
  CHECK((tokens == 0 || longest.grow_to(tokens)));
  CHECK_FALSE(longest.grow_to(tokens + 1));
}

}  // namespace

TEST_CASE("plan and allocator agree for every preset and for the models that people run") {
  struct row {
    const char* model;
    int32_t context;
    int32_t batch;
    int64_t gib;
  };
  constexpr row rows[] = {{"llama-3-8b", 4096, 5, 4},
                          {"llama-2-7b", 1000, 3, 4},
                          {"phi-3-mini-128k", 777, 2, 3},
                          {"smollm2-135m", 8192, 4, 1}};
  for (const row& r : rows) {
    const cli::model m = cli::model_of(*cli::find_model(r.model));
    for (const char* kv : {"f32", "f16", "bf16", "fp8", "e5m2", "k8v8", "k8v4", "k4v4", "kv8", "kv6", "kv5",
                           "kv4", "kv3", "kv2", "k16v8"}) {
      INFO(r.model << " " << kv);
      std::vector<std::string> notes;
      check_plan(cli::pools_of(m, cli::parse_kv("--kv", kv), 0, notes), {r.context, r.batch, r.gib << 30});
    }
  }
}

TEST_CASE("plan and allocator agree for random shapes, formats, block sizes and memories") {
  std::mt19937 random(static_cast<uint32_t>(kvc::test::test_seed("allocator", 11)));
  const auto pick = [&](auto... of) {
    const int32_t values[] = {static_cast<int32_t>(of)...};
    return values[random() % (sizeof...(of))];
  };
  int packed = 0, nothing = 0;
  const int64_t rounds = kvc::test::effort(400);
  for (int64_t round = 0; round < rounds; ++round) {
    CAPTURE(round);
    // One to three kinds of layers, in any order; latents only where nothing is packed.
    cli::kv_choice kv;
    kv.type = static_cast<kvc::element>(pick(0, 1, 2));
    const bool packs = pick(0, 1) == 1;
    const bool latent = !packs && pick(0, 0, 1) == 1;
    if (packs) {
      for (kvc::side_format* side : {&kv.format.k, &kv.format.v}) {
        side->codes = static_cast<kvc::code>(pick(0, 3, 4, 5, 6, 7, 8, 9, 10));
        if (side->codes == kvc::code::exact) continue;
        side->axis = static_cast<kvc::scale_axis>(pick(0, 1, 2, 3));
        side->group_size = pick(0, 8, 32);
        side->symmetric = side->codes >= kvc::code::int8 && pick(0, 1) == 1;
      }
      kv.format.residual = pick(0, 0, 1, 31, 32, 100);
      kv.format.exempt = pick(0, 1, 2, 4);
    }
    cli::model m;
    const int32_t kinds = pick(1, 1, 2, 3);
    std::vector<cli::layer> kind(static_cast<size_t>(kinds));
    for (cli::layer& l : kind) {
      const int32_t dim = pick(8, 64, 80, 128);
      l = latent ? cli::layer{cli::layer_kind::latent, 0, 1, dim + 16, dim}
                 : cli::layer{cli::layer_kind::full, 0, pick(1, 2, 3, 8), dim, pick(dim, dim, 64)};
    }
    for (int32_t i = pick(1, 3, 7); i >= 0; --i) m.layers.push_back(kind[random() % kind.size()]);
    std::vector<std::string> notes;
    const auto pools = cli::pools_of(m, kv, packs ? pick(32, 64, 128) : pick(1, 8, 16, 32, 128), notes);
    int64_t unit = 0;
    for (const cli::pool& p : pools) {
      packed += p.block.lossy;
      unit += kvc::block_bytes(p.shape, p.block_size, p.block).count +
              4 * kvc::open_block_bytes(p.shape, p.block_size, p.block).count;
    }
    const int64_t memory = unit * pick(1, 7, 40, 150) + static_cast<int32_t>(random() % 5000);
    const cli::capacity_question q{pick(1, 7, 64, 100, 333, 700), pick(1, 2, 5, 17), memory};
    check_plan(pools, q);
    nothing += cli::library_holding(cli::groups_of(pools), q).max_context == 0;
  }
  CHECK((packed > 0 && packed < rounds * 3));
  CHECK((rounds < 40 || (nothing > 0 && nothing < rounds / 2)));
}

TEST_CASE("models with windows: what this library takes is what its allocator hands out") {
  for (const char* name : {"gemma-3-1b", "mistral-7b", "gpt-oss-20b"}) {
    INFO(name);
    std::vector<std::string> notes;
    const auto pools =
        cli::pools_of(cli::model_of(*cli::find_model(name)), cli::parse_kv("--kv", "f16"), 0, notes);
    CHECK(cli::groups_of(pools).size() == 1);
    check_plan(pools, {3000, 3, int64_t{2} << 30});
  }
}

TEST_CASE("pools without windows are counted like the library's groups") {
  std::mt19937 random(static_cast<uint32_t>(kvc::test::test_seed("pools", 13)));
  for (const char* kv : {"f16", "k8v4", "k4v4:residual=40", "k=int4/token,v=e4m3"}) {
    for (int i = 0; i < 50; ++i) {
      std::vector<std::string> notes;
      const cli::model m = cli::model_of_shape("", "layers=3,kv_heads=2,head_dim=64");
      const auto pools = cli::pools_of(m, cli::parse_kv("--kv", kv), 0, notes);
      const cli::capacity_question q{static_cast<int32_t>(1 + random() % 1000),
                                     static_cast<int32_t>(1 + random() % 9),
                                     static_cast<int64_t>(random() % (64 << 20))};
      const cli::holding a = cli::library_holding(cli::groups_of(pools), q),
                         b = cli::windowed_holding(pools, q);
      CAPTURE(kv, q.context, q.batch, *q.memory);
      CHECK(a.bytes_per_token == b.bytes_per_token);
      CHECK(a.kv_bytes == b.kv_bytes);
      CHECK(a.blocks_needed == b.blocks_needed);
      CHECK(a.open_needed == b.open_needed);
      CHECK(a.max_batch == b.max_batch);
      CHECK(a.max_context == b.max_context);
    }
  }
}
