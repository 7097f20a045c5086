// SPDX-License-Identifier: Apache-2.0
// Policies as text: what is read, what is refused and how, and that printing and reading are inverse.
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <string>

#include "kvcache/retain/parse.hpp"
#include "kvcache/retain/select.hpp"

using namespace kvcache;

namespace {

std::string again(const char* text) {
  const parsed_retention p = parse_retention(text);
  INFO(text << ": " << p.allowed);
  REQUIRE(p.ok());
  char out[256];
  const int32_t length = to_text(p.value, out);
  REQUIRE(length == static_cast<int32_t>(std::strlen(out)));
  return out;
}

struct refusal {
  std::string key, text, allowed;
};
refusal refused(const char* text) {
  const parsed_retention p = parse_retention(text);
  INFO(text);
  REQUIRE_FALSE(p.ok());
  return {std::string(p.key), std::string(p.text), p.allowed};
}

// A scorer of a user's own: the whole of it.
// [own_scorer]
struct biggest_value {
  int32_t capacity = 64;
  static constexpr observe needs = observe::last_row;
  constexpr keep_plan plan(const retain_lengths& n) const noexcept {
    return keep_at_most(n, capacity, 4, 16, 1);  // sinks, recent, drop every token
  }
  constexpr int32_t must_recompute() const noexcept { return 1; }
  constexpr watch_options watch() const noexcept { return {.queries = 1}; }
  constexpr void score(const observation& o, std::span<float> out) const noexcept {
    for (size_t i = 0; i < out.size(); ++i) out[i] = o.value_norms[i];
  }
};
static_assert(token_scorer<biggest_value>);
// [own_scorer]

}  // namespace

TEST_CASE("a policy's text gives its settings, and printing them gives text that reads as the same") {
  CHECK(again("full") == "full");
  CHECK(again("full:") == "full");
  CHECK(again("window:256") == "window:window=256");
  CHECK(again("streaming_llm:sinks=4,window=252") == "streaming_llm:sinks=4,window=252,positions=cache");
  CHECK(again("h2o:heavy=64,recent=64") == "h2o:heavy=64,recent=64,every=1");
  CHECK(again("snapkv:capacity=256,window=32,kernel=7") ==
        "snapkv:capacity=256,window=32,kernel=7,pool=max,every=1");
  CHECK(again("tova:64") == "tova:capacity=64,every=1");
  CHECK(again("scissorhands:capacity=64") == "scissorhands:capacity=64,recent=10,history=400,every=1");
  CHECK(again("far_rms:capacity=100,budget=global,floor=1/2") ==
        "far_rms:capacity=100,recent=32,sinks=4,distance=32,every=1,budget=global,floor=1/2");
  for (const char* text :
       {"window:1", "streaming_llm:positions=text", "h2o", "moved_queries:capacity=99,budget=head"}) {
    const std::string once = again(text);
    CHECK(again(once.c_str()) == once);
  }
  const parsed_retention held = parse_retention("snapkv:capacity=40,window=8,pool=avg");
  REQUIRE(held.value.policy.get<snapkv>() != nullptr);
  CHECK(held.value.policy.get<snapkv>()->pool == snapkv::avg_pool);
  CHECK(held.value.policy.must_recompute() == 8);
  CHECK(held.value.policy.needs() == observe::votes);
  CHECK_FALSE(held.value.policy.whole_layer());
}

TEST_CASE("wrong text names the key, what was found and what is allowed") {
  CHECK(refused("").key == "policy");
  CHECK(refused("snap:capacity=3").allowed ==
        "full, window, streaming_llm, h2o, snapkv, tova, scissorhands, far_rms, moved_queries");
  const refusal unknown = refused("h2o:heavy=3,size=4");
  CHECK(unknown.key == "size");
  CHECK(unknown.text == "4");
  CHECK(unknown.allowed == "heavy, recent, every, budget, floor");
  CHECK(refused("full:a=1").allowed == "no keys");
  CHECK(refused("window:0").allowed == "a whole number from 1 on");
  CHECK(refused("window:1.5").text == "1.5");
  CHECK(refused("window:99999999999").key == "window");
  CHECK(refused("window:3,window=4").allowed == "once");
  CHECK(refused("window").allowed == "a whole number from 1 on; it has no default");
  CHECK(refused("h2o:recent=0").key == "recent");
  CHECK(refused("h2o:heavy=-1").text == "-1");
  CHECK(refused("h2o:heavy=3,").key == "");
  CHECK(refused("snapkv:capacity=32,window=32").key == "window");
  CHECK(refused("snapkv:capacity=64,kernel=4").allowed == "an odd number");
  CHECK(refused("snapkv:capacity=64,pool=sum").allowed == "max|avg");
  CHECK(refused("far_rms:capacity=35").allowed == "at least sinks and recent together, 36");
  CHECK(refused("far_rms:capacity=64,budget=heads").allowed == "uniform|head|layer|global");
  CHECK(refused("far_rms:capacity=64,floor=0.2").key == "floor");
  CHECK(refused("far_rms:capacity=64,floor=3/2").text == "3/2");
  CHECK(refused("window:3,budget=head").key == "budget");  // nothing to divide by
}

TEST_CASE("no text, however damaged, is read past its end or accepted by chance") {
  std::mt19937 random(1);
  const std::string good = "snapkv:capacity=256,window=32,kernel=7,pool=avg,budget=global,floor=1/5";
  const std::string letters = "abcdefghijklmnopqrstuvwxyz0123456789:=,/-_ ";
  for (int round = 0; round < 2000; ++round) {
    std::string text = good;
    for (size_t k = random() % 4 + 1; k-- > 0;)
      text[random() % text.size()] = letters[random() % letters.size()];
    text.resize(random() % (text.size() + 1));
    const std::vector<char> exact(text.begin(), text.end());  // nothing behind it
    const parsed_retention p = parse_retention({exact.data(), exact.size()});
    if (!p.ok()) continue;
    char out[256];
    REQUIRE(to_text(p.value, out) > 0);
    REQUIRE(parse_retention(out).ok());
  }
}

TEST_CASE("a text that does not fit is cut, ends with 0, and its length is told") {
  char small[8];
  const parsed_retention p = parse_retention("window:256");
  CHECK(to_text(p.value, small) == 17);
  CHECK(std::string(small) == "window:");
  CHECK(to_text(p.value, {}) == 17);
}

TEST_CASE("a scorer of one's own is a policy like any other, without a text") {
  const retention own{biggest_value{.capacity = 6}, {}};
  char out[32];
  CHECK(to_text(own, out) == 0);
  CHECK(own.policy.scores());
  const std::vector<float> norms = {1, 9, 3, 7};
  std::vector<float> score(4);
  observation o;
  o.held = 4;
  o.value_norms = norms;
  own.policy.score(o, score);
  CHECK(score == norms);
  CHECK(own.policy.plan({.held = 9, .incoming = 0, .unit = 1, .prefill_end = true}).keep == 6);
}
