/* SPDX-License-Identifier: Apache-2.0 */
// Packed formats from C: their text, what they come to, and a packed cache from creation to attention.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static kvc_group_config packed_group(const char* const* formats, int32_t n) {
  kvc_group_config g;
  memset(&g, 0, sizeof g);
  g.struct_size = (uint32_t)sizeof g;
  g.block_size = PACKED_BLOCK;
  g.layers = PACKED_LAYERS;
  g.kv_heads = PACKED_HEADS;
  g.head_dim_k = PACKED_DIM;
  g.type = KVC_F32;
  g.total = PACKED_BLOCKS;
  g.formats = formats;
  g.n_formats = n;
  return g;
}

void capi_test_format_text(void) {
  const char* one[] = {"kv4"};
  const char* two[] = {"int8:exempt=1", "int2:exempt=1"};
  const char* exact[] = {"f16"};
  kvc_group_config g = packed_group(one, 1);
  kvc_cache_config config;
  kvc_geometry geometry;
  kvc_block_format f, mixed;
  kvc_error error;
  char text[256], again[256], small[8];
  OK(kvc_format_text("int4:k=channel,v=token,group=32,residual=32,exempt=sinks", text, sizeof text, &error));
  OK(kvc_format_text(text, again, sizeof again, &error));
  IS(strcmp(text, again) == 0 && strstr(text, "residual=32") != NULL);
  OK(kvc_format_text("kv4", small, sizeof small, &error));
  IS(strlen(small) == sizeof small - 1);
  OK(kvc_format_text("kv4", NULL, 0, &error));
  REFUSED(kvc_format_text("int4:residul=32", text, sizeof text, &error), KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  IS(strstr(text, "residul") != NULL && strstr(text, "allowed") != NULL);

  OK(kvc_block_format_of(&g, &f, &error));
  IS(f.lossy == 1 && f.exempt == 1 && f.deferred == 0 && f.fingerprint != 0);
  /* Codes, scales and minima: a scale per channel of K and per token of V. */
  IS(f.block == 2 * 2 * (2 * PACKED_DIM * PACKED_BLOCK / 2 + 4 * (PACKED_DIM + PACKED_BLOCK)));
  IS(f.open_block == 2 * 2 * 2 * PACKED_DIM * PACKED_BLOCK * 4);
  g.format.deferred = 1;
  OK(kvc_block_format_of(&g, &f, &error));
  IS(f.deferred == 1);
  g.formats = two;
  g.n_formats = 2;
  OK(kvc_block_format_of(&g, &mixed, &error));
  IS(mixed.block != f.block && mixed.fingerprint != f.fingerprint);
  memset(&config, 0, sizeof config);
  config.struct_size = (uint32_t)sizeof config;
  config.n_groups = 1;
  config.groups = &g;
  geometry.struct_size = (uint32_t)sizeof geometry;
  OK(kvc_plan_cache(&config, &geometry, &error));
  IS(geometry.group[0].block_bytes == mixed.block && geometry.group[0].open_block_bytes == mixed.open_block);
  IS(geometry.group[0].lossy == 1 && geometry.group[0].deferred == 1 && geometry.group[0].open > 0);
  g = packed_group(exact, 1);
  OK(kvc_block_format_of(&g, &f, &error));
  IS(f.lossy == 0 && f.block == 2 * 2 * 2 * PACKED_DIM * PACKED_BLOCK * 4 && f.open_block == 0);
}

void capi_test_format_refusals(void) {
  const char* one[] = {"kv4"};
  const char* typo[] = {"kv4", "kv9"};
  const char* missing[] = {"kv4", NULL};
  const char* differ[] = {"int8:residual=1", "int8:residual=2"};
  const char* before_rope[] = {"int4:rope=before"};
  kvc_group_config g = packed_group(one, 1);
  kvc_planes p;
  kvc_kv layers[2 * PACKED_LAYERS];
  kvc_block_format f;
  kvc_error error;
  int64_t bytes = 0;
#define GROUP(change, back, status, field)                     \
  change;                                                      \
  REFUSED(kvc_block_format_of(&g, &f, &error), status, field); \
  back
  REFUSED(kvc_block_format_of(NULL, &f, &error), KVC_BAD_ARGUMENT, KVC_FIELD_GROUP);
  REFUSED(kvc_block_format_of(&g, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_FORMAT);
  GROUP(g.n_formats = 0, g.n_formats = 1, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  GROUP(g.n_formats = 3, g.n_formats = 1, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  GROUP(g.formats = NULL, g.formats = one, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  GROUP(g.reserved = 1, g.reserved = 0, KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED);
  GROUP(g.format.block = 64, g.format.block = 0, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  GROUP(g.block_size = 16, g.block_size = PACKED_BLOCK, KVC_UNSUPPORTED, KVC_FIELD_BLOCK_SIZE);
  GROUP(g.head_dim_k = 24, g.head_dim_k = PACKED_DIM, KVC_UNSUPPORTED, KVC_FIELD_HADAMARD);
  g.n_formats = 2;
  GROUP(g.formats = typo, (void)0, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  IS(error.index == 1);
  GROUP(g.formats = missing, (void)0, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  GROUP(g.formats = differ, (void)0, KVC_BAD_ARGUMENT, KVC_FIELD_RESIDUAL);
  REFUSED(kvc_format_text(NULL, NULL, 0, &error), KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  REFUSED(kvc_format_text("kv4", NULL, 4, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
#define PACKED_PLANES(change, back, status, field)                    \
  change;                                                             \
  REFUSED(kvc_cpu_planes(&p, layers, &bytes, &error), status, field); \
  back
  memset(&p, 0, sizeof p);
  p.struct_size = (uint32_t)sizeof p;
  p.layers = PACKED_LAYERS;
  p.kv_heads = 1;
  p.dim_k = p.dim_v = PACKED_DIM;
  p.block = PACKED_BLOCK;
  p.blocks = 2;
  p.open_blocks = 2;
  p.formats = one;
  p.n_formats = 1;
  OK(kvc_cpu_planes(&p, NULL, &bytes, &error));
  PACKED_PLANES(p.open_blocks = 0, p.open_blocks = 2, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_BLOCKS);
  PACKED_PLANES(p.exempt_blocks = -1, p.exempt_blocks = 0, KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT_BLOCKS);
  PACKED_PLANES(p.block = 16, p.block = PACKED_BLOCK, KVC_UNSUPPORTED, KVC_FIELD_BLOCK_SIZE);
  PACKED_PLANES(p.v_aliases_k = 1, p.v_aliases_k = 0, KVC_UNSUPPORTED, KVC_FIELD_V_ALIASES_K);
  PACKED_PLANES(p.n_formats = 3, p.n_formats = 1, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
  PACKED_PLANES(p.reserved2 = 1, p.reserved2 = 0, KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED);
  p.formats = before_rope;
  p.memory.ptr = malloc((size_t)bytes + 64);
  p.memory.bytes = (size_t)bytes;
  if (p.memory.ptr == NULL) return;
  PACKED_PLANES((void)0, (void)0, KVC_BAD_ARGUMENT, KVC_FIELD_K_ROPE);
  free(p.memory.ptr);
}

int32_t capi_packed_tokens(int32_t step, int32_t s) {
  static const int32_t tokens[PACKED_STEPS][2] = {{50, 20}, {30, 45}, {1, 1}, {25, 0},
                                                  {1, 1},   {40, 3},  {1, 1}};
  return tokens[step][s];
}

float capi_packed_value(int32_t s, int32_t at, int32_t layer, int32_t head, int32_t d, int32_t what) {
  const float outlier = at == 0 && what == 0 && d == 3 ? 30.0f : 0.0f; /* as attention sinks have */
  return (float)sin(s * 0.91 + at * 1.13 + layer * 2.9 + head * 0.71 + d * 0.19 + what * 5.3) + outlier;
}

struct packed {
  kvc_cache cache;
  kvc_sequence sequence[2];
  int32_t position[2]; /* text position of the next token */
  int32_t new_tokens[2];
  kvc_kv layers[2 * PACKED_LAYERS];
  void* memory;
  kvc_plan plan;
  kvc_buf workspace;
  kvc_view view;
  kvc_batch batch;
  int32_t table[2 * 5], open_table[2 * 5], kv_len[2], sealed[2], q_start[3], exempt_table[2];
  int32_t q_pos[PACKED_MOST], row_sealed[PACKED_MOST];
  int64_t slot[PACKED_MOST], open_slot[PACKED_MOST], exempt_slot[PACKED_MOST];
};

static void make_planes(struct packed* m, const kvc_geometry* geometry, const char* const* formats) {
  kvc_planes p;
  kvc_error error;
  int64_t bytes = 0;
  memset(&p, 0, sizeof p);
  p.struct_size = (uint32_t)sizeof p;
  p.layers = PACKED_LAYERS;
  p.kv_heads = PACKED_HEADS;
  p.dim_k = p.dim_v = PACKED_DIM;
  p.type = KVC_F32;
  p.block = PACKED_BLOCK;
  p.blocks = PACKED_BLOCKS;
  p.formats = formats;
  p.n_formats = 1;
  p.open_blocks = geometry->group[0].open;
  p.exempt_blocks = geometry->group[1].total;
  OK(kvc_cpu_planes(&p, NULL, &bytes, &error));
  IS(bytes == geometry->memory); /* what the planner says */
  m->memory = malloc((size_t)bytes + 64);
  if (m->memory == NULL) abort();
  memset(m->memory, 0xff, (size_t)bytes + 64); /* NaN: what nobody wrote must not be read */
  p.memory.ptr = (char*)m->memory + (64 - (uintptr_t)m->memory % 64) % 64;
  p.memory.bytes = (size_t)bytes;
  OK(kvc_cpu_planes(&p, m->layers, NULL, &error));
  IS(m->layers[0].exempt == 1 && m->layers[0].open_blocks == p.open_blocks);
  IS(m->layers[PACKED_LAYERS].group == 1 && m->layers[PACKED_LAYERS].blocks == p.exempt_blocks);
}

static void make_view(struct packed* m) {
  kvc_view* v = &m->view;
  v->struct_size = (uint32_t)sizeof *v;
  v->n = 2;
  v->table_columns = 5;
  v->max_rows = PACKED_MOST;
  v->exempt_group = 1 + 1;
  v->sequences = m->sequence;
  v->rows = m->new_tokens;
  v->table = m->table;
  v->open_table = m->open_table;
  v->kv_len = m->kv_len;
  v->sealed = m->sealed;
  v->q_start = m->q_start;
  v->q_pos = m->q_pos;
  v->slot = m->slot;
  v->open_slot = m->open_slot;
  v->row_sealed = m->row_sealed;
  v->exempt_table = m->exempt_table;
  v->exempt_slot = m->exempt_slot;
  m->batch.struct_size = (uint32_t)sizeof m->batch;
}

static void packed_start(struct packed* m, const char* format) {
  const char* formats[1];
  kvc_group_config g[2];
  kvc_cache_config config;
  kvc_geometry geometry;
  kvc_block_format f;
  kvc_plan_in in;
  kvc_scope scope = capi_shared();
  kvc_error error;
  int32_t s;
  formats[0] = format;
  memset(m, 0, sizeof *m);
  g[0] = packed_group(formats, 1);
  OK(kvc_block_format_of(&g[0], &f, &error));
  g[1] = packed_group(NULL, 0);
  g[1].block_size = f.exempt;
  g[1].first_only = 1;
  g[1].total = 4;
  memset(&config, 0, sizeof config);
  config.struct_size = (uint32_t)sizeof config;
  config.n_groups = 2;
  config.groups = g;
  config.max_sequences = 2;
  OK(kvc_cache_create(&config, &m->cache, &error));
  geometry.struct_size = (uint32_t)sizeof geometry;
  OK(kvc_cache_geometry(m->cache, &geometry, &error));
  make_planes(m, &geometry, formats);
  make_view(m);
  for (s = 0; s < 2; ++s) OK(kvc_open(m->cache, &scope, NULL, 0, NULL, &m->sequence[s], NULL, &error));
  memset(&in, 0, sizeof in);
  in.struct_size = (uint32_t)sizeof in;
  in.kv = m->layers;
  in.q_heads = PACKED_Q_HEADS;
  in.n = 2;
  in.max_q = PACKED_MOST;
  in.max_kv = PACKED_MOST;
  m->plan.struct_size = (uint32_t)sizeof m->plan;
  OK(kvc_cpu_plan(&in, &m->plan, &error));
  m->workspace.bytes = m->plan.workspace_bytes;
  m->workspace.ptr = malloc(m->workspace.bytes + 1);
}

static kvc_rows packed_rows(const struct packed* m, float* data, int32_t heads, int32_t layer, int32_t what) {
  kvc_rows r;
  int32_t s, t, h, d;
  float* x = data;
  for (s = 0; s < 2; ++s) {
    for (t = 0; t < m->new_tokens[s]; ++t) {
      for (h = 0; h < heads; ++h) {
        for (d = 0; d < PACKED_DIM; ++d) *x++ = capi_packed_value(s, m->position[s] + t, layer, h, d, what);
      }
    }
  }
  memset(&r, 0, sizeof r);
  r.data = data;
  r.heads = heads;
  r.dim = PACKED_DIM;
  r.head_stride = PACKED_DIM * 4;
  r.row_stride = r.head_stride * heads;
  return r;
}

static void packed_append(struct packed* m, int32_t layer, int32_t rows) {
  static float k[PACKED_MOST * PACKED_HEADS * PACKED_DIM], v[PACKED_MOST * PACKED_HEADS * PACKED_DIM];
  kvc_append a;
  kvc_error error;
  memset(&a, 0, sizeof a);
  a.struct_size = (uint32_t)sizeof a;
  a.rows = rows;
  a.k = packed_rows(m, k, PACKED_HEADS, layer, 0);
  a.v = packed_rows(m, v, PACKED_HEADS, layer, 1);
  a.open_slot = m->open_slot;
  a.exempt_slot = m->exempt_slot;
  OK(kvc_cpu_append(&m->layers[layer], &a, NULL, &error));
}

static void packed_seal(struct packed* m, int32_t layer) {
  kvc_run run;
  kvc_error error;
  memset(&run, 0, sizeof run);
  run.struct_size = (uint32_t)sizeof run;
  run.layers = &m->layers[layer];
  run.n_layers = 1;
  OK(kvc_cache_seals(m->cache, &run.commands, &run.n_commands, &error));
  OK(kvc_cpu_run(&run, NULL, &error));
}

static void packed_attend(struct packed* m, int32_t layer, float* out) {
  static float q[PACKED_MOST * PACKED_Q_HEADS * PACKED_DIM];
  kvc_softmax softmax;
  kvc_out o;
  kvc_error error;
  const kvc_rows rows = packed_rows(m, q, PACKED_Q_HEADS, layer, 2);
  memset(&softmax, 0, sizeof softmax);
  softmax.struct_size = (uint32_t)sizeof softmax;
  softmax.scale = 0.1767767f;
  softmax.causal = 1;
  memset(&o, 0, sizeof o);
  o.struct_size = (uint32_t)sizeof o;
  o.heads = PACKED_Q_HEADS;
  o.dim = PACKED_DIM;
  o.o = out;
  o.head_stride = PACKED_DIM * 4;
  o.row_stride = o.head_stride * PACKED_Q_HEADS;
  OK(kvc_cpu_attend(&m->plan, &m->layers[layer], &m->batch, &rows, &softmax, &o, m->workspace, NULL, &error));
}

static void packed_drop(struct packed* m) {
  kvc_drop drop;
  kvc_error error;
  int32_t dropped = 0, returned = 0;
  memset(&drop, 0, sizeof drop);
  drop.struct_size = (uint32_t)sizeof drop;
  drop.form = KVC_DROP_GATHER;
  drop.keep = drop.sinks = 40;
  REFUSED(kvc_retain(m->cache, m->sequence[0], &drop, NULL, NULL, &error), KVC_UNSUPPORTED, KVC_FIELD_SEALED);
  drop.form = KVC_DROP_WHOLE_BLOCKS;
  drop.sinks = PACKED_BLOCK;
  drop.keep = m->position[0] - PACKED_BLOCK;
  drop.move_sinks = 1;
  REFUSED(kvc_retain(m->cache, m->sequence[0], &drop, NULL, NULL, &error), KVC_UNSUPPORTED,
          KVC_FIELD_MOVE_SINKS);
  drop.move_sinks = drop.sinks = 0;
  REFUSED(kvc_retain(m->cache, m->sequence[0], &drop, NULL, NULL, &error), KVC_UNSUPPORTED, KVC_FIELD_SINKS);
  drop.sinks = PACKED_BLOCK;
  OK(kvc_retain(m->cache, m->sequence[0], &drop, &dropped, &returned, &error));
  IS(dropped == PACKED_BLOCK && returned == 1);
}

int32_t capi_packed_run(const char* format, float* out, int32_t room) {
  struct packed* m = malloc(sizeof *m);
  const char* broken = NULL;
  kvc_error error;
  int32_t step, s, layer, done = 0, sealed = 0;
  if (m == NULL) abort();
  packed_start(m, format);
  for (step = 0; step < PACKED_STEPS; ++step) {
    int32_t rows = 0;
    if (step == PACKED_DROP_AT) packed_drop(m);
    for (s = 0; s < 2; ++s) {
      m->new_tokens[s] = capi_packed_tokens(step, s);
      rows += m->new_tokens[s];
      OK(kvc_extend(m->cache, m->sequence[s], m->new_tokens[s], 0, NULL, &error));
    }
    OK(kvc_view_batch(m->cache, &m->view, &m->batch, &error));
    for (layer = 0; layer < PACKED_LAYERS; ++layer) {
      const int32_t each = rows * PACKED_Q_HEADS * PACKED_DIM;
      packed_append(m, layer, rows);
      packed_seal(m, layer);
      if (done + each > room) abort();
      packed_attend(m, layer, out + done);
      done += each;
    }
    OK(kvc_cache_end_step(m->cache, &error));
    for (s = 0; s < 2; ++s) m->position[s] += m->new_tokens[s];
    sealed = capi_lengths(m->cache, m->sequence[0]).sealed[0];
  }
  IS(sealed == 96); /* of 116 slots, residual 8 */
  OK(kvc_cache_check(m->cache, &broken, &error));
  IS(broken == NULL);
  OK(kvc_cache_destroy(m->cache, &error));
  free(m->workspace.ptr);
  free(m->memory);
  free(m);
  return done;
}
