// SPDX-License-Identifier: Apache-2.0
// Packed blocks: which policies go with them, what a step says of them, and a prompt that is packed once it
// is complete.
#include <algorithm>
#include <cstring>

#include "kvcache/cache/compatible.hpp"
#include "kvcache/retain/sliding_window.hpp"
#include "kvcache/retain/streaming_llm.hpp"
#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {
namespace {

/// The first and the last tokens, in whole blocks that stay where they are.
struct block_window {
  std::int32_t sinks = 0;
  std::int32_t window = 1;

  static constexpr kvcache::observe needs = kvcache::observe::nothing;

  keep_plan plan(const kvcache::retain_lengths& n) const noexcept {
    keep_plan p;
    const std::int32_t first = (sinks + n.unit - 1) / n.unit * n.unit;
    const std::int32_t drop = (n.held - first - window) / n.unit * n.unit;
    if (drop <= 0) return p;
    p.form = drop_form::whole_blocks;
    p.keep = n.held - drop;
    p.sinks = first;
    p.recent = window;
    return p;
  }
  std::int32_t must_recompute() const noexcept { return 1; }
};

}  // namespace

kvcache::retention in_blocks(const kvcache::retention& policy, const cache_config& config) {
  kvcache::retention out = policy;
  if (!is_packed(config) || config.deferred) return out;
  const auto* window = policy.policy.get<kvcache::sliding_window>();
  const auto* streaming = policy.policy.get<kvcache::streaming_llm>();
  if (window != nullptr) out.policy = block_window{0, window->window};
  if (streaming != nullptr && streaming->positions == kvcache::streaming_llm::text_positions)
    out.policy = block_window{streaming->sinks, streaming->window};
  return out;
}

status check_together(const kvcache::retention& asked, drop_mode mode, const cache_config& config) {
  const kvcache::retention policy = in_blocks(asked, config);
  const auto refuse = [](const char* why) { return cannot_run("unsupported", "policy", why); };
  if (!is_packed(config)) return {};
  if (config.deferred && mode != drop_mode::oneshot)
    return cannot_run("unsupported", "mode",
                      std::string(name_of(mode)) + "; packing is deferred to compress()");
  if (policy.policy.get<kvcache::keep_all>() != nullptr) return {};
  if (std::any_of(config.formats.begin(), config.formats.end(),
                  [](const kvcache::kv_format& f) { return f.k_before_rope; }))
    return refuse("keys are turned by their slots when they are read; allowed: full, or rope=after");
  if (policy.budget.scope != kvcache::budget_scope::uniform)
    return refuse("a length for each head, but packed blocks hold all heads; allowed: budget=uniform");
  const auto when =
      mode == drop_mode::oneshot ? kvcache::drop_times::prompt_end : kvcache::drop_times::every_token;
  const kvcache::status fit =
      kvcache::compatible(policy, config.formats, config.block_size, config.deferred, when);
  const std::string_view field = fit ? "" : fit.field;
  // A deferred text is copied into a new one when tokens go, all of it exact: whatever comes first there
  // stays so.
  if (fit || (config.deferred && field == "sinks")) return {};
  if (field == "move_sinks")
    return refuse("sinks are moved, but codes cannot be turned; allowed: positions=text");
  if (field == "sinks")
    return refuse("exact first tokens go with their block; allowed: sinks that stay, or exempt=none");
  if (field == "sealed")
    return refuse(
        "single tokens go, but codes that were packed together stay together; allowed: the mode "
        "oneshot, or policies that drop whole blocks (window, streaming_llm)");
  return to_error(fit);
}

// What the rows need beside tables: texts on packed blocks share one table and hold slots in order.
void session_cache::parts::describe_packed() {
  extra_.begin(config.block_size, config.formats.front().exempt);
  for (const step_segment& segment : segments_) {
    const state& s = *by_slot[static_cast<std::size_t>(segment.slot)];
    extra_.add(s.whole, s.slots() - segment.rows, segment.rows);
  }
}

// A block that a text has room in, but whose last token this step does not write, must not be packed by it.
void session_cache::parts::give_back_room(std::span<const step_segment> segments) {
  for (std::size_t i = 0; i < by_slot.size(); ++i) {
    if (by_slot[i] == nullptr) continue;
    state& s = *by_slot[i];
    int slots = s.slots();
    for (const step_segment& segment : segments) {
      if (static_cast<std::size_t>(segment.slot) == i) slots += segment.rows;
    }
    if (s.whole.held() > slots) require(s.whole.truncate(slots).error());
  }
}

// The prompt is complete, and what is to go has gone: its blocks are packed, but for the newest tokens.
status session_cache::parts::pack(state& s) {
  if (!packed() || !config.deferred) return {};
  if (s.whole.held() > s.slots()) require(s.whole.truncate(s.slots()).error());
  auto done = s.whole.settle();
  if (!done && done.code == kvcache::errc::busy) {
    run_commands();
    done = s.whole.settle();
  }
  if (!done) return to_error(done);
  run_commands();
  s.seen = {};  // nothing of it can go any more
  return {};
}

namespace {

// One token of one head from block to block of planes of one type.
void copy_token(const kvc_plane& from, kvcache::block_id source, int source_offset, const kvc_plane& to,
                kvcache::block_id target, int target_offset, int head, int dim, std::size_t bytes) {
  const std::byte* a = cell(from, source, head, source_offset);
  std::byte* b = cell(to, target, head, target_offset);
  for (int d = 0; d < dim; ++d) std::memcpy(b + to.dim_stride * d, a + from.dim_stride * d, bytes);
}

}  // namespace

// What stays is copied together into open blocks of its own. kept: slots, [layers * kv_heads], as many each.
status session_cache::parts::gather_packed(state& s, const std::vector<std::vector<std::int32_t>>& kept) {
  if (s.whole.sealed() > 0) return cannot_run("unsupported", "policy", "drops from blocks that are packed");
  auto fresh = whole.open({}, scope_of(s.options.scope));
  if (!fresh) return to_error(fresh.error());
  if (const auto room = fresh->extend(static_cast<std::int32_t>(kept.front().size())); !room)
    return to_error(room.error());
  run_commands();
  const auto bytes = static_cast<std::size_t>(kvcache::element_bytes(element_of(config.type)));
  const int block = config.block_size, exempt = config.formats.front().exempt, dim = config.shape.head_dim;
  const auto open_of = [&](const kvcache::sequence& of, int slot) {
    return of.open_table()[static_cast<std::size_t>(slot / block)];
  };
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    const kvc_kv& kv = whole_planes.layer(layer);
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      const auto& list = kept[s.index(layer, h)];
      for (int t = 0; t < static_cast<int>(list.size()); ++t) {
        const int slot = list[static_cast<std::size_t>(t)];
        const kvcache::block_id from = open_of(s.whole, slot), to = open_of(*fresh, t);
        copy_token(kv.open_k, from, slot % block, kv.open_k, to, t % block, h, dim, bytes);
        copy_token(kv.open_v, from, slot % block, kv.open_v, to, t % block, h, dim, bytes);
        if (t >= exempt) continue;
        const kvcache::block_id copy = fresh->table(1)[0];
        copy_token(kv.open_k, from, slot % block, kv.exempt_k, copy, t, h, dim, bytes);
        copy_token(kv.open_v, from, slot % block, kv.exempt_v, copy, t, h, dim, bytes);
      }
    }
  }
  s.whole = std::move(*fresh);
  return {};
}

}  // namespace engine
