// SPDX-License-Identifier: Apache-2.0
// The memory of all texts: caches, planes, room for tokens, queued commands.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {

status session_cache::parts::create(const cache_config& c) {
  config = c;
  if (!is_packed(c)) config.formats.clear();
  const std::int64_t each =
      kvcache::ceil_div(std::int64_t{c.max_tokens}, std::int64_t{std::max(1, c.block_size)});
  const std::int64_t texts = c.max_sequences + (packed() && c.deferred ? 1 : 0);  // one is copied together
  const std::int64_t blocks = c.blocks != 0 ? c.blocks : each * texts;
  if (blocks < 1 || blocks > INT32_MAX)
    return cannot_run("out_of_blocks", "blocks", std::to_string(c.blocks));
  const auto groups = groups_for(c, static_cast<std::int32_t>(blocks));
  if (!groups) return groups.error();
  auto built = kvcache::cache::create({.groups = groups->span(),
                                       .max_sequences = static_cast<std::int32_t>(texts),
                                       .max_sequence_tokens = c.max_tokens,
                                       .max_gathers = c.max_sequences,
                                       .max_step_tokens = c.step_tokens});
  if (!built) return to_error(built.error());
  whole = std::move(*built);
  auto planes = planes_for(c, whole.shape(), rope.view());
  if (!planes) return planes.error();
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
  if (status s =
          plan(whole_observing, whole_planes.layer(0), c.shape.query_heads, 1, c.max_tokens, c.max_tokens);
      !s)
    return s;
  return plan(whole_attention, whole_planes.layer(0), c.shape.query_heads, 1, 1, c.max_tokens);
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

void session_cache::parts::move_blocks(std::span<const kvc_keep> keeps) {
  require(kvcache::run(
      whole_planes.layers(), whole.commands().view(),
      {.ids = whole.commands().ids(), .keeps = keeps, .rope = &rope.view(), .executor = &executor}));
}

// Between two steps. Where blocks wait to be packed in the next step, the step's begin moves the others.
void session_cache::parts::run_commands(std::span<const kvc_keep> keeps) {
  if (!whole.seals().empty()) return;
  move_blocks(keeps);
  whole.end_step();
}

// Room for `tokens`, or for as many of them as there are blocks: then the policy is asked for some when not
// one more fits. Steps end where a block does, so what is dropped does not depend on how many were asked for.
result<int> session_cache::parts::make_room(state& s, int tokens, bool draft) {
  const bool asks = s.options.mode == drop_mode::out_of_blocks;
  int rows = asks && s.split() ? std::min(tokens, 1) : tokens;
  for (bool dropped = false;;) {
    const auto done = extend(s, rows, draft);
    if (done) return done;
    if (!asks || done.error().code != "out_of_blocks") return done.error();
    const int fewer = (s.slots() + rows - 1) / config.block_size * config.block_size - s.slots();
    if (fewer >= 1 && !s.split()) {
      rows = fewer;
      continue;
    }
    if (dropped || !drop(s, drop_reason::no_block)) return done.error();
    dropped = true;
    rows = s.split() ? 1 : tokens;
  }
}

// A slot that a token left is taken first. Its block must be this text's own; that the cache counts the token
// as dropped waits until the newcomer is final.
result<int> session_cache::parts::extend_whole(state& s, int tokens, bool draft) {
  s.overwrites = s.tokens[0].vacant();
  if (s.overwrites) {
    const keep_plan all{.form = drop_form::overwrite, .keep = s.whole.held()};
    if (status own = retain_whole(s, all, false); !own) return own.error();
  }
  // A step that was refused after an earlier extend left room behind; only what is missing is asked for. Room
  // is for tokens that stay, so a draft has no use for it.
  if (draft && s.whole.held() > s.slots()) require(s.whole.truncate(s.slots()).error());
  const int room = s.whole.held() - s.slots();
  const int wanted = std::max(0, tokens - (s.overwrites ? 1 : 0) - room);
  const auto got = s.whole.extend(wanted, draft);
  return got ? result<int>(tokens - (wanted - *got)) : to_error(got.error());
}

void session_cache::parts::count_overwritten(state& s) {
  if (!s.overwrites) return;
  s.overwrites = false;
  require(s.whole.retain({.form = drop_form::overwrite, .keep = s.whole.held()}, 1).error());
}

result<int> session_cache::parts::extend(state& s, int tokens, bool draft) {
  if (!s.split()) return extend_whole(s, tokens, draft);
  for (std::size_t h = 0; h < s.heads.size(); ++h) {
    const int room = s.heads[h].held() - s.tokens[h].slots();
    auto got = s.heads[h].extend(std::max(0, tokens - room), draft);
    if (!got && got.error().code == kvcache::errc::busy) {
      run_split_commands();  // copies on write of many heads
      got = s.heads[h].extend(std::max(0, tokens - room), draft);
    }
    if (got) continue;
    for (std::size_t done = 0; draft && done < h; ++done) (void)s.heads[done].accept(0);
    return to_error(got.error());
  }
  return tokens;
}

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

kv_backend& session_cache::backend() {
  return *parts_;
}

cache_bytes session_cache::bytes() const {
  table_census whole(parts_->whole.shape());
  std::optional<table_census> heads;
  if (parts_->heads) heads.emplace(parts_->heads->shape());
  for (const session::state* s : parts_->by_slot) {
    if (s == nullptr) continue;
    if (!s->split()) whole.add(s->whole, s->slots());
    for (std::size_t h = 0; h < s->heads.size(); ++h) heads->add(s->heads[h], s->tokens[h].slots());
  }
  cache_bytes total = whole.total();
  if (!heads) return total;
  total.held += heads->total().held;
  total.reserved += heads->total().reserved;
  return total;
}

cache_counts session_cache::counts() const {
  const kvcache::group_geometry& g = parts_->whole.shape().group[0];
  cache_counts out;
  out.block_bytes = static_cast<std::size_t>(kvcache::block_bytes(g.shape, g.block_size, g.format).count);
  const auto add = [&out](const kvcache::cache& c, std::int64_t parts) {
    const kvcache::stats n = c.count();
    const auto blocks = [&](std::int64_t count) { return kvcache::ceil_div(count, parts); };
    out.blocks_total += blocks(c.pool().total_blocks());
    out.blocks_used += blocks(c.pool().used_blocks());
    out.blocks_cached += blocks(c.pool().cached_blocks());
    out.evictions += static_cast<std::int64_t>(n.nodes_evicted);
    out.copies += blocks(static_cast<std::int64_t>(n.blocks_copied));
  };
  add(parts_->whole, 1);
  if (parts_->heads) add(*parts_->heads, parts_->head_count());
  return out;
}

std::size_t session_cache::bytes_used() const {
  std::int64_t sum = 0;
  const auto add = [&sum](const auto& pool, kvcache::bytes block) {
    sum += (std::int64_t{pool.used_blocks()} + pool.cached_blocks()) * block.count;
  };
  const auto add_cache = [&](const kvcache::cache& c) {
    for (int g = 0; g < c.shape().groups; ++g) {
      const kvcache::group_geometry& x = c.shape().group[g];
      add(c.pool(g), kvcache::block_bytes(x.shape, x.block_size, x.format));
    }
  };
  add_cache(parts_->whole);
  if (parts_->heads) add_cache(*parts_->heads);
  return static_cast<std::size_t>(sum);
}

const char* session_cache::check() const {
  const char* broken = parts_->whole.check_invariants();
  return broken != nullptr || !parts_->heads ? broken : parts_->heads->check_invariants();
}

}  // namespace engine
