// SPDX-License-Identifier: Apache-2.0
#pragma once
// The structs that pass between the halves: where keys and values lie, which blocks a batch reads, which
// bytes the control plane wants moved, and what the prefix index did. CPU and CUDA take the same.
//
//   block id x block_stride --+
//   kv head  x head_stride  --+--> first byte of one (block, head) cell of a plane
//   slot     x token_stride --+--> token inside the block
//   dim      x dim_stride   --+--> channel of the head
//
// Strides of planes, rows and outputs count BYTES; strides of index and float side arrays count ELEMENTS.
// A stride of a side array that is 0 where the array needs one means "dense".

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Element types. Rows and outputs are KVC_F32, KVC_F16 or KVC_BF16; sealed planes may hold codes: small
/// floats (e4m3 without infinities, e5m2) or unsigned integers of 8, 6, 5, 4, 3, 2 bits.
enum { KVC_F32 = 0, KVC_F16, KVC_BF16, KVC_E4M3, KVC_E5M2, KVC_U8, KVC_U6, KVC_U5, KVC_U4, KVC_U3, KVC_U2 };

/// Which values of a packed plane share a scale: the cells of all heads of a block, one cell, `scale_group`
/// channels of one slot, or `scale_group` slots of one channel.
enum { KVC_SCALE_NONE = 0, KVC_SCALE_TENSOR, KVC_SCALE_HEAD, KVC_SCALE_TOKEN, KVC_SCALE_CHANNEL };

/// How KVC_OP_SEAL chooses a group's range: all values, or the one of least squared error among 7 shrinkings
/// about the middle, or among 4 of each end.
enum { KVC_CLIP_NONE = 0, KVC_CLIP_MIDDLE, KVC_CLIP_TWO_SIDED };

/// K or V of one layer with all its kv heads.
/// Row-major cells: token_stride = dim * element, dim_stride = element.
/// K transposed inside a block (the fast form on the CPU): token_stride = element, dim_stride = block *
/// element.
/// Codes: rows as drawn in quant/format.hpp; a row of K holds the slots of a channel (dim_stride from row to
/// row, token_stride 0), a row of V the channels of a slot (token_stride, dim_stride 0).
typedef struct kvc_plane {
  void* data;                  ///< first byte of block 0
  int64_t block_stride;        ///< bytes, not negative
  int64_t head_stride;         ///< bytes, not negative
  int64_t token_stride;        ///< bytes, not negative
  int64_t dim_stride;          ///< bytes, not negative
  void* scale;                 ///< KVC_F16 scales of block 0, head 0, dense; NULL where type is no code
  void* zero;                  ///< their groups' minima, KVC_F16; NULL: codes lie evenly about 0
  int64_t scale_block_stride;  ///< bytes from block to block, of scale and zero
  int64_t scale_head_stride;   ///< bytes from head to head; 0 = shared by all heads
  int16_t type;                ///< of the values: KVC_F32, ...
  int16_t scale_kind;          ///< KVC_SCALE_*
  int16_t scale_group;         ///< values that share a scale, for KVC_SCALE_TOKEN and KVC_SCALE_CHANNEL
  int16_t clip;                ///< KVC_CLIP_*
} kvc_plane;

/// Heads are stored rotated by the normalised Walsh-Hadamard matrix, in all spaces: keys (queries are rotated
/// alike), values (results are rotated back).
enum { KVC_HADAMARD_K = 1, KVC_HADAMARD_V = 2 };

struct kvc_rope;

/// One layer of one group: its geometry and its planes.
typedef struct kvc_kv {
  uint32_t struct_size;   ///< sizeof(kvc_kv)
  int32_t group;          ///< commands with this group id move this layer's bytes
  int32_t kv_heads;       ///< heads of K, and of V
  int32_t dim_k;          ///< channels per head: multiples of 8, 8 to 256 on the CPU
  int32_t dim_v;          ///< the same for V
  int32_t block;          ///< slots per block, a power of two
  int32_t blocks;         ///< ids are in [0, blocks)
  int32_t open_blocks;    ///< ids of the open space, 0 if it does not exist
  int32_t owner;          ///< 0: owns its planes; 1 + i: borrows those of layer i (cross-layer sharing)
  int32_t exempt;         ///< leading slots of a text that are read exactly: 0, 1, 2, 4
  int32_t exempt_blocks;  ///< ids of the exempt space, 0 if it does not exist
  int32_t hadamard;       ///< KVC_HADAMARD_* bits
  int32_t integer_dot;    ///< 1: scores of packed keys are integer dot products, queries rounded to 8 bits
  int32_t reserved;       ///< zero
  /// NULL: K is stored as it is given, rotated by its position or not. Else K is stored before rotation, and
  /// turned by this, at the position of its slot, whenever it is read. Outlives the calls.
  const struct kvc_rope* k_rope;
  uint64_t layout;     ///< versioned fingerprint from kvc_layout(), 0 = not stated
  kvc_plane k;         ///< keys
  kvc_plane v;         ///< values; data == NULL: V is the first dim_v channels of K (MLA)
  kvc_plane open_k;    ///< full-precision tail of lossy formats; data == NULL if there is none
  kvc_plane open_v;    ///< the same for V
  kvc_plane exempt_k;  ///< [exempt_blocks][kv_heads][exempt][dim_k] row-major; data == NULL if there is none
  kvc_plane exempt_v;  ///< the same for V
} kvc_kv;

/// The sequences one attend call reads. Rows of all sequences lie behind each other ("ragged").
typedef struct kvc_batch {
  uint32_t struct_size;        ///< sizeof(kvc_batch)
  int32_t n;                   ///< sequences
  int32_t table_columns;       ///< columns of table and open_table
  const int32_t* table;        ///< [n][table_columns] block ids, -1 = absent (its keys are not attended)
  int64_t table_stride;        ///< elements between rows of table, 0 = table_columns
  const int32_t* open_table;   ///< [n][table_columns] ids of the open space, or NULL
  int64_t open_stride;         ///< elements between rows of open_table, 0 = table_columns
  const int32_t* kv_len;       ///< [n] or [n][kv_heads] slots in use, the rows appended in this step included
  int64_t kv_len_stride;       ///< 0 = dense
  int64_t kv_len_head_stride;  ///< 0 = same length for every head
  const int32_t* sealed;       ///< [n] leading slots read from table, the rest from open_table; NULL = all
  /// [rows] of these, those that a row reads from table; what lies between is read from open_table. NULL:
  /// all. Over a layer without codes name them in every call or in none: keys read in two forms are added in
  /// two passes, and so the chunk a row comes in does not change its bits.
  const int32_t* row_sealed;
  const int32_t* exempt_table;  ///< [n] id of the exempt space of each sequence, -1 = none; NULL = none
  const int32_t* q_start;       ///< [n+1] first row of each sequence, NULL = one row each
  const int32_t* q_pos;       ///< [rows] text position of each query row; NULL only without causal and window
  const int32_t* k_pos;       ///< [n][..] text position of each slot, NULL = position equals slot index
  int64_t k_pos_stride;       ///< elements between sequences of k_pos
  int64_t k_pos_head_stride;  ///< 0 = same positions for every head
} kvc_batch;

/// Byte movements. Commands of one stage are independent of each other; stages run in ascending order.
enum {
  KVC_OP_COPY = 0,   ///< first `tokens` slots of block src to block dst
  KVC_OP_COPY_OPEN,  ///< the same in the open space
  KVC_OP_SEAL,       ///< first `tokens` slots of open block src to block dst, converted to the stored type;
                     ///< the first `arg` of them are exempt: left out of all ranges
  KVC_OP_ZERO,       ///< first `tokens` slots of block dst
  KVC_OP_ROTATE,     ///< turns K of the first `tokens` slots of block dst by `arg` positions, in place
  KVC_OP_GATHER      ///< ids[arg..] = n_src, n_dst, keep index, src ids, dst ids: slot t of the dst run
                     ///< becomes slot keep[head][t] of the src run, for t < `tokens`
};
/// One byte movement over all layers of a group.
typedef struct kvc_command {
  uint8_t op;      ///< KVC_OP_*
  uint8_t group;   ///< whose layers
  uint16_t stage;  ///< all commands of lower stages come before
  int32_t tokens;  ///< leading slots
  int32_t src;     ///< block read; where nothing is read, dst
  int32_t dst;     ///< block written
  int32_t arg;     ///< of KVC_OP_SEAL, KVC_OP_ROTATE and KVC_OP_GATHER
} kvc_command;

/// What happened to the prefix index, for routers and metrics. A parent is always announced before its
/// children, and a node's removal before its id is used again.
enum {
  KVC_EVENT_STORED = 1,  ///< a unit of tokens can be reused from now on
  KVC_EVENT_REMOVED = 2  ///< it cannot any more
};
/// One change of the prefix index.
typedef struct kvc_event {
  uint16_t kind;   ///< KVC_EVENT_*
  uint16_t tier;   ///< where the bytes lie: 0 = the device's own memory; others are reserved
  int32_t node;    ///< id of the unit, unique among those that are stored
  int32_t parent;  ///< the unit before it, -1 = none
  int32_t depth;   ///< units before it
  int32_t
      scope;  ///< sharing scope, a number that is the same for equal scopes while something of it is stored
  int32_t reserved;  ///< zero
  uint64_t clock;    ///< the cache's logical time
} kvc_event;

/// Slots that survive a gather, ascending, one list per kv head: [layer][head][tokens].
typedef struct kvc_keep {
  const int32_t* slots;  ///< [layer][head][tokens]
  int64_t head_stride;   ///< elements, 0 = same list for every head
  int64_t layer_stride;  ///< elements, 0 = same lists for every layer
} kvc_keep;

#ifdef __cplusplus
}
static_assert(sizeof(kvc_command) == 20, "commands are 20 bytes on every platform");
static_assert(sizeof(kvc_event) == 32, "events are 32 bytes on every platform");
#endif
