// SPDX-License-Identifier: Apache-2.0
// A whole user of kvcache in C99: one cache, two requests with the same beginning, attention over their
// pages. What is learned: how a cache is made from a zeroed struct, how a step goes (open, extend, commands,
// append, attend, end_step, commit), that the second request gets the shared tokens' keys and values without
// computing them, and how an error says which field it means. A model is only hinted at: keys, values and
// queries are random numbers that depend on token and position. The result is compared with attention
// computed naively from those.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvcache/kvcache.h"

enum {
  KV_HEADS = 2,
  Q_HEADS = 6,
  DIM = 32,
  BLOCK = 16,
  BLOCKS = 64,
  PROMPT = 100,
  SHARED = 70,
  LONGEST = 128
};

// [try]
static int try_failed(kvc_status status, const kvc_error* error, const char* call) {
  if (status == KVC_OK) return 0;
  fprintf(stderr, "%s: %s (%s = %lld)\n", call, kvc_status_text(status), kvc_field_text(error->field),
          (long long)error->value);
  return 1;
}
#define TRY(call) \
  if (try_failed(call, &error, #call)) return 1
// [try]

// What a model would compute: the same token at the same position has the same key, value and query.
enum { KEY, VALUE, QUERY };
static float model(int what, int32_t token, int32_t position, int32_t head, int32_t d) {
  uint32_t x = 2166136261u;
  const uint32_t parts[5] = {(uint32_t)what, (uint32_t)token, (uint32_t)position, (uint32_t)head,
                             (uint32_t)d};
  int i;
  for (i = 0; i < 5; ++i) x = (x ^ parts[i]) * 16777619u, x ^= x >> 15;
  return (float)(x >> 8) / 8388608.0f - 1.0f;
}

static void fill(float* rows, int what, int32_t heads, const int32_t* text, const int32_t* position,
                 int32_t n) {
  int32_t r, h, d;
  for (r = 0; r < n; ++r)
    for (h = 0; h < heads; ++h)
      for (d = 0; d < DIM; ++d) *rows++ = model(what, text[position[r]], position[r], h, d);
}

// Attention of one row and head in double, over the plain text.
static void naive(const int32_t* text, int32_t position, int32_t head, double* out) {
  const int32_t kv = head / (Q_HEADS / KV_HEADS);
  double sum = 0;
  int32_t j, d;
  memset(out, 0, DIM * sizeof *out);
  for (j = 0; j <= position; ++j) {
    double score = 0, weight;
    for (d = 0; d < DIM; ++d)
      score += (double)model(QUERY, text[position], position, head, d) * model(KEY, text[j], j, kv, d);
    weight = exp(score / sqrt(DIM));
    sum += weight;
    for (d = 0; d < DIM; ++d) out[d] += weight * model(VALUE, text[j], j, kv, d);
  }
  for (d = 0; d < DIM; ++d) out[d] /= sum;
}

struct engine {
  kvc_cache cache;
  kvc_kv layer;  // a real model has one per layer; the cache is the same
  kvc_plan plan;
  kvc_buf workspace;
  double worst;  // difference from naive() so far
};

static kvc_rows dense(const float* data, int32_t heads) {
  kvc_rows rows = {0};
  rows.data = data;
  rows.type = KVC_F32;
  rows.heads = heads;
  rows.dim = DIM;
  rows.head_stride = DIM * (int64_t)sizeof(float);
  rows.row_stride = heads * rows.head_stride;
  return rows;
}

static int create(struct engine* e) {
  kvc_error error;
  // [create]
  kvc_group_config group = {0};
  kvc_cache_config config = {0};
  group.struct_size = sizeof group;
  group.layers = 1;
  group.kv_heads = KV_HEADS;
  group.head_dim_k = DIM;
  group.type = KVC_F32;
  group.block_size = BLOCK;
  group.total = BLOCKS;
  config.struct_size = sizeof config;
  config.n_groups = 1;
  config.groups = &group;
  TRY(kvc_cache_create(&config, &e->cache, &error));
  // [create]
  kvc_planes planes = {0};
  kvc_plan_in in = {0};
  int64_t bytes = 0;
  char* memory;
  planes.struct_size = sizeof planes;
  planes.layers = 1;
  planes.kv_heads = KV_HEADS;
  planes.dim_k = planes.dim_v = DIM;
  planes.type = KVC_F32;
  planes.block = BLOCK;
  planes.blocks = BLOCKS;
  TRY(kvc_cpu_planes(&planes, NULL, &bytes, &error));
  memory = malloc((size_t)bytes + 64);  // lives as long as the program
  if (memory == NULL) return 1;
  planes.memory.ptr = memory + (64 - (uintptr_t)memory % 64) % 64;
  planes.memory.bytes = (size_t)bytes;
  TRY(kvc_cpu_planes(&planes, &e->layer, NULL, &error));
  in.struct_size = sizeof in;
  in.kv = &e->layer;
  in.q_heads = Q_HEADS;
  in.n = 1;
  in.max_q = PROMPT;
  in.max_kv = LONGEST;
  e->plan.struct_size = sizeof e->plan;
  TRY(kvc_cpu_plan(&in, &e->plan, &error));
  e->workspace.bytes = e->plan.workspace_bytes;
  e->workspace.ptr = malloc(e->workspace.bytes);
  return e->workspace.ptr == NULL;
}

// One step of one sequence: `n` new tokens, the last of those it holds.
static int step(struct engine* e, kvc_sequence sequence, const int32_t* text, int32_t n) {
  static float k[PROMPT * KV_HEADS * DIM], v[PROMPT * KV_HEADS * DIM], q[PROMPT * Q_HEADS * DIM];
  static float o[PROMPT * Q_HEADS * DIM];
  int32_t table[LONGEST / BLOCK], kv_len, q_start[2], position[PROMPT], i, h, d;
  int64_t slot[PROMPT];
  kvc_error error;
  // [step]
  kvc_run run = {0};
  run.struct_size = sizeof run;
  run.layers = &e->layer;
  run.n_layers = 1;
  TRY(kvc_cache_commands(e->cache, &run.commands, &run.n_commands, &error));
  TRY(kvc_cpu_run(&run, NULL, &error));  // copies of shared blocks that are about to be written

  kvc_view view = {0};
  kvc_batch batch = {0};
  view.struct_size = sizeof view;
  batch.struct_size = sizeof batch;
  view.n = 1;
  view.sequences = &sequence;
  view.rows = &n;
  view.table = table;
  view.table_columns = LONGEST / BLOCK;
  view.kv_len = &kv_len;
  view.q_start = q_start;
  view.q_pos = position;
  view.slot = slot;
  view.max_rows = PROMPT;
  TRY(kvc_view_batch(e->cache, &view, &batch, &error));
  // [step]
  fill(k, KEY, KV_HEADS, text, position, n);
  fill(v, VALUE, KV_HEADS, text, position, n);
  fill(q, QUERY, Q_HEADS, text, position, n);
  kvc_append append = {0};
  append.struct_size = sizeof append;
  append.rows = n;
  append.k = dense(k, KV_HEADS);
  append.v = dense(v, KV_HEADS);
  append.slot = slot;
  TRY(kvc_cpu_append(&e->layer, &append, NULL, &error));

  const kvc_rows queries = dense(q, Q_HEADS);
  kvc_softmax softmax = {0};
  kvc_out out = {0};
  softmax.struct_size = sizeof softmax;
  softmax.scale = 1.0f / sqrtf(DIM);
  softmax.causal = 1;
  out.struct_size = sizeof out;
  out.type = KVC_F32;
  out.heads = Q_HEADS;
  out.dim = DIM;
  out.o = o;
  out.head_stride = DIM * (int64_t)sizeof(float);
  out.row_stride = Q_HEADS * out.head_stride;
  TRY(kvc_cpu_attend(&e->plan, &e->layer, &batch, &queries, &softmax, &out, e->workspace, NULL, &error));
  TRY(kvc_cache_end_step(e->cache, &error));
  for (i = 0; i < n; ++i) {
    for (h = 0; h < Q_HEADS; ++h) {
      double want[DIM];
      naive(text, position[i], h, want);
      for (d = 0; d < DIM; ++d) {
        const double off = fabs(want[d] - o[(i * Q_HEADS + h) * DIM + d]);
        if (!(off <= e->worst)) e->worst = off;  // also if it is no number
      }
    }
  }
  return 0;
}

// Prefills and then decodes `decoded` tokens. Returns how many tokens of the prompt were reused, or -1.
static int serve(struct engine* e, int32_t* text, int32_t decoded, int32_t* reused) {
  kvc_error error;
  int32_t i;
  // [serve]
  kvc_scope scope = {0};
  kvc_sequence sequence = {0};
  scope.struct_size = sizeof scope;
  scope.kind = KVC_SCOPE_TENANT;  // who may share is chosen, there is no default
  scope.salt.data = "acme";
  scope.salt.size = 4;
  TRY(kvc_open(e->cache, &scope, text, PROMPT, NULL, &sequence, reused, &error));
  TRY(kvc_extend(e->cache, sequence, PROMPT - *reused, 0, NULL, &error));
  if (step(e, sequence, text, PROMPT - *reused)) return 1;
  for (i = 0; i < decoded; ++i) {
    text[PROMPT + i] = 1000 + i;  // a model would sample it
    TRY(kvc_extend(e->cache, sequence, 1, 0, NULL, &error));
    if (step(e, sequence, text, 1)) return 1;
  }
  TRY(kvc_commit(e->cache, sequence, text, PROMPT + decoded, NULL, &error));
  TRY(kvc_close(e->cache, sequence, &error));
  // [serve]
  return 0;
}

int main(void) {
  static struct engine e;
  int32_t first[LONGEST], second[LONGEST], reused[2] = {0, 0}, i;
  kvc_error error;
  for (i = 0; i < LONGEST; ++i) {
    first[i] = 10 + i;
    second[i] = i < SHARED ? first[i] : 500 + i;
  }
  if (create(&e) || serve(&e, first, 20, &reused[0]) || serve(&e, second, 20, &reused[1])) return 1;
  TRY(kvc_cache_destroy(e.cache, &error));
  printf("prompt tokens reused: %d of %d, then %d of %d (%d are the same)\n", (int)reused[0], PROMPT,
         (int)reused[1], PROMPT, SHARED);
  printf("largest difference from naive attention: %.3g\n", e.worst);
  return reused[0] == 0 && reused[1] == SHARED / BLOCK * BLOCK && e.worst < 1e-5 ? 0 : 1;
}
