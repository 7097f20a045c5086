// SPDX-License-Identifier: Apache-2.0
#pragma once
// The data plane's half of the C API: plain structs and calls that append keys and values to paged planes,
// attend over them where they lie, and run the byte movements the control plane has queued. Nothing here
// throws, prints or keeps state between calls, and only kvc_cpu_planes allocates. Thread safety: every call
// may run on any thread, as long as no two write the same memory.

#include <stddef.h>
#include <stdint.h>

#include "kvcache/c/status.h"
#include "kvcache/c/wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/// What happens between scores and weights.
typedef struct kvc_softmax {
  uint32_t struct_size;       ///< sizeof(kvc_softmax)
  float scale;                ///< scores are scale * (q . k)
  float soft_cap;             ///< c > 0: score becomes c * tanh(score / c); 0 = none
  int32_t window;             ///< W > 0: a key is seen while q_pos - k_pos < W; 0 = no window
  int32_t causal;             ///< non-zero: a key is seen while k_pos <= q_pos
  const float* sink_logit;    ///< [q_heads] learned logit that joins the denominator, NULL = none
  const float* alibi;         ///< reserved
  const uint32_t* mask;       ///< reserved
  const int64_t* mask_start;  ///< reserved
} kvc_softmax;

/// Where results go: row r, head h at o + r * row_stride + h * head_stride, dim contiguous.
/// A row that sees no key is exactly (0, -infinity).
typedef struct kvc_out {
  uint32_t struct_size;    ///< sizeof(kvc_out)
  int32_t type;            ///< of the results: KVC_F32, KVC_F16, KVC_BF16
  int32_t heads;           ///< query heads
  int32_t dim;             ///< channels of V
  void* o;                 ///< results; NULL: only lse2 and key_score are wanted, V is not read
  int64_t row_stride;      ///< bytes
  int64_t head_stride;     ///< bytes
  float* lse2;             ///< [rows][heads] log2 of the sum of 2^(score * log2 e), NULL = not wanted
  int64_t lse_row_stride;  ///< elements, 0 = heads
  /// NULL = not wanted, or [rows][heads][slots] scores * log2 e, so that a key's weight is 2^(key_score -
  /// lse2). Of a key the row does not see: -infinity, or left as it was.
  float* key_score;
  int64_t key_score_stride;       ///< elements from row to row
  int64_t key_score_head_stride;  ///< elements from head to head, at least the slots in use
} kvc_out;

/// What a key gets of one query row: its weight, the weight's square, or 1 where the weight reaches `least`.
enum { KVC_SCORE_WEIGHT = 0, KVC_SCORE_SQUARE, KVC_SCORE_HIT };

/// What kvc_cpu_score adds up, and where.
typedef struct kvc_score {
  uint32_t struct_size;           ///< sizeof(kvc_score)
  int32_t kind;                   ///< KVC_SCORE_*
  int32_t grouped;                ///< non-zero: a kv head has one sum per slot, its query heads added in turn
  int32_t reserved;               ///< zero
  const float* lse2;              ///< [rows][q_heads] as kvc_cpu_attend gave them for these rows
  int64_t lse_row_stride;         ///< elements, 0 = q_heads
  const float* key_score;         ///< as kvc_cpu_attend stored them; NULL: computed from the queries and K
  int64_t key_score_stride;       ///< as in kvc_out
  int64_t key_score_head_stride;  ///< as in kvc_out
  const int32_t* upto;            ///< [rows][kv_heads] a row adds to lower slots only; NULL: to all it sees
  const float* least;             ///< [rows][kv_heads] smallest weight that is a hit, for KVC_SCORE_HIT
  float* sum;                     ///< [n][q_heads, or kv_heads if grouped][slots], added to
  int64_t sum_stride;             ///< elements from sequence to sequence
  int64_t sum_head_stride;        ///< elements from head to head, at least the slots in use
} kvc_score;

/// Rows of queries, keys or values: row r, head h at data + r * row_stride + h * head_stride, dim contiguous.
typedef struct kvc_rows {
  const void* data;     ///< row 0, head 0
  int32_t type;         ///< KVC_F32, KVC_F16, KVC_BF16
  int32_t heads;        ///< heads per row
  int32_t dim;          ///< channels per head
  int32_t reserved;     ///< zero
  int64_t row_stride;   ///< bytes
  int64_t head_stride;  ///< bytes
} kvc_rows;

/// Memory lent for one call.
typedef struct kvc_buf {
  void* ptr;     ///< its first byte
  size_t bytes;  ///< its size
} kvc_buf;

/// The caller's parallel-for: run() calls task(arg, i) for every i in [0, n), n <= width, and returns when
/// all are done. NULL where an executor is expected means the calling thread. Results do not depend on it.
typedef struct kvc_executor {
  void* self;     ///< handed to run
  int32_t width;  ///< most tasks that run at the same time
  /// The parallel-for.
  void (*run)(void* self, void (*task)(void* arg, int32_t index), void* arg, int32_t n);
} kvc_executor;

/// Instruction sets of the CPU kernels. All of them give the same bits.
enum { KVC_TARGET_BEST = 0, KVC_TARGET_SCALAR, KVC_TARGET_AVX2, KVC_TARGET_AVX512, KVC_TARGET_NEON };

/// Options an attend call may use, for the capability query.
enum {
  KVC_USE_WINDOW = 1,
  KVC_USE_SOFT_CAP = 2,
  KVC_USE_SINK = 4,
  KVC_USE_LSE = 8,
  KVC_USE_K_POS = 16,
  KVC_USE_OPEN = 32,
  KVC_USE_ALIBI = 64,
  KVC_USE_MASK = 128,
  KVC_USE_KEY_SCORE = 256
};

/// Bounds and wishes a plan is made for.
typedef struct kvc_plan_in {
  uint32_t struct_size;  ///< sizeof(kvc_plan_in)
  int32_t q_heads;       ///< query heads, a multiple of the kv heads
  int32_t q_type;        ///< of the queries: KVC_F32, KVC_F16, KVC_BF16
  int32_t out_type;      ///< of the results
  int32_t n;             ///< most sequences of a call
  int32_t max_q;         ///< most query rows of one sequence
  int32_t max_kv;        ///< most slots of one sequence
  int32_t width;         ///< of the executor that will be used, 0 = 1
  int32_t target;        ///< KVC_TARGET_*
  uint32_t features;     ///< KVC_USE_* bits
  const kvc_kv* kv;      ///< geometry and strides; its data pointers are not followed
} kvc_plan_in;

/// A checked plan: made once per shape, reused by every layer and step. Plain numbers, may be copied.
typedef struct kvc_plan {
  uint32_t struct_size;    ///< sizeof(kvc_plan)
  int32_t target;          ///< the instruction set chosen
  int32_t width;           ///< most tasks at the same time
  int32_t splits;          ///< parts that one sequence's keys are cut into
  int32_t row_block;       ///< query rows per task
  int32_t q_heads;         ///< as asked
  int32_t kv_heads;        ///< of the layer
  int32_t dim_k;           ///< of the layer
  int32_t dim_v;           ///< of the layer
  int32_t block;           ///< of the layer
  int32_t n;               ///< as asked
  int32_t max_q;           ///< as asked
  int32_t max_kv;          ///< as asked
  int32_t head_block;      ///< kv heads per task
  size_t workspace_bytes;  ///< what kvc_cpu_attend needs as workspace
} kvc_plan;

/// Pairs that rotary embedding turns together: (2i, 2i+1) or (i, i + dims/2).
enum { KVC_ROPE_INTERLEAVED = 0, KVC_ROPE_HALF_SPLIT = 1 };

/// Rotary position embedding of the first dims channels. Angles are computed in double.
typedef struct kvc_rope {
  uint32_t struct_size;     ///< sizeof(kvc_rope)
  int32_t style;            ///< KVC_ROPE_*
  int32_t dims;             ///< even, at most the head dim
  int32_t table_positions;  ///< rows of table
  double theta;             ///< pair i turns by position * theta^(-2i/dims); ignored with frequency
  const double* frequency;  ///< [dims/2] radians per position (scaled variants), NULL = from theta
  const float* table;       ///< [table_positions][dims/2][2] cos, sin from kvc_cpu_rope_table, NULL = compute
} kvc_rope;

/// New keys and values and the slots they go to. Slots of one call are distinct.
typedef struct kvc_append {
  uint32_t struct_size;        ///< sizeof(kvc_append)
  int32_t rows;                ///< of k and v
  kvc_rows k;                  ///< new keys
  kvc_rows v;                  ///< new values; data == NULL where V aliases K
  const int64_t* slot;         ///< [rows] or [rows][kv_heads]: block id * block + offset, -1 = skip
  int64_t slot_stride;         ///< 0 = dense
  int64_t slot_head_stride;    ///< 0 = same slot for every head
  const int64_t* open_slot;    ///< the same for the open space, NULL = none; strides as slot
  const int64_t* exempt_slot;  ///< the same for the exempt space (id * exempt + slot), NULL = none
  const int32_t* pos;          ///< [rows] text positions, needed with rope
  const kvc_rope* rope;        ///< rotation of K before it is stored, NULL = none
} kvc_append;

/// Everything kvc_cpu_run executes: one step's commands over all layers (of all groups).
typedef struct kvc_run {
  uint32_t struct_size;         ///< sizeof(kvc_run)
  int32_t n_layers;             ///< of layers
  int32_t n_commands;           ///< of commands
  int32_t n_ids;                ///< of ids
  int32_t n_keeps;              ///< of keeps
  int32_t reserved;             ///< zero
  const kvc_kv* layers;         ///< [n_layers], of all groups
  const kvc_command* commands;  ///< [n_commands]
  const int32_t* ids;           ///< [n_ids] payload of KVC_OP_GATHER
  const kvc_keep* keeps;        ///< [n_keeps] keep-lists that KVC_OP_GATHER names
  const kvc_rope* rope;         ///< needed by KVC_OP_ROTATE
} kvc_run;

/// Order of a K cell: [dim][slot], which the CPU reads fastest, or [slot][dim], which most kernels expect.
enum { KVC_K_TRANSPOSED = 0, KVC_K_ROW_MAJOR = 1 };

/// Memory for the keys and values of one group, cut into planes by kvc_cpu_planes.
typedef struct kvc_planes {
  uint32_t struct_size;  ///< sizeof(kvc_planes)
  int32_t layers;        ///< layers that own storage
  int32_t kv_heads;      ///< per layer
  int32_t dim_k;         ///< channels of one K head
  int32_t dim_v;         ///< channels of one V head
  int32_t type;          ///< KVC_F32, KVC_F16, KVC_BF16
  int32_t v_aliases_k;   ///< non-zero: V is stored as the first dim_v channels of K
  int32_t block;         ///< slots per block, a power of two
  int32_t blocks;        ///< ids are in [0, blocks)
  int32_t group;         ///< id that commands name
  int32_t order;         ///< KVC_K_*
  int32_t reserved;      ///< zero
  kvc_buf memory;        ///< aligned to 64; ptr == NULL: only asks how much is needed
  /// [n_formats] packed formats by their text, as in kvc_group_config; NULL = blocks hold what was written.
  /// With a format that rounds, `order` is that of open blocks.
  const char* const* formats;
  int32_t n_formats;              ///< 0, 1 or layers
  int32_t open_blocks;            ///< ids of the open space, with formats: kvc_group_geometry.open
  int32_t exempt_blocks;          ///< ids of the exempt space, 0 = none: total of the group of first tokens
  int32_t reserved2;              ///< zero
  const struct kvc_rope* k_rope;  ///< for formats that store K before rotation; outlives the planes
} kvc_planes;

/// Describes the layers of a group in memory of the caller, each block of a layer one run of bytes, and says
/// how many bytes that takes (`bytes`, may be NULL). `layers` [planes->layers] is needed with memory; where
/// formats exempt tokens and exempt_blocks is above 0, as many again follow: the exempt rows as layers of
/// group + 1, for commands. Fails: KVC_BAD_ARGUMENT with the field, KVC_UNSUPPORTED where a format does not
/// suit the shape, KVC_WORKSPACE when the memory is too small. Owns: the caller, memory and
/// descriptions. Cost: O(layers); allocates for the time of the call.
KVC_API kvc_status kvc_cpu_planes(const kvc_planes* planes, kvc_kv* layers, int64_t* bytes, kvc_error* error);

/// Makes a plan, or answers why there is none: KVC_UNSUPPORTED plus the field. Needs no data pointers.
KVC_API kvc_status kvc_cpu_plan(const kvc_plan_in* in, kvc_plan* plan, kvc_error* error);

/// Stores rows of K and V, rounded to the planes' types, K rotated before if asked.
KVC_API kvc_status kvc_cpu_append(const kvc_kv* kv, const kvc_append* append, const kvc_executor* executor,
                                  kvc_error* error);

/// Attention of every query row over its sequence's stored keys. Same inputs, same bits: whatever the
/// executor, the batch neighbours, the block size and the chunk the row came in.
KVC_API kvc_status kvc_cpu_attend(const kvc_plan* plan, const kvc_kv* kv, const kvc_batch* batch,
                                  const kvc_rows* q, const kvc_softmax* softmax, const kvc_out* out,
                                  kvc_buf workspace, const kvc_executor* executor, kvc_error* error);

/// Adds what every key of the batch gets of the rows that see it to score->sum, in the order of the rows. A
/// plan, batch, rows and softmax as for kvc_cpu_attend; q may be NULL with score->key_score. Weights are
/// 2^(score - lse2), at most 1. Same inputs, same bits: whatever the executor, the block size, how rows are
/// divided among calls, and whether scores are computed again or come from kvc_cpu_attend.
KVC_API kvc_status kvc_cpu_score(const kvc_plan* plan, const kvc_kv* kv, const kvc_batch* batch,
                                 const kvc_rows* q, const kvc_softmax* softmax, const kvc_score* score,
                                 kvc_buf workspace, const kvc_executor* executor, kvc_error* error);

/// Joins n_parts results over disjoint keys by their lse2 (required in every part). Give sink_logit here
/// and not to the partial attends, so that it counts once. out may be one of the parts.
KVC_API kvc_status kvc_cpu_merge(const kvc_out* parts, int32_t n_parts, int32_t rows, const float* sink_logit,
                                 const kvc_out* out, kvc_error* error);

/// Rotates rows (queries, or keys an engine stores itself); out has the type and strides of rows and may be
/// rows->data. pos is [n_rows].
KVC_API kvc_status kvc_cpu_rope(const kvc_rope* rope, const kvc_rows* rows, int32_t n_rows,
                                const int32_t* pos, void* out, const kvc_executor* executor,
                                kvc_error* error);

/// Fills [positions][dims/2][2] floats with cos and sin for positions 0, 1, ...: what kvc_rope.table wants.
KVC_API kvc_status kvc_cpu_rope_table(const kvc_rope* rope, int32_t positions, float* table,
                                      kvc_error* error);

/// Runs a list of commands, stage by stage, after every id in it has been checked.
KVC_API kvc_status kvc_cpu_run(const kvc_run* run, const kvc_executor* executor, kvc_error* error);

/// The values of one kv head of `n` sealed blocks as kernels compute with them: K as [dim_k][block], V as
/// [block][dim_v], those of block ids[i] at k + i * k_stride (elements). k or v may be NULL. For tests, for
/// scores of a caller's own, and to read a block back; attention does not need it. Fails: KVC_BAD_ARGUMENT,
/// KVC_UNSUPPORTED. Cost: one pass over codes and values.
KVC_API kvc_status kvc_cpu_unpack(const kvc_kv* kv, const int32_t* ids, int32_t n, int32_t head, float* k,
                                  int64_t k_stride, float* v, int64_t v_stride, int32_t target,
                                  kvc_error* error);

/// Fingerprint of a layer's memory layout: version in the top byte, then geometry, types and strides.
/// Equal layouts and only those may exchange raw blocks.
KVC_API uint64_t kvc_layout(const kvc_kv* kv);

/// Name of a target (KVC_TARGET_*); never NULL.
KVC_API const char* kvc_target_text(int32_t target);

#ifdef __cplusplus
}
#endif
