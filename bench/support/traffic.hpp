// SPDX-License-Identifier: Apache-2.0
#pragma once
// Texts and trees of workloads W1..W11, which other cache managers can be measured on too.
//
// Blocks of 16 tokens. Token i of sequence s is splitmix64((s << 32) + i) % 128000, so no two sequences share
// a first block unless said. Tree T: 1,000 texts of 1,024 tokens, 16 of 4,096 and 4 of 32,768, nothing
// pinned. A query that must hit L tokens is L + 1 tokens long.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include "kvcache/cache.hpp"

namespace bench {

using text = std::vector<kvcache::token_id>;

inline constexpr int32_t block_size = 16;

inline kvcache::token_id token(uint64_t sequence, uint64_t i) {
  return static_cast<kvcache::token_id>(kvcache::mix64((sequence << 32) + i + 0x9e3779b97f4a7c15ull) %
                                        128000);
}
inline text tokens(uint64_t sequence, size_t n) {
  text t(n);
  for (size_t i = 0; i < n; ++i) t[i] = token(sequence, i);
  return t;
}

/// 0, 1, ... n − 1 in an order that looks random and is always the same.
inline std::vector<int32_t> shuffled(int32_t n) {
  std::vector<int32_t> v(static_cast<size_t>(n));
  std::iota(v.begin(), v.end(), 0);
  for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[kvcache::mix64(i) % i]);
  return v;
}

/// One layer, so that `total` counts blocks and nothing else.
template <class Traits = kvcache::serving>
kvcache::basic_cache<Traits> make(int32_t total, int32_t max_sequences, int32_t max_sequence_tokens = 0) {
  const kvcache::group_config g{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 64, .head_dim_v = 64},
                                .block_size = block_size,
                                .total = {total}};
  auto c = kvcache::basic_cache<Traits>::create(
      {.groups = {&g, 1}, .max_sequences = max_sequences, .max_sequence_tokens = max_sequence_tokens});
  if (!c) std::abort();
  return *std::move(c);
}
template <class Traits>
bool store(kvcache::basic_cache<Traits>& c, const text& t) {
  auto s = c.open(t, kvcache::scope::shared());
  const auto n = static_cast<int32_t>(t.size());
  if (!s || !s->extend(n - s->held())) return false;
  const auto done = s->commit(t);
  return done && *done == n;
}

/// How the units of tree T came into it.
enum class insertion {
  in_order,   ///< text after text, each at once: a text lies in consecutive nodes
  shuffled,   ///< the same, the texts in random order
  scattered,  ///< unit after unit of texts that grow at the same time, in random order: no two neighbours
};

/// Tree T in a cache with `spare` more blocks, and its texts, each one token longer than what is stored.
struct tree_t {
  static constexpr int32_t blocks_of_t = 1000 * 64 + 16 * 256 + 4 * 2048;
  kvcache::cache c;
  std::vector<text> texts;  ///< 1,000 short ones, 16 of middle length, 4 long ones

  explicit tree_t(int32_t spare, insertion how = insertion::in_order)
      : c(make(blocks_of_t + spare, 1020, 32768 + block_size)) {
    for (uint64_t s = 0; s < 1020; ++s) texts.push_back(tokens(s, s < 1000 ? 1025 : s < 1016 ? 4097 : 32769));
    if (how == insertion::scattered) {
      scatter();
    } else {
      fill(how);
    }
    if (c.count().nodes != blocks_of_t || c.count().blocks_cached != blocks_of_t) std::abort();
  }

 private:
  void fill(insertion how) {
    std::vector<int32_t> order = shuffled(static_cast<int32_t>(texts.size()));
    if (how == insertion::in_order) std::sort(order.begin(), order.end());
    for (const int32_t i : order) {
      const text& t = texts[static_cast<size_t>(i)];
      if (!store(c, {t.begin(), t.end() - 1})) std::abort();
    }
  }
  void scatter() {
    std::vector<kvcache::sequence> open;
    std::vector<int32_t> turn;  // of which text the next unit is
    for (size_t i = 0; i < texts.size(); ++i) {
      auto s = c.open({}, kvcache::scope::shared());
      const auto n = static_cast<int32_t>(texts[i].size()) - 1;
      if (!s || !s->extend(n)) std::abort();
      open.push_back(*std::move(s));
      turn.insert(turn.end(), static_cast<size_t>(n / block_size), static_cast<int32_t>(i));
    }
    for (const int32_t k : shuffled(static_cast<int32_t>(turn.size()))) {
      const auto i = static_cast<size_t>(turn[static_cast<size_t>(k)]);
      const auto end = static_cast<size_t>(open[i].committed() + block_size);
      if (!open[i].commit(std::span<const kvcache::token_id>(texts[i]).first(end))) std::abort();
    }
  }
};

}  // namespace bench
