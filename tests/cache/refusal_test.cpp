// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include "drive.hpp"
#include "script.hpp"
#include "support/environment.hpp"

namespace {

using namespace kvcache;
using namespace kvcache::test;

struct tally {
  int64_t injections = 0, single = 0, runs = 0;
};

// Runs a script with admission n of group g refused, once or for good, then a second script without faults.
// Returns whether the fault came to pass.
template <class Traits>
bool with_fault(const std::vector<uint8_t>& script, const std::vector<uint8_t>& rest, int32_t g, int64_t n,
                bool permanent, tally& t) {
  const rules r = rules_of(script);
  machine<Traits> m(r, &make_policy<Traits>, 1);
  REQUIRE(m.created().empty());
  m.cache().pool(g).arm(n, permanent);
  ++t.runs;
  const auto name = [&](const char* part, const std::string& why) {
    FAIL(part << " with admission " << n << " of group " << g << " refused" << (permanent ? " for good" : "")
              << ": " << why);
  };
  if (const std::string why = drive(m, std::span(script).subspan(header_bytes)); !why.empty())
    name("script", why);
  const int64_t refused = m.cache().pool(g).refused();
  m.cache().pool(g).arm(-1);
  if (const std::string why = drive(m, std::span(rest).subspan(header_bytes)); !why.empty())
    name("afterwards", why);
  m.close_all();
  if (const std::string why = m.step(); !why.empty()) name("at the end", why);
  t.injections += refused;
  t.single += permanent ? 0 : refused;
  return refused > 0;
}

// Resets would replace the armed pool: they become steps.
std::vector<uint8_t> without_reset(std::vector<uint8_t> script) {
  for (size_t i = header_bytes; i + operation::encoded_bytes <= script.size();
       i += operation::encoded_bytes) {
    script[i + 5] |= 1;
  }
  return script;
}

template <class Traits>
void every_admission(int32_t layout, int32_t policy, uint64_t seed, tally& t) {
  const auto script = without_reset(random_script(seed, policy, layout, seed % 2 == 1, 70));
  auto rest = without_reset(random_script(seed + 1, policy, layout, seed % 2 == 1, 12));
  const auto groups = static_cast<int32_t>(rules_of(script).groups.size());
  for (int32_t g = 0; g < groups; ++g) {
    for (const bool permanent : {false, true}) {
      for (int64_t n = 0; with_fault<Traits>(script, rest, g, n, permanent, t); ++n) {
      }
    }
  }
}

}  // namespace

TEST_CASE("whichever admission is refused, the call says so, nothing changes and work goes on", "[refusal]") {
  const uint64_t seed = test_seed("refused admissions", 20260102);
  tally t;
  for (uint64_t i = 0; i < static_cast<uint64_t>(effort(120)); ++i) {
    for (int32_t layout = 0; layout < layouts; ++layout) {
      every_admission<failing_lru>(layout, 0, mix64(seed + i) + i % 2, t);
      every_admission<failing_lfu>(layout, 1, mix64(seed + i) + i % 2 + 7, t);
    }
  }
  std::printf("refused admissions: %lld injected in %lld runs, %lld of them single\n",
              static_cast<long long>(t.injections), static_cast<long long>(t.runs),
              static_cast<long long>(t.single));
  CHECK(t.single >= effort(20'000));
}

namespace {

template <class Traits>
void every_array(int32_t policy, int32_t layout) {
  const rules r = rules_of(random_script(11, policy, layout, true, 0));
  std::vector<group_config> groups;
  const cache_config config = config_of(r, groups);
  int64_t n = 0;
  for (bool refused = true; refused; ++n) {
    auto evict = make_policy<Traits>(r.order);
    const int64_t before = host_memory::outstanding();
    const int64_t refusals = host_memory::refused();
    {
      host_memory::refuse(n);
      const auto c = basic_cache<Traits>::create(config, std::move(evict));
      host_memory::refuse(-1);
      refused = host_memory::refused() != refusals;
      REQUIRE(bool(c) == !refused);
      if (refused) {
        CHECK(c.error().code == errc::out_of_memory);
        CHECK(host_memory::outstanding() == before);
      } else {
        CHECK(host_memory::outstanding() > before);
      }
    }
    CHECK(host_memory::outstanding() == before);
  }
  CHECK(n > 20);
}

template <class Traits>
void reset_without_memory(int32_t policy, int32_t layout) {
  const auto script = random_script(12, policy, layout, true, 300);
  const rules r = rules_of(script);
  machine<Traits> m(r, &make_policy<Traits>, 1);
  REQUIRE(m.created().empty());
  REQUIRE(drive(m, std::span(script).subspan(header_bytes)) == "");
  m.close_all();
  REQUIRE(m.step() == "");
  int64_t n = 0;
  for (bool refused = true; refused; ++n) {
    auto evict = make_policy<Traits>(r.order);
    const int64_t refusals = host_memory::refused();
    const int64_t before = host_memory::outstanding();
    m.remember();
    host_memory::refuse(n);
    const status s = m.cache().reset(std::move(evict));
    host_memory::refuse(-1);
    refused = host_memory::refused() != refusals;
    REQUIRE(bool(s) == !refused);
    if (!refused) break;
    CHECK(s.code == errc::out_of_memory);
    CHECK(m.unchanged(true));
    CHECK(host_memory::outstanding() == before);
  }
  CHECK(n > 20);
  CHECK(m.cache().count().nodes == 0);
}

}  // namespace

TEST_CASE("whichever array of a new cache is refused, create says so and gives all others back",
          "[refusal]") {
  for (int32_t layout = 0; layout < layouts; ++layout) {
    every_array<lru_cache>(0, layout);
    every_array<lfu_cache>(1, layout);
    every_array<dynamic>(2 + layout, layout);
  }
  every_array<dynamic>(policies - 1, 0);
}

TEST_CASE("whichever array a reset is refused, the cache stays as it was", "[refusal]") {
  for (int32_t layout = 0; layout < layouts; ++layout) {
    reset_without_memory<lru_cache>(0, layout);
    reset_without_memory<lfu_cache>(1, layout);
    reset_without_memory<dynamic>(policies - 1 - layout, layout);
  }
}
