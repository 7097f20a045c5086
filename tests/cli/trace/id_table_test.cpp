// SPDX-License-Identifier: Apache-2.0
// The table of ids beside a map: numbers in order of first appearance, never one for two ids.
#include "trace/id_table.hpp"

#include <catch2/catch.hpp>
#include <map>
#include <random>
#include <string>

#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

TEST_CASE("ids of every kind get numbers in order of first appearance") {
  std::mt19937_64 random(test_seed("id_table", 7));
  for (int round = 0; round < 20; ++round) {
    cli::id_table table;
    std::map<std::string, std::int32_t> naive;
    std::int32_t before = 0;
    const std::int64_t spread = std::int64_t{1} << (random() % 40);
    for (std::int64_t step = 0; step < effort(20000); ++step) {
      const std::uint64_t v = random() % static_cast<std::uint64_t>(spread);
      std::int32_t got = 0;
      std::string key;
      switch (random() % 6) {
        case 0:
        case 1:
          got = table.of(static_cast<std::int64_t>(v));
          key = "i" + std::to_string(v);
          break;
        case 2:
          got = table.of(-1 - static_cast<std::int64_t>(v));
          key = "i-" + std::to_string(v);
          break;
        case 3:
          got = table.of_unsigned(~v);
          key = "u" + std::to_string(~v);
          break;
        case 4:
          got = table.of_bytes(std::to_string(v), cli::id_table::kind::decimal);
          key = "d" + std::to_string(v);
          break;
        default:
          const std::string text = std::string(v % 40, '\0') + std::to_string(v);
          got = table.of_bytes(text, cli::id_table::kind::text);
          key = "t" + text;
      }
      const std::int32_t expected =
          naive.try_emplace(key, before + static_cast<std::int32_t>(naive.size())).first->second;
      REQUIRE(got == expected);
      REQUIRE(table.size() == before + static_cast<std::int32_t>(naive.size()));
      if (random() % 8192 == 0) {
        table.new_scope();
        before += static_cast<std::int32_t>(naive.size());
        naive.clear();
      }
    }
  }
}

TEST_CASE("an id that was far away when it came keeps its number when the array reaches it") {
  cli::id_table table;
  CHECK(table.of(200'000) == 0);
  for (int i = 0; i < 100'000; ++i) REQUIRE(table.of(i) == i + 1);
  CHECK(table.of(200'000) == 0);
  CHECK(table.of(200'001) == 100'001);
  CHECK(table.of_unsigned(5) == 6);
}
