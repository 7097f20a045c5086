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
  if (packed()) give_back_room(segments);
  for (const step_segment& segment : segments) {
    state& s = *by_slot[static_cast<std::size_t>(segment.slot)];
    for (head_slots& head : s.tokens) {
      for (int row = 0; row < segment.rows; ++row) head.add(static_cast<int>(segment.position) + row);
    }
  }
  if (packed()) {
    move_blocks({});
    describe_packed();
  } else {
    run_commands();
  }
  run_split_commands();
  const auto query_values = static_cast<std::size_t>(config.shape.query_heads * config.shape.head_dim);
  rotated_.resize(positions_.size() * query_values);
  lse2_.resize(positions_.size() * static_cast<std::size_t>(config.shape.query_heads));
  plan_scores();
  return {};
}

// While decoding, a policy that adds up every query's weights is given the scores that attention computes.
void session_cache::parts::plan_scores() {
  score_stride_ = 0;
  if (positions_.size() != segments_.size()) return;
  for (const step_segment& segment : segments_) {
    const state& s = *by_slot[static_cast<std::size_t>(segment.slot)];
    if (!s.split() && s.seen.sums()) score_stride_ = config.max_tokens;
  }
  scores_.resize(positions_.size() *
                 static_cast<std::size_t>(std::int64_t{config.shape.query_heads} * score_stride_));
}

float* session_cache::parts::scores_of(std::size_t row) {
  if (score_stride_ == 0) return nullptr;
  return scores_.data() + static_cast<std::int64_t>(row) * config.shape.query_heads * score_stride_;
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

// out: [rows][kv_heads]
void session_cache::parts::write_head_slots(const reading& of, int kv_heads,
                                            std::span<std::int64_t> out) const {
  const auto ids = of.table->table();
  const int block = config.block_size;
  std::size_t at = 0;
  for (int row = 0; row < of.rows; ++row) {
    for (int h = 0; h < kv_heads; ++h) {
      const int slot = of.heads[h].slot_of(of.heads[h].size() - of.rows + row);
      out[at++] =
          std::int64_t{kvcache::raw(ids[static_cast<std::size_t>(slot / block)])} * block + slot % block;
    }
  }
}

// Appends and attends for any number of tables that lie in the same planes. Rows of one table lie behind each
// other; queries are rotated.
void session_cache::parts::attend_heads(std::span<const reading> tables, const float* q, const float* k,
                                        const float* v, float* out, float* lse2, const kvc_kv& kv,
                                        kvcache::attention& with, int query_heads, int kv_heads,
                                        std::span<const int> text_positions, float* scores) {
  std::size_t columns = 0;
  for (const reading& r : tables) columns = std::max(columns, r.table->table().size());
  std::vector<std::int32_t> table(tables.size() * columns);
  std::vector<std::int32_t> starts(1, 0), held, slot_positions;
  std::vector<std::int64_t> slots(text_positions.size() * static_cast<std::size_t>(kv_heads));
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const reading& r = tables[i];
    require(kvcache::write_row(r.table->table(), -1, std::span(table).subspan(i * columns, columns)));
    write_head_slots(r, kv_heads,
                     std::span(slots).subspan(static_cast<std::size_t>(starts.back() * kv_heads)));
    // A row sees all slots that were in use before the step or are filled up to itself: the first one may
    // lie anywhere among them, those behind it lie behind them. So the mask needs no text positions.
    held.push_back(r.heads[0].slots());
    for (int row = 0; row < r.rows; ++row) slot_positions.push_back(held.back() - r.rows + row);
    starts.push_back(starts.back() + r.rows);
  }
  const auto dense = [&](const float* data, int n) {
    return kvcache::dense_rows(data, kvcache::element::f32, n, config.shape.head_dim);
  };
  const kvc_rope* before = kv.k_rope == nullptr ? &rope.view() : nullptr;
  const kvcache::append_options as{.rope = before, .positions = text_positions, .executor = &executor};
  if (packed()) {
    require(kvcache::append(kv, dense(k, kv_heads), dense(v, kv_heads), {}, extra_.where(as)));
    require(kvcache::run({&kv, 1}, whole.seals(), {.executor = &executor}));
  } else {
    auto each = as;
    each.slots_per_head = true;
    require(kvcache::append(kv, dense(k, kv_heads), dense(v, kv_heads), slots, each));
  }
  kvc_batch batch{};
  batch.struct_size = sizeof batch;
  batch.n = static_cast<std::int32_t>(tables.size());
  batch.table_columns = static_cast<std::int32_t>(columns);
  batch.table = table.data();
  batch.kv_len = held.data();
  batch.q_start = starts.data();
  batch.q_pos = slot_positions.data();
  if (packed()) extra_.describe(batch);
  const float scale = 1.0f / std::sqrt(static_cast<float>(config.shape.head_dim));
  kvc_out to = kvcache::dense_out(out, kvcache::element::f32, query_heads, config.shape.head_dim, lse2);
  to.key_score = scores;
  to.key_score_head_stride = score_stride_;
  to.key_score_stride = score_stride_ * query_heads;
  require(with.run(kv, batch, dense(q, query_heads), kvcache::causal_softmax(scale), to, &executor));
}

void session_cache::parts::attend_whole(int layer, const stretch& part, const float* k, const float* v,
                                        float* out) {
  std::vector<reading> tables;
  for (std::size_t i = part.first; i < part.first + part.count; ++i) {
    const state& s = *by_slot[static_cast<std::size_t>(segments_[i].slot)];
    tables.push_back({&s.whole, &s.tokens[s.index(layer, 0)], segments_[i].rows});
  }
  const auto row = static_cast<std::size_t>(part.row);
  const auto dim = static_cast<std::size_t>(config.shape.head_dim);
  const std::size_t q_at = row * static_cast<std::size_t>(config.shape.query_heads) * dim;
  const std::size_t k_at = row * static_cast<std::size_t>(config.shape.kv_heads) * dim;
  attend_heads(tables, rotated_.data() + q_at, k + k_at, v + k_at, out + q_at,
               lse2_.data() + row * static_cast<std::size_t>(config.shape.query_heads),
               whole_planes.layer(layer), whole_attention, config.shape.query_heads, config.shape.kv_heads,
               std::span(positions_).subspan(row, static_cast<std::size_t>(part.rows)), scores_of(row));
}

void session_cache::parts::attend(int layer, const float* q, const float* k, const float* v, float* out) {
  const kvc_rows queries =
      kvcache::dense_rows(q, kvcache::element::f32, config.shape.query_heads, config.shape.head_dim);
  require(rope.turn(queries, positions_, rotated_.data(), &executor));
  for (const stretch& part : stretches_)
    part.split ? attend_split(layer, part, k, v, out) : attend_whole(layer, part, k, v, out);
  observe(layer);
}

// A draft becomes part of its text when it is accepted.
void session_cache::parts::end_step() {
  if (packed()) whole.end_step();
  for (const step_segment& segment : segments_) {
    state& s = *by_slot[static_cast<std::size_t>(segment.slot)];
    if (s.drafting) continue;
    count_overwritten(s);
    s.position += segment.rows;
    s.due = s.options.mode == drop_mode::stream;
  }
}

}  // namespace engine
