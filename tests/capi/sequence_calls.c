// SPDX-License-Identifier: Apache-2.0
// Sequences: scopes, every verb with every way it can be refused, and the views for kernels.
#include <string.h>

#include "check.h"

kvc_lengths capi_lengths(kvc_cache cache, kvc_sequence sequence) {
  kvc_lengths lengths;
  kvc_error error;
  memset(&lengths, 0, sizeof lengths);
  lengths.struct_size = (uint32_t)sizeof lengths;
  OK(kvc_get_lengths(cache, sequence, &lengths, &error));
  return lengths;
}

// What of `text` [8] is found under a scope.
static int32_t found(kvc_cache cache, const kvc_scope* scope, const int32_t* text) {
  kvc_error error;
  int32_t n = -1;
  OK(kvc_peek(cache, scope, text, 8, 1, &n, &error));
  return n;
}

static void refused_scope(kvc_cache cache, const kvc_scope* scope, kvc_status status, int32_t field,
                          int64_t level) {
  kvc_sequence sequence = {5};
  kvc_error error;
  int32_t n = -7;
  REFUSED(kvc_open(cache, scope, NULL, 0, NULL, &sequence, &n, &error), status, field);
  IS(error.index == level);
  IS(sequence.id == 5 && n == -7);
  REFUSED(kvc_peek(cache, scope, NULL, 0, 1, &n, &error), status, field);
}

static void scope_refusals(kvc_cache cache) {
  static char large[200];
  kvc_scope s = capi_shared(), inner = capi_tenant("a"), innermost[3];
  kvc_error error;
  kvc_sequence sequence = {0};
  refused_scope(cache, NULL, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE, -1);
  s.struct_size = 8;
  refused_scope(cache, &s, KVC_ABI, KVC_FIELD_SCOPE, 0);
  memset(&s, 0, sizeof s);
  s.struct_size = (uint32_t)sizeof s;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_KIND, 0);  // nobody chose
  s.kind = 3;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_KIND, 0);
  s.kind = KVC_SCOPE_TENANT;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_SALT, 0);  // no salt
  s.salt.size = 4;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_SALT, 0);
  s = capi_shared();
  s.salt.data = "x";
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_SALT, 0);  // a salt that would not separate
  s = capi_shared();
  s.reserved = 1;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED, 0);
  s = capi_shared();
  s.first_token = 4;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_FROM, 0);
  s = capi_shared();
  s.generation = 2;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_ADAPTER, 0);
  s = capi_shared();
  s.adapter.size = 1;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_ADAPTER, 0);
  s = capi_shared();
  s.media.data = large;
  s.media.size = sizeof large;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_MEDIA, 0);
  s.media.size = (size_t)-2;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_MEDIA, 0);
  s.media.size = 100;
  s.adapter.data = large;
  s.adapter.size = 100;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE, -1);  // too long together
  s = capi_shared();
  s.narrower = &inner;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_FROM, 1);  // does not say from where
  inner.first_token = 8;
  OK(kvc_open(cache, &s, NULL, 0, NULL, &sequence, NULL, &error));
  OK(kvc_close(cache, sequence, &error));
  innermost[0] = innermost[1] = innermost[2] = inner;
  inner.narrower = &innermost[0];
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE_FROM, -1);  // not ascending
  innermost[0].first_token = 12;
  innermost[0].narrower = &innermost[1];
  innermost[1].first_token = 16;
  OK(kvc_open(cache, &s, NULL, 0, NULL, &sequence, NULL, &error));
  OK(kvc_close(cache, sequence, &error));
  innermost[1].narrower = &innermost[2];
  innermost[2].first_token = 20;
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE, 4);
  innermost[1].narrower = &inner;  // a chain that leads back into itself
  refused_scope(cache, &s, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE, 4);
}

void capi_test_scope(void) {
  const kvc_cache cache = capi_small_cache(16);
  kvc_scope who[9], tail = capi_tenant("b"), outer = capi_shared();
  kvc_sequence sequence = {0};
  kvc_error error;
  int32_t text[8], i, k;
  capi_text(text, 8, 50);
  scope_refusals(cache);
  for (i = 0; i < 9; ++i) who[i] = capi_shared();
  who[1] = capi_tenant("");
  who[2] = capi_tenant("x");
  who[3].adapter.data = "x";
  who[3].adapter.size = 1;
  who[4] = who[3];
  who[4].generation = 1;
  who[5].adapter.data = "";
  who[6].media.data = "x";
  who[6].media.size = 1;
  who[7].weights = 1;
  who[8] = who[2];
  who[8].weights = 1;
  for (i = 0; i < 9; ++i) {  // each pair is told apart; 1 of 8 tokens is always recomputed
    for (k = 0; k < 9; ++k) IS(found(cache, &who[k], text) == (k < i ? 4 : 0));
    OK(kvc_open(cache, &who[i], text, 8, NULL, &sequence, NULL, &error));
    OK(kvc_extend(cache, sequence, 4, 0, NULL, &error));
    OK(kvc_commit(cache, sequence, text, 4, NULL, &error));
    OK(kvc_close(cache, sequence, &error));
  }
  OK(kvc_cache_reset(cache, &error));
  // A public prefix, then a tenant's own words: the prefix is shared with everyone, the rest with nobody.
  tail.first_token = 4;
  outer.narrower = &tail;
  OK(kvc_open(cache, &outer, text, 8, NULL, &sequence, NULL, &error));
  OK(kvc_extend(cache, sequence, 8, 0, NULL, &error));
  OK(kvc_commit(cache, sequence, text, 8, NULL, &error));
  OK(kvc_close(cache, sequence, &error));
  IS(found(cache, &outer, text) == 4);
  OK(kvc_peek(cache, &outer, text, 8, 1, &k, &error));
  who[0] = capi_shared();
  IS(found(cache, &who[0], text) == 4);
  IS(found(cache, &who[2], text) == 0);
  {
    const int32_t longer[9] = {50, 51, 52, 53, 54, 55, 56, 57, 58};
    kvc_scope other = capi_tenant("c");
    OK(kvc_peek(cache, &outer, longer, 9, 1, &k, &error));
    IS(k == 8);
    other.first_token = 4;
    outer.narrower = &other;
    OK(kvc_peek(cache, &outer, longer, 9, 1, &k, &error));
    IS(k == 4);
    other = outer;  // everyone, from the same token on, is not the tenant either
    other.first_token = 4;
    other.narrower = NULL;
    OK(kvc_peek(cache, &outer, longer, 9, 1, &k, &error));
    IS(k == 4);
  }
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_open(void) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_open_options options;
  kvc_sequence sequence = {0}, more[4];
  kvc_scope scope = capi_shared(), other = capi_tenant("t");
  kvc_error error;
  kvc_stats before;
  int32_t text[41], reused = -1, i;
  const int32_t limits[2] = {10, 10};
  capi_small(&config, &group, 10);
  config.account_limits = limits;
  config.n_accounts = 2;
  config.max_scopes = 1;
  OK(kvc_cache_create(&config, &cache, &error));
  capi_text(text, 41, 0);
  memset(&options, 0, sizeof options);
  options.struct_size = (uint32_t)sizeof options;
  before = capi_count(cache);
  REFUSED(kvc_open(cache, &scope, NULL, 1, NULL, &sequence, &reused, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_PROMPT);
  REFUSED(kvc_open(cache, &scope, text, -1, NULL, &sequence, &reused, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_open(cache, &scope, text, 41, NULL, &sequence, &reused, &error), KVC_TOO_LONG,
          KVC_FIELD_PROMPT);
  REFUSED(kvc_open(cache, &scope, text, 4, NULL, NULL, &reused, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_SEQUENCE);
  options.account = 2;
  REFUSED(kvc_open(cache, &scope, text, 4, &options, &sequence, &reused, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_ACCOUNT);
  options.account = 1;
  options.recompute = -1;
  REFUSED(kvc_open(cache, &scope, text, 4, &options, &sequence, &reused, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_RECOMPUTE);
  options.recompute = 0;
  options.reserved = 1;
  REFUSED(kvc_open(cache, &scope, text, 4, &options, &sequence, &reused, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_RESERVED);
  options.reserved = 0;
  options.struct_size = 1;
  REFUSED(kvc_open(cache, &scope, text, 4, &options, &sequence, &reused, &error), KVC_ABI, KVC_FIELD_OPTIONS);
  options.struct_size = (uint32_t)sizeof options;
  IS(sequence.id == 0 && reused == -1);
  IS(capi_same(before, capi_count(cache)));
  options.struct_size = 16; /* of the first version: account, recompute, a reserved 0 */
  options.priority = 1;
  REFUSED(kvc_open(cache, &scope, text, 4, &options, &sequence, &reused, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_RESERVED);
  options.priority = 0;
  options.priority_ms = options.reserved = 77; /* behind its end: not read */
  OK(kvc_open(cache, &scope, text, 4, &options, &more[0], NULL, &error));
  OK(kvc_close(cache, more[0], &error));
  options.priority_ms = options.reserved = 0;
  options.struct_size = (uint32_t)sizeof options;
  OK(kvc_open(cache, &scope, text, 9, &options, &sequence, &reused, &error));
  IS(reused == 0);
  REFUSED(kvc_open(cache, &other, text, 9, NULL, &sequence, &reused, &error), KVC_OUT_OF_SCOPES,
          KVC_FIELD_MAX_SCOPES);
  OK(kvc_extend(cache, sequence, 9, 0, NULL, &error));
  OK(kvc_commit(cache, sequence, text, 9, NULL, &error));
  OK(kvc_cache_charged(cache, 1, &i, &error));
  IS(i == 3);
  for (i = 0; i < 3; ++i) {
    OK(kvc_open(cache, &scope, text, 9, NULL, &more[i], &reused, &error));
    IS(reused == 8 && more[i].id != sequence.id);
  }
  REFUSED(kvc_open(cache, &scope, text, 9, NULL, &more[3], &reused, &error), KVC_OUT_OF_SEQUENCES,
          KVC_FIELD_MAX_SEQUENCES);
  OK(kvc_close(cache, more[0], &error));
  options.recompute = 2;  // the last token of the second unit may not come from the cache
  OK(kvc_open(cache, &scope, text, 9, &options, &more[0], &reused, &error));
  IS(reused == 4);
  REFUSED(kvc_peek(cache, &scope, text, 9, -1, &reused, &error), KVC_BAD_ARGUMENT, KVC_FIELD_RECOMPUTE);
  REFUSED(kvc_peek(cache, &scope, text, 9, 1, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  REFUSED(kvc_peek(cache, &scope, NULL, 9, 1, &reused, &error), KVC_BAD_ARGUMENT, KVC_FIELD_PROMPT);
  REFUSED(kvc_peek(cache, &scope, text, -9, 1, &reused, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  OK(kvc_peek(cache, &scope, text, 41, 1, &reused, &error));
  IS(reused == 8);
  OK(kvc_peek(cache, &scope, text, 9, 2147483647, &reused, &error));
  IS(reused == 0);
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_lengths(void) {
  const kvc_cache cache = capi_small_cache(8);
  kvc_sequence a;
  kvc_lengths l;
  kvc_error error;
  const int32_t* ids = NULL;
  int32_t text[12], n = -1, wrong[12];
  capi_text(text, 12, 0);
  a = capi_begin(cache, text, 10);
  l = capi_lengths(cache, a);
  IS(l.held == 10 && l.accepted == 10 && l.committed == 0 && l.reused == 0 && l.place >= 0 && l.place < 4);
  OK(kvc_table(cache, a, 0, &ids, &n, &error));
  IS(n == 3 && ids[0] == 0 && ids[1] == 1 && ids[2] == 2);
  OK(kvc_open_table(cache, a, 0, &ids, &n, &error));
  IS(n == 0);
  REFUSED(kvc_table(cache, a, 1, &ids, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_GROUP);
  REFUSED(kvc_table(cache, a, -1, &ids, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_GROUP);
  REFUSED(kvc_table(cache, a, 0, NULL, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_IDS);
  REFUSED(kvc_open_table(cache, a, 0, &ids, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  l.struct_size = 3;
  REFUSED(kvc_get_lengths(cache, a, &l, &error), KVC_ABI, KVC_FIELD_LENGTHS);
  REFUSED(kvc_get_lengths(cache, a, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_LENGTHS);
  REFUSED(kvc_commit(cache, a, NULL, 4, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_TEXT);
  REFUSED(kvc_commit(cache, a, text, -4, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  OK(kvc_commit(cache, a, text, 7, &n, &error));
  IS(n == 4);
  memcpy(wrong, text, sizeof text);
  wrong[2] = 99;
  REFUSED(kvc_commit(cache, a, wrong, 10, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_TEXT);
  OK(kvc_commit(cache, a, text, 10, NULL, &error));
  l = capi_lengths(cache, a);
  IS(l.committed == 8);
  OK(kvc_settle(cache, a, &error));
  REFUSED(kvc_truncate(cache, a, 11, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_truncate(cache, a, -1, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_truncate(cache, a, 6, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  OK(kvc_truncate(cache, a, 6, &n, &error));
  l = capi_lengths(cache, a);
  IS(n == 6 && l.held == 6 && l.accepted == 6 && l.committed == 4);
  REFUSED(kvc_extend(cache, a, -1, 0, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  OK(kvc_extend(cache, a, 0, 0, &n, &error));
  IS(n == 0);
  OK(kvc_close(cache, a, &error));
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_scarcity(void) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_open_options options;
  kvc_scope scope = capi_shared();
  kvc_sequence a, b = {0};
  kvc_error error;
  kvc_stats before;
  int32_t text[16], n = -1;
  const int32_t limits[2] = {100, 2};
  capi_small(&config, &group, 4);
  config.account_limits = limits;
  config.n_accounts = 2;
  config.max_commands = 1;
  config.max_sequence_tokens = 30;
  OK(kvc_cache_create(&config, &cache, &error));
  capi_text(text, 16, 0);
  a = capi_begin(cache, text, 10);
  before = capi_count(cache);
  REFUSED(kvc_extend(cache, a, 7, 0, &n, &error), KVC_OUT_OF_BLOCKS, KVC_FIELD_BLOCKS);
  IS(error.value == 1 && n == -1);  // one block is missing
  REFUSED(kvc_extend(cache, a, 21, 0, &n, &error), KVC_TOO_LONG, KVC_FIELD_N);
  IS(error.value == 21);
  REFUSED(kvc_extend(cache, a, 2147483647, 0, &n, &error), KVC_TOO_LONG, KVC_FIELD_N);
  before.refusals += 3;
  IS(capi_same(before, capi_count(cache)));
  memset(&options, 0, sizeof options);
  options.struct_size = (uint32_t)sizeof options;
  options.account = 1;
  OK(kvc_truncate(cache, a, 4, &n, &error));
  OK(kvc_open(cache, &scope, NULL, 0, &options, &b, NULL, &error));
  OK(kvc_extend(cache, b, 8, 0, NULL, &error));
  REFUSED(kvc_extend(cache, b, 1, 0, NULL, &error), KVC_OVER_QUOTA, KVC_FIELD_ACCOUNT);
  IS(error.value == 1);
  OK(kvc_close(cache, b, &error));
  // Two branches want a copy each; the list holds one command.
  OK(kvc_truncate(cache, a, 2, &n, &error));
  OK(kvc_fork(cache, a, &b, &error));
  OK(kvc_extend(cache, b, 1, 0, NULL, &error));
  OK(kvc_close(cache, b, &error));
  OK(kvc_fork(cache, a, &b, &error));
  REFUSED(kvc_extend(cache, b, 1, 0, NULL, &error), KVC_BUSY, KVC_FIELD_COMMANDS);
  OK(kvc_cache_end_step(cache, &error));
  OK(kvc_extend(cache, b, 1, 0, NULL, &error));
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_branches(void) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_open_options options;
  const kvc_scope scope = capi_shared(), other = capi_tenant("t");
  kvc_sequence a, b = {0}, c = {0}, d = {0};
  kvc_error error;
  const int32_t *left = NULL, *right = NULL;
  int32_t text[9], n = -1, touched = -1;
  const int32_t limits[2] = {100, 100};
  capi_small(&config, &group, 16);
  config.account_limits = limits;
  config.n_accounts = 2;
  OK(kvc_cache_create(&config, &cache, &error));
  capi_text(text, 9, 0);
  a = capi_begin(cache, text, 9);
  REFUSED(kvc_fork(cache, a, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  OK(kvc_fork(cache, a, &b, &error));
  OK(kvc_fork(cache, a, &c, &error));
  OK(kvc_extend(cache, b, 4, 0, NULL, &error));
  OK(kvc_assign(cache, c, b, &touched, &error));
  IS(touched == 2);  // the copied third block and the fourth
  OK(kvc_table(cache, b, 0, &left, &n, &error));
  OK(kvc_table(cache, c, 0, &right, &touched, &error));
  IS(n == 4 && touched == 4 && memcmp(left, right, 16) == 0);
  OK(kvc_assign(cache, c, c, &touched, &error));
  IS(touched == 0);
  OK(kvc_assign(cache, c, a, NULL, &error));
  OK(kvc_fork(cache, a, &d, &error));
  REFUSED(kvc_fork(cache, a, &d, &error), KVC_OUT_OF_SEQUENCES, KVC_FIELD_MAX_SEQUENCES);
  OK(kvc_close(cache, d, &error));
  OK(kvc_extend(cache, a, 2, 1, &n, &error));
  REFUSED(kvc_fork(cache, a, &d, &error), KVC_BUSY, KVC_FIELD_DRAFTS);
  IS(error.value == 2);
  REFUSED(kvc_assign(cache, b, a, &n, &error), KVC_BUSY, KVC_FIELD_DRAFTS);
  OK(kvc_open(cache, &other, NULL, 0, NULL, &d, NULL, &error));
  REFUSED(kvc_assign(cache, b, d, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE);
  OK(kvc_close(cache, d, &error));
  memset(&options, 0, sizeof options);
  options.struct_size = (uint32_t)sizeof options;
  options.account = 1;
  OK(kvc_open(cache, &scope, NULL, 0, &options, &d, NULL, &error));
  REFUSED(kvc_assign(cache, b, d, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_ACCOUNT);
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_drafts(void) {
  const kvc_cache cache = capi_small_cache(8);
  kvc_sequence a;
  kvc_lengths l;
  kvc_error error;
  int32_t text[6], n = -1;
  capi_text(text, 6, 0);
  a = capi_begin(cache, text, 6);
  REFUSED(kvc_extend(cache, a, 3, 1, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  OK(kvc_extend(cache, a, 3, -7, &n, &error));  // anything but zero
  IS(n == 3);
  REFUSED(kvc_extend(cache, a, 1, 0, &n, &error), KVC_BUSY, KVC_FIELD_DRAFTS);
  REFUSED(kvc_accept(cache, a, 4, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_accept(cache, a, -1, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  l = capi_lengths(cache, a);
  IS(l.held == 9 && l.accepted == 6);
  OK(kvc_accept(cache, a, 1, &error));
  l = capi_lengths(cache, a);
  IS(l.held == 7 && l.accepted == 7);
  OK(kvc_cache_destroy(cache, &error));
}

static int32_t sealed_at(kvc_cache cache, kvc_sequence s, int32_t tokens) {
  kvc_error error;
  int32_t sealed = -1;
  OK(kvc_sealed_at(cache, s, 0, tokens, &sealed, &error));
  return sealed;
}

// Seals between two steps: the owner says when.
static void deferred_format(void) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_sequence a = {0};
  kvc_scope scope = capi_shared();
  kvc_error error;
  const kvc_command* commands = NULL;
  const int32_t* ids = NULL;
  int32_t n = -1, got = -1;
  capi_small(&config, &group, 8);
  group.format.lossy = 1;
  group.format.deferred = 1;
  group.format.residual = 4;
  config.max_sequence_tokens = 16;
  config.max_commands = 4;
  OK(kvc_cache_create(&config, &cache, &error));
  OK(kvc_open(cache, &scope, NULL, 0, NULL, &a, NULL, &error));
  OK(kvc_extend(cache, a, 14, 0, NULL, &error));
  OK(kvc_cache_seals(cache, &commands, &n, &error));
  IS(n == 0 && sealed_at(cache, a, 14) == 0);
  OK(kvc_cache_end_step(cache, &error));
  OK(kvc_settle(cache, a, &error));
  OK(kvc_cache_commands(cache, &commands, &n, &error));
  IS(n == 2 && commands[0].op == KVC_OP_SEAL && commands[1].op == KVC_OP_SEAL);  // 14 - 4 are final: 8 seal
  OK(kvc_open_table(cache, a, 0, &ids, &n, &error));
  IS(n == 4 && ids[0] == -1 && ids[1] == -1 && ids[2] >= 0);
  OK(kvc_extend(cache, a, 2, 1, &got, &error));
  IS(got == 2);  // nothing seals by itself
  OK(kvc_cache_destroy(cache, &error));
}

// A lossy format: open blocks, seals, drafts that stop, truncation that goes further.
void capi_test_lossy(void) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_sequence a = {0};
  kvc_scope scope = capi_shared();
  kvc_lengths l;
  kvc_error error;
  const kvc_command* seals = NULL;
  const int32_t *ids = NULL, *table = NULL;
  int32_t n = -1, got = -1;
  capi_small(&config, &group, 8);
  group.format.lossy = 1;
  group.format.block = 100;
  group.format.residual = 4;
  group.format.exempt = 2;
  config.max_sequence_tokens = 16;
  config.max_commands = 1;
  config.max_step_tokens = 16;
  OK(kvc_cache_create(&config, &cache, &error));
  OK(kvc_open(cache, &scope, NULL, 0, NULL, &a, NULL, &error));
  OK(kvc_extend(cache, a, 14, 0, NULL, &error));
  OK(kvc_open_table(cache, a, 0, &ids, &n, &error));
  OK(kvc_table(cache, a, 0, &table, &n, &error));
  OK(kvc_cache_seals(cache, &seals, &n, &error));
  IS(n == 2 && seals[0].op == KVC_OP_SEAL && seals[0].stage == 0);  // 14 - 4 are final: 8 seal
  IS(seals[0].src == ids[0] && seals[0].dst == table[0] && seals[0].arg == 2 && seals[0].tokens == 4);
  IS(seals[1].src == ids[1] && seals[1].dst == table[1] && seals[1].arg == 0);
  IS(sealed_at(cache, a, 7) == 0 && sealed_at(cache, a, 8) == 4 && sealed_at(cache, a, 14) == 8);
  REFUSED(kvc_sealed_at(cache, a, 1, 3, &got, &error), KVC_BAD_ARGUMENT, KVC_FIELD_GROUP);
  REFUSED(kvc_sealed_at(cache, a, 0, 15, &got, &error), KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS);
  REFUSED(kvc_sealed_at(cache, a, 0, 3, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_SEALED);
  REFUSED(kvc_cache_seals(cache, NULL, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_SEALS);
  REFUSED(kvc_cache_seals(cache, &seals, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  IS(ids[0] >= 0 && ids[1] >= 0);  // both forms are read in this step
  OK(kvc_cache_end_step(cache, &error));
  OK(kvc_open_table(cache, a, 0, &ids, &n, &error));
  IS(n == 4 && ids[0] == -1 && ids[1] == -1 && ids[2] >= 0);
  l = capi_lengths(cache, a);
  IS(l.sealed[0] == 8 && l.sealed[1] == 0);
  OK(kvc_settle(cache, a, &error));
  OK(kvc_cache_seals(cache, &seals, &n, &error));
  IS(n == 0);
  OK(kvc_extend(cache, a, 2, 1, &got, &error));
  IS(got == 1);  // 16 tokens would seal the third block
  OK(kvc_accept(cache, a, 0, &error));
  OK(kvc_truncate(cache, a, 6, &n, &error));
  IS(n == 4);  // inside a packed block: back to its edge
  OK(kvc_cache_end_step(cache, &error));
  OK(kvc_cache_destroy(cache, &error));
  deferred_format();
}

void capi_test_view(void) {
  const kvc_cache cache = capi_small_cache(8);
  kvc_sequence s[3];
  kvc_view v;
  kvc_batch batch;
  kvc_error error;
  int32_t text[9], rows[2] = {9, 2}, table[8], kv_len[2], q_start[3], q_pos[11], i;
  int64_t slot[11];
  capi_text(text, 9, 0);
  s[0] = capi_begin(cache, text, 9);
  s[1] = capi_begin(cache, text + 5, 3);
  s[2].id = 0;
  memset(&v, 0, sizeof v);
  v.struct_size = (uint32_t)sizeof v;
  v.n = 2;
  v.table_columns = 4;
  v.max_rows = 11;
  v.sequences = s;
  v.rows = rows;
  v.table = table;
  v.kv_len = kv_len;
  v.q_start = q_start;
  v.q_pos = q_pos;
  v.slot = slot;
  memset(&batch, 0, sizeof batch);
  batch.struct_size = (uint32_t)sizeof batch;
  OK(kvc_view_batch(cache, &v, &batch, &error));
  IS(table[0] == 0 && table[1] == 1 && table[2] == 2 && table[3] == -1);
  IS(table[4] == 3 && table[5] == -1 && kv_len[0] == 9 && kv_len[1] == 3);
  IS(q_start[0] == 0 && q_start[1] == 9 && q_start[2] == 11);
  for (i = 0; i < 9; ++i) IS(q_pos[i] == i && slot[i] == i);
  IS(q_pos[9] == 1 && q_pos[10] == 2 && slot[9] == 13 && slot[10] == 14);
  IS(batch.n == 2 && batch.table == table && batch.kv_len == kv_len && batch.q_pos == q_pos);
  IS(batch.table_columns == 4 && batch.open_table == NULL && batch.sealed == NULL);
  v.rows = NULL;  // one row each
  v.slot = NULL;
  OK(kvc_view_batch(cache, &v, NULL, &error));
  IS(q_start[2] == 2 && q_pos[0] == 8 && q_pos[1] == 2);
#define VIEW(change, back, status, field)                            \
  change;                                                            \
  q_pos[0] = -5;                                                     \
  REFUSED(kvc_view_batch(cache, &v, &batch, &error), status, field); \
  IS(q_pos[0] == -5);                                                \
  back
  VIEW(v.struct_size = 4, v.struct_size = (uint32_t)sizeof v, KVC_ABI, KVC_FIELD_VIEW);
  VIEW(batch.struct_size = 4, batch.struct_size = (uint32_t)sizeof batch, KVC_ABI, KVC_FIELD_BATCH);
  VIEW(v.group = 1, v.group = 0, KVC_BAD_ARGUMENT, KVC_FIELD_GROUP);
  VIEW(v.group = -1, v.group = 0, KVC_BAD_ARGUMENT, KVC_FIELD_GROUP);
  VIEW(v.n = -1, v.n = 2, KVC_BAD_ARGUMENT, KVC_FIELD_N);
  VIEW(v.table_columns = 2, v.table_columns = 4, KVC_BAD_ARGUMENT, KVC_FIELD_TABLE_COLUMNS);
  VIEW(v.table_columns = -2, v.table_columns = 4, KVC_BAD_ARGUMENT, KVC_FIELD_TABLE_COLUMNS);
  VIEW(v.max_rows = 1, v.max_rows = 11, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_ROWS);
  IS(error.index == 1 && error.value == 2);
  VIEW(v.max_rows = -1, v.max_rows = 11, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_ROWS);
  VIEW(v.exempt_group = 1, v.exempt_group = 0, KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT_GROUP);
  VIEW(v.sequences = NULL, v.sequences = s, KVC_BAD_ARGUMENT, KVC_FIELD_SEQUENCES);
  VIEW(v.table = NULL, v.table = table, KVC_BAD_ARGUMENT, KVC_FIELD_TABLE);
  VIEW(v.kv_len = NULL, v.kv_len = kv_len, KVC_BAD_ARGUMENT, KVC_FIELD_KV_LEN);
  VIEW(v.q_start = NULL, v.q_start = q_start, KVC_BAD_ARGUMENT, KVC_FIELD_Q_START);
  VIEW(v.q_pos = NULL, v.q_pos = q_pos, KVC_BAD_ARGUMENT, KVC_FIELD_Q_POS);
  v.rows = rows;
  VIEW(rows[1] = 4, rows[1] = 2, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS);
  IS(error.index == 1 && error.value == 4);
  VIEW(rows[0] = -1, rows[0] = 9, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS);
  v.rows = NULL;
  VIEW(v.sequences = s + 1, v.sequences = s, KVC_STALE_HANDLE, KVC_FIELD_SEQUENCE);
  IS(error.index == 1);
  REFUSED(kvc_view_batch(cache, NULL, &batch, &error), KVC_BAD_ARGUMENT, KVC_FIELD_VIEW);
  memset(&v, 0, sizeof v);  // an empty batch needs almost nothing
  v.struct_size = (uint32_t)sizeof v;
  v.q_start = q_start;
  OK(kvc_view_batch(cache, &v, &batch, &error));
  IS(batch.n == 0 && q_start[0] == 0);
  OK(kvc_cache_destroy(cache, &error));
}

// In a lossy format new rows go to the open space, and reading is split at `sealed` and at each row's own.
static void lossy_view(void) {
  kvc_cache_config config;
  kvc_group_config group[2];
  kvc_cache cache = {0};
  kvc_sequence a = {0};
  kvc_scope scope = capi_shared();
  kvc_view v;
  kvc_batch batch;
  kvc_error error;
  int32_t rows = 9, table[4], open_table[4], kv_len, sealed = -1, q_start[2], q_pos[9], row_sealed[9], exempt,
          i;
  int64_t slot[9], open_slot[9], exempt_slot[9];
  capi_small(&config, &group[0], 8);
  group[0].format.lossy = 1;
  group[1] = group[0];
  memset(&group[1].format, 0, sizeof group[1].format);
  group[1].block_size = 2;
  group[1].first_only = 1;
  config.groups = group;
  config.n_groups = 2;
  OK(kvc_cache_create(&config, &cache, &error));
  OK(kvc_open(cache, &scope, NULL, 0, NULL, &a, NULL, &error));
  OK(kvc_extend(cache, a, 9, 0, NULL, &error));
  memset(&v, 0, sizeof v);
  v.struct_size = (uint32_t)sizeof v;
  v.n = 1;
  v.table_columns = 4;
  v.max_rows = 9;
  v.sequences = &a;
  v.rows = &rows;
  v.table = table;
  v.kv_len = &kv_len;
  v.q_start = q_start;
  v.q_pos = q_pos;
  memset(&batch, 0, sizeof batch);
  batch.struct_size = (uint32_t)sizeof batch;
#define NEEDS(field, change)                                                   \
  REFUSED(kvc_view_batch(cache, &v, &batch, &error), KVC_BAD_ARGUMENT, field); \
  change
  NEEDS(KVC_FIELD_OPEN_TABLE, v.open_table = open_table);
  NEEDS(KVC_FIELD_SEALED, v.sealed = &sealed);
  NEEDS(KVC_FIELD_ROW_SEALED, v.row_sealed = row_sealed; v.slot = slot);
  NEEDS(KVC_FIELD_OPEN_SLOT, v.open_slot = open_slot; v.exempt_group = 1);
  NEEDS(KVC_FIELD_EXEMPT_GROUP, v.exempt_group = 2);
  NEEDS(KVC_FIELD_EXEMPT_TABLE, v.exempt_table = &exempt);
  NEEDS(KVC_FIELD_EXEMPT_SLOT, v.exempt_slot = exempt_slot);
  OK(kvc_view_batch(cache, &v, &batch, &error));
  IS(sealed == 8 && kv_len == 9 && open_table[0] >= 0 && open_table[1] >= 0 && open_table[3] == -1);
  for (i = 0; i < 9; ++i) {
    IS(slot[i] == -1 && open_slot[i] == (int64_t)open_table[i / 4] * 4 + i % 4);
    IS(row_sealed[i] == (i + 1) / 4 * 4);
    IS(exempt_slot[i] == (i < 2 ? (int64_t)exempt * 2 + i : -1));
  }
  IS(batch.open_table == open_table && batch.sealed == &sealed && batch.row_sealed == row_sealed);
  IS(batch.exempt_table == &exempt && exempt >= 0);
  v.group = 1;  // by itself: two slots, whatever the length
  v.exempt_group = 0;
  OK(kvc_view_batch(cache, &v, &batch, &error));
  IS(kv_len == 2 && table[0] == exempt && table[1] == -1);
  for (i = 0; i < 9; ++i) IS(slot[i] == exempt_slot[i]);
  OK(kvc_view_csr(cache, &a, 1, 1, q_start, table, 4, &kv_len, &error));
  IS(q_start[1] == 1 && kv_len == 2);
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_csr(void) {
  const kvc_cache cache = capi_small_cache(8);
  kvc_sequence s[3];
  kvc_scope scope = capi_shared();
  kvc_error error;
  int32_t text[9], indptr[4] = {-3, -3, -3, -3}, indices[4], last[3];
  capi_text(text, 9, 0);
  s[0] = capi_begin(cache, text, 9);
  OK(kvc_open(cache, &scope, NULL, 0, NULL, &s[1], NULL, &error));
  s[2] = capi_begin(cache, text + 5, 4);
  REFUSED(kvc_view_csr(cache, s, 3, 0, indptr, indices, 3, last, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_INDICES);
  IS(error.index == 2 && error.value == 4 && indptr[0] == -3);
  OK(kvc_view_csr(cache, s, 3, 0, indptr, indices, 4, last, &error));
  IS(indptr[0] == 0 && indptr[1] == 3 && indptr[2] == 3 && indptr[3] == 4);
  IS(indices[0] == 0 && indices[2] == 2 && indices[3] == 3 && last[0] == 1 && last[1] == 0 && last[2] == 4);
  REFUSED(kvc_view_csr(cache, s, 3, 1, indptr, indices, 4, last, &error), KVC_BAD_ARGUMENT, KVC_FIELD_GROUP);
  REFUSED(kvc_view_csr(cache, s, -1, 0, indptr, indices, 4, last, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  REFUSED(kvc_view_csr(cache, s, 3, 0, indptr, indices, -1, last, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_INDICES);
  REFUSED(kvc_view_csr(cache, NULL, 3, 0, indptr, indices, 4, last, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_SEQUENCES);
  REFUSED(kvc_view_csr(cache, s, 3, 0, NULL, indices, 4, last, &error), KVC_BAD_ARGUMENT, KVC_FIELD_INDPTR);
  REFUSED(kvc_view_csr(cache, s, 3, 0, indptr, NULL, 4, last, &error), KVC_BAD_ARGUMENT, KVC_FIELD_INDICES);
  REFUSED(kvc_view_csr(cache, s, 3, 0, indptr, indices, 4, NULL, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_LAST_PAGE_LEN);
  OK(kvc_view_csr(cache, NULL, 0, 0, indptr, NULL, 0, NULL, &error));
  OK(kvc_close(cache, s[1], &error));
  REFUSED(kvc_view_csr(cache, s, 3, 0, indptr, indices, 4, last, &error), KVC_STALE_HANDLE,
          KVC_FIELD_SEQUENCE);
  IS(error.index == 1);
  OK(kvc_cache_destroy(cache, &error));
  lossy_view();
}
