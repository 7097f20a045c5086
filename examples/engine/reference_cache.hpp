// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cache written the plainest way: one growing array per sequence, layer and head, loops for attention. It
// is the oracle the other kinds are compared with, so it uses nothing of the library: no attention, RoPE,
// softmax or number format code is shared.

#include <map>
#include <vector>

#include "cache_kind.hpp"

namespace engine {

/// Plain arrays, no sharing, no blocks.
class reference_cache final : public cache_kind, private kv_backend {
 public:
  /// Requires: config.pool is set and outlives the cache.
  explicit reference_cache(const cache_config& config);

  std::string_view name() const override { return "reference"; }
  kv_backend& backend() override { return *this; }
  result<opened_sequence> open(std::span<const token_id> prompt, const cache_scope& scope) override;
  result<int> extend(int slot, int tokens) override;
  status commit(int slot, std::span<const token_id> text) override;
  result<int> fork(int slot) override;
  void close(int slot) override;
  int length(int slot) const override;
  cache_bytes bytes() const override;
  void read(int slot, int layer, int position, float* k, float* v) const override;

 private:
  /// k and v: per layer and head (layer * kv_heads + head) an array [position][head_dim].
  struct sequence {
    int length = 0;
    int room = 0;
    std::vector<std::vector<float>> k;
    std::vector<std::vector<float>> v;
  };

  status begin_step(std::span<const step_segment> segments) override;
  void attend(int layer, const float* q, const float* k, const float* v, float* out) override;
  void end_step() override;

  int free_slot() const;
  float stored(float value) const;
  void rotate(const float* in, int row, float* out) const;
  void append(int layer, const float* k, const float* v);
  void attend_row(int layer, int row, int head, const float* q, float* out) const;

  cache_config config_;
  std::map<int, sequence> sequences_;
  // The step under way.
  std::vector<step_segment> segments_;
  std::vector<int> row_segment_;   ///< [rows]
  std::vector<int> row_position_;  ///< [rows]
  std::vector<double> cosines_;    ///< [rows][head_dim / 2]
  std::vector<double> sines_;      ///< [rows][head_dim / 2]
};

}  // namespace engine
