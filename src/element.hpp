// SPDX-License-Identifier: Apache-2.0
#pragma once
// Access to values of planes and rows whose type is known only at run time.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvcache/core/numeric.hpp"
#include "kvcache/kvcache.h"

namespace kvcache::detail {

/// Bytes of one element, 0 for a type the CPU does not store.
constexpr int64_t element_size(int32_t type) noexcept {
  return type == KVC_F32 ? 4 : type == KVC_F16 || type == KVC_BF16 ? 2 : 0;
}

/// Whether values of the type are codes that need a scale.
constexpr bool is_code(int32_t type) noexcept {
  return type >= KVC_E4M3 && type <= KVC_U2;
}

template <class T>
inline T read(const std::byte* p) noexcept {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
inline void write(std::byte* p, T v) noexcept {
  std::memcpy(p, &v, sizeof v);
}

inline float load(const std::byte* p, int32_t type) noexcept {
  if (type == KVC_F32) return read<float>(p);
  return type == KVC_F16 ? to_float(read<f16>(p)) : to_float(read<bf16>(p));
}
inline void store(std::byte* p, int32_t type, float v) noexcept {
  if (type == KVC_F32) return write(p, v);
  return type == KVC_F16 ? write(p, to_f16(v)) : write(p, to_bf16(v));
}

/// Calls f with a null pointer of the storage type, so that loops are compiled once per type.
template <class F>
inline void with_type(int32_t type, F&& f) noexcept {
  if (type == KVC_F32) return f(static_cast<const float*>(nullptr));
  if (type == KVC_F16) return f(static_cast<const f16*>(nullptr));
  f(static_cast<const bf16*>(nullptr));
}

inline const std::byte* bytes_of(const void* p) noexcept {
  return static_cast<const std::byte*>(p);
}
inline std::byte* bytes_of(void* p) noexcept {
  return static_cast<std::byte*>(p);
}

/// First byte of a slot's channel 0 for one head.
inline std::byte* cell(const kvc_plane& p, int64_t block, int64_t head, int64_t offset) noexcept {
  return bytes_of(p.data) + block * p.block_stride + head * p.head_stride + offset * p.token_stride;
}

/// The plane V is read from: K itself where V aliases it.
inline const kvc_plane& v_plane(const kvc_kv& kv) noexcept {
  return kv.v.data != nullptr ? kv.v : kv.k;
}
inline const kvc_plane& open_v_plane(const kvc_kv& kv) noexcept {
  return kv.open_v.data != nullptr ? kv.open_v : kv.open_k;
}

}  // namespace kvcache::detail
