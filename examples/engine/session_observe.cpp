// SPDX-License-Identifier: Apache-2.0
// What a policy sees: keys read back, queries shown as they come, scores when it decides.
#include <algorithm>
#include <cmath>

#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {

void session_cache::parts::observe(int layer) {
  std::size_t row = 0;
  const auto heads_per_row = static_cast<std::size_t>(config.shape.query_heads);
  const std::size_t width = heads_per_row * static_cast<std::size_t>(config.shape.head_dim);
  for (const step_segment& segment : segments_) {
    state& s = *by_slot[static_cast<std::size_t>(segment.slot)];
    const auto rows = static_cast<std::size_t>(segment.rows);
    const float* q = rotated_.data() + row * width;
    const float* lse2 = lse2_.data() + row * heads_per_row;
    if (s.drafting) {
      auto& pending = s.pending[static_cast<std::size_t>(layer)];
      pending.q.assign(q, q + rows * width);
      pending.lse2.assign(lse2, lse2 + rows * heads_per_row);
    } else if (s.seen.active()) {
      s.seen.add(layer, {q, lse2, std::span(positions_).subspan(row, rows)}, reader(s, layer), *config.pool);
    }
    row += rows;
  }
}

head_keys session_cache::parts::read(const state& s, int layer, int kv_head, wanted what) const {
  head_keys out;
  out.positions = s.positions[s.index(layer, kv_head)];
  if (what == wanted::positions) return out;
  const kvcache::sequence& table = s.split() ? s.heads[s.index(layer, kv_head)] : s.whole;
  const kvc_kv& kv = s.split() ? head_planes.layer(0) : whole_planes.layer(layer);
  const int head = s.split() ? 0 : kv_head;
  const std::size_t slots = out.positions.size();
  out.k.resize(slots * static_cast<std::size_t>(config.shape.head_dim));
  if (what == wanted::keys_and_norms) out.norms.resize(slots);
  for (std::size_t t = 0; t < slots; ++t) {
    const kvcache::block_id block = table.table()[t / static_cast<std::size_t>(config.block_size)];
    const int offset = static_cast<int>(t) % config.block_size;
    const std::byte* key = cell(kv.k, block, head, offset);
    for (int d = 0; d < config.shape.head_dim; ++d)
      out.k[static_cast<std::size_t>(d) * slots + t] = widen(key + kv.k.dim_stride * d, config.type);
    if (what != wanted::keys_and_norms) continue;
    const std::byte* value = cell(kv.v, block, head, offset);
    float squares = 0;
    for (int d = 0; d < config.shape.head_dim; ++d) {
      const float x = widen(value + kv.v.dim_stride * d, config.type);
      squares += x * x;
    }
    out.norms[t] = std::sqrt(squares);
  }
  return out;
}

// [layers * kv_heads][slots]; heads that must keep the same tokens have the same scores.
result<std::vector<std::vector<float>>> session_cache::parts::scores(state& s) {
  std::vector<std::vector<float>> out(s.positions.size());
  for (std::size_t h = 0; h < out.size(); ++h) out[h].assign(s.positions[h].size(), 0.0f);
  if (!s.what.policy.scores()) return out;
  const auto kv_heads = static_cast<std::size_t>(config.shape.kv_heads);
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    std::vector<head_keys> keys(kv_heads);
    config.pool->parallel_for(config.shape.kv_heads, [&](int h, int) {
      keys[static_cast<std::size_t>(h)] = read(s, layer, h, wanted::keys_and_norms);
    });
    const auto seen = s.seen.look(layer, s.position, keys, rope, *config.pool);
    for (std::size_t h = 0; h < kv_heads; ++h)
      s.what.policy.score(seen[h], out[static_cast<std::size_t>(layer) * kv_heads + h]);
    if (!s.what.policy.whole_layer()) continue;
    std::vector<float>& first = out[static_cast<std::size_t>(layer) * kv_heads];
    for (std::size_t h = 1; h < kv_heads; ++h) {
      const std::vector<float>& other = out[static_cast<std::size_t>(layer) * kv_heads + h];
      for (std::size_t i = 0; i < first.size(); ++i) first[i] += other[i];
    }
    for (std::size_t h = 1; h < kv_heads; ++h) out[static_cast<std::size_t>(layer) * kv_heads + h] = first;
  }
  return out;
}

}  // namespace engine
