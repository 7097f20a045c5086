// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <set>

#include "program.hpp"
#include "sampling.hpp"
#include "thread_pool.hpp"

using namespace engine;

TEST_CASE("a parallel loop runs each index once and never one worker twice at a time", "[threads]") {
  for (const int threads : {1, 2, 4}) {
    thread_pool pool(threads);
    CHECK(pool.size() == threads);
    std::vector<std::atomic<int>> busy(static_cast<std::size_t>(threads));
    std::atomic<bool> clash = false;
    for (int round = 0; round < 300; ++round) {
      const int count = round % 17;
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      pool.parallel_for(count, [&](int index, int worker) {
        if (busy[static_cast<std::size_t>(worker)].fetch_add(1) != 0) clash = true;
        ++runs[static_cast<std::size_t>(index)];
        busy[static_cast<std::size_t>(worker)].fetch_sub(1);
      });
      for (const auto& r : runs) {
        if (r != 1) FAIL(threads << " threads, loop of " << count);
      }
    }
    CHECK(!clash);
  }
}

TEST_CASE("what a parallel loop wrote is visible after it", "[threads]") {
  thread_pool pool(3);
  std::vector<int> values(64);
  for (int round = 1; round < 200; ++round) {
    pool.parallel_for(64, [&](int index, int) { values[static_cast<std::size_t>(index)] += index; });
    if (values[63] != 63 * round) FAIL(round);
  }
}

TEST_CASE("splitmix64 gives the published sequence") {
  splitmix64 random(42);
  CHECK(random.next() == 0xBDD732262FEB6E95u);
  splitmix64 other(42);
  const double u = other.uniform();
  CHECK(u == static_cast<double>(0xBDD732262FEB6E95u >> 11) * 0x1p-53);
}

TEST_CASE("greedy takes the largest logit and the lower id on a tie") {
  const float logits[] = {1, 3, 2, 3};
  CHECK(greedy(logits) == 1);
  using pairs = std::vector<std::pair<token_id, float>>;
  CHECK(largest(logits, 3) == pairs{{1, 3}, {3, 3}, {2, 2}});
  CHECK(largest(logits, 9).size() == 4);
  CHECK(largest(logits, 0).empty());
}

TEST_CASE("sampling follows the softmax and its seed") {
  const float logits[] = {0, std::log(2.0f), std::log(5.0f), -200};
  splitmix64 random(1);
  int counts[4] = {};
  for (int i = 0; i < 80000; ++i) ++counts[sample(logits, 1.0, random)];
  CHECK(std::abs(counts[0] - 10000) < 500);
  CHECK(std::abs(counts[1] - 20000) < 500);
  CHECK(std::abs(counts[2] - 50000) < 500);
  CHECK(counts[3] == 0);
  splitmix64 a(7), b(7);
  for (int i = 0; i < 100; ++i) CHECK(sample(logits, 0.7, a) == sample(logits, 0.7, b));
  CHECK(sample(logits, 0.0, a) == 2);
  CHECK(sample(logits, 1e-6, a) == 2);
}

TEST_CASE("log-sum-exp neither overflows nor loses small terms") {
  const float large[] = {1000, 1000};
  CHECK(log_sum_exp(large) == Approx(1000 + std::log(2.0)).epsilon(1e-12));
  const float spread[] = {0, -30};
  CHECK(log_sum_exp(spread) > 0);
}

TEST_CASE("the fingerprint is FNV-1a of the bytes of the floats") {
  CHECK(fingerprint({}) == 0xCBF29CE484222325u);
  const float one[] = {1.0f};
  std::uint64_t expected = 0xCBF29CE484222325u;
  for (const unsigned byte : {0x00u, 0x00u, 0x80u, 0x3Fu}) expected = (expected ^ byte) * 0x100000001B3u;
  CHECK(fingerprint(one) == expected);
  const float zero[] = {0.0f}, minus[] = {-0.0f};
  CHECK(fingerprint(zero) != fingerprint(minus));
}

TEST_CASE("documents print floats with nine digits and survive bytes that are not UTF-8") {
  CHECK(to_text(json{{"a", 0.1f}, {"b", json::array({1, -2.5, nullptr, true})}}) ==
        R"({"a": 0.100000001, "b": [1, -2.5, null, true]})");
  CHECK(to_text(json(std::numeric_limits<double>::infinity())) == "null");
  CHECK(to_text(json(std::nan(""))) == "null");
  CHECK(json::parse(to_text(json("\xFFx\n\""))) == json("\xEF\xBF\xBDx\n\""));
  CHECK(to_text(json::object()) == "{}");
  const float third = 1.0f / 3.0f;
  CHECK(json::parse(to_text(json(third))).get<float>() == third);
}

TEST_CASE("an error prints field and value and no control characters") {
  error e = bad_input("bad_value", "na\x1Bme", "12");
  e.file = "f.jsonl";
  e.line = 3;
  CHECK(describe(e) == "bad_value: na?me = 12 (f.jsonl:3)");
  const json document = to_json(e);
  CHECK(document["error"]["line"] == 3);
  CHECK(document["error"]["file"] == "f.jsonl");
  CHECK(to_json(bad_input("c", "f", "v"))["error"]["file"].is_null());
}
