// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include <cmath>

#include "element.hpp"
#include "kernel.hpp"
#include "kvcache/quant/format.hpp"

namespace kvcache::detail {
namespace {

constexpr int32_t max_block = 1 << 16;

bool aligned(const void* p, int64_t element) noexcept {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(element) == 0;
}

/// One stride of a plane or of rows: not negative, whole elements, not 0 where there is more than one step,
/// and the last step must not pass 63 bits together with what the other dimensions reach.
kvc_status check_stride(int64_t stride, int64_t extent, int64_t element, int64_t& reach,
                        kvc_error* error) noexcept {
  if (stride < 0 || stride % element != 0 || (stride == 0 && extent > 1)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, stride);
  }
  int64_t last = 0;
  if (__builtin_mul_overflow(stride, extent - 1, &last) || __builtin_add_overflow(reach, last, &reach)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, stride);
  }
  return KVC_OK;
}

/// Cells of `bytes` bytes do not lie over each other.
kvc_status check_apart(int64_t stride, int64_t extent, int64_t bytes, kvc_error* error) noexcept {
  return extent > 1 && stride < bytes ? fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, stride) : KVC_OK;
}

constexpr int32_t least_packed_block = 32, most_packed_block = 128;

/// Scales and minima of a plane of codes.
kvc_status check_scales(const kvc_plane& p, const kvc_kv& kv, bool keys, kvc_error* error) noexcept {
  if (p.scale_kind < KVC_SCALE_TENSOR || p.scale_kind > KVC_SCALE_CHANNEL) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_SCALE, p.scale_kind);
  }
  const bool run = p.scale_kind == KVC_SCALE_TOKEN || p.scale_kind == KVC_SCALE_CHANNEL;
  const int32_t dim = keys ? kv.dim_k : kv.dim_v;
  const int32_t whole = p.scale_kind == KVC_SCALE_CHANNEL ? kv.block : dim;
  const bool fits = p.scale_group > 0 && p.scale_group % 8 == 0 &&
                    (p.scale_kind == KVC_SCALE_TOKEN || whole % p.scale_group == 0);
  if (run && !fits) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_GROUP, p.scale_group);
  if (p.clip < KVC_CLIP_NONE || p.clip > KVC_CLIP_TWO_SIDED) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_SCALE, p.clip);
  }
  if (p.data != nullptr && p.scale == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SCALE);
  if (!aligned(p.scale, 2) || !aligned(p.zero, 2)) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SCALE);
  if (is_fp8(static_cast<code>(p.type)) && p.zero != nullptr) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SCALE, p.type);
  }
  int64_t reach = 2;
  KVC_TRY(check_stride(p.scale_block_stride, kv.blocks, 2, reach, error));
  if (p.scale_kind == KVC_SCALE_TENSOR) {
    return p.scale_head_stride == 0 ? KVC_OK
                                    : fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, p.scale_head_stride);
  }
  KVC_TRY(check_stride(p.scale_head_stride, kv.kv_heads, 2, reach, error));
  side_format f;
  f.codes = static_cast<code>(p.type);
  f.axis = static_cast<scale_axis>(p.scale_kind - KVC_SCALE_TENSOR);
  f.group_size = p.scale_group;
  const int64_t cell = int64_t{2} * scales_of_cell(f, kv.block, dim);
  KVC_TRY(check_apart(p.scale_head_stride, kv.kv_heads, cell, error));
  return check_apart(p.scale_block_stride, kv.blocks, cell, error);
}

/// A plane of codes: rows along the slots of a channel for K, along the channels of a slot for V.
kvc_status check_codes(const kvc_plane& p, const kvc_kv& kv, bool keys, kvc_error* error) noexcept {
  if (kv.block < least_packed_block || kv.block > most_packed_block) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_BLOCK, kv.block);
  }
  if (kv.open_blocks == 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_BLOCKS, 0);
  const int32_t rows = keys ? kv.dim_k : kv.block, columns = keys ? kv.block : kv.dim_v;
  const int64_t row = code_row_bytes(static_cast<code>(p.type), columns);
  const int64_t stride = keys ? p.dim_stride : p.token_stride, other = keys ? p.token_stride : p.dim_stride;
  if (other != 0 || stride < row) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, stride);
  int64_t reach = row;
  KVC_TRY(check_stride(p.block_stride, kv.blocks, 1, reach, error));
  KVC_TRY(check_stride(p.head_stride, kv.kv_heads, 1, reach, error));
  KVC_TRY(check_stride(stride, rows, 1, reach, error));
  int64_t cell = 0;
  if (__builtin_mul_overflow(stride, rows, &cell)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, stride);
  }
  KVC_TRY(check_apart(p.head_stride, kv.kv_heads, cell, error));
  KVC_TRY(check_apart(p.block_stride, kv.blocks, cell, error));
  return check_scales(p, kv, keys, error);
}

kvc_status check_plane(const kvc_plane& p, const kvc_kv& kv, int64_t blocks, int32_t dim, int32_t field,
                       kvc_error* error) noexcept {
  if (is_code(p.type) && (field == KVC_FIELD_K || field == KVC_FIELD_V)) {
    return check_codes(p, kv, field == KVC_FIELD_K, error);
  }
  const int64_t element = element_size(p.type);
  if (element == 0) return fail(error, KVC_UNSUPPORTED, field, p.type);
  if (p.scale_kind != KVC_SCALE_NONE) return fail(error, KVC_UNSUPPORTED, field, p.scale_kind);
  if (!aligned(p.data, element)) return fail(error, KVC_BAD_ARGUMENT, field);
  int64_t reach = element;
  KVC_TRY(check_stride(p.block_stride, blocks, element, reach, error));
  KVC_TRY(check_stride(p.head_stride, kv.kv_heads, element, reach, error));
  KVC_TRY(check_stride(p.token_stride, kv.block, element, reach, error));
  return check_stride(p.dim_stride, dim, element, reach, error);
}

kvc_status check_dim(int32_t dim, int32_t field, kvc_error* error) noexcept {
  if (dim < 1) return fail(error, KVC_BAD_ARGUMENT, field, dim);
  return dim % 8 == 0 && dim <= max_dim ? KVC_OK : fail(error, KVC_UNSUPPORTED, field, dim);
}

kvc_status check_geometry(const kvc_kv& kv, kvc_error* error) noexcept {
  if (kv.kv_heads < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, kv.kv_heads);
  KVC_TRY(check_dim(kv.dim_k, KVC_FIELD_DIM_K, error));
  KVC_TRY(check_dim(kv.dim_v, KVC_FIELD_DIM_V, error));
  if (kv.block < 1 || kv.block > max_block || (kv.block & (kv.block - 1)) != 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK, kv.block);
  }
  if (kv.blocks < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCKS, kv.blocks);
  if (kv.open_blocks < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_BLOCKS, kv.open_blocks);
  if (kv.exempt < 0 || kv.exempt > 4 || kv.exempt == 3 || kv.exempt > kv.block) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT, kv.exempt);
  }
  if (kv.exempt_blocks < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT, kv.exempt_blocks);
  const auto whole = [](int32_t dim) { return (dim & (dim - 1)) == 0; };
  const bool k = (kv.hadamard & KVC_HADAMARD_K) != 0, v = (kv.hadamard & KVC_HADAMARD_V) != 0;
  if ((kv.hadamard & ~(KVC_HADAMARD_K | KVC_HADAMARD_V)) != 0 || (k && !whole(kv.dim_k)) ||
      (v && !whole(kv.dim_v))) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_HADAMARD, kv.hadamard);
  }
  return KVC_OK;
}

/// Scores as integer dot products.
kvc_status check_integer_dot(const kvc_kv& kv, kvc_error* error) noexcept {
  if (kv.reserved != 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED, kv.reserved);
  if (kv.integer_dot == 0) return KVC_OK;
  if (kv.integer_dot != 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_INTEGER_DOT, kv.integer_dot);
  const bool runs = kv.k.scale_kind == KVC_SCALE_CHANNEL && kv.k.scale_group % 32 == 0;
  const bool one = kv.k.scale_kind == KVC_SCALE_HEAD || kv.k.scale_kind == KVC_SCALE_TENSOR;
  const bool may = kv.k.type >= KVC_U8 && kv.k.type <= KVC_U2 && (runs || one) && kv.k_rope == nullptr;
  return may ? KVC_OK : fail(error, KVC_UNSUPPORTED, KVC_FIELD_INTEGER_DOT, 1);
}

/// The exact copies of the first slots.
kvc_status check_exempt(const kvc_kv& kv, bool data, kvc_error* error) noexcept {
  if (kv.exempt == 0 || kv.exempt_blocks == 0) return KVC_OK;
  if (data && (kv.exempt_k.data == nullptr || kv.exempt_v.data == nullptr)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT);
  }
  kvc_kv few = kv;
  few.block = kv.exempt;
  KVC_TRY(check_plane(kv.exempt_k, few, kv.exempt_blocks, kv.dim_k, KVC_FIELD_EXEMPT, error));
  return check_plane(kv.exempt_v, few, kv.exempt_blocks, kv.dim_v, KVC_FIELD_EXEMPT, error);
}

}  // namespace

kvc_status fail(kvc_error* error, kvc_status status, int32_t field, int64_t value, int64_t index) noexcept {
  if (error != nullptr) *error = {0, field, index, value};
  return status;
}

kvc_status check_kv(const kvc_kv* kv, bool data, kvc_error* error) noexcept {
  KVC_TRY(check_struct(kv, KVC_FIELD_KV, error));
  KVC_TRY(check_geometry(*kv, error));
  if (data && kv->k.data == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_K);
  KVC_TRY(check_plane(kv->k, *kv, kv->blocks, kv->dim_k, KVC_FIELD_K, error));
  // Without memory in hand a V plane is told from an aliased one by its strides.
  const bool own_v = kv->v.data != nullptr || (!data && (kv->v.dim_stride != 0 || kv->v.token_stride != 0));
  if (!own_v && (is_code(kv->k.type) || kv->hadamard != 0 || kv->exempt != 0)) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_V);  // a latent's two readers would need two rotations
  }
  if (!own_v && kv->dim_v > kv->dim_k) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_DIM_V, kv->dim_v);
  if (own_v) KVC_TRY(check_plane(kv->v, *kv, kv->blocks, kv->dim_v, KVC_FIELD_V, error));
  KVC_TRY(check_integer_dot(*kv, error));
  KVC_TRY(check_exempt(*kv, data, error));
  if (kv->k_rope != nullptr) {
    if (!own_v) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_ROPE);
    KVC_TRY(check_rope(kv->k_rope, kv->dim_k, error));
  }
  if (kv->open_blocks == 0) return KVC_OK;
  if (data && kv->open_k.data == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_K);
  KVC_TRY(check_plane(kv->open_k, *kv, kv->open_blocks, kv->dim_k, KVC_FIELD_OPEN_K, error));
  if (!own_v) return KVC_OK;
  if (data && kv->open_v.data == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_V);
  return check_plane(kv->open_v, *kv, kv->open_blocks, kv->dim_v, KVC_FIELD_OPEN_V, error);
}

kvc_status check_rows(const kvc_rows& rows, int64_t n, int32_t heads, int32_t dim, int32_t dim_field,
                      kvc_error* error) noexcept {
  const int64_t element = element_size(rows.type);
  if (element == 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TYPE, rows.type);
  if (rows.heads != heads) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, rows.heads);
  if (rows.dim != dim) return fail(error, KVC_BAD_ARGUMENT, dim_field, rows.dim);
  if ((rows.data == nullptr && n > 0) || !aligned(rows.data, element)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS);
  }
  int64_t reach = element * dim;
  KVC_TRY(check_stride(rows.head_stride, heads, element, reach, error));
  return check_stride(rows.row_stride, n, element, reach, error);
}

kvc_status check_out(const kvc_out* out, int64_t n, int32_t heads, int32_t dim, bool optional,
                     kvc_error* error) noexcept {
  KVC_TRY(check_struct(out, KVC_FIELD_OUT, error));
  const int64_t element = element_size(out->type);
  if (element == 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TYPE, out->type);
  if (out->heads != heads) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OUT, out->heads);
  if (out->dim != dim) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_DIM_V, out->dim);
  const bool needed = n > 0 && !(optional && out->lse2 != nullptr);
  if ((out->o == nullptr && needed) || !aligned(out->o, element)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  }
  if (out->lse_row_stride < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LSE, out->lse_row_stride);
  int64_t reach = element * dim;
  KVC_TRY(check_stride(out->head_stride, heads, element, reach, error));
  return check_stride(out->row_stride, n, element, reach, error);
}

kvc_status check_executor(const kvc_executor* executor, kvc_error* error) noexcept {
  if (executor == nullptr) return KVC_OK;
  if (executor->run == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_EXECUTOR);
  if (executor->width < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_EXECUTOR, executor->width);
  return KVC_OK;
}

kvc_status check_rope(const kvc_rope* rope, int32_t head_dim, kvc_error* error) noexcept {
  KVC_TRY(check_struct(rope, KVC_FIELD_ROPE, error));
  if (rope->style != KVC_ROPE_INTERLEAVED && rope->style != KVC_ROPE_HALF_SPLIT) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_ROPE_STYLE, rope->style);
  }
  if (rope->dims < 2 || rope->dims % 2 != 0 || rope->dims > head_dim) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROPE_DIMS, rope->dims);
  }
  if (rope->frequency == nullptr && !(rope->theta > 0 && std::isfinite(rope->theta))) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROPE_THETA);
  }
  if (rope->table_positions < 0 || (rope->table_positions > 0 && rope->table == nullptr)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROPE_TABLE, rope->table_positions);
  }
  return KVC_OK;
}

}  // namespace kvcache::detail
