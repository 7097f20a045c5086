// SPDX-License-Identifier: Apache-2.0
// kvc_cuda_append, kvc_cuda_rope and kvc_cuda_merge: what the host decides and checks.
#include "append_params.hpp"
#include "host.hpp"
#include "kvcache/quant/hadamard.hpp"

namespace kvcache::detail::gpu {
namespace {

constexpr int32_t widest = 256;  ///< head dim, as on the CPU

/// Whether a sealed plane can take a row at a slot: exact ones can. Codes with a scale per token can, if the
/// codes of neighbouring slots share no byte: K's do below 8 bits.
bool takes_rows(const kvc_plane& p, bool keys) noexcept {
  if (!is_code(p.type)) return true;
  return p.scale_kind == KVC_SCALE_TOKEN && (!keys || p.type <= KVC_U8);
}
/// What codes are made from: a row rounded as an open block would have it.
bool halves(const kvc_plane& p) noexcept {
  return p.type == KVC_F16 || p.type == KVC_BF16;
}

kvc_status check_new_rows(const kvc_kv& kv, const kvc_append* a, kvc_error* error) noexcept {
  KVC_TRY(check_struct(a, KVC_FIELD_APPEND, error));
  if (a->rows < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_APPEND, a->rows);
  if (kv.owner != 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, kv.owner);
  KVC_TRY(check_rows(a->k, a->rows, kv.kv_heads, kv.dim_k, KVC_FIELD_DIM_K, error));
  KVC_TRY(check_rows(a->v, a->rows, kv.kv_heads, kv.dim_v, KVC_FIELD_DIM_V, error));
  if (a->slot == nullptr && a->open_slot == nullptr && a->rows > 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SLOT);
  }
  if (a->slot != nullptr && !(takes_rows(kv.k, true) && takes_rows(kv.v, false))) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_SLOT);
  }
  if (a->slot != nullptr && is_code(kv.k.type) && !halves(kv.open_k)) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OPEN_K, kv.open_k.type);
  }
  if (a->slot != nullptr && is_code(kv.v.type) && !halves(kv.open_v)) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_OPEN_V, kv.open_v.type);
  }
  if (a->slot_stride < 0 || a->slot_head_stride < 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, a->slot_stride);
  }
  if (a->open_slot != nullptr) {
    if (kv.open_blocks == 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_SLOT);
    KVC_TRY(check_plane_layout(kv.open_k, KVC_FIELD_OPEN_K, error));
    KVC_TRY(check_plane_layout(kv.open_v, KVC_FIELD_OPEN_V, error));
  }
  if (a->exempt_slot != nullptr && kv.exempt != 0 && kv.exempt_blocks != 0) {
    KVC_TRY(check_plane_layout(kv.exempt_k, KVC_FIELD_EXEMPT, error));
    KVC_TRY(check_plane_layout(kv.exempt_v, KVC_FIELD_EXEMPT, error));
  }
  if (a->rope == nullptr) return KVC_OK;
  KVC_TRY(check_rope(a->rope, kv.dim_k, error));
  return a->pos != nullptr || a->rows == 0 ? KVC_OK : fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_POS);
}

append_target target_of(const kvc_plane& k, const kvc_plane& v, const int64_t* slot, int32_t blocks,
                        int32_t block) noexcept {
  if (block == 0 || blocks == 0) return {};
  append_target to{view_of(k), view_of(v), k.type, v.type, slot, int64_t{blocks} * block, shift_of(block)};
  if (is_code(k.type)) to.k.data = nullptr;
  if (is_code(v.type)) to.v.data = nullptr;
  return to;
}

append_params params_of(const kvc_kv& kv, const kvc_append& a) noexcept {
  append_params p{};
  p.k = array_of(a.k);
  p.v = array_of(a.v);
  p.to[0] = target_of(kv.k, kv.v, a.slot, kv.blocks, kv.block);
  p.to[1] = target_of(kv.open_k, kv.open_v, a.open_slot, kv.open_blocks, kv.block);
  p.to[2] = target_of(kv.exempt_k, kv.exempt_v, a.exempt_slot, kv.exempt_blocks, kv.exempt);
  if (is_code(kv.k.type)) p.codes_k = coded_of(kv.k, true);
  if (is_code(kv.v.type)) p.codes_v = coded_of(kv.v, false);
  p.open_k_type = kv.open_k.type;
  p.open_v_type = kv.open_v.type;
  p.slot_stride = dense(a.slot_stride, a.slot_head_stride, kv.kv_heads);
  p.slot_head_stride = a.slot_head_stride;
  p.pos = a.pos;
  p.rows = a.rows;
  p.kv_heads = kv.kv_heads;
  p.dim_k = kv.dim_k;
  p.dim_v = kv.dim_v;
  p.block = kv.block;
  if ((kv.hadamard & KVC_HADAMARD_K) != 0) p.hadamard_k = hadamard_factor(kv.dim_k);
  if ((kv.hadamard & KVC_HADAMARD_V) != 0) p.hadamard_v = hadamard_factor(kv.dim_v);
  p.rope = rope_of(a.rope);
  return p;
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
  KVC_TRY(check_packed_layer(kv, true, error));
  KVC_TRY(check_new_rows(*kv, append, error));
  if (append->rows == 0) return KVC_OK;
  const append_params p = params_of(*kv, *append);
  return launched(
      launch_append(p, {static_cast<uint32_t>(p.rows), threads_of_block, append_shared_bytes}, stream),
      error);
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
