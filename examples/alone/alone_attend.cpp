// SPDX-License-Identifier: Apache-2.0
// The data plane by itself: an engine with a block manager of its own appends and attends over its own
// tables.
#include <algorithm>
#include <cmath>
#include <vector>

#include "expect.hpp"
#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"

namespace kvc = kvcache;

namespace {

constexpr int heads = 4, kv_heads = 2, dim = 8, tokens = 40;

std::vector<float> numbers(size_t n, float step) {
  std::vector<float> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = std::sin(step * static_cast<float>(i + 1));
  return v;
}

// What attention is, in double and in one place: one head of the query row over all keys and values.
double expected(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                int head, int channel) {
  const int kv = head / (heads / kv_heads);
  double sum = 0, result = 0;
  for (int t = 0; t < tokens; ++t) {
    double score = 0;
    for (int c = 0; c < dim; ++c) {
      score += double{q[static_cast<size_t>(head * dim + c)]} *
               k[static_cast<size_t>((t * kv_heads + kv) * dim + c)];
    }
    const double weight = std::exp(score / std::sqrt(double{dim}));
    sum += weight;
    result += weight * v[static_cast<size_t>((t * kv_heads + kv) * dim + channel)];
  }
  return result / sum;
}

kvc::status show_attend() {
  const std::vector<float> k = numbers(tokens * kv_heads * dim, 0.7f),
                           v = numbers(tokens * kv_heads * dim, 0.3f);
  const std::vector<float> q = numbers(heads * dim, 0.9f);
  std::vector<float> out(heads * dim);
  // [attend]
  auto planes = kvc::host_planes::create({.shape = {.layers = 1,
                                                    .kv_heads = kv_heads,
                                                    .head_dim_k = dim,
                                                    .head_dim_v = dim,
                                                    .type = kvc::element::f32},
                                          .block_size = 16,
                                          .blocks = 8});
  if (!planes) return planes.error();
  const kvc_kv& layer = planes->layer(0);
  auto attention = kvc::attention::create(layer, {.q_heads = heads, .slots = 64});
  if (!attention) return attention.error();

  const int32_t table[] = {5, 0, 3};  // where 40 tokens lie: an engine's own choice
  std::vector<int64_t> slots(tokens);
  for (int t = 0; t < tokens; ++t) slots[static_cast<size_t>(t)] = table[t / 16] * 16 + t % 16;
  if (auto s = kvc::append(layer, kvc::dense_rows(k.data(), kvc::element::f32, kv_heads, dim),
                           kvc::dense_rows(v.data(), kvc::element::f32, kv_heads, dim), slots);
      !s) {
    return s;
  }
  const int32_t length = tokens, position = tokens - 1;  // one query row: decode
  kvc_batch batch{};
  batch.struct_size = sizeof batch, batch.n = 1;
  batch.table = table, batch.table_columns = 3, batch.kv_len = &length, batch.q_pos = &position;
  auto s = attention->run(layer, batch, kvc::dense_rows(q.data(), kvc::element::f32, heads, dim),
                          kvc::causal_softmax(1 / std::sqrt(float{dim})),
                          kvc::dense_out(out.data(), kvc::element::f32, heads, dim));
  // [attend]
  double worst = 0;
  for (int h = 0; h < heads; ++h) {
    for (int c = 0; c < dim; ++c) {
      worst = std::max(worst, std::abs(out[static_cast<size_t>(h * dim + c)] - expected(q, k, v, h, c)));
    }
  }
  expect(bool(s) && worst < 1e-6, "a shuffled table gives what attention is, to 1e-6");
  return s;
}

}  // namespace

int main() {
  expect(bool(show_attend()), "done");
  return wrong;
}
