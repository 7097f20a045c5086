// SPDX-License-Identifier: Apache-2.0
// One step of the model: the new keys and values are stored, then all that a text holds is attended to.
#include <algorithm>
#include <cmath>

#include "kvcache/blocks/batch_view.hpp"
#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {

status session_cache::parts::begin_step(std::span<const step_segment> segments) {
  segments_.assign(segments.begin(), segments.end());
  stretches_.clear();
  positions_.clear();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const step_segment& segment = segments[i];
    const state& s = *by_slot[static_cast<std::size_t>(segment.slot)];
    if (stretches_.empty() || stretches_.back().split != s.split())
      stretches_.push_back({i, 0, static_cast<int>(positions_.size()), 0, s.split()});
    ++stretches_.back().count;
    stretches_.back().rows += segment.rows;
    for (int row = 0; row < segment.rows; ++row)
      positions_.push_back(static_cast<int>(segment.position) + row);
  }
  if (status s = plan_step(); !s) return s;
  for (const step_segment& segment : segments) {
    state& s = *by_slot[static_cast<std::size_t>(segment.slot)];
    for (auto& of_head : s.positions) {
      for (int row = 0; row < segment.rows; ++row)
        of_head.push_back(static_cast<int>(segment.position) + row);
    }
  }
  run_commands();
  run_split_commands();
  const auto query_values = static_cast<std::size_t>(config.shape.query_heads * config.shape.head_dim);
  rotated_.resize(positions_.size() * query_values);
  lse2_.resize(positions_.size() * static_cast<std::size_t>(config.shape.query_heads));
  return {};
}

status session_cache::parts::plan_step() {
  int rows = 0;
  std::size_t sequences = 0;
  bool any_split = false;
  for (const step_segment& segment : segments_) rows = std::max(rows, segment.rows);
  for (const stretch& part : stretches_) {
    sequences = std::max(sequences, part.count);
    any_split = any_split || part.split;
  }
  const auto n = static_cast<int>(sequences);
  if (status s =
          plan(whole_attention, whole_planes.layer(0), config.shape.query_heads, n, rows, config.max_tokens);
      !s)
    return s;
  if (!any_split) return {};
  return plan(head_attention, head_planes.layer(0), config.shape.query_heads / config.shape.kv_heads,
              n * config.shape.kv_heads, rows, config.max_tokens);
}

// Appends and attends for any number of tables that lie in the same planes. Rows of one table lie behind each
// other; queries are rotated.
void session_cache::parts::attend_heads(const std::vector<const kvcache::sequence*>& tables,
                                        std::span<const int> held, std::span<const int> rows, const float* q,
                                        const float* k, const float* v, float* out, float* lse2,
                                        const kvc_kv& kv, kvcache::attention& with, int query_heads,
                                        int kv_heads, std::span<const int> text_positions) {
  std::size_t columns = 0;
  for (const kvcache::sequence* s : tables) columns = std::max(columns, s->table().size());
  std::vector<std::int32_t> table(tables.size() * columns);
  std::vector<std::int32_t> starts(1, 0);
  std::vector<std::int32_t> slot_positions;
  std::vector<std::int64_t> slots(text_positions.size());
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const auto ids = tables[i]->table();
    const int first = held[i] - rows[i];
    require(kvcache::write_row(ids, -1, std::span(table).subspan(i * columns, columns)));
    require(kvcache::write_slots(ids, config.block_size, first,
                                 std::span(slots).subspan(static_cast<std::size_t>(starts.back()),
                                                          static_cast<std::size_t>(rows[i]))));
    for (int row = 0; row < rows[i]; ++row) slot_positions.push_back(first + row);
    starts.push_back(starts.back() + rows[i]);
  }
  const auto dense = [&](const float* data, int n) {
    return kvcache::dense_rows(data, kvcache::element::f32, n, config.shape.head_dim);
  };
  require(kvcache::append(kv, dense(k, kv_heads), dense(v, kv_heads), slots,
                          {.rope = &rope.view(), .positions = text_positions, .executor = &executor}));
  kvc_batch batch{};
  batch.struct_size = sizeof batch;
  batch.n = static_cast<std::int32_t>(tables.size());
  batch.table_columns = static_cast<std::int32_t>(columns);
  batch.table = table.data();
  batch.kv_len = held.data();
  batch.q_start = starts.data();
  // Slots keep the order of the text, so the mask needs no text positions.
  batch.q_pos = slot_positions.data();
  const float scale = 1.0f / std::sqrt(static_cast<float>(config.shape.head_dim));
  require(with.run(kv, batch, dense(q, query_heads), kvcache::causal_softmax(scale),
                   kvcache::dense_out(out, kvcache::element::f32, query_heads, config.shape.head_dim, lse2),
                   &executor));
}

void session_cache::parts::attend_whole(int layer, const stretch& part, const float* k, const float* v,
                                        float* out) {
  std::vector<const kvcache::sequence*> tables;
  std::vector<int> held;
  std::vector<int> rows;
  for (std::size_t i = part.first; i < part.first + part.count; ++i) {
    const state& s = *by_slot[static_cast<std::size_t>(segments_[i].slot)];
    tables.push_back(&s.whole);
    held.push_back(static_cast<int>(s.positions[0].size()));
    rows.push_back(segments_[i].rows);
  }
  const auto row = static_cast<std::size_t>(part.row);
  const auto dim = static_cast<std::size_t>(config.shape.head_dim);
  const std::size_t q_at = row * static_cast<std::size_t>(config.shape.query_heads) * dim;
  const std::size_t k_at = row * static_cast<std::size_t>(config.shape.kv_heads) * dim;
  attend_heads(tables, held, rows, rotated_.data() + q_at, k + k_at, v + k_at, out + q_at,
               lse2_.data() + row * static_cast<std::size_t>(config.shape.query_heads),
               whole_planes.layer(layer), whole_attention, config.shape.query_heads, config.shape.kv_heads,
               std::span(positions_).subspan(row, static_cast<std::size_t>(part.rows)));
}

void session_cache::parts::attend(int layer, const float* q, const float* k, const float* v, float* out) {
  const kvc_rows queries =
      kvcache::dense_rows(q, kvcache::element::f32, config.shape.query_heads, config.shape.head_dim);
  require(rope.turn(queries, positions_, rotated_.data(), &executor));
  for (const stretch& part : stretches_)
    part.split ? attend_split(layer, part, k, v, out) : attend_whole(layer, part, k, v, out);
  observe(layer);
}

}  // namespace engine
