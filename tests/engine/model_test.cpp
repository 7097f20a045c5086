// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>

#include "cache_kind.hpp"
#include "gemm.hpp"
#include "runner.hpp"
#include "sampling.hpp"
#include "support/environment.hpp"
#include "support/seeded_model.hpp"

using namespace engine;
using namespace engine::test;

namespace {

std::vector<simd_target> targets() {
  std::vector<simd_target> out;
  for (const simd_target t : {simd_target::baseline, simd_target::avx2, simd_target::avx512}) {
    if (can_run(t)) out.push_back(t);
  }
  return out;
}

/// A model with a cache of its own.
struct rig : seeded_model {
  std::unique_ptr<cache_kind> cache;

  rig(std::string_view kind, int threads, simd_target target = best_simd_target(), int sequences = 8)
      : seeded_model(threads, target), cache(open_cache(kind, config(sequences, 256))) {}
};

/// Fingerprint of the logits at each position, when the prompt is fed in chunks.
std::vector<std::uint64_t> fed_in_chunks(rig& r, std::span<const token_id> prompt, int chunk) {
  std::vector<std::uint64_t> out;
  const auto opened = r.cache->open(prompt, cache_scope::only("test"));
  REQUIRE(opened);
  REQUIRE(opened->reused == 0);
  const open_slot slot(*r.cache, opened->slot);
  REQUIRE(feed(*r.model, *r.cache, slot.slot(), prompt, chunk, observe::all,
               [&](int, std::span<const float> logits) { out.push_back(fingerprint(logits)); }));
  return out;
}

}  // namespace

TEST_CASE("a panel product is right, and a column's bits do not depend on its place or its neighbours") {
  splitmix64 random(kvcache::test::test_seed("panel product", 3));
  for (const simd_target target : targets()) {
    const panel_product multiply = panel_product_for(target);
    for (const int depth : {1, 16, 32, 64, 65, 144, 384, 512, 576, 1536}) {
      std::vector<float> panel(static_cast<std::size_t>(depth) * panel_rows);
      for (float& w : panel) w = static_cast<float>(random.uniform() * 2 - 1);
      std::vector<float> column(static_cast<std::size_t>(depth));
      for (float& x : column) x = static_cast<float>(random.uniform() * 2 - 1);
      std::vector<float> expected;
      for (const int columns : {4, 8, 12, 16, 20, 60, 64, 128, 132, 256}) {
        const auto total = static_cast<std::size_t>(columns);
        std::vector<float> x(total * column.size());
        for (float& v : x) v = static_cast<float>(random.uniform() * 2 - 1);
        const std::size_t place = random.next() % total;
        std::copy(column.begin(), column.end(),
                  x.begin() + static_cast<std::ptrdiff_t>(place * column.size()));
        std::vector<float> y(total * panel_rows);
        multiply(panel.data(), depth, x.data(), columns, y.data());
        const std::vector<float> got(y.begin() + static_cast<std::ptrdiff_t>(place * panel_rows),
                                     y.begin() + static_cast<std::ptrdiff_t>((place + 1) * panel_rows));
        if (expected.empty()) expected = got;
        if (got != expected) FAIL(name_of(target) << " depth " << depth << " columns " << columns);
      }
      for (int row = 0; row < panel_rows; ++row) {
        double sum = 0;
        for (int k = 0; k < depth; ++k) {
          sum += double{panel[static_cast<std::size_t>(k) * panel_rows + static_cast<std::size_t>(row)]} *
                 column[static_cast<std::size_t>(k)];
        }
        if (std::abs(sum - expected[static_cast<std::size_t>(row)]) > 1e-4)
          FAIL(name_of(target) << " depth " << depth << " row " << row);
      }
    }
  }
}

TEST_CASE("logits have the same bits however the prompt is cut into chunks") {
  const auto prompt = some_text(83, 5);
  for (const std::string_view kind : cache_kind_names()) {
    for (const simd_target target : targets()) {
      rig r(kind, 1, target);
      const auto whole = fed_in_chunks(r, prompt, 128);
      REQUIRE(whole.size() == prompt.size());
      for (const int chunk : {1, 2, 3, 4, 5, 7, 8, 16, 31, 64}) {
        INFO(kind << " " << name_of(target) << " chunk " << chunk);
        CHECK(fed_in_chunks(r, prompt, chunk) == whole);
      }
    }
  }
}

TEST_CASE("logits have the same bits for any number of threads", "[threads]") {
  const auto prompt = some_text(37, 6);
  for (const std::string_view kind : cache_kind_names()) {
    rig one(kind, 1);
    const auto expected = fed_in_chunks(one, prompt, 16);
    for (const int threads : {2, 3, 5}) {
      rig r(kind, threads);
      INFO(kind << " threads " << threads);
      CHECK(fed_in_chunks(r, prompt, 16) == expected);
    }
  }
}

TEST_CASE("logits have the same bits whatever else is in the batch", "[threads]") {
  splitmix64 random(kvcache::test::test_seed("ragged batches", 9));
  for (const std::string_view kind : cache_kind_names()) {
    rig r(kind, 2);
    std::vector<std::vector<token_id>> prompts;
    std::vector<std::vector<std::uint64_t>> alone;
    for (int i = 0; i < 8; ++i) {
      prompts.push_back(some_text(20 + 3 * i, 100 + static_cast<std::uint64_t>(i)));
      alone.push_back(fed_in_chunks(r, prompts.back(), 64));
    }
    for (std::int64_t round = kvcache::test::effort(20); round > 0; --round) {
      const std::size_t batch = 1 + random.next() % 8;
      std::vector<int> slots;
      std::vector<std::size_t> done(batch, 0);
      for (std::size_t i = 0; i < batch; ++i)
        slots.push_back(r.cache->open(prompts[i], cache_scope::only("batch"))->slot);
      while (true) {
        std::vector<token_id> tokens;
        std::vector<step_segment> segments;
        std::vector<std::uint64_t> expected;
        const std::size_t first = random.next() % batch;
        for (std::size_t n = 0; n < batch; ++n) {
          const std::size_t i = (first + n) % batch;
          const std::size_t rows = std::min(prompts[i].size() - done[i], std::size_t(random.next() % 10));
          if (rows == 0) continue;
          REQUIRE(r.cache->extend(slots[i], static_cast<int>(rows)));
          segments.push_back({slots[i], static_cast<std::int64_t>(done[i]), static_cast<int>(rows)});
          for (std::size_t row = 0; row < rows; ++row, ++done[i]) {
            tokens.push_back(prompts[i][done[i]]);
            expected.push_back(alone[i][done[i]]);
          }
        }
        bool finished = true;
        for (std::size_t i = 0; i < batch; ++i) finished = finished && done[i] == prompts[i].size();
        if (tokens.empty()) {
          if (finished) break;
          continue;
        }
        // Logits of every second row, last row first: which rows are asked for must not matter either.
        std::vector<int> wanted;
        for (int row = static_cast<int>(tokens.size()) - 1; row >= 0; row -= 2) wanted.push_back(row);
        const auto vocabulary = static_cast<std::size_t>(r.model->shape().vocabulary);
        std::vector<float> logits(wanted.size() * vocabulary);
        REQUIRE(r.model->forward(tokens, segments, wanted, r.cache->backend(), logits));
        for (std::size_t w = 0; w < wanted.size(); ++w) {
          const std::span<const float> row(logits.data() + w * vocabulary, vocabulary);
          if (fingerprint(row) != expected[static_cast<std::size_t>(wanted[w])])
            FAIL(kind << " batch of " << batch << ", row " << wanted[w] << " of " << tokens.size());
        }
      }
      for (const int slot : slots) r.cache->close(slot);
    }
  }
}

TEST_CASE("a fork continues with the same bits as its origin, and does not disturb it") {
  const auto prompt = some_text(30, 8);
  const std::span<const token_id> head = std::span(prompt).first(21);
  const std::span<const token_id> tail = std::span(prompt).subspan(21);
  const auto other = some_text(9, 77);
  for (const std::string_view kind : cache_kind_names()) {
    rig r(kind, 1);
    const auto expected = fed_in_chunks(r, prompt, 64);
    const int slot = r.cache->open(prompt, cache_scope::only("fork"))->slot;
    const auto ignore = [](int, std::span<const float>) {};
    REQUIRE(feed(*r.model, *r.cache, slot, head, 64, observe::last, ignore));
    const auto copy = r.cache->fork(slot);
    if (kind == "contiguous") {  // its regions belong to one sequence each
      REQUIRE(!copy);
      CHECK(copy.error().code == "unsupported");
      continue;
    }
    REQUIRE(copy);
    REQUIRE(feed(*r.model, *r.cache, *copy, other, 4, observe::last, ignore));
    std::vector<std::uint64_t> got;
    const auto keep = [&](int, std::span<const float> logits) { got.push_back(fingerprint(logits)); };
    REQUIRE(feed(*r.model, *r.cache, slot, tail, 4, observe::all, keep));
    INFO(kind);
    CHECK(std::equal(got.begin(), got.end(), expected.begin() + 21, expected.end()));
    r.cache->close(slot);
    CHECK(r.cache->length(*copy) == 30);
    r.cache->close(*copy);
    CHECK(r.cache->bytes().held == 0);
  }
}

TEST_CASE("instruction sets agree to rounding") {
  const auto prompt = some_text(24, 12);
  const auto vocabulary_of = [](rig& r) { return static_cast<std::size_t>(r.model->shape().vocabulary); };
  std::vector<float> expected;
  for (const simd_target target : targets()) {
    rig r("reference", 1, target);
    std::vector<float> all;
    const int slot = r.cache->open(prompt, cache_scope::everyone())->slot;
    REQUIRE(feed(*r.model, *r.cache, slot, prompt, 8, observe::all, [&](int, std::span<const float> logits) {
      all.insert(all.end(), logits.begin(), logits.end());
    }));
    REQUIRE(all.size() == prompt.size() * vocabulary_of(r));
    if (expected.empty()) expected = all;
    double worst = 0;
    double largest_logit = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      worst = std::max(worst, std::abs(double{all[i]} - expected[i]));
      largest_logit = std::max(largest_logit, std::abs(double{all[i]}));
    }
    INFO(name_of(target));
    CHECK(largest_logit > 1);
    CHECK(worst < 1e-4 * largest_logit);
  }
}

TEST_CASE("storing keys and values in 16 bits changes the logits a little") {
  const auto prompt = some_text(40, 14);
  thread_pool pool(1);
  std::map<kv_type, std::vector<float>> last;
  for (const kv_type type : {kv_type::f32, kv_type::f16, kv_type::bf16}) {
    rig r("reference", 1);
    cache_config config = r.config(1, 64);
    config.type = type;
    const auto cache = open_cache("reference", config);
    const int slot = cache->open(prompt, cache_scope::everyone())->slot;
    REQUIRE(feed(*r.model, *cache, slot, prompt, 8, observe::last, [&](int, std::span<const float> logits) {
      last[type].assign(logits.begin(), logits.end());
    }));
  }
  const auto distance = [&](kv_type type) {
    double worst = 0;
    for (std::size_t i = 0; i < last[type].size(); ++i)
      worst = std::max(worst, std::abs(double{last[type][i]} - last[kv_type::f32][i]));
    return worst;
  };
  CHECK(distance(kv_type::f16) > 0);
  CHECK(distance(kv_type::f16) < 0.05);
  CHECK(distance(kv_type::bf16) > distance(kv_type::f16));
  CHECK(distance(kv_type::bf16) < 0.5);
}

TEST_CASE("a step that makes no sense is refused and writes nothing") {
  for (const std::string_view kind : cache_kind_names()) {
    rig r(kind, 1);
    const auto prompt = some_text(8, 3);
    const int slot = r.cache->open(prompt, cache_scope::only("bad"))->slot;
    REQUIRE(r.cache->extend(slot, 8));
    std::vector<float> logits(static_cast<std::size_t>(r.model->shape().vocabulary));
    const auto step = [&](std::vector<token_id> tokens, step_segment segment, std::vector<int> wanted) {
      const status s = r.model->forward(tokens, {&segment, 1}, wanted, r.cache->backend(), logits);
      return s ? std::string() : s.error().field;
    };
    INFO(kind);
    CHECK(step({1, -1}, {slot, 0, 2}, {}) == "token");
    CHECK(step({1, 1 << 20}, {slot, 0, 2}, {}) == "token");
    CHECK(step({1, 2}, {slot, 0, 3}, {}) == "rows");
    CHECK(step({1, 2}, {slot, 0, 2}, {2}) == "logit_row");
    CHECK(step({1, 2}, {slot, 0, 2}, {0, 1}) == "logits.size");
    CHECK(step({1, 2}, {slot + 100, 0, 2}, {}) == "slot");
    CHECK(step({1, 2}, {slot, 1, 2}, {}) == "position");
    CHECK(r.cache->length(slot) == 0);
    CHECK(step({1, 2}, {slot, 0, 2}, {1}).empty());
    CHECK(r.cache->length(slot) == 2);
    CHECK(!r.cache->extend(slot, 1000));
    CHECK(!r.cache->open({}, cache_scope::only("bad")));
    CHECK(!r.cache->open(some_text(257, 4), cache_scope::only("bad")));
  }
}
