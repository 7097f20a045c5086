// SPDX-License-Identifier: Apache-2.0
#pragma once
// Verbs that begin, multiply and end sequences.
#include <algorithm>
#include <cstdint>
#include <span>

#include "kvcache/cache/core.hpp"
#include "kvcache/cache/sealing.hpp"

namespace kvcache::detail {

/// How many tokens of `prompt` are cached; changes nothing, not even the recency. Cost: O(tokens).
template <class Traits>
int32_t peek(const core<Traits>& c, std::span<const token_id> prompt, const scope& who, int32_t recompute,
             std::span<node_id> scratch) noexcept {
  const scope_ids ids = c.scopes.find(who, c.geo.unit);
  if (ids.count == 0) return 0;
  const size_t usable = prompt.size() - std::min(prompt.size(), static_cast<size_t>(recompute));
  return c.tree.match(ids, prompt.first(usable), scratch) * c.geo.unit;
}

template <class Traits>
result<int32_t> open(core<Traits>& c, std::span<const token_id> prompt, const scope& who,
                     const open_options& o) noexcept {
  const auto [account, recompute, priority, priority_ms] = o;
  if (account < 0 || account >= c.pool.accounts()) return {errc::bad_argument, "account", account};
  if (recompute < 1) return {errc::bad_argument, "recompute", recompute};
  if (priority < INT16_MIN || priority > INT16_MAX) return {errc::bad_argument, "priority", priority};
  if (prompt.size() > static_cast<size_t>(c.geo.max_sequence_tokens)) {
    return {errc::too_long, "prompt", static_cast<int64_t>(prompt.size())};
  }
  const result<scope_ids> ids = c.scopes.acquire(who, c.geo.unit);
  if (!ids) return ids.error();
  const int32_t i = c.seqs.acquire();
  if (i < 0) {
    c.scopes.release(*ids);
    return {errc::out_of_sequences, "max_sequences", c.geo.max_sequences};
  }
  sequence_state& q = c.seqs.state(i);
  q.scopes = *ids;
  q.account = account;
  q.level = {priority, priority_ms};
  ++c.clock;
  const size_t usable = prompt.size() - std::min(prompt.size(), static_cast<size_t>(recompute));
  const std::span<node_id> path = c.seqs.path_row(i);
  q.path = c.tree.match(q.scopes, prompt.first(usable), path);
  q.held = q.accepted = q.committed = q.reused = q.path * c.geo.unit;
  c.tree.raise(c.seqs.path(i), q.level);
  c.tree.pin_path(c.seqs.path(i), c.clock);
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    q.columns[g] = c.tree.list_blocks(c.seqs.path(i), g, c.seqs.row(i, g));
    c.pool.share(g, c.seqs.table(i, g));
    if (!c.geo.group[g].format.lossy) continue;
    q.sealed[g] = q.packed[g] = q.held;
    std::fill_n(c.seqs.open_row(i, g).begin(), q.columns[g], no_block);
  }
  q.horizon = INT32_MAX;
  cut_horizon(c.geo, q, q.held);
  ++c.counters.sequences_opened;
  c.counters.tokens_asked += prompt.size();
  c.counters.tokens_reused += static_cast<uint64_t>(q.reused);
  return i;
}

template <class Traits>
result<int32_t> fork(core<Traits>& c, int32_t i) noexcept {
  if (!core<Traits>::allocator::shareable) return {errc::unsupported, "contiguous"};
  const int32_t drafts = c.seqs.state(i).held - c.seqs.state(i).accepted;
  if (drafts != 0) return {errc::busy, "drafts", drafts};
  const int32_t f = c.seqs.acquire();
  if (f < 0) return {errc::out_of_sequences, "max_sequences", c.geo.max_sequences};
  sequence_state& from = c.seqs.state(i);
  from.exclusive = 0;
  sequence_state& q = c.seqs.state(f);
  const uint32_t generation = q.generation;
  q = from;
  q.generation = generation;
  c.scopes.hold(q.scopes);
  const std::span<const node_id> path = c.seqs.path(i);
  c.tree.pin_path(path, c.clock);
  std::copy(path.begin(), path.end(), c.seqs.path_row(f).begin());
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const auto t = c.seqs.table(i, g);
    std::copy(t.begin(), t.end(), c.seqs.row(f, g).begin());
    c.pool.share(g, t);
    if (!c.geo.group[g].format.lossy) continue;
    const auto o = c.seqs.open_table(i, g);
    std::copy(o.begin(), o.end(), c.seqs.open_row(f, g).begin());
    c.pool.open(g).share(o);
    if (q.packed[g] != q.sealed[g]) c.seqs.note_sealing(f);
  }
  ++c.counters.sequences_opened;
  return f;
}

template <class Traits>
void close(core<Traits>& c, int32_t i) noexcept {
  sequence_state& q = c.seqs.state(i);
  ++c.clock;
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const auto kept = static_cast<size_t>(c.geo.group[g].blocks_of_units(q.path));  // in the index
    c.pool.release_backwards(g, c.seqs.table(i, g).subspan(kept));
    c.pool.release(g, c.seqs.table(i, g).first(kept));
    if (c.geo.group[g].format.lossy) c.pool.open(g).release(c.seqs.open_table(i, g));
  }
  unpin_from(c, i, 0);
  c.scopes.release(q.scopes);
  c.seqs.release(i);
}

// Rewrites `row` (its first `columns` entries in use) to `from`, taking what is new before giving back what
// is not.
template <class Share, class Release>
int32_t copy_row(std::span<block_id> row, int32_t columns, std::span<const block_id> from, Share share,
                 Release release) noexcept {
  const auto have = static_cast<size_t>(columns);
  int32_t touched = 0;
  for (size_t k = 0; k < from.size(); ++k) {
    if (k < have && row[k] == from[k]) continue;
    share(from[k]);
    if (k < have) release(row[k]);
    row[k] = from[k];
    ++touched;
  }
  for (size_t k = have; k-- > from.size(); ++touched) release(row[k]);
  return touched;
}

/// Makes `dst` a copy of `src`: beam search. Returns the number of table entries that differed; only those
/// are touched.
template <class Traits>
result<int32_t> assign(core<Traits>& c, int32_t dst, int32_t src) noexcept {
  if (!core<Traits>::allocator::shareable) return {errc::unsupported, "contiguous"};
  sequence_state& d = c.seqs.state(dst);
  sequence_state& s = c.seqs.state(src);
  if (dst == src) return 0;
  if (d.account != s.account) return {errc::bad_argument, "account", s.account};
  if (d.scopes != s.scopes) return {errc::bad_argument, "scope", s.scopes.id[0]};
  const int32_t drafts = d.held - d.accepted + s.held - s.accepted;
  if (drafts != 0) return {errc::busy, "drafts", drafts};
  int32_t touched = 0;
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    touched += copy_row(
        c.seqs.row(dst, g), d.columns[g], c.seqs.table(src, g),
        [&](block_id b) {
          c.pool.share(g, {&b, 1});
        },
        [&](block_id b) {
          c.pool.release(g, {&b, 1});
        });
    if (!c.geo.group[g].format.lossy) continue;
    touched += copy_row(
        c.seqs.open_row(dst, g), d.columns[g], c.seqs.open_table(src, g),
        [&](block_id b) {
          c.pool.open(g).share({&b, 1});
        },
        [&](block_id b) {
          c.pool.open(g).release({&b, 1});
        });
    if (s.packed[g] != s.sealed[g]) c.seqs.note_sealing(dst);
  }
  const std::span<node_id> to = c.seqs.path_row(dst);
  const std::span<const node_id> from = c.seqs.path(src);
  int32_t same = 0;
  while (same < d.path && same < s.path && to[static_cast<size_t>(same)] == from[static_cast<size_t>(same)])
    ++same;
  c.tree.pin_path(from.subspan(static_cast<size_t>(same)), c.clock);
  unpin_from(c, dst, same);
  std::copy(from.begin() + same, from.end(), to.begin() + same);
  const uint32_t generation = d.generation;
  s.exclusive = 0;
  d = s;
  d.generation = generation;
  return touched;
}

}  // namespace kvcache::detail
