// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a model's cache consists of, in numbers: heads, dimensions, storage type, which layers store at all,
// and the bytes that follow from it. The allocator, the planner and the host planes all use these functions,
// so they agree.
#include <cstdint>
#include <span>

#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// Storage type of a plane's values. The numbers are those of KVC_F32, KVC_F16, KVC_BF16 in kvcache.h.
enum class element : uint8_t { f32 = 0, f16 = 1, bf16 = 2 };

/// Bytes of one stored value.
constexpr int32_t element_bytes(element e) noexcept {
  return e == element::f32 ? 4 : 2;
}

/// The part of a model that shares one block table: `layers` stored layers of equal geometry.
struct group_shape {
  int32_t layers = 0;      ///< layers that own storage (layers that borrow another's cache are not counted)
  int32_t kv_heads = 0;    ///< per layer
  int32_t head_dim_k = 0;  ///< values of one K head
  int32_t head_dim_v = 0;  ///< values of one V head
  element type = element::f16;  ///< of K and V as stored
  bool v_aliases_k = false;     ///< MLA latent: V is the first head_dim_v values of K and is stored once
  int32_t window = 0;           ///< sliding window in tokens, counting the query's own; 0 = full attention

  /// Equal in every number.
  constexpr bool operator==(const group_shape&) const noexcept = default;
};

/// A decoder whose layers are all alike. Models with several kinds of layers name groups in the cache
/// configuration.
struct model_shape {
  int32_t layers = 0;           ///< of the model, borrowing ones included
  int32_t q_heads = 0;          ///< query heads per layer; they take no room in the cache
  int32_t kv_heads = 0;         ///< per layer
  int32_t head_dim = 0;         ///< values of one K head
  int32_t head_dim_v = 0;       ///< 0 = same as head_dim
  element type = element::f16;  ///< of K and V as stored
  bool v_aliases_k = false;     ///< as in group_shape
  /// Cross-layer sharing: entry i names the layer whose cache layer i reads and (if i itself) writes; an
  /// owner owns itself and comes first. Empty = every layer owns its cache. The span must outlive the call it
  /// is passed to.
  std::span<const int32_t> layer_owner{};
};

/// Values (not bytes) stored for one token in one layer: MHA, GQA and MQA 2·heads·dim, MLA the latent once.
constexpr int64_t values_per_token_layer(const group_shape& s) noexcept {
  return int64_t{s.kv_heads} * (int64_t{s.head_dim_k} + (s.v_aliases_k ? 0 : s.head_dim_v));
}

/// Bytes stored for one token over all layers of the group, at full precision.
constexpr bytes bytes_per_token(const group_shape& s) noexcept {
  return {values_per_token_layer(s) * s.layers * element_bytes(s.type)};
}

/// Number of layers that own storage; -1 if the owner map is malformed.
constexpr int32_t stored_layers(const model_shape& s) noexcept {
  if (s.layer_owner.empty()) return s.layers;
  if (s.layer_owner.size() != static_cast<size_t>(s.layers)) return -1;
  int32_t stored = 0;
  for (int32_t i = 0; i < s.layers; ++i) {
    const int32_t owner = s.layer_owner[static_cast<size_t>(i)];
    if (owner < 0 || owner > i || s.layer_owner[static_cast<size_t>(owner)] != owner) return -1;
    stored += owner == i;
  }
  return stored;
}

/// The single group of a uniform model.
constexpr group_shape group_of(const model_shape& s) noexcept {
  return {.layers = stored_layers(s),
          .kv_heads = s.kv_heads,
          .head_dim_k = s.head_dim,
          .head_dim_v = s.head_dim_v != 0 ? s.head_dim_v : s.head_dim,
          .type = s.type,
          .v_aliases_k = s.v_aliases_k,
          .window = 0};
}

/// Checks a group's numbers. Fails: bad_argument naming the field, also when the bytes of `block_size` tokens
/// or any stride inside them would not fit the 64-bit and 32-bit ranges that kernels use.
constexpr status validate(const group_shape& s, int32_t block_size) noexcept {
  constexpr int32_t most = 1 << 20;
  if (s.layers < 1 || s.layers > most) return {errc::bad_argument, "layers", s.layers};
  if (s.kv_heads < 1 || s.kv_heads > most) return {errc::bad_argument, "kv_heads", s.kv_heads};
  if (s.head_dim_k < 1 || s.head_dim_k > most) return {errc::bad_argument, "head_dim_k", s.head_dim_k};
  if (s.head_dim_v < 1 || s.head_dim_v > most) return {errc::bad_argument, "head_dim_v", s.head_dim_v};
  if (s.v_aliases_k && s.head_dim_v > s.head_dim_k) return {errc::bad_argument, "head_dim_v", s.head_dim_v};
  if (s.type > element::bf16) return {errc::bad_argument, "type", static_cast<int64_t>(s.type)};
  if (s.window < 0) return {errc::bad_argument, "window", s.window};
  if (!is_power_of_two(block_size) || block_size > (1 << 16)) {
    return {errc::bad_argument, "block_size", block_size};
  }
  const int64_t plane = int64_t{s.kv_heads} * (int64_t{s.head_dim_k} + s.head_dim_v);  // < 2^42
  if (plane * block_size > INT64_MAX / 4 / s.layers) return {errc::bad_argument, "layers", s.layers};
  if (plane * block_size > INT32_MAX) return {errc::bad_argument, "kv_heads", s.kv_heads};
  return {};
}

/// How a group's blocks are stored once they are full. The control plane knows a codec only by these numbers.
struct block_format {
  bytes block{};         ///< one sealed block over all layers; 0 = full precision
  bytes open_block{};    ///< one open block over all layers; 0 = full precision
  int32_t residual = 0;  ///< newest tokens that stay unsealed (a lossy format only)
  bool lossy =
      false;  ///< sealing rounds: blocks have an open form with ids of their own and cannot be reopened
  uint64_t fingerprint = 0;  ///< identity of codec and parameters; part of the sharing scope
  /// Blocks are sealed when the owner says so (settle), not by the step that made them final: a prompt is
  /// computed exactly and packed afterwards. A lossy format only.
  bool deferred = false;
  int32_t exempt = 0;  ///< leading tokens of a text that the first block's seal leaves out of all ranges

  /// Equal in every number.
  constexpr bool operator==(const block_format&) const noexcept = default;
};

/// Bytes of one block over all layers of the group.
constexpr bytes block_bytes(const group_shape& s, int32_t block_size, const block_format& f = {}) noexcept {
  return f.block.count != 0 ? f.block : bytes_per_token(s) * block_size;
}

/// Bytes of one open block over all layers of the group; 0 for a lossless format, which has none.
constexpr bytes open_block_bytes(const group_shape& s, int32_t block_size, const block_format& f) noexcept {
  if (!f.lossy) return {};
  return f.open_block.count != 0 ? f.open_block : bytes_per_token(s) * block_size;
}

/// Version of the layout rules below. It changes when stored bytes would be read differently.
inline constexpr uint32_t layout_version = 1;

/// Identity of the bytes of a block: two caches may exchange blocks only if their fingerprints are equal.
constexpr uint64_t layout_fingerprint(const group_shape& s, int32_t block_size,
                                      const block_format& f) noexcept {
  uint64_t h = mix64(layout_version);
  for (uint64_t v : {uint64_t(s.layers), uint64_t(s.kv_heads), uint64_t(s.head_dim_k), uint64_t(s.head_dim_v),
                     uint64_t(s.type), uint64_t(s.v_aliases_k), uint64_t(s.window), uint64_t(block_size),
                     uint64_t(f.block.count), uint64_t(f.residual),
                     uint64_t(f.lossy) + 2 * uint64_t(f.deferred) + 4 * uint64_t(f.exempt), f.fingerprint}) {
    h = mix64(h ^ v) + v;
  }
  return h;
}

}  // namespace kvcache
