// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sessions beside the oracle, on the seeded model of the engine's tests or on the real one.
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "masked_reference.hpp"
#include "session.hpp"
#include "support/seeded_model.hpp"

namespace engine::test {

/// The seeded model, and what it stores of a token.
inline llama_model& model() {
  return *machine().model;
}
inline const kv_shape& shape() {
  return model().shape().kv;
}

inline std::unique_ptr<session_cache> cache_of(llama_model& model, thread_pool& pool, int block_size = 8,
                                               int max_tokens = 256, std::int64_t blocks = 0) {
  cache_config config;
  config.shape = model.shape().kv;
  config.block_size = block_size;
  config.blocks = blocks;
  config.max_sequences = 6;
  config.max_tokens = max_tokens;
  config.pool = &pool;
  auto made = session_cache::create(config);
  if (!made) FAIL(describe(made.error()));
  return std::move(*made);
}

inline kvcache::retention policy(const std::string& text) {
  const auto parsed = parse_policy(text);
  if (!parsed) FAIL(describe(parsed.error()));
  return *parsed;
}

inline session begin(llama_model& model, session_cache& cache, const std::string& text,
                     const session_options& options = {}) {
  auto made = session::create(model, cache, policy(text), options);
  if (!made) FAIL(describe(made.error()));
  return std::move(*made);
}

inline std::vector<float> feed(session& s, std::span<const token_id> tokens) {
  auto logits = s.feed(tokens);
  if (!logits) FAIL(describe(logits.error()));
  return std::move(*logits);
}

using keep_sets = std::vector<std::vector<int>>;  // [layer * kv_heads + head]

inline keep_sets kept_of(const session& s, const kv_shape& shape) {
  keep_sets out;
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int h = 0; h < shape.kv_heads; ++h) {
      const auto k = s.kept(layer, h);
      out.emplace_back(k.begin(), k.end());
    }
  }
  return out;
}

/// The oracle drops what the session dropped. `sinks` > 0: and turns that many by what went since the last
/// call, as streaming_llm does with cache positions.
inline void follow(masked_reference& oracle, const session& s, const kv_shape& shape, int sinks,
                   int& turned) {
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int h = 0; h < shape.kv_heads; ++h) oracle.keep(layer, h, s.kept(layer, h));
  }
  if (sinks > 0 && s.dropped() > turned) oracle.turn(sinks, s.dropped() - turned);
  turned = s.dropped();
}

inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  REQUIRE_FALSE(a.empty());
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(double{a[i]} - b[i]);
    most = d > most || std::isnan(d) ? d : most;
  }
  return most;
}

}  // namespace engine::test
