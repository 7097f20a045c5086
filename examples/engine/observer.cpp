// SPDX-License-Identifier: Apache-2.0
#include "observer.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kvcache/attend/data_plane.hpp"

namespace engine {
namespace {

using kvcache::observe;

// Slots that a query at `position` sees: those up to itself. All of them, in whatever order, if none is
// behind it.
int visible(std::span<const int> positions, int position) {
  return static_cast<int>(std::upper_bound(positions.begin(), positions.end(), position) - positions.begin());
}

// out[j] = log2 of the weight that the query gives slot j, not yet normalised.
void scores_of(std::span<const float> query, const float* keys, int stride, std::span<float> out) {
  const float scale = static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(query.size())));
  std::fill(out.begin(), out.end(), 0.0f);
  float* to = out.data();
  const auto n = static_cast<int>(out.size());
  for (std::size_t d = 0; d < query.size(); ++d) {
    const float q = query[d];
    const float* k = keys + d * static_cast<std::size_t>(stride);
    for (int j = 0; j < n; ++j) to[j] += q * k[j];
  }
  for (int j = 0; j < n; ++j) to[j] *= scale;
}

}  // namespace

void weights_of(std::span<const float> query, const float* keys, int stride, float lse2,
                std::span<float> out) {
  scores_of(query, keys, stride, out);
  for (float& w : out) w = std::exp2(w - lse2);
}

attention_observer::attention_observer(const kv_shape& shape, observe needs,
                                       const kvcache::watch_options& watch, bool remember)
    : shape_(shape), needs_(needs), watch_(watch), remember_(remember) {
  layers_.resize(static_cast<std::size_t>(shape.layers));
  for (layer_state& at : layers_) {
    at.sums.resize(static_cast<std::size_t>(shape.query_heads));
    at.seen.resize(static_cast<std::size_t>(shape.kv_heads));
  }
}

void attention_observer::add(int layer, const query_rows& rows, const key_reader& keys, thread_pool& pool) {
  layer_state& at = layers_[static_cast<std::size_t>(layer)];
  std::vector<head_keys> held(static_cast<std::size_t>(shape_.kv_heads));
  const wanted what = sums() ? wanted::keys : wanted::positions;
  pool.parallel_for(shape_.kv_heads, [&](int h, int) { held[static_cast<std::size_t>(h)] = keys(h, what); });
  if (sums()) add_sums(at, rows, held, pool);
  if (!logs()) return;
  std::vector<std::int32_t> saw;
  for (const int p : rows.positions) {
    for (const head_keys& h : held) saw.push_back(visible(h.positions, p));
  }
  add_log(at, rows, saw);
}

void attention_observer::add_sums(layer_state& at, const query_rows& rows, std::span<const head_keys> keys,
                                  thread_pool& pool) {
  const auto dim = static_cast<std::size_t>(shape_.head_dim);
  const auto heads = static_cast<std::size_t>(shape_.query_heads);
  const bool far = needs_ == observe::far_squares;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    at.seen[static_cast<std::size_t>(h)].resize(keys[static_cast<std::size_t>(h)].positions.size());
  }
  pool.parallel_for(shape_.query_heads, [&](int head, int) {
    const auto q_head = static_cast<std::size_t>(head);
    const auto kv_head = static_cast<std::size_t>(head / group());
    const head_keys& k = keys[kv_head];
    std::vector<float>& sum = at.sums[q_head];
    sum.resize(k.positions.size());
    std::vector<float> weight(k.positions.size());
    for (std::size_t row = 0; row < rows.positions.size(); ++row) {
      const int position = rows.positions[row];
      const int n = visible(k.positions, far ? position - watch_.distance : position);
      weights_of({rows.q + (row * heads + q_head) * dim, dim}, k.k.data(),
                 static_cast<int>(k.positions.size()), rows.lse2[row * heads + q_head],
                 std::span(weight).first(static_cast<std::size_t>(n)));
      for (int j = 0; j < n; ++j) {
        const float w = weight[static_cast<std::size_t>(j)];
        sum[static_cast<std::size_t>(j)] += far ? w * w : w;
      }
      if (head % group() != 0) continue;
      for (int j = 0; j < n; ++j) ++at.seen[kv_head][static_cast<std::size_t>(j)];
    }
  });
}

void attention_observer::add_log(layer_state& at, const query_rows& rows, std::span<const std::int32_t> saw) {
  const std::size_t n = rows.positions.size();
  const auto heads = static_cast<std::size_t>(shape_.query_heads);
  const std::size_t width = heads * static_cast<std::size_t>(shape_.head_dim);
  const auto kv_heads = static_cast<std::size_t>(shape_.kv_heads);
  at.q.insert(at.q.end(), rows.q, rows.q + n * width);
  at.lse2.insert(at.lse2.end(), rows.lse2, rows.lse2 + n * heads);
  at.saw.insert(at.saw.end(), saw.begin(), saw.end());
  at.positions.insert(at.positions.end(), rows.positions.begin(), rows.positions.end());
  if (remember_ || needs_ == observe::moved) return;
  const auto wanted = static_cast<std::size_t>(watch_.queries);
  if (at.positions.size() < 2 * wanted + n) return;  // cut now and then, not at every row
  const auto cut = static_cast<std::ptrdiff_t>(at.positions.size() - wanted);
  at.q.erase(at.q.begin(), at.q.begin() + cut * static_cast<std::ptrdiff_t>(width));
  at.lse2.erase(at.lse2.begin(), at.lse2.begin() + cut * static_cast<std::ptrdiff_t>(heads));
  at.saw.erase(at.saw.begin(), at.saw.begin() + cut * static_cast<std::ptrdiff_t>(kv_heads));
  at.positions.erase(at.positions.begin(), at.positions.begin() + cut);
}

// The first row of the log that counts.
std::size_t attention_observer::first_row(const layer_state& at) const {
  if (needs_ == observe::moved) {
    return static_cast<std::size_t>(std::lower_bound(at.positions.begin(), at.positions.end(), watch_.skip) -
                                    at.positions.begin());
  }
  const auto wanted = static_cast<std::size_t>(watch_.queries);
  return at.positions.size() > wanted ? at.positions.size() - wanted : 0;
}

void attention_observer::count_votes(const layer_state& at, int head, const head_keys& keys,
                                     std::span<float> out) const {
  const auto dim = static_cast<std::size_t>(shape_.head_dim);
  const auto heads = static_cast<std::size_t>(shape_.query_heads);
  const auto kv_heads = static_cast<std::size_t>(shape_.kv_heads);
  const auto q_head = static_cast<std::size_t>(head);
  const auto kv_head = static_cast<std::size_t>(head / group());
  std::vector<float> weight(out.size());
  for (std::size_t row = first_row(at); row < at.positions.size(); ++row) {
    const auto n = static_cast<std::size_t>(visible(keys.positions, at.positions[row]));
    weights_of({at.q.data() + (row * heads + q_head) * dim, dim}, keys.k.data(), static_cast<int>(out.size()),
               at.lse2[row * heads + q_head], std::span(weight).first(n));
    // Rounding must not decide where all parts are equal.
    const float equal_part = 0.99999f / static_cast<float>(at.saw[row * kv_heads + kv_head]);
    for (std::size_t j = 0; j < n; ++j) {
      out[j] += needs_ == observe::hits ? static_cast<float>(weight[j] >= equal_part) : weight[j];
    }
  }
}

void attention_observer::count_moved(const layer_state& at, int head, const head_keys& keys,
                                     int next_position, const kvcache::rope& rope,
                                     std::span<float> out) const {
  const auto dim = static_cast<std::size_t>(shape_.head_dim);
  const auto heads = static_cast<std::size_t>(shape_.query_heads);
  const std::size_t first = first_row(at);
  const std::size_t rows = at.positions.size() - first;
  std::vector<float> turned(dim);
  std::vector<float> weight(out.size());
  for (std::size_t i = 0; i < rows; ++i) {
    const std::size_t row = first + i;
    const auto target = next_position + static_cast<int>(static_cast<std::int64_t>(i) * watch_.ahead /
                                                         static_cast<std::int64_t>(rows));
    const std::int32_t by = target - at.positions[row];
    const float* q = at.q.data() + (row * heads + static_cast<std::size_t>(head)) * dim;
    const kvc_rows one = kvcache::dense_rows(q, kvcache::element::f32, 1, shape_.head_dim);
    if (!rope.turn(one, {&by, 1}, turned.data())) return;
    scores_of(turned, keys.k.data(), static_cast<int>(out.size()), weight);
    const float most = *std::max_element(weight.begin(), weight.end());
    float sum = 0;
    for (float& w : weight) sum += (w = std::exp2(w - most));
    for (std::size_t j = 0; j < out.size(); ++j) {
      const float w = weight[j] / sum;
      out[j] += w * w;
    }
  }
}

std::vector<kvcache::observation> attention_observer::look(int layer, int next_position,
                                                           std::span<const head_keys> keys,
                                                           const kvcache::rope& rope, thread_pool& pool) {
  const layer_state& at = layers_[static_cast<std::size_t>(layer)];
  looked_.resize(static_cast<std::size_t>(shape_.kv_heads));
  looked_seen_.resize(static_cast<std::size_t>(shape_.kv_heads));
  std::vector<kvcache::observation> out(static_cast<std::size_t>(shape_.kv_heads));
  for (std::size_t h = 0; h < out.size(); ++h) {
    const std::size_t slots = keys[h].positions.size();
    looked_[h].assign(slots * static_cast<std::size_t>(group()), 0.0f);
    looked_seen_[h].assign(slots, 0);
    if (sums()) std::copy(at.seen[h].begin(), at.seen[h].end(), looked_seen_[h].begin());
    for (std::size_t row = first_row(at); !sums() && row < at.positions.size(); ++row) {
      const int n =
          needs_ == observe::moved ? static_cast<int>(slots) : visible(keys[h].positions, at.positions[row]);
      for (int j = 0; j < n; ++j) ++looked_seen_[h][static_cast<std::size_t>(j)];
    }
    out[h] = {.held = static_cast<std::int32_t>(slots),
              .queries = group(),
              .weights = looked_[h],
              .seen = looked_seen_[h],
              .value_norms = keys[h].norms,
              .positions = keys[h].positions};
  }
  pool.parallel_for(shape_.query_heads, [&](int head, int) {
    const auto h = static_cast<std::size_t>(head / group());
    const std::size_t slots = keys[h].positions.size();
    const std::span<float> to =
        std::span(looked_[h]).subspan(static_cast<std::size_t>(head % group()) * slots, slots);
    const std::vector<float>& sum = at.sums[static_cast<std::size_t>(head)];
    if (sums()) std::copy(sum.begin(), sum.end(), to.begin());
    if (needs_ == observe::moved) {
      count_moved(at, head, keys[h], next_position, rope, to);
    } else if (!sums()) {
      count_votes(at, head, keys[h], to);
    }
  });
  return out;
}

void attention_observer::gather(int layer, int kv_head, std::span<const std::int32_t> kept) {
  if (!sums()) return;
  layer_state& at = layers_[static_cast<std::size_t>(layer)];
  const auto take = [&](auto& from) {
    for (std::size_t t = 0; t < kept.size(); ++t) from[t] = from[static_cast<std::size_t>(kept[t])];
    from.resize(kept.size());
  };
  take(at.seen[static_cast<std::size_t>(kv_head)]);
  for (int q = 0; q < group(); ++q) take(at.sums[static_cast<std::size_t>(kv_head * group() + q)]);
}

void attention_observer::renew(int layer, int kv_head, int slot) {
  if (!sums()) return;
  layer_state& at = layers_[static_cast<std::size_t>(layer)];
  at.seen[static_cast<std::size_t>(kv_head)][static_cast<std::size_t>(slot)] = 0;
  for (int q = 0; q < group(); ++q)
    at.sums[static_cast<std::size_t>(kv_head * group() + q)][static_cast<std::size_t>(slot)] = 0;
}

void attention_observer::replay(int layer, const attention_observer& other, const key_reader& keys,
                                thread_pool& pool) {
  const layer_state& from = other.layers_[static_cast<std::size_t>(layer)];
  add(layer, {from.q.data(), from.lse2.data(), from.positions}, keys, pool);
}

std::size_t attention_observer::bytes() const {
  std::size_t numbers = 0;
  for (const layer_state& at : layers_) {
    for (const auto& s : at.sums) numbers += s.size();
    for (const auto& s : at.seen) numbers += s.size();
    numbers += at.q.size() + at.lse2.size() + at.saw.size() + at.positions.size();
  }
  return numbers * sizeof(float);
}

}  // namespace engine
