// SPDX-License-Identifier: Apache-2.0
#pragma once
// The data plane on a CUDA stream for C++: the kvc_cuda_* calls with spans and statuses. Compiles with any
// C++20 compiler, without CUDA's headers; device memory stays the caller's.
//
//   auto at = gpu_attention::create(layer, {.q_heads = 32, .sequences = 64, .slots = 131072});
//   void* scratch = ...;                       // at->workspace_bytes() of device memory, for all layers
//   gpu_append(layer, keys, values, {.slots = slots, .rows = 64}, stream);
//   at->run(layer, batch, queries, softmax, out, {scratch, at->workspace_bytes()}, stream);
//
// The status says what the host saw: a call that answers ok has queued its kernels, not finished them. Not
// run on a GPU yet. Libraries: kvcache::cuda, and kvcache::cpu for the names of fields.
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvcache/core/shape.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/kvcache.h"

namespace kvcache {

/// The C++ form of what a kvc_cuda_* call answered. A device error comes as `unsupported`, field "device",
/// with CUDA's code as the value.
inline status gpu_status(kvc_status s, const kvc_error& error) noexcept {
  switch (s) {
    case KVC_OK:
      return {};
    case KVC_DEVICE:
      return {errc::unsupported, "device", error.native};
    case KVC_UNSUPPORTED:
      return {errc::unsupported, kvc_field_text(error.field), error.value};
    case KVC_WORKSPACE:
      return {errc::out_of_memory, kvc_field_text(error.field), error.value};
    default:
      return {errc::bad_argument, kvc_field_text(error.field), error.value};
  }
}

/// Upper bounds and wishes of the attend calls one `gpu_attention` serves.
struct gpu_attention_config {
  int32_t q_heads = 0;              ///< a multiple of the kv heads
  int32_t sequences = 1;            ///< per call
  int32_t rows = 1;                 ///< query rows of one sequence per call
  int32_t slots = 0;                ///< kv length of one sequence
  int32_t multiprocessors = 0;      ///< of the device, 0 = 132
  element q_type = element::f16;    ///< of the query rows: f32, or the planes' type
  element out_type = element::f16;  ///< of the results
  bool fixed_splits = false;        ///< same bits in any batch and under any bounds
  uint32_t features = 0;            ///< KVC_USE_* bits the calls will need
};

/// A checked plan for attention on a stream: made once per geometry, used for every layer, step and replay.
/// Thread safety: any thread; calls that run at the same time need workspaces of their own.
class gpu_attention {
 public:
  gpu_attention() noexcept = default;

  /// Host only: needs neither a driver nor device memory. Fails: unsupported or bad_argument with the field.
  static result<gpu_attention> create(const kvc_kv& geometry, const gpu_attention_config& c) noexcept {
    kvc_plan_in in{};
    in.struct_size = sizeof in;
    in.kv = &geometry;
    in.q_heads = c.q_heads;
    in.q_type = static_cast<int32_t>(c.q_type);
    in.out_type = static_cast<int32_t>(c.out_type);
    in.n = c.sequences;
    in.max_q = c.rows;
    in.max_kv = c.slots;
    in.width = c.multiprocessors;
    in.target = KVC_TARGET_CUDA;
    in.features = c.features | (c.fixed_splits ? uint32_t{KVC_USE_FIXED_SPLITS} : 0u);
    gpu_attention a;
    a.plan_.struct_size = sizeof a.plan_;
    kvc_error e{};
    if (const status s = gpu_status(kvc_cuda_plan(&in, &a.plan_, &e), e); !s) return s;
    return a;
  }

  /// Device memory that run() needs as workspace, aligned to 16 bytes.
  size_t workspace_bytes() const noexcept { return plan_.workspace_bytes; }

  /// Queues attention of all rows of the batch. Fails with the field; then nothing was queued.
  status run(const kvc_kv& kv, const kvc_batch& batch, const kvc_rows& q, const kvc_softmax& softmax,
             const kvc_out& out, kvc_buf workspace, kvc_stream stream) const noexcept {
    kvc_error e{};
    return gpu_status(kvc_cuda_attend(&plan_, &kv, &batch, &q, &softmax, &out, workspace, stream, &e), e);
  }

  /// The checked plan: bounds, splits, workspace.
  const kvc_plan& plan() const noexcept { return plan_; }

 private:
  kvc_plan plan_{};
};

/// Where appended rows go and how they are rotated. All arrays lie on the device.
struct gpu_append_options {
  const int64_t* slots = nullptr;  ///< [rows] block id * block + offset, -1 = skip; [rows][kv_heads] per head
  const int64_t* open_slots = nullptr;    ///< the same for the open space, null = none
  const int64_t* exempt_slots = nullptr;  ///< the same for the exempt space, null = none
  int32_t rows = 0;                       ///< new tokens
  bool slots_per_head = false;            ///< each head writes elsewhere
  const kvc_rope* rope = nullptr;      ///< rotates K before it is rounded and stored; its table on the device
  const int32_t* positions = nullptr;  ///< [rows] text positions, needed with rope
};

/// Queues the storing of one K and one V row per slot. Sealed planes of codes with a scale per token take
/// rows as codes: see kvc_cuda_append. Fails with the field; then nothing was queued.
inline status gpu_append(const kvc_kv& kv, const kvc_rows& k, const kvc_rows& v,
                         const gpu_append_options& options, kvc_stream stream) noexcept {
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = options.rows;
  a.k = k;
  a.v = v;
  a.slot = options.slots;
  a.open_slot = options.open_slots;
  a.exempt_slot = options.exempt_slots;
  a.slot_head_stride = options.slots_per_head ? 1 : 0;
  a.pos = options.positions;
  a.rope = options.rope;
  kvc_error e{};
  return gpu_status(kvc_cuda_append(&kv, &a, stream, &e), e);
}

/// Queues the rotation of rows by their positions ([rows], device) into `out`, which may be the rows' own
/// data.
inline status gpu_rope(const kvc_rope& rope, const kvc_rows& rows, int32_t n_rows, const int32_t* positions,
                       void* out, kvc_stream stream) noexcept {
  kvc_error e{};
  return gpu_status(kvc_cuda_rope(&rope, &rows, n_rows, positions, out, stream, &e), e);
}

/// Queues the joining of at most 16 results over disjoint keys, all with lse2. `sink_logit`: [heads] on the
/// device or null, counted once, here.
inline status gpu_merge(std::span<const kvc_out> parts, int32_t rows, const kvc_out& out, kvc_stream stream,
                        const float* sink_logit = nullptr) noexcept {
  kvc_error e{};
  const auto n = static_cast<int32_t>(parts.size());
  return gpu_status(kvc_cuda_merge(parts.data(), n, rows, sink_logit, &out, stream, &e), e);
}

/// Payload and options of a command list.
struct gpu_run_options {
  std::span<const int32_t> ids{};     ///< payload of gather commands, on the host
  std::span<const kvc_keep> keeps{};  ///< keep-lists they name: structs on the host, slots on the device
  const kvc_rope* rope = nullptr;     ///< needed by rotate commands; its table on the device
};

/// Queues commands over all layers, stage by stage. Fails with the field before anything was queued.
inline status gpu_run(std::span<const kvc_kv> layers, std::span<const kvc_command> commands,
                      kvc_stream stream, const gpu_run_options& options = {}) noexcept {
  kvc_run r{};
  r.struct_size = sizeof r;
  r.layers = layers.data();
  r.n_layers = static_cast<int32_t>(layers.size());
  r.commands = commands.data();
  r.n_commands = static_cast<int32_t>(commands.size());
  r.ids = options.ids.data();
  r.n_ids = static_cast<int32_t>(options.ids.size());
  r.keeps = options.keeps.data();
  r.n_keeps = static_cast<int32_t>(options.keeps.size());
  r.rope = options.rope;
  kvc_error e{};
  return gpu_status(kvc_cuda_run(&r, stream, &e), e);
}

/// Where unpacked blocks go, on the device; one of the two may be null.
struct gpu_unpack_to {
  float* k = nullptr;    ///< [blocks][dim_k][block]
  int64_t k_stride = 0;  ///< floats from block to block
  float* v = nullptr;    ///< [blocks][block][dim_v]
  int64_t v_stride = 0;  ///< floats from block to block
};

/// Queues the reading of one kv head of `n` sealed blocks as floats. `ids`: [n] on the device; one outside
/// the pool leaves its place as it was. Fails with the field; then nothing was queued.
inline status gpu_unpack(const kvc_kv& kv, const int32_t* ids, int32_t n, int32_t head,
                         const gpu_unpack_to& to, kvc_stream stream) noexcept {
  kvc_error e{};
  return gpu_status(kvc_cuda_unpack(&kv, ids, n, head, to.k, to.k_stride, to.v, to.v_stride, stream, &e), e);
}

}  // namespace kvcache
