// SPDX-License-Identifier: Apache-2.0
#pragma once
// The verb that drops tokens of a live sequence. How many and in which form says a plan (retain/concept.hpp);
// which ones is decided where the scores are, when the queued commands run. After a drop a slot is no longer
// a text position, and nothing of the sequence is indexed any more.
//
//   gather        | a | b | c | d |  ──>  | a'| b'|     own blocks are filled anew, shared ones are replaced
//   whole_blocks  | s | x | x | w |  ──>  | s'| w |     s' = s turned by what was dropped, copied if shared
//   overwrite     | a | b | c | d |  ──>  same table    all its own; the next token takes a slot
//
// A lossy format allows what compatible.hpp says: whole blocks leave both tables, and what is gathered or
// written over are open blocks, whose packed ones are only reserved.
//
// Blocks for copies: what whole_blocks gives back may serve at once, since nothing reads it any more. What a
// gather gives back may not: it lies behind what is filled and is read until the end, and which of its slots
// are still to be read only the keep-lists know. So a gather beside a sharer needs its copies' blocks free.
#include <algorithm>
#include <cstdint>
#include <span>

#include "kvcache/cache/compatible.hpp"
#include "kvcache/cache/core.hpp"
#include "kvcache/retain/concept.hpp"

namespace kvcache {

/// What a drop did.
struct retained {
  int32_t dropped = 0;          ///< tokens that went
  int32_t blocks_returned = 0;  ///< blocks of all groups that nobody uses any more, less those newly taken
};

namespace detail {

/// What a drop takes from and gives back to one group.
struct drop_demand {
  int32_t fresh = 0;      // blocks to allocate
  int32_t returned = 0;   // blocks whose last user this is
  int32_t ready = 0;      // of these, blocks that are given back before the first is allocated
  int32_t own_ready = 0;  // of these, blocks that the sequence's account is charged for
  int32_t open = 0;       // open blocks to allocate
};

template <class Traits>
bool last_user(const core<Traits>& c, int32_t g, block_id b) noexcept {
  return b != no_block && c.pool.pool(g).shares(b) == 1;
}

// Columns [0, copied) are written: those that others can see need a fresh block. Columns [from, to) go.
template <class Traits>
drop_demand demand_of(const core<Traits>& c, int32_t i, int32_t g, int32_t copied, int32_t from,
                      int32_t to) noexcept {
  const std::span<const block_id> table = c.seqs.table(i, g);
  drop_demand d;
  for (int32_t k = 0; k < copied; ++k) {
    const block_id b = table[static_cast<size_t>(k)];
    if (!c.pool.pool(g).immutable(b)) continue;
    ++d.fresh;
    d.returned += last_user(c, g, b);
  }
  for (int32_t k = from; k < to; ++k) d.returned += last_user(c, g, table[static_cast<size_t>(k)]);
  return d;
}

// Of the first `columns` open blocks, those that others can see and that are written. Groups without any: 0.
template <class Traits>
int32_t open_demand(const core<Traits>& c, int32_t i, int32_t g, int32_t columns) noexcept {
  int32_t n = 0;
  if (!c.geo.group[g].format.lossy) return n;
  for (int32_t k = 0; k < columns; ++k) {
    n += c.pool.open(g).immutable(c.seqs.open_table(i, g)[static_cast<size_t>(k)]);
  }
  return n;
}

// Columns [from, to) go before anything is allocated.
template <class Traits>
void count_ready(const core<Traits>& c, int32_t i, int32_t g, int32_t from, int32_t to,
                 drop_demand& d) noexcept {
  for (int32_t k = from; k < to; ++k) {
    const block_id b = c.seqs.table(i, g)[static_cast<size_t>(k)];
    if (!last_user(c, g, b)) continue;
    ++d.ready;
    d.own_ready += c.pool.owner(g, b) == c.seqs.state(i).account;
  }
}

template <class Traits>
status admit_drop(core<Traits>& c, int32_t i, const drop_demand (&d)[max_groups], bool at_a_loss,
                  int32_t& gain) noexcept {
  const sequence_state& q = c.seqs.state(i);
  int32_t fresh = 0;
  int32_t own_ready = 0;
  gain = 0;
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    fresh += d[g].fresh;
    own_ready += d[g].own_ready;
    gain += d[g].returned - d[g].fresh;
  }
  if (gain <= 0 && !at_a_loss) return {errc::no_gain, "blocks_returned", gain};
  const int64_t owed = int64_t{c.pool.charged(q.account)} - c.pool.cached(q.account) + fresh - own_ready;
  if (fresh > 0 && owed > c.pool.limit(q.account)) return {errc::over_quota, "account", q.account};
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    if (status s = c.pool.pool(g).admit(std::max(0, d[g].fresh - d[g].ready)); !s) return s;
    if (status s = c.pool.open(g).admit(d[g].open); !s) return {s.code, "open", s.value};
  }
  return {};
}

// Replaces the block of a column that others can see. Requires: admitted.
template <class Traits>
block_id replace_block(core<Traits>& c, int32_t i, int32_t g, int32_t column) noexcept {
  make_room(c, g, 1, c.seqs.state(i).account);
  block_id fresh = no_block;
  c.pool.take(g, c.seqs.state(i).account, {&fresh, 1});
  std::swap(fresh, c.seqs.row(i, g)[static_cast<size_t>(column)]);
  return fresh;
}

// Makes the packed block of a column the sequence's own and unsealed: its open form is to be written. Nothing
// is copied, as the block is only reserved. Requires: admitted, the column is not sealed.
template <class Traits>
void reserve_own(core<Traits>& c, int32_t i, int32_t g, int32_t column) noexcept {
  const block_id b = c.seqs.row(i, g)[static_cast<size_t>(column)];
  if (c.pool.pool(g).immutable(b)) {
    (void)replace_block(c, i, g, column);
    c.pool.release(g, {&b, 1});
    return;
  }
  // A sibling may have packed it, and be gone.
  c.pool.cancel_seal(g, b);
  c.pool.set_sealed(g, b, false);
}

// As replace_block, of an open block.
template <class Traits>
void replace_open(core<Traits>& c, int32_t i, int32_t g, int32_t column) noexcept {
  block_id fresh = no_block;
  (void)c.pool.open(g).allocate({&fresh, 1});
  c.seqs.open_row(i, g)[static_cast<size_t>(column)] = fresh;
}

// As gather_group, over open blocks; the packed ones behind what stays are given back unused.
template <class Traits>
void gather_open(core<Traits>& c, int32_t i, int32_t g, int32_t keep) noexcept {
  sequence_state& q = c.seqs.state(i);
  const int32_t columns = ceil_div(keep, c.geo.group[g].block_size);
  const std::span<block_id> old = c.drop_scratch.view().first(static_cast<size_t>(q.columns[g]));
  std::copy_n(c.seqs.open_row(i, g).begin(), old.size(), old.begin());
  for (int32_t k = 0; k < columns; ++k) {
    reserve_own(c, i, g, k);
    if (c.pool.open(g).immutable(old[static_cast<size_t>(k)])) replace_open(c, i, g, k);
  }
  const auto open = c.seqs.open_row(i, g).first(static_cast<size_t>(columns));
  if (columns > 0) c.commands.add_gather(g, static_cast<size_t>(2 * g) + 1, old, open, i, keep);
  for (size_t k = old.size(); k-- > 0;) {
    if (k < open.size() && open[k] == old[k]) continue;
    c.pool.open(g).release({&old[k], 1});
  }
  c.pool.release_backwards(g, c.seqs.table(i, g).subspan(static_cast<size_t>(columns)));
  q.columns[g] = columns;
}

// The new run shares the leading blocks that nobody else sees; the gather fills it in ascending order.
template <class Traits>
void gather_group(core<Traits>& c, int32_t i, int32_t g, int32_t keep) noexcept {
  sequence_state& q = c.seqs.state(i);
  const int32_t columns = ceil_div(keep, c.geo.group[g].block_size);
  const std::span<block_id> old = c.drop_scratch.view().first(static_cast<size_t>(q.columns[g]));
  std::copy_n(c.seqs.row(i, g).begin(), old.size(), old.begin());
  for (int32_t k = 0; k < columns; ++k) {
    if (c.pool.pool(g).immutable(old[static_cast<size_t>(k)])) (void)replace_block(c, i, g, k);
  }
  const auto table = c.seqs.row(i, g).first(static_cast<size_t>(columns));
  if (columns > 0) c.commands.add_gather(g, static_cast<size_t>(2 * g), old, table, i, keep);
  for (size_t k = old.size(); k-- > 0;) {
    if (k < table.size() && table[k] == old[k]) continue;
    c.pool.release(g, {&old[k], 1});
  }
  q.columns[g] = columns;
}

// The blocks of `drop` tokens behind the sinks go.
template <class Traits>
void cut_group(core<Traits>& c, int32_t i, int32_t g, int32_t sinks, int32_t drop) noexcept {
  sequence_state& q = c.seqs.state(i);
  const int32_t first = sinks / c.geo.group[g].block_size;
  const int32_t count = drop / c.geo.group[g].block_size;
  const std::span<block_id> row = c.seqs.row(i, g).first(static_cast<size_t>(q.columns[g]));
  c.pool.release_backwards(g, row.subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
  std::copy(row.begin() + first + count, row.end(), row.begin() + first);
  if (c.geo.group[g].format.lossy) {
    const std::span<block_id> open = c.seqs.open_row(i, g).first(row.size());
    c.pool.open(g).release(open.subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
    std::copy(open.begin() + first + count, open.end(), open.begin() + first);
    for (int32_t* n : {&q.sealed[g], &q.packed[g]}) *n -= std::clamp(*n - sinks, 0, drop);
  }
  q.columns[g] -= count;
}

// The sinks are turned towards what follows, by as many positions as went.
template <class Traits>
void turn_group(core<Traits>& c, int32_t i, int32_t g, int32_t sinks, int32_t drop) noexcept {
  const int32_t block_size = c.geo.group[g].block_size;
  const auto space = static_cast<size_t>(2 * g);
  for (int32_t k = 0; k < sinks / block_size; ++k) {
    const block_id b = c.seqs.table(i, g)[static_cast<size_t>(k)];
    if (c.pool.pool(g).immutable(b)) {
      (void)replace_block(c, i, g, k);
      c.commands.add(KVC_OP_COPY, g, space, b, space, c.seqs.table(i, g)[static_cast<size_t>(k)], block_size);
      ++c.counters.blocks_copied;
      c.pool.release(g, {&b, 1});
    }
    const block_id mine = c.seqs.table(i, g)[static_cast<size_t>(k)];
    c.commands.add(KVC_OP_ROTATE, g, space, no_block, space, mine, block_size, drop);
  }
}

// Every open block may be written from now on.
template <class Traits>
void own_open(core<Traits>& c, int32_t i, int32_t g) noexcept {
  const auto space = static_cast<size_t>(2 * g) + 1;
  for (int32_t k = 0; k < c.seqs.state(i).columns[g]; ++k) {
    reserve_own(c, i, g, k);
    const block_id b = c.seqs.open_table(i, g)[static_cast<size_t>(k)];
    if (!c.pool.open(g).immutable(b)) continue;
    replace_open(c, i, g, k);
    c.commands.add(KVC_OP_COPY_OPEN, g, space, b, space, c.seqs.open_table(i, g)[static_cast<size_t>(k)],
                   c.geo.group[g].block_size);
    ++c.counters.blocks_copied;
    c.pool.open(g).release({&b, 1});
  }
}

// Every column may be written from now on.
template <class Traits>
void own_group(core<Traits>& c, int32_t i, int32_t g) noexcept {
  const auto space = static_cast<size_t>(2 * g);
  for (int32_t k = 0; k < c.seqs.state(i).columns[g]; ++k) {
    const block_id b = c.seqs.table(i, g)[static_cast<size_t>(k)];
    if (!c.pool.pool(g).immutable(b)) continue;
    (void)replace_block(c, i, g, k);
    c.commands.add(KVC_OP_COPY, g, space, b, space, c.seqs.table(i, g)[static_cast<size_t>(k)],
                   c.geo.group[g].block_size);
    ++c.counters.blocks_copied;
    c.pool.release(g, {&b, 1});
  }
}

template <class Traits>
status check_plan(const core<Traits>& c, int32_t i, const keep_plan& p) noexcept {
  const sequence_state& q = c.seqs.state(i);
  if (!core<Traits>::allocator::shareable) return {errc::unsupported, "contiguous"};
  if (p.form > drop_form::gather) return {errc::bad_argument, "plan", static_cast<int64_t>(p.form)};
  if (q.held != q.accepted) return {errc::busy, "drafts", q.held - q.accepted};
  if (p.keep < 1 || p.keep > q.held) return {errc::bad_argument, "keep", p.keep};
  if (p.sinks < 0 || p.sinks > p.keep) return {errc::bad_argument, "sinks", p.sinks};
  if (p.recent < 0 || p.recent > p.keep - p.sinks) return {errc::bad_argument, "recent", p.recent};
  if (status s = check_drop(c.geo, q.sealed, p); !s) return s;
  if (p.form != drop_form::whole_blocks) return {};
  if (p.sinks % c.geo.unit != 0) return {errc::bad_argument, "sinks", p.sinks};
  if ((q.held - p.keep) % c.geo.unit != 0) return {errc::bad_argument, "keep", p.keep};
  return {};
}

// Keep-lists are named by place: a second gather of one place would be given the first one's list.
template <class Traits>
bool gather_queued(const core<Traits>& c, int32_t i) noexcept {
  const std::span<const int32_t> ids = c.commands.ids();
  const std::span<const kvc_command> list = c.commands.view();
  return std::any_of(list.begin(), list.end(), [&](const kvc_command& x) {
    return x.op == KVC_OP_GATHER && ids[static_cast<size_t>(x.arg) + 2] == i;
  });
}

// What the drop of `drop` tokens takes from every group, and whether its commands can be queued. What no
// empty list could hold is not `busy`: waiting for it would never end.
template <class Traits>
status collect_drop(const core<Traits>& c, int32_t i, const keep_plan& p, int32_t drop,
                    drop_demand (&d)[max_groups]) noexcept {
  int64_t commands = 0;
  int64_t ids = 0;
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    const int32_t block_size = c.geo.group[g].block_size;
    const int32_t columns = c.seqs.state(i).columns[g];
    if (c.geo.group[g].first_only) continue;  // what it holds stays
    if (p.form == drop_form::gather) {
      const int32_t kept = ceil_div(p.keep, block_size);
      d[g] = demand_of(c, i, g, kept, kept, columns);
      d[g].open = open_demand(c, i, g, kept);
      ++commands;
      ids += command_list::gather_ids(static_cast<size_t>(columns), static_cast<size_t>(kept));
    } else if (p.form == drop_form::whole_blocks) {
      const int32_t first = p.sinks / block_size;
      d[g] = demand_of(c, i, g, p.move_sinks ? first : 0, first, first + drop / block_size);
      count_ready(c, i, g, first, first + drop / block_size, d[g]);
      commands += p.move_sinks ? first + d[g].fresh : 0;
    } else {
      d[g] = demand_of(c, i, g, columns, 0, 0);
      d[g].open = open_demand(c, i, g, columns);
      commands += c.geo.group[g].format.lossy ? d[g].open : d[g].fresh;
    }
  }
  if (commands > c.geo.max_commands) return {errc::unsupported, "max_commands", commands};
  if (ids > c.geo.max_gather_ids) return {errc::unsupported, "max_gathers", 0};
  const bool again = p.form == drop_form::gather && gather_queued(c, i);
  if (again || !c.commands.room(static_cast<int32_t>(commands), static_cast<int32_t>(ids))) {
    return {errc::busy, "commands", c.commands.size()};
  }
  return {};
}

// Moves what stays and gives back the rest. Requires: admitted. `fresh` = blocks that are taken.
template <class Traits>
void carry_out(core<Traits>& c, int32_t i, const keep_plan& p, int32_t drop, int32_t fresh) noexcept {
  const int32_t account = c.seqs.state(i).account;
  if (p.form == drop_form::whole_blocks) {
    for (int32_t g = 0; g < c.geo.groups; ++g) {
      if (!c.geo.group[g].first_only) cut_group(c, i, g, p.sinks, drop);
    }
    unpin_from(c, i, 0);  // what went may be cached, and must be free to go from there
  }
  while (int64_t{c.pool.charged(account)} + fresh > c.pool.limit(account) &&
         c.tree.evict_one(c.pool, c.scopes, account, c.clock)) {
  }
  for (int32_t g = 0; g < c.geo.groups; ++g) {
    if (c.geo.group[g].first_only) continue;
    const bool open = c.geo.group[g].format.lossy;
    if (p.form == drop_form::gather) open ? gather_open(c, i, g, p.keep) : gather_group(c, i, g, p.keep);
    if (p.form == drop_form::whole_blocks && p.move_sinks) turn_group(c, i, g, p.sinks, drop);
    if (p.form == drop_form::overwrite) open ? own_open(c, i, g) : own_group(c, i, g);
  }
  unpin_from(c, i, 0);
}

/// Carries out `p`. `overwritten` = tokens of the next step that take slots of others (drop_form::overwrite);
/// 0 makes every block the sequence's own and counts nothing.
template <class Traits>
result<retained> retain(core<Traits>& c, int32_t i, const keep_plan& p, int32_t overwritten,
                        bool at_a_loss) noexcept {
  if (p.form == drop_form::nothing) return retained{};
  if (status s = check_plan(c, i, p); !s) return s;
  sequence_state& q = c.seqs.state(i);
  const int32_t drop = p.form == drop_form::overwrite ? overwritten : q.held - p.keep;
  if (drop < 0 || drop > q.held) return {errc::bad_argument, "overwritten", drop};
  if (drop == 0 && p.form != drop_form::overwrite) return retained{};
  if (p.form == drop_form::overwrite && drop > INT32_MAX - q.held - q.dropped) {
    return c.refuse({errc::too_long, "position", q.held + q.dropped});
  }
  drop_demand d[max_groups];
  if (status s = collect_drop(c, i, p, drop, d); !s) return s;
  int32_t gain = 0;
  // Overwriting is not meant to give back: it keeps the sequence from growing.
  if (status s = admit_drop(c, i, d, at_a_loss || p.form == drop_form::overwrite, gain); !s) {
    return s.code == errc::no_gain ? s : c.refuse(s);
  }
  int32_t fresh = 0;
  for (const drop_demand& x : d) fresh += x.fresh;
  int32_t used = 0;
  for (int32_t g = 0; g < c.geo.groups; ++g) used += c.pool.pool(g).used_blocks();
  carry_out(c, i, p, drop, fresh);
  q.dropped += drop;
  q.held = q.accepted = p.form == drop_form::overwrite ? q.held : p.keep;
  q.floor = q.held;
  q.exclusive = 0;
  q.horizon = 0;
  for (int32_t g = 0; g < c.geo.groups; ++g) used -= c.pool.pool(g).used_blocks();
  return retained{drop, used};
}

}  // namespace detail
}  // namespace kvcache
