// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <cstdlib>

#include "script.hpp"
#include "support/environment.hpp"

namespace {

using namespace kvcache;
using namespace kvcache::test;

// Operations of one test: 6.4 million over all of them, or KVCACHE_TEST_OPS each.
int64_t operations(int64_t usual) {
  const char* text = std::getenv("KVCACHE_TEST_OPS");
  return text != nullptr && *text != 0 ? std::strtoll(text, nullptr, 10) : effort(usual);
}

// Random scripts over all policies, with one account and with three, on one kind of groups.
void storm(const char* what, int32_t layout, int64_t usual) {
  const uint64_t seed = test_seed(what, 20260101);
  const int64_t wanted = operations(usual);
  constexpr size_t length = 400;
  int64_t done = 0;
  std::array<uint64_t, 5> sum{};
  for (uint64_t script = 0; done < wanted; ++script) {
    const auto policy = static_cast<int32_t>(script % policies);
    const bool accounts = script / policies % 2 == 1;
    const auto bytes = random_script(mix64(seed + script), policy, layout, accounts, length);
    const outcome o = run_ops(bytes.data(), bytes.size());
    if (!o.failure.empty()) {
      FAIL(what << ": KVCACHE_TEST_SEED=" << seed << ", script " << script << " (policy " << policy
                << ", accounts " << accounts << "): " << o.failure);
    }
    done += o.operations;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += o.activity[i];
  }
  std::printf("%s: %lld operations; units stored, evicted, blocks copied, refusals, tokens reused:", what,
              static_cast<long long>(done));
  for (const uint64_t x : sum) {
    std::printf(" %llu", static_cast<unsigned long long>(x));
    CHECK(x > 0);  // a storm that never gets tight proves nothing
  }
  std::printf("\n");
}

}  // namespace

TEST_CASE("one lossless group answers every random call as the model does", "[random_lossless]") {
  storm("lossless", 0, 1'600'000);
}
TEST_CASE("groups of 16 and 32 tokens answer every random call as the model does", "[random_lossless]") {
  storm("lossless 16/32", 1, 800'000);
}
TEST_CASE("groups of 8 and 64 tokens answer every random call as the model does", "[random_lossless]") {
  storm("lossless 8/64", 2, 600'000);
}
TEST_CASE("three groups of 1, 2 and 4 tokens answer every random call as the model does",
          "[random_lossless]") {
  storm("lossless 1/2/4", 6, 800'000);
}
TEST_CASE("groups beside one of first tokens only answer every random call as the model does",
          "[random_lossless]") {
  storm("first tokens", 7, 800'000);
}
TEST_CASE("a lossy group with a residual answers every random call as the model does", "[random_lossy]") {
  storm("lossy", 3, 1'200'000);
}
TEST_CASE("a lossy beside a lossless group answers every random call as the model does", "[random_lossy]") {
  storm("lossy and lossless", 4, 800'000);
}
TEST_CASE("two lossy groups with other residuals answer every random call as the model does",
          "[random_lossy]") {
  storm("lossy 2/8", 5, 600'000);
}
