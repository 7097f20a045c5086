// SPDX-License-Identifier: Apache-2.0
#pragma once
// Planes as DLPack tensors, the form in which array libraries hand memory to each other without copying.
// Needs no DLPack header: the structs of version 1 are mirrored here, and their layout is checked.
//
//   plane   [block][head][slot][channel]            strides in elements; K transposed inside a block has the
//   group   [layer][block][head][slot][channel]     strides 1 for slots and `block` for channels
//
// For Python wrap the result in a capsule named "dltensor_versioned".
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

#include "kvcache/core/status.hpp"
#include "kvcache/kvcache.h"

namespace kvcache {

/// Version of the struct layout (major) and of the code lists (minor).
struct dlpack_version {
  uint32_t major;  ///< a consumer that knows another one may only call the deleter
  uint32_t minor;  ///< grows with new codes
};
/// Where memory lies.
struct dlpack_device {
  int32_t type;  ///< 1 = CPU, 2 = CUDA, 3 = pinned host
  int32_t id;    ///< of several devices of the type
};
/// Type of an element.
struct dlpack_type {
  uint8_t code;    ///< dlpack_code
  uint8_t bits;    ///< of one lane
  uint16_t lanes;  ///< 1
};
/// A tensor in somebody's memory.
struct dlpack_tensor {
  void* data;            ///< element 0, before byte_offset
  dlpack_device device;  ///< where data lies
  int32_t ndim;          ///< of shape and strides
  dlpack_type dtype;     ///< of an element
  int64_t* shape;        ///< [ndim] elements
  int64_t* strides;      ///< [ndim] elements
  uint64_t byte_offset;  ///< added to data
};
/// A tensor that says how it is given back.
struct dlpack_managed_tensor {
  dlpack_version version;                          ///< of this layout
  void* manager_ctx;                               ///< the producer's own
  void (*deleter)(struct dlpack_managed_tensor*);  ///< called once by the consumer
  uint64_t flags;                                  ///< dlpack_read_only, ...
  dlpack_tensor tensor;                            ///< what is lent
};

/// What of version 1 this header mirrors.
inline constexpr dlpack_version dlpack_known{1, 1};
/// Flag: the consumer must not write.
inline constexpr uint64_t dlpack_read_only = 1;
/// Type codes in use here.
enum class dlpack_code : uint8_t {
  integer = 0,
  unsigned_integer = 1,
  floating = 2,
  bfloat = 4,
  f8_e4m3fn = 10,
  f8_e5m2 = 12
};
/// Device types in use here.
enum class dlpack_device_type : int32_t { cpu = 1, cuda = 2, cuda_host = 3 };

static_assert(sizeof(void*) != 8 || (sizeof(dlpack_tensor) == 48 && sizeof(dlpack_managed_tensor) == 80));
static_assert(sizeof(dlpack_type) == 4 && sizeof(dlpack_device) == 8 && sizeof(dlpack_version) == 8);
static_assert(sizeof(void*) != 8 ||
              (offsetof(dlpack_tensor, device) == 8 && offsetof(dlpack_tensor, ndim) == 16 &&
               offsetof(dlpack_tensor, dtype) == 20 && offsetof(dlpack_tensor, shape) == 24 &&
               offsetof(dlpack_tensor, strides) == 32 && offsetof(dlpack_tensor, byte_offset) == 40));
static_assert(sizeof(void*) != 8 || (offsetof(dlpack_managed_tensor, manager_ctx) == 8 &&
                                     offsetof(dlpack_managed_tensor, deleter) == 16 &&
                                     offsetof(dlpack_managed_tensor, flags) == 24 &&
                                     offsetof(dlpack_managed_tensor, tensor) == 32));

/// DLPack's name for a storage type (KVC_F32, ...). Fails: unsupported for types below one byte.
inline result<dlpack_type> dlpack_type_of(int32_t type) noexcept {
  const auto as = [](dlpack_code code, uint8_t bits) {
    return dlpack_type{static_cast<uint8_t>(code), bits, 1};
  };
  switch (type) {
    case KVC_F32:
      return as(dlpack_code::floating, 32);
    case KVC_F16:
      return as(dlpack_code::floating, 16);
    case KVC_BF16:
      return as(dlpack_code::bfloat, 16);
    case KVC_E4M3:
      return as(dlpack_code::f8_e4m3fn, 8);
    case KVC_E5M2:
      return as(dlpack_code::f8_e5m2, 8);
    case KVC_U8:
      return as(dlpack_code::unsigned_integer, 8);
    default:
      return {errc::unsupported, "type", type};
  }
}

/// Which of a layer's planes is lent.
enum class plane_role : uint8_t { key, value };

/// How memory is lent.
struct dlpack_options {
  dlpack_device_type device = dlpack_device_type::cpu;  ///< where the planes lie
  int32_t device_id = 0;                                ///< of several devices of the type
  bool read_only = true;  ///< a writer must own every block he writes: shared ones are immutable
  void (*release)(void*) =
      nullptr;            ///< called with `owner` when the consumer is done, to keep the planes alive
  void* owner = nullptr;  ///< of release
};

namespace detail {

struct dlpack_holder {
  dlpack_managed_tensor managed;
  int64_t shape[5], strides[5];
  void (*release)(void*);
  void* owner;
};

inline void dlpack_delete(dlpack_managed_tensor* t) noexcept {
  if (t == nullptr) return;
  auto* holder = static_cast<dlpack_holder*>(t->manager_ctx);
  if (holder->release != nullptr) holder->release(holder->owner);
  delete holder;
}

inline const kvc_plane& plane_in_role(const kvc_kv& kv, plane_role role) noexcept {
  return role == plane_role::value && kv.v.data != nullptr ? kv.v : kv.k;
}

constexpr bool same_strides(const kvc_plane& a, const kvc_plane& b) noexcept {
  return a.type == b.type && a.block_stride == b.block_stride && a.head_stride == b.head_stride &&
         a.token_stride == b.token_stride && a.dim_stride == b.dim_stride;
}

// Layers of one shape at equal distances: the bytes from one to the next.
inline result<int64_t> layer_stride(std::span<const kvc_kv> layers, plane_role role) noexcept {
  const kvc_kv& first = layers[0];
  const kvc_plane& p = plane_in_role(first, role);
  const auto at = [&](size_t i) { return reinterpret_cast<intptr_t>(plane_in_role(layers[i], role).data); };
  const int64_t step = layers.size() > 1 ? at(1) - at(0) : 0;
  for (size_t i = 1; i < layers.size(); ++i) {
    const kvc_kv& kv = layers[i];
    const bool same = kv.kv_heads == first.kv_heads && kv.dim_k == first.dim_k && kv.dim_v == first.dim_v &&
                      kv.block == first.block && kv.blocks == first.blocks &&
                      same_strides(plane_in_role(kv, role), p) && at(i) - at(i - 1) == step;
    if (!same) return {errc::unsupported, "layers", static_cast<int64_t>(i)};
  }
  return step;
}

inline result<dlpack_managed_tensor*> lend(std::span<const kvc_kv> layers, plane_role role, bool with_layers,
                                           const dlpack_options& options) noexcept {
  if (layers.empty()) return {errc::bad_argument, "layers", 0};
  const kvc_kv& kv = layers[0];
  const kvc_plane& p = plane_in_role(kv, role);
  if (p.data == nullptr) return {errc::bad_argument, role == plane_role::key ? "k" : "v"};
  const result<dlpack_type> type = dlpack_type_of(p.type);
  if (!type) return type.error();
  const result<int64_t> step = layer_stride(layers, role);
  if (!step) return step.error();
  const int64_t size = type->bits / 8;
  const int32_t dims = role == plane_role::key ? kv.dim_k : kv.dim_v;
  const int64_t shape[5] = {static_cast<int64_t>(layers.size()), kv.blocks, kv.kv_heads, kv.block, dims};
  const int64_t bytes[5] = {*step, p.block_stride, p.head_stride, p.token_stride, p.dim_stride};
  auto* h = new (std::nothrow) dlpack_holder{};
  if (h == nullptr) return {errc::out_of_memory};
  const int32_t skip = with_layers ? 0 : 1;
  for (int32_t i = skip; i < 5; ++i) {
    if (bytes[i] % size != 0) {
      delete h;
      return {errc::bad_argument, "stride", bytes[i]};
    }
    h->shape[i - skip] = shape[i];
    h->strides[i - skip] = bytes[i] / size;
  }
  h->release = options.release;
  h->owner = options.owner;
  h->managed = {dlpack_known, h, &dlpack_delete, options.read_only ? dlpack_read_only : 0, {}};
  h->managed.tensor = {p.data,   {static_cast<int32_t>(options.device), options.device_id},
                       5 - skip, *type,
                       h->shape, h->strides,
                       0};
  return &h->managed;
}

}  // namespace detail

/// Lends one plane of a layer: [block][head][slot][channel]. Where V aliases K, the value plane is the keys'
/// first channels. Owns: the consumer, who calls the deleter once; the memory stays the lender's. Requires:
/// the planes live until then (dlpack_options::release). Fails: bad_argument, unsupported with the field,
/// out_of_memory.
inline result<dlpack_managed_tensor*> to_dlpack(const kvc_kv& kv, plane_role role,
                                                const dlpack_options& options = {}) noexcept {
  return detail::lend({&kv, 1}, role, false, options);
}

/// Lends the planes of all layers of a group as one tensor: [layer][block][head][slot][channel]. Fails: as
/// to_dlpack, and unsupported with the index of a layer that is not as the first, or not at the same
/// distance.
inline result<dlpack_managed_tensor*> group_to_dlpack(std::span<const kvc_kv> layers, plane_role role,
                                                      const dlpack_options& options = {}) noexcept {
  return detail::lend(layers, role, true, options);
}

}  // namespace kvcache
