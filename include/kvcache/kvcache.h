// SPDX-License-Identifier: Apache-2.0
#pragma once
// The narrow C API of the data plane: plain structs and calls that append keys and values to paged
// planes, attend over them where they lie, and run the byte movements the control plane has queued.
// Compiles as C99, C++20 and under nvcc. Nothing here allocates, throws, prints or keeps state between
// calls; every failure is a status plus the field that caused it, and leaves all outputs untouched.
//
//   block id x block_stride --+
//   kv head  x head_stride  --+--> first byte of one (block, head) cell of a plane
//   slot     x token_stride --+--> token inside the block
//   dim      x dim_stride   --+--> channel of the head
//
// Strides of planes, rows and outputs count BYTES; strides of index and float side arrays count ELEMENTS.
// A stride of a side array that is 0 where the array needs one means "dense". Unstable until the packed
// formats have shaped it.

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(KVC_SHARED)
#ifdef KVC_BUILDING
#define KVC_API __declspec(dllexport)
#else
#define KVC_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define KVC_API __attribute__((visibility("default")))
#else
#define KVC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// Version of the structs below; a struct whose size the library does not know is refused with KVC_ABI.
#define KVC_ABI_VERSION 1

/// Outcome of a call: 0 is success, negative values are the enumerators below.
typedef int32_t kvc_status;
enum {
  KVC_OK = 0,
  KVC_OUT_OF_BLOCKS = -1,
  KVC_OVER_QUOTA = -2,
  KVC_UNSUPPORTED = -3,   ///< well-formed, but this build or machine cannot do it
  KVC_BAD_ARGUMENT = -4,  ///< the named field is wrong
  KVC_WORKSPACE = -5,     ///< the workspace is smaller than the plan asked for
  KVC_DEVICE = -6,        ///< a device call failed; its code is in kvc_error.native
  KVC_ABI = -7,           ///< a struct_size this library does not know
  KVC_BUSY = -8
};

/// Element types of planes, rows and outputs. The CPU stores F32, F16 and BF16; the rest is reserved.
enum { KVC_F32 = 0, KVC_F16, KVC_BF16, KVC_E4M3, KVC_E5M2, KVC_I8, KVC_U4, KVC_U2, KVC_NVFP4 };

/// How a packed plane is scaled. Reserved: the CPU accepts KVC_SCALE_NONE only.
enum { KVC_SCALE_NONE = 0, KVC_SCALE_TENSOR, KVC_SCALE_HEAD, KVC_SCALE_TOKEN, KVC_SCALE_CHANNEL };

/// Which argument a failed call objects to.
enum {
  KVC_FIELD_NONE = 0,
  KVC_FIELD_PLAN,
  KVC_FIELD_KV,
  KVC_FIELD_BATCH,
  KVC_FIELD_SOFTMAX,
  KVC_FIELD_OUT,
  KVC_FIELD_ROWS,
  KVC_FIELD_APPEND,
  KVC_FIELD_ROPE,
  KVC_FIELD_WORKSPACE,
  KVC_FIELD_EXECUTOR,
  KVC_FIELD_TARGET,
  KVC_FIELD_FEATURES,
  KVC_FIELD_KV_HEADS,
  KVC_FIELD_Q_HEADS,
  KVC_FIELD_DIM_K,
  KVC_FIELD_DIM_V,
  KVC_FIELD_BLOCK,
  KVC_FIELD_BLOCKS,
  KVC_FIELD_K,
  KVC_FIELD_V,
  KVC_FIELD_OPEN_K,
  KVC_FIELD_OPEN_V,
  KVC_FIELD_OPEN_BLOCKS,
  KVC_FIELD_N,
  KVC_FIELD_MAX_Q,
  KVC_FIELD_MAX_KV,
  KVC_FIELD_TABLE,
  KVC_FIELD_TABLE_COLUMNS,
  KVC_FIELD_OPEN_TABLE,
  KVC_FIELD_KV_LEN,
  KVC_FIELD_SEALED,
  KVC_FIELD_Q_START,
  KVC_FIELD_Q_POS,
  KVC_FIELD_K_POS,
  KVC_FIELD_SCALE,
  KVC_FIELD_SOFT_CAP,
  KVC_FIELD_WINDOW,
  KVC_FIELD_ALIBI,
  KVC_FIELD_SINK_LOGIT,
  KVC_FIELD_MASK,
  KVC_FIELD_TYPE,
  KVC_FIELD_STRIDE,
  KVC_FIELD_LSE,
  KVC_FIELD_KEY_SCORE,
  KVC_FIELD_SLOT,
  KVC_FIELD_OPEN_SLOT,
  KVC_FIELD_POS,
  KVC_FIELD_ROPE_STYLE,
  KVC_FIELD_ROPE_DIMS,
  KVC_FIELD_ROPE_THETA,
  KVC_FIELD_ROPE_TABLE,
  KVC_FIELD_PARTS,
  KVC_FIELD_COMMANDS,
  KVC_FIELD_OP,
  KVC_FIELD_TOKENS,
  KVC_FIELD_SRC,
  KVC_FIELD_DST,
  KVC_FIELD_ARG,
  KVC_FIELD_IDS,
  KVC_FIELD_KEEP,
  KVC_FIELD_LAYERS,
  KVC_FIELD_COUNT_
};

/// Where a call failed: the field, the offending value, and where the field is a list its index.
typedef struct kvc_error {
  int32_t native;  ///< device code with KVC_DEVICE, else 0
  int32_t field;   ///< KVC_FIELD_*
  int64_t index;   ///< element of a list (sequence, row, command, part), -1 if the field is no list
  int64_t value;   ///< the value that was refused, 0 if it is no number
} kvc_error;

/// K or V of one layer with all its kv heads.
/// Row-major cells: token_stride = dim * element, dim_stride = element.
/// K transposed inside a block (the fast form on the CPU): token_stride = element, dim_stride = block *
/// element.
typedef struct kvc_plane {
  void* data;
  int64_t block_stride, head_stride, token_stride, dim_stride;  // bytes, not negative
  void* scale;  // scale .. group: reserved for packed types, zero for KVC_F32, KVC_F16, KVC_BF16
  void* zero;
  int64_t scale_block_stride, scale_head_stride, scale_step_stride;
  float tensor_scale;
  int16_t type, scale_type;
  int16_t scale_kind, group;
} kvc_plane;

/// One layer of one group: its geometry and its planes.
typedef struct kvc_kv {
  uint32_t struct_size;
  int32_t group;  ///< commands with this group id move this layer's bytes
  int32_t kv_heads;
  int32_t dim_k, dim_v;      ///< channels per head: multiples of 8, 8 to 256 on the CPU
  int32_t block;             ///< slots per block, a power of two
  int32_t blocks;            ///< ids are in [0, blocks)
  int32_t open_blocks;       ///< ids of the open space, 0 if it does not exist
  int32_t owner;             ///< 0: owns its planes; 1 + i: borrows those of layer i (cross-layer sharing)
  int32_t reserved;          ///< zero
  uint64_t layout;           ///< versioned fingerprint from kvc_layout(), 0 = not stated
  kvc_plane k, v;            ///< v.data == NULL: V is the first dim_v channels of K (MLA)
  kvc_plane open_k, open_v;  ///< full-precision tail of lossy formats; data == NULL if there is none
} kvc_kv;

/// The sequences one attend call reads. Rows of all sequences lie behind each other ("ragged").
typedef struct kvc_batch {
  uint32_t struct_size;
  int32_t n;                  ///< sequences
  int32_t table_columns;      ///< columns of table and open_table
  const int32_t* table;       ///< [n][table_columns] block ids, -1 = absent (its keys are not attended)
  int64_t table_stride;       ///< elements between rows of table, 0 = table_columns
  const int32_t* open_table;  ///< [n][table_columns] ids of the open space, or NULL
  int64_t open_stride;
  const int32_t* kv_len;       ///< [n] or [n][kv_heads] slots in use, the rows appended in this step included
  int64_t kv_len_stride;       ///< 0 = dense
  int64_t kv_len_head_stride;  ///< 0 = same length for every head
  const int32_t* sealed;       ///< [n] leading slots read from table, the rest from open_table; NULL = all
  const int32_t* q_start;      ///< [n+1] first row of each sequence, NULL = one row each
  const int32_t* q_pos;       ///< [rows] text position of each query row; NULL only without causal and window
  const int32_t* k_pos;       ///< [n][..] text position of each slot, NULL = position equals slot index
  int64_t k_pos_stride;       ///< elements between sequences of k_pos
  int64_t k_pos_head_stride;  ///< 0 = same positions for every head
} kvc_batch;

/// What happens between scores and weights.
typedef struct kvc_softmax {
  uint32_t struct_size;
  float scale;              ///< scores are scale * (q . k)
  float soft_cap;           ///< c > 0: score becomes c * tanh(score / c); 0 = none
  int32_t window;           ///< W > 0: a key is seen while q_pos - k_pos < W; 0 = no window
  int32_t causal;           ///< non-zero: a key is seen while k_pos <= q_pos
  const float* sink_logit;  ///< [q_heads] learned logit that joins the denominator, NULL = none
  const float* alibi;       ///< reserved
  const uint32_t* mask;     ///< reserved
  const int64_t* mask_start;
} kvc_softmax;

/// Where results go: row r, head h at o + r * row_stride + h * head_stride, dim contiguous.
/// A row that sees no key is exactly (0, -infinity).
typedef struct kvc_out {
  uint32_t struct_size;
  int32_t type, heads, dim;
  void* o;
  int64_t row_stride, head_stride;  ///< bytes
  float* lse2;             ///< [rows][heads] log2 of the sum of 2^(score * log2 e), NULL = not wanted
  int64_t lse_row_stride;  ///< elements, 0 = heads
  float* key_score;        ///< reserved
  int64_t key_score_stride, key_score_head_stride;
} kvc_out;

/// Rows of queries, keys or values: row r, head h at data + r * row_stride + h * head_stride, dim contiguous.
typedef struct kvc_rows {
  const void* data;
  int32_t type, heads, dim, reserved;
  int64_t row_stride, head_stride;  ///< bytes
} kvc_rows;

/// Memory lent for one call.
typedef struct kvc_buf {
  void* ptr;
  size_t bytes;
} kvc_buf;

/// The caller's parallel-for: run() calls task(arg, i) for every i in [0, n), n <= width, and returns when
/// all are done. NULL where an executor is expected means the calling thread. Results do not depend on it.
typedef struct kvc_executor {
  void* self;
  int32_t width;
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
  uint32_t struct_size;
  int32_t q_heads, q_type, out_type;
  int32_t n, max_q, max_kv;  ///< upper bounds: sequences, rows of one sequence, slots of one sequence
  int32_t width;             ///< of the executor that will be used, 0 = 1
  int32_t target;            ///< KVC_TARGET_*
  uint32_t features;         ///< KVC_USE_* bits
  const kvc_kv* kv;          ///< geometry and strides; its data pointers are not followed
} kvc_plan_in;

/// A checked plan: made once per shape, reused by every layer and step. Plain numbers, may be copied.
typedef struct kvc_plan {
  uint32_t struct_size;
  int32_t target, width, splits, row_block;
  int32_t q_heads, kv_heads, dim_k, dim_v, block;
  int32_t n, max_q, max_kv, head_block;
  size_t workspace_bytes;
} kvc_plan;

/// Pairs that rotary embedding turns together: (2i, 2i+1) or (i, i + dims/2).
enum { KVC_ROPE_INTERLEAVED = 0, KVC_ROPE_HALF_SPLIT = 1 };

/// Rotary position embedding of the first dims channels. Angles are computed in double.
typedef struct kvc_rope {
  uint32_t struct_size;
  int32_t style;            ///< KVC_ROPE_*
  int32_t dims;             ///< even, at most the head dim
  int32_t table_positions;  ///< rows of table
  double theta;             ///< pair i turns by position * theta^(-2i/dims); ignored with frequency
  const double* frequency;  ///< [dims/2] radians per position (scaled variants), NULL = from theta
  const float* table;       ///< [table_positions][dims/2][2] cos, sin from kvc_cpu_rope_table, NULL = compute
} kvc_rope;

/// New keys and values and the slots they go to. Slots of one call are distinct.
typedef struct kvc_append {
  uint32_t struct_size;
  int32_t rows;
  kvc_rows k, v;             ///< v.data == NULL where V aliases K
  const int64_t* slot;       ///< [rows] or [rows][kv_heads]: block id * block + offset, -1 = skip
  int64_t slot_stride;       ///< 0 = dense
  int64_t slot_head_stride;  ///< 0 = same slot for every head
  const int64_t* open_slot;  ///< the same for the open space, NULL = none; strides as slot
  const int32_t* pos;        ///< [rows] text positions, needed with rope
  const kvc_rope* rope;      ///< rotation of K before it is stored, NULL = none
} kvc_append;

/// Byte movements. Commands of one stage are independent of each other; stages run in ascending order.
enum {
  KVC_OP_COPY = 0,   ///< first `tokens` slots of block src to block dst
  KVC_OP_COPY_OPEN,  ///< the same in the open space
  KVC_OP_SEAL,       ///< first `tokens` slots of open block src to block dst, converted to the stored type
  KVC_OP_ZERO,       ///< first `tokens` slots of block dst
  KVC_OP_ROTATE,     ///< turns K of the first `tokens` slots of block dst by `arg` positions, in place
  KVC_OP_GATHER      ///< ids[arg..] = n_src, n_dst, keep index, src ids, dst ids: slot t of the dst run
                     ///< becomes slot keep[head][t] of the src run, for t < `tokens`
};
typedef struct kvc_command {
  uint8_t op, group;
  uint16_t stage;
  int32_t tokens, src, dst, arg;
} kvc_command;

/// What happened to the prefix index, for routers and metrics. A parent is always announced before its
/// children, and a node's removal before its id is used again.
enum {
  KVC_EVENT_STORED = 1,  ///< a unit of tokens can be reused from now on
  KVC_EVENT_REMOVED = 2  ///< it cannot any more
};
typedef struct kvc_event {
  uint16_t kind;   ///< KVC_EVENT_*
  uint16_t tier;   ///< where the bytes lie: 0 = the device's own memory; others are reserved
  int32_t node;    ///< id of the unit, unique among those that are stored
  int32_t parent;  ///< the unit before it, -1 = none
  int32_t depth;   ///< units before it
  int32_t
      scope;  ///< sharing scope, a number that is the same for equal scopes while something of it is stored
  int32_t reserved;
  uint64_t clock;  ///< the cache's logical time
} kvc_event;

/// Slots that survive a gather, ascending, one list per kv head: [layer][head][tokens].
typedef struct kvc_keep {
  const int32_t* slots;
  int64_t head_stride;   ///< elements, 0 = same list for every head
  int64_t layer_stride;  ///< elements, 0 = same lists for every layer
} kvc_keep;

/// Everything kvc_cpu_run executes: one step's commands over all layers (of all groups).
typedef struct kvc_run {
  uint32_t struct_size;
  int32_t n_layers, n_commands, n_ids, n_keeps;
  int32_t reserved;
  const kvc_kv* layers;
  const kvc_command* commands;
  const int32_t* ids;
  const kvc_keep* keeps;
  const kvc_rope* rope;  ///< needed by KVC_OP_ROTATE
} kvc_run;

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

/// Fingerprint of a layer's memory layout: version in the top byte, then geometry, types and strides.
/// Equal layouts and only those may exchange raw blocks.
KVC_API uint64_t kvc_layout(const kvc_kv* kv);

/// English words for a status, a field (KVC_FIELD_*) and a target (KVC_TARGET_*); never NULL.
KVC_API const char* kvc_status_text(kvc_status status);
KVC_API const char* kvc_field_text(int32_t field);
KVC_API const char* kvc_target_text(int32_t target);

#ifdef __cplusplus
}
static_assert(sizeof(kvc_command) == 20, "commands are 20 bytes on every platform");
static_assert(sizeof(kvc_event) == 32, "events are 32 bytes on every platform");
#endif
