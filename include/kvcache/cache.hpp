// SPDX-License-Identifier: Apache-2.0
#pragma once
// The front door: a cache that decides which blocks every sequence's keys and values live in, who shares
// them, what is reused and what is evicted. It moves no bytes itself; it queues commands for a data plane.
//
//   open ──> extend ──> run commands(), append, attend ──> end_step ──> ... ──> commit ──> close
//     │ cached prefix     │ drafts: accept                                        │ full units become
//     └ shared, pinned    └ copy on write where shared                            └ prefixes for others
//
// With a lossy format a step also packs: in every layer run seals() after its append and before its
// attention.
//
// One owner thread calls everything here; any thread may read board().
#include <memory>
#include <new>
#include <span>
#include <utility>

#include "kvcache/cache/check.hpp"
#include "kvcache/cache/core.hpp"
#include "kvcache/cache/length.hpp"
#include "kvcache/cache/lifecycle.hpp"
#include "kvcache/cache/publish.hpp"
#include "kvcache/cache/retain.hpp"
#include "kvcache/cache/sealing.hpp"
#include "kvcache/evict/any_eviction.hpp"
#include "kvcache/evict/lru.hpp"
#include "kvcache/prefix/radix_tree.hpp"

namespace kvcache {

/// The usual parts: pool, LRU, radix tree. Derive from it and replace a member type to build another cache.
struct serving {
  using allocator_type = block_pool;  ///< hands out blocks; a block_allocator
  using eviction_type = lru;          ///< ranks cached nodes; an eviction_policy
  using index_type = radix_tree;      ///< finds prefixes; a prefix_index
};
/// The eviction policy is chosen at run time.
struct dynamic : serving {
  using eviction_type = any_eviction;  ///< whichever policy is given to create
};

template <class Traits>
class basic_cache;

/// One request or branch. Closes when it is destroyed. Every verb of a closed one answers stale_handle; the
/// views are then empty. It must not outlive its cache.
template <class Traits>
class basic_sequence {
 public:
  basic_sequence() noexcept = default;
  /// Takes the sequence over; `o` is then closed.
  basic_sequence(basic_sequence&& o) noexcept
      : core_(std::exchange(o.core_, nullptr)), place_(o.place_), generation_(o.generation_) {}
  /// Exchanges the sequences; the one that was here closes with `o`.
  basic_sequence& operator=(basic_sequence&& o) noexcept {
    std::swap(core_, o.core_);
    std::swap(place_, o.place_);
    std::swap(generation_, o.generation_);
    return *this;
  }
  ~basic_sequence() { (void)close(); }

  /// Hands out slots for `n` more tokens, and queues the seals that they make due (`basic_cache::seals`).
  /// With `draft` they must be accepted before they are committed; with a lossy format, unless it is
  /// deferred, a draft stops before the next seal. Returns how many slots were handed out. Cost: O(blocks
  /// added). Fails: out_of_blocks ("open": lossy formats, more new tokens than a step may have), over_quota,
  /// too_long, busy (drafts outstanding, or commands to be run first).
  result<int32_t> extend(int32_t n, bool draft = false) noexcept {
    return live() ? detail::extend(*core_, place_, n, draft) : result<int32_t>(errc::stale_handle);
  }
  /// Keeps the first `n` draft tokens and rolls the others back. Fails: bad_argument.
  status accept(int32_t n) noexcept {
    return live() ? detail::accept(*core_, place_, n) : status(errc::stale_handle);
  }
  /// After the step that wrote them: queues the packing of blocks that are final, for formats whose seals are
  /// deferred; others have nothing to settle. What is computed after the first seal is not indexed: one
  /// longer prompt would have read its text exactly. Fails: busy.
  status settle() noexcept { return live() ? detail::settle(*core_, place_) : status(errc::stale_handle); }
  /// Shortens to `n` tokens, or below: a packed block cannot be reopened, once the step that sealed it has
  /// ended. Returns the length reached; the engine recomputes from there. Drafts are dropped first. With a
  /// residual above 1 what is computed afterwards may not be indexed, see commit. Fails: bad_argument.
  result<int32_t> truncate(int32_t n) noexcept {
    return live() ? detail::truncate(*core_, place_, n) : result<int32_t>(errc::stale_handle);
  }
  /// Makes full units of `text` (all tokens of the sequence, from the first) available to others. Only what
  /// the data plane has already computed may be given. Returns the tokens indexed so far; fewer when the
  /// index is full. With a lossy format whole packed units only, and only what a run without any cached
  /// prefix would have computed alike: with a residual above 1 (or deferred seals) that ends at the prefix
  /// that open found, or where truncate cut into packed blocks, as the queries after it read packed what such
  /// a run reads exactly. Fails: bad_argument when `text` is not the text committed before. Cost: O(new
  /// tokens).
  result<int32_t> commit(std::span<const token_id> text) noexcept {
    return live() ? detail::commit(*core_, place_, text) : result<int32_t>(errc::stale_handle);
  }
  /// Carries out a retention plan: drops tokens, queues the commands that move what stays, and gives blocks
  /// back. Which tokens stay in a gather is said when the commands run (keep-list `place()`). Afterwards
  /// slots are no text positions (position()), the prefix that was shared or committed is let go, and nothing
  /// more of this sequence is indexed. With drop_form::overwrite the next `overwritten` tokens take slots of
  /// others: nothing moves, but every block becomes this sequence's own; with 0 it only becomes that, and the
  /// tokens are counted by a second call once they are final (drafts may be taken back). Refused when no
  /// block would come back, unless `at_a_loss`: beside a live sharer dropping costs memory. Requires: K and V
  /// of all tokens held are written, since the commands run before the step's appends. Fails: no_gain,
  /// out_of_blocks, over_quota, busy (drafts, or commands to be run first, also an earlier gather of this
  /// sequence), too_long, bad_argument, unsupported (lossy formats: see cache/compatible.hpp; `max_commands`
  /// or `max_gathers` too small for this sequence). Cost: O(blocks + commands queued).
  result<retained> retain(const keep_plan& plan, int32_t overwritten = 0, bool at_a_loss = false) noexcept {
    return live() ? detail::retain(*core_, place_, plan, overwritten, at_a_loss)
                  : result<retained>(errc::stale_handle);
  }
  /// A second sequence with the same content; blocks are shared until one of them writes.
  /// Requires: K and V of all tokens held are written, since a later copy on write takes them from this one.
  /// Cost: O(blocks).
  /// Fails: out_of_sequences, busy (drafts outstanding), unsupported.
  result<basic_sequence> fork() noexcept {
    if (!live()) return {errc::stale_handle};
    const result<int32_t> f = detail::fork(*core_, place_);
    if (!f) return f.error();
    return basic_sequence(core_, *f);
  }
  /// Becomes a copy of `o`, of the same account and scope: the reordering of beam search. Requires: as fork.
  /// Returns the table entries that differed. Fails: bad_argument, busy.
  result<int32_t> assign(const basic_sequence& o) noexcept {
    if (!live() || !o.live()) return {errc::stale_handle};
    if (core_ != o.core_) return {errc::bad_argument, "sequence"};
    return detail::assign(*core_, place_, o.place_);
  }
  /// Gives everything back; what was committed stays cached.
  status close() noexcept {
    if (!live()) return errc::stale_handle;
    detail::close(*core_, place_);
    core_ = nullptr;
    return {};
  }

  /// Whether this is an open sequence: false after close, and for one that was never opened.
  bool live() const noexcept {
    return core_ != nullptr && core_->seqs.state(place_).generation == generation_;
  }
  /// Tokens with a slot, drafts included: the length of the sequence.
  int32_t held() const noexcept { return live() ? state().held : 0; }
  /// Of these, the tokens that are final.
  int32_t accepted() const noexcept { return live() ? state().accepted : 0; }
  /// Of these, the tokens in the index, whole units.
  int32_t committed() const noexcept { return live() ? state().committed : 0; }
  /// Text position of the next token: tokens held, and those that were dropped.
  int32_t position() const noexcept { return live() ? state().held + state().dropped : 0; }
  /// Tokens that were dropped.
  int32_t dropped() const noexcept { return live() ? state().dropped : 0; }
  /// Tokens of the prompt found in the cache by open.
  int32_t reused() const noexcept { return live() ? state().reused : 0; }
  /// Leading tokens that the query of the last token reads from packed blocks (lossy formats).
  int32_t sealed(int32_t group = 0) const noexcept { return live() ? state().sealed[group] : 0; }
  /// The same for the query which is the `tokens`-th token of the sequence: what kvc_batch::row_sealed wants
  /// of each row of this step. Requires: `tokens` above the length that the step began with.
  int32_t sealed_at(int32_t tokens, int32_t group = 0) const noexcept {
    return live() ? detail::sealed_at(*core_, place_, tokens, group) : 0;
  }
  /// Block ids in token order. Valid until the next verb on any sequence of the cache.
  std::span<const block_id> table(int32_t group = 0) const noexcept {
    return live() ? core_->seqs.table(place_, group) : std::span<const block_id>{};
  }
  /// Open blocks, in the columns of table(), no_block where there is none any more; empty for a lossless
  /// format. What this step seals keeps its open block until end_step.
  std::span<const block_id> open_table(int32_t group = 0) const noexcept {
    return live() ? core_->seqs.open_table(place_, group) : std::span<const block_id>{};
  }
  /// Number in [0, max_sequences) that no other live sequence has: an index into an engine's own arrays.
  int32_t place() const noexcept { return place_; }

 private:
  friend class basic_cache<Traits>;
  using core_type = detail::core<Traits>;
  basic_sequence(core_type* c, int32_t place) noexcept
      : core_(c), place_(place), generation_(c->seqs.state(place).generation) {}
  const detail::sequence_state& state() const noexcept { return core_->seqs.state(place_); }

  core_type* core_ = nullptr;
  int32_t place_ = 0;
  uint32_t generation_ = 0;
};

/// Manager of the key/value cache of one model instance. Memory: all taken by create; nothing is allocated
/// later. Thread safety: one owner thread; board() from any.
template <class Traits>
class basic_cache {
 public:
  using sequence = basic_sequence<Traits>;          ///< what open returns
  using eviction = typename Traits::eviction_type;  ///< what create takes
  static_assert(block_allocator<typename Traits::allocator_type>);
  static_assert(eviction_policy<eviction>);
  static_assert(prefix_index<typename Traits::index_type>);

  basic_cache() noexcept = default;

  /// Builds a cache. Fails: bad_argument or unsupported with the configuration's field and value,
  /// out_of_memory.
  static result<basic_cache> create(const cache_config& config, eviction evict = {}) noexcept {
    const result<geometry> geo = resolve(config);
    if (!geo) return geo.error();
    basic_cache c;
    c.core_.reset(new (std::nothrow) core_type);
    c.board_.reset(new (std::nothrow) stats_board);
    if (c.core_ == nullptr || c.board_ == nullptr) return {errc::out_of_memory};
    if (status s = c.core_->create(*geo, config.account_limits, std::move(evict)); !s) return s;
    c.board_->publish(c.count());
    return c;
  }

  /// Begins a sequence: the longest cached prefix of `prompt` is shared and pinned in the same call.
  /// Fails: bad_argument, too_long, out_of_sequences, out_of_scopes.
  /// Cost: O(tokens compared + blocks of the hit).
  result<sequence> open(std::span<const token_id> prompt, const scope& who, open_options o = {}) noexcept {
    const result<int32_t> i = detail::open(*core_, prompt, who, o);
    if (!i) return i.error();
    return sequence(core_.get(), *i);
  }
  /// Tokens of `prompt` that open would reuse now; changes nothing. `scratch` bounds the answer: one node per
  /// unit.
  int32_t peek(std::span<const token_id> prompt, const scope& who, std::span<node_id> scratch,
               int32_t recompute = 1) const noexcept {
    return detail::peek(*core_, prompt, who, recompute, scratch);
  }

  /// Writes the block ids of `group` along the nodes that peek found to `out`; returns how many. Requires:
  /// the nodes are still stored, room for `blocks per unit` ids each; without room nothing is written. Cost:
  /// O(ids).
  int32_t list_blocks(std::span<const node_id> path, std::span<block_id> out,
                      int32_t group = 0) const noexcept {
    if (!KVCACHE_CONTRACT(group >= 0 && group < core_->geo.groups)) return 0;
    const auto each = static_cast<size_t>(core_->geo.group[group].per_unit);
    if (!KVCACHE_CONTRACT(path.size() <= out.size() / each)) return 0;
    return core_->tree.list_blocks(path, group, out);
  }
  /// Evicts up to `n` units that no sequence holds, in the order of the policy; frees their blocks ahead of
  /// demand. Returns how many went: fewer when the rest is held. Cost: O(1) each for lru, O(log) otherwise.
  int32_t evict(int32_t n) noexcept { return detail::evict(*core_, n); }
  /// Says what time it is, in ns of any clock that does not run backwards (an earlier time is ignored); for
  /// policies that heed it. Units whose time to live is over (`ttl`) leave at once, so that open never finds
  /// them, and levels whose duration is over end (`priority_levels`). Returns how many units left. The cache
  /// never asks a clock by itself: the time is 0 until it is set. Cost: O(accounts + units that leave).
  int32_t set_time(uint64_t ns) noexcept { return detail::set_time(*core_, ns); }

  /// Commands queued since the last end_step, to be run over all layers before the step's appends.
  const command_list& commands() const noexcept { return core_->commands; }
  /// The packing of blocks that this step makes final (KVC_OP_SEAL, all of stage 0): to be run in every layer
  /// between its append and its attention. Valid until the next verb. Memory: room for every open block, so
  /// it is never full.
  std::span<const kvc_command> seals() const noexcept { return core_->pool.seals().view(); }
  /// What the prefix index did since the last end_step, in order (`cache_config::max_events`).
  std::span<const kvc_event> events() const noexcept { return core_->tree.events().view(); }
  /// Tokens of a stored node.
  std::span<const token_id> tokens(node_id r) const noexcept { return core_->tree.tree().tokens(r); }
  /// The commands and seals have been handed to the data plane: forgets them and the events, gives the open
  /// blocks back that were sealed, and publishes the counters. Cost: O(commands + blocks sealed).
  void end_step() noexcept {
    core_->end_step();
    board_->publish(count());
  }

  /// The counters as published by the last end_step; stays valid over moves and resets. Thread safety: any
  /// thread.
  const stats_board& board() const noexcept { return *board_; }
  /// The counters as they are now.
  stats count() const noexcept { return core_->count(); }
  /// Every size as create decided it.
  const geometry& shape() const noexcept { return core_->geo; }
  /// Blocks of all groups that an account is charged for, cached ones included.
  int32_t charged(int32_t account) const noexcept { return core_->pool.charged(account); }
  /// The allocator of a group, to be read.
  const typename Traits::allocator_type& pool(int32_t group = 0) const noexcept {
    return core_->pool.pool(group);
  }
  /// The allocator of a group, for what an adaptor offers (fail_nth::arm). Requires: nothing is allocated or
  /// released through it, or the cache's counts go wrong.
  typename Traits::allocator_type& pool(int32_t group = 0) noexcept { return core_->pool.pool(group); }

  /// Back to the state of a new cache, which cannot be told from one. Fails: busy while sequences are live,
  /// out_of_memory; then nothing has changed. `evict` is a policy as it was given to create.
  status reset(eviction evict = {}) noexcept {
    if (core_->seqs.live() != 0) return {errc::busy, "sequences", core_->seqs.live()};
    const auto accounts = static_cast<size_t>(core_->pool.accounts());
    fixed_array<int32_t> limits;
    if (!limits.create(accounts)) return errc::out_of_memory;
    for (size_t a = 0; a < accounts; ++a) limits[a] = core_->pool.limit(static_cast<int32_t>(a));
    std::unique_ptr<core_type> fresh(new (std::nothrow) core_type);
    if (fresh == nullptr) return errc::out_of_memory;
    if (status s = fresh->create(core_->geo, limits.view(), std::move(evict)); !s) return s;
    core_ = std::move(fresh);
    board_->publish(count());
    return {};
  }

  /// Null, or the name of the first broken invariant. Cost: O(everything); allocates. For tests and
  /// debugging.
  const char* check_invariants() const noexcept { return detail::check(*core_); }

 private:
  using core_type = detail::core<Traits>;
  std::unique_ptr<core_type> core_;
  std::unique_ptr<stats_board> board_;
};

/// The cache with the usual parts.
using cache = basic_cache<serving>;
/// A request or branch of it.
using sequence = cache::sequence;

}  // namespace kvcache
