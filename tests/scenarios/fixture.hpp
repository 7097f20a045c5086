// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the scenarios share: small caches, texts, and the few steps that an engine takes with each request.
#include <malloc.h>

#include <catch2/catch.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/cache.hpp"
#include "kvcache/evict/lfu.hpp"

namespace kvcache::test {

using text = std::vector<token_id>;

struct serving_lfu : serving {
  using eviction_type = lfu;
};

/// `n` tokens that no other `first` shares, unless they are less than n apart.
inline text tokens(size_t n, token_id first) {
  text t(n);
  for (size_t i = 0; i < n; ++i) t[i] = first + static_cast<token_id>(i);
  return t;
}
inline text operator+(text a, const text& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
inline text first(const text& t, size_t n) {
  return {t.begin(), t.begin() + static_cast<std::ptrdiff_t>(n)};
}

inline group_config group_of_blocks(int32_t total, int32_t block_size) {
  return {.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
          .block_size = block_size,
          .total = {total}};
}

struct bounds {
  int32_t nodes = 0;
  int32_t sequences = 64;
  int32_t sequence_tokens = 0;
  int32_t commands = 0;
};

template <class Traits = serving>
basic_cache<Traits> make(std::span<const group_config> groups, bounds b = {},
                         std::span<const int32_t> account_limits = {}) {
  auto c = basic_cache<Traits>::create({.groups = groups,
                                        .max_sequences = b.sequences,
                                        .max_sequence_tokens = b.sequence_tokens,
                                        .max_nodes = b.nodes,
                                        .max_commands = b.commands,
                                        .account_limits = account_limits});
  INFO(to_text(c.error().code) << " " << c.error().field << " = " << c.error().value);
  REQUIRE(c);
  return *std::move(c);
}
/// One group of `total` blocks.
template <class Traits = serving>
basic_cache<Traits> make(int32_t total, int32_t block_size = 16, bounds b = {},
                         std::span<const int32_t> account_limits = {}) {
  const group_config g = group_of_blocks(total, block_size);
  return make<Traits>({&g, 1}, b, account_limits);
}

/// Opens, takes slots for what is not cached, and publishes the full units.
template <class Traits>
basic_sequence<Traits> prefill(basic_cache<Traits>& c, const text& t, const scope& who = scope::shared(),
                               open_options o = {}) {
  auto s = c.open(t, who, o);
  REQUIRE(s);
  const auto got = s->extend(static_cast<int32_t>(t.size()) - s->held());
  REQUIRE(got);
  REQUIRE(s->commit(t));
  return *std::move(s);
}
/// The same, and closes: the text is only cached afterwards.
template <class Traits>
void store(basic_cache<Traits>& c, const text& t, const scope& who = scope::shared(), open_options o = {}) {
  (void)prefill(c, t, who, o);
}
/// Tokens of the whole of `t` that are cached; changes nothing.
template <class Traits>
int32_t cached(const basic_cache<Traits>& c, const text& t, const scope& who = scope::shared()) {
  std::vector<node_id> scratch(t.size() + 1);
  return c.peek(t, who, scratch, 0);
}

/// The invariants, and that each block is counted once.
template <class Traits>
void sound(const basic_cache<Traits>& c) {
  const char* broken = c.check_invariants();
  INFO((broken != nullptr ? broken : "sound"));
  REQUIRE(broken == nullptr);
  const stats s = c.count();
  REQUIRE(s.blocks_used + s.blocks_cached + s.blocks_free + s.blocks_moving == s.blocks_total);
}

inline std::vector<block_id> ids(std::span<const block_id> table) {
  return {table.begin(), table.end()};
}
inline std::vector<block_id> free_list(const cache& c) {
  return ids(c.pool().free_list());
}

/// What a caller sees of a refusal.
inline void refused(const status& s, errc code, const char* field) {
  INFO(to_text(s.code) << " " << s.field << " = " << s.value);
  CHECK(s.code == code);
  CHECK(std::string(s.field) == field);
}

/// Counters that say where blocks and nodes are, not how often something was asked.
inline std::vector<uint64_t> whereabouts(const stats& s) {
  return {s.sequences_live, s.nodes,         s.nodes_stored, s.nodes_evicted, s.blocks_copied,
          s.blocks_used,    s.blocks_cached, s.blocks_free,  s.blocks_moving, s.blocks_total};
}

/// Bytes that this process holds from malloc.
inline size_t heap_bytes() {
  const struct mallinfo2 m = mallinfo2();
  return m.uordblks + m.hblkhd;
}

}  // namespace kvcache::test
