// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include "support/environment.hpp"

namespace {

/// Sets an environment variable for one scope.
struct with_variable {
  const char* name;
  std::string before;
  bool was_set;
  with_variable(const char* n, const char* value) : name(n), was_set(std::getenv(n) != nullptr) {
    if (was_set) before = std::getenv(n);
    setenv(n, value, 1);
  }
  ~with_variable() { was_set ? setenv(name, before.c_str(), 1) : unsetenv(name); }
};

}  // namespace

TEST_CASE("effort scales a number of operations and never rounds it to nothing") {
  {
    const with_variable v("KVCACHE_TEST_EFFORT", "10");
    CHECK(kvcache::test::effort(1000) == 100);
    CHECK(kvcache::test::effort(1005) == 100);
    CHECK(kvcache::test::effort(3) == 1);
    CHECK(kvcache::test::effort(0) == 0);
    CHECK(kvcache::test::effort(INT64_C(9000000000000000000)) == INT64_C(900000000000000000));
  }
  const with_variable v("KVCACHE_TEST_EFFORT", "");
  CHECK(kvcache::test::effort(1000) == 1000);
}

TEST_CASE("a seed from the environment replaces the usual one") {
  {
    const with_variable v("KVCACHE_TEST_SEED", "0x10");
    CHECK(kvcache::test::test_seed("support", 7) == 16);
  }
  const with_variable v("KVCACHE_TEST_SEED", "");
  CHECK(kvcache::test::test_seed("support", 7) == 7);
}
