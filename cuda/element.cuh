// SPDX-License-Identifier: Apache-2.0
#pragma once
// Values of rows and planes whose type is known only at run time, and the position of a row's data.
#include "kvcache/c/wire.h"
#include "params.hpp"
#include "ptx.cuh"

namespace kvcache::detail::gpu {

KVCACHE_DEVICE int32_t least(int32_t a, int32_t b) {
  return a < b ? a : b;
}
KVCACHE_DEVICE int32_t most(int32_t a, int32_t b) {
  return a > b ? a : b;
}
KVCACHE_DEVICE float minus_infinity() {
  return -__builtin_huge_valf();
}

template <class T>
KVCACHE_DEVICE T load(const char* p) {
  return *reinterpret_cast<const T*>(p);
}

KVCACHE_DEVICE float load_value(const char* row, int32_t type, int32_t i) {
  if (type == KVC_F32) return load<float>(row + i * 4);
  const uint16_t bits = load<uint16_t>(row + i * 2);
  return type == KVC_F16 ? widen<half_kind::f16>(bits) : widen<half_kind::bf16>(bits);
}
KVCACHE_DEVICE void store_value(char* row, int32_t type, int32_t i, float v) {
  if (type == KVC_F32) {
    *reinterpret_cast<float*>(row + i * 4) = v;
  } else {
    *reinterpret_cast<uint16_t*>(row + i * 2) =
        type == KVC_F16 ? narrow1<half_kind::f16>(v) : narrow1<half_kind::bf16>(v);
  }
}

KVCACHE_DEVICE char* row_of(const row_array& rows, int64_t row, int32_t head) {
  return rows.data + row * rows.row_stride + head * rows.head_stride;
}

/// Weights of two log-sum-exps and their sum; the way in which a sink, a split or another result joins.
struct joined {
  float top;  ///< the larger of both, -infinity if there is nothing
  float a, b;
};
KVCACHE_DEVICE joined join(float a, float b) {
  const float top = a > b ? a : b;
  if (top == minus_infinity()) return {top, 0.0f, 0.0f};
  return {top, fast_exp2(a - top), fast_exp2(b - top)};
}

}  // namespace kvcache::detail::gpu
