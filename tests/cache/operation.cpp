// SPDX-License-Identifier: Apache-2.0
#include "operation.hpp"

#include <array>

namespace kvcache::test {

namespace {

constexpr std::array<const char*, 15> names = {"open",     "extend", "draft", "accept", "settle",
                                               "truncate", "commit", "fork",  "assign", "close",
                                               "step",     "reset",  "peek",  "evict",  "run"};

// How often each verb comes, out of 64.
constexpr std::array<int32_t, 15> weights = {9, 14, 4, 4, 3, 4, 8, 4, 3, 3, 2, 1, 1, 1, 3};

verb verb_of(uint8_t byte) {
  int32_t left = byte % 64;
  for (size_t v = 0; v < weights.size(); ++v) {
    if (left < weights[v]) return static_cast<verb>(v);
    left -= weights[v];
  }
  return verb::step;
}

}  // namespace

operation decode(std::span<const uint8_t> in, int32_t sequences, int32_t max_tokens) {
  operation o;
  o.what = verb_of(in[0]);
  o.s = in[1] % sequences;
  o.other = (in[1] / 16) % sequences;
  // Back to the start only now and then: a cache must get old to get into trouble.
  if (o.what == verb::reset && in[5] % 8 != 0) o.what = verb::step;
  const int32_t n = in[2];
  o.pick = in[3] | static_cast<uint32_t>(in[4]) << 8 | static_cast<uint32_t>(in[5]) << 16;
  if (o.what == verb::open || o.what == verb::truncate || o.what == verb::peek) {
    o.n = n % (max_tokens + 3);
  } else if (o.what == verb::draft || o.what == verb::accept) {
    o.n = n % 6;
  } else {
    o.n = n < 100 ? 1 + n % 3 : n % (max_tokens / 2 + 2);
  }
  return o;
}

std::string describe(const operation& o) {
  return std::string(names[static_cast<size_t>(o.what)]) + " s=" + std::to_string(o.s) +
         " other=" + std::to_string(o.other) + " n=" + std::to_string(o.n) +
         " pick=" + std::to_string(o.pick);
}

}  // namespace kvcache::test
