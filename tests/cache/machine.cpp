// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include "traits.hpp"

namespace kvcache::test {

namespace {

scope one(int64_t label) {
  switch (label) {
    case 0:
      return scope::shared();
    case 1:
      return scope::tenant("a");
    case 2:
      return scope::tenant("");
    case 3:
      return scope::shared().adapter("a", 1);
    case 4:
      return scope::shared().adapter("a", 2);
    default:
      return scope::tenant("b");
  }
}

}  // namespace

scope scope_of(const sharing& who) {
  scope s = one(who.front().label);
  for (size_t i = 1; i < who.size(); ++i) s.from(who[i].first, one(who[i].label));
  return s;
}

sharing sharing_of(uint32_t pick, int32_t unit) {
  switch (pick % 16) {
    case 0:
      return {{1, 0}};
    case 1:
      return {{2, 0}};
    case 2:
      return {{3, 0}};
    case 3:
      return {{4, 0}};
    case 4:
      return {{0, 0}, {1, unit}};
    case 5:
      return {{0, 0}, {5, unit + 1}};
    case 6:
      return {{0, 0}, {1, 1}, {3, 2}};  // several in one unit, unless it is one token
    case 7:
      return {{0, 0}, {1, unit}, {2, 2 * unit}};
    default:
      return {{0, 0}};
  }
}

cache_config config_of(const rules& r, std::vector<group_config>& groups) {
  groups.clear();
  for (const group_rule& g : r.groups) {
    group_config c;
    c.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 1, .head_dim_v = 1};
    c.block_size = g.block_size;
    c.total = {g.total};
    c.open = {g.open};
    if (g.lossy) {
      c.format = {.residual = g.residual, .lossy = true, .fingerprint = 7, .deferred = g.deferred};
    }
    c.first_only = g.first_only;
    groups.push_back(c);
  }
  cache_config c;
  c.groups = groups;
  c.max_sequences = r.sequences;
  c.max_sequence_tokens = r.max_tokens;
  c.max_nodes = r.nodes == 0 ? -1 : r.nodes;
  c.max_scopes = r.scopes;
  c.max_events = r.events;
  c.max_commands = r.commands;
  c.account_limits = r.limits;
  return c;
}

template class machine<lru_cache>;
template class machine<lfu_cache>;
template class machine<dynamic>;
template class machine<failing_lru>;
template class machine<failing_lfu>;

template struct expose_core<lru_cache, &basic_cache<lru_cache>::core_>;
template struct expose_core<lfu_cache, &basic_cache<lfu_cache>::core_>;
template struct expose_core<dynamic, &basic_cache<dynamic>::core_>;
template struct expose_core<failing_lru, &basic_cache<failing_lru>::core_>;
template struct expose_core<failing_lfu, &basic_cache<failing_lfu>::core_>;
template struct expose_scopes<&scope_table::entry_, &scope_table::hash_>;

}  // namespace kvcache::test
