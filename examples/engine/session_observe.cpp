// SPDX-License-Identifier: Apache-2.0
// What a policy sees: keys read back, queries shown as they come, scores when it decides.
#include <algorithm>
#include <cmath>

#include "kvcache/blocks/batch_view.hpp"
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
      const float* scores = s.split() ? nullptr : scores_of(row);
      s.seen.add(layer, {q, lse2, std::span(positions_).subspan(row, rows), scores, score_stride_},
                 keys_of(s, layer));
    }
    row += rows;
  }
}

// Where the keys lie that the text holds.
layer_keys session_cache::parts::keys_of(const state& s, int layer) {
  layer_keys out;
  out.kv = s.split() ? &head_planes.layer(0) : &whole_planes.layer(layer);
  out.with = s.split() ? &head_observing : &whole_observing;
  out.executor = &executor;
  out.open = packed();  // policies look at what is not packed yet
  for (int h = 0; h < config.shape.kv_heads; ++h) {
    out.positions.push_back(s.tokens[s.index(layer, h)].by_slot());
    if (h > 0 && !s.split()) continue;
    const kvcache::sequence& from = s.split() ? s.heads[s.index(layer, h)] : s.whole;
    const auto ids = packed() ? from.open_table() : from.table();
    out.tables.emplace_back(ids.size());
    require(kvcache::write_row(ids, -1, out.tables.back()));
  }
  return out;
}

std::vector<float> session_cache::parts::value_norms(const state& s, int layer, int kv_head) const {
  const kvcache::sequence& table = s.split() ? s.heads[s.index(layer, kv_head)] : s.whole;
  const kvc_kv& kv = s.split() ? head_planes.layer(0) : whole_planes.layer(layer);
  const int head = s.split() ? 0 : kv_head;
  const kvc_plane& values = packed() ? kv.open_v : kv.v;
  const auto ids = packed() ? table.open_table() : table.table();
  std::vector<float> norms(static_cast<std::size_t>(s.tokens[s.index(layer, kv_head)].slots()));
  for (std::size_t t = 0; t < norms.size(); ++t) {
    const kvcache::block_id block = ids[t / static_cast<std::size_t>(config.block_size)];
    const std::byte* value = cell(values, block, head, static_cast<int>(t) % config.block_size);
    float squares = 0;
    for (int d = 0; d < config.shape.head_dim; ++d) {
      const float x = widen(value + values.dim_stride * d, config.type);
      squares += x * x;
    }
    norms[t] = std::sqrt(squares);
  }
  return norms;
}

// [layers * kv_heads][slots], in order of the slots; heads that must keep the same tokens have the same
// scores.
result<std::vector<std::vector<float>>> session_cache::parts::scores(state& s) {
  std::vector<std::vector<float>> out(s.tokens.size());
  for (std::size_t h = 0; h < out.size(); ++h)
    out[h].assign(static_cast<std::size_t>(s.tokens[h].slots()), 0.0f);
  if (!s.what.policy.scores()) return out;
  const auto kv_heads = static_cast<std::size_t>(config.shape.kv_heads);
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    layer_keys keys = keys_of(s, layer);
    keys.norms.resize(kv_heads);
    config.pool->parallel_for(config.shape.kv_heads, [&](int h, int) {
      keys.norms[static_cast<std::size_t>(h)] = value_norms(s, layer, h);
    });
    const auto seen = s.seen.look(layer, s.position, keys, rope);
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
