// SPDX-License-Identifier: Apache-2.0
#pragma once
// Everything a cache consists of, and its counters. The verbs are functions of their own:
//   lifecycle.hpp  open, fork, assign, close        length.hpp   extend, accept, truncate
//   publish.hpp    commit                           sealing.hpp  settle, and what extend and truncate seal
//   check.hpp      the deep walk over all invariants
// Every verb first asks whether all of it is possible and changes nothing if not; from the first change on
// nothing can fail.
#include <algorithm>
#include <cstdint>
#include <span>

#include "kvcache/blocks/command_list.hpp"
#include "kvcache/cache/config.hpp"
#include "kvcache/cache/nodes.hpp"
#include "kvcache/cache/pools.hpp"
#include "kvcache/cache/sequences.hpp"
#include "kvcache/cache/stats.hpp"

namespace kvcache::detail {

/// The state of a cache. Invariant: check.hpp.
template <class Traits>
struct core {
  using allocator = typename Traits::allocator_type;
  using eviction = typename Traits::eviction_type;
  using prefix = typename Traits::index_type;

  /// Fails: bad_argument, out_of_memory.
  status create(const geometry& g, std::span<const int32_t> account_limits, eviction evict) noexcept;
  /// The counters as they are now.
  stats count() const noexcept;
  /// Forgets the commands and seals, which have been run, and the events, which have been read.
  void end_step() noexcept {
    commands.clear();
    if (!seqs.sealing().empty()) release_open_forms();
    tree.events().clear();
    ++counters.steps;
  }
  status refuse(status s) noexcept {
    ++counters.refusals;
    return s;
  }

  /// What was sealed in this step is read packed from now on.
  void release_open_forms() noexcept;

  geometry geo;
  pools<allocator> pool;
  nodes<allocator, eviction, prefix> tree;
  scope_table scopes;
  sequences seqs;
  command_list commands;
  stats counters{};                    // those that only grow
  uint64_t clock = 0;                  // ticks once per successful open and close
  fixed_array<block_id> unit_blocks;   // scratch of commit
  fixed_array<block_id> drop_scratch;  // scratch of retain: a table
};

template <class Traits>
void core<Traits>::release_open_forms() noexcept {
  for (const int32_t i : seqs.sealing()) {
    sequence_state& q = seqs.state(i);
    // A new sequence in a place that was noted has nothing here, unless it sealed something itself.
    for (int32_t g = 0; q.live && g < geo.groups; ++g) {
      if (!geo.group[g].seals_in_step()) continue;
      const auto from = static_cast<size_t>(q.packed[g] / geo.group[g].block_size);
      const auto to = static_cast<size_t>(q.sealed[g] / geo.group[g].block_size);
      const std::span<block_id> gone = seqs.open_row(i, g).subspan(from, to - from);
      pool.open(g).release(gone);
      std::fill(gone.begin(), gone.end(), no_block);
      q.packed[g] = q.sealed[g];
    }
  }
  seqs.forget_sealing();
  pool.clear_seals();
}

/// Unpins the path from node `first` on, the deepest first.
template <class Traits>
void unpin_from(core<Traits>& c, int32_t i, int32_t first) noexcept {
  sequence_state& q = c.seqs.state(i);
  if (q.path > first) c.tree.unpin_path(c.seqs.path(i).subspan(static_cast<size_t>(first)), c.clock);
  q.path = std::min(q.path, first);
  q.committed = q.path * c.geo.unit;
}

/// Evicts up to `n` nodes; returns how many there were.
template <class Traits>
int32_t evict(core<Traits>& c, int32_t n) noexcept {
  int32_t done = 0;
  while (done < n && c.tree.evict_one(c.pool, c.scopes, -1, c.clock)) ++done;
  return done;
}

/// Says what time it is; returns how many nodes expired.
template <class Traits>
int32_t set_time(core<Traits>& c, uint64_t ns) noexcept {
  return c.tree.set_time(c.pool, c.scopes, ns, c.clock);
}

template <class Traits>
status core<Traits>::create(const geometry& g, std::span<const int32_t> limits, eviction evict) noexcept {
  geo = g;
  for (int32_t i = 0; i < geo.groups; ++i) {
    // Blocks that are reserved ahead of the text would be shared by forks and written by both.
    const int32_t reserve = geo.group[i].reserve_blocks;
    if (allocator::shareable && reserve != 0) {
      return {errc::unsupported, "reserve", int64_t{reserve} * geo.group[i].block_size};
    }
  }
  if (status s = pool.create(geo, limits); !s) return s;
  if (status s = tree.create(geo, pool.accounts(), std::move(evict)); !s) return s;
  if (status s = scopes.create(geo.max_scopes, geo.format_fingerprint); !s) return s;
  if (status s = seqs.create(geo); !s) return s;
  int32_t spaces[2 * max_groups] = {};
  for (int32_t i = 0; i < geo.groups; ++i) {
    spaces[2 * i] = geo.group[i].total;
    spaces[2 * i + 1] = geo.group[i].open;
  }
  if (status s = commands.create({spaces, static_cast<size_t>(2 * geo.groups)}, geo.max_commands,
                                 geo.max_gather_ids);
      !s) {
    return s;
  }
  int32_t columns = 0;
  for (int32_t i = 0; i < geo.groups; ++i) columns = std::max(columns, geo.group[i].columns);
  if (!unit_blocks.create(static_cast<size_t>(geo.blocks_per_unit)) ||
      !drop_scratch.create(static_cast<size_t>(columns))) {
    return errc::out_of_memory;
  }
  return {};
}

template <class Traits>
stats core<Traits>::count() const noexcept {
  stats s = counters;
  s.sequences_live = static_cast<uint64_t>(seqs.live());
  s.nodes = static_cast<uint64_t>(tree.tree().size());
  s.events_lost = tree.events().lost();
  s.nodes_stored = tree.stored();
  s.nodes_evicted = tree.evicted();
  for (int32_t g = 0; g < geo.groups; ++g) {
    const allocator& p = pool.pool(g);
    s.blocks_total += static_cast<uint64_t>(p.total_blocks());
    s.blocks_free += static_cast<uint64_t>(p.free_blocks());
    s.blocks_used += static_cast<uint64_t>(p.used_blocks());
    s.blocks_cached += static_cast<uint64_t>(p.cached_blocks());
  }
  return s;
}

}  // namespace kvcache::detail
