// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stands for your model: a decoder with random weights, in plain loops. It knows nothing of the cache; it
// turns rows into queries, keys and values, and attention results into rows. Every row is computed alike,
// whatever its neighbours, so the same text gives the same bits.
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/core/shape.hpp"

/// An engine's own array: [n][heads][head_dim].
struct head_rows {
  int heads = 0;
  std::vector<float> values{};
};

struct toy {
  static constexpr int layers = 2, q_heads = 4, kv_heads = 2, head_dim = 16;
  static constexpr kvcache::model_shape shape{.layers = layers,
                                              .q_heads = q_heads,
                                              .kv_heads = kv_heads,
                                              .head_dim = head_dim,
                                              .type = kvcache::element::f32};
  static constexpr int width = q_heads * head_dim, vocabulary = 101;
  static constexpr int chunk = 64;       // most rows of one step
  static constexpr float scale = 0.25f;  // of q . k: 1 / sqrt(head_dim)

  toy() {
    uint64_t state = 1;
    const auto fill = [&](std::vector<float>& w, int rows, int columns) {
      w.resize(static_cast<size_t>(rows) * static_cast<size_t>(columns));
      for (float& x : w) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x = (static_cast<float>(state >> 40) / 8388608.0f - 1.0f) * 2.0f /
            std::sqrt(static_cast<float>(columns));
      }
    };
    fill(embedding_, vocabulary, width);
    for (layer& l : layer_) {
      fill(l.q, q_heads * head_dim, width);
      fill(l.k, kv_heads * head_dim, width);
      fill(l.v, kv_heads * head_dim, width);
      fill(l.o, width, q_heads * head_dim);
    }
  }

  /// Rows [n][width] of the residual stream.
  std::vector<float> embed(std::span<const int32_t> tokens) const {
    std::vector<float> x;
    for (const int32_t t : tokens) {
      const auto row = embedding_.begin() + t % vocabulary * width;
      x.insert(x.end(), row, row + width);
    }
    return x;
  }
  /// Queries, keys and values of all rows.
  void project(int l, const std::vector<float>& x, head_rows& q, head_rows& k, head_rows& v) const {
    q = {q_heads, times(layer_[l].q, x)};
    k = {kv_heads, times(layer_[l].k, x)};
    v = {kv_heads, times(layer_[l].v, x)};
  }
  /// Adds a layer's attention result to the residual stream.
  void finish(int l, const head_rows& attended, std::vector<float>& x) const {
    const std::vector<float> o = times(layer_[l].o, attended.values);
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::tanh(x[i] + o[i]);
  }
  /// A token drawn by the bits of the last row's scores: the smallest difference in any key, value or
  /// position leads to another answer, so that equal answers mean something.
  int32_t sample(const std::vector<float>& x) const {
    uint64_t seed = 0xcbf29ce484222325u;
    for (const float score : times(embedding_, {x.end() - width, x.end()})) {
      seed = (seed ^ std::bit_cast<uint32_t>(score)) * 0x100000001b3u;
    }
    return static_cast<int32_t>((seed >> 32) % vocabulary);
  }

 private:
  struct layer {
    std::vector<float> q, k, v, o;
  };
  // Rows [n][out] of w x, for w [out][in] and x [n][in]; `in` is the width of x's rows.
  static std::vector<float> times(const std::vector<float>& w, const std::vector<float>& x) {
    const size_t in = width, out = w.size() / in;
    std::vector<float> y(x.size() / in * out, 0.0f);
    for (size_t i = 0; i < y.size(); ++i) {
      const float* a = &w[i % out * in];
      const float* b = &x[i / out * in];
      for (size_t j = 0; j < in; ++j) y[i] += a[j] * b[j];
    }
    return y;
  }

  std::vector<float> embedding_;
  layer layer_[layers];
};

/// The engine's arrays in the form that the library takes.
inline kvc_rows rows(const head_rows& r) {
  return kvcache::dense_rows(r.values.data(), kvcache::element::f32, r.heads, toy::head_dim);
}
inline kvc_out results(head_rows& r) {
  return kvcache::dense_out(r.values.data(), kvcache::element::f32, r.heads, toy::head_dim);
}
