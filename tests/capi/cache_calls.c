// SPDX-License-Identifier: Apache-2.0
// The cache as a whole: every field of the configuration, planner, step, counters, eviction, reset.
#include <string.h>

#include "check.h"

void capi_small(kvc_cache_config* config, kvc_group_config* group, int32_t blocks) {
  memset(config, 0, sizeof *config);
  memset(group, 0, sizeof *group);
  group->struct_size = (uint32_t)sizeof *group;
  group->block_size = 4;
  group->layers = 1;
  group->kv_heads = 2;
  group->head_dim_k = 8;
  group->type = KVC_F32;
  group->total = blocks;
  config->struct_size = (uint32_t)sizeof *config;
  config->n_groups = 1;
  config->groups = group;
  config->max_sequences = 4;
}

kvc_cache capi_small_cache(int32_t blocks) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_error error;
  capi_small(&config, &group, blocks);
  config.max_events = 64;
  OK(kvc_cache_create(&config, &cache, &error));
  return cache;
}

kvc_scope capi_shared(void) {
  kvc_scope scope;
  memset(&scope, 0, sizeof scope);
  scope.struct_size = (uint32_t)sizeof scope;
  scope.kind = KVC_SCOPE_SHARED;
  return scope;
}

kvc_scope capi_tenant(const char* salt) {
  kvc_scope scope = capi_shared();
  scope.kind = KVC_SCOPE_TENANT;
  scope.salt.data = salt;
  scope.salt.size = strlen(salt);
  return scope;
}

kvc_stats capi_count(kvc_cache cache) {
  kvc_stats stats;
  kvc_error error;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = (uint32_t)sizeof stats;
  OK(kvc_cache_count(cache, &stats, &error));
  IS(stats.blocks_used + stats.blocks_cached + stats.blocks_free + stats.blocks_moving == stats.blocks_total);
  return stats;
}

int capi_same(kvc_stats a, kvc_stats b) {
  return memcmp(&a, &b, sizeof a) == 0;
}

void capi_text(int32_t* tokens, int32_t n, int32_t first) {
  int32_t i;
  for (i = 0; i < n; ++i) tokens[i] = first + i;
}

kvc_sequence capi_begin(kvc_cache cache, const int32_t* tokens, int32_t n) {
  const kvc_scope scope = capi_shared();
  kvc_sequence sequence = {0};
  kvc_error error;
  int32_t reused = -1;
  OK(kvc_open(cache, &scope, tokens, n, NULL, &sequence, &reused, &error));
  OK(kvc_extend(cache, sequence, n - reused, 0, NULL, &error));
  return sequence;
}

// One edit of a good configuration: `at` bytes into the config or the group, 32 or 64 bits wide.
struct edit {
  int group, wide;
  size_t at;
  int64_t value;
  kvc_status status;
  int32_t field;
};
#define CONFIG(name, value, status, field) \
  { 0, sizeof(((kvc_cache_config*)0)->name) == 8, offsetof(kvc_cache_config, name), value, status, field }
#define GROUP(name, value, status, field) \
  { 1, sizeof(((kvc_group_config*)0)->name) == 8, offsetof(kvc_group_config, name), value, status, field }

void capi_test_config(void) {
  static const struct edit edits[] = {
      CONFIG(struct_size, 0, KVC_ABI, KVC_FIELD_CONFIG),
      CONFIG(struct_size, 4096, KVC_ABI, KVC_FIELD_CONFIG),
      CONFIG(n_groups, 0, KVC_BAD_ARGUMENT, KVC_FIELD_GROUPS),
      CONFIG(n_groups, -1, KVC_BAD_ARGUMENT, KVC_FIELD_GROUPS),
      CONFIG(n_groups, 9, KVC_BAD_ARGUMENT, KVC_FIELD_GROUPS),
      CONFIG(groups, 0, KVC_BAD_ARGUMENT, KVC_FIELD_GROUPS),
      CONFIG(n_accounts, 2, KVC_BAD_ARGUMENT, KVC_FIELD_ACCOUNT_LIMITS),
      CONFIG(max_sequences, -1, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_SEQUENCES),
      CONFIG(max_sequences, (1 << 20) + 1, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_SEQUENCES),
      CONFIG(max_sequence_tokens, -1, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_SEQUENCE_TOKENS),
      CONFIG(max_nodes, -2, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_NODES),
      CONFIG(max_scopes, -1, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_SCOPES),
      CONFIG(max_events, -1, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_EVENTS),
      CONFIG(max_commands, -1, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_COMMANDS),
      CONFIG(max_commands, 70000, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_COMMANDS),
      CONFIG(max_gathers, -2, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_GATHERS),
      CONFIG(max_gathers, 2147483647, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_GATHERS),
      GROUP(struct_size, 0, KVC_ABI, KVC_FIELD_GROUPS),
      GROUP(block_size, 3, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK_SIZE),
      GROUP(block_size, -4, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK_SIZE),
      GROUP(layers, 0, KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS),
      GROUP(kv_heads, 0, KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS),
      GROUP(head_dim_k, 0, KVC_BAD_ARGUMENT, KVC_FIELD_HEAD_DIM_K),
      GROUP(head_dim_v, -8, KVC_BAD_ARGUMENT, KVC_FIELD_HEAD_DIM_V),
      GROUP(type, -1, KVC_BAD_ARGUMENT, KVC_FIELD_TYPE),
      GROUP(type, KVC_U8, KVC_BAD_ARGUMENT, KVC_FIELD_TYPE),
      GROUP(type, 256, KVC_BAD_ARGUMENT, KVC_FIELD_TYPE),
      GROUP(window, 128, KVC_UNSUPPORTED, KVC_FIELD_WINDOW),
      GROUP(window, -1, KVC_BAD_ARGUMENT, KVC_FIELD_WINDOW),
      GROUP(total, -1, KVC_BAD_ARGUMENT, KVC_FIELD_TOTAL),
      GROUP(total, 0, KVC_BAD_ARGUMENT, KVC_FIELD_CAPACITY),
      GROUP(open, -1, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN),
      CONFIG(reserved, 7, KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED),
      CONFIG(max_step_tokens, -1, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_STEP_TOKENS),
      GROUP(first_only, 1, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK_SIZE),
      GROUP(format.deferred, 1, KVC_BAD_ARGUMENT, KVC_FIELD_FORMAT_DEFERRED),
      GROUP(format.exempt, -1, KVC_BAD_ARGUMENT, KVC_FIELD_FORMAT_EXEMPT),
      GROUP(format.block, -1, KVC_BAD_ARGUMENT, KVC_FIELD_FORMAT_BLOCK),
      GROUP(format.open_block, -1, KVC_BAD_ARGUMENT, KVC_FIELD_FORMAT_OPEN_BLOCK),
      GROUP(format.residual, -1, KVC_BAD_ARGUMENT, KVC_FIELD_FORMAT_RESIDUAL),
  };
  size_t i;
  for (i = 0; i < sizeof edits / sizeof edits[0]; ++i) {
    kvc_cache_config config;
    kvc_group_config group;
    kvc_geometry geometry;
    kvc_error error;
    kvc_cache cache = {77};
    char* base = edits[i].group ? (char*)&group : (char*)&config;
    const int32_t narrow = (int32_t)edits[i].value;
    capi_small(&config, &group, 8);
    if (edits[i].wide) {
      memcpy(base + edits[i].at, &edits[i].value, 8);
    } else {
      memcpy(base + edits[i].at, &narrow, 4);
    }
    REFUSED(kvc_cache_create(&config, &cache, &error), edits[i].status, edits[i].field);
    IS(cache.id == 77);
    if (edits[i].group && error.index >= 0) IS(error.index == 0);
    memset(&geometry, 0, sizeof geometry);
    geometry.struct_size = (uint32_t)sizeof geometry;
    REFUSED(kvc_plan_cache(&config, &geometry, &error), edits[i].status, edits[i].field);
    IS(geometry.groups == 0);
    IS(kvc_cache_create(&config, &cache, NULL) == edits[i].status);
  }
}

void capi_test_create(void) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_geometry geometry, built;
  kvc_error error;
  kvc_cache cache = {0};
  int32_t limits[2] = {4, -1}, blocks = -1, i;
  capi_small(&config, &group, 8);
  REFUSED(kvc_cache_create(NULL, &cache, &error), KVC_BAD_ARGUMENT, KVC_FIELD_CONFIG);
  REFUSED(kvc_cache_create(&config, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_CACHE);
  config.account_limits = limits;
  REFUSED(kvc_cache_create(&config, &cache, &error), KVC_BAD_ARGUMENT, KVC_FIELD_ACCOUNT_LIMITS);
  config.n_accounts = 2;
  REFUSED(kvc_cache_create(&config, &cache, &error), KVC_BAD_ARGUMENT, KVC_FIELD_ACCOUNT_LIMITS);
  IS(error.value == -1);
  limits[1] = 0;
  config.eviction = "LRU";
  REFUSED(kvc_cache_create(&config, &cache, &error), KVC_BAD_ARGUMENT, KVC_FIELD_EVICTION);
  group.v_aliases_k = 1;
  group.head_dim_v = 16;
  config.eviction = "lfu";
  REFUSED(kvc_cache_create(&config, &cache, &error), KVC_BAD_ARGUMENT, KVC_FIELD_HEAD_DIM_V);
  IS(error.value == 16);
  group.head_dim_v = 0;
  memset(&geometry, 0, sizeof geometry);
  memset(&built, 0, sizeof built);
  geometry.struct_size = built.struct_size = (uint32_t)sizeof geometry;
  OK(kvc_plan_cache(&config, &geometry, &error));
  OK(kvc_cache_create(&config, &cache, &error));
  OK(kvc_cache_geometry(cache, &built, &error));
  IS(memcmp(&geometry, &built, sizeof built) == 0);
  IS(built.group[0].block_bytes == 4 * 2 * 8 * 4 && built.memory == 8 * built.group[0].block_bytes);
  OK(kvc_cache_charged(cache, 1, &blocks, &error));
  IS(blocks == 0);
  REFUSED(kvc_cache_charged(cache, 2, &blocks, &error), KVC_BAD_ARGUMENT, KVC_FIELD_ACCOUNT);
  REFUSED(kvc_cache_charged(cache, -1, &blocks, &error), KVC_BAD_ARGUMENT, KVC_FIELD_ACCOUNT);
  REFUSED(kvc_cache_charged(cache, 0, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_BLOCKS);
  built.struct_size = 1;
  REFUSED(kvc_cache_geometry(cache, &built, &error), KVC_ABI, KVC_FIELD_GEOMETRY);
  REFUSED(kvc_cache_geometry(cache, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_GEOMETRY);
  OK(kvc_cache_destroy(cache, &error));
  // Every policy that is listed can be named, and the list ends.
  for (i = 0; kvc_eviction_name(i) != NULL; ++i) {
    config.eviction = kvc_eviction_name(i);
    OK(kvc_cache_create(&config, &cache, &error));
    OK(kvc_cache_destroy(cache, &error));
  }
  IS(i >= 2 && strcmp(kvc_eviction_name(0), "lru") == 0 && strcmp(kvc_eviction_name(1), "lfu") == 0);
  IS(kvc_eviction_name(-1) == NULL && kvc_eviction_name(1000) == NULL);
}

void capi_test_planner(void) {
  kvc_cache_config config;
  kvc_group_config group;
  kvc_geometry geometry;
  kvc_error error;
  int64_t bytes = -1;
  int32_t most = -1;
  capi_small(&config, &group, 0);
  config.capacity = 10 * 512 + 511;  // a block is 4 tokens x 2 heads x (8 + 8) floats = 512 bytes
  memset(&geometry, 0, sizeof geometry);
  geometry.struct_size = (uint32_t)sizeof geometry;
  OK(kvc_plan_cache(&config, &geometry, &error));
  IS(geometry.groups == 1 && geometry.unit == 4 && geometry.group[0].total == 10 && geometry.memory == 5120);
  IS(geometry.bytes_per_token == 128 && geometry.max_sequence_tokens == 40 && geometry.nodes == 10);
  IS(geometry.max_sequences == 4 && geometry.max_scopes == 1024 && geometry.group[0].columns == 10);
  OK(kvc_plan_sequences(&config, 9, &bytes, &most, &error));
  IS(bytes == 3 * 512 && most == 3);
  OK(kvc_plan_sequences(&config, 41, &bytes, &most, &error));
  IS(bytes == 11 * 512 && most == 0);
  OK(kvc_plan_sequences(&config, 0, NULL, &most, &error));
  IS(most == 4);
  OK(kvc_plan_sequences(&config, 9, NULL, NULL, &error));
  REFUSED(kvc_plan_sequences(&config, -1, &bytes, &most, &error), KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS);
  OK(kvc_plan_context(&config, 3, &most, &error));
  IS(most == 12);
  OK(kvc_plan_context(&config, 5, &most, &error));
  IS(most == 0);  // more than max_sequences
  REFUSED(kvc_plan_context(&config, 0, &most, &error), KVC_BAD_ARGUMENT, KVC_FIELD_SEQUENCES);
  REFUSED(kvc_plan_context(&config, 1, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  group.format.block = (int64_t)1 << 53;
  config.capacity = (int64_t)1 << 60;
  REFUSED(kvc_plan_sequences(&config, 2147483647, &bytes, &most, &error), KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS);
  REFUSED(kvc_plan_cache(&config, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_GEOMETRY);
  geometry.struct_size = 12;
  REFUSED(kvc_plan_cache(&config, &geometry, &error), KVC_ABI, KVC_FIELD_GEOMETRY);
  REFUSED(kvc_plan_sequences(NULL, 1, &bytes, &most, &error), KVC_BAD_ARGUMENT, KVC_FIELD_CONFIG);
  REFUSED(kvc_plan_context(NULL, 1, &most, &error), KVC_BAD_ARGUMENT, KVC_FIELD_CONFIG);
}

void capi_test_step(void) {
  const kvc_cache cache = capi_small_cache(8);
  kvc_sequence a, b = {0};
  kvc_stats now, board;
  kvc_error error;
  const kvc_command* commands = NULL;
  const kvc_event* events = NULL;
  const int32_t* tokens = NULL;
  int32_t text[10], n = -1, indexed = -1;
  capi_text(text, 10, 100);
  a = capi_begin(cache, text, 10);
  OK(kvc_cache_commands(cache, &commands, &n, &error));
  IS(n == 0);
  OK(kvc_commit(cache, a, text, 10, &indexed, &error));
  IS(indexed == 8);
  OK(kvc_cache_events(cache, &events, &n, &error));
  IS(n == 2 && events[0].kind == KVC_EVENT_STORED && events[0].parent == -1 && events[0].depth == 0);
  IS(n == 2 && events[1].parent == events[0].node && events[1].depth == 1);
  OK(kvc_cache_tokens(cache, events[1].node, &tokens, &n, &error));
  IS(n == 4 && memcmp(tokens, text + 4, 4 * sizeof text[0]) == 0);
  REFUSED(kvc_cache_tokens(cache, -1, &tokens, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_NODE);
  REFUSED(kvc_cache_tokens(cache, 8, &tokens, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_NODE);
  // A branch writes into the shared third block: one copy of its two tokens is queued.
  OK(kvc_fork(cache, a, &b, &error));
  OK(kvc_extend(cache, b, 1, 0, NULL, &error));
  OK(kvc_cache_commands(cache, &commands, &n, &error));
  IS(n == 1 && commands[0].op == KVC_OP_COPY && commands[0].tokens == 2 && commands[0].src == 2);
  memset(&board, 0, sizeof board);
  board.struct_size = (uint32_t)sizeof board;
  OK(kvc_cache_board(cache, &board, &error));
  IS(board.sequences_live == 0 && board.blocks_total == 8);  // as published by create
  OK(kvc_cache_end_step(cache, &error));
  OK(kvc_cache_commands(cache, &commands, &n, &error));
  IS(n == 0);
  OK(kvc_cache_events(cache, &events, &n, &error));
  IS(n == 0);
  OK(kvc_cache_board(cache, &board, &error));
  now = capi_count(cache);
  IS(memcmp(&now, &board, sizeof now) == 0);
  IS(now.steps == 1 && now.sequences_live == 2 && now.sequences_opened == 2 && now.tokens_asked == 10);
  IS(now.tokens_extended == 11 && now.nodes == 2 && now.nodes_stored == 2 && now.blocks_copied == 1);
  IS(now.blocks_used == 4 && now.blocks_free == 4 && now.tokens_reused == 0 && now.events_lost == 0);
  board.struct_size = 0;
  REFUSED(kvc_cache_board(cache, &board, &error), KVC_ABI, KVC_FIELD_STATS);
  REFUSED(kvc_cache_count(cache, &board, &error), KVC_ABI, KVC_FIELD_STATS);
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_evict(void) {
  const kvc_cache cache = capi_small_cache(8);
  const kvc_event* events = NULL;
  kvc_sequence a, b;
  kvc_stats now;
  kvc_error error;
  int32_t text[16], other[4], n = -1;
  capi_text(text, 16, 0);
  capi_text(other, 4, 500);
  a = capi_begin(cache, text, 16);
  OK(kvc_commit(cache, a, text, 16, NULL, &error));
  b = capi_begin(cache, other, 4);
  OK(kvc_commit(cache, b, other, 4, NULL, &error));
  OK(kvc_cache_evict(cache, 5, &n, &error));
  IS(n == 0);  // all held
  OK(kvc_close(cache, a, &error));
  OK(kvc_cache_end_step(cache, &error));
  OK(kvc_cache_evict(cache, 0, &n, &error));
  IS(n == 0);
  OK(kvc_cache_evict(cache, 1, &n, &error));
  IS(n == 1);
  OK(kvc_cache_events(cache, &events, &n, &error));
  IS(n == 1 && events[0].kind == KVC_EVENT_REMOVED &&
     events[0].depth == 3);  // the end of the text goes first
  OK(kvc_cache_evict(cache, 2147483647, &n, &error));
  IS(n == 3);
  OK(kvc_cache_evict(cache, 1, NULL, &error));
  REFUSED(kvc_cache_evict(cache, -1, &n, &error), KVC_BAD_ARGUMENT, KVC_FIELD_N);
  now = capi_count(cache);
  IS(now.nodes == 1 && now.nodes_evicted == 4 && now.blocks_free == 7 && now.blocks_used == 1);
  OK(kvc_cache_destroy(cache, &error));
}

// A reset keeps the policy that was named: the text that was used least goes, though it was used last.
static void reset_policy(void) {
  const kvc_scope scope = capi_shared();
  const int32_t often[5] = {1, 2, 3, 4, 5}, once[5] = {6, 7, 8, 9, 10};
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_error error;
  int32_t i, n = -1;
  capi_small(&config, &group, 8);
  config.eviction = "lfu";
  OK(kvc_cache_create(&config, &cache, &error));
  OK(kvc_cache_reset(cache, &error));
  for (i = 0; i < 4; ++i) {
    const kvc_sequence a = capi_begin(cache, i < 3 ? often : once, 5);
    OK(kvc_commit(cache, a, i < 3 ? often : once, 5, NULL, &error));
    OK(kvc_close(cache, a, &error));
  }
  OK(kvc_cache_evict(cache, 1, &n, &error));
  IS(n == 1);
  OK(kvc_peek(cache, &scope, often, 5, 1, &n, &error));
  IS(n == 4);
  OK(kvc_peek(cache, &scope, once, 5, 1, &n, &error));
  IS(n == 0);
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_eviction_text(void) {
  char text[96], again[96], small[4];
  kvc_cache_config config;
  kvc_group_config group;
  kvc_cache cache = {0};
  kvc_error error;
  OK(kvc_eviction_text("ttl:60", text, sizeof text, &error));
  IS(strcmp(text, "ttl:seconds=60") == 0);
  OK(kvc_eviction_text("s3_fifo:uses=1", text, sizeof text, &error));
  OK(kvc_eviction_text(text, again, sizeof again, &error));
  IS(strcmp(text, "s3_fifo:small=10,uses=1") == 0 && strcmp(text, again) == 0);
  OK(kvc_eviction_text("two_q", small, sizeof small, &error));
  IS(strcmp(small, "two") == 0);
  OK(kvc_eviction_text("two_q", NULL, 0, &error));
  REFUSED(kvc_eviction_text("ttl:5m", text, sizeof text, &error), KVC_BAD_ARGUMENT, KVC_FIELD_EVICTION);
  IS(strcmp(text, "seconds: '5m'; allowed: a whole number from 0 to 2147483647") == 0);
  REFUSED(kvc_eviction_text(NULL, text, sizeof text, &error), KVC_BAD_ARGUMENT, KVC_FIELD_EVICTION);
  REFUSED(kvc_eviction_text("lru", NULL, 4, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  capi_small(&config, &group, 8);
  config.eviction = "ttl:5m";
  REFUSED(kvc_cache_create(&config, &cache, &error), KVC_BAD_ARGUMENT, KVC_FIELD_EVICTION);
}

static void store_text(kvc_cache cache, const int32_t* text, int32_t priority, uint32_t ms) {
  const kvc_scope scope = capi_shared();
  kvc_open_options options;
  kvc_sequence sequence = {0};
  kvc_error error;
  memset(&options, 0, sizeof options);
  options.struct_size = (uint32_t)sizeof options;
  options.priority = priority;
  options.priority_ms = ms;
  OK(kvc_open(cache, &scope, text, 5, &options, &sequence, NULL, &error));
  OK(kvc_extend(cache, sequence, 5, 0, NULL, &error));
  OK(kvc_commit(cache, sequence, text, 5, NULL, &error));
  OK(kvc_close(cache, sequence, &error));
}
static int32_t found(kvc_cache cache, const int32_t* text) {
  const kvc_scope scope = capi_shared();
  kvc_error error;
  int32_t n = -1;
  OK(kvc_peek(cache, &scope, text, 5, 1, &n, &error));
  return n;
}

// What a request says of its importance, and for how long; what expires although nothing is short.
void capi_test_time(void) {
  const int32_t a[5] = {1, 2, 3, 4, 5}, b[5] = {6, 7, 8, 9, 10}, c[5] = {11, 12, 13, 14, 15};
  const uint64_t second = 1000000000u;
  const kvc_scope scope = capi_shared();
  kvc_open_options options;
  kvc_cache_config config;
  kvc_group_config group;
  kvc_sequence sequence = {0};
  kvc_cache cache = {0};
  kvc_error error;
  int32_t n = -1;
  capi_small(&config, &group, 8);
  config.eviction = "priority";
  OK(kvc_cache_create(&config, &cache, &error));
  OK(kvc_cache_set_time(cache, second, &n, &error));
  store_text(cache, a, 2, 5000);
  store_text(cache, b, 0, 0);
  store_text(cache, c, -1, 0);
  OK(kvc_cache_evict(cache, 1, NULL, &error));
  IS(found(cache, a) == 4 && found(cache, b) == 4 && found(cache, c) == 0);
  OK(kvc_cache_set_time(cache, 6 * second, NULL, &error));  // the last moment of the level of a
  store_text(cache, c, 0, 0);
  OK(kvc_cache_evict(cache, 1, NULL, &error));
  IS(found(cache, a) == 4 && found(cache, b) == 0 && found(cache, c) == 4);
  OK(kvc_cache_set_time(cache, 6 * second + 1, &n, &error));
  IS(n == 0);  // a level ends, nothing goes
  OK(kvc_cache_evict(cache, 1, NULL, &error));
  IS(found(cache, a) == 0 && found(cache, c) == 4);
  memset(&options, 0, sizeof options);
  options.struct_size = (uint32_t)sizeof options;
  options.priority = 32768;
  REFUSED(kvc_open(cache, &scope, a, 5, &options, &sequence, NULL, &error), KVC_BAD_ARGUMENT,
          KVC_FIELD_PRIORITY);
  IS(error.value == 32768);
  OK(kvc_cache_destroy(cache, &error));

  config.eviction = "ttl:10";
  OK(kvc_cache_create(&config, &cache, &error));
  OK(kvc_cache_set_time(cache, second, NULL, &error));
  store_text(cache, a, 0, 0);
  OK(kvc_cache_set_time(cache, 2 * second, NULL, &error));
  store_text(cache, b, 0, 0);
  OK(kvc_cache_set_time(cache, 11 * second, &n, &error));
  IS(n == 0 && found(cache, a) == 4);
  OK(kvc_cache_set_time(cache, 11 * second + 1, &n, &error));
  IS(n == 1 && found(cache, a) == 0 && found(cache, b) == 4);
  OK(kvc_cache_set_time(cache, second, &n, &error));  // does not run backwards
  store_text(cache, b, 0, 0);                         // used again, ten more seconds
  OK(kvc_cache_set_time(cache, 21 * second, &n, &error));
  IS(n == 0 && found(cache, b) == 4);
  OK(kvc_cache_reset(cache, &error));
  OK(kvc_cache_set_time(cache, second, NULL, &error));  // of a new cache
  store_text(cache, a, 0, 0);
  OK(kvc_cache_set_time(cache, 12 * second, &n, &error));
  IS(n == 1 && capi_count(cache).nodes_evicted == 1);
  OK(kvc_cache_destroy(cache, &error));
}

void capi_test_reset(void) {
  const kvc_cache cache = capi_small_cache(8);
  const char* broken = "not asked";
  const kvc_stats fresh = capi_count(cache);
  kvc_sequence a;
  kvc_stats now;
  kvc_error error;
  int32_t text[12], reused = -1;
  const kvc_scope scope = capi_shared();
  capi_text(text, 12, 3);
  a = capi_begin(cache, text, 12);
  OK(kvc_commit(cache, a, text, 12, NULL, &error));
  now = capi_count(cache);
  REFUSED(kvc_cache_reset(cache, &error), KVC_BUSY, KVC_FIELD_SEQUENCES);
  IS(error.value == 1);
  IS(capi_same(now, capi_count(cache)));
  OK(kvc_close(cache, a, &error));
  OK(kvc_peek(cache, &scope, text, 12, 0, &reused, &error));
  IS(reused == 8);
  OK(kvc_cache_check(cache, &broken, &error));
  IS(broken == NULL);
  OK(kvc_cache_reset(cache, &error));
  IS(capi_same(fresh, capi_count(cache)));
  OK(kvc_peek(cache, &scope, text, 12, 0, &reused, &error));
  IS(reused == 0);
  REFUSED(kvc_close(cache, a, &error), KVC_STALE_HANDLE, KVC_FIELD_SEQUENCE);
  a = capi_begin(cache, text, 12);
  OK(kvc_close(cache, a, &error));
  REFUSED(kvc_cache_check(cache, NULL, &error), KVC_BAD_ARGUMENT, KVC_FIELD_OUT);
  OK(kvc_cache_destroy(cache, &error));
  reset_policy();
}
