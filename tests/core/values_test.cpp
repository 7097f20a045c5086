// SPDX-License-Identifier: Apache-2.0
// Errors as values, ids, amounts, the contract check, and the array all memory is taken in.
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <set>
#include <string>

#include "core/violations.hpp"
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

using namespace kvcache;

TEST_CASE("every error code has a text of its own, and an unknown one does not crash") {
  std::set<std::string> texts;
  for (int e = 0; e <= static_cast<int>(errc::no_gain); ++e) {
    const std::string text = to_text(static_cast<errc>(e));
    CHECK(text != "unknown");
    CHECK(texts.insert(text).second);
  }
  CHECK(std::string(to_text(static_cast<errc>(200))) == "unknown");
}

TEST_CASE("a status is true only when the call was done, and its field is never null") {
  CHECK(bool(status{}));
  CHECK(bool(status{errc::ok}));
  const status s{errc::bad_argument, "block_size", 7};
  CHECK_FALSE(bool(s));
  CHECK(std::string(s.field) == "block_size");
  CHECK(s.value == 7);
  CHECK(std::string(status{}.field).empty());
  CHECK(std::string(status{errc::out_of_memory}.field).empty());
}

TEST_CASE("a result holds a value or the reason why there is none, and gives up a value it moves from") {
  result<std::unique_ptr<int>> good(std::make_unique<int>(5));
  REQUIRE(good);
  CHECK(**good == 5);
  const std::unique_ptr<int> taken = *std::move(good);
  CHECK(*taken == 5);
  result<std::unique_ptr<int>> bad(errc::over_quota, "account", 3);
  CHECK_FALSE(bool(bad));
  CHECK(bad.error().code == errc::over_quota);
  CHECK(bad.error().value == 3);
  CHECK(*bad == nullptr);
  const result<int> from_status(status{errc::too_long, "n", 9});
  CHECK(from_status.error().value == 9);
  CHECK(bool(result<int>(4).error()));
}

TEST_CASE("ids index arrays by their number, and an absent id indexes none") {
  CHECK(index(block_id{0}) == 0);
  CHECK(index(block_id{INT32_MAX}) == static_cast<size_t>(INT32_MAX));
  CHECK(index(no_block) == SIZE_MAX);
  CHECK(index(no_node) == SIZE_MAX);
  CHECK(raw(block_id{12}) == 12);
  CHECK(raw(no_node) == -1);
}

TEST_CASE("amounts of bytes add, scale and compare in 64 bits") {
  CHECK(gibibytes(1) == bytes{1073741824});
  CHECK(mebibytes(1024) == gibibytes(1));
  CHECK(kibibytes(1024) == mebibytes(1));
  CHECK(gibibytes(80).count == 85899345920);
  CHECK((gibibytes(1) + kibibytes(1) * 2).count == 1073741824 + 2048);
  CHECK(bytes{1} < bytes{2});
  CHECK(blocks{3} > blocks{2});
}

TEST_CASE("ceil_div does not overflow at the largest number") {
  CHECK(ceil_div(0, 16) == 0);
  CHECK(ceil_div(1, 16) == 1);
  CHECK(ceil_div(16, 16) == 1);
  CHECK(ceil_div(17, 16) == 2);
  CHECK(ceil_div(INT32_MAX, 1) == INT32_MAX);
  CHECK(ceil_div(INT32_MAX, 2) == 1073741824);
  CHECK(ceil_div(INT64_MAX, int64_t{2}) == int64_t{4611686018427387904});
}

TEST_CASE("only positive numbers with one bit are powers of two") {
  for (int i = 0; i < 62; ++i) CHECK(is_power_of_two(int64_t{1} << i));
  for (const int64_t n :
       {int64_t{0}, int64_t{-1}, int64_t{-16}, int64_t{3}, int64_t{24}, INT64_MIN, INT64_MAX}) {
    CHECK_FALSE(is_power_of_two(n));
  }
}

TEST_CASE("the bit mixer keeps different numbers different and moves about half of the bits") {
  int64_t flipped = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    for (int b = 0; b < 64; ++b) flipped += __builtin_popcountll(mix64(i) ^ mix64(i ^ (uint64_t{1} << b)));
  }
  CHECK(flipped > 1000 * 64 * 30);
  CHECK(flipped < 1000 * 64 * 34);
}

TEST_CASE("a contract violation is counted and reported with its condition, and handlers nest") {
  static const char* last = nullptr;
  const uint64_t before = contract_violations();
  const violation_handler outer =
      set_violation_handler(+[](const char* what, const char*, int) noexcept { last = what; });
  CHECK(KVCACHE_CONTRACT(1 + 1 == 2));
  CHECK(contract_violations() == before);
  CHECK_FALSE(KVCACHE_CONTRACT(1 + 1 == 3));
  CHECK(contract_violations() == before + 1);
  REQUIRE(last != nullptr);
  CHECK(std::string(last) == "1 + 1 == 3");
  {
    test::violations watch;
    CHECK_FALSE(KVCACHE_CONTRACT(false));
    CHECK(watch.take() == 1);
    CHECK(watch.take() == 0);
    CHECK(std::string(last) == "1 + 1 == 3");
  }
  CHECK_FALSE(KVCACHE_CONTRACT(last == nullptr));
  CHECK(std::string(last) == "last == nullptr");
  (void)set_violation_handler(outer);
}

TEST_CASE("a fixed array starts zeroed, moves without copying, and is unchanged when memory is refused") {
  fixed_array<int64_t> a;
  CHECK(a.size() == 0);
  CHECK(a.begin() == a.end());
  REQUIRE(a.create(1000));
  for (const int64_t v : a) CHECK(v == 0);
  a[7] = 42;
  const int64_t* place = a.data();
  fixed_array<int64_t> b(std::move(a));
  CHECK(b.data() == place);
  CHECK(a.size() == 0);
  CHECK(a.data() == nullptr);
  a = std::move(b);
  CHECK(a[7] == 42);
  CHECK_FALSE(a.create(SIZE_MAX / 4));  // a product that overflows
#ifndef __SANITIZE_ADDRESS__            // which stops the program instead of refusing
  CHECK_FALSE(a.create(SIZE_MAX / 32));
#endif
  CHECK(a.size() == 1000);
  CHECK(a[7] == 42);
  REQUIRE(a.create(0));
  CHECK(a.view().empty());
  REQUIRE(a.create(3));
  CHECK(a[2] == 0);
}
