// SPDX-License-Identifier: Apache-2.0
#pragma once
// The control plane's half of the C API: the cache as a whole. It decides which blocks every sequence's keys
// and values live in and queues commands for a data plane; it moves no bytes. Its sequences: c/sequence.h.
//
//   create --> [ open, extend ] --> commands --> appends, attend --> end_step --> ... --> destroy
//
// Every struct may be zeroed: then only struct_size and what the comments call "required" has to be set.
// Handles are numbers that are checked, not pointers: one that is zero, made up, closed, destroyed or of
// another cache is answered with KVC_STALE_HANDLE, for ever, as no number is given twice in a process.
// Memory: all taken by kvc_cache_create; only kvc_cache_reset and kvc_cache_check allocate later.
// Thread safety: one owner thread at a time calls what takes a cache; kvc_cache_board may be called by any
// thread. Different caches are independent. Nothing here throws, prints or aborts.

#include <stddef.h>
#include <stdint.h>

#include "kvcache/c/status.h"
#include "kvcache/c/wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A cache. Zero is no cache.
typedef struct kvc_cache {
  uint64_t id;  ///< opaque
} kvc_cache;

/// Most groups of one cache, and most caches of one process.
enum { KVC_MAX_GROUPS = 8, KVC_MAX_CACHES = 4096 };

/// How a group's blocks are stored once they are full; all zero = as they were written.
typedef struct kvc_block_format {
  int64_t block;         ///< bytes of one sealed block over all layers, 0 = full precision
  int64_t open_block;    ///< bytes of one open block over all layers, 0 = full precision
  int32_t residual;      ///< newest tokens that stay unsealed (lossy formats only)
  int32_t lossy;         ///< non-zero: sealing rounds; blocks have an open form with ids of their own
  uint64_t fingerprint;  ///< identity of codec and parameters; part of the sharing scope
  int32_t deferred;      ///< non-zero: blocks are sealed by kvc_settle, not by the step that makes them final
  int32_t exempt;        ///< leading tokens of a text that the first block's seal leaves out of all ranges
} kvc_block_format;

/// Layers that share one block table.
typedef struct kvc_group_config {
  uint32_t struct_size;  ///< sizeof(kvc_group_config)
  int32_t block_size;    ///< tokens, a power of two; 0 = 16
  int32_t layers;        ///< required: layers that own storage
  int32_t kv_heads;      ///< required: per layer
  int32_t head_dim_k;    ///< required: values of one K head
  int32_t head_dim_v;    ///< values of one V head; 0 = as K
  int32_t type;          ///< KVC_F32, KVC_F16, KVC_BF16
  int32_t v_aliases_k;   ///< non-zero: V is the first head_dim_v values of K and is stored once (MLA)
  int32_t window;        ///< sliding window; reserved, 0
  int32_t total;         ///< blocks; 0 = this group's part of kvc_cache_config.capacity
  int32_t open;  ///< open blocks of a lossy format; 0 = enough for every sequence's residual, and unless its
                 ///< seals are deferred for max_step_tokens
  int32_t first_only;       ///< non-zero: stores only the first block_size (1, 2, 4) tokens of a text
  kvc_block_format format;  ///< how sealed blocks are stored
  /// [n_formats] packed formats by their text (kvc_format_text), one for all layers or one per layer, read
  /// during the call only; NULL = `format` says it in bytes. With formats only `format.deferred` is set, the
  /// rest of `format` follows (kvc_block_format_of). Where they exempt tokens, the cache needs a group of the
  /// same layers with first_only and block_size = exempt.
  const char* const* formats;
  int32_t n_formats;  ///< 0, 1 or layers
  int32_t reserved;   ///< 0
} kvc_group_config;

/// Everything that bounds the memory of a cache.
typedef struct kvc_cache_config {
  uint32_t struct_size;            ///< sizeof(kvc_cache_config)
  int32_t n_groups;                ///< required: 1 to KVC_MAX_GROUPS
  const kvc_group_config* groups;  ///< required: [n_groups]
  int64_t capacity;      ///< bytes of all blocks; every group gets room for the same number of tokens
  const char* eviction;  ///< policy by its text, see kvc_eviction_text; NULL = "lru"
  const int32_t* account_limits;  ///< [n_accounts] most blocks each may hold; NULL = one without a limit
  int32_t n_accounts;             ///< 0 with NULL
  int32_t max_sequences;          ///< open at the same time; 0 = 256
  int32_t max_sequence_tokens;    ///< per sequence; 0 = as many as the smallest group holds
  int32_t max_nodes;        ///< units in the prefix index; 0 = as many as the blocks can fill, -1 = none
  int32_t max_scopes;       ///< sharing scopes with something cached or open; 0 = 1024
  int32_t max_events;       ///< index events kept between two steps; 0 = none are recorded
  int32_t max_commands;     ///< queued between two steps; 0 = four per sequence and group, or more if needed
  int32_t max_gathers;      ///< sequences that may gather (kvc_retain) between two steps; 0 = 8, -1 = none
  int32_t max_step_tokens;  ///< new tokens of all sequences in one step, for lossy formats; 0 = 512
  int32_t reserved;         ///< 0
} kvc_cache_config;

/// One group as it is built.
typedef struct kvc_group_geometry {
  int32_t block_size;        ///< tokens
  int32_t total;             ///< blocks
  int32_t open;              ///< open blocks
  int32_t blocks_per_unit;   ///< blocks of this group in one node of the index
  int32_t columns;           ///< table entries of the longest sequence
  int32_t lossy;             ///< 1: has an open table
  int32_t deferred;          ///< 1: sealed by kvc_settle
  int32_t first_only;        ///< 1: stores the first block_size tokens of a text
  int64_t block_bytes;       ///< one block over all layers
  int64_t open_block_bytes;  ///< one open block over all layers
  int64_t memory;            ///< all blocks
} kvc_group_geometry;

/// A whole cache as it is built: what the planner says and what the allocator takes.
typedef struct kvc_geometry {
  uint32_t struct_size;                      ///< sizeof(kvc_geometry)
  int32_t groups;                            ///< entries of `group` in use
  int32_t unit;                              ///< tokens of one node of the index: the largest block size
  int32_t nodes;                             ///< of the index
  int32_t max_sequences;                     ///< open at the same time
  int32_t max_sequence_tokens;               ///< per sequence
  int32_t max_scopes;                        ///< in use at the same time
  int32_t max_events;                        ///< between two steps
  int32_t max_commands;                      ///< between two steps
  int32_t max_gather_ids;                    ///< numbers that the gathers between two steps have room for
  int64_t memory;                            ///< bytes of all blocks of all groups
  int64_t bytes_per_token;                   ///< over all groups, in sealed blocks
  uint64_t fingerprint;                      ///< identity of shape, block sizes and formats
  kvc_group_geometry group[KVC_MAX_GROUPS];  ///< [groups]
} kvc_geometry;

/// Counters. used + cached + free + moving == total, in every snapshot.
typedef struct kvc_stats {
  uint32_t struct_size;       ///< sizeof(kvc_stats)
  uint32_t reserved;          ///< zero
  uint64_t steps;             ///< end_step calls
  uint64_t sequences_live;    ///< open now
  uint64_t sequences_opened;  ///< by open and fork, ever
  uint64_t tokens_asked;      ///< prompt tokens given to open
  uint64_t tokens_reused;     ///< of these, found in the index
  uint64_t tokens_extended;   ///< slots handed out
  uint64_t nodes;             ///< units in the index now
  uint64_t nodes_stored;      ///< units ever indexed
  uint64_t nodes_evicted;     ///< units evicted
  uint64_t events_lost;       ///< index events that found their log full
  uint64_t blocks_copied;     ///< copies on write
  uint64_t refusals;          ///< calls refused for want of blocks, quota, length or commands
  uint64_t blocks_used;       ///< in some sequence's table, each block once
  uint64_t blocks_cached;     ///< only in the index; evictable
  uint64_t blocks_free;       ///< neither
  uint64_t blocks_moving;     ///< on the way to or from another tier
  uint64_t blocks_total;      ///< of all groups
} kvc_stats;

/// Builds a cache and takes all its memory. Owns: nothing of the configuration is kept. Fails:
/// KVC_BAD_ARGUMENT or KVC_UNSUPPORTED with the configuration's field and value, KVC_ABI,
/// KVC_OUT_OF_MEMORY (field CACHE: KVC_MAX_CACHES live). Thread safety: any thread.
KVC_API kvc_status kvc_cache_create(const kvc_cache_config* config, kvc_cache* cache, kvc_error* error);

/// Closes all sequences and gives the memory back; the handle and those of its sequences are stale from now
/// on. Requires: no other call with this cache runs. Fails: KVC_STALE_HANDLE.
KVC_API kvc_status kvc_cache_destroy(kvc_cache cache, kvc_error* error);

/// Back to the state of a new cache, which cannot be told from one; the handle stays. Fails: KVC_BUSY with
/// the number of live sequences, KVC_OUT_OF_MEMORY, KVC_STALE_HANDLE.
KVC_API kvc_status kvc_cache_reset(kvc_cache cache, kvc_error* error);

/// Evicts up to `n` units that no sequence holds, in the order of the policy, to free blocks ahead of demand.
/// `evicted` (may be NULL) is how many went: fewer when the rest is held. Fails: KVC_BAD_ARGUMENT,
/// KVC_STALE_HANDLE. Cost: O(1) each for lru, O(log) otherwise.
KVC_API kvc_status kvc_cache_evict(kvc_cache cache, int32_t n, int32_t* evicted, kvc_error* error);

/// Says what time it is, in ns of any clock that does not run backwards (an earlier time is ignored), for
/// policies that heed it: units whose time to live is over leave ("ttl"; `expired`, which may be NULL, is how
/// many), levels whose duration is over end ("priority"). The time is 0 until it is set. Fails:
/// KVC_STALE_HANDLE. Cost: O(accounts + units that leave).
KVC_API kvc_status kvc_cache_set_time(kvc_cache cache, uint64_t ns, int32_t* expired, kvc_error* error);

/// Byte movements queued since the last end_step, to be run stage by stage before the step's appends
/// (kvc_cpu_run, or an engine's own kernels). Owns: the cache; valid until the next verb. Fails:
/// KVC_BAD_ARGUMENT, KVC_STALE_HANDLE. Cost: O(1).
KVC_API kvc_status kvc_cache_commands(kvc_cache cache, const kvc_command** commands, int32_t* n,
                                      kvc_error* error);

/// The packing of blocks that this step makes final (KVC_OP_SEAL, all of stage 0): to be run in every layer
/// between its append and its attention, since queries of one step read a block in both forms. Owns, Fails,
/// Cost: as kvc_cache_commands.
KVC_API kvc_status kvc_cache_seals(kvc_cache cache, const kvc_command** seals, int32_t* n, kvc_error* error);

/// Payload of the KVC_OP_GATHER among these commands: what kvc_run.ids wants. A command's list begins at its
/// `arg`: blocks read, blocks written, the place (kvc_lengths) of the sequence, then these block ids. Which
/// slots stay says entry `place` of kvc_run.keeps when the command runs. Owns, Fails, Cost: as
/// kvc_cache_commands.
KVC_API kvc_status kvc_cache_gather_ids(kvc_cache cache, const int32_t** ids, int32_t* n, kvc_error* error);

/// What the prefix index did since the last end_step, in order (kvc_cache_config.max_events). Owns: the
/// cache; valid until the next verb. Fails: KVC_BAD_ARGUMENT, KVC_STALE_HANDLE. Cost: O(1).
KVC_API kvc_status kvc_cache_events(kvc_cache cache, const kvc_event** events, int32_t* n, kvc_error* error);

/// Tokens of a node that an event announced as stored; of one that was removed since they are unspecified.
/// `n` is always kvc_geometry.unit. Owns: the cache; valid until the next verb. Fails: KVC_BAD_ARGUMENT,
/// KVC_STALE_HANDLE. Cost: O(1).
KVC_API kvc_status kvc_cache_tokens(kvc_cache cache, int32_t node, const int32_t** tokens, int32_t* n,
                                    kvc_error* error);

/// The commands and seals have been handed to the data plane: forgets them and the events, gives back the
/// open blocks that were sealed, and publishes the counters to kvc_cache_board. Fails: KVC_STALE_HANDLE.
/// Cost: O(commands + seals).
KVC_API kvc_status kvc_cache_end_step(kvc_cache cache, kvc_error* error);

/// The counters as they are now. Requires: stats->struct_size set. Fails: KVC_BAD_ARGUMENT, KVC_ABI,
/// KVC_STALE_HANDLE. Cost: O(groups).
KVC_API kvc_status kvc_cache_count(kvc_cache cache, kvc_stats* stats, kvc_error* error);

/// The counters as the last create, reset or end_step published them, always of one moment. Requires:
/// stats->struct_size set; the cache is not destroyed meanwhile. Fails: as kvc_cache_count. Thread safety:
/// any thread, while the owner works; it never waits for him, and he never for it.
KVC_API kvc_status kvc_cache_board(kvc_cache cache, kvc_stats* stats, kvc_error* error);

/// Blocks that an account is charged for: what its sequences took, live or cached, all groups together.
/// Fails: KVC_BAD_ARGUMENT, KVC_STALE_HANDLE. Cost: O(1).
KVC_API kvc_status kvc_cache_charged(kvc_cache cache, int32_t account, int32_t* blocks, kvc_error* error);

/// The sizes the cache was built with. Requires: geometry->struct_size set. Fails: KVC_BAD_ARGUMENT, KVC_ABI,
/// KVC_STALE_HANDLE.
KVC_API kvc_status kvc_cache_geometry(kvc_cache cache, kvc_geometry* geometry, kvc_error* error);

/// Recounts everything from the tables and the index: `broken` is NULL, or names the first invariant that
/// does not hold (static text). For tests and debugging. Fails: KVC_BAD_ARGUMENT, KVC_STALE_HANDLE. Cost:
/// O(blocks + nodes + tables); allocates.
KVC_API kvc_status kvc_cache_check(kvc_cache cache, const char** broken, kvc_error* error);

/// Name of the i-th eviction policy, NULL past the last: "lru", "lfu", ... Thread safety: any thread.
KVC_API const char* kvc_eviction_name(int32_t i);

/// Reads an eviction policy, in the grammar of evict/parse.hpp: a name, or one with settings such as
/// "ttl:seconds=300". Writes to `out` [size] (may be NULL with size 0), as far as it fits and always ending
/// with 0, the policy with all its settings, or what is wrong: the key, what was found, what is allowed.
/// Fails: KVC_BAD_ARGUMENT (field EVICTION). Thread safety: any thread.
KVC_API kvc_status kvc_eviction_text(const char* text, char* out, size_t size, kvc_error* error);

/// What kvc_cache_create would build, without building it: blocks, bytes per block, bytes of everything.
/// Requires: geometry->struct_size set. Fails: as kvc_cache_create. Thread safety: any thread.
KVC_API kvc_status kvc_plan_cache(const kvc_cache_config* config, kvc_geometry* geometry, kvc_error* error);

/// Reads a format, in the grammar of quant/parse.hpp: a preset (kv8, kv6, kv5, kv4, kv3, kv2, fp8), or codes
/// with settings such as "int4:k=channel,v=token,group=32,residual=32,exempt=sinks". Writes to `out` [size]
/// (may be NULL with size 0), as far as it fits and always ending with 0, the format with all its settings,
/// or what is wrong: the key, what was found, what is allowed. Whether a format suits a shape says
/// kvc_block_format_of. Fails: KVC_BAD_ARGUMENT (field FORMATS). Thread safety: any thread.
KVC_API kvc_status kvc_format_text(const char* text, char* out, size_t size, kvc_error* error);

/// What the formats of a group come to: bytes of a packed and of an open block, residual, exempt tokens,
/// fingerprint. Without formats, or with formats that round nothing, the bytes are those of full precision.
/// Both arguments are needed. Fails: KVC_BAD_ARGUMENT or KVC_UNSUPPORTED with what the shape does not allow
/// (in `index` the text that cannot be read), KVC_ABI. Thread safety: any thread.
KVC_API kvc_status kvc_block_format_of(const kvc_group_config* group, kvc_block_format* format,
                                       kvc_error* error);

/// What sequences of `tokens` tokens each take without sharing: the bytes of one, whole blocks counted, and
/// how many fit at once (0 if not one); either may be NULL. Fails: as kvc_cache_create. Thread safety: any.
KVC_API kvc_status kvc_plan_sequences(const kvc_cache_config* config, int32_t tokens, int64_t* bytes_each,
                                      int32_t* most_sequences, kvc_error* error);

/// The longest text that `sequences` sequences reach at once without sharing; 0 if not one token fits. Fails:
/// as kvc_cache_create. Thread safety: any thread.
KVC_API kvc_status kvc_plan_context(const kvc_cache_config* config, int32_t sequences, int32_t* most_tokens,
                                    kvc_error* error);

#ifdef __cplusplus
}
#endif
