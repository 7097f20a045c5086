// SPDX-License-Identifier: Apache-2.0
#pragma once

// A backend between model and cache that can keep the keys and values of some rows, and later put kept ones
// in the place of what the model computes: what an engine does that looks a passage up by its tokens alone.

#include <cmath>
#include <cstddef>
#include <vector>

#include "kv_backend.hpp"

namespace rope_offset {

/// Keys before RoPE and values of some rows. [layers][rows][kv_heads][head_dim]
struct kept {
  std::vector<std::vector<float>> k, v;

  /// Turns every key by `positions`, as RoPE would have turned it for tokens that far on.
  kept turned(const engine::kv_shape& shape, int positions) const {
    kept out = *this;
    const auto dim = static_cast<std::size_t>(shape.head_dim);
    for (std::vector<float>& layer : out.k) {
      for (std::size_t at = 0; at < layer.size(); at += 2) {
        const double exponent = static_cast<double>(at % dim) / static_cast<double>(dim);
        const double angle = positions * std::pow(shape.rope_base, -exponent);
        const double x = layer[at];
        const double y = layer[at + 1];
        layer[at] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
        layer[at + 1] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
      }
    }
    return out;
  }
};

/// One step of one sequence. With `from` its rows' keys and values are replaced; what was used is in `used`.
class pasting_backend final : public engine::kv_backend {
 public:
  pasting_backend(engine::kv_backend& under, const engine::kv_shape& shape, const kept* from)
      : under_(under), shape_(shape), from_(from) {}

  engine::status begin_step(std::span<const engine::step_segment> segments) override {
    rows_ = 0;
    for (const engine::step_segment& s : segments) rows_ += static_cast<std::size_t>(s.rows);
    return under_.begin_step(segments);
  }
  void attend(int layer, const float* q, const float* k, const float* v, float* out) override {
    const std::size_t count = rows_ * static_cast<std::size_t>(shape_.kv_heads * shape_.head_dim);
    if (from_ != nullptr) {
      k = from_->k[static_cast<std::size_t>(layer)].data();
      v = from_->v[static_cast<std::size_t>(layer)].data();
    }
    used.k.emplace_back(k, k + count);
    used.v.emplace_back(v, v + count);
    under_.attend(layer, q, k, v, out);
  }
  void end_step() override { under_.end_step(); }

  kept used;

 private:
  engine::kv_backend& under_;
  const engine::kv_shape& shape_;
  const kept* from_;
  std::size_t rows_ = 0;
};

}  // namespace rope_offset
