// SPDX-License-Identifier: Apache-2.0
// The C API of a cache as a whole: creation, step, counters, planner.
#include <algorithm>
#include <new>

#include "capi.hpp"
#include "kvcache/core/text.hpp"
#include "kvcache/plan.hpp"

namespace kvcache::detail {
namespace {

kvc_status convert_policy(const char* text, eviction_choice& policy, kvc_error* error) noexcept {
  if (text == nullptr) return KVC_OK;
  const parsed_eviction read = parse_eviction(text);
  policy = read.value;
  return need(read.ok(), KVC_FIELD_EVICTION, error);
}

kvc_status build(const host_config& c, std::unique_ptr<host_cache>& out, kvc_error* error) noexcept {
  std::unique_ptr<host_cache> h(new (std::nothrow) host_cache);
  any_eviction policy = make_eviction(c.policy);
  if (h == nullptr || !policy.holds()) return fail(error, KVC_OUT_OF_MEMORY, KVC_FIELD_NONE);
  auto made = basic_cache<dynamic>::create(c.config, std::move(policy));
  if (!made) return fail(error, made.error());
  h->cache = std::move(*made);
  h->policy = c.policy;
  h->accounts = std::max(1, static_cast<int32_t>(c.config.account_limits.size()));
  const geometry& geo = h->cache.shape();
  const auto places = static_cast<size_t>(geo.max_sequences);
  h->sequence.reset(new (std::nothrow) host_sequence[places]);
  if (h->sequence == nullptr || !h->id.create(places) ||
      !h->scratch.create(static_cast<size_t>(geo.max_sequence_tokens / geo.unit))) {
    return fail(error, KVC_OUT_OF_MEMORY, KVC_FIELD_MAX_SEQUENCES, geo.max_sequences);
  }
  out = std::move(h);
  return KVC_OK;
}

kvc_status resolve_c(const kvc_cache_config* config, geometry& geo, kvc_error* error) noexcept {
  host_config c;
  KVC_TRY(convert(config, c, error));
  const result<geometry> r = resolve(c.config);
  if (!r) return fail(error, r.error());
  geo = *r;
  return KVC_OK;
}

static_assert(sizeof(kvc_stats) == 8 + sizeof(stats), "a counter was added: kvc_stats lacks it");

void copy(const stats& s, kvc_stats& out) noexcept {
  out.reserved = 0;
  out.steps = s.steps;
  out.sequences_live = s.sequences_live;
  out.sequences_opened = s.sequences_opened;
  out.tokens_asked = s.tokens_asked;
  out.tokens_reused = s.tokens_reused;
  out.tokens_extended = s.tokens_extended;
  out.nodes = s.nodes;
  out.nodes_stored = s.nodes_stored;
  out.nodes_evicted = s.nodes_evicted;
  out.events_lost = s.events_lost;
  out.blocks_copied = s.blocks_copied;
  out.refusals = s.refusals;
  out.blocks_used = s.blocks_used;
  out.blocks_cached = s.blocks_cached;
  out.blocks_free = s.blocks_free;
  out.blocks_moving = s.blocks_moving;
  out.blocks_total = s.blocks_total;
}

}  // namespace

static_assert(max_groups == KVC_MAX_GROUPS);

kvc_status convert(const kvc_cache_config* in, host_config& out, kvc_error* error) noexcept {
  KVC_TRY(check_struct(in, KVC_FIELD_CONFIG, error));
  KVC_TRY(need(in->n_groups >= 1 && in->n_groups <= max_groups, KVC_FIELD_GROUPS, error, in->n_groups));
  KVC_TRY(need(in->groups != nullptr, KVC_FIELD_GROUPS, error));
  KVC_TRY(need(in->reserved == 0, KVC_FIELD_RESERVED, error, in->reserved));
  KVC_TRY(need(in->max_gathers >= -1, KVC_FIELD_MAX_GATHERS, error, in->max_gathers));
  for (int32_t g = 0; g < in->n_groups; ++g) KVC_TRY(convert_group(in->groups[g], g, out.group[g], error));
  KVC_TRY(convert_policy(in->eviction, out.policy, error));
  const bool accounts = in->account_limits != nullptr;
  KVC_TRY(need(accounts ? in->n_accounts > 0 : in->n_accounts == 0, KVC_FIELD_ACCOUNT_LIMITS, error,
               in->n_accounts));
  cache_config& c = out.config;
  c.groups = {out.group, static_cast<size_t>(in->n_groups)};
  c.capacity = {in->capacity};
  if (in->max_sequences != 0) c.max_sequences = in->max_sequences;
  c.max_sequence_tokens = in->max_sequence_tokens;
  c.max_nodes = in->max_nodes;
  if (in->max_scopes != 0) c.max_scopes = in->max_scopes;
  c.max_events = in->max_events;
  c.max_commands = in->max_commands;
  if (in->max_step_tokens != 0) c.max_step_tokens = in->max_step_tokens;
  if (in->max_gathers != 0) c.max_gathers = std::max(in->max_gathers, 0);
  if (accounts) c.account_limits = {in->account_limits, static_cast<size_t>(in->n_accounts)};
  return KVC_OK;
}

void describe(const geometry& geo, kvc_geometry& out) noexcept {
  out = {};
  out.struct_size = sizeof out;
  out.groups = geo.groups;
  out.unit = geo.unit;
  out.nodes = geo.nodes;
  out.max_sequences = geo.max_sequences;
  out.max_sequence_tokens = geo.max_sequence_tokens;
  out.max_scopes = geo.max_scopes;
  out.max_events = geo.max_events;
  out.max_commands = geo.max_commands;
  out.max_gather_ids = geo.max_gather_ids;
  out.memory = geo.memory().count;
  out.bytes_per_token = bytes_per_token(geo).count;
  out.fingerprint = geo.format_fingerprint;
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    out.group[g] = {x.block_size,
                    x.total,
                    x.open,
                    x.per_unit,
                    x.columns,
                    x.format.lossy ? 1 : 0,
                    x.format.deferred ? 1 : 0,
                    x.first_only ? 1 : 0,
                    block_bytes(x.shape, x.block_size, x.format).count,
                    open_block_bytes(x.shape, x.block_size, x.format).count,
                    x.memory().count};
  }
}

}  // namespace kvcache::detail

using namespace kvcache;
using namespace kvcache::detail;

kvc_status kvc_cache_create(const kvc_cache_config* config, kvc_cache* cache, kvc_error* error) {
  KVC_TRY(need(cache != nullptr, KVC_FIELD_CACHE, error));
  host_config c;
  KVC_TRY(convert(config, c, error));
  std::unique_ptr<host_cache> h;
  KVC_TRY(build(c, h, error));
  const uint64_t id = enrol(h);
  if (id == 0) return fail(error, KVC_OUT_OF_MEMORY, KVC_FIELD_CACHE, KVC_MAX_CACHES);
  cache->id = id;
  return KVC_OK;
}

kvc_status kvc_cache_reset(kvc_cache cache, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  any_eviction policy = make_eviction(h->policy);
  if (!policy.holds()) return fail(error, KVC_OUT_OF_MEMORY, KVC_FIELD_NONE);
  return fail(error, h->cache.reset(std::move(policy)));
}

kvc_status kvc_cache_evict(kvc_cache cache, int32_t n, int32_t* evicted, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(n >= 0, KVC_FIELD_N, error, n));
  const int32_t gone = h->cache.evict(n);
  if (evicted != nullptr) *evicted = gone;
  return KVC_OK;
}

kvc_status kvc_cache_set_time(kvc_cache cache, uint64_t ns, int32_t* expired, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  const int32_t gone = h->cache.set_time(ns);
  if (expired != nullptr) *expired = gone;
  return KVC_OK;
}

kvc_status kvc_cache_commands(kvc_cache cache, const kvc_command** commands, int32_t* n, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(commands != nullptr, KVC_FIELD_COMMANDS, error));
  KVC_TRY(need(n != nullptr, KVC_FIELD_N, error));
  const auto list = h->cache.commands().view();
  *commands = list.data();
  *n = static_cast<int32_t>(list.size());
  return KVC_OK;
}

kvc_status kvc_cache_seals(kvc_cache cache, const kvc_command** seals, int32_t* n, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(seals != nullptr, KVC_FIELD_SEALS, error));
  KVC_TRY(need(n != nullptr, KVC_FIELD_N, error));
  const auto list = h->cache.seals();
  *seals = list.data();
  *n = static_cast<int32_t>(list.size());
  return KVC_OK;
}

kvc_status kvc_cache_gather_ids(kvc_cache cache, const int32_t** ids, int32_t* n, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(ids != nullptr, KVC_FIELD_IDS, error));
  KVC_TRY(need(n != nullptr, KVC_FIELD_N, error));
  const auto list = h->cache.commands().ids();
  *ids = list.data();
  *n = static_cast<int32_t>(list.size());
  return KVC_OK;
}

kvc_status kvc_cache_events(kvc_cache cache, const kvc_event** events, int32_t* n, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(events != nullptr, KVC_FIELD_OUT, error));
  KVC_TRY(need(n != nullptr, KVC_FIELD_N, error));
  const auto list = h->cache.events();
  *events = list.data();
  *n = static_cast<int32_t>(list.size());
  return KVC_OK;
}

kvc_status kvc_cache_tokens(kvc_cache cache, int32_t node, const int32_t** tokens, int32_t* n,
                            kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(tokens != nullptr, KVC_FIELD_TOKENS, error));
  KVC_TRY(need(n != nullptr, KVC_FIELD_N, error));
  KVC_TRY(need(node >= 0 && node < h->cache.shape().nodes, KVC_FIELD_NODE, error, node));
  const auto list = h->cache.tokens(node_id{node});
  *tokens = list.data();
  *n = static_cast<int32_t>(list.size());
  return KVC_OK;
}

kvc_status kvc_cache_end_step(kvc_cache cache, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  h->cache.end_step();
  return KVC_OK;
}

kvc_status kvc_cache_count(kvc_cache cache, kvc_stats* stats, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(check_struct(stats, KVC_FIELD_STATS, error));
  copy(h->cache.count(), *stats);
  return KVC_OK;
}

kvc_status kvc_cache_board(kvc_cache cache, kvc_stats* stats, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(check_struct(stats, KVC_FIELD_STATS, error));
  copy(h->cache.board().read(), *stats);
  return KVC_OK;
}

kvc_status kvc_cache_charged(kvc_cache cache, int32_t account, int32_t* blocks, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(blocks != nullptr, KVC_FIELD_BLOCKS, error));
  KVC_TRY(need(account >= 0 && account < h->accounts, KVC_FIELD_ACCOUNT, error, account));
  *blocks = h->cache.charged(account);
  return KVC_OK;
}

kvc_status kvc_cache_geometry(kvc_cache cache, kvc_geometry* geometry, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(check_struct(geometry, KVC_FIELD_GEOMETRY, error));
  describe(h->cache.shape(), *geometry);
  return KVC_OK;
}

kvc_status kvc_cache_check(kvc_cache cache, const char** broken, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(need(broken != nullptr, KVC_FIELD_OUT, error));
  *broken = h->cache.check_invariants();
  return KVC_OK;
}

const char* kvc_eviction_name(int32_t i) {
  return eviction_name(i);
}

kvc_status kvc_eviction_text(const char* text, char* out, size_t size, kvc_error* error) {
  KVC_TRY(need(text != nullptr, KVC_FIELD_EVICTION, error));
  KVC_TRY(need(out != nullptr || size == 0, KVC_FIELD_OUT, error));
  const parsed_eviction read = parse_eviction(text);
  if (read.ok()) {
    (void)to_text(read.value, {out, size});
    return KVC_OK;
  }
  text_out why(std::span<char>(out, size));
  why.add(read.key).add(": '").add(read.text).add("'; allowed: ").add(read.allowed);
  return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_EVICTION);
}

kvc_status kvc_plan_cache(const kvc_cache_config* config, kvc_geometry* geometry, kvc_error* error) {
  KVC_TRY(check_struct(geometry, KVC_FIELD_GEOMETRY, error));
  kvcache::geometry geo;
  KVC_TRY(resolve_c(config, geo, error));
  describe(geo, *geometry);
  return KVC_OK;
}

kvc_status kvc_plan_sequences(const kvc_cache_config* config, int32_t tokens, int64_t* bytes_each,
                              int32_t* most_sequences, kvc_error* error) {
  geometry geo;
  KVC_TRY(resolve_c(config, geo, error));
  KVC_TRY(need(tokens >= 0, KVC_FIELD_TOKENS, error, tokens));
  int64_t sum = 0;  // sequence_bytes, for any length
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    const int64_t block = block_bytes(x.shape, x.block_size, x.format).count;
    KVC_TRY(need(add_product(sum, block, blocks_for(geo, g, tokens)), KVC_FIELD_TOKENS, error, tokens));
  }
  if (bytes_each != nullptr) *bytes_each = sum;
  if (most_sequences != nullptr) *most_sequences = max_batch(geo, tokens);
  return KVC_OK;
}

kvc_status kvc_plan_context(const kvc_cache_config* config, int32_t sequences, int32_t* most_tokens,
                            kvc_error* error) {
  geometry geo;
  KVC_TRY(resolve_c(config, geo, error));
  KVC_TRY(need(sequences >= 1, KVC_FIELD_SEQUENCES, error, sequences));
  KVC_TRY(need(most_tokens != nullptr, KVC_FIELD_OUT, error));
  *most_tokens = max_context(geo, sequences);
  return KVC_OK;
}
