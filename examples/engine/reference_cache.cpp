// SPDX-License-Identifier: Apache-2.0
#include "reference_cache.hpp"

#include <algorithm>
#include <cmath>

#include "numeric.hpp"

namespace engine {
namespace {

// Eight sums side by side, so that a compiler may keep them in vector registers.
double dot(const float* a, const float* b, int size) {
  float part[8] = {};
  int i = 0;
  for (; i + 8 <= size; i += 8) {
    for (int j = 0; j < 8; ++j) part[j] += a[i + j] * b[i + j];
  }
  for (; i < size; ++i) part[0] += a[i] * b[i];
  double sum = 0;
  for (const float p : part) sum += p;
  return sum;
}

}  // namespace

reference_cache::reference_cache(const cache_config& config) : config_(config) {}

int reference_cache::free_slot() const {
  int slot = 0;
  while (sequences_.count(slot) != 0) ++slot;
  return slot;
}

result<opened_sequence> reference_cache::open(std::span<const token_id> prompt, const cache_scope&) {
  if (prompt.empty()) return bad_input("bad_value", "prompt", "empty");
  if (static_cast<int>(sequences_.size()) >= config_.max_sequences)
    return cannot_run("out_of_sequences", "max_sequences", std::to_string(config_.max_sequences));
  if (prompt.size() > static_cast<std::size_t>(config_.max_tokens))
    return bad_input("too_long", "prompt.tokens", std::to_string(prompt.size()));
  const int slot = free_slot();
  sequence& s = sequences_[slot];
  const auto arrays = static_cast<std::size_t>(config_.shape.layers) * config_.shape.kv_heads;
  s.k.resize(arrays);
  s.v.resize(arrays);
  return opened_sequence{slot, 0};
}

result<int> reference_cache::extend(int slot, int tokens) {
  sequence& s = sequences_.at(slot);
  if (tokens > config_.max_tokens - s.length)
    return cannot_run("too_long", "sequence.tokens", std::to_string(s.length + std::int64_t{tokens}));
  s.room = s.length + tokens;
  return tokens;
}

status reference_cache::commit(int, std::span<const token_id>) {
  return {};
}

result<int> reference_cache::fork(int slot) {
  if (static_cast<int>(sequences_.size()) >= config_.max_sequences)
    return cannot_run("out_of_sequences", "max_sequences", std::to_string(config_.max_sequences));
  const int copy = free_slot();
  sequences_[copy] = sequences_.at(slot);
  return copy;
}

void reference_cache::close(int slot) {
  sequences_.erase(slot);
}

int reference_cache::length(int slot) const {
  return sequences_.at(slot).length;
}

cache_bytes reference_cache::bytes() const {
  cache_bytes total;
  for (const auto& [slot, s] : sequences_) {
    for (std::size_t i = 0; i < s.k.size(); ++i) {
      total.held += (s.k[i].size() + s.v[i].size()) * sizeof(float);
      total.reserved += (s.k[i].capacity() + s.v[i].capacity()) * sizeof(float);
    }
  }
  return total;
}

void reference_cache::read(int slot, int layer, int position, float* k, float* v) const {
  const sequence& s = sequences_.at(slot);
  const int dim = config_.shape.head_dim;
  for (int head = 0; head < config_.shape.kv_heads; ++head) {
    const std::size_t array = static_cast<std::size_t>(layer) * config_.shape.kv_heads + head;
    const std::size_t at = static_cast<std::size_t>(position) * dim;
    std::copy_n(s.k[array].begin() + static_cast<std::ptrdiff_t>(at), dim, k + head * dim);
    std::copy_n(s.v[array].begin() + static_cast<std::ptrdiff_t>(at), dim, v + head * dim);
  }
}

status reference_cache::begin_step(std::span<const step_segment> segments) {
  for (const step_segment& segment : segments) {
    const auto found = sequences_.find(segment.slot);
    if (found == sequences_.end()) return cannot_run("bad_step", "slot", std::to_string(segment.slot));
    if (segment.position != found->second.length)
      return cannot_run("bad_step", "position", std::to_string(segment.position));
    if (segment.rows < 1 || segment.rows > found->second.room - found->second.length)
      return cannot_run("bad_step", "rows", std::to_string(segment.rows));
  }
  segments_.assign(segments.begin(), segments.end());
  row_segment_.clear();
  row_position_.clear();
  cosines_.clear();
  sines_.clear();
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    for (int row = 0; row < segments_[i].rows; ++row) {
      const int position = static_cast<int>(segments_[i].position) + row;
      row_segment_.push_back(static_cast<int>(i));
      row_position_.push_back(position);
      for (int pair = 0; pair < config_.shape.head_dim / 2; ++pair) {
        const double angle =
            position * std::pow(config_.shape.rope_base, -2.0 * pair / config_.shape.head_dim);
        cosines_.push_back(std::cos(angle));
        sines_.push_back(std::sin(angle));
      }
    }
  }
  return {};
}

float reference_cache::stored(float value) const {
  if (config_.type == kv_type::f16) return half_to_float(float_to_half(value));
  if (config_.type == kv_type::bf16) return round_to_bfloat(value);
  return value;
}

// in, out: [head_dim], pairs (2i, 2i + 1).
void reference_cache::rotate(const float* in, int row, float* out) const {
  const int pairs = config_.shape.head_dim / 2;
  for (int i = 0; i < pairs; ++i) {
    const double c = cosines_[static_cast<std::size_t>(row) * pairs + i];
    const double s = sines_[static_cast<std::size_t>(row) * pairs + i];
    const double even = in[2 * i];
    const double odd = in[2 * i + 1];
    out[2 * i] = static_cast<float>(even * c - odd * s);
    out[2 * i + 1] = static_cast<float>(even * s + odd * c);
  }
}

void reference_cache::append(int layer, const float* k, const float* v) {
  const int heads = config_.shape.kv_heads;
  const int dim = config_.shape.head_dim;
  std::vector<float> rotated(static_cast<std::size_t>(dim));
  for (std::size_t row = 0; row < row_segment_.size(); ++row) {
    sequence& s = sequences_.at(segments_[static_cast<std::size_t>(row_segment_[row])].slot);
    for (int head = 0; head < heads; ++head) {
      const std::size_t array = static_cast<std::size_t>(layer) * heads + head;
      const std::size_t from = (row * heads + head) * dim;
      rotate(k + from, static_cast<int>(row), rotated.data());
      for (int d = 0; d < dim; ++d) {
        s.k[array].push_back(stored(rotated[static_cast<std::size_t>(d)]));
        s.v[array].push_back(stored(v[from + d]));
      }
    }
  }
}

void reference_cache::attend_row(int layer, int row, int head, const float* q, float* out) const {
  const int dim = config_.shape.head_dim;
  const int kv_head = head / (config_.shape.query_heads / config_.shape.kv_heads);
  const sequence& s = sequences_.at(segments_[static_cast<std::size_t>(row_segment_[row])].slot);
  const std::size_t array = static_cast<std::size_t>(layer) * config_.shape.kv_heads + kv_head;
  const int keys = row_position_[static_cast<std::size_t>(row)] + 1;
  std::vector<float> query(static_cast<std::size_t>(dim));
  rotate(q, row, query.data());
  std::vector<double> weight(static_cast<std::size_t>(keys));
  double largest = -INFINITY;
  for (int key = 0; key < keys; ++key) {
    const float* stored_key = s.k[array].data() + static_cast<std::size_t>(key) * dim;
    const double score = dot(query.data(), stored_key, dim) / std::sqrt(double(dim));
    weight[static_cast<std::size_t>(key)] = score;
    largest = std::max(largest, score);
  }
  double sum = 0;
  for (double& w : weight) sum += (w = std::exp(w - largest));
  std::fill_n(out, dim, 0.0f);
  for (int key = 0; key < keys; ++key) {
    const float* stored_value = s.v[array].data() + static_cast<std::size_t>(key) * dim;
    const auto w = static_cast<float>(weight[static_cast<std::size_t>(key)] / sum);
    for (int d = 0; d < dim; ++d) out[d] += w * stored_value[d];
  }
}

void reference_cache::attend(int layer, const float* q, const float* k, const float* v, float* out) {
  append(layer, k, v);
  const int heads = config_.shape.query_heads;
  const int dim = config_.shape.head_dim;
  const int rows = static_cast<int>(row_segment_.size());
  config_.pool->parallel_for(rows, [&](int row, int) {
    for (int head = 0; head < heads; ++head) {
      const std::size_t at = (static_cast<std::size_t>(row) * heads + head) * dim;
      attend_row(layer, row, head, q + at, out + at);
    }
  });
}

void reference_cache::end_step() {
  for (const step_segment& segment : segments_) sequences_.at(segment.slot).length += segment.rows;
  segments_.clear();
}

}  // namespace engine
