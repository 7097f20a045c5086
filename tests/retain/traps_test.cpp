// SPDX-License-Identifier: Apache-2.0
// Faults that implementations of token dropping are known for, one by one.
#include <catch2/catch.hpp>
#include <cmath>

#include "kvcache/retain/parse.hpp"
#include "session_support.hpp"

using namespace engine;
using namespace engine::test;

namespace {

std::unique_ptr<session_cache> new_cache(std::int64_t blocks = 0) {
  return cache_of(model(), machine().pool, 8, 256, blocks);
}

// Choosing must not be asked for where everything stays.
struct never_asked {
  std::int32_t capacity = 0;
  static constexpr kvcache::observe needs = kvcache::observe::last_row;
  kvcache::keep_plan plan(const kvcache::retain_lengths& n) const noexcept {
    return kvcache::keep_at_most(n, capacity, 0, 0, 1);
  }
  std::int32_t must_recompute() const noexcept { return 1; }
  kvcache::watch_options watch() const noexcept { return {.queries = 1}; }
  void score(const kvcache::observation&, std::span<float>) const noexcept { ++asked; }
  static inline int asked = 0;
};

// Looks at what it is shown, and drops one token.
struct sums {
  static constexpr kvcache::observe needs = kvcache::observe::column_sums;
  kvcache::keep_plan plan(const kvcache::retain_lengths& n) const noexcept {
    return kvcache::keep_at_most(n, n.held - 1, 0, 0, 1);
  }
  std::int32_t must_recompute() const noexcept { return 1 << 20; }
  kvcache::watch_options watch() const noexcept { return {}; }
  void score(const kvcache::observation& o, std::span<float>) const noexcept {
    for (std::int32_t q = 0; q < o.queries; ++q) {
      double sum = 0;
      for (const float w : o.of(q)) sum += w;
      worst() = std::max(worst(), std::fabs(sum / o.held - 1));
      ++heads();
    }
  }
  static double& worst() {
    static double w = 0;
    return w;
  }
  static int& heads() {
    static int n = 0;
    return n;
  }
};

}  // namespace

TEST_CASE("after a drop the next token has its text position, not the number of slots") {
  const auto cache = new_cache();
  session s = begin(model(), *cache, "window:7", {.mode = drop_mode::stream});
  feed(s, some_text(8));
  CHECK(s.kept(0, 0).size() == 7);
  CHECK(s.position() == 8);
  feed(s, some_text(1));
  CHECK(s.kept(0, 0).back() == 8);
  CHECK(s.position() == 9);
}

TEST_CASE("sinks follow the window by what was dropped, once per drop, over many drops") {
  const auto cache = new_cache();
  masked_reference oracle(shape());
  session s = begin(model(), *cache, "streaming_llm:sinks=8,window=8", {.mode = drop_mode::stream});
  int turned = 0;
  double off = 0;
  for (const token_id t : some_text(90)) {
    off = std::max(off, largest_difference(feed(s, {&t, 1}), oracle.feed(model(), {&t, 1})));
    follow(oracle, s, shape(), 8, turned);
    CHECK(s.kept(0, 0).size() < 24);
    if (s.position() >= 8) CHECK(s.kept(0, 0)[7] == 7);
  }
  CHECK(turned >= 64);
  CHECK(off < 1e-4);
}

TEST_CASE("several tokens at once behind a gap see all that is kept and themselves in order") {
  const auto cache = new_cache();
  masked_reference oracle(shape());
  session s = begin(model(), *cache, "h2o:heavy=5,recent=2");
  const auto text = some_text(40);
  feed(s, text);
  oracle.feed(model(), text);
  REQUIRE(s.compress());
  int turned = 0;
  follow(oracle, s, shape(), 0, turned);
  const auto more = some_text(19, 8);
  CHECK(largest_difference(feed(s, more), oracle.feed(model(), more)) < 1e-4);
}

TEST_CASE("the recent window is exact at its edges: one token, and all of the budget") {
  const auto text = some_text(30);
  for (const int recent : {1, 2, 9}) {
    CAPTURE(recent);
    const auto cache = new_cache();
    kvcache::retention what;
    what.policy = kvcache::h2o{.heavy = 9 - recent, .recent = recent};
    auto s = session::create(model(), *cache, what);
    REQUIRE(s);
    feed(*s, text);
    REQUIRE(s->compress());
    for (int h = 0; h < shape().kv_heads; ++h) {
      const auto kept = s->kept(0, h);
      REQUIRE(kept.size() == 9);
      for (int i = 0; i < recent; ++i) CHECK(kept[kept.size() - 1 - static_cast<std::size_t>(i)] == 29 - i);
    }
  }
}

TEST_CASE("a dropped cache is never larger than the full one, and its bytes are those of its blocks") {
  const auto text = some_text(61);
  for (const char* p : {"h2o:heavy=11,recent=10", "snapkv:capacity=40,window=4", "tova:capacity=60",
                        "far_rms:capacity=40,recent=8,budget=global", "streaming_llm:sinks=8,window=30"}) {
    CAPTURE(p);
    const auto cache = new_cache();
    session s = begin(model(), *cache, p);
    feed(s, text);
    const std::size_t before = cache->bytes_used();
    CHECK(before == s.bytes_full());
    REQUIRE(s.compress());
    CHECK(s.bytes_held() <= s.bytes_full());
    CHECK(cache->bytes_used() == s.bytes_held());
    CHECK(s.values_kept() * sizeof(float) <= s.bytes_held());
  }
}

TEST_CASE("a budget of all tokens or more changes no bit and asks for no score") {
  const auto text = some_text(30);
  const auto more = some_text(5, 8);
  const auto cache = new_cache();
  session full = begin(model(), *cache, "full");
  feed(full, text);
  const auto expected = feed(full, more);
  for (const int capacity : {30, 31, 200}) {
    auto s = session::create(model(), *cache, {never_asked{capacity}, {}});
    REQUIRE(s);
    feed(*s, text);
    REQUIRE(s->compress());
    CHECK(s->dropped() == 0);
    CHECK(feed(*s, more) == expected);
  }
  CHECK(never_asked::asked == 0);
  auto s = session::create(model(), *cache, {never_asked{29}, {}});
  feed(*s, text);
  REQUIRE(s->compress());
  CHECK(never_asked::asked == shape().layers * shape().kv_heads);
  // All scores equal: ties go to the lower position.
  CHECK(s->kept(0, 0).front() == 0);
  CHECK(s->kept(0, 0).back() == 28);
}

TEST_CASE("a prompt of one token survives every policy") {
  for (const char* p :
       {"window:1", "streaming_llm", "h2o:heavy=0,recent=1", "snapkv:capacity=2,window=1", "tova:1",
        "scissorhands:capacity=10", "far_rms:capacity=36", "moved_queries:capacity=36"}) {
    CAPTURE(p);
    const auto cache = new_cache();
    session s = begin(model(), *cache, p);
    feed(s, some_text(1));
    REQUIRE(s.compress());
    CHECK(s.kept(0, 0).size() == 1);
    for (const float x : feed(s, some_text(2, 8))) REQUIRE(std::isfinite(x));
  }
}

TEST_CASE("a policy carries nothing from one text to the next") {
  const auto cache = new_cache();
  const kvcache::retention what = policy("snapkv:capacity=21,window=8");
  const auto run = [&](std::uint64_t seed, int n) {
    auto s = session::create(model(), *cache, what);
    feed(*s, some_text(n, seed));
    REQUIRE(s->compress());
    return kept_of(*s, shape());
  };
  const auto first = run(1, 60);
  run(2, 33);
  CHECK(run(1, 60) == first);
}

TEST_CASE("pinned tokens are never dropped, and count in the budget") {
  for (const char* p : {"window:12", "h2o:heavy=6,recent=6", "tova:12",
                        "far_rms:capacity=14,recent=4,sinks=2,budget=global"}) {
    for (const drop_mode mode : {drop_mode::oneshot, drop_mode::stream}) {
      CAPTURE(p);
      const auto cache = new_cache();
      session s = begin(model(), *cache, p, {.mode = mode, .pinned = {3, 17, 18}});
      feed(s, some_text(50));
      if (mode == drop_mode::oneshot) REQUIRE(s.compress());
      const auto sets = kept_of(s, shape());
      for (const auto& kept : sets) {
        for (const int t : {3, 17, 18}) CHECK(std::binary_search(kept.begin(), kept.end(), t));
      }
      CHECK(s.dropped() == 50 - policy(p).policy.plan({50, 0, 8, true}).keep);
    }
  }
  const auto cache = new_cache();
  CHECK(session::create(model(), *cache, policy("full"), {.pinned = {3, 3}}).error().field == "pinned");
  session s = begin(model(), *cache, "window:2", {.pinned = {1, 2, 3}});
  feed(s, some_text(20));
  CHECK(s.compress().error().field == "pinned");
  CHECK(s.dropped() == 0);
  // Whole blocks go whatever lies in them: refused, not dropped in silence.
  const auto cut = policy("streaming_llm:sinks=4,window=12");
  CHECK(session::create(model(), *cache, cut, {.pinned = {3, 8}}).error().value == "8, whole blocks go");
  CHECK(session::create(model(), *cache, cut, {.pinned = {3, 7}}));
  session base = begin(model(), *cache, "full", {.pinned = {8}, .remember = true});
  CHECK(base.fork_as(cut).error().field == "pinned");
}

TEST_CASE("beside a live fork a drop costs memory: refused by name, and nothing has changed") {
  const auto text = some_text(64);
  const auto more = some_text(9, 8);
  const auto cache = new_cache();
  session a = begin(model(), *cache, "h2o:heavy=16,recent=16", {.at_a_loss = false});
  feed(a, text);
  auto b = a.fork();
  auto c = a.fork();
  REQUIRE(b);
  REQUIRE(c);
  const std::size_t before = cache->bytes_used();
  const auto refused = b->compress();
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == "no_gain");
  CHECK(b->dropped() == 0);
  CHECK(cache->bytes_used() == before);
  CHECK(feed(*b, more) == feed(*c, more));
}

TEST_CASE("when blocks run out a drop changes nothing, and works once there are some") {
  const auto text = some_text(64);
  const auto cache = new_cache(12);
  session a = begin(model(), *cache, "h2o:heavy=40,recent=16");
  feed(a, text);  // 8 blocks
  auto b = a.fork();
  REQUIRE(b);
  const auto refused = b->compress();  // 7 new ones, 4 are left
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == "out_of_blocks");
  CHECK(b->dropped() == 0);
  { const session gone = std::move(a); }
  REQUIRE(b->compress());
  CHECK(b->dropped() == 8);
  CHECK(cache->check() == nullptr);
}

TEST_CASE("heads with tables of their own drop all together or not at all") {
  const char* text = "far_rms:capacity=40,recent=8,budget=global,every=8";
  const auto first = some_text(55);
  const auto more = some_text(12, 8);
  const auto roomy = new_cache();
  session alone = begin(model(), *roomy, text, {.mode = drop_mode::stream});
  feed(alone, first);
  const auto cache = new_cache(9);  // nine blocks' worth per head, too
  auto a = std::make_unique<session>(begin(model(), *cache, text, {.mode = drop_mode::stream}));
  feed(*a, first);
  REQUIRE(a->split());
  auto b = a->fork();
  REQUIRE(b);
  // The drop that is due replaces what they share, for which there are not enough blocks.
  int computed = 0;
  status refused;
  for (; refused && computed < 12; ++computed) {
    const auto before = kept_of(*b, shape());
    const auto fed = b->feed({&more[static_cast<std::size_t>(computed)], 1});
    feed(alone, {&more[static_cast<std::size_t>(computed)], 1});
    if (fed) continue;
    refused = fed.error();
    auto grown = before;
    for (auto& kept : grown) kept.push_back(b->position() - 1);
    CHECK(kept_of(*b, shape()) == grown);
  }
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == "out_of_blocks");
  CHECK(cache->check() == nullptr);
  a.reset();
  REQUIRE(b->compress());
  CHECK(kept_of(*b, shape()) == kept_of(alone, shape()));
  const auto rest = some_text(3, 9);
  CHECK(feed(*b, rest) == feed(alone, rest));
}

TEST_CASE("column sums add up to the number of queries") {
  const auto cache = new_cache();
  auto s = session::create(model(), *cache, {sums{}, {}}, {.chunk = 13});
  REQUIRE(s);
  feed(*s, some_text(61));
  REQUIRE(s->compress());
  CHECK(sums::heads() == shape().layers * shape().query_heads);
  CHECK(sums::worst() < 1e-5);
}

TEST_CASE("a policy's text that is wrong is an error that names key, value and what is allowed") {
  const auto wrong = parse_policy("snapkv:capacity=64,kernel=4");
  REQUIRE_FALSE(wrong);
  CHECK(wrong.error().kind == failure::bad_input);
  CHECK(wrong.error().field == "kernel");
  CHECK(wrong.error().value == "; allowed: an odd number");
  CHECK(policy_text(policy("window:9")) == "window:window=9");
}
