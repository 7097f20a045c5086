// SPDX-License-Identifier: Apache-2.0
// Names of statuses, fields and targets, and the layout fingerprint.
#include <initializer_list>

#include "kernel.hpp"

const char* kvc_status_text(kvc_status status) {
  switch (status) {
    case KVC_OK:
      return "ok";
    case KVC_OUT_OF_BLOCKS:
      return "out of blocks";
    case KVC_OVER_QUOTA:
      return "over quota";
    case KVC_UNSUPPORTED:
      return "unsupported";
    case KVC_BAD_ARGUMENT:
      return "bad argument";
    case KVC_WORKSPACE:
      return "workspace too small";
    case KVC_DEVICE:
      return "device error";
    case KVC_ABI:
      return "struct of another library version";
    case KVC_BUSY:
      return "busy";
    case KVC_OUT_OF_MEMORY:
      return "out of memory";
    case KVC_OUT_OF_NODES:
      return "out of nodes";
    case KVC_OUT_OF_SCOPES:
      return "out of scopes";
    case KVC_OUT_OF_SEQUENCES:
      return "out of sequences";
    case KVC_TOO_LONG:
      return "too long";
    case KVC_STALE_HANDLE:
      return "stale handle";
    case KVC_NO_GAIN:
      return "no gain";
    default:
      return "unknown status";
  }
}

const char* kvc_field_text(int32_t field) {
  static constexpr const char* names[] = {"none",
                                          "plan",
                                          "kv",
                                          "batch",
                                          "softmax",
                                          "out",
                                          "rows",
                                          "append",
                                          "rope",
                                          "workspace",
                                          "executor",
                                          "target",
                                          "features",
                                          "kv_heads",
                                          "q_heads",
                                          "dim_k",
                                          "dim_v",
                                          "block",
                                          "blocks",
                                          "k",
                                          "v",
                                          "open_k",
                                          "open_v",
                                          "open_blocks",
                                          "n",
                                          "max_q",
                                          "max_kv",
                                          "table",
                                          "table_columns",
                                          "open_table",
                                          "kv_len",
                                          "sealed",
                                          "q_start",
                                          "q_pos",
                                          "k_pos",
                                          "scale",
                                          "soft_cap",
                                          "window",
                                          "alibi",
                                          "sink_logit",
                                          "mask",
                                          "type",
                                          "stride",
                                          "lse2",
                                          "key_score",
                                          "slot",
                                          "open_slot",
                                          "pos",
                                          "rope.style",
                                          "rope.dims",
                                          "rope.theta",
                                          "rope.table",
                                          "parts",
                                          "commands",
                                          "op",
                                          "tokens",
                                          "src",
                                          "dst",
                                          "arg",
                                          "ids",
                                          "keep",
                                          "layers",
                                          "cache",
                                          "sequence",
                                          "sequences",
                                          "config",
                                          "groups",
                                          "group",
                                          "block_size",
                                          "head_dim_k",
                                          "head_dim_v",
                                          "total",
                                          "open",
                                          "format.block",
                                          "format.open_block",
                                          "format.residual",
                                          "capacity",
                                          "eviction",
                                          "account_limits",
                                          "max_sequences",
                                          "max_sequence_tokens",
                                          "max_nodes",
                                          "max_scopes",
                                          "max_events",
                                          "max_commands",
                                          "scope",
                                          "scope.kind",
                                          "scope.from",
                                          "scope.salt",
                                          "scope.adapter",
                                          "scope.media",
                                          "options",
                                          "account",
                                          "recompute",
                                          "prompt",
                                          "text",
                                          "drafts",
                                          "draft",
                                          "lengths",
                                          "stats",
                                          "geometry",
                                          "view",
                                          "max_rows",
                                          "indptr",
                                          "indices",
                                          "last_page_len",
                                          "first",
                                          "node",
                                          "nodes",
                                          "unit",
                                          "row",
                                          "memory",
                                          "reserve",
                                          "layer_owner",
                                          "contiguous",
                                          "rope.frequency",
                                          "planes",
                                          "order",
                                          "reserved",
                                          "max_gathers",
                                          "sinks",
                                          "recent",
                                          "overwritten",
                                          "position",
                                          "blocks_returned",
                                          "format",
                                          "score",
                                          "kind",
                                          "upto",
                                          "least",
                                          "sum",
                                          "value",
                                          "exempt",
                                          "exempt_table",
                                          "hadamard",
                                          "row_sealed",
                                          "format.deferred",
                                          "format.exempt",
                                          "first_only",
                                          "max_step_tokens",
                                          "seals",
                                          "exempt_group",
                                          "exempt_slot",
                                          "formats",
                                          "move_sinks",
                                          "codes",
                                          "axis",
                                          "clip",
                                          "group_size",
                                          "residual",
                                          "exempt_blocks",
                                          "k_rope",
                                          "v_aliases_k",
                                          "integer_dot",
                                          "priority",
                                          "other"};
  static_assert(sizeof(names) / sizeof(names[0]) == KVC_FIELD_COUNT_);
  return field >= 0 && field < KVC_FIELD_COUNT_ ? names[field] : "unknown field";
}

const char* kvc_target_text(int32_t target) {
  switch (target) {
    case KVC_TARGET_BEST:
      return "best";
    case KVC_TARGET_SCALAR:
      return "scalar";
    case KVC_TARGET_AVX2:
      return "avx2";
    case KVC_TARGET_AVX512:
      return "avx512";
    case KVC_TARGET_NEON:
      return "neon";
    default:
      return "unknown target";
  }
}

namespace {

constexpr uint64_t layout_version = 1;

/// FNV-1a over 64-bit words.
uint64_t mix(uint64_t hash, int64_t word) noexcept {
  for (int i = 0; i < 8; ++i) {
    hash ^= static_cast<uint64_t>(word) >> (8 * i) & 0xff;
    hash *= 0x100000001b3u;
  }
  return hash;
}

uint64_t mix_plane(uint64_t hash, const kvc_plane& p, bool stored) noexcept {
  if (!stored) return mix(hash, -1);
  for (const int64_t word : {int64_t{p.type}, int64_t{p.scale_kind}, int64_t{p.scale_group}, p.block_stride,
                             p.head_stride, p.token_stride, p.dim_stride}) {
    hash = mix(hash, word);
  }
  if (p.scale == nullptr) return hash;
  const auto from_data = [&p](const void* part) {
    return part != nullptr ? static_cast<const std::byte*>(part) - static_cast<const std::byte*>(p.data) : 0;
  };
  for (const int64_t word :
       {int64_t{from_data(p.scale)}, int64_t{from_data(p.zero)}, p.scale_block_stride, p.scale_head_stride}) {
    hash = mix(hash, word);
  }
  return hash;
}

}  // namespace

uint64_t kvc_layout(const kvc_kv* kv) {
  if (kv == nullptr) return 0;
  uint64_t hash = 0xcbf29ce484222325u;
  for (const int64_t word : {kv->kv_heads, kv->dim_k, kv->dim_v, kv->block}) hash = mix(hash, word);
  hash = mix_plane(hash, kv->k, true);
  hash = mix_plane(hash, kv->v, kv->v.data != nullptr);
  if (kv->hadamard != 0 || kv->exempt != 0) hash = mix(mix(hash, kv->hadamard), kv->exempt);
  if (kv->k_rope != nullptr) hash = mix(hash, 1);
  if (kv->integer_dot != 0) hash = mix(hash, 2);
  return layout_version << 56 | (hash & 0x00ffffffffffffffu);
}

namespace kvcache::detail {

const kernel* find_kernel(int32_t target) noexcept {
#if defined(KVCACHE_WITH_HIGHWAY)
  if (const kernel* k = find_simd_kernel(target)) return k;
#endif
  return target == KVC_TARGET_BEST || target == KVC_TARGET_SCALAR ? &scalar_kernel : nullptr;
}

}  // namespace kvcache::detail
