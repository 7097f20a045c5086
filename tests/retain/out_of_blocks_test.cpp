// SPDX-License-Identifier: Apache-2.0
// Dropping when blocks run out: not a token earlier, whatever the steps, and without a block in return not at
// all. Pinned ranges stay through all of it.
#include <catch2/catch.hpp>
#include <numeric>

#include "session_support.hpp"

using namespace engine;
using namespace engine::test;

namespace {

constexpr double close_enough = 1e-4;
constexpr int blocks = 8;  // of 8 slots

// Budgets of 29 tokens, or about that.
const char* const policies[] = {"window:29",
                                "streaming_llm:sinks=8,window=21",
                                "h2o:heavy=18,recent=11",
                                "h2o:heavy=18,recent=11,every=100",
                                "tova:29",
                                "snapkv:capacity=29,window=9",
                                "far_rms:capacity=29,recent=8,sinks=2,distance=8",
                                "far_rms:capacity=29,recent=8,sinks=2,distance=8,budget=global"};

std::unique_ptr<session_cache> small_cache() {
  return cache_of(model(), machine().pool, 8, 256, blocks);
}

std::vector<int> range(int first, int last) {
  std::vector<int> out(static_cast<std::size_t>(last - first));
  std::iota(out.begin(), out.end(), first);
  return out;
}

}  // namespace

TEST_CASE("a text of any length goes on in a few blocks, and drops only when the next token has none") {
  const auto text = some_text(150);
  for (const char* p : policies) {
    CAPTURE(p);
    const auto cache = small_cache();
    masked_reference oracle(shape());
    session s = begin(model(), *cache, p, {.mode = drop_mode::out_of_blocks});
    const int sinks = std::string(p).rfind("streaming", 0) == 0 ? 8 : 0;
    int turned = 0, before = 0;
    double off = 0;
    for (int i = 0; i < 150; ++i) {
      const token_id t = text[static_cast<std::size_t>(i)];
      const auto logits = feed(s, {&t, 1});
      // What went had gone before the token was computed.
      follow(oracle, s, shape(), sinks, turned);
      off = std::max(off, largest_difference(logits, oracle.feed(model(), {&t, 1})));
      if (s.dropped() != before && !s.split()) CHECK((i - before) == blocks * 8);
      before = s.dropped();
      CHECK(cache->bytes_used() <= s.bytes_full());
    }
    CHECK(s.dropped() >= 150 - blocks * 8);
    CHECK(off < close_enough);
    CHECK(cache->check() == nullptr);
  }
}

TEST_CASE("what goes when blocks run out does not depend on the steps") {
  const auto text = some_text(131);
  const auto more = some_text(40, 8);
  for (const char* p : policies) {
    CAPTURE(p);
    const auto run = [&](int chunk, int first) {
      const auto cache = small_cache();
      session s = begin(model(), *cache, p, {.mode = drop_mode::out_of_blocks, .chunk = chunk});
      auto logits = feed(s, std::span(text).first(static_cast<std::size_t>(first)));
      const auto rest = feed(s, std::span(text).subspan(static_cast<std::size_t>(first)));
      logits.insert(logits.end(), rest.begin(), rest.end());
      const auto sets = kept_of(s, shape());
      return std::make_tuple(sets, logits, feed(s, more));
    };
    const auto expected = run(128, 131 / 2);
    CHECK(run(1, 130) == expected);
    CHECK(run(7, 66) == expected);
    CHECK(run(29, 1) == expected);
  }
}

TEST_CASE("a draft and a batch make room as well, and others' blocks are not touched") {
  const auto text = some_text(60);
  const auto cache = small_cache();
  session a = begin(model(), *cache, "h2o:heavy=9,recent=7", {.mode = drop_mode::out_of_blocks});
  session b = begin(model(), *cache, "full");
  feed(b, std::span(text).first(14));  // two blocks
  feed(a, std::span(text).first(48));  // the other six
  CHECK(a.dropped() == 0);
  const auto untouched = kept_of(b, shape());
  REQUIRE(a.draft(std::span(text).subspan(48)));
  CHECK(a.dropped() == 32);
  REQUIRE(a.accept(1));
  CHECK(kept_of(b, shape()) == untouched);
  feed(a, std::span(text).subspan(0, 31));
  CHECK(a.dropped() == 32);
  std::vector<float> logits;
  session* both[] = {&a, &b};
  const token_id next[] = {5, 6};
  REQUIRE(session::advance(both, next, logits));
  CHECK(a.dropped() > 32);
  CHECK(b.dropped() == 0);
  CHECK(cache->check() == nullptr);
}

TEST_CASE("without a block in return nothing is dropped, and the step is refused") {
  const auto text = some_text(64);
  const token_id next = 5;
  for (const char* p : {"full", "window:63", "h2o:heavy=50,recent=14"}) {
    CAPTURE(p);
    const auto cache = small_cache();
    session s = begin(model(), *cache, p, {.mode = drop_mode::out_of_blocks});
    feed(s, text);
    const auto refused = s.feed({&next, 1});
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == "out_of_blocks");
    CHECK(s.dropped() == 0);
    CHECK(s.position() == 64);
  }
  // Beside a fork a drop would cost blocks.
  const auto cache = small_cache();
  session s = begin(model(), *cache, "window:29", {.mode = drop_mode::out_of_blocks});
  feed(s, text);
  auto other = s.fork();
  REQUIRE(other);
  CHECK(s.feed({&next, 1}).error().code == "out_of_blocks");
  CHECK(s.dropped() == 0);
  { const session gone = std::move(*other); }
  REQUIRE(s.feed({&next, 1}));
  CHECK(s.dropped() == 35);
}

TEST_CASE("pinned ranges are never dropped, whenever tokens go") {
  std::vector<int> pinned = range(3, 9);
  for (const int more : {20, 21, 22, 40, 63}) pinned.push_back(more);
  for (const char* p : policies) {
    if (std::string(p).rfind("streaming", 0) == 0) continue;  // drops whole blocks, see below
    for (const drop_mode mode : {drop_mode::oneshot, drop_mode::stream, drop_mode::out_of_blocks}) {
      CAPTURE(p, name_of(mode));
      const auto cache = mode == drop_mode::out_of_blocks ? small_cache() : cache_of(model(), machine().pool);
      session s = begin(model(), *cache, p, {.mode = mode, .pinned = pinned});
      for (const token_id& t : some_text(120)) {
        feed(s, {&t, 1});
        if (mode == drop_mode::oneshot && s.position() == 90) REQUIRE(s.compress());
      }
      if (mode != drop_mode::stream || std::string(p).find("every=100") == std::string::npos)
        CHECK(s.dropped() > 0);
      for (const auto& kept : kept_of(s, shape())) {
        for (const int at : pinned) CHECK(std::binary_search(kept.begin(), kept.end(), at));
      }
      auto branch = s.fork();
      REQUIRE(branch);
      if (mode == drop_mode::out_of_blocks) continue;  // beside a fork there is no room
      feed(*branch, some_text(30, 8));
      for (const auto& kept : kept_of(*branch, shape())) {
        for (const int at : pinned) CHECK(std::binary_search(kept.begin(), kept.end(), at));
      }
    }
  }
}
