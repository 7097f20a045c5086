// SPDX-License-Identifier: Apache-2.0
// kvc_cuda_run: checks a whole command list, then queues it stage by stage.
#include <algorithm>

#include "host.hpp"
#include "run_params.hpp"

namespace kvcache::detail::gpu {
namespace {

bool moves(const kvc_kv& kv, const kvc_command& c) noexcept {
  return kv.group == c.group && kv.owner == 0;
}

kvc_status check_id(int32_t id, int32_t blocks, int32_t field, int64_t at, kvc_error* error) noexcept {
  return id >= 0 && id < blocks ? KVC_OK : fail(error, KVC_BAD_ARGUMENT, field, id, at);
}

kvc_status check_open_planes(const kvc_kv& kv, kvc_error* error) noexcept {
  KVC_TRY(check_plane_layout(kv.open_k, KVC_FIELD_OPEN_K, error));
  return check_plane_layout(kv.open_v, KVC_FIELD_OPEN_V, error);
}

/// The payload of a gather; see kvc_command. Keep-lists lie on the device and are not followed.
struct gather {
  int32_t n_src, n_dst, keep;
  const int32_t *src, *dst;
  gather(const kvc_run& run, const kvc_command& c) noexcept
      : n_src(run.ids[c.arg]),
        n_dst(run.ids[c.arg + 1]),
        keep(run.ids[c.arg + 2]),
        src(run.ids + c.arg + 3),
        dst(src + n_src) {}
};

kvc_status check_gather(const kvc_run& run, const kvc_command& c, const kvc_kv& kv, int64_t at,
                        kvc_error* error) noexcept {
  if (run.ids == nullptr || c.arg < 0 || c.arg > run.n_ids - 3) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ARG, c.arg, at);
  }
  const int32_t n_src = run.ids[c.arg], n_dst = run.ids[c.arg + 1], keep = run.ids[c.arg + 2];
  if (n_src < 1 || n_dst < 0 || int64_t{n_src} + n_dst > int64_t{run.n_ids} - c.arg - 3) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_IDS, n_src, at);
  }
  if (int64_t{n_src} + n_dst > most_gather_ids) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_IDS, n_src, at);
  if (run.keeps == nullptr || keep < 0 || keep >= run.n_keeps || run.keeps[keep].slots == nullptr ||
      run.keeps[keep].head_stride < 0 || run.keeps[keep].layer_stride < 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KEEP, keep, at);
  }
  if (c.tokens < 0 || c.tokens > int64_t{n_dst} * kv.block) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS, c.tokens, at);
  }
  // Codes cannot be moved slot by slot: there it is open blocks that are gathered.
  const int32_t blocks = packs(kv) ? kv.open_blocks : kv.blocks;
  if (packs(kv)) KVC_TRY(check_open_planes(kv, error));
  const gather g(run, c);
  for (int32_t i = 0; i < n_src; ++i) KVC_TRY(check_id(g.src[i], blocks, KVC_FIELD_SRC, at, error));
  for (int32_t i = 0; i < n_dst; ++i) {
    KVC_TRY(check_id(g.dst[i], blocks, KVC_FIELD_DST, at, error));
    // It would be overwritten before it is read.
    if (i + 1 < n_src && std::find(g.src + i + 1, g.src + n_src, g.dst[i]) != g.src + n_src) {
      return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_DST, g.dst[i], at);
    }
  }
  return KVC_OK;
}

kvc_status check_command(const kvc_run& run, const kvc_command& c, const kvc_kv& kv, int64_t at,
                         kvc_error* error) noexcept {
  if (c.op > KVC_OP_GATHER) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OP, c.op, at);
  if (c.op == KVC_OP_GATHER) return check_gather(run, c, kv, at, error);
  if (c.tokens < 0 || c.tokens > kv.block) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS, c.tokens, at);
  }
  const bool from_open = c.op == KVC_OP_COPY_OPEN || c.op == KVC_OP_SEAL, to_open = c.op == KVC_OP_COPY_OPEN;
  // A block of codes is written as a whole; codes have no slots to be zeroed, moved or turned one by one.
  const bool codes = packs(kv) && !to_open;
  if (codes && c.op != KVC_OP_SEAL && c.op != KVC_OP_COPY) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OP, c.op, at);
  }
  if (codes && c.tokens != kv.block) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS, c.tokens, at);
  if (from_open && kv.open_blocks == 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_K, 0, at);
  if (from_open) KVC_TRY(check_open_planes(kv, error));
  if (from_open || c.op == KVC_OP_COPY) {
    KVC_TRY(check_id(c.src, from_open ? kv.open_blocks : kv.blocks, KVC_FIELD_SRC, at, error));
  }
  KVC_TRY(check_id(c.dst, to_open ? kv.open_blocks : kv.blocks, KVC_FIELD_DST, at, error));
  if (codes && c.op == KVC_OP_SEAL && (c.arg < 0 || c.arg > kv.exempt)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ARG, c.arg, at);
  }
  return c.op == KVC_OP_ROTATE ? check_rope(run.rope, kv.dim_k, error) : KVC_OK;
}

/// Layers of a group are moved by one launch, so they have one shape. Formats of codes may differ.
bool same_shape(const kvc_kv& a, const kvc_kv& b) noexcept {
  const auto same_type = [](const kvc_plane& x, const kvc_plane& y) {
    return x.type == y.type || is_code(x.type) || is_code(y.type);
  };
  return a.kv_heads == b.kv_heads && a.dim_k == b.dim_k && a.dim_v == b.dim_v && a.block == b.block &&
         same_type(a.k, b.k) && same_type(a.v, b.v);
}

kvc_status check_run(const kvc_run* run, kvc_error* error) noexcept {
  KVC_TRY(check_struct(run, KVC_FIELD_COMMANDS, error));
  if (run->n_layers < 0 || (run->layers == nullptr && run->n_layers > 0)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, run->n_layers);
  }
  if (run->n_commands < 0 || (run->commands == nullptr && run->n_commands > 0)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_COMMANDS, run->n_commands);
  }
  for (int64_t l = 0; l < run->n_layers; ++l) {
    const kvc_status s = check_packed_layer(run->layers + l, true, error);
    if (s != KVC_OK) return error != nullptr ? error->index = l, s : s;
  }
  for (int64_t i = 0; i < run->n_commands; ++i) {
    const kvc_kv* first = nullptr;
    for (int64_t l = 0; l < run->n_layers; ++l) {
      const kvc_kv& kv = run->layers[l];
      if (!moves(kv, run->commands[i])) continue;
      if (first == nullptr) first = &kv;
      if (!same_shape(*first, kv)) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_LAYERS, kv.group, l);
      KVC_TRY(check_command(*run, run->commands[i], kv, i, error));
    }
    if (first == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, run->commands[i].group, i);
  }
  return KVC_OK;
}

moved_layer layer_of(const kvc_kv& kv, int32_t op) noexcept {
  const bool open = op == KVC_OP_COPY_OPEN || (op == KVC_OP_GATHER && packs(kv));
  const bool from_open = open || op == KVC_OP_SEAL, to_open = open;
  return {view_of(from_open ? kv.open_k : kv.k), view_of(from_open ? kv.open_v : kv.v),
          view_of(to_open ? kv.open_k : kv.k), view_of(to_open ? kv.open_v : kv.v)};
}

/// One kind of command of one stage and group.
struct kind {
  int32_t stage = 0, op = 0, group = 0;
  bool has(const kvc_command& c) const noexcept { return c.stage == stage && c.op == op && c.group == group; }
  bool before(const kvc_command& c) const noexcept {
    if (c.stage != stage) return c.stage > stage;
    return c.op != op ? c.op > op : c.group > group;
  }
};

/// The kind that comes after `k`; false if there is none.
bool next_kind(const kvc_run& run, kind& k, bool first) noexcept {
  bool found = false;
  kind best;
  for (int32_t i = 0; i < run.n_commands; ++i) {
    const kvc_command& c = run.commands[i];
    if ((!first && !k.before(c)) || (found && best.before(c))) continue;
    best = {c.stage, c.op, c.group};
    found = true;
  }
  k = best;
  return found;
}

launch_shape blocks_of(int64_t blocks) noexcept {
  return {static_cast<uint32_t>(blocks), threads_of_block, 0};
}

/// Queues one gather over all layers. The layer's number in keep-lists counts all layers of the run.
kvc_status queue_gather(const kvc_run& run, const kvc_command& c, kvc_stream stream,
                        kvc_error* error) noexcept {
  const gather g(run, c);
  const kvc_keep& keep = run.keeps[g.keep];
  for (int32_t l = 0; l < run.n_layers; ++l) {
    const kvc_kv& kv = run.layers[l];
    if (!moves(kv, c) || c.tokens == 0) continue;
    gather_params p{};
    p.kv_heads = kv.kv_heads;
    p.bytes_k = kv.dim_k * 2;
    p.bytes_v = kv.dim_v * 2;
    p.block_shift = shift_of(kv.block);
    p.tokens = c.tokens;
    p.n_src = g.n_src;
    p.n_dst = g.n_dst;
    p.kept = keep.slots + l * keep.layer_stride;
    p.kept_head_stride = keep.head_stride;
    p.kept_layer_stride = keep.layer_stride;
    std::copy(g.src, g.src + g.n_src, p.id);
    std::copy(g.dst, g.dst + g.n_dst, p.id + g.n_src);
    for (; l < run.n_layers && moves(run.layers[l], c) && p.n_layers < layers_at_once; ++l) {
      p.layer[p.n_layers++] = layer_of(run.layers[l], c.op);
    }
    --l;
    const int64_t blocks = int64_t{p.n_layers} * 2 * p.kv_heads;
    KVC_TRY(launched(launch_gather(p, blocks_of(blocks), stream), error));
  }
  return KVC_OK;
}

/// Queues commands that `p` has, over the layers that it has.
kvc_status queue_moves(const run_params& p, int32_t op, kvc_stream stream, kvc_error* error) noexcept {
  const int64_t cells = int64_t{p.n_commands} * p.n_layers * p.kv_heads;
  if (cells == 0) return KVC_OK;
  if (op == KVC_OP_ROTATE) return launched(launch_turn(p, blocks_of(cells), stream), error);
  return launched(launch_move(p, blocks_of(2 * cells), stream), error);
}

/// The command as kernels take it; what does not read has no source.
moved_block block_of(const kvc_command& c) noexcept {
  const bool reads = c.op != KVC_OP_ZERO && c.op != KVC_OP_ROTATE;
  return {reads ? c.src : 0, c.dst, c.tokens, c.arg};
}

/// Divides the commands of a kind, and the layers they move, among launches: `add` puts a layer into `p`,
/// `queue` starts what `p` has.
template <class Params, class Add, class Queue>
kvc_status divide(const kvc_run& run, const kind& k, Params& p, Add add, Queue queue) noexcept {
  for (int32_t l = 0; l < run.n_layers;) {
    p.n_layers = 0;
    for (; l < run.n_layers && p.n_layers < layers_at_once; ++l) {
      const kvc_kv& kv = run.layers[l];
      if (kv.group == k.group && kv.owner == 0) add(kv);
    }
    p.n_commands = 0;
    for (int32_t i = 0; i < run.n_commands; ++i) {
      const kvc_command& c = run.commands[i];
      const bool same_space = k.op == KVC_OP_COPY || k.op == KVC_OP_COPY_OPEN;
      if (!k.has(c) || (same_space && c.src == c.dst)) continue;
      p.command[p.n_commands++] = block_of(c);
      if (p.n_commands < commands_at_once) continue;
      KVC_TRY(queue());
      p.n_commands = 0;
    }
    KVC_TRY(queue());
  }
  return KVC_OK;
}

kvc_status queue_kind(const kvc_run& run, const kind& k, kvc_stream stream, kvc_error* error) noexcept {
  run_params p{};
  p.zero = k.op == KVC_OP_ZERO ? 1 : 0;
  if (k.op == KVC_OP_ROTATE) p.rope = rope_of(run.rope);
  const auto add = [&](const kvc_kv& kv) noexcept {
    p.kv_heads = kv.kv_heads;
    p.bytes_k = kv.dim_k * 2;
    p.bytes_v = kv.dim_v * 2;
    p.type_k = kv.k.type;
    p.layer[p.n_layers++] = layer_of(kv, k.op);
  };
  return divide(run, k, p, add, [&]() noexcept { return queue_moves(p, k.op, stream, error); });
}

/// Whether a kind is for the kernels that write and copy codes: some layer has codes, or sealing converts.
bool needs_codes(const kvc_run& run, const kind& k) noexcept {
  if (k.op != KVC_OP_SEAL && k.op != KVC_OP_COPY) return false;
  return std::any_of(run.layers, run.layers + run.n_layers, [&](const kvc_kv& kv) {
    if (kv.group != k.group || kv.owner != 0) return false;
    const bool converts = kv.open_k.type != kv.k.type || kv.open_v.type != kv.v.type;
    return packs(kv) || (k.op == KVC_OP_SEAL && converts);
  });
}

/// Shared memory for sealing one side.
int32_t seal_bytes_of(const kvc_plane& p, int32_t tokens, int32_t dim) noexcept {
  if (!is_code(p.type)) return 0;
  const bool token = p.scale_kind == KVC_SCALE_TOKEN, channel = p.scale_kind == KVC_SCALE_CHANNEL;
  const int32_t along = token ? dim : tokens, across = token ? tokens : dim;
  const int32_t scales = token || channel ? across * ((along + p.scale_group - 1) / p.scale_group) : 1;
  return seal_shared_bytes(tokens, dim, scales);
}

kvc_status queue_codes(const kvc_run& run, const kind& k, kvc_stream stream, kvc_error* error) noexcept {
  code_params p{};
  int32_t shared = 0;
  const auto add = [&](const kvc_kv& kv) noexcept {
    p.kv_heads = kv.kv_heads;
    p.dim_k = kv.dim_k;
    p.dim_v = kv.dim_v;
    p.block = kv.block;
    shared =
        std::max({shared, seal_bytes_of(kv.k, kv.block, kv.dim_k), seal_bytes_of(kv.v, kv.block, kv.dim_v)});
    p.layer[p.n_layers++] = {view_of(kv.open_k),    view_of(kv.open_v), coded_of(kv.k, true),
                             coded_of(kv.v, false), kv.open_k.type,     kv.open_v.type};
  };
  return divide(run, k, p, add, [&]() noexcept -> kvc_status {
    const int64_t cells = int64_t{p.n_commands} * p.n_layers * p.kv_heads;
    if (cells == 0) return KVC_OK;
    launch_shape shape = blocks_of(2 * cells);
    if (k.op == KVC_OP_COPY) return launched(launch_copy_codes(p, shape, stream), error);
    shape.shared_bytes = static_cast<uint32_t>(shared);
    return launched(launch_seal(p, shape, stream), error);
  });
}

}  // namespace
}  // namespace kvcache::detail::gpu

using namespace kvcache::detail;
using namespace kvcache::detail::gpu;

kvc_status kvc_cuda_run(const kvc_run* run, kvc_stream stream, kvc_error* error) {
  KVC_TRY(check_run(run, error));
  kind k;
  for (bool first = true; next_kind(*run, k, first); first = false) {
    if (k.op != KVC_OP_GATHER) {
      KVC_TRY(needs_codes(*run, k) ? queue_codes(*run, k, stream, error)
                                   : queue_kind(*run, k, stream, error));
      continue;
    }
    for (int32_t i = 0; i < run->n_commands; ++i) {
      if (k.has(run->commands[i])) KVC_TRY(queue_gather(*run, run->commands[i], stream, error));
    }
  }
  return KVC_OK;
}
