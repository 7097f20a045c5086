// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes in, verdict out. The first bytes choose a cache, the others are operations on it; any bytes are a
// valid script, so a fuzzer may drive it: LLVMFuzzerTestOneInput(d, n) is `run_ops(d, n).failure.empty() ||
// (abort(), 0)`.
#include <array>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "oracle.hpp"

namespace kvcache::test {

inline constexpr size_t header_bytes = 10;
/// lru and lfu by type; then those of `policy_texts`, chosen at run time.
inline constexpr const char* policy_texts[] = {"lru",      "lfu",    "fifo",       "slru", "ttl:0",
                                               "priority", "gdsf:2", "s3_fifo:30", "two_q"};
inline constexpr int32_t policies = 2 + static_cast<int32_t>(std::size(policy_texts));
inline constexpr int32_t layouts = 8;  // kinds of groups, see rules_of

/// The cache that the header of a script describes.
rules rules_of(std::span<const uint8_t> header);

struct outcome {
  int64_t operations = 0;
  std::string failure;                 // empty: all as the model says
  std::array<uint64_t, 5> activity{};  // units stored, evicted, blocks copied, refusals, tokens reused
};

/// Runs a script, comparing after every operation.
outcome run_ops(const uint8_t* data, size_t size);

/// A random script for layout `layout` and policy `policy`.
std::vector<uint8_t> random_script(uint64_t seed, int32_t policy, int32_t layout, bool accounts,
                                   size_t operations);

}  // namespace kvcache::test
