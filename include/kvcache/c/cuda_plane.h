// SPDX-License-Identifier: Apache-2.0
#pragma once
// The data plane on a CUDA stream: the verbs and structs of c/data_plane.h, with device memory behind the
// pointers. Not run on a GPU yet.
//
// Every kvc_cuda_* call checks what the host can see, queues its kernels on `stream` and returns; it
// allocates nothing, never waits, keeps no state and may be captured in a graph. On the device lie: planes,
// rows, results, tables, lengths, positions, slots, sinks, workspace. On the host: the structs themselves and
// kvc_rope.frequency. Lengths, tables and row borders are read by the kernels, so their contents may change
// between replays of a graph; contents that the host cannot check are made harmless there: a length is cut to
// the plan's bound and the table's columns, a block id outside the pool counts as absent, a slot outside is
// skipped.
//
// Planes are row-major (KVC_K_ROW_MAJOR) f16 or bf16, K and V alike, data and strides multiples of 16 bytes.
// Where append, run and unpack meet sealed planes of codes, their rows, and those of an exact side beside
// them, need only begin at even addresses; attention wants 16 bytes there too, and strides below 4 GiB. Which
// codes it reads: docs/cuda.md, and kvc_cuda_plan says it.
// Thread safety: every call may run on any thread. Fails, besides what each call names: KVC_DEVICE with
// kvc_error.native when CUDA refuses a launch, as it does without a driver. Libraries: kvcache::cuda.

#include <stddef.h>
#include <stdint.h>

#include "kvcache/c/data_plane.h"
#include "kvcache/c/status.h"
#include "kvcache/c/wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/// CUDA's own stream struct, named so that cudaStream_t can be handed over without CUDA's headers.
struct CUstream_st;
/// A cudaStream_t; NULL is the default stream.
typedef struct CUstream_st* kvc_stream;

/// The target of plans made by kvc_cuda_plan; kvc_cpu_* calls refuse such a plan.
enum { KVC_TARGET_CUDA = 16 };
/// For kvc_plan_in.features: splits of a sequence's keys lie at absolute slots, so that its bits depend on
/// neither the batch nor the plan's bounds.
enum { KVC_USE_FIXED_SPLITS = 512 };

/// Makes a plan for kvc_cuda_attend, or answers why there is none: KVC_UNSUPPORTED plus the field. Host only,
/// needs no driver and no data pointers; serves all layers and steps. in->width: multiprocessors of the
/// device, 0 = 132. Of the plan: `splits` parts and `row_block` packed rows (query row x head of the group)
/// per block of threads (64 or 128: chunks have a kernel of their own, the parts are of shorter sequences),
/// `head_block` keys per split at absolute slots (0: dealt out evenly),
/// `workspace_bytes` for partial results.
KVC_API kvc_status kvc_cuda_plan(const kvc_plan_in* in, kvc_plan* plan, kvc_error* error);

/// Stores rows of K and V at slots of the sealed, open and exempt spaces, rounded to the planes' types, K
/// rotated by position before if asked, then K and V by kv->hadamard. With a rope table the bits are those of
/// kvc_cpu_append; without one angles are exact and their sine and cosine good to two units in the last
/// place. Unlike there, sealed planes of codes with KVC_SCALE_TOKEN take rows at `slot`: V of any code, K of
/// 8 bits (below, neighbouring slots share bytes). The codes are those that an open block of these rows would
/// be sealed to; a value beyond f16's range becomes its nearest end, a NaN 0. Fails also: KVC_UNSUPPORTED,
/// field slot, for other planes of codes.
KVC_API kvc_status kvc_cuda_append(const kvc_kv* kv, const kvc_append* append, kvc_stream stream,
                                   kvc_error* error);

/// Attention of every query row over its sequence's stored keys. Queries are rounded to the planes' type,
/// over codes to f16. batch->q_start without a table of rows means one row each. The workspace is free again
/// when the stream has passed the call.
KVC_API kvc_status kvc_cuda_attend(const kvc_plan* plan, const kvc_kv* kv, const kvc_batch* batch,
                                   const kvc_rows* q, const kvc_softmax* softmax, const kvc_out* out,
                                   kvc_buf workspace, kvc_stream stream, kvc_error* error);

/// Joins at most 16 results over disjoint keys by their lse2 (required in every part). Give sink_logit
/// (device, [heads]) here and not to the partial attends, so that it counts once. out may be one of the
/// parts.
KVC_API kvc_status kvc_cuda_merge(const kvc_out* parts, int32_t n_parts, int32_t rows,
                                  const float* sink_logit, const kvc_out* out, kvc_stream stream,
                                  kvc_error* error);

/// Rotates rows (queries, or keys an engine stores itself); out has the type and strides of rows and may be
/// rows->data. pos is [n_rows], on the device.
KVC_API kvc_status kvc_cuda_rope(const kvc_rope* rope, const kvc_rows* rows, int32_t n_rows,
                                 const int32_t* pos, void* out, kvc_stream stream, kvc_error* error);

/// Queues a list of commands, stage by stage, after every id in it has been checked: one launch per stage,
/// kind and group over all its layers (64 layers and 512 commands at a time). The list, its ids and layers
/// lie on the host and may be changed as soon as the call returns; keep-lists lie on the device, where a slot
/// outside the source run leaves its place as it was. rope, for KVC_OP_ROTATE, as in kvc_cuda_append.
/// KVC_OP_SEAL gives the bits of kvc_cpu_run, for every type of code, kind of scale and clip search; the
/// values, which the host cannot look at, are made fit for it first: one beyond f16's range becomes its
/// nearest end, a NaN 0. Layers of a group may have different formats. Fails also: KVC_UNSUPPORTED for layers
/// of one group with different shapes or exact types, and for a gather of more than 4,096 blocks.
KVC_API kvc_status kvc_cuda_run(const kvc_run* run, kvc_stream stream, kvc_error* error);

/// The values of one kv head of `n` sealed blocks as kernels compute with them, the bits of kvc_cpu_unpack: K
/// as [dim_k][block], V as [block][dim_v], those of block ids[i] at k + i * k_stride (elements). ids, k and v
/// lie on the device; k or v may be NULL. An id outside the pool leaves its place as it was. For tests, for
/// scores of a caller's own, and to read a block back; attention does not need it. Fails: KVC_BAD_ARGUMENT,
/// KVC_UNSUPPORTED. Cost: one pass over codes and values.
KVC_API kvc_status kvc_cuda_unpack(const kvc_kv* kv, const int32_t* ids, int32_t n, int32_t head, float* k,
                                   int64_t k_stride, float* v, int64_t v_stride, kvc_stream stream,
                                   kvc_error* error);

#ifdef __cplusplus
}
#endif
