// SPDX-License-Identifier: Apache-2.0
// Checks of a call that reads a batch: its plan, its sequences, and what happens to their scores.
#include <algorithm>
#include <cmath>

#include "call.hpp"
#include "check.hpp"

namespace kvcache::detail {
namespace {

kvc_status check_ids(const int32_t* ids, int64_t first, int64_t last, int32_t blocks, int32_t field,
                     int64_t sequence, kvc_error* error) noexcept {
  for (int64_t c = first; c < last; ++c) {
    if (ids[c] < -1 || ids[c] >= blocks) return fail(error, KVC_BAD_ARGUMENT, field, ids[c], sequence);
  }
  return KVC_OK;
}

/// Borders of the rows of a sequence; `lowest` becomes the lowest of them.
kvc_status check_row_sealed(const kvc_kv& kv, const kvc_batch& b, int64_t i, int32_t sealed, int32_t& lowest,
                            kvc_error* error) noexcept {
  if (b.row_sealed == nullptr) return KVC_OK;
  const int64_t first = b.q_start != nullptr ? b.q_start[i] : i;
  const int64_t last = b.q_start != nullptr ? b.q_start[i + 1] : i + 1;
  for (int64_t row = first; row < last; ++row) {
    const int32_t border = b.row_sealed[row];
    const bool whole = border % kv.block == 0 || border == sealed;
    if (border < 0 || border > sealed || !whole || (border < sealed && b.open_table == nullptr)) {
      return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROW_SEALED, border, row);
    }
    lowest = std::min(lowest, border);
  }
  return KVC_OK;
}

/// Lengths and table entries of one sequence.
kvc_status check_sequence(const kvc_plan& plan, const kvc_kv& kv, const kvc_batch& b, int64_t i,
                          kvc_error* error) noexcept {
  int32_t longest = 0;
  for (int32_t h = 0; h < (b.kv_len_head_stride != 0 ? kv.kv_heads : 1); ++h) {
    const int32_t len = kv_len_of(b, i, h, kv.kv_heads);
    if (len < 0 || len > plan.max_kv || len > int64_t{b.table_columns} * kv.block) {
      return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KV_LEN, len, i);
    }
    longest = std::max(longest, len);
  }
  const int32_t sealed = b.sealed != nullptr ? std::min(b.sealed[i], longest) : longest;
  if (sealed < 0 || (sealed < longest && (sealed % kv.block != 0 || b.open_table == nullptr))) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SEALED, b.sealed[i], i);
  }
  int32_t open_from = sealed;
  KVC_TRY(check_row_sealed(kv, b, i, sealed, open_from, error));
  const int64_t columns = (int64_t{longest} + kv.block - 1) / kv.block;
  const int64_t closed = (int64_t{sealed} + kv.block - 1) / kv.block;
  KVC_TRY(check_ids(b.table + i * b.table_stride, 0, closed, kv.blocks, KVC_FIELD_TABLE, i, error));
  if (open_from < longest) {
    const int32_t* open = b.open_table + i * b.open_stride;
    KVC_TRY(check_ids(open, open_from / kv.block, columns, kv.open_blocks, KVC_FIELD_OPEN_TABLE, i, error));
  }
  if (b.exempt_table == nullptr) return KVC_OK;
  return check_ids(b.exempt_table, i, i + 1, kv.exempt_blocks, KVC_FIELD_EXEMPT_TABLE, i, error);
}

}  // namespace

kvc_batch with_strides(const kvc_batch& b) noexcept {
  kvc_batch out = b;
  if (out.table_stride == 0) out.table_stride = out.table_columns;
  if (out.open_stride == 0) out.open_stride = out.table_columns;
  return out;
}

int32_t longest_kv(const kvc_batch& b, int32_t kv_heads) noexcept {
  int32_t longest = 0;
  for (int64_t i = 0; i < b.n; ++i) {
    for (int32_t h = 0; h < (b.kv_len_head_stride != 0 ? kv_heads : 1); ++h) {
      longest = std::max(longest, kv_len_of(b, i, h, kv_heads));
    }
  }
  return longest;
}

int64_t row_end(const kvc_batch& b) noexcept {
  if (b.n == 0) return 0;
  return b.q_start != nullptr ? b.q_start[b.n] : b.n;
}

kvc_status check_plan(const kvc_plan* plan, const kvc_kv& kv, kvc_error* error) noexcept {
  KVC_TRY(check_struct(plan, KVC_FIELD_PLAN, error));
  const bool made = plan->width >= 1 && plan->width <= most_width && plan->row_block >= 1 &&
                    plan->head_block >= 1 && plan->n >= 0 && plan->max_q >= 1 && plan->max_kv >= 0 &&
                    plan->kv_heads >= 1 && plan->q_heads >= 1;
  if (!made) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_PLAN);
  if (find_kernel(plan->target) == nullptr) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TARGET, plan->target);
  }
  if (plan->kv_heads != kv.kv_heads) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, kv.kv_heads);
  if (plan->dim_k != kv.dim_k) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_DIM_K, kv.dim_k);
  if (plan->dim_v != kv.dim_v) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_DIM_V, kv.dim_v);
  if (plan->block != kv.block) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK, kv.block);
  return KVC_OK;
}

kvc_status check_key_score(int64_t row_stride, int64_t head_stride, const kvc_batch& b, int64_t rows,
                           const kvc_plan& plan, kvc_error* error) noexcept {
  const int64_t longest = longest_kv(b, plan.kv_heads);
  if (rows > 1 && row_stride < longest) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KEY_SCORE, row_stride);
  }
  if (plan.q_heads > 1 && head_stride < longest) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KEY_SCORE, head_stride);
  }
  return KVC_OK;
}

kvc_status check_softmax(const kvc_softmax* s, const kvc_batch& b, int64_t rows, kvc_error* error) noexcept {
  KVC_TRY(check_struct(s, KVC_FIELD_SOFTMAX, error));
  if (!std::isfinite(s->scale)) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SCALE);
  if (!(s->soft_cap >= 0) || !std::isfinite(s->soft_cap))
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SOFT_CAP);
  if (s->window < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_WINDOW, s->window);
  if (s->alibi != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_ALIBI);
  if (s->mask != nullptr || s->mask_start != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_MASK);
  if ((s->causal != 0 || s->window > 0) && b.q_pos == nullptr && rows > 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_Q_POS);
  }
  return KVC_OK;
}

kvc_status check_batch(const kvc_plan& plan, const kvc_kv& kv, const kvc_batch* b,
                       kvc_error* error) noexcept {
  KVC_TRY(check_struct(b, KVC_FIELD_BATCH, error));
  if (b->n < 0 || b->n > plan.n) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_N, b->n);
  if (b->table_columns < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TABLE_COLUMNS, b->table_columns);
  if (b->n == 0) return KVC_OK;
  if (b->kv_len == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KV_LEN);
  if (b->table == nullptr && b->table_columns > 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TABLE);
  const int64_t strides[] = {b->table_stride,       b->open_stride,  b->kv_len_stride,
                             b->kv_len_head_stride, b->k_pos_stride, b->k_pos_head_stride};
  for (const int64_t s : strides) {
    if (s < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, s);
  }
  for (int64_t i = 0; b->q_start != nullptr && i < b->n; ++i) {
    const int64_t rows = int64_t{b->q_start[i + 1]} - b->q_start[i];
    if (b->q_start[i] < 0 || rows < 0 || rows > plan.max_q) {
      return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_Q_START, b->q_start[i + 1], i);
    }
  }
  const kvc_batch full = with_strides(*b);
  for (int64_t i = 0; i < b->n; ++i) KVC_TRY(check_sequence(plan, kv, full, i, error));
  return KVC_OK;
}

}  // namespace kvcache::detail
