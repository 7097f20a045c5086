// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seeded two-layer model of the engine's tests, loaded, and caches and texts for it.
#include <catch2/catch.hpp>
#include <memory>
#include <string_view>
#include <vector>

#include "cache_kind.hpp"
#include "model.hpp"
#include "sampling.hpp"
#include "synthetic_model.hpp"

namespace engine::test {

/// The model on a pool of threads.
struct seeded_model {
  explicit seeded_model(int threads, simd_target target = best_simd_target()) : pool(threads) {
    static const bytes file = synthetic_model({}).serialise();
    const auto opened = gguf_file::from_bytes(file);
    REQUIRE(opened);
    auto loaded = llama_model::load(*opened, pool, target);
    if (!loaded) FAIL(describe(loaded.error()));
    model = std::move(*loaded);
  }

  /// Of a cache for it; what is not said here has the engine's default.
  cache_config config(int max_sequences, int max_tokens) {
    cache_config c;
    c.shape = model->shape().kv;
    c.max_sequences = max_sequences;
    c.max_tokens = max_tokens;
    c.pool = &pool;
    return c;
  }

  thread_pool pool;
  std::unique_ptr<llama_model> model;
};

/// One for all cases of a test program. Requires: one or two threads.
inline seeded_model& machine(int threads = 1) {
  static seeded_model one(1);
  static seeded_model two(2);
  return threads == 1 ? one : two;
}

/// A cache of a kind that must be there.
inline std::unique_ptr<cache_kind> open_cache(std::string_view kind, const cache_config& config) {
  auto made = make_cache(kind, config);
  if (!made) FAIL(describe(made.error()));
  return std::move(*made);
}

/// Tokens of its vocabulary, none of them special by design.
inline std::vector<token_id> some_text(splitmix64& random, int tokens) {
  std::vector<token_id> out;
  for (int i = 0; i < tokens; ++i) out.push_back(static_cast<token_id>(random.next() % 270));
  return out;
}
inline std::vector<token_id> some_text(int tokens, std::uint64_t seed = 7) {
  splitmix64 random(seed);
  return some_text(random, tokens);
}

}  // namespace engine::test
