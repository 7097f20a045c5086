// SPDX-License-Identifier: Apache-2.0
// Dropping tokens of a live sequence: the report, every refusal, and the bytes after the commands have run.
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { BLOCK = 4, HEADS = 2, DIM = 8 };

static kvc_drop drop_to(int32_t form, int32_t keep) {
  kvc_drop d;
  memset(&d, 0, sizeof d);
  d.struct_size = (uint32_t)sizeof d;
  d.form = form;
  d.keep = keep;
  return d;
}

void capi_test_retain(void) {
  const kvc_cache cache = capi_small_cache(12);
  kvc_sequence a, b = {0};
  kvc_drop d = drop_to(KVC_DROP_GATHER, 6);
  kvc_lengths l;
  kvc_error error;
  const kvc_command* commands = NULL;
  const int32_t *ids = NULL, *table = NULL;
  int32_t text[20], n = -1, dropped = -1, returned = -1;
  capi_text(text, 20, 0);
  a = capi_begin(cache, text, 16);
  OK(kvc_retain(cache, a, &d, &dropped, &returned, &error));
  IS(dropped == 10 && returned == 2);
  l = capi_lengths(cache, a);
  IS(l.held == 6 && l.dropped == 10 && l.position == 16);
  OK(kvc_cache_commands(cache, &commands, &n, &error));
  IS(n == 1 && commands[0].op == KVC_OP_GATHER && commands[0].tokens == 6);
  OK(kvc_cache_gather_ids(cache, &ids, &n, &error));
  IS(n == 3 + 4 + 2 && ids[commands[0].arg] == 4 && ids[1] == 2 && ids[2] == l.place);
  OK(kvc_table(cache, a, 0, &table, &n, &error));
  IS(n == 2 && ids[3 + 4] == table[0] && ids[3 + 4 + 1] == table[1]);
  OK(kvc_cache_end_step(cache, &error));
  OK(kvc_cache_gather_ids(cache, &ids, &n, &error));
  IS(n == 0);
  OK(kvc_commit(cache, a, text, 16, &n, &error));
  IS(n == 0);  // not a prefix any more
  OK(kvc_extend(cache, a, 1, 0, NULL, &error));
  IS(capi_lengths(cache, a).position == 17);
  OK(kvc_truncate(cache, a, 5, &n, &error));
  IS(n == 0 && capi_lengths(cache, a).position == 0);

  // Whole blocks: nothing moves, or the sinks turn.
  OK(kvc_extend(cache, a, 16, 0, NULL, &error));
  d = drop_to(KVC_DROP_WHOLE_BLOCKS, 12);
  d.sinks = 4;
  OK(kvc_retain(cache, a, &d, NULL, NULL, &error));
  OK(kvc_cache_commands(cache, &commands, &n, &error));
  IS(n == 0);
  d.keep = 8;
  d.move_sinks = 1;
  OK(kvc_retain(cache, a, &d, &dropped, &returned, &error));
  OK(kvc_cache_commands(cache, &commands, &n, &error));
  IS(dropped == 4 && returned == 1 && n == 1 && commands[0].op == KVC_OP_ROTATE && commands[0].arg == 4);
  OK(kvc_cache_end_step(cache, &error));

  // Overwriting: the blocks become its own, drafts are counted when they are final.
  OK(kvc_fork(cache, a, &b, &error));
  d = drop_to(KVC_DROP_OVERWRITE, 8);
  OK(kvc_retain(cache, a, &d, &dropped, &returned, &error));
  OK(kvc_cache_commands(cache, &commands, &n, &error));
  IS(dropped == 0 && returned == -2 && n == 2 && commands[0].op == KVC_OP_COPY);
  d.overwritten = 3;
  OK(kvc_retain(cache, a, &d, &dropped, &returned, &error));
  IS(dropped == 3 && returned == 0);
  l = capi_lengths(cache, a);
  IS(l.held == 8 && l.dropped == 11 && l.position == 19);
  IS(capi_lengths(cache, b).position == 16);
  d = drop_to(KVC_DROP_NOTHING, 0);
  OK(kvc_retain(cache, a, &d, &dropped, &returned, &error));
  IS(dropped == 0 && returned == 0);
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_retain_refusals(void) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_sequence a, b = {0};
  kvc_stats before;
  kvc_drop d;
  kvc_error error;
  int32_t text[16], n = -1;
  capi_small(&config, &group, 8);
  config.max_gathers = 1;
  config.max_sequence_tokens = 17;
  OK(kvc_cache_create(&config, &cache, &error));
  capi_text(text, 16, 0);
  a = capi_begin(cache, text, 16);
  before = capi_count(cache);
#define DROP(form, field, value_of_field, refused_field)                              \
  d = drop_to(form, 8);                                                               \
  d.field = value_of_field;                                                           \
  REFUSED(kvc_retain(cache, a, &d, &n, &n, &error), KVC_BAD_ARGUMENT, refused_field); \
  IS(n == -1)
  REFUSED(kvc_retain(cache, a, NULL, &n, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_PLAN);
  d = drop_to(KVC_DROP_GATHER, 8);
  d.struct_size = 12;
  REFUSED(kvc_retain(cache, a, &d, &n, &n, &error), KVC_ABI, KVC_FIELD_PLAN);
  DROP(4, keep, 8, KVC_FIELD_PLAN);
  DROP(-1, keep, 8, KVC_FIELD_PLAN);
  DROP(KVC_DROP_GATHER, keep, 0, KVC_FIELD_KEEP);
  DROP(KVC_DROP_GATHER, keep, 17, KVC_FIELD_KEEP);
  DROP(KVC_DROP_GATHER, keep, -2147483647 - 1, KVC_FIELD_KEEP);
  DROP(KVC_DROP_GATHER, sinks, 9, KVC_FIELD_SINKS);
  DROP(KVC_DROP_GATHER, sinks, -1, KVC_FIELD_SINKS);
  DROP(KVC_DROP_GATHER, recent, 9, KVC_FIELD_RECENT);
  DROP(KVC_DROP_WHOLE_BLOCKS, sinks, 3, KVC_FIELD_SINKS);
  DROP(KVC_DROP_WHOLE_BLOCKS, keep, 7, KVC_FIELD_KEEP);
  DROP(KVC_DROP_OVERWRITE, overwritten, 17, KVC_FIELD_OVERWRITTEN);
  DROP(KVC_DROP_OVERWRITE, overwritten, -1, KVC_FIELD_OVERWRITTEN);
#undef DROP
  IS(capi_same(before, capi_count(cache)));
  // Beside a sharer: two blocks of its own for none that come back.
  OK(kvc_fork(cache, a, &b, &error));
  d = drop_to(KVC_DROP_GATHER, 8);
  REFUSED(kvc_retain(cache, a, &d, &n, &n, &error), KVC_NO_GAIN, KVC_FIELD_BLOCKS_RETURNED);
  IS(error.value == -2 && n == -1);
  d.at_a_loss = 1;
  OK(kvc_retain(cache, a, &d, NULL, NULL, &error));
  d = drop_to(KVC_DROP_GATHER, 8);
  d.at_a_loss = 1;
  REFUSED(kvc_retain(cache, b, &d, NULL, NULL, &error), KVC_BUSY, KVC_FIELD_COMMANDS);  // one gather a step
  OK(kvc_cache_end_step(cache, &error));
  OK(kvc_extend(cache, b, 1, 1, &n, &error));
  REFUSED(kvc_retain(cache, b, &d, NULL, NULL, &error), KVC_BUSY, KVC_FIELD_DRAFTS);
  OK(kvc_accept(cache, b, 0, &error));
  OK(kvc_cache_destroy(cache, &error));

  config.max_gathers = -1;
  OK(kvc_cache_create(&config, &cache, &error));
  a = capi_begin(cache, text, 16);
  REFUSED(kvc_retain(cache, a, &d, NULL, NULL, &error), KVC_UNSUPPORTED, KVC_FIELD_MAX_GATHERS);
  OK(kvc_cache_destroy(cache, &error));

  group.format.lossy = 1;
  group.format.block = 100;
  OK(kvc_cache_create(&config, &cache, &error));
  a = capi_begin(cache, text, 16);
  REFUSED(kvc_retain(cache, a, &d, NULL, NULL, &error), KVC_UNSUPPORTED, KVC_FIELD_SEALED);
  OK(kvc_cache_destroy(cache, &error));
}

// A key says its text position and head, so that it can be told where it came from.
static float key_of(int32_t position, int32_t head) {
  return (float)(position * HEADS + head);
}

// Stores the rows of `positions` [n] in the slots [n][HEADS].
static void store(const kvc_kv* kv, const int32_t* positions, int32_t n, const int64_t* slots) {
  float rows[16 * HEADS * DIM];
  kvc_append a;
  kvc_error error;
  int32_t r, h, d;
  for (r = 0; r < n; ++r) {
    for (h = 0; h < HEADS; ++h) {
      for (d = 0; d < DIM; ++d) rows[(r * HEADS + h) * DIM + d] = key_of(positions[r], h);
    }
  }
  memset(&a, 0, sizeof a);
  a.struct_size = (uint32_t)sizeof a;
  a.rows = n;
  a.k.data = rows;
  a.k.type = KVC_F32;
  a.k.heads = HEADS;
  a.k.dim = DIM;
  a.k.row_stride = (int64_t)sizeof(float) * HEADS * DIM;
  a.k.head_stride = (int64_t)sizeof(float) * DIM;
  a.v = a.k;
  a.slot = slots;
  a.slot_head_stride = 1;
  OK(kvc_cpu_append(kv, &a, NULL, &error));
}

static float stored(const kvc_kv* kv, const int32_t* table, int32_t head, int32_t slot, int value) {
  const kvc_plane* p = value ? &kv->v : &kv->k;
  const char* at = (const char*)p->data + p->block_stride * table[slot / BLOCK] + p->head_stride * head +
                   p->token_stride * (slot % BLOCK);
  float x;
  memcpy(&x, at, sizeof x);
  return x;
}

static void run_commands(kvc_cache cache, const kvc_kv* kv, const kvc_keep* keeps, int32_t n_keeps) {
  kvc_run run;
  kvc_error error;
  // [run]
  memset(&run, 0, sizeof run);
  run.struct_size = (uint32_t)sizeof run;
  run.layers = kv;
  run.n_layers = 1;
  run.keeps = keeps;
  run.n_keeps = n_keeps;
  OK(kvc_cache_commands(cache, &run.commands, &run.n_commands, &error));
  OK(kvc_cache_gather_ids(cache, &run.ids, &run.n_ids, &error));
  OK(kvc_cpu_run(&run, NULL, &error));
  OK(kvc_cache_end_step(cache, &error));
  // [run]
}

void capi_test_retain_bytes(void) {
  const kvc_cache cache = capi_small_cache(12);
  const int32_t lists[HEADS][6] = {{0, 1, 5, 9, 12, 15}, {2, 3, 4, 7, 14, 15}};
  const int32_t next[1] = {16};
  kvc_planes planes;
  kvc_kv kv;
  kvc_sequence a, sibling = {0};
  kvc_drop d = drop_to(KVC_DROP_GATHER, 6);
  kvc_keep keeps[4];
  kvc_error error;
  const int32_t* table = NULL;
  int64_t bytes = 0, slots[16 * HEADS];
  void* memory;
  int32_t text[16], n = 0, t, h;
  memset(&planes, 0, sizeof planes);
  memset(keeps, 0, sizeof keeps);
  planes.struct_size = (uint32_t)sizeof planes;
  planes.layers = 1;
  planes.kv_heads = HEADS;
  planes.dim_k = planes.dim_v = DIM;
  planes.block = BLOCK;
  planes.blocks = 12;
  OK(kvc_cpu_planes(&planes, &kv, &bytes, &error));
  memory = malloc((size_t)bytes + 64);
  IS(memory != NULL);
  if (memory == NULL) return;
  planes.memory.ptr = (char*)memory + (64 - (uintptr_t)memory % 64);
  planes.memory.bytes = (size_t)bytes;
  OK(kvc_cpu_planes(&planes, &kv, &bytes, &error));

  capi_text(text, 16, 0);
  a = capi_begin(cache, text, 16);
  OK(kvc_table(cache, a, 0, &table, &n, &error));
  for (t = 0; t < 16; ++t) {
    for (h = 0; h < HEADS; ++h) slots[t * HEADS + h] = (int64_t)table[t / BLOCK] * BLOCK + t % BLOCK;
  }
  store(&kv, text, 16, slots);
  OK(kvc_fork(cache, a, &sibling, &error));
  d.at_a_loss = 1;
  OK(kvc_retain(cache, a, &d, NULL, NULL, &error));
  keeps[capi_lengths(cache, a).place].slots = &lists[0][0];
  keeps[capi_lengths(cache, a).place].head_stride = 6;
  run_commands(cache, &kv, keeps, 4);
  OK(kvc_table(cache, a, 0, &table, &n, &error));
  for (t = 0; t < 6; ++t) {
    for (h = 0; h < HEADS; ++h) {
      IS(stored(&kv, table, h, t, 0) == key_of(lists[h][t], h));
      IS(stored(&kv, table, h, t, 1) == key_of(lists[h][t], h));
    }
  }
  // Token 16 takes slot 2 of the first head and slot 4 of the second.
  d = drop_to(KVC_DROP_OVERWRITE, 6);
  d.overwritten = 1;
  OK(kvc_retain(cache, a, &d, NULL, NULL, &error));
  run_commands(cache, &kv, NULL, 0);
  OK(kvc_table(cache, a, 0, &table, &n, &error));
  slots[0] = (int64_t)table[0] * BLOCK + 2;
  slots[1] = (int64_t)table[1] * BLOCK + 0;
  store(&kv, next, 1, slots);
  for (t = 0; t < 6; ++t) {
    for (h = 0; h < HEADS; ++h)
      IS(stored(&kv, table, h, t, 0) == key_of(t == (h == 0 ? 2 : 4) ? 16 : lists[h][t], h));
  }
  // What the sibling holds is untouched.
  OK(kvc_table(cache, sibling, 0, &table, &n, &error));
  for (t = 0; t < 16; ++t) IS(stored(&kv, table, 1, t, 0) == key_of(t, 1));
  OK(kvc_cache_destroy(cache, &error));
  free(memory);
}
