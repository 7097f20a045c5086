// SPDX-License-Identifier: Apache-2.0
// The cache over the reserving allocator, and what a configuration may not ask for.
#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "kvcache/blocks/contiguous.hpp"
#include "kvcache/cache.hpp"
#include "support/environment.hpp"

namespace {

using namespace kvcache;

struct reserving : serving {
  using allocator_type = contiguous;
};
using baseline = basic_cache<reserving>;

constexpr int32_t block_size = 4;
constexpr int32_t region = 16;  // tokens
constexpr int32_t regions = 3;

group_config group_of_regions() {
  return {.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 1, .head_dim_v = 1},
          .block_size = block_size,
          .total = {regions * region / block_size},
          .reserve = region};
}

// One sequence of the model: which slots it was given is found in its table.
struct reserved {
  baseline::sequence handle;
  std::vector<token_id> text;
};

}  // namespace

TEST_CASE("a sequence that has reserved nothing yet breaks no invariant") {
  const group_config group = group_of_regions();
  auto c = baseline::create({.groups = {&group, 1}, .max_sequences = 4, .max_sequence_tokens = region});
  REQUIRE(c);
  auto s = c->open({}, scope::shared());
  REQUIRE(s);
  CHECK(c->check_invariants() == nullptr);
  REQUIRE(s->extend(1));
  CHECK(s->table().size() == region / block_size);
  CHECK(c->check_invariants() == nullptr);
  REQUIRE(s->truncate(0));
  CHECK(c->check_invariants() == nullptr);
}

TEST_CASE("sequences over reserved regions read their own text after every random call") {
  const uint64_t seed = kvcache::test::test_seed("regions", 20260107);
  std::mt19937_64 random(seed);
  const group_config group = group_of_regions();
  auto c = baseline::create({.groups = {&group, 1}, .max_sequences = 5, .max_sequence_tokens = region});
  REQUIRE(c);
  std::vector<token_id> slots(regions * region, -1);
  std::vector<reserved> live;
  int64_t refused = 0;
  for (int64_t i = 0; i < kvcache::test::effort(200'000); ++i) {
    const auto k = live.empty() ? 0 : random() % live.size();
    switch (random() % 6) {
      case 0: {
        auto s = c->open(std::vector<token_id>(random() % 9, 7), scope::shared());
        REQUIRE(bool(s) == (live.size() < 5));
        if (!s) break;
        CHECK(s->reused() == 0);
        live.push_back({*std::move(s), {}});
        break;
      }
      case 1:
        if (!live.empty() && random() % 3 == 0) live.erase(live.begin() + static_cast<std::ptrdiff_t>(k));
        break;
      case 2:
        if (live.empty()) break;
        live[k].text.resize(random() % (live[k].text.size() + 1));
        REQUIRE(live[k].handle.truncate(static_cast<int32_t>(live[k].text.size())));
        REQUIRE(*live[k].handle.commit(live[k].text) == 0);
        REQUIRE(live[k].handle.fork().error().code == errc::unsupported);
        break;
      default: {
        if (live.empty()) break;
        reserved& q = live[k];
        const auto n = static_cast<int32_t>(random() % 5);
        int64_t holders = 0;
        for (const reserved& r : live) holders += !r.handle.table().empty();
        const bool fits = static_cast<int32_t>(q.text.size()) + n <= region;
        const bool room = n == 0 || !q.handle.table().empty() || holders < regions;
        const auto got = q.handle.extend(n);
        REQUIRE(bool(got) == (fits && room));
        if (!got) {
          ++refused;
          REQUIRE(got.error().code == (fits ? errc::out_of_blocks : errc::too_long));
          break;
        }
        for (int32_t t = 0; t < n; ++t) {
          const auto at = static_cast<int32_t>(q.text.size());
          const block_id b = q.handle.table()[static_cast<size_t>(at / block_size)];
          q.text.push_back(static_cast<token_id>(random() % 1000));
          slots[index(b) * block_size + static_cast<size_t>(at % block_size)] = q.text.back();
        }
      }
    }
    c->end_step();
    if (const char* broken = c->check_invariants()) FAIL("seed " << seed << ", call " << i << ": " << broken);
    const stats s = c->count();
    if (s.blocks_used + s.blocks_cached + s.blocks_free != s.blocks_total) FAIL("blocks do not add up");
    for (const reserved& q : live) {
      for (size_t t = 0; t < q.text.size(); ++t) {
        const block_id b = q.handle.table()[t / block_size];
        const bool in_a_row = raw(b) == raw(q.handle.table()[0]) + static_cast<int32_t>(t / block_size);
        if (!in_a_row || slots[index(b) * block_size + t % block_size] != q.text[t]) {
          FAIL("seed " << seed << ", call " << i << ": another text at token " << t);
        }
      }
    }
  }
  CHECK(refused > 0);
}

TEST_CASE("a reservation is refused where blocks can be shared, as forks would write it both") {
  const group_config group = group_of_regions();
  const auto c = cache::create({.groups = {&group, 1}});
  REQUIRE(!c);
  CHECK(c.error().code == errc::unsupported);
  CHECK(std::string(c.error().field) == "reserve");
  CHECK(c.error().value == region);
}

TEST_CASE("the largest residual does not overflow the room for drafts") {
  const group_config group{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 1, .head_dim_v = 1},
                           .block_size = 4,
                           .total = {8},
                           .open = {8},
                           .format = {.residual = INT32_MAX, .lossy = true}};
  auto c = cache::create({.groups = {&group, 1}, .max_sequences = 2});
  REQUIRE(c);
  auto s = c->open({}, scope::shared());
  REQUIRE(s);
  CHECK(*s->extend(9, true) == 9);
  CHECK(s->accept(9));
  CHECK(s->sealed() == 0);
}
