// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small traces in which prefixes are shared, broken off, repeated inside a request, empty and longer than
// any cache.
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "trace/trace.hpp"

namespace kvcache::test {

struct trace_shape {
  int requests = 20;
  int longest = 6;   ///< blocks
  int ids = 3;       ///< different ones; few, so that prefixes meet
  int fresh_one_in;  ///< of so many blocks one is new
};

/// Puts a request at the end.
inline void add(cli::trace& t, std::int64_t time_us, std::int64_t tokens,
                const std::vector<std::int32_t>& ids) {
  cli::request r;
  r.time_us = time_us;
  r.input_tokens = tokens;
  r.first = std::int64_t(t.units.size());
  r.count = std::int32_t(ids.size());
  t.units.insert(t.units.end(), ids.begin(), ids.end());
  for (const std::int32_t id : ids) t.distinct = std::max(t.distinct, id + 1);
  t.requests.push_back(r);
}

inline cli::trace random_trace(std::mt19937_64& random, const trace_shape& shape) {
  const auto any = [&](int n) { return std::int32_t(random() % std::uint64_t(n)); };
  cli::trace t;
  t.format = "random";
  t.block_tokens = 4;
  std::int64_t now = 0;
  std::int32_t ids = shape.ids;
  std::vector<std::int32_t> before;
  for (int r = 0; r < shape.requests; ++r) {
    now += any(3) == 0 ? any(4) : 0;
    std::vector<std::int32_t> path;
    const int n = any(shape.longest + 1);
    // Half of them go on where the last one was, as a conversation does.
    if (any(2) == 0) path.assign(before.begin(), before.begin() + any(int(before.size()) + 1));
    while (int(path.size()) < n) path.push_back(any(shape.fresh_one_in) == 0 ? ids++ : any(shape.ids));
    // Now and then a length that is too short for the blocks, or too long.
    add(t, now, std::max<std::int64_t>(0, std::int64_t(path.size()) * 4 + any(7) - 4), path);
    before = path;
  }
  return t;
}

}  // namespace kvcache::test
