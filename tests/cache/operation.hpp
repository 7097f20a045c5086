// SPDX-License-Identifier: Apache-2.0
#pragma once
// One call of a cache with all its arguments, and how it is read from bytes: the same few bytes are a random
// test, a recorded script and the input of a fuzzer.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvcache::test {

enum class verb : uint8_t {
  open,
  extend,
  draft,
  accept,
  settle,
  truncate,
  commit,
  fork,
  assign,
  close,
  step,
  reset,
  peek,
  evict,
  run  // the data plane's part of a step: what comes now comes between it and the step's end
};

struct operation {
  static constexpr size_t encoded_bytes = 6;

  verb what = verb::step;
  int32_t s = 0;         // sequence
  int32_t other = 0;     // second sequence of fork and assign
  int32_t n = 0;         // tokens
  uint32_t pick = 0;     // chooses texts, scopes, accounts, rare bad arguments
  int32_t literal = -1;  // token of everything that is appended; −1 = chosen by `pick`
};

/// The operation in the first `encoded_bytes` of `in`, for a cache with so many sequences and tokens.
operation decode(std::span<const uint8_t> in, int32_t sequences, int32_t max_tokens);
std::string describe(const operation& o);

}  // namespace kvcache::test
