// SPDX-License-Identifier: Apache-2.0
#pragma once
// The verb that turns what a sequence has computed into prefixes for others.
#include <algorithm>
#include <cstdint>
#include <span>

#include "kvcache/cache/core.hpp"

namespace kvcache::detail {

template <class Traits>
result<int32_t> commit(core<Traits>& c, int32_t i, std::span<const token_id> text) noexcept {
  sequence_state& q = c.seqs.state(i);
  if (!core<Traits>::allocator::shareable || q.floor != 0) return q.committed;
  const auto unit = static_cast<size_t>(c.geo.unit);
  int32_t limit = static_cast<int32_t>(std::min(text.size(), static_cast<size_t>(q.accepted)));
  limit = std::min(limit, q.horizon);
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    if (c.geo.group[g].format.lossy) limit = std::min(limit, q.sealed[g]);
  }
  if (q.path > 0 &&
      text.size() >= static_cast<size_t>(q.committed)) {  // catches a text that is not the whole one
    const std::span<const token_id> last = c.tree.tree().tokens(c.seqs.path(i).back());
    if (!std::equal(last.begin(), last.end(), text.begin() + (q.committed - c.geo.unit))) {
      return {errc::bad_argument, "text", q.committed - c.geo.unit};
    }
  }
  while (limit - q.committed >= c.geo.unit) {
    for (int32_t g = 0; g < c.geo.groups; ++g) {
      const group_geometry& x = c.geo.group[g];
      if (x.first_only && q.path > 0) {  // only the first node holds its block
        c.unit_blocks[static_cast<size_t>(x.unit_offset)] = no_block;
        continue;
      }
      const auto b = c.seqs.table(i, g).subspan(static_cast<size_t>(q.path * x.per_unit),
                                                static_cast<size_t>(x.per_unit));
      std::copy(b.begin(), b.end(), c.unit_blocks.begin() + x.unit_offset);
    }
    const node_id parent = q.path == 0 ? no_node : c.seqs.path(i).back();
    const inserted in = c.tree.store(c.pool, c.scopes, q.scopes.at(q.path), parent,
                                     text.subspan(static_cast<size_t>(q.committed), unit),
                                     c.unit_blocks.view(), q.account, q.level, c.clock);
    if (in.node == no_node) break;  // the index is full of pinned nodes: caching is best effort
    if (!in.fresh) adopt(c, i, q.path, in.node);
    c.seqs.path_row(i)[static_cast<size_t>(q.path++)] = in.node;
    q.committed += c.geo.unit;
  }
  return q.committed;
}

// Another sequence indexed the same content first: use its blocks and give the own ones back.
template <class Traits>
void adopt(core<Traits>& c, int32_t i, int32_t unit, node_id r) noexcept {
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    if (c.geo.group[g].first_only && unit > 0) continue;
    const std::span<const block_id> theirs = c.tree.blocks_of(r, g);
    const auto mine = c.seqs.row(i, g).subspan(static_cast<size_t>(unit) * theirs.size(), theirs.size());
    for (size_t k = 0; k < theirs.size(); ++k) {
      if (mine[k] == theirs[k]) continue;
      c.pool.share(g, {&theirs[k], 1});
      c.pool.release(g, {&mine[k], 1});
      mine[k] = theirs[k];
    }
  }
}

}  // namespace kvcache::detail
