// SPDX-License-Identifier: Apache-2.0
// Both halves together, from C alone: two layers, a prompt, a second request that shares its prefix, a branch
// that writes into a shared block, and attention compared with a plain computation in double.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { LAYERS = 2, KV_HEADS = 2, Q_HEADS = 4, DIM_K = 16, DIM_V = 8, BLOCK = 4, BLOCKS = 12, MOST = 32 };

void capi_test_planes(void) {
  static unsigned char memory[4096 + 64];
  unsigned char* aligned = memory + (64 - (uintptr_t)memory % 64) % 64;
  kvc_planes p;
  kvc_kv layers[2];
  kvc_error error;
  int64_t bytes = -1;
  memset(&p, 0, sizeof p);
  p.struct_size = (uint32_t)sizeof p;
  p.layers = 2;
  p.kv_heads = 2;
  p.dim_k = 8;
  p.dim_v = 8;
  p.type = KVC_F16;
  p.block = 4;
  p.blocks = 3;
  p.group = 1;
  OK(kvc_cpu_planes(&p, NULL, &bytes, &error));
  IS(bytes == 2 * 3 * 4 * 2 * 16 * 2);
  p.memory.ptr = aligned;
  p.memory.bytes = (size_t)bytes - 1;
  REFUSED(kvc_cpu_planes(&p, layers, &bytes, &error), KVC_WORKSPACE, KVC_FIELD_MEMORY);
  IS(error.value == 1536);
  p.memory.bytes = (size_t)bytes;
  REFUSED(kvc_cpu_planes(&p, NULL, &bytes, &error), KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS);
  OK(kvc_cpu_planes(&p, layers, NULL, &error));
  IS(layers[0].struct_size == sizeof layers[0] && layers[1].group == 1 && layers[1].blocks == 3);
  IS((unsigned char*)layers[0].k.data == aligned);
  IS((unsigned char*)layers[1].k.data == aligned + 768);
  IS(layers[0].k.token_stride == 2 && layers[0].k.dim_stride == 8 && layers[0].v.token_stride == 16);
  p.order = KVC_K_ROW_MAJOR;
  OK(kvc_cpu_planes(&p, layers, NULL, &error));
  IS(layers[0].k.token_stride == 16 && layers[0].k.dim_stride == 2);
  p.memory.ptr = aligned + 2;
  REFUSED(kvc_cpu_planes(&p, layers, &bytes, &error), KVC_BAD_ARGUMENT, KVC_FIELD_MEMORY);
  p.memory.ptr = NULL;
#define PLANES(change, back, status, field)                           \
  change;                                                             \
  REFUSED(kvc_cpu_planes(&p, layers, &bytes, &error), status, field); \
  back
  REFUSED(kvc_cpu_planes(NULL, layers, &bytes, &error), KVC_BAD_ARGUMENT, KVC_FIELD_PLANES);
  PLANES(p.struct_size = 1, p.struct_size = (uint32_t)sizeof p, KVC_ABI, KVC_FIELD_PLANES);
  PLANES(p.layers = 0, p.layers = 2, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS);
  PLANES(p.kv_heads = -1, p.kv_heads = 2, KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS);
  PLANES(p.dim_k = 0, p.dim_k = 8, KVC_BAD_ARGUMENT, KVC_FIELD_HEAD_DIM_K);
  PLANES(p.dim_v = 0, p.dim_v = 8, KVC_BAD_ARGUMENT, KVC_FIELD_HEAD_DIM_V);
  PLANES(p.type = 3, p.type = KVC_F16, KVC_BAD_ARGUMENT, KVC_FIELD_TYPE);
  PLANES(p.type = -1, p.type = KVC_F16, KVC_BAD_ARGUMENT, KVC_FIELD_TYPE);
  PLANES(p.block = 6, p.block = 4, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK_SIZE);
  PLANES(p.blocks = 0, p.blocks = 3, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCKS);
  PLANES(p.group = 256, p.group = 1, KVC_BAD_ARGUMENT, KVC_FIELD_GROUP);
  PLANES(p.order = 2, p.order = 0, KVC_BAD_ARGUMENT, KVC_FIELD_ORDER);
  PLANES(p.reserved = 1, p.reserved = 0, KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED);
}

struct machine {
  kvc_cache cache;
  kvc_kv layers[LAYERS];
  void* memory;
  kvc_plan plan;
  kvc_buf workspace;
};

// Keys, values and queries as a function of token, position, layer, head and channel: what a model would
// compute.
static float value_of(int32_t token, int32_t at, int32_t layer, int32_t head, int32_t d, int32_t what) {
  return (float)sin(token * 0.37 + at * 1.13 + layer * 2.9 + head * 0.71 + d * 0.19 + what * 5.3);
}

static void start(struct machine* m) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_planes planes;
  kvc_plan_in in;
  kvc_error error;
  int64_t bytes = 0;
  capi_small(&config, &group, BLOCKS);
  group.layers = LAYERS;
  group.head_dim_k = DIM_K;
  group.head_dim_v = DIM_V;
  memset(m, 0, sizeof *m);
  OK(kvc_cache_create(&config, &m->cache, &error));
  memset(&planes, 0, sizeof planes);
  planes.struct_size = (uint32_t)sizeof planes;
  planes.layers = LAYERS;
  planes.kv_heads = KV_HEADS;
  planes.dim_k = DIM_K;
  planes.dim_v = DIM_V;
  planes.type = KVC_F32;
  planes.block = BLOCK;
  planes.blocks = BLOCKS;
  OK(kvc_cpu_planes(&planes, NULL, &bytes, &error));
  m->memory = malloc((size_t)bytes + 64);
  memset(m->memory, 0xff, (size_t)bytes + 64);  // NaN: a slot that nobody wrote must not be read
  planes.memory.ptr = (char*)m->memory + (64 - (uintptr_t)m->memory % 64) % 64;
  planes.memory.bytes = (size_t)bytes;
  OK(kvc_cpu_planes(&planes, m->layers, NULL, &error));
  memset(&in, 0, sizeof in);
  in.struct_size = (uint32_t)sizeof in;
  in.q_heads = Q_HEADS;
  in.n = 3;
  in.max_q = MOST;
  in.max_kv = MOST;
  in.features = KVC_USE_LSE;
  in.kv = m->layers;
  m->plan.struct_size = (uint32_t)sizeof m->plan;
  OK(kvc_cpu_plan(&in, &m->plan, &error));
  m->workspace.bytes = m->plan.workspace_bytes;
  m->workspace.ptr = malloc(m->workspace.bytes + 1);
}

static kvc_rows rows_of(const float* data, int32_t heads, int32_t dim) {
  kvc_rows r;
  memset(&r, 0, sizeof r);
  r.data = data;
  r.heads = heads;
  r.dim = dim;
  r.head_stride = (int64_t)dim * 4;
  r.row_stride = r.head_stride * heads;
  return r;
}

// Attention of one query row of sequence `text` in double, base-2 log-sum-exp included.
static double expect(const int32_t* text, int32_t at, int32_t layer, int32_t h, const float* o, float lse2) {
  double score[MOST], top = -1e300, sum = 0, worst;
  int32_t j, d;
  for (j = 0; j <= at; ++j) {
    score[j] = 0;
    for (d = 0; d < DIM_K; ++d) {
      score[j] += (double)value_of(text[at], at, layer, h, d, 2) * value_of(text[j], j, layer, h / 2, d, 0);
    }
    score[j] *= 0.25;
    if (score[j] > top) top = score[j];
  }
  for (j = 0; j <= at; ++j) sum += exp(score[j] - top);
  worst = fabs((top + log(sum)) / log(2.0) - lse2);
  for (d = 0; d < DIM_V; ++d) {
    double want = 0;
    for (j = 0; j <= at; ++j) want += exp(score[j] - top) / sum * value_of(text[j], j, layer, h / 2, d, 1);
    worst = fmax(worst, fabs(want - o[d]));
  }
  return worst;
}

// One step: runs the commands, appends the new rows of all sequences in every layer, attends, compares.
static double step(struct machine* m, const kvc_sequence* s, const int32_t* const* text, const int32_t* rows,
                   int32_t n) {
  static float k[MOST * KV_HEADS * DIM_K], v[MOST * KV_HEADS * DIM_V], q[MOST * Q_HEADS * DIM_K];
  static float o[MOST * Q_HEADS * DIM_V], lse[MOST * Q_HEADS];
  int32_t table[3 * 8], kv_len[3], q_start[4], q_pos[MOST], layer, i, r, h, d;
  int64_t slot[MOST];
  double worst = 0;
  kvc_view view;
  kvc_batch batch;
  kvc_run run;
  kvc_error error;
  memset(&run, 0, sizeof run);
  run.struct_size = (uint32_t)sizeof run;
  run.n_layers = LAYERS;
  run.layers = m->layers;
  OK(kvc_cache_commands(m->cache, &run.commands, &run.n_commands, &error));
  OK(kvc_cpu_run(&run, NULL, &error));
  memset(&view, 0, sizeof view);
  memset(&batch, 0, sizeof batch);
  view.struct_size = (uint32_t)sizeof view;
  batch.struct_size = (uint32_t)sizeof batch;
  view.n = n;
  view.table_columns = 8;
  view.max_rows = MOST;
  view.sequences = s;
  view.rows = rows;
  view.table = table;
  view.kv_len = kv_len;
  view.q_start = q_start;
  view.q_pos = q_pos;
  view.slot = slot;
  OK(kvc_view_batch(m->cache, &view, &batch, &error));
  for (layer = 0; layer < LAYERS; ++layer) {
    kvc_append append;
    kvc_softmax softmax;
    kvc_out out;
    kvc_rows queries;
    for (i = 0; i < n; ++i) {
      for (r = q_start[i]; r < q_start[i + 1]; ++r) {
        const int32_t t = text[i][q_pos[r]], at = q_pos[r];
        for (h = 0; h < KV_HEADS; ++h) {
          for (d = 0; d < DIM_K; ++d) k[(r * KV_HEADS + h) * DIM_K + d] = value_of(t, at, layer, h, d, 0);
          for (d = 0; d < DIM_V; ++d) v[(r * KV_HEADS + h) * DIM_V + d] = value_of(t, at, layer, h, d, 1);
        }
        for (h = 0; h < Q_HEADS; ++h) {
          for (d = 0; d < DIM_K; ++d) q[(r * Q_HEADS + h) * DIM_K + d] = value_of(t, at, layer, h, d, 2);
        }
      }
    }
    memset(&append, 0, sizeof append);
    append.struct_size = (uint32_t)sizeof append;
    append.rows = q_start[n];
    append.k = rows_of(k, KV_HEADS, DIM_K);
    append.v = rows_of(v, KV_HEADS, DIM_V);
    append.slot = slot;
    OK(kvc_cpu_append(&m->layers[layer], &append, NULL, &error));
    memset(&softmax, 0, sizeof softmax);
    softmax.struct_size = (uint32_t)sizeof softmax;
    softmax.scale = 0.25f;
    softmax.causal = 1;
    memset(&out, 0, sizeof out);
    out.struct_size = (uint32_t)sizeof out;
    out.heads = Q_HEADS;
    out.dim = DIM_V;
    out.o = o;
    out.head_stride = DIM_V * 4;
    out.row_stride = Q_HEADS * DIM_V * 4;
    out.lse2 = lse;
    queries = rows_of(q, Q_HEADS, DIM_K);
    OK(kvc_cpu_attend(&m->plan, &m->layers[layer], &batch, &queries, &softmax, &out, m->workspace, NULL,
                      &error));
    for (i = 0; i < n; ++i) {
      for (r = q_start[i]; r < q_start[i + 1]; ++r) {
        for (h = 0; h < Q_HEADS; ++h) {
          const double e =
              expect(text[i], q_pos[r], layer, h, &o[(r * Q_HEADS + h) * DIM_V], lse[r * Q_HEADS + h]);
          worst = e >= 0 ? fmax(worst, e) : INFINITY;  // NaN is no small error
        }
      }
    }
  }
  OK(kvc_cache_end_step(m->cache, &error));
  return worst;
}

void capi_test_end_to_end(void) {
  static struct machine m;
  int32_t first[MOST], second[MOST], third[MOST], rows[3], reused = -1, i;
  const int32_t* text[3];
  const char* broken = "not asked";
  kvc_sequence s[3];
  kvc_stats stats;
  kvc_error error;
  const kvc_scope scope = capi_shared();
  start(&m);
  capi_text(first, MOST, 100);
  capi_text(second, MOST, 100);
  for (i = 10; i < MOST; ++i) second[i] = 7 * i;
  text[0] = first;
  text[1] = second;
  text[2] = third;
  s[0] = capi_begin(m.cache, first, 14);
  rows[0] = 14;
  IS(step(&m, s, text, rows, 1) < 1e-5);
  OK(kvc_commit(m.cache, s[0], first, 14, NULL, &error));
  // The second request finds two of its blocks; only the rest is computed, beside a decode of the first.
  OK(kvc_open(m.cache, &scope, second, 13, NULL, &s[1], &reused, &error));
  IS(reused == 8);
  OK(kvc_extend(m.cache, s[1], 13 - reused, 0, NULL, &error));
  OK(kvc_extend(m.cache, s[0], 1, 0, NULL, &error));
  rows[0] = 1;
  rows[1] = 13 - reused;
  IS(step(&m, s, text, rows, 2) < 1e-5);
  // A branch of the second goes its own way: its last block is copied before it writes.
  OK(kvc_fork(m.cache, s[1], &s[2], &error));
  memcpy(third, second, sizeof third);
  for (i = 13; i < MOST; ++i) third[i] = -i;
  for (i = 0; i < 6; ++i) {
    int32_t k;
    for (k = 0; k < 3; ++k) {
      OK(kvc_extend(m.cache, s[k], 1, 0, NULL, &error));
      rows[k] = 1;
    }
    IS(step(&m, s, text, rows, 3) < 1e-5);
  }
  stats = capi_count(m.cache);
  IS(stats.tokens_reused == 8 && stats.blocks_copied == 1 && stats.sequences_opened == 3);
  OK(kvc_cache_check(m.cache, &broken, &error));
  IS(broken == NULL);
  OK(kvc_cache_destroy(m.cache, &error));
  free(m.memory);
  free(m.workspace.ptr);
}
