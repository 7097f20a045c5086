// SPDX-License-Identifier: Apache-2.0
#pragma once
// The oracle of dropping: nothing is ever dropped, the scores of what a policy dropped are -infinity instead.
// Plain loops in double, one text, no code of the library.
#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "kv_backend.hpp"
#include "model.hpp"

namespace engine::test {

/// Keys and values of a whole text, and which of them each kv head may still see.
class masked_reference final : public kv_backend {
 public:
  explicit masked_reference(const kv_shape& shape)
      : shape_(shape), heads_(static_cast<std::size_t>(shape.layers * shape.kv_heads)) {}

  /// Is shown every row of weights: [position], 0 for what was dropped. May be empty.
  std::function<void(int layer, int query_head, std::span<const double> weights)> watch;

  /// Euclidean norm of a token's value.
  double value_norm(int layer, int kv_head, int position) const {
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    const auto& h = heads_[static_cast<std::size_t>(layer * shape_.kv_heads + kv_head)];
    double squares = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const double x = h.v[static_cast<std::size_t>(position) * dim + d];
      squares += x * x;
    }
    return std::sqrt(squares);
  }

  /// Only `kept` (text positions) can be seen from now on, and what comes later.
  void keep(int layer, int kv_head, std::span<const int> kept) {
    std::vector<char>& seen = head(layer, kv_head).seen;
    for (std::size_t i = 0; i < seen.size(); ++i)
      seen[i] = std::binary_search(kept.begin(), kept.end(), static_cast<int>(i));
  }
  /// Turns the keys of the first `tokens` tokens by `by` positions.
  void turn(int tokens, int by) {
    for (one_head& h : heads_) {
      for (int t = 0; t < tokens; ++t) rotate(h.k.data() + t * shape_.head_dim, by);
    }
  }

  /// Logits of all rows of `tokens`.
  std::vector<float> feed(llama_model& model, std::span<const token_id> tokens) {
    std::vector<int> rows;
    for (std::size_t i = 0; i < tokens.size(); ++i) rows.push_back(static_cast<int>(i));
    std::vector<float> logits(tokens.size() * static_cast<std::size_t>(model.shape().vocabulary));
    const step_segment segment{0, position_, static_cast<int>(tokens.size())};
    if (!model.forward(tokens, {&segment, 1}, rows, *this, logits)) logits.clear();
    return logits;
  }

  status begin_step(std::span<const step_segment> segments) override {
    rows_ = segments[0].rows;
    return {};
  }
  void attend(int layer, const float* q, const float* k, const float* v, float* out) override {
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    const int group = shape_.query_heads / shape_.kv_heads;
    for (int row = 0; row < rows_; ++row) {
      for (int h = 0; h < shape_.kv_heads; ++h) {
        one_head& at = head(layer, h);
        const std::size_t from = static_cast<std::size_t>(row * shape_.kv_heads + h) * dim;
        at.k.insert(at.k.end(), k + from, k + from + dim);
        rotate(at.k.data() + at.k.size() - dim, position_ + row);
        at.v.insert(at.v.end(), v + from, v + from + dim);
        at.seen.push_back(1);
      }
      for (int h = 0; h < shape_.query_heads; ++h) {
        const std::size_t at = static_cast<std::size_t>(row * shape_.query_heads + h) * dim;
        const auto weights = attend_row(head(layer, h / group), position_ + row, q + at, out + at);
        if (watch) watch(layer, h, weights);
      }
    }
  }
  void end_step() override { position_ += rows_; }

 private:
  struct one_head {
    std::vector<double> k;  // [position][head_dim], rotated
    std::vector<double> v;
    std::vector<char> seen;
  };

  one_head& head(int layer, int kv_head) {
    return heads_[static_cast<std::size_t>(layer * shape_.kv_heads + kv_head)];
  }
  void rotate(double* x, int by) const {
    for (int i = 0; i < shape_.head_dim / 2; ++i) {
      const double angle = by * std::pow(shape_.rope_base, -2.0 * i / shape_.head_dim);
      const double even = x[2 * i];
      const double odd = x[2 * i + 1];
      x[2 * i] = even * std::cos(angle) - odd * std::sin(angle);
      x[2 * i + 1] = even * std::sin(angle) + odd * std::cos(angle);
    }
  }
  std::vector<double> attend_row(const one_head& at, int position, const float* q, float* out) const {
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    std::vector<double> query(q, q + dim);
    rotate(query.data(), position);
    std::vector<double> weight(static_cast<std::size_t>(position) + 1, -INFINITY);
    for (std::size_t j = 0; j < weight.size(); ++j) {
      if (!at.seen[j]) continue;
      double score = 0;
      for (std::size_t d = 0; d < dim; ++d) score += query[d] * at.k[j * dim + d];
      weight[j] = score / std::sqrt(static_cast<double>(dim));
    }
    const double most = *std::max_element(weight.begin(), weight.end());
    double sum = 0;
    for (double& w : weight) sum += (w = std::exp(w - most));
    for (double& w : weight) w /= sum;
    std::vector<double> result(dim);
    for (std::size_t j = 0; j < weight.size(); ++j) {
      for (std::size_t d = 0; d < dim; ++d) result[d] += weight[j] * at.v[j * dim + d];
    }
    for (std::size_t d = 0; d < dim; ++d) out[d] = static_cast<float>(result[d]);
    return weight;
  }

  kv_shape shape_;
  std::vector<one_head> heads_;
  int position_ = 0;
  int rows_ = 0;
};

}  // namespace engine::test
