// SPDX-License-Identifier: Apache-2.0
#include "library_cache.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/attend/rope.hpp"
#include "kvcache/blocks/batch_view.hpp"
#include "kvcache/blocks/contiguous.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/evict/parse.hpp"
#include "library_terms.hpp"
#include "packed_blocks.hpp"

namespace engine {
namespace {

struct reserving : kvcache::serving {
  using allocator_type = kvcache::contiguous;
};

template <class Traits>
class library_cache final : public cache_kind, private kv_backend {
 public:
  using manager = kvcache::basic_cache<Traits>;
  static constexpr bool reserves = !Traits::allocator_type::shareable;

  status create(const cache_config& config, typename manager::eviction eviction);

  std::string_view name() const override { return reserves ? "contiguous" : "paged"; }
  kv_backend& backend() override { return *this; }
  result<opened_sequence> open(std::span<const token_id> prompt, const cache_scope& scope) override;
  result<int> extend(int slot, int tokens) override;
  status commit(int slot, std::span<const token_id> text) override;
  result<int> fork(int slot) override;
  void close(int slot) override { at(slot) = {}; }
  result<int> draft(int slot, int tokens) override;
  status accept(int slot, int tokens) override;
  result<int> assign(int slot, int from) override;
  int length(int slot) const override { return at(slot).written; }
  cache_bytes bytes() const override;
  cache_counts counts() const override;
  void read(int slot, int layer, int position, float* k, float* v) const override;

 private:
  struct open_sequence {
    typename manager::sequence handle;
    int written = 0;  // tokens whose K and V are stored
  };

  status begin_step(std::span<const step_segment> segments) override;
  void attend(int layer, const float* q, const float* k, const float* v, float* out) override;
  void end_step() override;

  open_sequence& at(int slot) { return sequences_[static_cast<std::size_t>(slot)]; }
  const open_sequence& at(int slot) const { return sequences_[static_cast<std::size_t>(slot)]; }
  status check(std::span<const step_segment> segments) const;
  status describe(std::span<const step_segment> segments);
  void store(const kvc_kv& kv, const float* k, const float* v);
  void give_back_room(std::span<const step_segment> segments);
  status plan(int sequences, int rows, int slots);
  static void run_tasks(void* self, void (*task)(void*, std::int32_t), void* arg, std::int32_t n);

  cache_config config_;
  manager manager_;
  kvcache::host_planes planes_;
  kvcache::rope rope_;
  kvcache::attention attention_;
  kvc_executor executor_{};
  std::vector<open_sequence> sequences_;  // by slot

  // The step under way.
  std::vector<step_segment> segments_;
  std::vector<std::int32_t> table_;      // [segments][columns_]
  std::vector<std::int32_t> lengths_;    // [segments] tokens, this step's included
  std::vector<std::int32_t> starts_;     // [segments + 1] first row
  std::vector<std::int32_t> positions_;  // [rows]
  std::vector<std::int64_t> slots_;      // [rows]
  std::vector<float> rotated_;           // [rows][query_heads][head_dim]
  int columns_ = 0;
  bool packed_ = false;
  packed_rows extra_;  // if packed_
};

template <class Traits>
status library_cache<Traits>::create(const cache_config& config, typename manager::eviction eviction) {
  config_ = config;
  packed_ = is_packed(config);
  const kv_shape& shape = config.shape;
  const std::int64_t each =
      kvcache::ceil_div(std::int64_t{config.max_tokens}, std::int64_t{std::max(1, config.block_size)});
  std::int64_t blocks = config.blocks != 0 ? config.blocks : each * config.max_sequences;
  if (reserves) blocks -= blocks % each;  // whole regions only
  if (blocks < 1 || blocks > INT32_MAX)
    return cannot_run("out_of_blocks", "blocks", std::to_string(config.blocks));
  auto groups = groups_for(config, static_cast<std::int32_t>(blocks));
  if (!groups) return groups.error();
  groups->group[0].reserve = reserves ? config.max_tokens : 0;
  auto built = manager::create({.groups = groups->span(),
                                .max_sequences = config.max_sequences,
                                .max_sequence_tokens = config.max_tokens,
                                .max_step_tokens = config.step_tokens},
                               std::move(eviction));
  if (!built) return to_error(built.error());
  manager_ = std::move(*built);
  auto planes = planes_for(config, manager_.shape(), rope_.view());
  if (!planes) return planes.error();
  planes_ = std::move(*planes);
  auto rope = kvcache::rope::create({.style = kvcache::rope_style::interleaved,
                                     .dims = shape.head_dim,
                                     .theta = shape.rope_base,
                                     .frequency = {},
                                     .table_positions = config.max_tokens});
  if (!rope) return to_error(rope.error());
  rope_ = std::move(*rope);
  executor_ = {this, config.pool->size(), &run_tasks};
  sequences_.resize(static_cast<std::size_t>(config.max_sequences));
  return plan(1, 1, config.max_tokens);
}

template <class Traits>
void library_cache<Traits>::run_tasks(void* self, void (*task)(void*, std::int32_t), void* arg,
                                      std::int32_t n) {
  static_cast<library_cache*>(self)->config_.pool->parallel_for(n, [&](int index, int) { task(arg, index); });
}

template <class Traits>
status library_cache<Traits>::plan(int sequences, int rows, int slots) {
  auto made = kvcache::attention::create(planes_.layer(0), {.q_heads = config_.shape.query_heads,
                                                            .sequences = sequences,
                                                            .rows = rows,
                                                            .slots = slots,
                                                            .width = executor_.width});
  if (!made) return to_error(made.error());
  attention_ = std::move(*made);
  return {};
}

template <class Traits>
result<opened_sequence> library_cache<Traits>::open(std::span<const token_id> prompt,
                                                    const cache_scope& scope) {
  if (prompt.empty()) return bad_input("bad_value", "prompt", "empty");
  auto opened = manager_.open(prompt, scope_of(scope));
  if (!opened) return to_error(opened.error());
  const opened_sequence out{opened->place(), opened->reused()};
  at(out.slot) = {std::move(*opened), out.reused};
  return out;
}

template <class Traits>
result<int> library_cache<Traits>::extend(int slot, int tokens) {
  auto& s = at(slot);
  // A step that was refused after an earlier extend left room behind; only what is missing is asked for.
  const auto got = s.handle.extend(std::max(0, tokens - (s.handle.held() - s.written)));
  return got ? result<int>(tokens) : to_error(got.error());
}

template <class Traits>
status library_cache<Traits>::commit(int slot, std::span<const token_id> text) {
  const auto done =
      at(slot).handle.commit(text.first(std::min(text.size(), static_cast<std::size_t>(length(slot)))));
  return done ? status() : to_error(done.error());
}

template <class Traits>
result<int> library_cache<Traits>::fork(int slot) {
  auto forked = at(slot).handle.fork();
  if (!forked) return to_error(forked.error());
  const int copy = forked->place();
  at(copy) = {std::move(*forked), length(slot)};
  return copy;
}

template <class Traits>
result<int> library_cache<Traits>::draft(int slot, int tokens) {
  auto& s = at(slot);
  const auto got = s.handle.extend(tokens, true);
  return got ? result<int>(*got) : to_error(got.error());
}

template <class Traits>
status library_cache<Traits>::accept(int slot, int tokens) {
  auto& s = at(slot);
  if (auto done = s.handle.accept(tokens); !done) return to_error(done);
  s.written = std::min(s.written, s.handle.held());
  return {};
}

template <class Traits>
result<int> library_cache<Traits>::assign(int slot, int from) {
  const auto touched = at(slot).handle.assign(at(from).handle);
  if (!touched) return to_error(touched.error());
  at(slot).written = length(from);
  return *touched;
}

template <class Traits>
status library_cache<Traits>::check(std::span<const step_segment> segments) const {
  for (const step_segment& s : segments) {
    if (s.slot < 0 || s.slot >= config_.max_sequences || !at(s.slot).handle.live())
      return cannot_run("bad_step", "slot", std::to_string(s.slot));
    if (s.position != length(s.slot)) return cannot_run("bad_step", "position", std::to_string(s.position));
    if (s.rows < 1 || s.rows > at(s.slot).handle.held() - length(s.slot))
      return cannot_run("bad_step", "rows", std::to_string(s.rows));
  }
  return {};
}

// Tables, lengths, positions and slots of the step's rows.
template <class Traits>
status library_cache<Traits>::describe(std::span<const step_segment> segments) {
  segments_.assign(segments.begin(), segments.end());
  columns_ = 0;
  int most_rows = 0;
  int most_slots = 0;
  std::size_t rows = 0;
  for (const step_segment& s : segments) {
    columns_ = std::max(columns_, static_cast<int>(at(s.slot).handle.table().size()));
    most_rows = std::max(most_rows, s.rows);
    most_slots = std::max(most_slots, static_cast<int>(s.position) + s.rows);
    rows += static_cast<std::size_t>(s.rows);
  }
  table_.resize(segments.size() * static_cast<std::size_t>(columns_));
  lengths_.clear();
  starts_.assign(1, 0);
  positions_.clear();
  extra_.begin(config_.block_size, packed_ ? config_.formats.front().exempt : 0);
  slots_.resize(rows);
  rotated_.resize(rows * static_cast<std::size_t>(config_.shape.query_heads) *
                  static_cast<std::size_t>(config_.shape.head_dim));
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const step_segment& s = segments[i];
    const auto table = at(s.slot).handle.table();
    const auto columns = static_cast<std::size_t>(columns_);
    const auto first = static_cast<std::size_t>(starts_.back());
    const auto position = static_cast<std::int32_t>(s.position);
    const std::span<std::int64_t> slots = std::span(slots_).subspan(first, static_cast<std::size_t>(s.rows));
    if (auto done = kvcache::write_row(table, -1, std::span(table_).subspan(i * columns, columns)); !done)
      return to_error(done);
    if (auto done = kvcache::write_slots(table, config_.block_size, position, slots); !done)
      return to_error(done);
    if (packed_) extra_.add(at(s.slot).handle, position, s.rows);
    for (int row = 0; row < s.rows; ++row) positions_.push_back(position + row);
    lengths_.push_back(position + s.rows);
    starts_.push_back(starts_.back() + s.rows);
  }
  const kvc_plan& have = attention_.plan();
  if (static_cast<int>(segments.size()) <= have.n && most_rows <= have.max_q && most_slots <= have.max_kv)
    return {};
  return plan(std::max(static_cast<int>(segments.size()), have.n), std::max(most_rows, have.max_q),
              config_.max_tokens);
}

// A block that a sequence has room in, but whose last token this step does not write, must not be packed by
// it.
template <class Traits>
void library_cache<Traits>::give_back_room(std::span<const step_segment> segments) {
  for (std::size_t i = 0; i < sequences_.size(); ++i) {
    open_sequence& s = sequences_[i];
    int written = s.written;
    for (const step_segment& segment : segments) {
      if (static_cast<std::size_t>(segment.slot) == i) written += segment.rows;
    }
    if (s.handle.held() > written) require(s.handle.truncate(written).error());
  }
}

template <class Traits>
status library_cache<Traits>::begin_step(std::span<const step_segment> segments) {
  if (status s = check(segments); !s) return s;
  if (packed_) give_back_room(segments);
  if (status s = describe(segments); !s) return s;
  const kvcache::run_options with{.ids = {}, .keeps = {}, .rope = &rope_.view(), .executor = &executor_};
  if (auto done = kvcache::run(planes_.layers(), manager_.commands().view(), with); !done)
    return to_error(done);
  return {};
}

// What can be wrong with these calls was checked when the cache was created and in begin_step.
template <class Traits>
void library_cache<Traits>::store(const kvc_kv& kv, const float* k, const float* v) {
  const auto rows = [&](const float* data) {
    return kvcache::dense_rows(data, kvcache::element::f32, config_.shape.kv_heads, config_.shape.head_dim);
  };
  const kvc_rope* before = kv.k_rope == nullptr ? &rope_.view() : nullptr;
  const kvcache::append_options with{.rope = before, .positions = positions_, .executor = &executor_};
  if (!packed_) return require(kvcache::append(kv, rows(k), rows(v), slots_, with));
  require(kvcache::append(kv, rows(k), rows(v), {}, extra_.where(with)));
  require(kvcache::run({&kv, 1}, manager_.seals(), {.executor = &executor_}));
}

template <class Traits>
void library_cache<Traits>::attend(int layer, const float* q, const float* k, const float* v, float* out) {
  const kv_shape& shape = config_.shape;
  const kvc_kv& kv = planes_.layer(layer);
  const auto rows = [&](const float* data) {
    return kvcache::dense_rows(data, kvcache::element::f32, shape.query_heads, shape.head_dim);
  };
  store(kv, k, v);
  require(rope_.turn(rows(q), positions_, rotated_.data(), &executor_));
  kvc_batch batch{};
  batch.struct_size = sizeof batch;
  batch.n = static_cast<std::int32_t>(segments_.size());
  batch.table_columns = columns_;
  batch.table = table_.data();
  batch.kv_len = lengths_.data();
  batch.q_start = starts_.data();
  batch.q_pos = positions_.data();
  if (packed_) extra_.describe(batch);
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  require(attention_.run(kv, batch, rows(rotated_.data()), kvcache::causal_softmax(scale),
                         kvcache::dense_out(out, kvcache::element::f32, shape.query_heads, shape.head_dim),
                         &executor_));
}

template <class Traits>
void library_cache<Traits>::end_step() {
  for (const step_segment& s : segments_) at(s.slot).written += s.rows;
  segments_.clear();
  manager_.end_step();
}

template <class Traits>
cache_counts library_cache<Traits>::counts() const {
  const kvcache::stats s = manager_.count();
  const auto& pool = manager_.pool();
  const kvcache::group_geometry& g = manager_.shape().group[0];
  return {
      .blocks_total = pool.total_blocks(),
      .blocks_used = pool.used_blocks(),
      .blocks_cached = pool.cached_blocks(),
      .evictions = static_cast<std::int64_t>(s.nodes_evicted),
      .copies = static_cast<std::int64_t>(s.blocks_copied),
      .block_bytes = static_cast<std::size_t>(kvcache::block_bytes(g.shape, g.block_size, g.format).count)};
}

template <class Traits>
cache_bytes library_cache<Traits>::bytes() const {
  table_census sum(manager_.shape());
  for (const open_sequence& s : sequences_) sum.add(s.handle, s.written);
  return sum.total();
}

template <class Traits>
void library_cache<Traits>::read(int slot, int layer, int position, float* k, float* v) const {
  const auto column = static_cast<std::size_t>(position / config_.block_size);
  const auto& handle = at(slot).handle;
  stored_token where{.block = handle.table()[column], .slot = position};
  if (packed_) where.open = handle.open_table()[column];
  if (packed_ && handle.table(1).size() > 0) where.copy = handle.table(1)[0];
  const auto dim = static_cast<std::size_t>(config_.shape.head_dim);
  for (int head = 0; head < config_.shape.kv_heads; ++head, k += dim, v += dim) {
    const kvcache::kv_format format = format_of(config_, layer);
    read_token(planes_.layer(layer), format, config_.type, true, head, where, {k, dim});
    read_token(planes_.layer(layer), format, config_.type, false, head, where, {v, dim});
  }
}

template <class Traits>
result<std::unique_ptr<cache_kind>> make(const cache_config& config,
                                         typename kvcache::basic_cache<Traits>::eviction eviction) {
  auto made = std::make_unique<library_cache<Traits>>();
  if (status s = made->create(config, std::move(eviction)); !s) return s.error();
  return std::unique_ptr<cache_kind>(std::move(made));
}

}  // namespace

result<std::unique_ptr<cache_kind>> make_library_cache(bool paged, const cache_config& config) {
  if (!paged) return make<reserving>(config, {});
  const kvcache::parsed_eviction read = kvcache::parse_eviction(config.eviction);
  if (!read.ok()) return cannot_run("unsupported", "eviction", config.eviction);
  return make<kvcache::dynamic>(config, kvcache::make_eviction(read.value));
}

}  // namespace engine
