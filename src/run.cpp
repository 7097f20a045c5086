// SPDX-License-Identifier: Apache-2.0
// The command list: everything is checked first, then stage by stage each (command, layer) is one item.
#include <algorithm>

#include "check.hpp"
#include "element.hpp"
#include "rope.hpp"
#include "seal.hpp"
#include "workers.hpp"

namespace kvcache::detail {
namespace {

constexpr int32_t most_width = 1 << 12;

/// Copies `tokens` x `dim` values between two cells, converting if the types differ. The inner loop follows
/// the direction in which the target is dense.
void copy_cell(const kvc_plane& from, const std::byte* src, const kvc_plane& to, std::byte* dst,
               int32_t tokens, int32_t dim) noexcept {
  const bool by_token = to.token_stride < to.dim_stride;
  const int32_t outer = by_token ? dim : tokens, inner = by_token ? tokens : dim;
  const int64_t fo = by_token ? from.dim_stride : from.token_stride;
  const int64_t fi = by_token ? from.token_stride : from.dim_stride;
  const int64_t to_o = by_token ? to.dim_stride : to.token_stride;
  const int64_t ti = by_token ? to.token_stride : to.dim_stride;
  const int64_t element = element_size(to.type);
  const bool dense_run = from.type == to.type && fi == element && ti == element;
  for (int32_t o = 0; o < outer; ++o) {
    const std::byte* s = src + o * fo;
    std::byte* d = dst + o * to_o;
    if (dense_run) {
      std::memmove(d, s, static_cast<size_t>(inner * element));
    } else if (from.type == to.type) {
      for (int32_t i = 0; i < inner; ++i) std::memcpy(d + i * ti, s + i * fi, static_cast<size_t>(element));
    } else {
      for (int32_t i = 0; i < inner; ++i) store(d + i * ti, to.type, load(s + i * fi, from.type));
    }
  }
}

void zero_cell(const kvc_plane& p, std::byte* cell_start, int32_t tokens, int32_t dim) noexcept {
  const bool by_token = p.token_stride < p.dim_stride;
  const int32_t outer = by_token ? dim : tokens, inner = by_token ? tokens : dim;
  const int64_t so = by_token ? p.dim_stride : p.token_stride, si = by_token ? p.token_stride : p.dim_stride;
  const int64_t element = element_size(p.type);
  for (int32_t o = 0; o < outer; ++o) {
    for (int32_t i = 0; i < inner; ++i) {
      std::memset(cell_start + o * so + i * si, 0, static_cast<size_t>(element));
    }
  }
}

/// Calls f(from plane, to plane, dim) for K and, where it is stored, V; not for a target that holds codes.
template <class F>
void each_plane(const kvc_kv& kv, bool from_open, bool to_open, F&& f) noexcept {
  if (to_open || !is_code(kv.k.type)) f(from_open ? kv.open_k : kv.k, to_open ? kv.open_k : kv.k, kv.dim_k);
  if (kv.v.data == nullptr || (!to_open && is_code(kv.v.type))) return;
  f(from_open ? kv.open_v : kv.v, to_open ? kv.open_v : kv.v, kv.dim_v);
}

void copy_block(const kvc_kv& kv, const kvc_command& c) noexcept {
  const bool from_open = c.op != KVC_OP_COPY, to_open = c.op == KVC_OP_COPY_OPEN;
  if (from_open == to_open && c.src == c.dst) return;
  if (c.op == KVC_OP_COPY && packs(kv)) copy_codes(kv, c);
  if (c.op == KVC_OP_SEAL && packs(kv)) seal_codes(kv, c);
  each_plane(kv, from_open, to_open, [&](const kvc_plane& from, const kvc_plane& to, int32_t dim) noexcept {
    for (int32_t h = 0; h < kv.kv_heads; ++h) {
      copy_cell(from, cell(from, c.src, h, 0), to, cell(to, c.dst, h, 0), c.tokens, dim);
    }
  });
}

void zero_block(const kvc_kv& kv, const kvc_command& c) noexcept {
  each_plane(kv, false, false, [&](const kvc_plane&, const kvc_plane& to, int32_t dim) noexcept {
    for (int32_t h = 0; h < kv.kv_heads; ++h) zero_cell(to, cell(to, c.dst, h, 0), c.tokens, dim);
  });
}

void rotate_block(const kvc_kv& kv, const kvc_command& c, const rotation& turning) noexcept {
  float angles[max_dim], x[max_dim];
  const float* cos_sin = turning.cos_sin(c.arg, angles);
  for (int32_t h = 0; h < kv.kv_heads; ++h) {
    for (int32_t t = 0; t < c.tokens; ++t) {
      std::byte* p = cell(kv.k, c.dst, h, t);
      for (int32_t d = 0; d < kv.dim_k; ++d) x[d] = load(p + d * kv.k.dim_stride, kv.k.type);
      turning.turn(x, cos_sin);
      for (int32_t d = 0; d < kv.dim_k; ++d) store(p + d * kv.k.dim_stride, kv.k.type, x[d]);
    }
  }
}

/// The payload of a gather command.
struct gather {
  int32_t n_src, n_dst;
  const kvc_keep* keep;
  const int32_t *src, *dst;

  gather(const kvc_run& run, const kvc_command& c) noexcept {
    const int32_t* p = run.ids + c.arg;
    n_src = p[0];
    n_dst = p[1];
    keep = run.keeps + p[2];
    src = p + 3;
    dst = src + n_src;
  }
  const int32_t* list(int64_t layer, int64_t head) const noexcept {
    return keep->slots + layer * keep->layer_stride + head * keep->head_stride;
  }
};

/// Slot by slot in ascending order: a kept slot never lies before the place it goes to, so a run may be
/// gathered into itself. Codes cannot be moved slot by slot: there it is open blocks that are gathered.
void gather_blocks(const kvc_run& run, int64_t layer, const kvc_command& c) noexcept {
  const kvc_kv& kv = run.layers[layer];
  const gather g(run, c);
  const bool open = packs(kv);
  each_plane(kv, open, open, [&](const kvc_plane& from, const kvc_plane& to, int32_t dim) noexcept {
    for (int32_t h = 0; h < kv.kv_heads; ++h) {
      const int32_t* kept = g.list(layer, h);
      for (int32_t t = 0; t < c.tokens; ++t) {
        const std::byte* s = cell(from, g.src[kept[t] / kv.block], h, kept[t] % kv.block);
        std::byte* d = cell(to, g.dst[t / kv.block], h, t % kv.block);
        if (s != d) copy_cell(from, s, to, d, 1, dim);
      }
    }
  });
}

bool moves(const kvc_kv& kv, const kvc_command& c) noexcept {
  return kv.group == c.group && kv.owner == 0;
}

void run_command(const kvc_run& run, const kvc_command& c, int64_t layer, const rotation* turning) noexcept {
  const kvc_kv& kv = run.layers[layer];
  if (!moves(kv, c)) return;
  switch (c.op) {
    case KVC_OP_ZERO:
      return zero_block(kv, c);
    case KVC_OP_ROTATE:
      return rotate_block(kv, c, *turning);
    case KVC_OP_GATHER:
      return gather_blocks(run, layer, c);
    default:
      return copy_block(kv, c);
  }
}

// ---- checks ----

kvc_status check_id(int32_t id, int32_t blocks, int32_t field, int64_t at, kvc_error* error) noexcept {
  return id >= 0 && id < blocks ? KVC_OK : fail(error, KVC_BAD_ARGUMENT, field, id, at);
}

/// Lists ascending, inside the source run, one per head and layer.
kvc_status check_keep(const gather& g, const kvc_kv& kv, int64_t layer, int32_t tokens, int64_t at,
                      kvc_error* error) noexcept {
  const int64_t end = int64_t{g.n_src} * kv.block;
  for (int32_t h = 0; h < (g.keep->head_stride != 0 ? kv.kv_heads : 1); ++h) {
    const int32_t* kept = g.list(layer, h);
    for (int32_t t = 0; t < tokens; ++t) {
      if (kept[t] < 0 || kept[t] >= end || (t > 0 && kept[t] <= kept[t - 1])) {
        return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KEEP, kept[t], at);
      }
    }
  }
  return KVC_OK;
}

/// A target may be a source of the same run only at the same place or later: else it would be overwritten
/// before it is read.
kvc_status check_gather_ids(const gather& g, const kvc_kv& kv, int64_t at, kvc_error* error) noexcept {
  const int32_t blocks = packs(kv) ? kv.open_blocks : kv.blocks;
  for (int32_t i = 0; i < g.n_src; ++i) KVC_TRY(check_id(g.src[i], blocks, KVC_FIELD_SRC, at, error));
  for (int32_t i = 0; i < g.n_dst; ++i) {
    KVC_TRY(check_id(g.dst[i], blocks, KVC_FIELD_DST, at, error));
    for (int32_t j = i + 1; j < g.n_src; ++j) {
      if (g.src[j] == g.dst[i]) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_DST, g.dst[i], at);
    }
  }
  return KVC_OK;
}

kvc_status check_gather(const kvc_run& run, const kvc_command& c, int64_t layer, int64_t at,
                        kvc_error* error) noexcept {
  const kvc_kv& kv = run.layers[layer];
  if (run.ids == nullptr || c.arg < 0 || c.arg > run.n_ids - 3) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ARG, c.arg, at);
  }
  const int32_t* p = run.ids + c.arg;
  if (p[0] < 1 || p[1] < 0 || int64_t{p[0]} + p[1] > int64_t{run.n_ids} - c.arg - 3) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_IDS, p[0], at);
  }
  if (run.keeps == nullptr || p[2] < 0 || p[2] >= run.n_keeps) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KEEP, p[2], at);
  }
  const gather g(run, c);
  if (g.keep->slots == nullptr || g.keep->head_stride < 0 || g.keep->layer_stride < 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KEEP, p[2], at);
  }
  if (c.tokens < 0 || c.tokens > int64_t{g.n_dst} * kv.block) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS, c.tokens, at);
  }
  KVC_TRY(check_gather_ids(g, kv, at, error));
  return check_keep(g, kv, layer, c.tokens, at, error);
}

kvc_status check_command(const kvc_run& run, const kvc_command& c, int64_t layer, int64_t at,
                         kvc_error* error) noexcept {
  const kvc_kv& kv = run.layers[layer];
  if (c.op > KVC_OP_GATHER) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OP, c.op, at);
  if (c.op == KVC_OP_GATHER) return check_gather(run, c, layer, at, error);
  if (c.tokens < 0 || c.tokens > kv.block)
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS, c.tokens, at);
  const bool from_open = c.op == KVC_OP_COPY_OPEN || c.op == KVC_OP_SEAL;
  const bool to_open = c.op == KVC_OP_COPY_OPEN;
  // A block of codes is written as a whole; codes have no slots to be zeroed, moved or turned one by one.
  const bool codes = packs(kv) && !to_open;
  if (codes && c.op != KVC_OP_SEAL && c.op != KVC_OP_COPY)
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OP, c.op, at);
  if (codes && c.tokens != kv.block) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS, c.tokens, at);
  if (from_open && kv.open_blocks == 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_K, 0, at);
  if (from_open || c.op == KVC_OP_COPY) {
    KVC_TRY(check_id(c.src, from_open ? kv.open_blocks : kv.blocks, KVC_FIELD_SRC, at, error));
  }
  KVC_TRY(check_id(c.dst, to_open ? kv.open_blocks : kv.blocks, KVC_FIELD_DST, at, error));
  if (codes && c.op == KVC_OP_SEAL && (c.arg < 0 || c.arg > kv.exempt)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ARG, c.arg, at);
  }
  if (c.op != KVC_OP_ROTATE) return KVC_OK;
  // Keys that are turned when they are read are moved by other positions.
  if (kv.k_rope != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OP, c.op, at);
  return check_rope(run.rope, kv.dim_k, error);
}

struct open_slot {
  int32_t block, slot;
};

/// Whether a command fills a slot of the open space of a packed layer; `from` becomes where it takes it.
bool fills(const kvc_run& run, const kvc_command& c, int64_t layer, int32_t head, open_slot at,
           open_slot& from) noexcept {
  const int32_t block = run.layers[layer].block;
  if (c.op == KVC_OP_COPY_OPEN) {
    from = {c.src, at.slot};
    return c.dst == at.block && at.slot < c.tokens;
  }
  if (c.op != KVC_OP_GATHER) return false;
  const gather g(run, c);
  for (int32_t i = 0; i < g.n_dst; ++i) {
    const int64_t t = int64_t{i} * block + at.slot;
    if (g.dst[i] != at.block || t >= c.tokens) continue;
    const int32_t kept = g.list(layer, head)[t];
    from = {g.src[kept / block], kept % block};
    return true;
  }
  return false;
}

/// Where the slot's values lie now that it will hold when stage `stage` begins.
open_slot origin(const kvc_run& run, int64_t layer, int32_t head, int32_t stage, open_slot at) noexcept {
  for (int32_t reached = stage; reached >= 0; stage = reached) {
    reached = -1;
    open_slot found = at;
    for (int32_t i = 0; i < run.n_commands; ++i) {
      const kvc_command& c = run.commands[i];
      open_slot from{};
      if (c.stage >= stage || c.stage <= reached || !moves(run.layers[layer], c)) continue;
      if (!fills(run, c, layer, head, at, from)) continue;
      found = from;
      reached = c.stage;
    }
    at = found;
  }
  return at;
}

/// The values that a packed layer's KVC_OP_SEAL will find: those of its block now, unless earlier commands
/// fill it. Requires: all commands are checked.
kvc_status check_values(const kvc_run& run, const kvc_command& c, int64_t layer, int64_t at,
                        kvc_error* error) noexcept {
  const kvc_kv& kv = run.layers[layer];
  const auto may_fill = [&](const kvc_command& other) {
    const bool open = other.op == KVC_OP_GATHER || (other.op == KVC_OP_COPY_OPEN && other.dst == c.src);
    return open && other.stage < c.stage && moves(kv, other);
  };
  if (std::none_of(run.commands, run.commands + run.n_commands, may_fill)) {
    return check_seal(kv, c, at, error);
  }
  for (const bool keys : {true, false}) {
    for (int32_t h = 0; h < kv.kv_heads; ++h) {
      for (int32_t t = c.arg; t < kv.block; ++t) {
        const open_slot from = origin(run, layer, h, c.stage, {c.src, t});
        const int32_t d = find_unpackable(kv, keys, from.block, h, from.slot);
        if (d < 0) continue;
        const int64_t value = int64_t{t} * (keys ? kv.dim_k : kv.dim_v) + d;
        return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_VALUE, value, at);
      }
    }
  }
  return KVC_OK;
}

kvc_status check_run(const kvc_run* run, kvc_error* error) noexcept {
  KVC_TRY(check_struct(run, KVC_FIELD_COMMANDS, error));
  if (run->n_layers < 0 || (run->layers == nullptr && run->n_layers > 0)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, run->n_layers);
  }
  if (run->n_commands < 0 || (run->commands == nullptr && run->n_commands > 0)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_COMMANDS, run->n_commands);
  }
  if (run->rope != nullptr) KVC_TRY(check_rope(run->rope, max_dim, error));
  for (int64_t l = 0; l < run->n_layers; ++l) {
    const kvc_kv& kv = run->layers[l];
    const kvc_status s = check_kv(&kv, true, error);
    if (s != KVC_OK) return error != nullptr ? error->index = l, s : s;
    if (kv.owner < 0 || kv.owner > run->n_layers) {
      return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, kv.owner, l);
    }
  }
  for (int64_t i = 0; i < run->n_commands; ++i) {
    bool any = false;
    for (int64_t l = 0; l < run->n_layers; ++l) {
      if (!moves(run->layers[l], run->commands[i])) continue;
      any = true;
      KVC_TRY(check_command(*run, run->commands[i], l, i, error));
    }
    // A command no layer answers to would be lost without a word.
    if (!any) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, run->commands[i].group, i);
  }
  for (int64_t i = 0; i < run->n_commands; ++i) {
    for (int64_t l = 0; l < run->n_layers && run->commands[i].op == KVC_OP_SEAL; ++l) {
      if (!moves(run->layers[l], run->commands[i]) || !packs(run->layers[l])) continue;
      KVC_TRY(check_values(*run, run->commands[i], l, i, error));
    }
  }
  return KVC_OK;
}

/// Smallest stage above `after`, or -1.
int32_t next_stage(const kvc_run& run, int32_t after) noexcept {
  int32_t next = -1;
  for (int32_t i = 0; i < run.n_commands; ++i) {
    const int32_t stage = run.commands[i].stage;
    if (stage > after && (next < 0 || stage < next)) next = stage;
  }
  return next;
}

}  // namespace
}  // namespace kvcache::detail

using namespace kvcache::detail;

kvc_status kvc_cpu_run(const kvc_run* run, const kvc_executor* executor, kvc_error* error) {
  KVC_TRY(check_run(run, error));
  KVC_TRY(check_executor(executor, error));
  const kvc_rope still{};
  const rotation turning(run->rope != nullptr ? *run->rope : still);
  for (int32_t stage = next_stage(*run, -1); stage >= 0; stage = next_stage(*run, stage)) {
    auto one = [&](int32_t, int64_t item) noexcept {
      const kvc_command& c = run->commands[item / run->n_layers];
      if (c.stage == stage) run_command(*run, c, item % run->n_layers, &turning);
    };
    for_each_item(executor, most_width, int64_t{run->n_commands} * run->n_layers, one);
  }
  return KVC_OK;
}
