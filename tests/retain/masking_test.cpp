// SPDX-License-Identifier: Apache-2.0
// Dropping tokens is the same as masking them: after every step the logits of a session are those of a text
// of which nothing was dropped and the scores of the dropped tokens are -infinity. And the same bits and
// keep-sets come out however a text is cut, batched, forked, resumed or drafted.
#include <catch2/catch.hpp>

#include "session_support.hpp"
#include "support/environment.hpp"

using namespace engine;
using namespace engine::test;

namespace {

constexpr double close_enough = 1e-4;

struct setting {
  const char* text;
  int sinks = 0;  // that are turned
};

// Odd budgets; the prompt is 61 tokens, blocks have 8 slots.
const setting settings[] = {
    {"full"},
    {"window:21"},
    {"streaming_llm:sinks=3,window=19", 8},
    {"streaming_llm:sinks=3,window=19,positions=text"},
    {"h2o:heavy=11,recent=10"},
    {"h2o:heavy=11,recent=10,every=5"},
    {"h2o:heavy=11,recent=10,budget=head"},
    {"snapkv:capacity=23,window=9,kernel=1"},
    {"snapkv:capacity=23,window=9,kernel=5,pool=avg"},
    {"snapkv:capacity=23,window=9,kernel=3,budget=head"},
    {"tova:capacity=21"},
    {"tova:capacity=21,budget=layer"},
    {"scissorhands:capacity=21,recent=5,history=30"},
    {"far_rms:capacity=21,recent=8,sinks=2,distance=8"},
    {"far_rms:capacity=21,recent=8,sinks=2,distance=8,budget=global"},
    {"moved_queries:capacity=21,recent=8,sinks=2,ahead=20,skip=8,every=7"},
    {"moved_queries:capacity=21,recent=8,sinks=2,ahead=20,skip=8,every=9,budget=layer"},
};

}  // namespace

TEST_CASE("one shot: dropping is masking, at every later step, in forks, and after resuming") {
  const auto text = some_text(61);
  const auto more = some_text(33, 8);
  for (const setting& x : settings) {
    CAPTURE(x.text);
    const auto cache = cache_of(model(), machine().pool);
    masked_reference oracle(shape());
    session s = begin(model(), *cache, x.text, {.chunk = 23});
    CHECK(largest_difference(feed(s, text), oracle.feed(model(), text)) < close_enough);
    REQUIRE(s.compress());
    int turned = 0;
    follow(oracle, s, shape(), x.sinks, turned);
    CHECK((s.dropped() > 0) == (std::string(x.text) != "full"));
    CHECK(s.bytes_held() <= s.bytes_full());
    const auto part = std::span(more).first(17);
    const auto rest = std::span(more).subspan(17);
    CHECK(largest_difference(feed(s, part), oracle.feed(model(), part)) < close_enough);
    auto branch = s.fork();
    REQUIRE(branch);
    masked_reference elsewhere = oracle;
    const auto other = some_text(12, 9);
    CHECK(largest_difference(feed(*branch, other), elsewhere.feed(model(), other)) < close_enough);
    const auto got = feed(s, rest);
    CHECK(largest_difference(got, oracle.feed(model(), rest)) < close_enough);
    // Preempted, then computed again from the prompt.
    session again = begin(model(), *cache, x.text);
    feed(again, text);
    REQUIRE(again.compress());
    feed(again, part);
    CHECK(feed(again, rest) == got);
    CHECK(kept_of(again, shape()) == kept_of(s, shape()));
    CHECK(cache->check() == nullptr);
  }
}

TEST_CASE("stream: dropping is masking after every single token, also in a fork") {
  const auto text = some_text(70);
  for (const setting& x : settings) {
    CAPTURE(x.text);
    const auto cache = cache_of(model(), machine().pool);
    masked_reference oracle(shape());
    session s = begin(model(), *cache, x.text, {.mode = drop_mode::stream});
    int turned = 0;
    const auto step = [&x](session& at, masked_reference& right, token_id t, int& delta) {
      const auto logits = feed(at, {&t, 1});
      const double off = largest_difference(logits, right.feed(model(), {&t, 1}));
      follow(right, at, shape(), x.sinks, delta);
      return off;
    };
    double off = 0;
    for (int i = 0; i < 50; ++i)
      off = std::max(off, step(s, oracle, text[static_cast<std::size_t>(i)], turned));
    CHECK(off < close_enough);
    auto branch = s.fork();
    REQUIRE(branch);
    masked_reference elsewhere = oracle;
    int branch_turned = turned;
    for (int i = 50; i < 70; ++i) {
      off = std::max(off, step(s, oracle, text[static_cast<std::size_t>(i)], turned));
      off = std::max(off, step(*branch, elsewhere, text[static_cast<std::size_t>(100 - i)], branch_turned));
    }
    CHECK(off < close_enough);
    CHECK(cache->check() == nullptr);
    // Preempted, then computed again from the first token in steps of any size.
    const auto kept = kept_of(s, shape());
    { const session gone = std::move(s); }
    session again = begin(model(), *cache, x.text, {.mode = drop_mode::stream});
    feed(again, text);
    CHECK(kept_of(again, shape()) == kept);
    const token_id next = text.front();
    CHECK(largest_difference(feed(again, {&next, 1}), oracle.feed(model(), {&next, 1})) < close_enough);
  }
}

TEST_CASE("every cut of a prompt into steps gives the same keep-sets and the same bits") {
  const auto text = some_text(61);
  const auto more = some_text(9, 8);
  for (const setting& x : settings) {
    for (const drop_mode mode : {drop_mode::oneshot, drop_mode::stream}) {
      CAPTURE(x.text, static_cast<int>(mode));
      const auto run = [&](int chunk, int first) {
        const auto cache = cache_of(model(), machine().pool);
        session s = begin(model(), *cache, x.text, {.mode = mode, .chunk = chunk});
        feed(s, std::span(text).first(static_cast<std::size_t>(first)));
        feed(s, std::span(text).subspan(static_cast<std::size_t>(first)));
        if (mode == drop_mode::oneshot) REQUIRE(s.compress());
        const auto sets = kept_of(s, shape());
        return std::make_pair(sets, feed(s, more));
      };
      const auto expected = run(61, 30);
      CHECK(run(1, 17) == expected);
      CHECK(run(7, 60) == expected);
      CHECK(run(64, 1) == expected);
    }
  }
}

TEST_CASE("a batch of texts under different policies decodes each as if it were alone") {
  const auto more = some_text(14, 8);
  std::vector<std::vector<float>> alone;
  const char* policies[] = {"h2o:heavy=11,recent=10", "full", "far_rms:capacity=21,recent=8,budget=global",
                            "streaming_llm:sinks=3,window=19"};
  for (int i = 0; i < 4; ++i) {
    const auto cache = cache_of(model(), machine().pool);
    session s = begin(model(), *cache, policies[i], {.mode = drop_mode::stream});
    feed(s, some_text(40 + i, static_cast<std::uint64_t>(i)));
    alone.push_back(feed(s, more));
  }
  const auto cache = cache_of(model(), machine().pool);
  std::vector<session> all;
  for (int i = 0; i < 4; ++i) {
    all.push_back(begin(model(), *cache, policies[i], {.mode = drop_mode::stream}));
    feed(all.back(), some_text(40 + i, static_cast<std::uint64_t>(i)));
  }
  std::vector<session*> members;
  for (session& s : all) members.push_back(&s);
  const auto vocabulary = static_cast<std::size_t>(model().shape().vocabulary);
  std::vector<float> logits;
  for (std::size_t t = 0; t < more.size(); ++t) {
    const std::vector<token_id> tokens(4, more[t]);
    REQUIRE(session::advance(members, tokens, logits));
    for (std::size_t i = 0; i < 4; ++i) {
      CAPTURE(t, i);
      CHECK(std::equal(logits.begin() + static_cast<std::ptrdiff_t>(i * vocabulary),
                       logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocabulary),
                       alone[i].begin() + static_cast<std::ptrdiff_t>(t * vocabulary)));
    }
  }
  CHECK(cache->check() == nullptr);
}

TEST_CASE("a rejected draft leaves no trace: neither in the logits nor in what the policy saw") {
  const auto text = some_text(40);
  const auto more = some_text(30, 8);
  const auto wrong = some_text(6, 99);
  for (const setting& x : settings) {
    CAPTURE(x.text);
    const auto cache = cache_of(model(), machine().pool);
    session plain = begin(model(), *cache, x.text, {.mode = drop_mode::stream});
    session drafting = begin(model(), *cache, x.text, {.mode = drop_mode::stream});
    feed(plain, text);
    feed(drafting, text);
    std::size_t at = 0;
    for (int round = 0; at < more.size(); ++round) {
      std::vector<token_id> guess(more.begin() + static_cast<std::ptrdiff_t>(at), more.end());
      guess.resize(std::min<std::size_t>(guess.size(), static_cast<std::size_t>(round % 3)));
      const std::size_t right = guess.size();
      guess.insert(guess.end(), wrong.begin(), wrong.end());
      const auto drafted = drafting.draft(guess);
      REQUIRE(drafted);
      const std::size_t computed = drafted->size() / static_cast<std::size_t>(model().shape().vocabulary);
      const std::size_t n = std::min(right, computed);
      REQUIRE(drafting.accept(static_cast<int>(n)));
      at += n;
      if (at == more.size()) break;
      feed(drafting, std::span(more).subspan(at, 1));
      ++at;
    }
    feed(plain, more);
    CHECK(kept_of(drafting, shape()) == kept_of(plain, shape()));
    CHECK(feed(drafting, wrong) == feed(plain, wrong));
  }
}

TEST_CASE("a fork that is given a policy late is one that had it from the start") {
  const auto text = some_text(61);
  const auto more = some_text(9, 8);
  const auto cache = cache_of(model(), machine().pool);
  session base = begin(model(), *cache, "full", {.remember = true});
  feed(base, text);
  for (const setting& x : settings) {
    CAPTURE(x.text);
    auto late = base.fork_as(policy(x.text));
    REQUIRE(late);
    REQUIRE(late->compress());
    session early = begin(model(), *cache, x.text);
    feed(early, text);
    REQUIRE(early.compress());
    CHECK(kept_of(*late, shape()) == kept_of(early, shape()));
    CHECK(feed(*late, more) == feed(early, more));
  }
  CHECK(base.dropped() == 0);
  CHECK(cache->check() == nullptr);
}

TEST_CASE(
    "a prefix from the cache gives what a cold run gives, and the policy's part of it is computed anew") {
  const auto text = some_text(61);
  const auto more = some_text(9, 8);
  const auto cache = cache_of(model(), machine().pool);
  {
    session writer = begin(model(), *cache, "full");
    feed(writer, text);
    const auto indexed = writer.commit(text);
    REQUIRE(indexed);
    CHECK(*indexed == 56);
  }
  for (const setting& x : settings) {
    CAPTURE(x.text);
    session cold = begin(model(), *cache, x.text);
    feed(cold, text);
    REQUIRE(cold.compress());
    session warm = begin(model(), *cache, x.text, {.prompt = text});
    const int must = policy(x.text).policy.must_recompute();
    CHECK(warm.reused() == std::min(56, (61 - std::min(61, must)) / 8 * 8));
    feed(warm, std::span(text).subspan(static_cast<std::size_t>(warm.reused())));
    REQUIRE(warm.compress());
    CHECK(kept_of(warm, shape()) == kept_of(cold, shape()));
    CHECK(feed(warm, more) == feed(cold, more));
    // What was dropped, or computed after a drop, is not offered to others.
    if (warm.dropped() > 0) {
      std::vector<token_id> whole(text);
      whole.insert(whole.end(), more.begin(), more.end());
      const auto indexed = warm.commit(whole);
      REQUIRE(indexed);
      CHECK(*indexed == 0);
      auto branch = warm.fork();
      REQUIRE(branch);
      const auto of_branch = branch->commit(whole);
      REQUIRE(of_branch);
      CHECK(*of_branch == 0);
    }
  }
  session reader = begin(model(), *cache, "full", {.prompt = text});
  CHECK(reader.reused() == 56);  // other users' prefix is still there
  CHECK(cache->check() == nullptr);
}

TEST_CASE("beams that multiply and die under a policy are texts that were fed alone") {
  const auto prompt = some_text(40);
  constexpr std::size_t width = 3;
  const int steps = std::max(4, static_cast<int>(kvcache::test::effort(12)));
  for (const setting& x : settings) {
    CAPTURE(x.text);
    const auto cache = cache_of(model(), machine().pool);
    std::vector<session> beams;
    std::vector<std::vector<token_id>> texts(width, prompt);
    beams.push_back(begin(model(), *cache, x.text, {.mode = drop_mode::stream}));
    feed(beams[0], prompt);
    while (beams.size() < width) {
      auto branch = beams[0].fork();
      REQUIRE(branch);
      beams.push_back(std::move(*branch));
    }
    splitmix64 random(3);
    std::vector<float> logits;
    for (int step = 0; step < steps; ++step) {
      // Each survivor is a copy of some beam, as a search would choose them; most steps let one die.
      std::vector<std::size_t> from;
      for (std::size_t b = 0; b < width; ++b) from.push_back(step % 3 == 2 ? b : random.next() % width);
      std::vector<session> next;
      std::vector<std::vector<token_id>> next_texts;
      for (const std::size_t parent : from) {
        auto branch = beams[parent].fork();
        REQUIRE(branch);
        next.push_back(std::move(*branch));
        next_texts.push_back(texts[parent]);
        next_texts.back().push_back(static_cast<token_id>(random.next() % 270));
      }
      beams = std::move(next);
      texts = std::move(next_texts);
      std::vector<session*> members;
      std::vector<token_id> tokens;
      for (std::size_t b = 0; b < width; ++b) {
        members.push_back(&beams[b]);
        tokens.push_back(texts[b].back());
      }
      REQUIRE(session::advance(members, tokens, logits));
    }
    const auto vocabulary = static_cast<std::ptrdiff_t>(model().shape().vocabulary);
    for (std::size_t b = 0; b < width; ++b) {
      session alone = begin(model(), *cache, x.text, {.mode = drop_mode::stream});
      const auto expected = feed(alone, texts[b]);
      CHECK(kept_of(beams[b], shape()) == kept_of(alone, shape()));
      CHECK(std::equal(expected.end() - vocabulary, expected.end(),
                       logits.begin() + static_cast<std::ptrdiff_t>(b) * vocabulary));
    }
    CHECK(cache->check() == nullptr);
  }
}
