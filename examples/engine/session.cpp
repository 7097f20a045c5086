// SPDX-License-Identifier: Apache-2.0
#include "session.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/attend/rope.hpp"
#include "kvcache/blocks/batch_view.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/core/numeric.hpp"
#include "kvcache/retain/parse.hpp"
#include "kvcache/retain/select.hpp"
#include "observer.hpp"

namespace engine {
namespace {

using kvcache::drop_form;
using kvcache::keep_plan;

error to_error(const kvcache::status& s) {
  return cannot_run(kvcache::to_text(s.code), s.field, std::to_string(s.value));
}

// For calls whose arguments were checked before.
void require(const kvcache::status& s) {
  if (s) return;
  std::fprintf(stderr, "%s\n", describe(to_error(s)).c_str());
  std::abort();
}

kvcache::element element_of(kv_type type) {
  if (type == kv_type::f16) return kvcache::element::f16;
  if (type == kv_type::bf16) return kvcache::element::bf16;
  return kvcache::element::f32;
}

kvcache::scope scope_of(const cache_scope& s) {
  if (s.shared) return kvcache::scope::shared();
  const kvcache::scope own = kvcache::scope::tenant(s.tenant);
  return s.public_tokens == 0 ? own : kvcache::scope::shared().from(s.public_tokens, own);
}

float widen(const std::byte* at, std::int16_t type) {
  const auto read = [at](auto stored) {
    std::memcpy(&stored, at, sizeof stored);
    return kvcache::to_float(stored);
  };
  if (type == KVC_F16) return read(kvcache::f16{});
  if (type == KVC_BF16) return read(kvcache::bf16{});
  return read(float{});
}

std::byte* cell(const kvc_plane& p, kvcache::block_id block, int head, int slot) {
  return static_cast<std::byte*>(p.data) + p.block_stride * kvcache::raw(block) + p.head_stride * head +
         p.token_stride * slot;
}

void copy_token(const kvc_plane& from, const std::byte* source, const kvc_plane& to, std::byte* target,
                int dim, std::size_t bytes) {
  for (int d = 0; d < dim; ++d) std::memcpy(target + to.dim_stride * d, source + from.dim_stride * d, bytes);
}

}  // namespace

result<kvcache::retention> parse_policy(std::string_view text) {
  const kvcache::parsed_retention read = kvcache::parse_retention(text);
  if (read.ok()) return read.value;
  std::string found(read.text);
  found += "; allowed: ";
  found += read.allowed;
  return bad_input("bad_policy", std::string(read.key), std::move(found));
}

std::string policy_text(const kvcache::retention& policy) {
  char text[256];
  return kvcache::to_text(policy, text) > 0 ? text : "custom";
}

// ---- one text ----

struct session::state {
  llama_model* model = nullptr;
  session_cache::parts* cache = nullptr;
  kvcache::retention what;
  session_options options;
  int slot = -1;

  kvcache::sequence whole;                  // one table for all heads
  std::vector<kvcache::sequence> heads;     // [layers * kv_heads] a table each, or none
  std::vector<std::vector<int>> positions;  // [layers * kv_heads][slots]
  int position = 0;                         // tokens computed
  int reused = 0;
  attention_observer seen;

  // A draft under way: its queries, shown to the observer when they are accepted.
  struct pending_layer {
    std::vector<float> q, lse2;
  };
  bool drafting = false;
  std::vector<pending_layer> pending;  // [layers]
  int drafted = 0;

  ~state();
  bool split() const { return !heads.empty(); }
  std::size_t index(int layer, int kv_head) const;
  std::int64_t tokens_held() const;
  int mean_held() const {
    return static_cast<int>(tokens_held() / static_cast<std::int64_t>(positions.size()));
  }
};

// ---- the cache ----

struct session_cache::parts final : kv_backend {
  using state = session::state;

  status create(const cache_config& c);
  status make_split();
  kv_shape shape() const { return config.shape; }
  int head_count() const { return config.shape.layers * config.shape.kv_heads; }

  status begin_step(std::span<const step_segment> segments) override;
  void attend(int layer, const float* q, const float* k, const float* v, float* out) override;
  void end_step() override {}

  head_keys read(const state& s, int layer, int kv_head, wanted what) const;
  key_reader reader(const state& s, int layer) const {
    return [this, &s, layer](int kv_head, wanted what) { return read(s, layer, kv_head, what); };
  }
  status extend(state& s, int tokens, bool draft);
  void run_commands(std::span<const kvc_keep> keeps = {});
  void run_split_commands(std::span<const kvc_keep> keeps = {});

  // Dropping.
  status drop(state& s, bool prefill_end);
  status cut(state& s, const keep_plan& plan);
  result<std::vector<std::vector<float>>> scores(state& s);
  result<std::vector<std::vector<std::int32_t>>> choose(state& s, const keep_plan& plan);
  status gather_whole(state& s, const keep_plan& plan, const std::vector<std::vector<std::int32_t>>& kept);
  status gather_heads(state& s, const std::vector<std::vector<std::int32_t>>& kept);
  status split(state& s, const std::vector<std::vector<std::int32_t>>& kept);

  cache_config config;
  kvcache::cache whole;
  kvcache::host_planes whole_planes;
  std::optional<kvcache::cache> heads;  // one sequence per text, layer and kv head
  kvcache::host_planes head_planes;     // one layer of one head
  kvcache::rope rope;
  kvcache::attention whole_attention;
  kvcache::attention head_attention;
  kvc_executor executor{};
  std::vector<state*> by_slot;

 private:
  // Consecutive segments of a step that are read in the same way.
  struct stretch {
    std::size_t first, count;
    int row, rows;
    bool split;
  };
  static void run_tasks(void* self, void (*task)(void*, std::int32_t), void* arg, std::int32_t n);
  status plan(kvcache::attention& which, const kvc_kv& kv, int query_heads, int sequences, int rows,
              int slots);
  status plan_step();
  void attend_whole(int layer, const stretch& part, const float* k, const float* v, float* out);
  void attend_split(int layer, const stretch& part, const float* k, const float* v, float* out);
  void attend_heads(const std::vector<const kvcache::sequence*>& tables, std::span<const int> held,
                    std::span<const int> rows, const float* q, const float* k, const float* v, float* out,
                    float* lse2, const kvc_kv& kv, kvcache::attention& with, int query_heads, int kv_heads,
                    std::span<const int> text_positions);
  void observe(int layer);

  std::vector<step_segment> segments_;
  std::vector<stretch> stretches_;
  std::vector<int> positions_;  // [rows] in the text
  std::vector<float> rotated_;  // [rows][query_heads][head_dim]
  std::vector<float> lse2_;     // [rows][query_heads]
};

session::state::~state() {
  if (cache != nullptr && slot >= 0) cache->by_slot[static_cast<std::size_t>(slot)] = nullptr;
}

std::size_t session::state::index(int layer, int kv_head) const {
  return static_cast<std::size_t>(layer * cache->config.shape.kv_heads + kv_head);
}

std::int64_t session::state::tokens_held() const {
  std::int64_t n = 0;
  for (const auto& p : positions) n += static_cast<std::int64_t>(p.size());
  return n;
}

status session_cache::parts::create(const cache_config& c) {
  config = c;
  const kvcache::group_shape group = {.layers = c.shape.layers,
                                      .kv_heads = c.shape.kv_heads,
                                      .head_dim_k = c.shape.head_dim,
                                      .head_dim_v = c.shape.head_dim,
                                      .type = element_of(c.type)};
  const std::int64_t each =
      kvcache::ceil_div(std::int64_t{c.max_tokens}, std::int64_t{std::max(1, c.block_size)});
  const std::int64_t blocks = c.blocks != 0 ? c.blocks : each * c.max_sequences;
  if (blocks < 1 || blocks > INT32_MAX)
    return cannot_run("out_of_blocks", "blocks", std::to_string(c.blocks));
  const kvcache::group_config groups[] = {
      {.shape = group, .block_size = c.block_size, .total = {static_cast<std::int32_t>(blocks)}}};
  auto built = kvcache::cache::create({.groups = groups,
                                       .max_sequences = c.max_sequences,
                                       .max_sequence_tokens = c.max_tokens,
                                       .max_gathers = c.max_sequences});
  if (!built) return to_error(built.error());
  whole = std::move(*built);
  auto planes = kvcache::host_planes::create(
      {.shape = group, .block_size = c.block_size, .blocks = groups[0].total.count, .layer_owner = {}});
  if (!planes) return to_error(planes.error());
  whole_planes = std::move(*planes);
  auto made = kvcache::rope::create({.style = kvcache::rope_style::interleaved,
                                     .dims = c.shape.head_dim,
                                     .theta = c.shape.rope_base,
                                     .frequency = {},
                                     .table_positions = std::min(c.shape.max_positions, 1 << 16)});
  if (!made) return to_error(made.error());
  rope = std::move(*made);
  executor = {this, c.pool->size(), &run_tasks};
  by_slot.resize(static_cast<std::size_t>(c.max_sequences));
  return plan(whole_attention, whole_planes.layer(0), c.shape.query_heads, 1, 1, c.max_tokens);
}

// The second cache takes memory only as it is written.
status session_cache::parts::make_split() {
  if (heads) return {};
  const kvcache::group_shape one = {.layers = 1,
                                    .kv_heads = 1,
                                    .head_dim_k = config.shape.head_dim,
                                    .head_dim_v = config.shape.head_dim,
                                    .type = element_of(config.type)};
  const std::int64_t blocks = std::int64_t{whole.pool().total_blocks()} * head_count();
  if (blocks > INT32_MAX) return cannot_run("out_of_blocks", "blocks", std::to_string(blocks));
  const kvcache::group_config groups[] = {
      {.shape = one, .block_size = config.block_size, .total = {static_cast<std::int32_t>(blocks)}}};
  auto built = kvcache::cache::create({.groups = groups,
                                       .max_sequences = config.max_sequences * head_count(),
                                       .max_sequence_tokens = config.max_tokens,
                                       .max_nodes = -1,
                                       .max_gathers = 1});
  if (!built) return to_error(built.error());
  auto planes = kvcache::host_planes::create({.shape = one,
                                              .block_size = config.block_size,
                                              .blocks = groups[0].total.count,
                                              .large_pages = false,
                                              .layer_owner = {}});
  if (!planes) return to_error(planes.error());
  heads = std::move(*built);
  head_planes = std::move(*planes);
  return plan(head_attention, head_planes.layer(0), config.shape.query_heads / config.shape.kv_heads, 1, 1,
              config.max_tokens);
}

void session_cache::parts::run_tasks(void* self, void (*task)(void*, std::int32_t), void* arg,
                                     std::int32_t n) {
  static_cast<parts*>(self)->config.pool->parallel_for(n, [&](int index, int) { task(arg, index); });
}

status session_cache::parts::plan(kvcache::attention& which, const kvc_kv& kv, int query_heads, int sequences,
                                  int rows, int slots) {
  const kvc_plan& have = which.plan();
  if (sequences <= have.n && rows <= have.max_q && slots <= have.max_kv) return {};
  auto made = kvcache::attention::create(kv, {.q_heads = query_heads,
                                              .sequences = std::max(sequences, have.n),
                                              .rows = std::max(rows, have.max_q),
                                              .slots = std::max(slots, have.max_kv),
                                              .width = executor.width,
                                              .features = KVC_USE_LSE});
  if (!made) return to_error(made.error());
  which = std::move(*made);
  return {};
}

void session_cache::parts::run_commands(std::span<const kvc_keep> keeps) {
  require(kvcache::run(
      whole_planes.layers(), whole.commands().view(),
      {.ids = whole.commands().ids(), .keeps = keeps, .rope = &rope.view(), .executor = &executor}));
  whole.end_step();
}

void session_cache::parts::run_split_commands(std::span<const kvc_keep> keeps) {
  if (!heads) return;
  require(kvcache::run(
      head_planes.layers(), heads->commands().view(),
      {.ids = heads->commands().ids(), .keeps = keeps, .rope = &rope.view(), .executor = &executor}));
  heads->end_step();
}

status session_cache::parts::extend(state& s, int tokens, bool draft) {
  if (!s.split()) {
    // A step that was refused after an earlier extend left room behind; only what is missing is asked for.
    const int room = s.whole.held() - static_cast<int>(s.positions[0].size());
    const auto got = s.whole.extend(std::max(0, tokens - room), draft);
    return got ? status() : to_error(got.error());
  }
  for (std::size_t h = 0; h < s.heads.size(); ++h) {
    const int room = s.heads[h].held() - static_cast<int>(s.positions[h].size());
    auto got = s.heads[h].extend(std::max(0, tokens - room), draft);
    if (!got && got.error().code == kvcache::errc::busy) {
      run_split_commands();  // copies on write of many heads
      got = s.heads[h].extend(std::max(0, tokens - room), draft);
    }
    if (got) continue;
    for (std::size_t done = 0; draft && done < h; ++done) (void)s.heads[done].accept(0);
    return to_error(got.error());
  }
  return {};
}

// ---- a step ----

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

// Every (text, kv head) is a sequence of one head; rows go from [row][head] to [text][head][row] and back.
void session_cache::parts::attend_split(int layer, const stretch& part, const float* k, const float* v,
                                        float* out) {
  const auto dim = static_cast<std::size_t>(config.shape.head_dim);
  const auto kv_heads = static_cast<std::size_t>(config.shape.kv_heads);
  const auto group = static_cast<std::size_t>(config.shape.query_heads) / kv_heads;
  const std::size_t total = static_cast<std::size_t>(part.rows) * kv_heads;
  std::vector<float> q_rows(total * group * dim), k_rows(total * dim), v_rows(total * dim);
  std::vector<float> o_rows(total * group * dim), lse_rows(total * group);
  std::vector<const kvcache::sequence*> tables;
  std::vector<int> held, rows, text, origin;  // origin: row * kv_heads + head
  int row = part.row;
  for (std::size_t i = part.first; i < part.first + part.count; ++i) {
    const state& s = *by_slot[static_cast<std::size_t>(segments_[i].slot)];
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      tables.push_back(&s.heads[s.index(layer, h)]);
      held.push_back(static_cast<int>(s.positions[s.index(layer, h)].size()));
      rows.push_back(segments_[i].rows);
      for (int r = 0; r < segments_[i].rows; ++r) {
        origin.push_back((row + r) * config.shape.kv_heads + h);
        text.push_back(positions_[static_cast<std::size_t>(row + r)]);
      }
    }
    row += segments_[i].rows;
  }
  for (std::size_t j = 0; j < total; ++j) {
    const auto from = static_cast<std::size_t>(origin[j]);
    std::copy_n(rotated_.data() + from * group * dim, group * dim, q_rows.data() + j * group * dim);
    std::copy_n(k + from * dim, dim, k_rows.data() + j * dim);
    std::copy_n(v + from * dim, dim, v_rows.data() + j * dim);
  }
  attend_heads(tables, held, rows, q_rows.data(), k_rows.data(), v_rows.data(), o_rows.data(),
               lse_rows.data(), head_planes.layer(0), head_attention, static_cast<int>(group), 1, text);
  for (std::size_t j = 0; j < total; ++j) {
    const auto to = static_cast<std::size_t>(origin[j]);
    std::copy_n(o_rows.data() + j * group * dim, group * dim, out + to * group * dim);
    std::copy_n(lse_rows.data() + j * group, group, lse2_.data() + to * group);
  }
}

void session_cache::parts::attend(int layer, const float* q, const float* k, const float* v, float* out) {
  const kvc_rows queries =
      kvcache::dense_rows(q, kvcache::element::f32, config.shape.query_heads, config.shape.head_dim);
  require(rope.turn(queries, positions_, rotated_.data(), &executor));
  for (const stretch& part : stretches_)
    part.split ? attend_split(layer, part, k, v, out) : attend_whole(layer, part, k, v, out);
  observe(layer);
}

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

// ---- dropping ----

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
      out.k[static_cast<std::size_t>(d) * slots + t] = widen(key + kv.k.dim_stride * d, kv.k.type);
    if (what != wanted::keys_and_norms) continue;
    const std::byte* value = cell(kv.v, block, head, offset);
    float squares = 0;
    for (int d = 0; d < config.shape.head_dim; ++d) {
      const float x = widen(value + kv.v.dim_stride * d, kv.v.type);
      squares += x * x;
    }
    out.norms[t] = std::sqrt(squares);
  }
  return out;
}

status session_cache::parts::drop(state& s, bool prefill_end) {
  const keep_plan plan = s.what.policy.plan(
      {.held = s.mean_held(), .incoming = 0, .unit = config.block_size, .prefill_end = prefill_end});
  if (plan.form == drop_form::nothing) return {};
  if (plan.form == drop_form::whole_blocks) return cut(s, plan);
  auto kept = choose(s, plan);
  if (!kept) return kept.error();
  const auto as_many = [&](const auto& list) { return list.size() == kept->front().size(); };
  status done;
  if (s.split()) {
    done = gather_heads(s, *kept);
  } else if (std::all_of(kept->begin(), kept->end(), as_many)) {
    done = gather_whole(s, plan, *kept);
  } else {
    done = split(s, *kept);
  }
  if (!done) return done;
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      const auto& list = (*kept)[s.index(layer, h)];
      auto& positions = s.positions[s.index(layer, h)];
      for (std::size_t t = 0; t < list.size(); ++t)
        positions[t] = positions[static_cast<std::size_t>(list[t])];
      positions.resize(list.size());
      s.seen.gather(layer, h, list);
    }
  }
  return {};
}

status session_cache::parts::cut(state& s, const keep_plan& plan) {
  if (s.split()) return cannot_run("unsupported", "policy", "whole blocks of heads of different lengths");
  const int drop = static_cast<int>(s.positions[0].size()) - plan.keep;
  if (auto done = s.whole.retain(plan, 0, s.options.at_a_loss); !done) return to_error(done.error());
  run_commands();
  for (auto& p : s.positions) p.erase(p.begin() + plan.sinks, p.begin() + plan.sinks + drop);
  return {};
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

// Keep-lists [layers * kv_heads].
result<std::vector<std::vector<std::int32_t>>> session_cache::parts::choose(state& s, const keep_plan& plan) {
  const auto score = scores(s);
  if (!score) return score.error();
  std::vector<std::vector<std::int32_t>> pinned(s.positions.size());
  std::vector<kvcache::head_scores> all(s.positions.size());
  std::size_t slots = 0;
  std::size_t longest = 0;
  for (std::size_t h = 0; h < all.size(); ++h) {
    const auto& positions = s.positions[h];
    for (const int p : s.options.pinned) {
      const auto at = std::lower_bound(positions.begin(), positions.end(), p);
      if (at != positions.end() && *at == p)
        pinned[h].push_back(static_cast<std::int32_t>(at - positions.begin()));
    }
    all[h] = {(*score)[h], {plan.sinks, plan.recent, pinned[h]}};
    slots += positions.size();
    longest = std::max(longest, positions.size());
  }
  kvcache::budget_rule rule = s.what.budget;
  int heads_per_layer = config.shape.kv_heads;
  // Heads that keep the same tokens are one head of a layer.
  const std::size_t step = s.what.policy.whole_layer() ? static_cast<std::size_t>(heads_per_layer) : 1;
  if (step > 1) {
    heads_per_layer = 1;
    for (std::size_t i = 0; i * step < all.size(); ++i) all[i] = all[i * step];
    all.resize(all.size() / step);
  }
  std::vector<kvcache::ranked_slot> ranking(slots);
  std::vector<std::int32_t> scratch(longest), list(longest), counts(all.size());
  const auto divided =
      kvcache::divide_budget(rule, all, heads_per_layer, plan.keep, {ranking, scratch, list}, counts);
  if (!divided) return to_error(divided);
  std::vector<std::vector<std::int32_t>> kept(s.positions.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto n = kvcache::select_slots(all[i].scores, all[i].safe, counts[i], scratch, list);
    if (!n) return to_error(n.error());
    for (std::size_t h = i * step; h < (i + 1) * step; ++h) kept[h].assign(list.begin(), list.begin() + *n);
  }
  return kept;
}

status session_cache::parts::gather_whole(state& s, const keep_plan& plan,
                                          const std::vector<std::vector<std::int32_t>>& kept) {
  keep_plan exact = plan;
  exact.keep = static_cast<std::int32_t>(kept.front().size());
  exact.sinks = exact.recent = 0;  // said by the lists
  if (auto done = s.whole.retain(exact, 0, s.options.at_a_loss); !done) return to_error(done.error());
  std::vector<std::int32_t> lists;
  for (const auto& list : kept) lists.insert(lists.end(), list.begin(), list.end());
  std::vector<kvc_keep> keeps(static_cast<std::size_t>(config.max_sequences));
  keeps[static_cast<std::size_t>(s.whole.place())] = {lists.data(), exact.keep,
                                                      std::int64_t{exact.keep} * config.shape.kv_heads};
  run_commands(keeps);
  return {};
}

status session_cache::parts::gather_heads(state& s, const std::vector<std::vector<std::int32_t>>& kept) {
  // All heads or none: blocks that forks can see are replaced, and there must be enough for all of them.
  const int block = config.block_size;
  std::int64_t fresh = 0;
  for (std::size_t h = 0; h < kept.size(); ++h) {
    if (kept[h].size() == s.positions[h].size()) continue;
    const auto columns = static_cast<std::size_t>(kvcache::ceil_div(static_cast<int>(kept[h].size()), block));
    for (const kvcache::block_id b : s.heads[h].table().first(columns)) fresh += heads->pool().immutable(b);
  }
  if (fresh > heads->pool().free_blocks())
    return cannot_run("out_of_blocks", "blocks", std::to_string(fresh));
  for (std::size_t h = 0; h < kept.size(); ++h) {
    if (kept[h].size() == s.positions[h].size()) continue;
    keep_plan exact;
    exact.form = drop_form::gather;
    exact.keep = static_cast<std::int32_t>(kept[h].size());
    // Some heads gain and some lose a block: whether it is worth it was the policy's decision.
    const auto done = s.heads[h].retain(exact, 0, true);
    require(done.error());
    std::vector<kvc_keep> keeps(static_cast<std::size_t>(config.max_sequences * head_count()));
    keeps[static_cast<std::size_t>(s.heads[h].place())] = {kept[h].data(), 0, 0};
    run_split_commands(keeps);
  }
  return {};
}

status session_cache::parts::split(state& s, const std::vector<std::vector<std::int32_t>>& kept) {
  if (status made = make_split(); !made) return made;
  std::vector<kvcache::sequence> tables;
  for (const auto& list : kept) {
    auto opened = heads->open({}, scope_of(s.options.scope));
    if (!opened) return to_error(opened.error());
    const auto got = opened->extend(static_cast<std::int32_t>(list.size()));
    if (!got) return to_error(got.error());
    tables.push_back(std::move(*opened));
  }
  run_split_commands();
  const auto bytes = static_cast<std::size_t>(kvcache::element_bytes(element_of(config.type)));
  const auto block = static_cast<std::size_t>(config.block_size);
  const kvc_kv& to = head_planes.layer(0);
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    const kvc_kv& from = whole_planes.layer(layer);
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      const auto& list = kept[s.index(layer, h)];
      const auto target = tables[s.index(layer, h)].table();
      for (std::size_t t = 0; t < list.size(); ++t) {
        const auto slot = static_cast<std::size_t>(list[t]);
        const kvcache::block_id source = s.whole.table()[slot / block];
        const int in = static_cast<int>(slot % block), out = static_cast<int>(t % block);
        copy_token(from.k, cell(from.k, source, h, in), to.k, cell(to.k, target[t / block], 0, out), to.dim_k,
                   bytes);
        copy_token(from.v, cell(from.v, source, h, in), to.v, cell(to.v, target[t / block], 0, out), to.dim_v,
                   bytes);
      }
    }
  }
  s.heads = std::move(tables);
  (void)s.whole.close();
  return {};
}

// ---- the public face ----

session_cache::session_cache(std::unique_ptr<parts> p) : parts_(std::move(p)) {}
session_cache::~session_cache() = default;

result<std::unique_ptr<session_cache>> session_cache::create(const cache_config& config) {
  if (config.pool == nullptr) return cannot_run("bad_value", "pool", "null");
  if (config.max_sequences < 1)
    return cannot_run("bad_value", "max_sequences", std::to_string(config.max_sequences));
  if (config.max_tokens < 1) return cannot_run("bad_value", "max_tokens", std::to_string(config.max_tokens));
  auto made = std::make_unique<parts>();
  if (status s = made->create(config); !s) return s.error();
  return std::unique_ptr<session_cache>(new session_cache(std::move(made)));
}

std::size_t session_cache::bytes_used() const {
  const auto bytes = [](const kvcache::cache& c) {
    const kvcache::stats n = c.count();
    const kvcache::group_geometry& g = c.shape().group[0];
    return static_cast<std::size_t>(n.blocks_used + n.blocks_cached) *
           static_cast<std::size_t>(kvcache::block_bytes(g.shape, g.block_size).count);
  };
  return bytes(parts_->whole) + (parts_->heads ? bytes(*parts_->heads) : 0);
}

const char* session_cache::check() const {
  const char* broken = parts_->whole.check_invariants();
  return broken != nullptr || !parts_->heads ? broken : parts_->heads->check_invariants();
}

session::session(std::unique_ptr<state> s) : state_(std::move(s)) {}
session::session(session&&) noexcept = default;
session& session::operator=(session&&) noexcept = default;
session::~session() = default;

result<session> session::create(llama_model& model, session_cache& cache, const kvcache::retention& policy,
                                const session_options& options) {
  session_cache::parts& parts = *cache.parts_;
  for (std::size_t i = 0; i < options.pinned.size(); ++i) {
    if (options.pinned[i] < 0 || (i > 0 && options.pinned[i] <= options.pinned[i - 1]))
      return bad_input("bad_value", "pinned", std::to_string(options.pinned[i]));
  }
  if (options.chunk < 1) return bad_input("bad_value", "chunk", std::to_string(options.chunk));
  const auto free = std::find(parts.by_slot.begin(), parts.by_slot.end(), nullptr);
  if (free == parts.by_slot.end())
    return cannot_run("out_of_sequences", "max_sequences", std::to_string(parts.config.max_sequences));
  auto s = std::make_unique<state>();
  s->model = &model;
  s->cache = &parts;
  s->what = policy;
  s->options = options;
  s->options.prompt = {};
  // What a policy must see, or all if everything is remembered, has to be computed here.
  const int all = static_cast<int>(options.prompt.size());
  const int recompute = options.remember ? all : std::min(all, policy.policy.must_recompute());
  auto opened = parts.whole.open(options.prompt, scope_of(options.scope),
                                 {.account = 0, .recompute = std::max(1, recompute)});
  if (!opened) return to_error(opened.error());
  s->whole = std::move(*opened);
  s->reused = s->position = s->whole.reused();
  s->positions.resize(static_cast<std::size_t>(parts.head_count()));
  for (auto& p : s->positions) {
    p.resize(static_cast<std::size_t>(s->reused));
    std::iota(p.begin(), p.end(), 0);
  }
  s->seen =
      attention_observer(parts.config.shape, policy.policy.needs(), policy.policy.watch(), options.remember);
  s->slot = static_cast<int>(free - parts.by_slot.begin());
  *free = s.get();
  return session(std::move(s));
}

int session::reused() const {
  return state_->reused;
}

// Rows until the next token after which the policy drops, at most `rows`.
static int rows_until_drop(const kvcache::retention& what, int held, int unit, int rows) {
  for (int r = 1; r < rows; ++r) {
    if (what.policy.plan({.held = held + r, .incoming = 0, .unit = unit, .prefill_end = false}).form !=
        drop_form::nothing)
      return r;
  }
  return rows;
}

result<std::vector<float>> session::feed(std::span<const token_id> tokens, observe which) {
  state& s = *state_;
  if (s.drafting) return cannot_run("busy", "draft", std::to_string(s.drafted));
  const auto vocabulary = static_cast<std::size_t>(s.model->shape().vocabulary);
  std::vector<float> logits;
  if (which == observe::all) logits.reserve(tokens.size() * vocabulary);
  std::vector<int> wanted_rows;
  std::vector<float> step;
  while (!tokens.empty()) {
    int rows =
        static_cast<int>(std::min<std::size_t>(tokens.size(), static_cast<std::size_t>(s.options.chunk)));
    if (s.options.mode == drop_mode::stream)
      rows = rows_until_drop(s.what, s.mean_held(), s.cache->config.block_size, rows);
    wanted_rows.clear();
    for (int r = 0; r < rows; ++r) {
      if (which == observe::all || static_cast<std::size_t>(r) + 1 == tokens.size()) wanted_rows.push_back(r);
    }
    step.resize(wanted_rows.size() * vocabulary);
    if (status done = s.cache->extend(s, rows, false); !done) return done.error();
    const step_segment segment{s.slot, s.position, rows};
    if (status done = s.model->forward(tokens.first(static_cast<std::size_t>(rows)), {&segment, 1},
                                       wanted_rows, *s.cache, step);
        !done)
      return done.error();
    s.position += rows;
    logits.insert(logits.end(), step.begin(), step.end());
    tokens = tokens.subspan(static_cast<std::size_t>(rows));
    if (s.options.mode != drop_mode::stream) continue;
    if (status done = s.cache->drop(s, false); !done) return done.error();
  }
  return logits;
}

status session::compress() {
  if (state_->drafting) return cannot_run("busy", "draft", std::to_string(state_->drafted));
  return state_->cache->drop(*state_, true);
}

result<session> session::fork() const {
  const state& from = *state_;
  if (from.drafting) return cannot_run("busy", "draft", std::to_string(from.drafted));
  session_cache::parts& parts = *from.cache;
  const auto free = std::find(parts.by_slot.begin(), parts.by_slot.end(), nullptr);
  if (free == parts.by_slot.end())
    return cannot_run("out_of_sequences", "max_sequences", std::to_string(parts.config.max_sequences));
  auto s = std::make_unique<state>();
  s->model = from.model;
  s->cache = from.cache;
  s->what = from.what;
  s->options = from.options;
  s->positions = from.positions;
  s->position = from.position;
  s->reused = from.reused;
  s->seen = from.seen;
  if (!from.split()) {
    auto copy = state_->whole.fork();
    if (!copy) return to_error(copy.error());
    s->whole = std::move(*copy);
  }
  for (auto& head : state_->heads) {
    auto copy = head.fork();
    if (!copy) return to_error(copy.error());
    s->heads.push_back(std::move(*copy));
  }
  s->slot = static_cast<int>(free - parts.by_slot.begin());
  *free = s.get();
  return session(std::move(s));
}

result<session> session::fork_as(const kvcache::retention& policy, drop_mode mode) const {
  if (!state_->options.remember) return cannot_run("unsupported", "remember", "false");
  if (dropped() > 0) return cannot_run("unsupported", "dropped", std::to_string(dropped()));
  if (mode == drop_mode::stream && policy.policy
                                           .plan({.held = state_->mean_held(),
                                                  .incoming = 0,
                                                  .unit = state_->cache->config.block_size,
                                                  .prefill_end = false})
                                           .form != drop_form::nothing)
    return cannot_run("unsupported", "mode", "stream, behind the first drop");
  auto made = fork();
  if (!made) return made;
  state& s = *made->state_;
  s.what = policy;
  s.options.mode = mode;
  s.options.remember = false;
  s.seen = attention_observer(s.cache->config.shape, policy.policy.needs(), policy.policy.watch(), false);
  if (!s.seen.active()) return made;
  for (int layer = 0; layer < s.cache->config.shape.layers; ++layer)
    s.seen.replay(layer, state_->seen, s.cache->reader(s, layer), *s.cache->config.pool);
  return made;
}

result<int> session::commit(std::span<const token_id> text) {
  const auto done =
      state_->whole.commit(text.first(std::min(text.size(), static_cast<std::size_t>(state_->position))));
  if (!done) return state_->split() ? result<int>(0) : result<int>(to_error(done.error()));
  return *done;
}

result<std::vector<float>> session::draft(std::span<const token_id> tokens) {
  state& s = *state_;
  if (s.drafting) return cannot_run("busy", "draft", std::to_string(s.drafted));
  if (tokens.empty()) return bad_input("bad_value", "draft", "empty");
  int rows =
      static_cast<int>(std::min<std::size_t>(tokens.size(), static_cast<std::size_t>(s.options.chunk)));
  if (s.options.mode == drop_mode::stream)
    rows = rows_until_drop(s.what, s.mean_held(), s.cache->config.block_size, rows);
  if (status done = s.cache->extend(s, rows, true); !done) return done.error();
  std::vector<int> wanted_rows(static_cast<std::size_t>(rows));
  std::iota(wanted_rows.begin(), wanted_rows.end(), 0);
  std::vector<float> logits(wanted_rows.size() * static_cast<std::size_t>(s.model->shape().vocabulary));
  s.drafting = true;
  s.drafted = rows;
  s.pending.resize(static_cast<std::size_t>(s.cache->config.shape.layers));
  const step_segment segment{s.slot, s.position, rows};
  if (status done = s.model->forward(tokens.first(static_cast<std::size_t>(rows)), {&segment, 1}, wanted_rows,
                                     *s.cache, logits);
      !done) {
    s.drafting = false;
    if (!s.split()) (void)s.whole.accept(0);
    for (auto& head : s.heads) (void)head.accept(0);
    return done.error();
  }
  return logits;
}

status session::accept(int n) {
  state& s = *state_;
  if (!s.drafting || n < 0 || n > s.drafted) return bad_input("bad_value", "accept", std::to_string(n));
  if (!s.split()) {
    if (auto done = s.whole.accept(n); !done) return to_error(done);
  }
  for (auto& head : s.heads) {
    if (auto done = head.accept(n); !done) return to_error(done);
  }
  const auto gone = static_cast<std::size_t>(s.drafted - n);
  for (auto& p : s.positions) p.resize(p.size() - gone);
  std::vector<int> positions(static_cast<std::size_t>(n));
  std::iota(positions.begin(), positions.end(), s.position);
  for (int layer = 0; n > 0 && s.seen.active() && layer < s.cache->config.shape.layers; ++layer) {
    const auto& rows = s.pending[static_cast<std::size_t>(layer)];
    s.seen.add(layer, {rows.q.data(), rows.lse2.data(), positions}, s.cache->reader(s, layer),
               *s.cache->config.pool);
  }
  s.position += n;
  s.drafting = false;
  s.drafted = 0;
  return s.options.mode == drop_mode::stream ? s.cache->drop(s, false) : status();
}

status session::advance(std::span<session* const> sessions, std::span<const token_id> tokens,
                        std::vector<float>& logits) {
  if (sessions.empty() || sessions.size() != tokens.size())
    return bad_input("bad_value", "sessions", std::to_string(sessions.size()));
  std::vector<step_segment> segments;
  std::vector<int> rows;
  for (session* one : sessions) {
    state& s = *one->state_;
    if (s.drafting) return cannot_run("busy", "draft", std::to_string(s.drafted));
    if (status done = s.cache->extend(s, 1, false); !done) return done;
    segments.push_back({s.slot, s.position, 1});
    rows.push_back(static_cast<int>(rows.size()));
  }
  llama_model& model = *sessions.front()->state_->model;
  logits.resize(sessions.size() * static_cast<std::size_t>(model.shape().vocabulary));
  if (status done = model.forward(tokens, segments, rows, *sessions.front()->state_->cache, logits); !done)
    return done;
  for (session* one : sessions) {
    state& s = *one->state_;
    ++s.position;
    if (s.options.mode != drop_mode::stream) continue;
    if (status done = s.cache->drop(s, false); !done) return done;
  }
  return {};
}

int session::position() const {
  return state_->position;
}

int session::dropped() const {
  const std::int64_t all =
      std::int64_t{state_->position} * static_cast<std::int64_t>(state_->positions.size());
  return static_cast<int>((all - state_->tokens_held()) /
                          static_cast<std::int64_t>(state_->positions.size()));
}

std::span<const int> session::kept(int layer, int kv_head) const {
  return state_->positions[state_->index(layer, kv_head)];
}

std::size_t session::values_kept() const {
  return static_cast<std::size_t>(state_->tokens_held()) * 2 *
         static_cast<std::size_t>(state_->cache->config.shape.head_dim);
}

std::size_t session::bytes_held() const {
  const auto bytes = [](const kvcache::sequence& s, const kvcache::cache& c) {
    const kvcache::group_geometry& g = c.shape().group[0];
    return s.table().size() * static_cast<std::size_t>(kvcache::block_bytes(g.shape, g.block_size).count);
  };
  std::size_t total = bytes(state_->whole, state_->cache->whole);
  for (const auto& head : state_->heads) total += bytes(head, *state_->cache->heads);
  return total;
}

std::size_t session::bytes_full() const {
  const kvcache::group_geometry& g = state_->cache->whole.shape().group[0];
  return static_cast<std::size_t>(kvcache::ceil_div(state_->position, g.block_size)) *
         static_cast<std::size_t>(kvcache::block_bytes(g.shape, g.block_size).count);
}

std::size_t session::bytes_state() const {
  return state_->seen.bytes();
}

bool session::split() const {
  return state_->split();
}

}  // namespace engine
