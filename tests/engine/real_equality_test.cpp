// SPDX-License-Identifier: Apache-2.0
// The same promise as equality_test, as a sample on the real model: its logits are the same bits in every
// cache kind made of the library, and agree with the reference to rounding.
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <iterator>

#include "program.hpp"
#include "real_model.hpp"
#include "runner.hpp"
#include "support/environment.hpp"

using namespace engine;

namespace {

std::vector<token_id> first_tokens(int count) {
  std::ifstream in(kvcache::test::data_path("text.txt"));
  const std::string text(std::istreambuf_iterator<char>(in), {});
  std::vector<token_id> ids = test::real_model().text->encode(text, specials::as_text);
  REQUIRE(ids.size() >= static_cast<std::size_t>(count));
  ids.resize(static_cast<std::size_t>(count));
  return ids;
}

struct setting {
  const char* kind;
  int block;
  int chunk;
  const char* type = "f32";
};

std::unique_ptr<cache_kind> cache_of(const setting& s) {
  common_options options;
  options.cache = s.kind;
  options.block_size = s.block;
  options.type = s.type;
  auto made = open_cache(options, test::real_model(), 512, 4);
  if (!made) FAIL(describe(made.error()));
  return std::move(*made);
}

using row_observer = std::function<void(int, std::span<const float>)>;

void feed_rest(cache_kind& cache, int slot, std::span<const token_id> ids, int chunk,
               const row_observer& see) {
  const auto rest = ids.subspan(static_cast<std::size_t>(cache.length(slot)));
  REQUIRE(feed(*test::real_model().model, cache, slot, rest, chunk, observe::all, see));
}

std::vector<std::uint64_t> prints(const setting& s, std::span<const token_id> ids) {
  const auto cache = cache_of(s);
  const open_slot slot(*cache, cache->open(ids, cache_scope::everyone())->slot);
  std::vector<std::uint64_t> out;
  feed_rest(*cache, slot.slot(), ids, s.chunk,
            [&](int, std::span<const float> logits) { out.push_back(fingerprint(logits)); });
  return out;
}

// Forks in the middle of a block, lets the origin go elsewhere, and ends the branch; then again from the
// cache.
void fork_resume_and_hit(const setting& s, std::span<const token_id> ids,
                         const std::vector<std::uint64_t>& expected) {
  const auto cache = cache_of(s);
  const std::size_t middle = ids.size() / 2 + 3;
  const auto see = [&](int position, std::span<const float> logits) {
    CAPTURE(position);
    CHECK(fingerprint(logits) == expected[static_cast<std::size_t>(position)]);
  };
  const int origin = cache->open(ids, cache_scope::everyone())->slot;
  feed_rest(*cache, origin, ids.first(middle), s.chunk, see);
  const auto branch = cache->fork(origin);
  REQUIRE(branch);
  const std::vector<token_id> elsewhere(7, 42);
  REQUIRE(feed(*test::real_model().model, *cache, origin, elsewhere, s.chunk, observe::last,
               [](int, std::span<const float>) {}));
  feed_rest(*cache, *branch, ids.first(middle + 9), s.chunk, see);
  REQUIRE(cache->commit(*branch, ids.first(middle + 9)));
  cache->close(*branch);  // preempted
  const auto resumed = cache->open(ids, cache_scope::everyone());
  REQUIRE(resumed);
  CHECK(resumed->reused == static_cast<int>(middle + 9) / s.block * s.block);
  feed_rest(*cache, resumed->slot, ids, s.chunk, see);
  REQUIRE(cache->commit(resumed->slot, ids));
  cache->close(resumed->slot);
  const auto hit = cache->open(ids, cache_scope::everyone());
  REQUIRE(hit);
  CHECK(hit->reused == static_cast<int>(ids.size() - 1) / s.block * s.block);
  feed_rest(*cache, hit->slot, ids, s.chunk, see);
}

}  // namespace

TEST_CASE("the real model's logits are the same bits in contiguous and in paged memory", "[model]") {
  const std::vector<token_id> ids = first_tokens(300);
  for (const char* type : {"f32", "f16"}) {
    const std::vector<std::uint64_t> expected = prints({"contiguous", 16, 300, type}, ids);
    REQUIRE(expected.size() == ids.size());
    for (const setting& s :
         {setting{"paged", 8, 64, type}, setting{"paged", 32, 17, type}, setting{"paged", 128, 300, type}}) {
      CAPTURE(s.block, s.chunk, s.type);
      CHECK(prints(s, ids) == expected);
    }
    fork_resume_and_hit({"paged", 16, 128, type}, ids, expected);
  }
}

TEST_CASE("the real model's logits in paged memory agree with the reference", "[model]") {
  const std::vector<token_id> ids = first_tokens(160);
  std::vector<std::vector<float>> expected;
  const auto reference = cache_of({"reference", 16, 64});
  feed_rest(*reference, reference->open(ids, cache_scope::everyone())->slot, ids, 64,
            [&](int, std::span<const float> logits) { expected.emplace_back(logits.begin(), logits.end()); });
  const auto paged = cache_of({"paged", 16, 64});
  double most = 0;
  feed_rest(*paged, paged->open(ids, cache_scope::everyone())->slot, ids, 64,
            [&](int position, std::span<const float> logits) {
              const auto& row = expected[static_cast<std::size_t>(position)];
              for (std::size_t i = 0; i < row.size(); ++i)
                most = std::max(most, std::abs(double(row[i]) - logits[i]));
            });
  INFO("largest difference " << most);
  CHECK(most <= 1e-4);
  CHECK(most > 0);
}

TEST_CASE("a few tokens of the real model are the same bits in contiguous and in paged memory", "[sample]") {
  const std::vector<token_id> ids = first_tokens(20);
  CHECK(prints({"paged", 8, 7}, ids) == prints({"contiguous", 16, 20}, ids));
}
