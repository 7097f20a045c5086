// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checks of arguments, shared by all entry points. Each returns KVC_OK or fills the error; nothing is
// written before the last check has passed.
#include <cstdint>

#include "kvcache/kvcache.h"

namespace kvcache::detail {

/// Records why a call fails and returns the status.
kvc_status fail(kvc_error* error, kvc_status status, int32_t field, int64_t value = 0,
                int64_t index = -1) noexcept;

/// Struct present and of the size this library was built with.
template <class T>
inline kvc_status check_struct(const T* s, int32_t field, kvc_error* error) noexcept {
  if (s == nullptr) return fail(error, KVC_BAD_ARGUMENT, field);
  return s->struct_size == sizeof(T) ? KVC_OK : fail(error, KVC_ABI, field, s->struct_size);
}

/// Geometry and strides of a layer; with `data` also that its planes have memory.
kvc_status check_kv(const kvc_kv* kv, bool data, kvc_error* error) noexcept;

/// `n` rows of queries, keys or values with the given heads and dim.
kvc_status check_rows(const kvc_rows& rows, int64_t n, int32_t heads, int32_t dim, int32_t dim_field,
                      kvc_error* error) noexcept;

/// An output of `n` rows with the given heads and dim. `optional`: o may be null where lse2 is wanted.
kvc_status check_out(const kvc_out* out, int64_t n, int32_t heads, int32_t dim, bool optional,
                     kvc_error* error) noexcept;

kvc_status check_executor(const kvc_executor* executor, kvc_error* error) noexcept;
kvc_status check_rope(const kvc_rope* rope, int32_t head_dim, kvc_error* error) noexcept;

/// Elements between rows of a side array whose stride may be left 0 for "dense".
constexpr int64_t dense(int64_t stride, int64_t head_stride, int64_t heads) noexcept {
  return stride != 0 ? stride : head_stride != 0 ? heads : 1;
}

/// The batch with its table strides filled in.
kvc_batch with_strides(const kvc_batch& b) noexcept;
/// Slots in use of one head of a sequence.
inline int32_t kv_len_of(const kvc_batch& b, int64_t i, int64_t head, int32_t kv_heads) noexcept {
  const int64_t stride = dense(b.kv_len_stride, b.kv_len_head_stride, kv_heads);
  return b.kv_len[i * stride + head * b.kv_len_head_stride];
}
/// The most of all heads of all sequences.
int32_t longest_kv(const kvc_batch& b, int32_t kv_heads) noexcept;
/// Rows of q and out the batch reaches: q_start may begin above 0.
int64_t row_end(const kvc_batch& b) noexcept;

/// A plan that was made for this geometry.
kvc_status check_plan(const kvc_plan* plan, const kvc_kv& kv, kvc_error* error) noexcept;
/// Bounds, strides, lengths and table entries of a batch.
kvc_status check_batch(const kvc_plan& plan, const kvc_kv& kv, const kvc_batch* b, kvc_error* error) noexcept;
/// Rows of scores that do not lie over each other.
kvc_status check_key_score(int64_t row_stride, int64_t head_stride, const kvc_batch& b, int64_t rows,
                           const kvc_plan& plan, kvc_error* error) noexcept;
kvc_status check_softmax(const kvc_softmax* s, const kvc_batch& b, int64_t rows, kvc_error* error) noexcept;

/// Passes a failed check on.
#define KVC_TRY(expression)                                                         \
  do {                                                                              \
    if (const kvc_status failed_ = (expression); failed_ != KVC_OK) return failed_; \
  } while (false)

}  // namespace kvcache::detail
