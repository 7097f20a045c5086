// SPDX-License-Identifier: Apache-2.0
#pragma once
// How every call of the C API answers: a status, and on failure the field it objects to with the value that
// was refused. A failed call has changed nothing.

#include <stdint.h>

/// @def KVC_API
/// Marks what the compiled library exports.
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

/// Version of the structs; a struct whose size the library does not know is refused with KVC_ABI.
#define KVC_ABI_VERSION 4

#ifdef __cplusplus
extern "C" {
#endif

/// Outcome of a call: 0 is success, negative values are the enumerators below.
typedef int32_t kvc_status;
/// What a kvc_status says.
enum {
  KVC_OK = 0,
  KVC_OUT_OF_BLOCKS = -1,      ///< not enough free and evictable blocks; close, preempt or wait
  KVC_OVER_QUOTA = -2,         ///< the account's block limit would be passed
  KVC_UNSUPPORTED = -3,        ///< well-formed, but this build or machine cannot do it
  KVC_BAD_ARGUMENT = -4,       ///< the named field is wrong
  KVC_WORKSPACE = -5,          ///< the workspace is smaller than the plan asked for
  KVC_DEVICE = -6,             ///< a device call failed; its code is in kvc_error.native
  KVC_ABI = -7,                ///< a struct_size this library does not know; 0 if it was not set
  KVC_BUSY = -8,               ///< not now: run the commands, accept the drafts or close the sequences first
  KVC_OUT_OF_MEMORY = -9,      ///< the host refused memory (creation and reset only)
  KVC_OUT_OF_NODES = -10,      ///< reserved: a full index makes kvc_commit index less, which is no error
  KVC_OUT_OF_SCOPES = -11,     ///< more sharing scopes are in use than the configuration names
  KVC_OUT_OF_SEQUENCES = -12,  ///< as many sequences are open as the configuration names
  KVC_TOO_LONG = -13,          ///< the sequence would pass max_sequence_tokens
  KVC_STALE_HANDLE = -14,      ///< never a handle, already closed or destroyed, or another cache's
  KVC_NO_GAIN = -15            ///< dropping tokens would return no block
};

/// Which argument a failed call objects to; kvc_field_text() has its name.
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
  // The host half.
  KVC_FIELD_CACHE,
  KVC_FIELD_SEQUENCE,
  KVC_FIELD_SEQUENCES,
  KVC_FIELD_CONFIG,
  KVC_FIELD_GROUPS,
  KVC_FIELD_GROUP,
  KVC_FIELD_BLOCK_SIZE,
  KVC_FIELD_HEAD_DIM_K,
  KVC_FIELD_HEAD_DIM_V,
  KVC_FIELD_TOTAL,
  KVC_FIELD_OPEN,
  KVC_FIELD_FORMAT_BLOCK,
  KVC_FIELD_FORMAT_OPEN_BLOCK,
  KVC_FIELD_FORMAT_RESIDUAL,
  KVC_FIELD_CAPACITY,
  KVC_FIELD_EVICTION,
  KVC_FIELD_ACCOUNT_LIMITS,
  KVC_FIELD_MAX_SEQUENCES,
  KVC_FIELD_MAX_SEQUENCE_TOKENS,
  KVC_FIELD_MAX_NODES,
  KVC_FIELD_MAX_SCOPES,
  KVC_FIELD_MAX_EVENTS,
  KVC_FIELD_MAX_COMMANDS,
  KVC_FIELD_SCOPE,
  KVC_FIELD_SCOPE_KIND,
  KVC_FIELD_SCOPE_FROM,
  KVC_FIELD_SCOPE_SALT,
  KVC_FIELD_SCOPE_ADAPTER,
  KVC_FIELD_SCOPE_MEDIA,
  KVC_FIELD_OPTIONS,
  KVC_FIELD_ACCOUNT,
  KVC_FIELD_RECOMPUTE,
  KVC_FIELD_PROMPT,
  KVC_FIELD_TEXT,
  KVC_FIELD_DRAFTS,
  KVC_FIELD_DRAFT,
  KVC_FIELD_LENGTHS,
  KVC_FIELD_STATS,
  KVC_FIELD_GEOMETRY,
  KVC_FIELD_VIEW,
  KVC_FIELD_MAX_ROWS,
  KVC_FIELD_INDPTR,
  KVC_FIELD_INDICES,
  KVC_FIELD_LAST_PAGE_LEN,
  KVC_FIELD_FIRST,
  KVC_FIELD_NODE,
  KVC_FIELD_NODES,
  KVC_FIELD_UNIT,
  KVC_FIELD_ROW,
  KVC_FIELD_MEMORY,
  KVC_FIELD_RESERVE,
  KVC_FIELD_LAYER_OWNER,
  KVC_FIELD_CONTIGUOUS,
  KVC_FIELD_ROPE_FREQUENCY,
  KVC_FIELD_PLANES,
  KVC_FIELD_ORDER,
  KVC_FIELD_RESERVED,
  KVC_FIELD_MAX_GATHERS,
  KVC_FIELD_SINKS,
  KVC_FIELD_RECENT,
  KVC_FIELD_OVERWRITTEN,
  KVC_FIELD_POSITION,
  KVC_FIELD_BLOCKS_RETURNED,
  KVC_FIELD_FORMAT,
  KVC_FIELD_SCORE,
  KVC_FIELD_KIND,
  KVC_FIELD_UPTO,
  KVC_FIELD_LEAST,
  KVC_FIELD_SUM,
  KVC_FIELD_VALUE,
  KVC_FIELD_EXEMPT,
  KVC_FIELD_EXEMPT_TABLE,
  KVC_FIELD_HADAMARD,
  KVC_FIELD_ROW_SEALED,
  KVC_FIELD_FORMAT_DEFERRED,
  KVC_FIELD_FORMAT_EXEMPT,
  KVC_FIELD_FIRST_ONLY,
  KVC_FIELD_MAX_STEP_TOKENS,
  KVC_FIELD_SEALS,
  KVC_FIELD_EXEMPT_GROUP,
  KVC_FIELD_EXEMPT_SLOT,
  KVC_FIELD_FORMATS,
  KVC_FIELD_MOVE_SINKS,
  KVC_FIELD_CODES,
  KVC_FIELD_AXIS,
  KVC_FIELD_CLIP,
  KVC_FIELD_GROUP_SIZE,
  KVC_FIELD_RESIDUAL,
  KVC_FIELD_EXEMPT_BLOCKS,
  KVC_FIELD_K_ROPE,
  KVC_FIELD_V_ALIASES_K,
  KVC_FIELD_INTEGER_DOT,
  KVC_FIELD_PRIORITY,
  KVC_FIELD_OTHER,
  KVC_FIELD_COUNT_
};

/// Where a call failed: the field, the offending value, and where the field is a list its index.
typedef struct kvc_error {
  int32_t native;  ///< device code with KVC_DEVICE, else 0
  int32_t field;   ///< KVC_FIELD_*
  int64_t index;   ///< element of a list (sequence, row, command, part), -1 if the field is no list
  int64_t value;   ///< the value that was refused, 0 if it is no number
} kvc_error;

/// Short English words for a status; never NULL. Thread safety: any thread.
KVC_API const char* kvc_status_text(kvc_status status);

/// Name of a field (KVC_FIELD_*) as it stands in the structs; never NULL. Thread safety: any thread.
KVC_API const char* kvc_field_text(int32_t field);

#ifdef __cplusplus
}
#endif
