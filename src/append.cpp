// SPDX-License-Identifier: Apache-2.0
// Storing new keys and values, and rotary embedding of rows.
#include <optional>

#include "check.hpp"
#include "element.hpp"
#include "kvcache/quant/hadamard.hpp"
#include "rope.hpp"
#include "seal.hpp"
#include "workers.hpp"

namespace kvcache::detail {
namespace {

constexpr int32_t rows_per_item = 16;
constexpr int32_t most_width = 1 << 12;

const std::byte* row_of(const kvc_rows& rows, int64_t row, int64_t head) noexcept {
  return bytes_of(rows.data) + row * rows.row_stride + head * rows.head_stride;
}

void load_row(const std::byte* from, int32_t type, int32_t dim, float* to) noexcept {
  with_type(type, [&](auto* tag) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    for (int32_t d = 0; d < dim; ++d) to[d] = to_float(read<T>(from + d * int64_t{sizeof(T)}));
  });
}

void store_row(const float* from, int32_t dim, std::byte* to, int32_t type, int64_t stride) noexcept {
  with_type(type, [&](auto* tag) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    for (int32_t d = 0; d < dim; ++d) write(to + d * stride, narrow<T>(from[d]));
  });
}

struct append_job {
  const kvc_kv& kv;
  const kvc_append& a;
  std::optional<rotation> rope;

  int64_t at(int64_t row, int64_t head) const noexcept {
    return row * dense(a.slot_stride, a.slot_head_stride, kv.kv_heads) + head * a.slot_head_stride;
  }
  int64_t slot(const int64_t* slots, int64_t row, int64_t head) const noexcept {
    return slots != nullptr ? slots[at(row, head)] : -1;
  }
};

void put(const kvc_plane& plane, int32_t block, int64_t slot, int64_t head, const float* x,
         int32_t dim) noexcept {
  if (slot < 0) return;
  store_row(x, dim, cell(plane, slot / block, head, slot % block), plane.type, plane.dim_stride);
}

void append_row(const append_job& job, int64_t row) noexcept {
  const kvc_kv& kv = job.kv;
  float angles[max_dim], x[max_dim];
  const float* cos_sin = job.rope ? job.rope->cos_sin(job.a.pos[row], angles) : nullptr;
  for (int32_t h = 0; h < kv.kv_heads; ++h) {
    const int64_t slot = job.slot(job.a.slot, row, h), open = job.slot(job.a.open_slot, row, h);
    const int64_t exempt = job.slot(job.a.exempt_slot, row, h);
    if (slot < 0 && open < 0 && exempt < 0) continue;
    load_row(row_of(job.a.k, row, h), job.a.k.type, kv.dim_k, x);
    if (cos_sin != nullptr) job.rope->turn(x, cos_sin);
    if ((kv.hadamard & KVC_HADAMARD_K) != 0) hadamard(x, kv.dim_k);
    put(kv.k, kv.block, slot, h, x, kv.dim_k);
    put(kv.open_k, kv.block, open, h, x, kv.dim_k);
    put(kv.exempt_k, kv.exempt, exempt, h, x, kv.dim_k);
    if (kv.v.data == nullptr) continue;
    load_row(row_of(job.a.v, row, h), job.a.v.type, kv.dim_v, x);
    if ((kv.hadamard & KVC_HADAMARD_V) != 0) hadamard(x, kv.dim_v);
    put(kv.v, kv.block, slot, h, x, kv.dim_v);
    put(kv.open_v, kv.block, open, h, x, kv.dim_v);
    put(kv.exempt_v, kv.exempt, exempt, h, x, kv.dim_v);
  }
}

kvc_status check_slots(const append_job& job, const int64_t* slots, int32_t block, int32_t blocks,
                       int32_t field, kvc_error* error) noexcept {
  if (slots == nullptr) return KVC_OK;
  const int64_t end = int64_t{blocks} * block;
  const int32_t heads = job.a.slot_head_stride != 0 ? job.kv.kv_heads : 1;
  for (int64_t row = 0; row < job.a.rows; ++row) {
    for (int32_t h = 0; h < heads; ++h) {
      const int64_t slot = slots[job.at(row, h)];
      if (slot < -1 || slot >= end) return fail(error, KVC_BAD_ARGUMENT, field, slot, row);
    }
  }
  return KVC_OK;
}

kvc_status check_append(const kvc_kv& kv, const kvc_append* a, kvc_error* error) noexcept {
  KVC_TRY(check_struct(a, KVC_FIELD_APPEND, error));
  if (a->rows < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_APPEND, a->rows);
  if (kv.owner != 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, kv.owner);
  KVC_TRY(check_rows(a->k, a->rows, kv.kv_heads, kv.dim_k, KVC_FIELD_DIM_K, error));
  if (kv.v.data != nullptr) {
    KVC_TRY(check_rows(a->v, a->rows, kv.kv_heads, kv.dim_v, KVC_FIELD_DIM_V, error));
  } else if (a->v.data != nullptr) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_V);
  }
  if (a->slot == nullptr && a->open_slot == nullptr && a->rows > 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SLOT);
  }
  // Codes are written by sealing.
  if (a->slot != nullptr && packs(kv)) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_SLOT);
  if (a->slot_stride < 0 || a->slot_head_stride < 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, a->slot_stride);
  }
  if (a->open_slot != nullptr && kv.open_blocks == 0)
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_SLOT);
  if (a->rope == nullptr) return KVC_OK;
  if (kv.k_rope != nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROPE);
  KVC_TRY(check_rope(a->rope, kv.dim_k, error));
  return a->pos != nullptr || a->rows == 0 ? KVC_OK : fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_POS);
}

}  // namespace
}  // namespace kvcache::detail

using namespace kvcache::detail;

kvc_status kvc_cpu_append(const kvc_kv* kv, const kvc_append* append, const kvc_executor* executor,
                          kvc_error* error) {
  KVC_TRY(check_kv(kv, true, error));
  KVC_TRY(check_append(*kv, append, error));
  KVC_TRY(check_executor(executor, error));
  append_job job{*kv, *append, std::nullopt};
  KVC_TRY(check_slots(job, append->slot, kv->block, kv->blocks, KVC_FIELD_SLOT, error));
  KVC_TRY(check_slots(job, append->open_slot, kv->block, kv->open_blocks, KVC_FIELD_OPEN_SLOT, error));
  KVC_TRY(check_slots(job, append->exempt_slot, kv->exempt, kv->exempt_blocks, KVC_FIELD_EXEMPT, error));
  if (append->rope != nullptr) job.rope.emplace(*append->rope);
  auto some_rows = [&](int32_t, int64_t item) noexcept {
    const int64_t first = item * rows_per_item;
    const int64_t last = std::min<int64_t>(first + rows_per_item, append->rows);
    for (int64_t row = first; row < last; ++row) append_row(job, row);
  };
  for_each_item(executor, most_width, (int64_t{append->rows} + rows_per_item - 1) / rows_per_item, some_rows);
  return KVC_OK;
}

kvc_status kvc_cpu_rope(const kvc_rope* rope, const kvc_rows* rows, int32_t n_rows, const int32_t* pos,
                        void* out, const kvc_executor* executor, kvc_error* error) {
  if (rows == nullptr || rows->heads < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS);
  if (n_rows < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, n_rows);
  if (rows->dim < 1 || rows->dim > max_dim) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_DIM_K, rows->dim);
  KVC_TRY(check_rows(*rows, n_rows, rows->heads, rows->dim, KVC_FIELD_DIM_K, error));
  KVC_TRY(check_rope(rope, rows->dim, error));
  if (pos == nullptr && n_rows > 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_POS);
  if (out == nullptr && n_rows > 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  KVC_TRY(check_executor(executor, error));
  const rotation turning(*rope);
  auto some_rows = [&](int32_t, int64_t item) noexcept {
    float angles[max_dim], x[max_dim];
    const int64_t first = item * rows_per_item;
    for (int64_t row = first; row < std::min<int64_t>(first + rows_per_item, n_rows); ++row) {
      const float* cos_sin = turning.cos_sin(pos[row], angles);
      for (int32_t h = 0; h < rows->heads; ++h) {
        load_row(row_of(*rows, row, h), rows->type, rows->dim, x);
        turning.turn(x, cos_sin);
        std::byte* to = bytes_of(out) + row * rows->row_stride + h * rows->head_stride;
        store_row(x, rows->dim, to, rows->type, element_size(rows->type));
      }
    }
  };
  for_each_item(executor, most_width, (int64_t{n_rows} + rows_per_item - 1) / rows_per_item, some_rows);
  return KVC_OK;
}

kvc_status kvc_cpu_rope_table(const kvc_rope* rope, int32_t positions, float* table, kvc_error* error) {
  KVC_TRY(check_rope(rope, max_dim, error));
  if (positions < 0 || (positions > 0 && table == nullptr)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROPE_TABLE, positions);
  }
  const rotation turning(*rope);
  for (int64_t p = 0; p < positions; ++p) turning.angles(p, table + p * rope->dims);
  return KVC_OK;
}
