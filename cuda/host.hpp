// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the entry points share: checks that the CUDA part adds to those of the CPU's, and the translation of
// the C API's structs into kernel parameters.
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "../src/check.hpp"
#include "../src/element.hpp"
#include "code_params.hpp"
#include "launch.hpp"

namespace kvcache::detail::gpu {

inline row_array array_of(const kvc_rows& r) noexcept {
  return {static_cast<char*>(const_cast<void*>(r.data)), r.row_stride, r.head_stride, r.type};
}
inline row_array array_of(const kvc_out& o) noexcept {
  return {static_cast<char*>(o.o), o.row_stride, o.head_stride, o.type};
}
inline plane_view view_of(const kvc_plane& p) noexcept {
  return {static_cast<char*>(p.data), p.block_stride, p.head_stride, p.token_stride};
}
inline coded_plane coded_of(const kvc_plane& p, bool keys) noexcept {
  const bool codes = is_code(p.type);
  return {static_cast<char*>(p.data),
          p.block_stride,
          p.head_stride,
          keys && codes ? p.dim_stride : p.token_stride,
          static_cast<char*>(p.scale),
          static_cast<char*>(p.zero),
          p.scale_block_stride,
          p.scale_head_stride,
          p.type,
          p.scale_kind,
          p.scale_group,
          p.clip};
}
inline int64_t lse_stride(const kvc_out& o) noexcept {
  return o.lse_row_stride != 0 ? o.lse_row_stride : o.heads;
}

/// log2 of a power of two.
inline int32_t shift_of(int32_t block) noexcept {
  return __builtin_ctz(static_cast<uint32_t>(block));
}

/// Rotation of a row; steps of all pairs are computed here, in double.
inline rope_params rope_of(const kvc_rope* rope) noexcept {
  rope_params r{};
  if (rope == nullptr) return r;
  r.table = rope->table;
  r.table_positions = rope->table_positions;
  r.pairs = rope->dims / 2;
  r.half_split = rope->style == KVC_ROPE_HALF_SPLIT ? 1 : 0;
  for (int32_t i = 0; i < r.pairs; ++i) {
    const double frequency = rope->frequency != nullptr
                                 ? rope->frequency[i]
                                 : std::pow(rope->theta, -2.0 * i / static_cast<double>(rope->dims));
    const double turns = frequency / 6.283185307179586476925;
    const double part = turns - std::floor(turns);
    r.step[i] = part < 1 ? static_cast<uint64_t>(std::ldexp(part, 64)) : 0;
  }
  return r;
}

/// A plane that kernels can copy 16 bytes at a time.
inline kvc_status check_plane_layout(const kvc_plane& p, int32_t field, kvc_error* error) noexcept {
  if (p.type != KVC_F16 && p.type != KVC_BF16) return fail(error, KVC_UNSUPPORTED, field, p.type);
  if (p.dim_stride != 2) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_STRIDE, p.dim_stride);
  for (const int64_t s : {p.block_stride, p.head_stride, p.token_stride}) {
    if (s % 16 != 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_STRIDE, s);
  }
  if (reinterpret_cast<uintptr_t>(p.data) % 16 != 0) return fail(error, KVC_BAD_ARGUMENT, field);
  return KVC_OK;
}

/// A sealed plane of a layer with codes: codes, or f16 and bf16 rows. All begin at even addresses, as in what
/// quant/format.hpp lays out; where one side has a scale per head or tensor nothing behind it lies better.
inline kvc_status check_packed_plane(const kvc_plane& p, int32_t field, kvc_error* error) noexcept {
  if (!is_code(p.type)) {
    if (p.type != KVC_F16 && p.type != KVC_BF16) return fail(error, KVC_UNSUPPORTED, field, p.type);
    if (p.dim_stride != 2) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_STRIDE, p.dim_stride);
  }
  for (const int64_t s : {p.block_stride, p.head_stride, p.token_stride, p.dim_stride}) {
    if (s % 2 != 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_STRIDE, s);
  }
  if (reinterpret_cast<uintptr_t>(p.data) % 2 != 0) return fail(error, KVC_BAD_ARGUMENT, field);
  return KVC_OK;
}

inline bool packs(const kvc_kv& kv) noexcept {
  return is_code(kv.k.type) || is_code(kv.v.type);
}

/// A layer whose sealed planes may be codes, K and V independently, with Hadamard rotation and exempt slots:
/// what append, run and unpack take. Open and exempt planes are checked where they are used.
inline kvc_status check_packed_layer(const kvc_kv* kv, bool data, kvc_error* error) noexcept {
  KVC_TRY(check_kv(kv, data, error));
  const auto check = packs(*kv) ? check_packed_plane : check_plane_layout;
  KVC_TRY(check(kv->k, KVC_FIELD_K, error));
  const bool own_v = data ? kv->v.data != nullptr : kv->v.dim_stride != 0 || kv->v.token_stride != 0;
  if (!own_v) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_V);
  KVC_TRY(check(kv->v, KVC_FIELD_V, error));
  return kv->k_rope == nullptr ? KVC_OK : fail(error, KVC_UNSUPPORTED, KVC_FIELD_K_ROPE);
}

/// A layer of f16 or bf16 values alone.
inline kvc_status check_layer(const kvc_kv* kv, bool data, kvc_error* error) noexcept {
  KVC_TRY(check_kv(kv, data, error));
  KVC_TRY(check_plane_layout(kv->k, KVC_FIELD_K, error));
  const bool own_v = data ? kv->v.data != nullptr : kv->v.dim_stride != 0;
  if (!own_v) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_V);
  KVC_TRY(check_plane_layout(kv->v, KVC_FIELD_V, error));
  if (kv->hadamard != 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_HADAMARD, kv->hadamard);
  if (kv->k_rope != nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_K_ROPE);
  if (kv->exempt != 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_EXEMPT, kv->exempt);
  return KVC_OK;
}

/// The answer to a launch.
inline kvc_status launched(int32_t code, kvc_error* error) noexcept {
  if (code == 0) return KVC_OK;
  if (error != nullptr) *error = {code, KVC_FIELD_NONE, -1, 0};
  return KVC_DEVICE;
}

}  // namespace kvcache::detail::gpu
