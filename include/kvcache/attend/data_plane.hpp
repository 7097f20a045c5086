// SPDX-License-Identifier: Apache-2.0
#pragma once
// The data plane's verbs for C++: the calls of kvcache.h with spans, statuses and a workspace that owns its
// memory.
//
//   auto at = attention::create(planes.layer(0), {.q_heads = 32, .sequences = 8, .rows = 512, .slots =
//   4096}); append(planes.layer(i), keys, values, slots, {.rope = &rope.view(), .positions = positions});
//   at->run(planes.layer(i), batch, queries, softmax, out);
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvcache/attend/outcome.hpp"
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/shape.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/kvcache.h"

namespace kvcache {

/// Dense rows [rows][heads][dim] of one storage type.
constexpr kvc_rows dense_rows(const void* data, element type, int32_t heads, int32_t dim) noexcept {
  const int64_t head = int64_t{dim} * element_bytes(type);
  return {data, static_cast<int32_t>(type), heads, dim, 0, head * heads, head};
}

/// Dense output [rows][heads][dim]; `lse2` is [rows][heads] or null.
constexpr kvc_out dense_out(void* data, element type, int32_t heads, int32_t dim,
                            float* lse2 = nullptr) noexcept {
  kvc_out o{};
  o.struct_size = sizeof o;
  o.type = static_cast<int32_t>(type);
  o.heads = heads;
  o.dim = dim;
  o.o = data;
  o.head_stride = int64_t{dim} * element_bytes(type);
  o.row_stride = o.head_stride * heads;
  o.lse2 = lse2;
  return o;
}

/// Sums [heads][slots], of every query head or, `grouped`, of every kv head, for one sequence; `lse2` is
/// [rows][query heads]. `stride`: elements from head to head.
constexpr kvc_score dense_score(int32_t kind, float* sum, int64_t stride, const float* lse2,
                                bool grouped = false) noexcept {
  kvc_score s{};
  s.struct_size = sizeof s;
  s.kind = kind;
  s.grouped = grouped ? 1 : 0;
  s.lse2 = lse2;
  s.sum = sum;
  s.sum_head_stride = stride;
  return s;
}

/// Causal softmax of scale * (q . k), to be adjusted field by field.
constexpr kvc_softmax causal_softmax(float scale) noexcept {
  kvc_softmax s{};
  s.struct_size = sizeof s;
  s.scale = scale;
  s.causal = 1;
  return s;
}

/// What append may do besides storing.
struct append_options {
  const kvc_rope* rope = nullptr;          ///< rotates K before it is rounded and stored
  std::span<const int32_t> positions{};    ///< text position of each row, needed with rope
  const kvc_executor* executor = nullptr;  ///< null: the calling thread
  bool slots_per_head = false;             ///< slots are [rows][kv_heads]: each head writes elsewhere
  /// Packed formats: slots in open blocks (open id * block + offset), as many as `slots` or in place of them.
  std::span<const int64_t> open_slots{};
  std::span<const int64_t> exempt_slots{};  ///< and in exempt rows (id * exempt + slot), -1 = none of them
};

/// Stores one K and one V row per entry of `slots` (block id * block + offset, -1 = skip). Where V aliases K
/// pass an empty kvc_rows for v. Fails: bad_argument or unsupported with the field; then nothing is stored.
inline status append(const kvc_kv& kv, const kvc_rows& k, const kvc_rows& v, std::span<const int64_t> slots,
                     const append_options& options = {}) noexcept {
  const size_t each = options.slots_per_head ? static_cast<size_t>(std::max(kv.kv_heads, 1)) : 1;
  const size_t entries = std::max(slots.size(), options.open_slots.size());
  const size_t rows = entries / each;
  for (const std::span<const int64_t> some : {slots, options.open_slots, options.exempt_slots}) {
    if (!some.empty() && (some.size() != entries || entries % each != 0)) {
      return {errc::bad_argument, "slot", static_cast<int64_t>(some.size())};
    }
  }
  if (options.rope != nullptr && options.positions.size() != rows) {
    return {errc::bad_argument, "pos", static_cast<int64_t>(options.positions.size())};
  }
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = static_cast<int32_t>(rows);
  a.slot_head_stride = options.slots_per_head ? 1 : 0;
  a.k = k;
  a.v = v;
  a.slot = slots.empty() && entries != 0 ? nullptr : slots.data();
  a.open_slot = options.open_slots.empty() ? nullptr : options.open_slots.data();
  a.exempt_slot = options.exempt_slots.empty() ? nullptr : options.exempt_slots.data();
  a.pos = options.positions.data();
  a.rope = options.rope;
  kvc_error e{};
  return to_status(kvc_cpu_append(&kv, &a, options.executor, &e), e);
}

/// Upper bounds and wishes of the attend calls one `attention` serves.
struct attention_config {
  int32_t q_heads = 0;               ///< a multiple of the kv heads
  int32_t sequences = 1;             ///< per call
  int32_t rows = 1;                  ///< query rows of one sequence per call
  int32_t slots = 0;                 ///< kv length of one sequence
  int32_t width = 1;                 ///< of the executor
  element q_type = element::f32;     ///< of the query rows
  element out_type = element::f32;   ///< of the results
  int32_t target = KVC_TARGET_BEST;  ///< KVC_TARGET_*: instruction set; all give the same bits
  uint32_t features = 0;             ///< KVC_USE_* bits the calls will need
};

/// A plan with its workspace: made once per geometry, used for every layer and step.
/// Memory: plan().workspace_bytes, taken at creation. Thread safety: one call at a time.
class attention {
 public:
  attention() noexcept = default;

  /// Fails: unsupported or bad_argument with the field, out_of_memory.
  static result<attention> create(const kvc_kv& geometry, const attention_config& c) noexcept {
    kvc_plan_in in{};
    in.struct_size = sizeof in;
    in.kv = &geometry;
    in.q_heads = c.q_heads;
    in.q_type = static_cast<int32_t>(c.q_type);
    in.out_type = static_cast<int32_t>(c.out_type);
    in.n = c.sequences;
    in.max_q = c.rows;
    in.max_kv = c.slots;
    in.width = c.width;
    in.target = c.target;
    in.features = c.features;
    attention a;
    a.plan_.struct_size = sizeof a.plan_;
    kvc_error e{};
    if (const status s = to_status(kvc_cpu_plan(&in, &a.plan_, &e), e); !s) return s;
    if (!a.workspace_.create(a.plan_.workspace_bytes)) {
      return status{errc::out_of_memory, "workspace", static_cast<int64_t>(a.plan_.workspace_bytes)};
    }
    return a;
  }

  /// Attention of all rows of the batch. Fails with the field; then nothing is written.
  status run(const kvc_kv& kv, const kvc_batch& batch, const kvc_rows& q, const kvc_softmax& softmax,
             const kvc_out& out, const kvc_executor* executor = nullptr) noexcept {
    kvc_error e{};
    const kvc_buf workspace{workspace_.data(), workspace_.size()};
    return to_status(kvc_cpu_attend(&plan_, &kv, &batch, &q, &softmax, &out, workspace, executor, &e), e);
  }

  /// Adds what keys got of the batch's rows to score.sum: weights, squares or hits, in the order of the rows.
  /// `q` may be empty where score.key_score has what `run` stored. Fails with the field; then nothing is
  /// written. Cost: with key_score an exponential per row, query head and slot; without, K is read once per
  /// 96 rows and query heads, and a score computed for each.
  status score(const kvc_kv& kv, const kvc_batch& batch, const kvc_rows& q, const kvc_softmax& softmax,
               const kvc_score& score, const kvc_executor* executor = nullptr) noexcept {
    kvc_error e{};
    const kvc_buf workspace{workspace_.data(), workspace_.size()};
    return to_status(kvc_cpu_score(&plan_, &kv, &batch, &q, &softmax, &score, workspace, executor, &e), e);
  }

  /// The checked plan: bounds, instruction set, workspace.
  const kvc_plan& plan() const noexcept { return plan_; }

 private:
  kvc_plan plan_{};
  fixed_array<std::byte> workspace_;
};

/// Joins results over disjoint keys (all with lse2). `sink_logit`: [heads] or null, counted once, here.
inline status merge(std::span<const kvc_out> parts, int32_t rows, const kvc_out& out,
                    const float* sink_logit = nullptr) noexcept {
  kvc_error e{};
  const auto n = static_cast<int32_t>(parts.size());
  return to_status(kvc_cpu_merge(parts.data(), n, rows, sink_logit, &out, &e), e);
}

/// Payload and options of a command list.
struct run_options {
  std::span<const int32_t> ids{};          ///< payload of gather commands
  std::span<const kvc_keep> keeps{};       ///< keep-lists they name
  const kvc_rope* rope = nullptr;          ///< needed by rotate commands
  const kvc_executor* executor = nullptr;  ///< null: the calling thread
};

/// Runs queued commands over all layers, stage by stage. Fails with the field before any byte has moved.
inline status run(std::span<const kvc_kv> layers, std::span<const kvc_command> commands,
                  const run_options& options = {}) noexcept {
  kvc_run r{};
  r.struct_size = sizeof r;
  r.layers = layers.data();
  r.n_layers = static_cast<int32_t>(layers.size());
  r.commands = commands.data();
  r.n_commands = static_cast<int32_t>(commands.size());
  r.ids = options.ids.data();
  r.n_ids = static_cast<int32_t>(options.ids.size());
  r.keeps = options.keeps.data();
  r.n_keeps = static_cast<int32_t>(options.keeps.size());
  r.rope = options.rope;
  kvc_error e{};
  return to_status(kvc_cpu_run(&r, options.executor, &e), e);
}

}  // namespace kvcache
