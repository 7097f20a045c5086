/* SPDX-License-Identifier: Apache-2.0 */
// Checks for tests in C, and the small cache they share. A C test is a function that the Catch2 driver calls;
// a failed check is reported by Catch2 with the text, file and line of the C source.
#ifndef KVCACHE_TESTS_CAPI_CHECK_H
#define KVCACHE_TESTS_CAPI_CHECK_H

#include "kvcache/kvcache.h"

#ifdef __cplusplus
extern "C" {
#endif

void capi_check(int ok, const char* text, const char* file, int line);
void capi_answer(kvc_status got, kvc_status want, const kvc_error* error, int32_t field, const char* text,
                 const char* file, int line);

/* The condition holds. */
#define IS(condition) capi_check((condition) ? 1 : 0, #condition, __FILE__, __LINE__)
/* The call succeeds. `error` is a kvc_error in scope, as for the next. */
#define OK(call) capi_answer((call), KVC_OK, &error, -1, #call, __FILE__, __LINE__)
/* The call is refused with this status, for this field. */
#define REFUSED(call, status, field) capi_answer((call), (status), &error, (field), #call, __FILE__, __LINE__)

/* One group of f32, 1 layer, 2 kv heads of 8, blocks of 4 tokens; 4 sequences. */
void capi_small(kvc_cache_config* config, kvc_group_config* group, int32_t blocks);
kvc_cache capi_small_cache(int32_t blocks);
/* The scope of everyone. */
kvc_scope capi_shared(void);
kvc_scope capi_tenant(const char* salt);
kvc_stats capi_count(kvc_cache cache);
/* tokens first, first + 1, ... */
void capi_text(int32_t* tokens, int32_t n, int32_t first);
/* Opens with `n` tokens and hands out all their slots. */
kvc_sequence capi_begin(kvc_cache cache, const int32_t* tokens, int32_t n);
int capi_same(kvc_stats a, kvc_stats b);
kvc_lengths capi_lengths(kvc_cache cache, kvc_sequence sequence);

/* The tests. */
void capi_test_config(void);
void capi_test_create(void);
void capi_test_planner(void);
void capi_test_scope(void);
void capi_test_open(void);
void capi_test_lengths(void);
void capi_test_scarcity(void);
void capi_test_branches(void);
void capi_test_drafts(void);
void capi_test_lossy(void);
void capi_test_step(void);
void capi_test_evict(void);
void capi_test_eviction_text(void);
void capi_test_time(void);
void capi_test_reset(void);
void capi_test_retain(void);
void capi_test_retain_refusals(void);
void capi_test_retain_bytes(void);
void capi_test_view(void);
void capi_test_csr(void);
void capi_test_handles(void);
void capi_test_other_cache(void);
void capi_test_missing(void);
void capi_test_layout(void);
void capi_test_format_text(void);
void capi_test_format_refusals(void);

/* A packed cache through the C API alone: PACKED_STEPS steps of two sequences, a drop of whole blocks before
   the last ones, attention of every new row. */
enum {
  PACKED_LAYERS = 2,
  PACKED_HEADS = 2,
  PACKED_Q_HEADS = 4,
  PACKED_DIM = 32,
  PACKED_BLOCK = 32,
  PACKED_BLOCKS = 16,
  PACKED_MOST = 160,
  PACKED_STEPS = 7,
  PACKED_DROP_AT = 4
};
/* New tokens of sequence s in a step. */
int32_t capi_packed_tokens(int32_t step, int32_t s);
float capi_packed_value(int32_t s, int32_t at, int32_t layer, int32_t head, int32_t d, int32_t what);
/* Fills `out` [room] with all results in order; returns how many. */
int32_t capi_packed_run(const char* format, float* out, int32_t room);
void capi_test_many_caches(void);
void capi_test_two_caches(void);
void capi_test_planes(void);
void capi_test_end_to_end(void);

#ifdef __cplusplus
}
#endif

#endif
