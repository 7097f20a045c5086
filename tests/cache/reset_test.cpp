// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include "drive.hpp"
#include "script.hpp"
#include "support/environment.hpp"

namespace {

using namespace kvcache;
using namespace kvcache::test;

template <class Traits>
std::vector<uint64_t> trail_of(machine<Traits>& m, const std::vector<uint8_t>& script) {
  std::vector<uint64_t> trail{m.observe()};
  m.forget_texts();
  const std::string why = drive(m, std::span(script).subspan(header_bytes), nullptr, &trail);
  if (!why.empty()) FAIL(why);
  return trail;
}

template <class Traits>
void reset_is_new(uint64_t seed, int32_t policy, int32_t layout) {
  auto use = random_script(seed, policy, layout, seed % 2 == 0, 250);
  auto script = random_script(seed + 1, policy, layout, seed % 2 == 0, 250);
  std::copy_n(use.begin(), header_bytes, script.begin());
  const rules r = rules_of(use);
  machine<Traits> used(r, &make_policy<Traits>, seed);
  machine<Traits> fresh(r, &make_policy<Traits>, seed);
  (void)trail_of(used, use);
  REQUIRE(used.apply({.what = verb::reset, .n = 0}) == "");
  const auto a = trail_of(used, script);
  const auto b = trail_of(fresh, script);
  const auto differ = std::mismatch(a.begin(), a.end(), b.begin());
  INFO("seed " << seed << ", policy " << policy << ", layout " << layout << ": differs after operation "
               << differ.first - a.begin());
  CHECK(differ.first == a.end());
}

template <class Traits>
void twice(uint64_t seed, int32_t policy, int32_t layout) {
  const auto script = random_script(seed, policy, layout, seed % 2 == 0, 400);
  machine<Traits> first(rules_of(script), &make_policy<Traits>, 1);
  machine<Traits> second(rules_of(script), &make_policy<Traits>, 2);
  INFO("seed " << seed << ", policy " << policy << ", layout " << layout);
  CHECK(trail_of(first, script) == trail_of(second, script));
}

}  // namespace

TEST_CASE("a cache that was used and reset gives the same ids, tables, commands and counters as a new one",
          "[reset]") {
  const uint64_t seed = test_seed("reset", 20260103);
  for (uint64_t i = 0; i < static_cast<uint64_t>(effort(60)); ++i) {
    for (int32_t layout = 0; layout < layouts; ++layout) {
      reset_is_new<lru_cache>(mix64(seed + i), 0, layout);
      reset_is_new<lfu_cache>(mix64(seed + i), 1, layout);
      reset_is_new<dynamic>(mix64(seed + i), 2 + static_cast<int32_t>(i) % (policies - 2), layout);
    }
  }
}

TEST_CASE("the same calls give the same ids, tables, commands and counters", "[reset]") {
  const uint64_t seed = test_seed("determinism", 20260104);
  for (uint64_t i = 0; i < static_cast<uint64_t>(effort(60)); ++i) {
    for (int32_t layout = 0; layout < layouts; ++layout) {
      twice<lru_cache>(mix64(seed + i), 0, layout);
      twice<lfu_cache>(mix64(seed + i), 1, layout);
      twice<dynamic>(mix64(seed + i), 2 + static_cast<int32_t>(i) % (policies - 2), layout);
    }
  }
}

TEST_CASE("a policy chosen at run time gives the same ids as the same policy chosen by type", "[reset]") {
  const uint64_t seed = test_seed("erased policy", 20260105);
  for (uint64_t i = 0; i < static_cast<uint64_t>(effort(30)); ++i) {
    for (int32_t layout = 0; layout < layouts; ++layout) {
      const auto script = random_script(mix64(seed + i), static_cast<int32_t>(i % 2), layout, i % 4 < 2, 400);
      machine<dynamic> erased(rules_of(script), &make_policy<dynamic>, 1);
      std::vector<uint64_t> typed;
      if (i % 2 == 0) {
        machine<lru_cache> m(rules_of(script), &make_policy<lru_cache>, 1);
        typed = trail_of(m, script);
      } else {
        machine<lfu_cache> m(rules_of(script), &make_policy<lfu_cache>, 1);
        typed = trail_of(m, script);
      }
      CHECK(trail_of(erased, script) == typed);
    }
  }
}
