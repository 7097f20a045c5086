// SPDX-License-Identifier: Apache-2.0
#pragma once

// Q, K and V of a text as the model makes them, what is left of K and V after packing, and attention over
// either, written plainly. Arrays are [heads][tokens][head_dim].

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "kv_backend.hpp"
#include "kvcache/quant/pack.hpp"

namespace kivi {

using values = std::vector<float>;

inline constexpr int block = 64;    ///< tokens that are packed together
inline constexpr int queries = 64;  ///< the last rows of the text ask

/// What a layer attends with; k_before: before RoPE.
struct layer_values {
  values q, k_before, k, v;
};

/// Stands between model and cache and keeps what passes.
class recorder final : public engine::kv_backend {
 public:
  recorder(engine::kv_backend& inner, const engine::kv_shape& shape, int tokens)
      : layers(static_cast<std::size_t>(shape.layers)), inner_(inner), shape_(shape), tokens_(tokens) {}

  engine::status begin_step(std::span<const engine::step_segment> segments) override {
    return inner_.begin_step(segments);
  }
  void attend(int layer, const float* q, const float* k, const float* v, float* out) override {
    layer_values& at = layers[static_cast<std::size_t>(layer)];
    at.q = by_head(q, shape_.query_heads);
    at.k_before = at.k = by_head(k, shape_.kv_heads);
    at.v = by_head(v, shape_.kv_heads);
    rotate(at.q);
    rotate(at.k);
    inner_.attend(layer, q, k, v, out);
  }
  void end_step() override { inner_.end_step(); }

  std::vector<layer_values> layers;

 private:
  values by_head(const float* rows, int heads) const {
    values out;
    for (int h = 0; h < heads; ++h) {
      for (int t = 0; t < tokens_; ++t)
        out.insert(out.end(), rows + (t * heads + h) * shape_.head_dim,
                   rows + (t * heads + h + 1) * shape_.head_dim);
    }
    return out;
  }
  void rotate(values& of) const {
    for (std::size_t i = 0; i < of.size(); i += 2) {
      const auto dim = static_cast<std::size_t>(shape_.head_dim);
      const auto position = static_cast<double>(i / dim % static_cast<std::size_t>(tokens_));
      const double angle =
          position * std::pow(shape_.rope_base, -static_cast<double>(i % dim) / shape_.head_dim);
      const double x = of[i], y = of[i + 1];
      of[i] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
      of[i + 1] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
    }
  }

  engine::kv_backend& inner_;
  engine::kv_shape shape_;
  int tokens_;
};

/// What a reader gets of `in` after it was packed block by block; the first `exempt` tokens are exact.
inline values packed(const kvcache::side_format& f, const engine::kv_shape& shape, bool keys,
                     const values& in, int exempt = 0) {
  const kvcache::group_shape g{.layers = 1,
                               .kv_heads = shape.kv_heads,
                               .head_dim_k = shape.head_dim,
                               .head_dim_v = shape.head_dim,
                               .type = kvcache::element::f16};
  const auto cell = static_cast<std::ptrdiff_t>(block) * shape.head_dim;
  const auto head = static_cast<std::ptrdiff_t>(in.size()) / shape.kv_heads;
  std::vector<std::byte> side(static_cast<std::size_t>(kvcache::layout_of(f, g, block, keys).bytes));
  values part(static_cast<std::size_t>(cell * shape.kv_heads)), out = in;
  for (std::ptrdiff_t first = 0; first < head; first += cell) {
    const int skip = first == 0 ? exempt : 0;
    for (int h = 0; h < shape.kv_heads; ++h)
      std::copy_n(in.begin() + h * head + first, cell, part.begin() + h * cell);
    if (!kvcache::pack_cells(f, g, block, keys, skip, part.data(), side.data())) return {};
    kvcache::unpack_cells(f, g, block, keys, side.data(), part.data());
    const std::ptrdiff_t exact = std::ptrdiff_t{skip} * shape.head_dim;
    for (int h = 0; h < shape.kv_heads; ++h)
      std::copy_n(part.begin() + h * cell + exact, cell - exact, out.begin() + h * head + first + exact);
  }
  return out;
}

/// Attention of the last rows: weights [query_heads][queries][tokens], 0 for tokens to come.
inline values weights_of(const engine::kv_shape& shape, const values& q, const values& k, int tokens) {
  const int dim = shape.head_dim;
  values out(static_cast<std::size_t>(shape.query_heads * queries * tokens));
  for (int row = 0; row < shape.query_heads * queries; ++row) {
    const int head = row / queries, last = tokens - queries + row % queries;
    const float* query = q.data() + (head * tokens + last) * dim;
    const float* keys = k.data() + head / (shape.query_heads / shape.kv_heads) * tokens * dim;
    float* to = out.data() + row * tokens;
    double sum = 0;
    for (int t = 0; t <= last; ++t) {
      float score = 0;
      for (int d = 0; d < dim; ++d) score += query[d] * keys[t * dim + d];
      to[t] = std::exp(score / std::sqrt(static_cast<float>(dim)));
      sum += to[t];
    }
    for (int t = 0; t <= last; ++t) to[t] = static_cast<float>(to[t] / sum);
  }
  return out;
}

/// [query_heads][queries][head_dim]
inline values output_of(const engine::kv_shape& shape, const values& weights, const values& v, int tokens) {
  const int dim = shape.head_dim;
  values out(static_cast<std::size_t>(shape.query_heads * queries * dim));
  for (int row = 0; row < shape.query_heads * queries; ++row) {
    const float* of = v.data() + row / queries / (shape.query_heads / shape.kv_heads) * tokens * dim;
    for (int t = 0; t < tokens; ++t) {
      for (int d = 0; d < dim; ++d) out[row * dim + d] += weights[row * tokens + t] * of[t * dim + d];
    }
  }
  return out;
}

/// Length of the difference, in lengths of what is right.
inline double error_of(const values& right, const values& got) {
  double difference = 0, all = 0;
  for (std::size_t i = 0; i < right.size(); ++i) {
    difference += (double{got[i]} - right[i]) * (double{got[i]} - right[i]);
    all += double{right[i]} * right[i];
  }
  return std::sqrt(difference / all);
}

}  // namespace kivi
