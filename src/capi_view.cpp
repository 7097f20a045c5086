// SPDX-License-Identifier: Apache-2.0
// The C API's views of a step for kernels.
#include <algorithm>

#include "capi.hpp"
#include "kvcache/blocks/batch_view.hpp"

namespace kvcache::detail {
namespace {

bool lossy(const host_cache& h, int32_t group) noexcept {
  return h.cache.shape().group[group].format.lossy;
}

// What a view of packed blocks needs beside its tables.
kvc_status check_packed(const host_cache& h, const kvc_view& v, kvc_error* error) noexcept {
  if (v.exempt_group != 0) {
    const bool counted = v.exempt_group > 0 && v.exempt_group <= h.cache.shape().groups;
    const int32_t g = counted ? v.exempt_group - 1 : -1;
    const bool known = counted && h.cache.shape().group[g].first_only;
    KVC_TRY(need(known && g != v.group, KVC_FIELD_EXEMPT_GROUP, error, v.exempt_group));
    KVC_TRY(need(v.exempt_table != nullptr || v.n == 0, KVC_FIELD_EXEMPT_TABLE, error));
    KVC_TRY(need(v.exempt_slot != nullptr || v.slot == nullptr, KVC_FIELD_EXEMPT_SLOT, error));
  }
  if (!lossy(h, v.group)) return KVC_OK;
  KVC_TRY(need(v.open_table != nullptr || v.n == 0 || v.table_columns == 0, KVC_FIELD_OPEN_TABLE, error));
  KVC_TRY(need(v.sealed != nullptr || v.n == 0, KVC_FIELD_SEALED, error));
  KVC_TRY(need(v.row_sealed != nullptr || v.max_rows == 0, KVC_FIELD_ROW_SEALED, error));
  return need((v.slot == nullptr) == (v.open_slot == nullptr), KVC_FIELD_OPEN_SLOT, error);
}

kvc_status check_view(const host_cache& h, const kvc_view& v, kvc_error* error) noexcept {
  KVC_TRY(need(v.group >= 0 && v.group < h.cache.shape().groups, KVC_FIELD_GROUP, error, v.group));
  KVC_TRY(need(v.n >= 0, KVC_FIELD_N, error, v.n));
  KVC_TRY(need(v.table_columns >= 0, KVC_FIELD_TABLE_COLUMNS, error, v.table_columns));
  KVC_TRY(need(v.max_rows >= 0, KVC_FIELD_MAX_ROWS, error, v.max_rows));
  const bool some = v.n > 0, cells = some && v.table_columns > 0;
  KVC_TRY(need(v.sequences != nullptr || !some, KVC_FIELD_SEQUENCES, error));
  KVC_TRY(need(v.table != nullptr || !cells, KVC_FIELD_TABLE, error));
  KVC_TRY(need(v.kv_len != nullptr || !some, KVC_FIELD_KV_LEN, error));
  KVC_TRY(need(v.q_start != nullptr, KVC_FIELD_Q_START, error));
  KVC_TRY(need(v.q_pos != nullptr || v.max_rows == 0, KVC_FIELD_Q_POS, error));
  return check_packed(h, v, error);
}

int32_t rows_of(const kvc_view& v, int32_t i) noexcept {
  return v.rows != nullptr ? v.rows[i] : 1;
}

kvc_status check_sequences(const host_cache& h, const kvc_view& v, kvc_error* error) noexcept {
  int64_t rows = 0;
  for (int32_t i = 0; i < v.n; ++i) {
    host_sequence* s = nullptr;
    KVC_TRY(find(h, v.sequences[i], s, error, i));
    const auto columns = static_cast<int64_t>(s->table(v.group).size());
    if (columns > v.table_columns) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_TABLE_COLUMNS, columns, i);
    const int32_t n = rows_of(v, i);
    if (n < 0 || n > s->held()) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, n, i);
    rows += n;
    if (rows > v.max_rows) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_ROWS, rows, i);
  }
  return KVC_OK;
}

// Slots of tokens [first, first + out.size()) in a group; -1 for those that it does not store.
void write_stored(const group_geometry& x, std::span<const block_id> table, int32_t first,
                  std::span<int64_t> out) noexcept {
  const auto last = first + static_cast<int32_t>(out.size());
  const auto here = static_cast<size_t>(std::max(0, x.stored(last) - first));
  (void)write_slots(table, x.block_size, first, out.first(here));
  std::fill(out.begin() + static_cast<std::ptrdiff_t>(here), out.end(), int64_t{-1});
}

// What is said of each of a sequence's last `n` tokens, from row `at` on.
void fill_rows(const geometry& geo, const host_sequence& s, const kvc_view& v, int32_t at,
               int32_t n) noexcept {
  const group_geometry& x = geo.group[v.group];
  const int32_t first = s.held() - n;
  const auto row = static_cast<size_t>(at), rows = static_cast<size_t>(n);
  for (int32_t k = 0; k < n; ++k) {
    v.q_pos[at + k] = first + k;
    if (x.format.lossy) v.row_sealed[at + k] = s.sealed_at(first + k + 1, v.group);
  }
  if (v.slot == nullptr) return;
  if (v.exempt_group != 0) {
    const int32_t g = v.exempt_group - 1;
    write_stored(geo.group[g], s.table(g), first, {v.exempt_slot + row, rows});
  }
  if (!x.format.lossy) return write_stored(x, s.table(v.group), first, {v.slot + row, rows});
  std::fill_n(v.slot + at, n, int64_t{-1});  // new rows of a lossy format go to its open form only
  write_stored(x, s.open_table(v.group), first, {v.open_slot + row, rows});
}

void fill(const host_cache& h, const kvc_view& v) noexcept {
  const geometry& geo = h.cache.shape();
  const bool open = lossy(h, v.group);
  const auto columns = static_cast<size_t>(v.table_columns);
  v.q_start[0] = 0;
  for (int32_t i = 0; i < v.n; ++i) {
    host_sequence* s = nullptr;
    if (find(h, v.sequences[i], s, nullptr) != KVC_OK) return;  // checked before
    const size_t cell = static_cast<size_t>(i) * columns;
    (void)write_row(s->table(v.group), -1, {v.table + cell, columns});
    if (open) (void)write_row(s->open_table(v.group), -1, {v.open_table + cell, columns});
    v.kv_len[i] = geo.group[v.group].stored(s->held());
    if (open) v.sealed[i] = s->sealed(v.group);
    if (v.exempt_group != 0) (void)write_row(s->table(v.exempt_group - 1), -1, {v.exempt_table + i, 1});
    const int32_t n = rows_of(v, i);
    fill_rows(geo, *s, v, v.q_start[i], n);
    v.q_start[i + 1] = v.q_start[i] + n;
  }
}

kvc_status check_csr(const host_cache& h, const kvc_sequence* sequences, int32_t n, int32_t group,
                     int64_t room, kvc_error* error) noexcept {
  int64_t blocks = 0;
  for (int32_t i = 0; i < n; ++i) {
    host_sequence* s = nullptr;
    KVC_TRY(find(h, sequences[i], s, error, i));
    const group_geometry& x = h.cache.shape().group[group];
    blocks += pages_of(x.stored(s->held()), x.block_size).pages;
    if (blocks > room || blocks > INT32_MAX) {
      return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_INDICES, blocks, i);
    }
  }
  return KVC_OK;
}

}  // namespace
}  // namespace kvcache::detail

using namespace kvcache;
using namespace kvcache::detail;

kvc_status kvc_view_batch(kvc_cache cache, const kvc_view* view, kvc_batch* batch, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(check_struct(view, KVC_FIELD_VIEW, error));
  KVC_TRY(check_view(*h, *view, error));
  if (batch != nullptr) KVC_TRY(check_struct(batch, KVC_FIELD_BATCH, error));
  KVC_TRY(check_sequences(*h, *view, error));
  fill(*h, *view);
  if (batch == nullptr) return KVC_OK;
  *batch = {};
  batch->struct_size = sizeof *batch;
  batch->n = view->n;
  batch->table_columns = view->table_columns;
  batch->table = view->table;
  batch->kv_len = view->kv_len;
  batch->q_start = view->q_start;
  batch->q_pos = view->q_pos;
  if (lossy(*h, view->group)) {
    batch->open_table = view->open_table;
    batch->sealed = view->sealed;
    batch->row_sealed = view->row_sealed;
  }
  if (view->exempt_group != 0) batch->exempt_table = view->exempt_table;
  return KVC_OK;
}

kvc_status kvc_view_csr(kvc_cache cache, const kvc_sequence* sequences, int32_t n, int32_t group,
                        int32_t* indptr, int32_t* indices, int64_t room, int32_t* last_page_len,
                        kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(group >= 0 && group < h->cache.shape().groups, KVC_FIELD_GROUP, error, group));
  KVC_TRY(need(n >= 0, KVC_FIELD_N, error, n));
  KVC_TRY(need(room >= 0, KVC_FIELD_INDICES, error, room));
  KVC_TRY(need(sequences != nullptr || n == 0, KVC_FIELD_SEQUENCES, error));
  KVC_TRY(need(indptr != nullptr, KVC_FIELD_INDPTR, error));
  KVC_TRY(need(indices != nullptr || room == 0, KVC_FIELD_INDICES, error));
  KVC_TRY(need(last_page_len != nullptr || n == 0, KVC_FIELD_LAST_PAGE_LEN, error));
  KVC_TRY(check_csr(*h, sequences, n, group, room, error));
  const group_geometry& x = h->cache.shape().group[group];
  const auto count = static_cast<size_t>(n);
  indptr[0] = 0;
  for (size_t i = 0; i < count; ++i) {
    host_sequence* s = nullptr;
    KVC_TRY(find(*h, sequences[i], s, error, static_cast<int64_t>(i)));
    const status done = write_csr(s->table(group), x.stored(s->held()), x.block_size, i, {indptr, count + 1},
                                  {indices, static_cast<size_t>(room)}, {last_page_len, count});
    if (!done) return fail(error, done, static_cast<int64_t>(i));
  }
  return KVC_OK;
}
