// SPDX-License-Identifier: Apache-2.0
// kvc_cuda_plan and kvc_cuda_attend: what the host decides and checks.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "packed_host.hpp"

namespace kvcache::detail::gpu {
namespace {

constexpr int32_t usual_multiprocessors = 132;
constexpr int32_t blocks_wanted_each = 4;         ///< of threads, per multiprocessor
constexpr int32_t least_split_keys = 256;         ///< shorter splits cost more to join than they gain
constexpr int32_t fixed_split_keys = 2048;        ///< with KVC_USE_FIXED_SPLITS
constexpr int32_t most_splits = 128;              ///< where they are dealt out
constexpr int32_t most_slots = INT32_MAX - 4096;  ///< tiles are counted a little past the end
constexpr int64_t most_blocks = (int64_t{1} << 31) - 1;

constexpr uint32_t features_here = KVC_USE_WINDOW | KVC_USE_SOFT_CAP | KVC_USE_SINK | KVC_USE_LSE |
                                   KVC_USE_K_POS | KVC_USE_KEY_SCORE | KVC_USE_FIXED_SPLITS;

/// Query rows up to which a sequence is decode's even where the plan has the prefill kernel for longer ones:
/// one tile of decode. It depends on the geometry alone, so that the batch does not choose the kernel.
int32_t few_rows(const kvc_plan& p) noexcept {
  return std::max(wide_rows / (p.q_heads / p.kv_heads), 1);
}
bool with_prefill(const kvc_plan& p) noexcept {
  return p.row_block == prefill_rows(p.dim_k);
}
/// Query rows of the sequences that decode takes, and packed rows of its tiles.
int32_t decode_rows(const kvc_plan& p) noexcept {
  return with_prefill(p) ? std::min(few_rows(p), p.max_q) : p.max_q;
}
int32_t decode_tile(const kvc_plan& p) noexcept {
  if (!with_prefill(p)) return p.row_block;
  return has_wide(p.dim_k) ? wide_rows : narrow_rows;
}
int64_t tiles_of(const kvc_plan& p, int64_t rows, int64_t of_tile) noexcept {
  return (rows * (p.q_heads / p.kv_heads) + of_tile - 1) / of_tile;
}
int64_t row_tiles_of(const kvc_plan& p) noexcept {
  return tiles_of(p, decode_rows(p), decode_tile(p));
}
int64_t prefill_blocks(const kvc_plan& p, int64_t n) noexcept {
  return n * p.kv_heads * tiles_of(p, p.max_q, prefill_rows(p.dim_k));
}

/// Prefill where its blocks fill half the device; fewer are better cut along the keys, by decode. With fixed
/// splits neither batch nor bounds may choose: rows on M, and prefill wherever a sequence may be long enough.
int32_t row_block_of(const kvc_plan& p, bool packed) noexcept {
  const bool fixed = p.head_block != 0;
  if (!packed && p.max_q > few_rows(p) && (fixed || 2 * prefill_blocks(p, p.n) >= p.width)) {
    return prefill_rows(p.dim_k);
  }
  const bool wide = fixed || int64_t{p.max_q} * (p.q_heads / p.kv_heads) > narrow_rows;
  return wide && has_wide(p.dim_k) ? wide_rows : narrow_rows;
}

int64_t partial_rows(const kvc_plan& p) noexcept {
  return int64_t{p.n} * decode_rows(p) * p.q_heads;
}
int64_t partial_bytes_o(const kvc_plan& p) noexcept {
  return (partial_rows(p) * p.splits * p.dim_v * 4 + 255) / 256 * 256;
}
size_t workspace_needed(const kvc_plan& p) noexcept {
  if (p.splits <= 1) return 0;
  return static_cast<size_t>(partial_bytes_o(p) + partial_rows(p) * p.splits * 4);
}

int64_t splits_wanted(const kvc_plan& p, int64_t row_tiles) noexcept {
  if (p.head_block != 0) return std::max<int64_t>((int64_t{p.max_kv} + p.head_block - 1) / p.head_block, 1);
  const int64_t blocks = std::max<int64_t>(int64_t{p.n} * p.kv_heads * row_tiles, 1);
  const int64_t wanted = (int64_t{p.width} * blocks_wanted_each + blocks - 1) / blocks;
  return std::clamp<int64_t>(wanted, 1, std::clamp(p.max_kv / least_split_keys, 1, most_splits));
}

/// A layer of values, or of codes that the kernels can read.
kvc_status check_readable(const kvc_kv* kv, bool data, kvc_error* error) noexcept {
  KVC_TRY(check_struct(kv, KVC_FIELD_KV, error));
  if (packs(*kv)) return check_packed_attend(kv, data, error);
  KVC_TRY(check_layer(kv, data, error));
  return kv->v.type == kv->k.type ? KVC_OK : fail(error, KVC_UNSUPPORTED, KVC_FIELD_V, kv->v.type);
}

/// Queries: of the planes' type or wider; over codes of any type, rounded to f16.
kvc_status check_type(int32_t type, int32_t plane, kvc_error* error) noexcept {
  if (type == KVC_F32 || type == plane) return KVC_OK;
  if (is_code(plane) && (type == KVC_F16 || type == KVC_BF16)) return KVC_OK;
  return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TYPE, type);
}

kvc_status check_plan_in(const kvc_plan_in* in, kvc_error* error) noexcept {
  KVC_TRY(check_struct(in, KVC_FIELD_PLAN, error));
  KVC_TRY(check_readable(in->kv, false, error));
  const kvc_kv& kv = *in->kv;
  if (!has_dim(kv.dim_k)) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_DIM_K, kv.dim_k);
  if (kv.dim_v != kv.dim_k) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_DIM_V, kv.dim_v);
  if (in->q_heads < 1 || in->q_heads % kv.kv_heads != 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_Q_HEADS, in->q_heads);
  }
  KVC_TRY(check_type(in->q_type, kv.k.type, error));
  if (element_size(in->out_type) == 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TYPE, in->out_type);
  if (in->n < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_N, in->n);
  if (in->max_q < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_Q, in->max_q);
  if (in->max_kv < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_KV, in->max_kv);
  if (in->max_kv > most_slots) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_MAX_KV, in->max_kv);
  if (in->width < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_EXECUTOR, in->width);
  if ((in->features & ~features_here) != 0) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_FEATURES, in->features & ~features_here);
  }
  if (in->target != KVC_TARGET_BEST && in->target != KVC_TARGET_CUDA) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TARGET, in->target);
  }
  return KVC_OK;
}

/// Grids and workspaces that 32 bits of blocks or 63 of bytes cannot count.
kvc_status check_sizes(const kvc_plan& p, int64_t row_tiles, int64_t splits, kvc_error* error) noexcept {
  const double blocks = double(p.n) * p.kv_heads * double(row_tiles) * double(splits);
  const double rows = double(p.n) * p.max_q * p.q_heads;
  if (blocks > double(most_blocks) || rows > double(most_blocks) || splits > INT32_MAX ||
      rows * double(splits) * p.dim_v * 4 > 0x1p62) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_N, p.n);
  }
  return KVC_OK;
}

kvc_status check_plan_made(const kvc_plan* plan, const kvc_kv& kv, kvc_error* error) noexcept {
  KVC_TRY(check_struct(plan, KVC_FIELD_PLAN, error));
  if (plan->target != KVC_TARGET_CUDA) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TARGET, plan->target);
  const bool rows =
      plan->row_block == narrow_rows || plan->row_block == wide_rows || (with_prefill(*plan) && !packs(kv));
  const bool made = plan->splits >= 1 && rows && plan->n >= 0 && plan->max_q >= 1 && plan->max_kv >= 0 &&
                    plan->kv_heads >= 1 && plan->q_heads >= 1 && plan->head_block >= 0 &&
                    (plan->row_block != wide_rows || has_wide(plan->dim_k));
  if (!made) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_PLAN);
  if (plan->kv_heads != kv.kv_heads) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, kv.kv_heads);
  if (plan->dim_k != kv.dim_k) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_DIM_K, kv.dim_k);
  if (plan->dim_v != kv.dim_v) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_DIM_V, kv.dim_v);
  if (plan->block != kv.block) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK, kv.block);
  return has_dim(kv.dim_k) ? KVC_OK : fail(error, KVC_UNSUPPORTED, KVC_FIELD_DIM_K, kv.dim_k);
}

kvc_status check_batch_shape(const kvc_plan& plan, const kvc_kv& kv, const kvc_batch* b,
                             kvc_error* error) noexcept {
  KVC_TRY(check_struct(b, KVC_FIELD_BATCH, error));
  if (b->n < 0 || b->n > plan.n) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_N, b->n);
  if (b->table_columns < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TABLE_COLUMNS, b->table_columns);
  if (!packs(kv)) {
    if (b->open_table != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OPEN_TABLE);
    if (b->sealed != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_SEALED);
    if (b->row_sealed != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_ROW_SEALED);
    if (b->exempt_table != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_EXEMPT_TABLE);
  }
  for (const int64_t s : {b->table_stride, b->open_stride, b->kv_len_stride, b->kv_len_head_stride,
                          b->k_pos_stride, b->k_pos_head_stride}) {
    if (s < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, s);
  }
  if (b->n == 0) return KVC_OK;
  if (b->kv_len == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KV_LEN);
  if (b->table == nullptr && b->table_columns > 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TABLE);
  return KVC_OK;
}

kvc_status check_scores(const kvc_softmax* s, const kvc_batch& b, kvc_error* error) noexcept {
  KVC_TRY(check_struct(s, KVC_FIELD_SOFTMAX, error));
  if (!std::isfinite(s->scale)) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SCALE);
  if (!(s->soft_cap >= 0) || !std::isfinite(s->soft_cap)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SOFT_CAP);
  }
  if (s->window < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_WINDOW, s->window);
  if (s->alibi != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_ALIBI);
  if (s->mask != nullptr || s->mask_start != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_MASK);
  if ((s->causal != 0 || s->window > 0) && b.q_pos == nullptr && b.n > 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_Q_POS);
  }
  return KVC_OK;
}

kvc_status check_results(const kvc_plan& plan, const kvc_out* out, int64_t rows, kvc_error* error) noexcept {
  KVC_TRY(check_out(out, rows, plan.q_heads, plan.dim_v, true, error));
  if (out->key_score == nullptr) return KVC_OK;
  if (rows > 1 && out->key_score_stride < 1) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KEY_SCORE, out->key_score_stride);
  }
  if (plan.q_heads > 1 && out->key_score_head_stride < 1) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KEY_SCORE, out->key_score_head_stride);
  }
  return KVC_OK;
}

/// Everything but the results and the workspace.
decode_params inputs_of(const kvc_plan& plan, const kvc_kv& kv, const kvc_batch& b, const kvc_rows& q,
                        const kvc_softmax& s) noexcept {
  decode_params p{};
  p.q = array_of(q);
  p.k = view_of(kv.k);
  p.v = view_of(kv.v);
  p.table = b.table;
  p.table_stride = b.table_stride != 0 ? b.table_stride : b.table_columns;
  p.kv_len = b.kv_len;
  p.kv_len_stride = dense(b.kv_len_stride, b.kv_len_head_stride, kv.kv_heads);
  p.kv_len_head_stride = b.kv_len_head_stride;
  p.q_start = b.q_start;
  p.q_pos = b.q_pos;
  p.k_pos = b.k_pos;
  p.k_pos_stride = b.k_pos_stride;
  p.k_pos_head_stride = b.k_pos_head_stride;
  p.sink_logit = s.sink_logit;
  constexpr double log2_e = 1.44269504088896340736;
  const bool capped = s.soft_cap > 0;
  p.scale_log2 = static_cast<float>(capped ? double{s.scale} / double{s.soft_cap} : s.scale * log2_e);
  p.cap_log2 = capped ? static_cast<float>(s.soft_cap * log2_e) : 0.0f;
  p.window = s.window;
  p.causal = s.causal;
  p.n = b.n;
  p.max_q = plan.max_q;
  p.max_kv = plan.max_kv;
  p.kv_heads = kv.kv_heads;
  p.group = plan.q_heads / kv.kv_heads;
  p.table_columns = b.table_columns;
  p.blocks = kv.blocks;
  p.block_shift = shift_of(kv.block);
  p.regular = kv.block >= 16 && narrow_strides(kv.k) && narrow_strides(kv.v) ? 1 : 0;
  p.row_tiles = static_cast<int32_t>(row_tiles_of(plan));
  p.splits = plan.splits;
  p.few_rows = with_prefill(plan) ? few_rows(plan) : 0;
  p.partial_rows = decode_rows(plan);
  p.split_keys = plan.head_block;
  return p;
}

void add_results(decode_params& p, const kvc_out& out) noexcept {
  p.out = array_of(out);
  p.lse2 = out.lse2;
  p.lse_row_stride = lse_stride(out);
  p.key_score = out.key_score;
  p.key_score_stride = out.key_score_stride;
  p.key_score_head_stride = out.key_score_head_stride;
}

/// The sequences that prefill takes.
int32_t start_prefill(const kvc_plan& plan, decode_params p, const decode_choice& choice,
                      kvc_stream stream) noexcept {
  if (p.few_rows == 0 || p.q_start == nullptr) return 0;
  p.row_tiles = static_cast<int32_t>(tiles_of(plan, plan.max_q, plan.row_block));
  p.splits = 1;
  return launch_prefill(choice, p,
                        {static_cast<uint32_t>(prefill_blocks(plan, p.n)), threads_of_block,
                         static_cast<uint32_t>(prefill_shared_bytes(plan.dim_k))},
                        stream);
}

merge_params join_splits(const kvc_plan& plan, const decode_params& d) noexcept {
  merge_params m{};
  m.part[0].o = reinterpret_cast<const char*>(d.partial.o);
  m.part[0].lse2 = d.partial.lse2;
  m.n_parts = 1;
  m.splits = plan.splits;
  m.out = d.out;
  m.lse2 = d.lse2;
  m.lse_row_stride = d.lse_row_stride;
  m.sink_logit = d.sink_logit;
  m.q_start = d.q_start;
  m.max_q = d.partial_rows;
  m.only_short = d.few_rows > 0 ? 1 : 0;
  m.rows = d.n * d.partial_rows;
  m.heads = plan.q_heads;
  m.dim = plan.dim_v;
  return m;
}

}  // namespace
}  // namespace kvcache::detail::gpu

using namespace kvcache::detail;
using namespace kvcache::detail::gpu;

kvc_status kvc_cuda_plan(const kvc_plan_in* in, kvc_plan* plan, kvc_error* error) {
  KVC_TRY(check_plan_in(in, error));
  KVC_TRY(check_struct(plan, KVC_FIELD_PLAN, error));
  const kvc_kv& kv = *in->kv;
  kvc_plan p{};
  p.struct_size = sizeof p;
  p.target = KVC_TARGET_CUDA;
  p.width = in->width != 0 ? in->width : usual_multiprocessors;
  p.q_heads = in->q_heads;
  p.kv_heads = kv.kv_heads;
  p.dim_k = kv.dim_k;
  p.dim_v = kv.dim_v;
  p.block = kv.block;
  p.n = in->n;
  p.max_q = in->max_q;
  p.max_kv = in->max_kv;
  p.head_block = (in->features & KVC_USE_FIXED_SPLITS) != 0 ? fixed_split_keys : 0;
  p.row_block = row_block_of(p, packs(kv));
  const int64_t tiles = row_tiles_of(p), splits = splits_wanted(p, tiles);
  KVC_TRY(check_sizes(p, tiles, splits, error));
  p.splits = static_cast<int32_t>(splits);
  p.workspace_bytes = workspace_needed(p);
  *plan = p;
  return KVC_OK;
}

kvc_status kvc_cuda_attend(const kvc_plan* plan, const kvc_kv* kv, const kvc_batch* batch, const kvc_rows* q,
                           const kvc_softmax* softmax, const kvc_out* out, kvc_buf workspace,
                           kvc_stream stream, kvc_error* error) {
  KVC_TRY(check_readable(kv, true, error));
  KVC_TRY(check_plan_made(plan, *kv, error));
  KVC_TRY(check_batch_shape(*plan, *kv, batch, error));
  const int64_t rows = batch->q_start != nullptr ? int64_t{batch->n} * plan->max_q : batch->n;
  if (q == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS);
  KVC_TRY(check_type(q->type, kv->k.type, error));
  KVC_TRY(check_rows(*q, rows, plan->q_heads, plan->dim_k, KVC_FIELD_DIM_K, error));
  KVC_TRY(check_scores(softmax, *batch, error));
  KVC_TRY(check_results(*plan, out, rows, error));
  if (batch->n == 0) return KVC_OK;
  decode_params p = inputs_of(*plan, *kv, *batch, *q, *softmax);
  add_results(p, *out);
  if (plan->splits > 1) {
    if (workspace.ptr == nullptr || workspace.bytes < workspace_needed(*plan) ||
        reinterpret_cast<uintptr_t>(workspace.ptr) % 16 != 0) {
      return fail(error, KVC_WORKSPACE, KVC_FIELD_WORKSPACE, static_cast<int64_t>(workspace.bytes));
    }
    p.partial.o = static_cast<float*>(workspace.ptr);
    p.partial.lse2 = reinterpret_cast<float*>(static_cast<char*>(workspace.ptr) + partial_bytes_o(*plan));
  }
  const bool extras = p.cap_log2 > 0 || p.k_pos != nullptr || p.key_score != nullptr || !(p.scale_log2 > 0);
  const auto blocks = static_cast<uint32_t>(int64_t{p.n} * p.kv_heads * p.row_tiles * p.splits);
  int32_t code = 0;
  if (packs(*kv)) {
    code = start_packed(*plan, packed_of(p, *kv, *batch), *kv, extras, blocks, stream);
  } else {
    const auto shared = static_cast<uint32_t>(decode_shared_bytes(kv->dim_k));
    const decode_choice choice{kv->k.type, kv->dim_k, decode_tile(*plan) == wide_rows, extras};
    KVC_TRY(launched(start_prefill(*plan, p, choice, stream), error));
    code = launch_decode(choice, p, {blocks, threads_of_block, shared}, stream);
  }
  KVC_TRY(launched(code, error));
  if (plan->splits == 1) return KVC_OK;
  const merge_params m = join_splits(*plan, p);
  return launched(
      launch_merge(m, {static_cast<uint32_t>(m.rows) * static_cast<uint32_t>(m.heads), threads_of_block, 0},
                   stream),
      error);
}
