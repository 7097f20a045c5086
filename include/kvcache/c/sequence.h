// SPDX-License-Identifier: Apache-2.0
#pragma once
// The control plane's half of the C API: sequences, one per live request or branch, and what kernels need to
// know of them.
//
//   open --> extend --> (commands, append, attend, end_step) --> ... --> commit --> close
//     | cached prefix     | drafts: accept                          | full units become
//     + shared, pinned    + copy on write where shared              + prefixes for others
//
// Every call first checks that all of it is possible; one that fails has changed nothing. Outputs may be NULL
// where the comment does not ask for them. Rules for handles and threads: c/cache.h.

#include <stddef.h>
#include <stdint.h>

#include "kvcache/c/cache.h"
#include "kvcache/c/status.h"
#include "kvcache/c/wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/// One live request or branch. Zero is none.
typedef struct kvc_sequence {
  uint64_t id;  ///< opaque
} kvc_sequence;

/// Bytes of the caller, read during the call only. data == NULL with size == 0: not given, which is not the
/// same as given and empty.
typedef struct kvc_bytes {
  const void* data;  ///< the bytes
  size_t size;       ///< how many
} kvc_bytes;

/// Who may share a cached prefix. There is no default: isolation is chosen, and a zeroed scope is refused.
enum {
  KVC_SCOPE_SHARED = 1,  ///< everyone: a single user, or prompts that are public
  KVC_SCOPE_TENANT = 2   ///< only who names the same salt
};

/// A sharing domain, chosen by the server and never by the caller of a request: whoever may name a scope may
/// probe what is cached in it. Two sequences share only where all parts are equal, byte for byte. A scope may
/// narrow along the text: a public system prompt, then a tenant's own words; a picture from its first token
/// on.
typedef struct kvc_scope {
  uint32_t struct_size;  ///< sizeof(kvc_scope)
  int32_t kind;          ///< KVC_SCOPE_*; 0 is invalid
  int32_t first_token;   ///< holds from here on: 0 in the outermost scope, ascending inwards
  int32_t reserved;      ///< 0
  kvc_bytes salt;        ///< KVC_SCOPE_TENANT: required, may be empty; else not given
  kvc_bytes adapter;     ///< weights differ: name of the adapter
  uint64_t generation;   ///< of the adapter; grows when the same name gets new weights
  kvc_bytes media;       ///< content that token ids do not show: digest of pictures, sound, embeddings
  uint64_t weights;  ///< version of the base weights; a new one makes all older unreachable; 0 = not stated
  const struct kvc_scope* narrower;  ///< what holds from its first_token on; NULL = nothing else. At most 3
} kvc_scope;

/// Options of one sequence; NULL where they are expected means all zero.
typedef struct kvc_open_options {
  uint32_t struct_size;  ///< sizeof(kvc_open_options); 16, as before there were levels, will do too
  int32_t account;       ///< who is charged
  int32_t recompute;     ///< last tokens of the prompt that must not come from the cache; 0 = 1, the least
  /// Level of what the sequence finds and commits, -32,768 to 32,767, for a policy that heeds it
  /// ("priority"): a lower one goes first. A prefix that several requests use has the highest level of
  /// theirs.
  int32_t priority;
  uint32_t priority_ms;  ///< how long after each use that holds (kvc_cache_set_time), then 0; 0 = for ever
  int32_t reserved;      ///< 0
} kvc_open_options;

/// Lengths of one sequence, in tokens: committed <= accepted <= held.
typedef struct kvc_lengths {
  uint32_t struct_size;  ///< sizeof(kvc_lengths)
  int32_t held;          ///< slots handed out
  int32_t accepted;      ///< of these, final: all but drafts
  int32_t committed;     ///< of these, in the index
  int32_t reused;        ///< of the prompt, found by kvc_open
  int32_t place;  ///< in [0, max_sequences), of this live sequence only: an index into arrays of an engine
  int32_t sealed[KVC_MAX_GROUPS];  ///< per group: leading tokens read from packed blocks (lossy formats)
  int32_t dropped;                 ///< tokens that went (kvc_retain)
  int32_t position;                ///< text position of the next token: held + dropped
} kvc_lengths;

/// How tokens of a live sequence leave.
enum {
  KVC_DROP_NOTHING = 0,   ///< all stay
  KVC_DROP_WHOLE_BLOCKS,  ///< the blocks behind the sinks go; nothing moves but the sinks' angles
  KVC_DROP_OVERWRITE,     ///< the next tokens take slots of others; no block changes hands
  KVC_DROP_GATHER         ///< those that stay are moved together, each kv head its own
};

/// How many tokens of a sequence stay, and how the others leave. Which ones is decided where the scores are.
typedef struct kvc_drop {
  uint32_t struct_size;  ///< sizeof(kvc_drop)
  int32_t form;          ///< KVC_DROP_*
  int32_t keep;          ///< slots that stay per kv head, from 1 to held
  int32_t sinks;         ///< leading slots that stay in any case; whole units with KVC_DROP_WHOLE_BLOCKS
  int32_t recent;        ///< trailing slots that stay in any case
  int32_t move_sinks;    ///< KVC_DROP_WHOLE_BLOCKS, non-zero: turn the sinks by as many positions as went
  int32_t overwritten;   ///< KVC_DROP_OVERWRITE: tokens of the next step that take slots; 0 = see kvc_retain
  int32_t at_a_loss;     ///< non-zero: also where no block comes back
} kvc_drop;

/// Begins a sequence: the longest cached prefix of `prompt` [n] is shared and pinned in the same call. Needed
/// outputs: `sequence`; `reused` is the number of tokens that need no computing, and the sequence's first
/// length. Owns: the caller, until kvc_close. Fails: KVC_BAD_ARGUMENT, KVC_ABI, KVC_TOO_LONG,
/// KVC_OUT_OF_SEQUENCES, KVC_OUT_OF_SCOPES, KVC_STALE_HANDLE. Cost: O(tokens compared + blocks of the hit).
KVC_API kvc_status kvc_open(kvc_cache cache, const kvc_scope* scope, const int32_t* prompt, int32_t n,
                            const kvc_open_options* options, kvc_sequence* sequence, int32_t* reused,
                            kvc_error* error);

/// How many tokens of `prompt` [n] kvc_open would reuse now (`reusable`, needed); changes nothing, not even
/// the order of eviction. `recompute` as in kvc_open_options. Fails: KVC_BAD_ARGUMENT, KVC_ABI,
/// KVC_STALE_HANDLE. Cost: O(tokens compared).
KVC_API kvc_status kvc_peek(kvc_cache cache, const kvc_scope* scope, const int32_t* prompt, int32_t n,
                            int32_t recompute, int32_t* reusable, kvc_error* error);

/// Hands out slots for `n` more tokens and queues copies of shared blocks that are about to be written, and
/// the seals that the tokens make due (kvc_cache_seals). With `draft` they must be accepted before they are
/// committed, and `got` (then needed) may be less than `n`: a lossy format that is not deferred stops a draft
/// before the next seal. Fails: KVC_OUT_OF_BLOCKS with the blocks missing (field OPEN: too many new tokens in
/// one step),
/// KVC_OVER_QUOTA, KVC_TOO_LONG, KVC_BUSY (drafts outstanding, or commands to be run first),
/// KVC_BAD_ARGUMENT, KVC_STALE_HANDLE. Cost: O(blocks added), plus evictions.
KVC_API kvc_status kvc_extend(kvc_cache cache, kvc_sequence sequence, int32_t n, int32_t draft, int32_t* got,
                              kvc_error* error);

/// Keeps the first `n` draft tokens and gives the others back. Fails: KVC_BAD_ARGUMENT, KVC_STALE_HANDLE.
KVC_API kvc_status kvc_accept(kvc_cache cache, kvc_sequence sequence, int32_t n, kvc_error* error);

/// After the step that wrote them: queues the packing of blocks that are final, for formats whose seals are
/// deferred; else nothing. What is computed after the first seal is not indexed. Fails: KVC_BUSY,
/// KVC_STALE_HANDLE.
KVC_API kvc_status kvc_settle(kvc_cache cache, kvc_sequence sequence, kvc_error* error);

/// Shortens to `n` tokens or below: a packed block cannot be reopened. `reached` (needed) is the new length;
/// the engine recomputes from there. Drafts are dropped first. Fails: KVC_BAD_ARGUMENT, KVC_STALE_HANDLE.
KVC_API kvc_status kvc_truncate(kvc_cache cache, kvc_sequence sequence, int32_t n, int32_t* reached,
                                kvc_error* error);

/// Makes full units of `text` [n], all tokens of the sequence from the first, available to others. Requires:
/// K and V of these tokens are written. `indexed` is how many tokens are in the index now; fewer than could
/// be when it is full. With a lossy format only packed units, and with a residual above 1 or deferred seals
/// nothing that was computed after the prefix that kvc_open found, or after kvc_truncate cut into packed
/// blocks. Fails: KVC_BAD_ARGUMENT when it is not the text committed before, KVC_STALE_HANDLE.
/// Cost: O(new tokens).
KVC_API kvc_status kvc_commit(kvc_cache cache, kvc_sequence sequence, const int32_t* text, int32_t n,
                              int32_t* indexed, kvc_error* error);

/// Drops tokens: queues the commands that move what stays and gives blocks back. `dropped` is how many went,
/// `returned` how many blocks of all groups nobody uses any more, less those newly taken. Which tokens stay
/// in a gather is said when the commands run (kvc_cache_gather_ids). Afterwards slots are no text positions
/// (kvc_lengths), what was shared or committed of the prefix is let go, and nothing more of this sequence is
/// indexed. With KVC_DROP_OVERWRITE nothing moves: every block becomes this sequence's own, and the engine
/// chooses the slots that `overwritten` new rows are stored in; with 0 that is all, and drafts may be stored
/// there and counted by a second call once they are final. Requires: K and V of all tokens held are written.
/// Fails: KVC_NO_GAIN with the blocks that would come back, KVC_OUT_OF_BLOCKS, KVC_OVER_QUOTA, KVC_BUSY
/// (drafts, or commands to be run first, an earlier gather of this sequence among them), KVC_TOO_LONG,
/// KVC_BAD_ARGUMENT, KVC_UNSUPPORTED (lossy formats: field MOVE_SINKS, as packed keys are not turned; SINKS,
/// fewer than the exempt tokens; SEALED, as only KVC_DROP_WHOLE_BLOCKS goes with packed tokens, and their
/// number; max_commands or max_gathers too small for this sequence), KVC_ABI, KVC_STALE_HANDLE. Cost:
/// O(blocks + commands queued).
KVC_API kvc_status kvc_retain(kvc_cache cache, kvc_sequence sequence, const kvc_drop* drop, int32_t* dropped,
                              int32_t* returned, kvc_error* error);

/// A second sequence with the same content; blocks are shared until one of them writes. Requires: K and V of
/// all tokens held are written. Needed output: `branch`. Owns: the caller, until kvc_close. Fails:
/// KVC_OUT_OF_SEQUENCES, KVC_BUSY (drafts outstanding), KVC_BAD_ARGUMENT, KVC_STALE_HANDLE. Cost: O(blocks).
KVC_API kvc_status kvc_fork(kvc_cache cache, kvc_sequence sequence, kvc_sequence* branch, kvc_error* error);

/// Makes `to` a copy of `from`, of the same account and scope: the reordering of beam search. Requires: as
/// kvc_fork. `touched` is the number of table entries that differed. Fails: KVC_BAD_ARGUMENT, KVC_BUSY
/// (drafts), KVC_STALE_HANDLE. Cost: O(blocks).
KVC_API kvc_status kvc_assign(kvc_cache cache, kvc_sequence to, kvc_sequence from, int32_t* touched,
                              kvc_error* error);

/// Gives everything back; what was committed stays cached. The handle is stale from now on. Fails:
/// KVC_STALE_HANDLE. Cost: O(blocks).
KVC_API kvc_status kvc_close(kvc_cache cache, kvc_sequence sequence, kvc_error* error);

/// The lengths of a sequence. Requires: lengths->struct_size set. Fails: KVC_BAD_ARGUMENT, KVC_ABI,
/// KVC_STALE_HANDLE. Cost: O(groups).
KVC_API kvc_status kvc_get_lengths(kvc_cache cache, kvc_sequence sequence, kvc_lengths* lengths,
                                   kvc_error* error);

/// Leading tokens of a group that the query which is the `tokens`-th token of the sequence reads from packed
/// blocks (`sealed`, needed): kvc_batch.row_sealed of that row. Requires: `tokens` above the length that the
/// step began with. Fails: KVC_BAD_ARGUMENT, KVC_STALE_HANDLE. Cost: O(1).
KVC_API kvc_status kvc_sealed_at(kvc_cache cache, kvc_sequence sequence, int32_t group, int32_t tokens,
                                 int32_t* sealed, kvc_error* error);

/// Block ids of a sequence in one group, in token order. Both outputs are needed. Owns: the cache; valid
/// until the next verb on any sequence of it. Fails: KVC_BAD_ARGUMENT, KVC_STALE_HANDLE. Cost: O(1).
KVC_API kvc_status kvc_table(kvc_cache cache, kvc_sequence sequence, int32_t group, const int32_t** ids,
                             int32_t* n, kvc_error* error);

/// Ids of the open blocks in the columns of kvc_table, -1 where a block was sealed in an earlier step; n = 0
/// for a lossless format. Else as kvc_table.
KVC_API kvc_status kvc_open_table(kvc_cache cache, kvc_sequence sequence, int32_t group, const int32_t** ids,
                                  int32_t* n, kvc_error* error);

/// Memory of the caller that kvc_view_batch fills, and which sequences it describes. The new rows of a
/// sequence are its last ones: those of the tokens [held - rows, held).
typedef struct kvc_view {
  uint32_t struct_size;           ///< sizeof(kvc_view)
  int32_t group;                  ///< whose tables
  int32_t n;                      ///< sequences
  int32_t table_columns;          ///< ids per row of table: at least the blocks of the longest sequence
  int32_t max_rows;               ///< entries that q_pos, slot and open_slot have room for
  int32_t exempt_group;           ///< 1 + the group of first tokens that belongs to it, 0 = none
  const kvc_sequence* sequences;  ///< [n]
  const int32_t* rows;            ///< [n] new rows of each sequence; NULL = one each
  int32_t* table;                 ///< needed: [n][table_columns] block ids, the rest of a row is -1
  int32_t*
      open_table;   ///< [n][table_columns] the same in the open space; needed for a lossy format, else unused
  int32_t* kv_len;  ///< needed: [n] held
  int32_t* sealed;  ///< [n] tokens read from table; needed for a lossy format, else unused
  int32_t* q_start;  ///< needed: [n+1] first new row of each sequence
  int32_t* q_pos;    ///< needed: [max_rows] slot of each new row, up to which it sees; its text position as
                     ///< long as nothing was dropped, and that less what was dropped afterwards
  int64_t* slot;  ///< [max_rows] where the new rows are stored, -1 where only open_slot is; NULL = not wanted
  int64_t* open_slot;     ///< [max_rows] the same in the open space; needed with slot for a lossy format
  int32_t* row_sealed;    ///< [max_rows] tokens each row reads from table; needed for a lossy format
  int32_t* exempt_table;  ///< [n] block of exempt_group, -1 = none; needed with exempt_group
  int64_t* exempt_slot;   ///< [max_rows] slots in it, -1 for later tokens; needed with exempt_group and slot
} kvc_view;

/// Describes a step's sequences to kernels: tables, lengths, positions, and the slots that kvc_append wants.
/// `batch` (may be NULL) then points into the view's memory and is what kvc_cpu_attend takes. Fails:
/// KVC_BAD_ARGUMENT with the field and in `index` the sequence (no room, rows not in [0, held], an output
/// missing), KVC_ABI, KVC_STALE_HANDLE with the index; nothing is then written. Cost: O(columns + rows).
KVC_API kvc_status kvc_view_batch(kvc_cache cache, const kvc_view* view, kvc_batch* batch, kvc_error* error);

/// The same tables as compressed rows: indptr [n+1], indices [room] block ids behind each other, and
/// last_page_len [n] the slots in use of each last block (0 for an empty sequence). Fails: KVC_BAD_ARGUMENT
/// with the sequence in `index`, KVC_STALE_HANDLE; nothing is then written. Cost: O(blocks).
KVC_API kvc_status kvc_view_csr(kvc_cache cache, const kvc_sequence* sequences, int32_t n, int32_t group,
                                int32_t* indptr, int32_t* indices, int64_t room, int32_t* last_page_len,
                                kvc_error* error);

#ifdef __cplusplus
}
#endif
