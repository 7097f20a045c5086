// SPDX-License-Identifier: Apache-2.0
// What a caller does wrong: stale, foreign, made-up and exchanged handles, missing outputs, too many caches.
#include <stdlib.h>
#include <string.h>

#include "check.h"

// Every call that takes a sequence refuses this one, and nothing changes.
static void stale_sequence(kvc_cache cache, kvc_sequence good, kvc_sequence bad) {
  const kvc_stats before = capi_count(cache);
  kvc_lengths lengths;
  kvc_sequence out = {3};
  kvc_drop drop;
  kvc_error error;
  const int32_t* ids = NULL;
  int32_t n = -9, text[1] = {0}, indptr[2], last;
  memset(&drop, 0, sizeof drop);
  drop.struct_size = (uint32_t)sizeof drop;
  memset(&lengths, 0, sizeof lengths);
  lengths.struct_size = (uint32_t)sizeof lengths;
#define STALE(call)                                    \
  REFUSED(call, KVC_STALE_HANDLE, KVC_FIELD_SEQUENCE); \
  IS(error.value == (int64_t)bad.id)
  STALE(kvc_extend(cache, bad, 1, 0, &n, &error));
  STALE(kvc_accept(cache, bad, 0, &error));
  STALE(kvc_settle(cache, bad, &error));
  STALE(kvc_truncate(cache, bad, 0, &n, &error));
  STALE(kvc_commit(cache, bad, text, 1, &n, &error));
  STALE(kvc_retain(cache, bad, &drop, &n, &n, &error));
  STALE(kvc_fork(cache, bad, &out, &error));
  STALE(kvc_assign(cache, bad, good, &n, &error));
  IS(error.index == 0);
  STALE(kvc_assign(cache, good, bad, &n, &error));
  IS(error.index == 1);
  STALE(kvc_close(cache, bad, &error));
  STALE(kvc_get_lengths(cache, bad, &lengths, &error));
  STALE(kvc_table(cache, bad, 0, &ids, &n, &error));
  STALE(kvc_open_table(cache, bad, 0, &ids, &n, &error));
  STALE(kvc_sealed_at(cache, bad, 0, 0, &n, &error));
  STALE(kvc_view_csr(cache, &bad, 1, 0, indptr, &n, 1, &last, &error));
#undef STALE
  IS(kvc_close(cache, bad, NULL) == KVC_STALE_HANDLE);
  IS(n == -9 && out.id == 3 && ids == NULL && lengths.held == 0);
  IS(capi_same(before, capi_count(cache)));
}

void capi_test_handles(void) {
  const kvc_cache cache = capi_small_cache(8);
  kvc_sequence good, closed, again, bad;
  kvc_error error;
  int32_t text[4], bit;
  capi_text(text, 4, 0);
  good = capi_begin(cache, text, 4);
  closed = capi_begin(cache, text, 4);
  OK(kvc_close(cache, closed, &error));
  stale_sequence(cache, good, closed);
  again = capi_begin(cache, text, 4);  // lives where `closed` lived
  IS(again.id != closed.id && again.id != good.id);
  stale_sequence(cache, good, closed);
  bad.id = 0;
  stale_sequence(cache, good, bad);
  bad.id = cache.id;
  stale_sequence(cache, good, bad);
  for (bit = 0; bit < 64; ++bit) {
    bad.id = good.id ^ ((uint64_t)1 << bit);
    if (bad.id != again.id) stale_sequence(cache, good, bad);
  }
  OK(kvc_cache_destroy(cache, &error));
}

// Every call that takes a cache refuses this one.
static void stale_cache(kvc_cache bad, kvc_sequence s) {
  const kvc_scope scope = capi_shared();
  kvc_error error;
  kvc_stats stats;
  kvc_geometry geometry;
  kvc_lengths lengths;
  kvc_sequence out = {3};
  kvc_drop drop;
  kvc_view view;
  const kvc_command* commands = NULL;
  const kvc_event* events = NULL;
  const int32_t* ids = NULL;
  const char* broken = NULL;
  int32_t n = -9, token = 0, indptr[2], last;
  memset(&stats, 0, sizeof stats);
  memset(&geometry, 0, sizeof geometry);
  memset(&lengths, 0, sizeof lengths);
  memset(&drop, 0, sizeof drop);
  memset(&view, 0, sizeof view);
  drop.struct_size = (uint32_t)sizeof drop;
  stats.struct_size = (uint32_t)sizeof stats;
  geometry.struct_size = (uint32_t)sizeof geometry;
  lengths.struct_size = (uint32_t)sizeof lengths;
  view.struct_size = (uint32_t)sizeof view;
#define STALE(call)                                 \
  REFUSED(call, KVC_STALE_HANDLE, KVC_FIELD_CACHE); \
  IS(error.value == (int64_t)bad.id)
  STALE(kvc_cache_destroy(bad, &error));
  STALE(kvc_cache_reset(bad, &error));
  STALE(kvc_cache_evict(bad, 1, &n, &error));
  STALE(kvc_cache_set_time(bad, 1, &n, &error));
  STALE(kvc_cache_commands(bad, &commands, &n, &error));
  STALE(kvc_cache_gather_ids(bad, &ids, &n, &error));
  STALE(kvc_cache_events(bad, &events, &n, &error));
  STALE(kvc_cache_tokens(bad, 0, &ids, &n, &error));
  STALE(kvc_cache_end_step(bad, &error));
  STALE(kvc_cache_count(bad, &stats, &error));
  STALE(kvc_cache_board(bad, &stats, &error));
  STALE(kvc_cache_charged(bad, 0, &n, &error));
  STALE(kvc_cache_geometry(bad, &geometry, &error));
  STALE(kvc_cache_check(bad, &broken, &error));
  STALE(kvc_open(bad, &scope, &token, 1, NULL, &out, &n, &error));
  STALE(kvc_peek(bad, &scope, &token, 1, 1, &n, &error));
  STALE(kvc_extend(bad, s, 1, 0, &n, &error));
  STALE(kvc_accept(bad, s, 0, &error));
  STALE(kvc_settle(bad, s, &error));
  STALE(kvc_truncate(bad, s, 0, &n, &error));
  STALE(kvc_commit(bad, s, &token, 1, &n, &error));
  STALE(kvc_retain(bad, s, &drop, &n, &n, &error));
  STALE(kvc_fork(bad, s, &out, &error));
  STALE(kvc_assign(bad, s, s, &n, &error));
  STALE(kvc_close(bad, s, &error));
  STALE(kvc_get_lengths(bad, s, &lengths, &error));
  STALE(kvc_table(bad, s, 0, &ids, &n, &error));
  STALE(kvc_open_table(bad, s, 0, &ids, &n, &error));
  STALE(kvc_sealed_at(bad, s, 0, 0, &n, &error));
  STALE(kvc_cache_seals(bad, &commands, &n, &error));
  STALE(kvc_view_batch(bad, &view, NULL, &error));
  STALE(kvc_view_csr(bad, &s, 1, 0, indptr, &n, 1, &last, &error));
#undef STALE
  IS(kvc_cache_destroy(bad, NULL) == KVC_STALE_HANDLE);
  IS(n == -9 && out.id == 3 && ids == NULL && commands == NULL && events == NULL && stats.blocks_total == 0);
}

void capi_test_other_cache(void) {
  const kvc_cache a = capi_small_cache(8), b = capi_small_cache(8);
  kvc_cache bad;
  kvc_sequence in_a, in_b;
  kvc_error error;
  int32_t text[4], bit;
  capi_text(text, 4, 0);
  in_a = capi_begin(a, text, 4);
  in_b = capi_begin(b, text, 4);
  stale_sequence(a, in_a, in_b);
  stale_sequence(b, in_b, in_a);
  bad.id = in_a.id;
  stale_cache(bad, in_a);
  for (bad.id = 0; bad.id < 5000; ++bad.id) {
    if (bad.id != a.id && bad.id != b.id) IS(kvc_cache_end_step(bad, &error) == KVC_STALE_HANDLE);
  }
  for (bit = 0; bit < 64; ++bit) {
    bad.id = a.id ^ ((uint64_t)1 << bit);
    if (bad.id != b.id) stale_cache(bad, in_a);
  }
  // Destroyed with a live sequence: both are gone, the neighbour stays.
  OK(kvc_cache_destroy(a, &error));
  stale_cache(a, in_a);
  stale_sequence(b, in_b, in_a);
  OK(kvc_close(b, in_b, &error));
  bad = capi_small_cache(8);  // may live where `a` lived
  stale_cache(a, in_a);
  stale_sequence(bad, capi_begin(bad, text, 4), in_a);
  OK(kvc_cache_destroy(b, &error));
  OK(kvc_cache_destroy(bad, &error));
}

void capi_test_missing(void) {
  const kvc_cache cache = capi_small_cache(8);
  const kvc_command* commands = NULL;
  const kvc_event* events = NULL;
  const int32_t* ids = NULL;
  kvc_error error;
  int32_t n = -9;
  REFUSED(kvc_cache_commands(cache, NULL, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_COMMANDS);
  REFUSED(kvc_cache_commands(cache, &commands, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_cache_gather_ids(cache, NULL, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_IDS);
  REFUSED(kvc_cache_gather_ids(cache, &ids, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_cache_events(cache, NULL, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  REFUSED(kvc_cache_events(cache, &events, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_cache_tokens(cache, 0, NULL, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS);
  REFUSED(kvc_cache_tokens(cache, 0, &ids, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_cache_count(cache, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_STATS);
  REFUSED(kvc_cache_board(cache, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_STATS);
  IS(n == -9 && commands == NULL && events == NULL && ids == NULL);
  OK(kvc_cache_destroy(cache, &error));
  // Every status has words of its own, every field a name, and nothing else does.
  for (n = 0; n >= KVC_NO_GAIN; --n) IS(strcmp(kvc_status_text(n), "unknown status") != 0);
  IS(strcmp(kvc_status_text(1), "unknown status") == 0);
  IS(strcmp(kvc_status_text(KVC_NO_GAIN - 1), "unknown status") == 0);
  for (n = 0; n < KVC_FIELD_COUNT_; ++n) IS(strcmp(kvc_field_text(n), "unknown field") != 0);
  IS(strcmp(kvc_field_text(-1), "unknown field") == 0);
  IS(strcmp(kvc_field_text(KVC_FIELD_COUNT_), "unknown field") == 0);
  IS(strcmp(kvc_field_text(KVC_FIELD_LAYERS), "layers") == 0);
  IS(strcmp(kvc_field_text(KVC_FIELD_CACHE), "cache") == 0);
  IS(strcmp(kvc_field_text(KVC_FIELD_SCOPE_FROM), "scope.from") == 0);
  IS(strcmp(kvc_field_text(KVC_FIELD_MAX_ROWS), "max_rows") == 0);
  IS(strcmp(kvc_field_text(KVC_FIELD_PLANES), "planes") == 0);
  IS(strcmp(kvc_field_text(KVC_FIELD_OTHER), "other") == 0);
}

// The host half has no padding, so a binding may write the structs down as they are read.
void capi_test_layout(void) {
  if (sizeof(void*) != 8) return;
  IS(sizeof(kvc_error) == 24 && sizeof(kvc_cache) == 8 && sizeof(kvc_sequence) == 8);
  IS(sizeof(kvc_block_format) == 40 && sizeof(kvc_group_config) == 104 && sizeof(kvc_cache_config) == 80);
  IS(sizeof(kvc_group_geometry) == 56 && sizeof(kvc_geometry) == 64 + 8 * 56 &&
     sizeof(kvc_stats) == 8 + 17 * 8);
  IS(sizeof(kvc_scope) == 88 && sizeof(kvc_open_options) == 24 && sizeof(kvc_lengths) == 32 + 8 * 4);
  IS(sizeof(kvc_drop) == 32);
  IS(sizeof(kvc_view) == 128 && sizeof(kvc_planes) == 96);
  IS(offsetof(kvc_geometry, memory) == 40 && offsetof(kvc_geometry, group) == 64);
  IS(offsetof(kvc_scope, salt) == 16 && offsetof(kvc_scope, generation) == 48 &&
     offsetof(kvc_scope, narrower) == 80);
  IS(offsetof(kvc_view, sequences) == 24 && offsetof(kvc_view, open_slot) == 96 &&
     offsetof(kvc_view, exempt_slot) == 120);
}

void capi_test_many_caches(void) {
  kvc_cache* all = (kvc_cache*)calloc(KVC_MAX_CACHES, sizeof *all);
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache extra = {9};
  kvc_error error;
  int32_t i, made = 0;
  capi_small(&config, &group, 1);
  config.max_sequences = 1;
  config.max_scopes = 1;
  IS(all != NULL);
  if (all == NULL) return;
  for (i = 0; i < KVC_MAX_CACHES; ++i) made += kvc_cache_create(&config, &all[i], &error) == KVC_OK;
  IS(made == KVC_MAX_CACHES);
  REFUSED(kvc_cache_create(&config, &extra, &error), KVC_OUT_OF_MEMORY, KVC_FIELD_CACHE);
  IS(extra.id == 9 && error.value == KVC_MAX_CACHES);
  OK(kvc_cache_destroy(all[1234], &error));
  OK(kvc_cache_create(&config, &extra, &error));
  IS(extra.id != all[1234].id);
  REFUSED(kvc_cache_destroy(all[1234], &error), KVC_STALE_HANDLE, KVC_FIELD_CACHE);
  all[1234] = extra;
  for (i = 0; i < KVC_MAX_CACHES; ++i) made -= kvc_cache_destroy(all[i], &error) == KVC_OK;
  IS(made == 0);
  free(all);
}

// Two caches at once: what one does is not seen in the other.
void capi_test_two_caches(void) {
  const kvc_cache a = capi_small_cache(8), b = capi_small_cache(12);
  kvc_sequence in_a, in_b;
  kvc_stats empty = capi_count(b), full;
  const kvc_scope scope = capi_shared();
  kvc_error error;
  int32_t text[8], n = -1;
  capi_text(text, 8, 0);
  in_a = capi_begin(a, text, 8);
  OK(kvc_commit(a, in_a, text, 8, NULL, &error));
  OK(kvc_cache_end_step(a, &error));
  IS(capi_same(empty, capi_count(b)));
  OK(kvc_peek(b, &scope, text, 8, 1, &n, &error));
  IS(n == 0);
  full = capi_count(a);
  in_b = capi_begin(b, text, 8);
  OK(kvc_close(b, in_b, &error));
  IS(capi_same(full, capi_count(a)));
  OK(kvc_cache_destroy(b, &error));
  IS(capi_same(full, capi_count(a)));
  OK(kvc_close(a, in_a, &error));
  OK(kvc_cache_destroy(a, &error));
}
