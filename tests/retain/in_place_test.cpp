// SPDX-License-Identifier: Apache-2.0
// Dropping without moving anything: the next token takes the slot of the one that went. What stays is what a
// gather would have kept, and everything that follows from the order of slots still goes by the text.
#include <catch2/catch.hpp>

#include "head_slots.hpp"
#include "session_support.hpp"

using namespace engine;
using namespace engine::test;

namespace {

constexpr double close_enough = 1e-4;

// Policies that drop one token per step, with budgets of two whole blocks.
const char* const policies[] = {"window:16", "streaming_llm:sinks=3,window=13,positions=text",
                                "h2o:heavy=9,recent=7", "h2o:heavy=0,recent=16", "tova:16"};

kvcache::keep_plan plan_of(kvcache::drop_form form, int keep) {
  kvcache::keep_plan p;
  p.form = form;
  p.keep = keep;
  return p;
}

/// Sums decide; one token leaves at the end of a prompt, and all above a capacity that may change meanwhile.
struct changing {
  static constexpr kvcache::observe needs = kvcache::observe::column_sums;
  static int& capacity() {
    static int n = 1 << 20;
    return n;
  }
  kvcache::keep_plan plan(const kvcache::retain_lengths& n) const noexcept {
    using kvcache::drop_form;
    if (n.held <= capacity())
      return n.prefill_end ? plan_of(drop_form::overwrite, n.held - 1) : plan_of({}, 0);
    const bool one = n.held == capacity() + 1;
    return plan_of(one ? drop_form::overwrite : drop_form::gather, capacity());
  }
  std::int32_t must_recompute() const noexcept { return 1 << 20; }
  kvcache::watch_options watch() const noexcept { return {}; }
  void score(const kvcache::observation& o, std::span<float> s) const noexcept { add_group(o, s); }
};

session begin_changing(session_cache& cache, drop_mode mode) {
  auto made = session::create(model(), cache, {changing{}, {}}, {.mode = mode});
  REQUIRE(made);
  return std::move(*made);
}

}  // namespace

TEST_CASE("a head's slots are found by the order of its text, whoever took them over") {
  head_slots h(4);
  CHECK(h.ordered());
  CHECK(h.vacate(1) == 1);
  CHECK(h.size() == 3);
  CHECK(h.slots() == 4);
  h.add(4);
  h.add(5);
  CHECK_FALSE(h.vacant());
  CHECK(std::vector<int>(h.positions().begin(), h.positions().end()) == std::vector<int>{0, 2, 3, 4, 5});
  CHECK(std::vector<int>(h.by_slot().begin(), h.by_slot().end()) == std::vector<int>{0, 4, 2, 3, 5});
  CHECK(h.slot_of(3) == 1);
  CHECK(h.by_rank(std::vector<float>{0, 40, 20, 30, 50}) == std::vector<float>{0, 20, 30, 40, 50});
  h.take_back(2);
  CHECK(h.vacant());
  CHECK(h.slots() == 4);
  h.add(4);
  CHECK(h.slot_of(3) == 1);
  const std::vector<std::int32_t> ranks{0, 2, 3};
  const auto slots = h.slots_of(ranks);
  CHECK(slots == std::vector<std::int32_t>{0, 1, 3});
  h.gather(slots);
  CHECK(std::vector<int>(h.positions().begin(), h.positions().end()) == std::vector<int>{0, 3, 4});
  CHECK(std::vector<int>(h.by_slot().begin(), h.by_slot().end()) == std::vector<int>{0, 4, 3});
  h.vacate(2);
  h.gather(h.slots_of(std::vector<std::int32_t>{0, 1}));
  CHECK(h.ordered());  // what is left lies in order again
}

TEST_CASE("the next token takes the slot of the one that went: no block comes or goes, and the same stay") {
  const auto text = some_text(70);
  for (const char* p : policies) {
    CAPTURE(p);
    const auto cache = cache_of(model(), machine().pool);
    session here = begin(model(), *cache, p, {.mode = drop_mode::stream});
    session moved = begin(model(), *cache, p, {.mode = drop_mode::stream, .in_place = false});
    masked_reference oracle(shape());
    double off = 0, apart = 0;
    int turned = 0;
    for (const token_id& t : text) {
      const auto logits = feed(here, {&t, 1});
      off = std::max(off, largest_difference(logits, oracle.feed(model(), {&t, 1})));
      apart = std::max(apart, largest_difference(logits, feed(moved, {&t, 1})));
      follow(oracle, here, shape(), 0, turned);
      CHECK(kept_of(here, shape()) == kept_of(moved, shape()));
      if (here.position() <= 16) continue;
      // A gather gives the third block back after every step.
      CHECK(here.kept(0, 0).size() == 16);
      CHECK(here.bytes_held() * 2 == moved.bytes_held() * 3);
    }
    CHECK(off < close_enough);
    CHECK(apart < close_enough);
    CHECK(cache->check() == nullptr);
  }
}

TEST_CASE("pinned tokens keep their place while others are taken over") {
  const auto cache = cache_of(model(), machine().pool);
  for (const char* p : policies) {
    CAPTURE(p);
    session s = begin(model(), *cache, p, {.mode = drop_mode::stream, .pinned = {5, 6, 7, 20, 31}});
    session moved = begin(model(), *cache, p,
                          {.mode = drop_mode::stream, .pinned = {5, 6, 7, 20, 31}, .in_place = false});
    for (const token_id& t : some_text(60)) {
      feed(s, {&t, 1});
      feed(moved, {&t, 1});
      CHECK(kept_of(s, shape()) == kept_of(moved, shape()));
    }
    for (const auto& kept : kept_of(s, shape())) {
      for (const int at : {5, 6, 7, 20, 31}) CHECK(std::binary_search(kept.begin(), kept.end(), at));
    }
  }
}

TEST_CASE("forks of a text in overwritten slots go on as that text would have, each in blocks of its own") {
  const auto text = some_text(45);
  const auto more = some_text(20, 8), other = some_text(20, 9);
  for (const char* p : policies) {
    CAPTURE(p);
    const auto cache = cache_of(model(), machine().pool);
    const auto alone = [&](const std::vector<token_id>& rest) {
      session s = begin(model(), *cache, p, {.mode = drop_mode::stream});
      feed(s, text);
      return feed(s, rest);
    };
    const auto expected = alone(more), expected_other = alone(other);
    session a = begin(model(), *cache, p, {.mode = drop_mode::stream});
    feed(a, text);
    auto b = a.fork();
    REQUIRE(b);
    // A draft that is taken back has been written over: not over what the fork still reads.
    REQUIRE(a.draft(other));
    REQUIRE(a.accept(0));
    CHECK(feed(*b, other) == expected_other);
    CHECK(feed(a, more) == expected);
    const auto indexed = a.commit(text);
    REQUIRE(indexed);
    CHECK(*indexed == 0);
    CHECK(cache->check() == nullptr);
  }
}

TEST_CASE("beside a fork the blocks to be written over are copied, and if there are none nothing changes") {
  const auto text = some_text(40);
  const auto more = some_text(9, 8);
  const auto cache = cache_of(model(), machine().pool, 8, 256, 5);
  auto a =
      std::make_unique<session>(begin(model(), *cache, "h2o:heavy=9,recent=7", {.mode = drop_mode::stream}));
  feed(*a, text);  // three blocks
  auto b = a->fork();
  REQUIRE(b);
  const auto before = kept_of(*b, shape());
  const auto refused = b->feed({more.data(), 1});
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == "out_of_blocks");
  CHECK(b->position() == 40);
  CHECK(kept_of(*b, shape()) == before);
  const auto drafted = b->draft({more.data(), 1});
  REQUIRE_FALSE(drafted);
  CHECK(drafted.error().code == "out_of_blocks");
  a.reset();  // then the blocks are its own
  const auto roomy = cache_of(model(), machine().pool);
  session alone = begin(model(), *roomy, "h2o:heavy=9,recent=7", {.mode = drop_mode::stream});
  feed(alone, text);
  CHECK(feed(*b, more) == feed(alone, more));
  CHECK(kept_of(*b, shape()) == kept_of(alone, shape()));
  CHECK(cache->check() == nullptr);
}

TEST_CASE("what lies in no order is gathered in its order, and later steps find it") {
  const auto cache = cache_of(model(), machine().pool);
  masked_reference oracle(shape());
  changing::capacity() = 21;
  session s = begin_changing(*cache, drop_mode::stream);
  int turned = 0;
  double off = 0;
  const auto step = [&](std::span<const token_id> tokens) {
    off = std::max(off, largest_difference(feed(s, tokens), oracle.feed(model(), tokens)));
    follow(oracle, s, shape(), 0, turned);
  };
  for (const token_id& t : some_text(50)) step({&t, 1});
  CHECK(s.kept(0, 0).size() == 21);
  changing::capacity() = 13;  // nine go at once, out of slots in no order, one of them vacant
  for (const token_id& t : some_text(30, 8)) step({&t, 1});
  CHECK(s.kept(0, 0).size() == 13);
  CHECK(s.dropped() == 80 - 13);
  changing::capacity() = 1 << 20;  // grows behind what is in no order
  const auto rest = some_text(20, 9);
  step(rest);
  CHECK(off < close_enough);
  CHECK(cache->check() == nullptr);
}

TEST_CASE(
    "rows of one step behind a vacant slot see what is before them, and drafts of them can be taken back") {
  const auto text = some_text(30);
  const auto more = some_text(12, 8), wrong = some_text(7, 9);
  const auto cache = cache_of(model(), machine().pool);
  masked_reference oracle(shape());
  changing::capacity() = 1 << 20;
  session s = begin_changing(*cache, drop_mode::oneshot);
  feed(s, text);
  oracle.feed(model(), text);
  REQUIRE(s.compress());
  CHECK(s.dropped() == 1);
  int turned = 0;
  follow(oracle, s, shape(), 0, turned);
  const auto before = kept_of(s, shape());
  REQUIRE(s.draft(wrong));
  REQUIRE(s.accept(0));
  CHECK(kept_of(s, shape()) == before);
  CHECK(s.bytes_held() == s.bytes_full());
  std::vector<token_id> half(more.begin(), more.begin() + 5);
  half.insert(half.end(), wrong.begin(), wrong.end());
  REQUIRE(s.draft(half));
  REQUIRE(s.accept(5));
  oracle.feed(model(), std::span(more).first(5));
  const auto rest = std::span(more).subspan(5);
  CHECK(largest_difference(feed(s, rest), oracle.feed(model(), rest)) < close_enough);
  CHECK(s.position() == 42);
  CHECK(cache->check() == nullptr);
}
