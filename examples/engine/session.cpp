// SPDX-License-Identifier: Apache-2.0
// A text from beginning to end, and questions about it.
#include "session.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {

session::state::~state() {
  if (cache != nullptr && slot >= 0) cache->by_slot[static_cast<std::size_t>(slot)] = nullptr;
}

std::size_t session::state::index(int layer, int kv_head) const {
  return static_cast<std::size_t>(layer * cache->config.shape.kv_heads + kv_head);
}

std::int64_t session::state::tokens_held() const {
  std::int64_t n = 0;
  for (const head_slots& h : tokens) n += h.size();
  return n;
}

session::session(std::unique_ptr<state> s) : state_(std::move(s)) {}
session::session(session&&) noexcept = default;
session& session::operator=(session&&) noexcept = default;
session::~session() = default;

const char* name_of(drop_mode mode) {
  if (mode == drop_mode::stream) return "stream";
  return mode == drop_mode::oneshot ? "oneshot" : "out_of_blocks";
}

// Whole blocks go whatever lies in them, so such a policy can keep a pinned token only among its sinks.
static status check_pinned(const std::vector<int>& pinned, const kvcache::retention& policy, int unit) {
  for (std::size_t i = 0; i < pinned.size(); ++i) {
    if (pinned[i] < 0 || (i > 0 && pinned[i] <= pinned[i - 1]))
      return bad_input("bad_value", "pinned", std::to_string(pinned[i]));
  }
  const keep_plan late =
      policy.policy.plan({.held = 1 << 28, .incoming = 0, .unit = unit, .prefill_end = true});
  if (late.form == drop_form::whole_blocks && !pinned.empty() && pinned.back() >= late.sinks)
    return bad_input("unsupported", "pinned", std::to_string(pinned.back()) + ", whole blocks go");
  return {};
}

// How much of the prompt may come from the cache: tokens of it that are looked up, and of these, how many
// must be computed here all the same. A stream would have dropped behind its first drop; and what the policy
// must see by the time it drops, or all if everything is remembered, has to be computed.
std::pair<int, int> session_cache::parts::reusable(const kvcache::retention& what,
                                                   const session_options& with) const {
  int usable = static_cast<int>(with.prompt.size());
  if (packed() && config.deferred) return {0, 0};  // packed by others, where this text would read it exactly
  if (with.mode == drop_mode::stream) usable = rows_until_drop(what, 0, usable);
  const bool at_any_time =
      with.mode == drop_mode::out_of_blocks && what.policy.needs() != kvcache::observe::nothing;
  return {usable, with.remember || at_any_time ? usable : std::min(usable, what.policy.must_recompute())};
}

result<session> session::create(llama_model& model, session_cache& cache, const kvcache::retention& asked,
                                const session_options& options) {
  session_cache::parts& parts = *cache.parts_;
  const kvcache::retention policy = in_blocks(asked, parts.config);
  if (status s = check_pinned(options.pinned, policy, parts.config.block_size); !s) return s.error();
  if (status s = check_together(policy, options.mode, parts.config); !s) return s.error();
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
  const auto [usable, recompute] = parts.reusable(policy, options);
  auto opened =
      parts.whole.open(options.prompt.first(static_cast<std::size_t>(usable)), scope_of(options.scope),
                       {.account = 0, .recompute = std::max(1, recompute)});
  if (!opened) return to_error(opened.error());
  s->whole = std::move(*opened);
  s->reused = s->position = s->whole.reused();
  s->tokens.assign(static_cast<std::size_t>(parts.head_count()), head_slots(s->reused));
  s->seen =
      attention_observer(parts.config.shape, policy.policy.needs(), policy.policy.watch(), options.remember);
  s->slot = static_cast<int>(free - parts.by_slot.begin());
  *free = s.get();
  return session(std::move(s));
}

int session::reused() const {
  return state_->reused;
}

result<session> session::fork() const {
  auto made = copy();
  if (made) made->state_->seen = state_->seen;
  return made;
}

// Without what the policy saw, which can be every query.
result<session> session::copy() const {
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
  s->tokens = from.tokens;
  s->due = from.due;
  s->position = from.position;
  s->reused = from.reused;
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

result<session> session::fork_as(const kvcache::retention& asked, drop_mode mode) const {
  const kvcache::retention policy = in_blocks(asked, state_->cache->config);
  if (!state_->options.remember) return cannot_run("unsupported", "remember", "false");
  if (dropped() > 0) return cannot_run("unsupported", "dropped", std::to_string(dropped()));
  if (mode == drop_mode::stream && policy.policy
                                           .plan({.held = state_->mean_held(),
                                                  .incoming = 0,
                                                  .unit = state_->cache->config.block_size,
                                                  .prefill_end = false})
                                           .form != drop_form::nothing)
    return cannot_run("unsupported", "mode", "stream, behind the first drop");
  if (status s = check_pinned(state_->options.pinned, policy, state_->cache->config.block_size); !s)
    return s.error();
  if (status s = check_together(policy, mode, state_->cache->config); !s) return s.error();
  auto made = copy();
  if (!made) return made;
  state& s = *made->state_;
  s.what = policy;
  s.options.mode = mode;
  s.options.remember = false;
  s.due = false;
  s.seen = attention_observer(s.cache->config.shape, policy.policy.needs(), policy.policy.watch(), false);
  if (!s.seen.active()) return made;
  for (int layer = 0; layer < s.cache->config.shape.layers; ++layer)
    s.seen.replay(layer, state_->seen, s.cache->keys_of(s, layer));
  return made;
}

result<int> session::commit(std::span<const token_id> text) {
  if (dropped() > 0) return 0;
  const auto done =
      state_->whole.commit(text.first(std::min(text.size(), static_cast<std::size_t>(state_->position))));
  if (!done) return state_->split() ? result<int>(0) : result<int>(to_error(done.error()));
  return *done;
}

int session::slot() const {
  return state_->slot;
}

void session::read(int layer, int position, float* k, float* v) const {
  const session_cache::parts& parts = *state_->cache;
  const kvc_kv& kv = state_->split() ? parts.head_planes.layer(0) : parts.whole_planes.layer(layer);
  const int block = parts.config.block_size;
  for (int h = 0; h < parts.config.shape.kv_heads; ++h) {
    const std::size_t index = state_->index(layer, h);
    const auto held = state_->tokens[index].positions();
    const auto at = std::lower_bound(held.begin(), held.end(), position);
    const bool here = at != held.end() && *at == position;
    const int slot = here ? state_->tokens[index].slot_of(static_cast<int>(at - held.begin())) : 0;
    const kvcache::sequence& table = state_->split() ? state_->heads[index] : state_->whole;
    stored_token where{.slot = slot};
    if (here) where.block = table.table()[static_cast<std::size_t>(slot / block)];
    if (here && parts.packed()) {
      where.open = table.open_table()[static_cast<std::size_t>(slot / block)];
      if (!table.table(1).empty()) where.copy = table.table(1)[0];
    }
    const auto copy = [&](bool keys, float*& to) {
      const std::span<float> out(to, static_cast<std::size_t>(parts.config.shape.head_dim));
      to += out.size();
      std::fill(out.begin(), out.end(), std::numeric_limits<float>::quiet_NaN());
      if (here)
        read_token(kv, format_of(parts.config, layer), parts.config.type, keys, state_->split() ? 0 : h,
                   where, out);
    };
    copy(true, k);
    copy(false, v);
  }
}

int session::position() const {
  return state_->position;
}

int session::dropped() const {
  const int computed = state_->position + (state_->drafting ? state_->drafted : 0);
  const std::int64_t all = std::int64_t{computed} * static_cast<std::int64_t>(state_->tokens.size());
  return static_cast<int>((all - state_->tokens_held()) / static_cast<std::int64_t>(state_->tokens.size()));
}

std::span<const int> session::kept(int layer, int kv_head) const {
  return state_->tokens[state_->index(layer, kv_head)].positions();
}

std::size_t session::values_kept() const {
  return static_cast<std::size_t>(state_->tokens_held()) * 2 *
         static_cast<std::size_t>(state_->cache->config.shape.head_dim);
}

std::size_t session::bytes_held() const {
  table_census whole(state_->cache->whole.shape());
  if (!state_->split()) whole.add(state_->whole, state_->slots());
  std::size_t total = whole.total().reserved;
  if (!state_->split()) return total;
  table_census heads(state_->cache->heads->shape());
  for (std::size_t h = 0; h < state_->heads.size(); ++h)
    heads.add(state_->heads[h], state_->tokens[h].slots());
  return total + heads.total().reserved;
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
