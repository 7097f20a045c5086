// SPDX-License-Identifier: Apache-2.0
#pragma once
// The deep walk: counts everything again from the tables and the tree and compares. For tests and debugging.
#include <cstdint>

#include "kvcache/cache/core.hpp"

namespace kvcache::detail {

// Slots that may be handed out without asking.
template <class Traits>
const char* check_exclusive(const core<Traits>& c, int32_t i, int32_t g) noexcept {
  constexpr const char* broken = "exclusive slots";
  const sequence_state& q = c.seqs.state(i);
  const group_geometry& x = c.geo.group[g];
  if (q.held >= q.exclusive) return nullptr;
  if (q.exclusive > c.geo.max_sequence_tokens) return broken;
  if (x.seals_in_step() && q.exclusive >= int64_t{q.sealed[g]} + x.block_size + x.format.residual)
    return broken;
  for (int32_t k = x.stored(q.held) / x.block_size; int64_t{k} * x.block_size < x.stored(q.exclusive); ++k) {
    const auto column = static_cast<size_t>(k);
    if (k >= q.columns[g] || c.pool.pool(g).immutable(c.seqs.table(i, g)[column])) return broken;
    if (x.format.lossy && c.pool.open(g).immutable(c.seqs.open_table(i, g)[column])) return broken;
  }
  return nullptr;
}

// Which blocks have a packed form, and which an open one.
template <class Traits>
const char* check_forms(const core<Traits>& c, int32_t i, int32_t g) noexcept {
  const sequence_state& q = c.seqs.state(i);
  const group_geometry& x = c.geo.group[g];
  if (!x.format.lossy) return q.sealed[g] == 0 && q.packed[g] == 0 ? nullptr : "sealed";
  const auto open = c.seqs.open_table(i, g);
  if (q.sealed[g] % x.block_size != 0 || q.sealed[g] > q.accepted) return "sealed";
  if (q.packed[g] % x.block_size != 0 || q.packed[g] > q.sealed[g]) return "packed";
  if (q.packed[g] != q.sealed[g] && !c.seqs.noted(i)) return "open forms that never go";
  if (x.seals_in_step() && q.sealed[g] < x.sealed_at(q.accepted)) return "a seal is late";
  for (size_t k = 0; k < open.size(); ++k) {
    const bool packed = static_cast<int32_t>(k) < q.packed[g] / x.block_size;
    const bool sealed = static_cast<int32_t>(k) < q.sealed[g] / x.block_size;
    if (packed != (open[k] == no_block)) return "open table";
    if (sealed && !c.pool.sealed(g, c.seqs.table(i, g)[k])) return "sealed block";
  }
  return nullptr;
}

template <class Traits>
const char* check_tables(const core<Traits>& c) noexcept {
  for (int32_t i = 0; i < c.seqs.capacity(); ++i) {
    const sequence_state& q = c.seqs.state(i);
    if (!q.live) continue;
    if (q.committed != q.path * c.geo.unit || q.committed > q.accepted || q.accepted > q.held)
      return "lengths";
    if (q.floor < 0 || q.floor > q.held || q.dropped < 0 || (q.floor > 0 && q.path != 0)) return "dropped";
    for (int32_t g = 0; g < c.geo.groups; ++g) {
      const group_geometry& x = c.geo.group[g];
      const auto table = c.seqs.table(i, g);
      // A reservation is taken by the first extend.
      const bool untouched = q.held == 0 && q.columns[g] == 0;
      const int32_t columns = std::max(ceil_div(x.stored(q.held), x.block_size), x.reserve_blocks);
      if (!untouched && q.columns[g] != columns) return "columns";
      for (int32_t n = 0; n < (x.first_only ? std::min(q.path, 1) : q.path); ++n) {
        const auto b = c.tree.blocks_of(c.seqs.path(i)[static_cast<size_t>(n)], g);
        if (!std::equal(b.begin(), b.end(), table.begin() + n * x.per_unit)) return "path blocks";
      }
      if (const char* broken = check_exclusive(c, i, g)) return broken;
      if (const char* broken = check_forms(c, i, g)) return broken;
    }
    for (int32_t n = 0; n < q.path; ++n) {
      const node_id above = n == 0 ? no_node : c.seqs.path(i)[static_cast<size_t>(n - 1)];
      if (c.tree.tree().parent(c.seqs.path(i)[static_cast<size_t>(n)]) != above) return "path";
    }
  }
  return nullptr;
}

// Calls visit(node) for every node, parents first.
template <class Traits, class Visit>
void walk(const core<Traits>& c, Visit visit) noexcept {
  const auto& tree = c.tree.tree();
  node_id r = tree.first_child(no_node);
  while (r != no_node) {
    visit(r);
    if (!tree.leaf(r)) {
      r = tree.first_child(r);
      continue;
    }
    while (r != no_node && tree.sibling(r) == no_node) r = tree.parent(r);
    if (r != no_node) r = tree.sibling(r);
  }
}

template <class Traits>
const char* check_nodes(const core<Traits>& c) noexcept {
  const auto capacity = static_cast<size_t>(c.tree.tree().capacity());
  fixed_array<int32_t> pins;
  fixed_array<int32_t> refs;
  if (!pins.create(capacity) || !refs.create(static_cast<size_t>(c.geo.max_scopes))) return "memory";
  for (int32_t i = 0; i < c.seqs.capacity(); ++i) {
    const sequence_state& q = c.seqs.state(i);
    if (!q.live) continue;
    for (const node_id r : c.seqs.path(i)) ++pins[index(r)];
    for (int32_t k = 0; k < q.scopes.count; ++k) ++refs[static_cast<size_t>(q.scopes.id[k])];
  }
  int32_t count = 0;
  const char* broken = nullptr;
  walk(c, [&](node_id r) {
    ++count;
    ++refs[static_cast<size_t>(c.tree.tree().scope_of(r))];
    if (c.tree.pins(r) != pins[index(r)]) broken = "pins";
    const node_id above = c.tree.tree().parent(r);
    if (above != no_node && c.tree.pins(r) > 0 && c.tree.pins(above) == 0) broken = "pinned below unpinned";
  });
  if (count != c.tree.tree().size()) broken = "node count";
  for (int32_t s = 0; s < c.geo.max_scopes; ++s) {
    if (c.scopes.references(s) != refs[static_cast<size_t>(s)]) broken = "scope references";
  }
  return broken;
}

template <class Traits>
const char* check_blocks(const core<Traits>& c, int32_t g, fixed_array<int32_t>& charged,
                         fixed_array<int32_t>& cached) noexcept {
  const auto& pool = c.pool.pool(g);
  const auto& open = c.pool.open(g);
  fixed_array<int32_t> shares;
  fixed_array<int32_t> indexed;
  fixed_array<int32_t> open_shares;
  if (!shares.create(static_cast<size_t>(pool.total_blocks())) || !indexed.create(shares.size()) ||
      !open_shares.create(static_cast<size_t>(open.total_blocks()))) {
    return "memory";
  }
  for (int32_t i = 0; i < c.seqs.capacity(); ++i) {
    if (!c.seqs.state(i).live) continue;
    for (const block_id b : c.seqs.table(i, g)) ++shares[index(b)];
    for (const block_id b : c.seqs.open_table(i, g)) {
      if (b != no_block) ++open_shares[index(b)];
    }
  }
  const char* broken = nullptr;
  for (const kvc_command& s : c.pool.seals().view()) {
    if (s.group != g) continue;
    ++open_shares[static_cast<size_t>(s.src)];
    const block_id b{s.dst};
    if ((pool.shares(b) == 0 && !pool.indexed(b)) || !c.pool.sealed(g, b)) broken = "seal of a free block";
    if (!c.pool.seals().waits(g, b)) broken = "place of a seal";
  }
  walk(c, [&](node_id r) {
    const bool none = c.geo.group[g].first_only && c.tree.tree().parent(r) != no_node;
    for (const block_id b : c.tree.blocks_of(r, g)) {
      if (none != (b == no_block)) broken = "blocks of a node";
      if (b != no_block) ++indexed[index(b)];
    }
  });
  if (broken != nullptr) return broken;
  int32_t in_cache = 0;
  int32_t used = 0;
  for (int32_t i = 0; i < pool.total_blocks(); ++i) {
    const block_id b{i};
    const auto k = static_cast<size_t>(i);
    if (pool.shares(b) != shares[k]) return "block shares";
    if (pool.indexed(b) != (indexed[k] > 0)) return "indexed blocks";
    if (shares[k] == 0 && indexed[k] == 0) continue;
    ++charged[static_cast<size_t>(c.pool.owner(g, b))];
    cached[static_cast<size_t>(c.pool.owner(g, b))] += shares[k] == 0;
    shares[k] == 0 ? ++in_cache : ++used;
  }
  if (pool.cached_blocks() != in_cache) return "cached blocks";
  if (pool.used_blocks() + in_cache + pool.free_blocks() != pool.total_blocks()) return "block balance";
  // A reserving allocator counts whole regions as used.
  const bool reserves = c.geo.group[g].reserve_blocks != 0;
  if (reserves ? pool.used_blocks() < used : pool.used_blocks() != used) return "used blocks";
  int32_t open_used = 0;
  for (int32_t i = 0; i < open.total_blocks(); ++i) {
    if (open.shares(block_id{i}) != open_shares[static_cast<size_t>(i)]) return "open block shares";
    open_used += open_shares[static_cast<size_t>(i)] > 0;
  }
  return open_used + open.free_blocks() == open.total_blocks() ? nullptr : "open block balance";
}

/// Null, or the name of the first invariant that does not hold. Cost: O(blocks + nodes + tables), allocates.
template <class Traits>
const char* check(const core<Traits>& c) noexcept {
  if (const char* broken = check_tables(c)) return broken;
  if (const char* broken = check_nodes(c)) return broken;
  fixed_array<int32_t> charged;
  fixed_array<int32_t> cached;
  const auto accounts = static_cast<size_t>(c.pool.accounts());
  if (!charged.create(accounts) || !cached.create(accounts)) return "memory";
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    if (const char* broken = check_blocks(c, g, charged, cached)) return broken;
  }
  for (int32_t a = 0; a < c.pool.accounts(); ++a) {
    if (c.pool.charged(a) != charged[static_cast<size_t>(a)]) return "account charge";
    if (c.pool.cached(a) != cached[static_cast<size_t>(a)]) return "account cache";
    if (c.pool.charged(a) > c.pool.limit(a)) return "account limit";
  }
  return nullptr;
}

}  // namespace kvcache::detail
