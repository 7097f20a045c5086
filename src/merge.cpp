// SPDX-License-Identifier: Apache-2.0
// Joins results over disjoint sets of keys by their log-sum-exp.
#include "check.hpp"
#include "state.hpp"

namespace kvcache::detail {
namespace {

/// Weights 2^(lse - top) of all parts and the sink, accumulated part by part.
void merge_row(const kvc_out* parts, int32_t n, int64_t row, int64_t head, const float* sink,
               const kvc_out& out) noexcept {
  float top = sink != nullptr ? *sink * log2_e : minus_infinity;
  for (int32_t i = 0; i < n; ++i) {
    const float lse = *lse_of(parts[i], row, head);
    top = top > lse ? top : lse;
  }
  const bool none = top == minus_infinity;
  float sum = !none && sink != nullptr ? exp2_weight(*sink * log2_e - top) : 0.0f;
  float acc[max_dim] = {};
  for (int32_t i = 0; i < n && !none; ++i) {
    const float lse = *lse_of(parts[i], row, head);
    if (lse == minus_infinity) continue;
    const float w = exp2_weight(lse - top);
    const std::byte* from = out_row(parts[i], row, head);
    const int64_t element = element_size(parts[i].type);
    for (int32_t d = 0; d < out.dim; ++d) acc[d] += w * load(from + d * element, parts[i].type);
    sum += w;
  }
  std::byte* to = out_row(out, row, head);
  const float factor = none ? 0.0f : 1.0f / sum;
  for (int32_t d = 0; d < out.dim; ++d) store(to + d * element_size(out.type), out.type, acc[d] * factor);
  if (out.lse2 != nullptr) {
    const double lse = double{top} + std::log2(double{sum});
    *lse_of(out, row, head) = none ? minus_infinity : static_cast<float>(lse);
  }
}

}  // namespace
}  // namespace kvcache::detail

using namespace kvcache::detail;

kvc_status kvc_cpu_merge(const kvc_out* parts, int32_t n_parts, int32_t rows, const float* sink_logit,
                         const kvc_out* out, kvc_error* error) {
  if (parts == nullptr || n_parts < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_PARTS, n_parts);
  if (rows < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, rows);
  KVC_TRY(check_struct(out, KVC_FIELD_OUT, error));
  if (out->dim < 1 || out->dim > max_dim) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_DIM_V, out->dim);
  if (out->heads < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_Q_HEADS, out->heads);
  KVC_TRY(check_out(out, rows, out->heads, out->dim, false, error));
  for (int32_t i = 0; i < n_parts; ++i) {
    const kvc_status s = check_out(parts + i, rows, out->heads, out->dim, false, error);
    if (s != KVC_OK) return error != nullptr ? error->index = i, s : s;
    if (parts[i].lse2 == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LSE, 0, i);
  }
  if (out->key_score != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_KEY_SCORE);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < out->heads; ++head) {
      merge_row(parts, n_parts, row, head, sink_logit != nullptr ? sink_logit + head : nullptr, *out);
    }
  }
  return KVC_OK;
}
