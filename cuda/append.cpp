// SPDX-License-Identifier: Apache-2.0
// kvc_cuda_append, kvc_cuda_rope and kvc_cuda_merge: what the host decides and checks.
#include "host.hpp"

namespace kvcache::detail::gpu {
namespace {

constexpr int32_t widest = 256;  ///< head dim, as on the CPU

kvc_status check_new_rows(const kvc_kv& kv, const kvc_append* a, kvc_error* error) noexcept {
  KVC_TRY(check_struct(a, KVC_FIELD_APPEND, error));
  if (a->rows < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_APPEND, a->rows);
  if (kv.owner != 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, kv.owner);
  KVC_TRY(check_rows(a->k, a->rows, kv.kv_heads, kv.dim_k, KVC_FIELD_DIM_K, error));
  KVC_TRY(check_rows(a->v, a->rows, kv.kv_heads, kv.dim_v, KVC_FIELD_DIM_V, error));
  if (a->open_slot != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OPEN_SLOT);
  if (a->exempt_slot != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_EXEMPT_SLOT);
  if (a->slot == nullptr && a->rows > 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SLOT);
  if (a->slot_stride < 0 || a->slot_head_stride < 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, a->slot_stride);
  }
  if (a->rope == nullptr) return KVC_OK;
  KVC_TRY(check_rope(a->rope, kv.dim_k, error));
  return a->pos != nullptr || a->rows == 0 ? KVC_OK : fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_POS);
}

kvc_status check_parts(const kvc_out* parts, int32_t n, int32_t rows, const kvc_out& out,
                       kvc_error* error) noexcept {
  for (int32_t i = 0; i < n; ++i) {
    const kvc_status s = check_out(parts + i, rows, out.heads, out.dim, false, error);
    if (s != KVC_OK) {
      if (error != nullptr) error->index = i;
      return s;
    }
    if (parts[i].lse2 == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LSE, 0, i);
  }
  return KVC_OK;
}

}  // namespace
}  // namespace kvcache::detail::gpu

using namespace kvcache::detail;
using namespace kvcache::detail::gpu;

kvc_status kvc_cuda_append(const kvc_kv* kv, const kvc_append* append, kvc_stream stream, kvc_error* error) {
  KVC_TRY(check_layer(kv, true, error));
  KVC_TRY(check_new_rows(*kv, append, error));
  if (append->rows == 0) return KVC_OK;
  append_params p{};
  p.k = array_of(append->k);
  p.v = array_of(append->v);
  p.to_k = view_of(kv->k);
  p.to_v = view_of(kv->v);
  p.to_k_type = kv->k.type;
  p.to_v_type = kv->v.type;
  p.slot = append->slot;
  p.slot_stride = dense(append->slot_stride, append->slot_head_stride, kv->kv_heads);
  p.slot_head_stride = append->slot_head_stride;
  p.slots = int64_t{kv->blocks} * kv->block;
  p.pos = append->pos;
  p.rows = append->rows;
  p.kv_heads = kv->kv_heads;
  p.dim_k = kv->dim_k;
  p.dim_v = kv->dim_v;
  p.block_shift = shift_of(kv->block);
  p.rope = rope_of(append->rope);
  return launched(launch_append(p, {static_cast<uint32_t>(p.rows), threads_of_block, 0}, stream), error);
}

kvc_status kvc_cuda_rope(const kvc_rope* rope, const kvc_rows* rows, int32_t n_rows, const int32_t* pos,
                         void* out, kvc_stream stream, kvc_error* error) {
  if (rows == nullptr || rows->heads < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS);
  if (n_rows < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, n_rows);
  if (rows->dim < 1 || rows->dim > widest) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_DIM_K, rows->dim);
  KVC_TRY(check_rows(*rows, n_rows, rows->heads, rows->dim, KVC_FIELD_DIM_K, error));
  KVC_TRY(check_rope(rope, rows->dim, error));
  if (pos == nullptr && n_rows > 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_POS);
  if (out == nullptr && n_rows > 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  if (n_rows == 0) return KVC_OK;
  rope_rows_params p{};
  p.in = array_of(*rows);
  p.out = {static_cast<char*>(out), rows->row_stride, rows->head_stride, rows->type};
  p.pos = pos;
  p.rows = n_rows;
  p.heads = rows->heads;
  p.dim = rows->dim;
  p.rope = rope_of(rope);
  return launched(launch_rotate(p, {static_cast<uint32_t>(n_rows), threads_of_block, 0}, stream), error);
}

kvc_status kvc_cuda_merge(const kvc_out* parts, int32_t n_parts, int32_t rows, const float* sink_logit,
                          const kvc_out* out, kvc_stream stream, kvc_error* error) {
  if (parts == nullptr || n_parts < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_PARTS, n_parts);
  if (n_parts > most_parts) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_PARTS, n_parts);
  if (rows < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, rows);
  KVC_TRY(check_struct(out, KVC_FIELD_OUT, error));
  if (out->dim < 1 || out->dim > widest) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_DIM_V, out->dim);
  if (out->heads < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_Q_HEADS, out->heads);
  if (int64_t{rows} * out->heads >= int64_t{1} << 31)
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_ROWS, rows);
  KVC_TRY(check_out(out, rows, out->heads, out->dim, false, error));
  KVC_TRY(check_parts(parts, n_parts, rows, *out, error));
  if (out->key_score != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_KEY_SCORE);
  if (rows == 0) return KVC_OK;
  merge_params p{};
  for (int32_t i = 0; i < n_parts; ++i) {
    p.part[i] = {static_cast<const char*>(parts[i].o),
                 parts[i].lse2,
                 parts[i].row_stride,
                 parts[i].head_stride,
                 lse_stride(parts[i]),
                 parts[i].type};
  }
  p.n_parts = n_parts;
  p.out = array_of(*out);
  p.lse2 = out->lse2;
  p.lse_row_stride = lse_stride(*out);
  p.sink_logit = sink_logit;
  p.rows = rows;
  p.heads = out->heads;
  p.dim = out->dim;
  const uint32_t blocks = static_cast<uint32_t>(rows) * static_cast<uint32_t>(out->heads);
  return launched(launch_merge(p, {blocks, threads_of_block, 0}, stream), error);
}
