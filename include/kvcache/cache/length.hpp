// SPDX-License-Identifier: Apache-2.0
#pragma once
// Verbs that change the length of one sequence.
#include <algorithm>
#include <cstdint>

#include "kvcache/cache/core.hpp"
#include "kvcache/cache/sealing.hpp"

namespace kvcache::detail {

/// What extending a sequence takes from one group.
struct demand {
  int32_t blocks = 0;       // new table entries
  int32_t copy = 0;         // 1: the last block is shared or indexed and must be replaced
  int32_t open_blocks = 0;  // the same in the open space
  int32_t open_copy = 0;
};

template <class Traits>
void make_room(core<Traits>& c, int32_t g, int32_t n, int32_t account) noexcept {
  while (c.pool.pool(g).free_blocks() < n && c.tree.evict_one(c.pool, c.scopes, account, c.clock)) {
  }
}

template <class Traits>
status collect(core<Traits>& c, int32_t i, int32_t n, demand (&d)[max_groups]) noexcept {
  const sequence_state& q = c.seqs.state(i);
  int32_t sum = 0;
  int32_t copies = 0;
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const group_geometry& x = c.geo.group[g];
    const int32_t end = std::max(x.blocks_for(x.stored(q.held + n)), x.reserve_blocks);
    d[g].blocks = std::max(0, end - q.columns[g]);
    if (x.inside(x.stored(q.held)) != 0) {
      const auto last = static_cast<size_t>(x.blocks_for(q.held) - 1);
      d[g].copy = c.pool.pool(g).immutable(c.seqs.table(i, g)[last]);
      if (x.format.lossy) d[g].open_copy = c.pool.open(g).immutable(c.seqs.open_table(i, g)[last]);
    }
    if (x.format.lossy) d[g].open_blocks = d[g].blocks;
    sum += d[g].blocks + d[g].copy;
    // A lossy format's packed block is only reserved while its open form is written: nothing is copied there.
    copies += (x.format.lossy ? 0 : d[g].copy) + d[g].open_copy;
  }
  if (!c.commands.room(copies)) return {errc::busy, "commands", c.commands.size()};
  const int64_t owed = int64_t{c.pool.charged(q.account)} - c.pool.cached(q.account) + sum;
  if (sum > 0 && owed > c.pool.limit(q.account)) return {errc::over_quota, "account", q.account};
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    if (status s = c.pool.pool(g).admit(d[g].blocks + d[g].copy); !s) return s;
    if (status s = c.pool.open(g).admit(d[g].open_blocks + d[g].open_copy); !s) {
      return {s.code, "open", s.value};
    }
  }
  return {};
}

template <class Traits>
int32_t hand_out(core<Traits>& c, sequence_state& q, int32_t n, bool draft) noexcept {
  q.held += n;
  if (!draft) q.accepted = q.held;
  c.counters.tokens_extended += static_cast<uint64_t>(n);
  return n;
}

template <class Traits>
result<int32_t> extend(core<Traits>& c, int32_t i, int32_t n, bool draft) noexcept {
  sequence_state& q = c.seqs.state(i);
  if (n > 0 && n <= q.exclusive - q.held && (draft || q.accepted == q.held)) return hand_out(c, q, n, draft);
  if (n < 0) return {errc::bad_argument, "n", n};
  if (!draft && q.accepted != q.held) return {errc::busy, "drafts", q.held - q.accepted};
  if (draft) n = std::min(n, room_before_seal(c, i));
  if (n > c.geo.max_sequence_tokens - q.held) return c.refuse({errc::too_long, "n", n});
  if (n > INT32_MAX - q.held - q.dropped) return c.refuse({errc::too_long, "position", q.held + q.dropped});
  if (n == 0) return 0;
  demand d[max_groups];
  if (status s = collect(c, i, n, d); !s) return c.refuse(s);
  int32_t sum = 0;
  for (int32_t g = 0; g < c.geo.groups; ++g) sum += d[g].blocks + d[g].copy;
  while (int64_t{c.pool.charged(q.account)} + sum > c.pool.limit(q.account) &&
         c.tree.evict_one(c.pool, c.scopes, q.account, c.clock)) {
  }
  for (int32_t g = 0; g < c.geo.groups; ++g) grow(c, i, g, d[g]);
  (void)hand_out(c, q, n, draft);
  if (!draft) seal_in_step(c, i);
  q.exclusive = own_slots(c, i);
  return n;
}

// Slots from held up to here lie in blocks that are the sequence's own, and tokens in them seal nothing.
// Requires: every group has just grown.
template <class Traits>
int32_t own_slots(const core<Traits>& c, int32_t i) noexcept {
  const sequence_state& q = c.seqs.state(i);
  int64_t end = std::min(c.geo.max_sequence_tokens, INT32_MAX - q.dropped);  // positions are 32 bits
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const group_geometry& x = c.geo.group[g];
    if (!x.first_only) end = std::min(end, int64_t{q.columns[g]} * x.block_size);
    if (x.seals_in_step()) {
      end = std::min(end, int64_t{q.sealed[g]} + x.block_size + x.format.residual - 1);
    }
  }
  return static_cast<int32_t>(end);
}

template <class Traits>
void grow(core<Traits>& c, int32_t i, int32_t g, const demand& d) noexcept {
  sequence_state& q = c.seqs.state(i);
  if (d.blocks + d.copy > 0) make_room(c, g, d.blocks + d.copy, q.account);
  if (d.copy != 0) replace_last(c, i, g);
  if (d.open_copy != 0) replace_last_open(c, i, g);
  const group_geometry& x = c.geo.group[g];
  if (x.format.lossy && q.held % x.block_size != 0) {
    // A sibling may have packed this block when it was full, before this sequence truncated into it.
    const block_id b = c.seqs.table(i, g)[static_cast<size_t>(q.held / x.block_size)];
    c.pool.cancel_seal(g, b);
    c.pool.set_sealed(g, b, false);
  }
  if (d.blocks == 0) return;
  const auto from = static_cast<size_t>(q.columns[g]);
  const auto count = static_cast<size_t>(d.blocks);
  c.pool.take(g, q.account, c.seqs.row(i, g).subspan(from, count));
  if (d.open_blocks > 0) (void)c.pool.open(g).allocate(c.seqs.open_row(i, g).subspan(from, count));
  q.columns[g] += d.blocks;
}

template <class Traits>
void replace_last(core<Traits>& c, int32_t i, int32_t g) noexcept {
  const sequence_state& q = c.seqs.state(i);
  const group_geometry& x = c.geo.group[g];
  block_id& entry = c.seqs.row(i, g)[static_cast<size_t>(q.held / x.block_size)];
  block_id fresh = no_block;
  c.pool.take(g, q.account, {&fresh, 1});
  if (!x.format.lossy) {
    const auto space = static_cast<size_t>(2 * g);
    c.commands.add(KVC_OP_COPY, g, space, entry, space, fresh, x.stored(q.held) % x.block_size);
    ++c.counters.blocks_copied;
  }
  c.pool.release(g, {&entry, 1});
  entry = fresh;
}

template <class Traits>
void replace_last_open(core<Traits>& c, int32_t i, int32_t g) noexcept {
  const sequence_state& q = c.seqs.state(i);
  const int32_t block_size = c.geo.group[g].block_size;
  block_id& entry = c.seqs.open_row(i, g)[static_cast<size_t>(q.held / block_size)];
  block_id fresh = no_block;
  (void)c.pool.open(g).allocate({&fresh, 1});
  const auto space = static_cast<size_t>(2 * g + 1);
  c.commands.add(KVC_OP_COPY_OPEN, g, space, entry, space, fresh, q.held % block_size);
  ++c.counters.blocks_copied;
  c.pool.open(g).release({&entry, 1});
  entry = fresh;
}

template <class Traits>
status accept(core<Traits>& c, int32_t i, int32_t n) noexcept {
  sequence_state& q = c.seqs.state(i);
  if (n < 0 || n > q.held - q.accepted) return {errc::bad_argument, "n", n};
  q.accepted += n;
  shrink(c, i, q.accepted);
  cut_horizon(c.geo, q, q.accepted);
  return {};
}

template <class Traits>
void shrink(core<Traits>& c, int32_t i, int32_t n) noexcept {
  sequence_state& q = c.seqs.state(i);
  q.held = n;
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const group_geometry& x = c.geo.group[g];
    const int32_t keep = std::max(ceil_div(x.stored(n), x.block_size), x.reserve_blocks);
    if (keep >= q.columns[g]) continue;
    const auto from = static_cast<size_t>(keep);
    c.pool.release_backwards(g, c.seqs.table(i, g).subspan(from));
    if (x.format.lossy) c.pool.open(g).release(c.seqs.open_table(i, g).subspan(from));
    q.columns[g] = keep;
    q.exclusive = std::min(q.exclusive, keep * x.block_size);
  }
}

template <class Traits>
result<int32_t> truncate(core<Traits>& c, int32_t i, int32_t n) noexcept {
  sequence_state& q = c.seqs.state(i);
  if (n < 0 || n > q.held) return {errc::bad_argument, "n", n};
  n = std::min(n, q.accepted);  // drafts go in any case
  // A block without an open form cannot be reopened: go back to an edge of every lossy group.
  for (bool again = true; again;) {
    again = false;
    for (int32_t g = 0; g < c.geo.groups; ++g) {
      const group_geometry& x = c.geo.group[g];
      if (!x.format.lossy || n >= q.packed[g] || n % x.block_size == 0) continue;
      n -= n % x.block_size;
      again = true;
    }
  }
  if (n < q.floor) n = q.floor = q.dropped = 0;  // what a drop left is no text of its own
  shrink(c, i, n);
  if (n < q.accepted) q.exclusive = 0;  // what now comes last may be shared
  q.accepted = std::min(q.accepted, n);
  for (int32_t g = 0; g < c.geo.groups; ++g) reopen(c, i, g, n);
  cut_horizon(c.geo, q, n);
  unpin_from(c, i, n / c.geo.unit);
  return n;
}

}  // namespace kvcache::detail
