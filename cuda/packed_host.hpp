// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention over packed blocks: what the kernels can read, and how they are told.
#include "formats.hpp"
#include "host.hpp"

namespace kvcache::detail::gpu {

/// Codes, or scales, that are copied 16 bytes at a time; strides of 32 bits.
inline kvc_status check_16(const void* data, std::initializer_list<int64_t> strides, int32_t field,
                           kvc_error* error) noexcept {
  for (const int64_t s : strides) {
    if (s % 16 != 0 || s >= int64_t{1} << 32) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_STRIDE, s);
  }
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 ? KVC_OK : fail(error, KVC_UNSUPPORTED, field);
}

inline kvc_status check_packed_keys(const kvc_kv& kv, bool data, kvc_error* error) noexcept {
  const kvc_plane& p = kv.k;
  KVC_TRY(check_16(p.data, {p.block_stride, p.head_stride, p.dim_stride}, KVC_FIELD_K, error));
  KVC_TRY(check_16(p.scale, {p.scale_block_stride, p.scale_head_stride}, KVC_FIELD_SCALE, error));
  if (p.type == KVC_E4M3) {
    const bool one = p.scale_kind == KVC_SCALE_TOKEN && p.scale_group >= kv.dim_k;
    return one ? KVC_OK : fail(error, KVC_UNSUPPORTED, KVC_FIELD_SCALE, p.scale_kind);
  }
  if (p.scale_kind != KVC_SCALE_CHANNEL) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_SCALE, p.scale_kind);
  if (p.scale_group != kv.block) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_GROUP, p.scale_group);
  if (data && p.zero == nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_SCALE);
  return check_16(p.zero, {}, KVC_FIELD_SCALE, error);
}

inline kvc_status check_packed_values(const kvc_kv& kv, kvc_error* error) noexcept {
  const kvc_plane& p = kv.v;
  KVC_TRY(check_16(p.data, {p.block_stride, p.head_stride, p.token_stride}, KVC_FIELD_V, error));
  KVC_TRY(check_16(p.scale, {p.scale_block_stride, p.scale_head_stride}, KVC_FIELD_SCALE, error));
  KVC_TRY(check_16(p.zero, {}, KVC_FIELD_SCALE, error));
  if (p.scale_kind != KVC_SCALE_TOKEN) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_SCALE, p.scale_kind);
  if (p.scale_group % 32 != 0 && p.scale_group < kv.dim_v) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_GROUP, p.scale_group);
  }
  return KVC_OK;
}

/// Open or exempt planes, where they exist: rows of f16 or bf16, all of one type.
inline kvc_status check_exact_planes(const kvc_kv& kv, kvc_error* error) noexcept {
  int32_t type = -1;
  const auto check = [&](const kvc_plane& p, int32_t field) noexcept -> kvc_status {
    KVC_TRY(check_plane_layout(p, field, error));
    if (type >= 0 && p.type != type) return fail(error, KVC_UNSUPPORTED, field, p.type);
    type = p.type;
    return KVC_OK;
  };
  if (kv.open_blocks > 0) {
    KVC_TRY(check(kv.open_k, KVC_FIELD_OPEN_K));
    KVC_TRY(check(kv.open_v, KVC_FIELD_OPEN_V));
  }
  if (kv.exempt > 0 && kv.exempt_blocks > 0) {
    KVC_TRY(check(kv.exempt_k, KVC_FIELD_EXEMPT));
    KVC_TRY(check(kv.exempt_v, KVC_FIELD_EXEMPT));
  }
  return KVC_OK;
}

/// A layer of codes that decode kernels can read.
inline kvc_status check_packed_attend(const kvc_kv* kv, bool data, kvc_error* error) noexcept {
  KVC_TRY(check_packed_layer(kv, data, error));
  const bool k = kv->k.type == KVC_E4M3 || kv->k.type == KVC_U8 || kv->k.type == KVC_U4;
  if (!k) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_K, kv->k.type);
  const bool pair =
      with_format(kv->k.type, kv->v.type, false, []<packed_code, packed_code>() { return true; });
  if (!pair) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_V, kv->v.type);
  if (kv->integer_dot != 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_INTEGER_DOT, kv->integer_dot);
  KVC_TRY(check_packed_keys(*kv, data, error));
  KVC_TRY(check_packed_values(*kv, error));
  return check_exact_planes(*kv, error);
}

inline packed_plane codes_of(const kvc_plane& p, int64_t row_stride) noexcept {
  const auto narrow = [](int64_t stride) noexcept { return static_cast<uint32_t>(stride); };
  return {static_cast<const char*>(p.data),
          static_cast<const char*>(p.scale),
          static_cast<const char*>(p.zero),
          narrow(p.block_stride),
          narrow(p.head_stride),
          narrow(row_stride),
          narrow(p.scale_block_stride),
          narrow(p.scale_head_stride)};
}

inline bool narrow_strides(const kvc_plane& p) noexcept {
  constexpr int64_t limit = int64_t{1} << 32;
  return p.block_stride < limit && p.token_stride < limit;
}

/// What a batch reads of a layer of codes. `at` is filled in already.
inline packed_params packed_of(const decode_params& at, const kvc_kv& kv, const kvc_batch& b) noexcept {
  packed_params p{};
  p.at = at;
  p.k = codes_of(kv.k, kv.k.dim_stride);
  p.v = codes_of(kv.v, kv.v.token_stride);
  p.table = at.table;
  p.table_stride = at.table_stride;
  p.blocks = at.blocks;
  p.at.table = nullptr;
  if (b.open_table != nullptr && kv.open_blocks > 0) {
    p.open = {view_of(kv.open_k),
              view_of(kv.open_v),
              b.open_table,
              b.open_stride != 0 ? b.open_stride : b.table_columns,
              shift_of(kv.block),
              kv.open_blocks,
              narrow_strides(kv.open_k) && narrow_strides(kv.open_v) ? 1 : 0};
    p.exact_bf16 = kv.open_k.type == KVC_BF16 ? 1 : 0;
  }
  if (b.exempt_table != nullptr && kv.exempt > 0 && kv.exempt_blocks > 0) {
    p.exempt = {view_of(kv.exempt_k),
                view_of(kv.exempt_v),
                b.exempt_table,
                1,
                shift_of(kv.exempt),
                kv.exempt_blocks,
                0};
    p.exempt_slots = kv.exempt;
    p.exact_bf16 = kv.exempt_k.type == KVC_BF16 ? 1 : 0;
  }
  p.sealed = b.sealed;
  p.row_sealed = b.row_sealed;
  const int32_t group = kv.v.scale_group < kv.dim_v ? kv.v.scale_group : (kv.dim_v + 31) / 32 * 32;
  p.value_groups = (kv.dim_v + group - 1) / group;
  for (int32_t d = 0; d < kv.dim_v; d += group) p.group_starts |= 1u << (d / 32);
  const float middle = kv.v.type == KVC_U4 ? -7.5f : -127.5f;
  p.value_zero = kv.v.zero != nullptr ? 1.0f : middle;
  p.hadamard = kv.hadamard;
  return p;
}

inline bool is_wide(const kvc_plan& plan) noexcept {
  return plan.row_block == wide_rows;
}

/// Starts the decode kernel for a layer of codes.
inline int32_t start_packed(const kvc_plan& plan, const packed_params& p, const kvc_kv& kv, bool extras,
                            uint32_t blocks, kvc_stream stream) noexcept {
  const packed_choice choice{kv.k.type, kv.v.type, kv.dim_k, is_wide(plan), extras};
  const auto shared = [&]<packed_code K, packed_code V>() {
    return packed_shared_bytes(K, V, kv.dim_k, is_wide(plan));
  };
  const int32_t bytes = with_format(kv.k.type, kv.v.type, 0, shared);
  return launch_packed(choice, p, {blocks, threads_of_block, static_cast<uint32_t>(bytes)}, stream);
}

}  // namespace kvcache::detail::gpu
