// SPDX-License-Identifier: Apache-2.0
#pragma once
// When blocks of a lossy format are packed. Block j holds tokens [jB, (j+1)B); the query that is a text's
// t-th token reads it packed if (j+1)B + residual <= t, and as it was written otherwise. That depends on the
// text alone, so it does not matter in which pieces a text is computed.
//
//   extend          seals what its tokens make final, inside the step (cache::seals); the open forms stay
//                   readable for the step's earlier queries and go when the step ends
//   extend(draft)   stops before the next seal: what is rolled back must not have been packed
//   settle          formats that are deferred: seals between two steps; then it is the owner's rule
#include <algorithm>
#include <cstdint>

#include "kvcache/cache/core.hpp"

namespace kvcache::detail {

/// Tokens that may still be added before one of them seals a block.
template <class Traits>
int32_t room_before_seal(const core<Traits>& c, int32_t i) noexcept {
  const sequence_state& q = c.seqs.state(i);
  int64_t room = INT32_MAX;
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const group_geometry& x = c.geo.group[g];
    if (!x.seals_in_step()) continue;
    room = std::min(room, int64_t{q.sealed[g]} + x.block_size + x.format.residual - 1 - q.held);
  }
  return static_cast<int32_t>(std::max<int64_t>(0, room));
}

/// Leading tokens that the query which is the `tokens`-th token reads packed.
template <class Traits>
int32_t sealed_at(const core<Traits>& c, int32_t i, int32_t tokens, int32_t g) noexcept {
  const sequence_state& q = c.seqs.state(i);
  const group_geometry& x = c.geo.group[g];
  if (!x.seals_in_step()) return q.sealed[g];
  return std::min(q.sealed[g], std::max(q.packed[g], x.sealed_at(tokens)));
}

/// Whether the query at slot `n`, the next one, reads something packed that a cold run reads exactly.
inline bool reads_otherwise(const geometry& geo, const sequence_state& q, int32_t n) noexcept {
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    if (!x.format.lossy || q.packed[g] == 0) continue;
    if (x.format.deferred || q.packed[g] > x.sealed_at(n + 1)) return true;
  }
  return false;
}

/// The sequence continues at `n`: what lies before is as it was.
inline void cut_horizon(const geometry& geo, sequence_state& q, int32_t n) noexcept {
  if (n <= q.horizon) q.horizon = reads_otherwise(geo, q, n) ? n : INT32_MAX;
}

/// Queues the seals that the accepted tokens make due, to be run inside the step.
template <class Traits>
void seal_in_step(core<Traits>& c, int32_t i) noexcept {
  sequence_state& q = c.seqs.state(i);
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const group_geometry& x = c.geo.group[g];
    if (!x.seals_in_step()) continue;
    const int32_t due = x.sealed_at(q.accepted);
    if (due <= q.sealed[g]) continue;
    for (int32_t k = q.sealed[g] / x.block_size; k < due / x.block_size; ++k) {
      const block_id packed = c.seqs.row(i, g)[static_cast<size_t>(k)];
      // A sibling that shares both forms may have been here first.
      if (c.pool.sealed(g, packed)) continue;
      const int32_t exempt = k == 0 ? x.format.exempt : 0;
      c.pool.add_seal(g, c.seqs.open_row(i, g)[static_cast<size_t>(k)], packed, x.block_size, exempt);
    }
    q.sealed[g] = due;
    c.seqs.note_sealing(i);
  }
}

/// After a cut to `n` tokens: what was sealed in this step and would not be sealed at `n` is open again.
template <class Traits>
void reopen(core<Traits>& c, int32_t i, int32_t g, int32_t n) noexcept {
  sequence_state& q = c.seqs.state(i);
  const group_geometry& x = c.geo.group[g];
  if (!x.format.lossy) return;
  const int32_t packed = std::min(q.packed[g], n);
  const int32_t sealed = std::max(packed, std::min(q.sealed[g], x.sealed_at(n)));
  const int32_t columns = std::min(q.columns[g], q.sealed[g] / x.block_size);
  for (int32_t k = sealed / x.block_size; k < columns; ++k) {
    const block_id b = c.seqs.table(i, g)[static_cast<size_t>(k)];
    // What others hold is theirs to read packed.
    if (!c.pool.pool(g).immutable(b)) c.pool.cancel_seal(g, b);
  }
  q.packed[g] = packed;
  q.sealed[g] = sealed;
}

template <class Traits>
int32_t deferred_seals(const core<Traits>& c, int32_t i, int32_t g) noexcept {
  const sequence_state& q = c.seqs.state(i);
  const group_geometry& x = c.geo.group[g];
  if (!x.format.deferred) return 0;
  return std::max(0, x.sealed_at(q.accepted) - q.sealed[g]) / x.block_size;
}

template <class Traits>
status settle(core<Traits>& c, int32_t i) noexcept {
  sequence_state& q = c.seqs.state(i);
  int32_t seals = 0;
  for (int32_t g = 0; g < c.geo.groups; ++g) seals += deferred_seals(c, i, g);
  if (!c.commands.room(seals)) return {errc::busy, "commands", c.commands.size()};
  // What is computed from now on reads packed what one longer prompt would have read exactly.
  if (seals > 0) q.horizon = std::min(q.horizon, q.held);
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const int32_t block_size = c.geo.group[g].block_size;
    for (int32_t k = deferred_seals(c, i, g); k > 0; --k) {
      const auto column = static_cast<size_t>(q.sealed[g] / block_size);
      block_id& open = c.seqs.open_row(i, g)[column];
      const block_id packed = c.seqs.row(i, g)[column];
      if (!c.pool.sealed(g, packed)) {  // a sibling that shares both forms may have been here first
        const auto space = static_cast<size_t>(2 * g);
        const int32_t exempt = column == 0 ? c.geo.group[g].format.exempt : 0;
        c.commands.add(KVC_OP_SEAL, g, space + 1, open, space, packed, block_size, exempt);
        c.pool.set_sealed(g, packed, true);
      }
      c.pool.open(g).release({&open, 1});
      open = no_block;
      q.sealed[g] += block_size;
    }
    if (c.geo.group[g].format.deferred) q.packed[g] = q.sealed[g];
  }
  return {};
}

}  // namespace kvcache::detail
