// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ctest tells a test program: where the real model lies, how much of a long random test to run, and a
// seed to repeat a failed run.
#include <catch2/catch.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace kvcache::test {

/// Path of the real model. Fails the test if there is none: a test that needs it never passes without it.
inline std::string model_path() {
  const char* path = std::getenv("KVCACHE_MODEL");
  if (path == nullptr || *path == 0) FAIL("KVCACHE_MODEL is not set (CMake variable KVCACHE_MODEL)");
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) FAIL("KVCACHE_MODEL names " << path << ", which cannot be read");
  std::fclose(file);
  return path;
}

/// File below tests/data.
inline std::string data_path(const std::string& name) {
  return std::string(KVCACHE_TEST_DATA_DIR) + "/" + name;
}

/// How many of `full` random operations this build runs (environment KVCACHE_TEST_EFFORT, a percentage;
/// sanitizer builds run fewer). Never less than 1 of a positive number.
inline int64_t effort(int64_t full) {
  const char* text = std::getenv("KVCACHE_TEST_EFFORT");
  const int64_t percent = text != nullptr && *text != 0 ? std::strtoll(text, nullptr, 10) : 100;
  if (percent <= 0) FAIL("KVCACHE_TEST_EFFORT is '" << text << "', a positive percentage is needed");
  const int64_t part = full / 100 * percent + full % 100 * percent / 100;
  return part > 0 || full <= 0 ? part : 1;
}

/// Seed of a random test: `usual`, or the environment's KVCACHE_TEST_SEED. Printed, so that a log is enough
/// to repeat the run.
inline uint64_t test_seed(const char* what, uint64_t usual) {
  const char* text = std::getenv("KVCACHE_TEST_SEED");
  const uint64_t seed = text != nullptr && *text != 0 ? std::strtoull(text, nullptr, 0) : usual;
  std::printf("%s: KVCACHE_TEST_SEED=%llu\n", what, static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace kvcache::test
