// SPDX-License-Identifier: Apache-2.0
#pragma once
// The blocks of all groups and the accounts that are charged for them. Who allocated a block owns it until it
// is free again; an account is charged for what it owns, and what of that lies in the cache is what it could
// give back. Seals wait here too (seals.hpp): a block that is freed takes its seal with it, or a new owner
// would be overwritten, and what a seal reads stays taken until the step ends.
#include <array>
#include <cstdint>
#include <span>

#include "kvcache/blocks/block_pool.hpp"
#include "kvcache/cache/config.hpp"
#include "kvcache/cache/seals.hpp"
#include "kvcache/core/fixed_array.hpp"

namespace kvcache::detail {

/// Invariant: sum of charged == blocks that are not free; an account's cached <= charged.
template <block_allocator A>
class pools {
 public:
  status create(const geometry& geo, std::span<const int32_t> limits) noexcept;

  int32_t groups() const noexcept { return groups_; }
  const A& pool(int32_t g) const noexcept { return pool_[static_cast<size_t>(g)]; }
  A& pool(int32_t g) noexcept { return pool_[static_cast<size_t>(g)]; }
  block_pool& open(int32_t g) noexcept { return open_[static_cast<size_t>(g)]; }
  const block_pool& open(int32_t g) const noexcept { return open_[static_cast<size_t>(g)]; }

  int32_t accounts() const noexcept { return static_cast<int32_t>(account_.size()); }
  int32_t limit(int32_t a) const noexcept { return account_[static_cast<size_t>(a)].limit; }
  int32_t charged(int32_t a) const noexcept { return account_[static_cast<size_t>(a)].charged; }
  int32_t cached(int32_t a) const noexcept { return account_[static_cast<size_t>(a)].cached; }
  int32_t owner(int32_t g, block_id b) const noexcept { return record(g, b).owner; }

  /// Whether a block of a lossy format holds what its open form holds, at the latest when the step attends:
  /// its seal command was queued, and nobody was to write into the open form since.
  bool sealed(int32_t g, block_id b) const noexcept { return record(g, b).sealed; }
  void set_sealed(int32_t g, block_id b, bool sealed) noexcept {
    owner_[static_cast<size_t>(g)][index(b)].sealed = sealed;
  }
  /// The seals of this step, to be run inside the layers.
  const seal_list& seals() const noexcept { return seals_; }
  /// Queues the packing of `open` into `packed` inside this step.
  void add_seal(int32_t g, block_id open_form, block_id packed, int32_t tokens, int32_t exempt) noexcept {
    seals_.add(g, open_form, packed, tokens, exempt);
    open(g).share({&open_form, 1});
    set_sealed(g, packed, true);
  }
  /// Takes the seal of `packed` out if one waits: it is freed, or is to be written to again.
  void cancel_seal(int32_t g, block_id packed) noexcept {
    if (!seals_.waits(g, packed)) return;
    const block_id open_form = seals_.remove(g, packed);
    open(g).release({&open_form, 1});
    set_sealed(g, packed, false);
  }
  /// The seals have been run.
  void clear_seals() noexcept {
    for (const kvc_command& c : seals_.view()) {
      const block_id open_form{c.src};
      open(c.group).release({&open_form, 1});
    }
    seals_.clear();
  }

  /// Takes blocks for account `a`. Requires: admitted and made room for.
  void take(int32_t g, int32_t a, std::span<block_id> out) noexcept {
    if (!KVCACHE_CONTRACT(bool(pool(g).allocate(out)))) return;
    for (const block_id b : out) owner_[static_cast<size_t>(g)][index(b)] = {a, false};
    account_[static_cast<size_t>(a)].charged += static_cast<int32_t>(out.size());
  }
  void share(int32_t g, std::span<const block_id> in) noexcept {
    if (A::shareable && accounts() == 1) {  // then the account's numbers are the pool's
      const int32_t before = pool(g).cached_blocks();
      pool(g).share(in);
      account_[0].cached -= before - pool(g).cached_blocks();
      return;
    }
    for (const block_id b : in) {
      if (b == no_block) continue;
      const bool was_cached = pool(g).shares(b) == 0;
      pool(g).share({&b, 1});
      if (was_cached) --owner_of(g, b).cached;
    }
  }
  void release(int32_t g, std::span<const block_id> in) noexcept {
    if (A::shareable && accounts() == 1 && !seals_.watches(g)) {
      const int32_t cached = pool(g).cached_blocks();
      const int32_t free = pool(g).free_blocks();
      pool(g).release(in);
      account_[0].cached += pool(g).cached_blocks() - cached;
      account_[0].charged -= pool(g).free_blocks() - free;
      return;
    }
    for (const block_id b : in) {
      if (b == no_block) continue;
      pool(g).release({&b, 1});
      if (pool(g).shares(b) != 0) continue;
      account& a = owner_of(g, b);
      if (pool(g).indexed(b)) {
        ++a.cached;
      } else {
        --a.charged;
        cancel_seal(g, b);
      }
    }
  }
  /// Gives back a path of blocks, the last one first, so that the first is handed out last.
  void release_backwards(int32_t g, std::span<const block_id> in) noexcept {
    for (size_t i = in.size(); i-- > 0;) release(g, in.subspan(i, 1));
  }
  void unindex(int32_t g, block_id b) noexcept {
    pool(g).unindex(b);
    if (pool(g).shares(b) != 0 || pool(g).indexed(b)) return;
    cancel_seal(g, b);
    account& a = owner_of(g, b);
    --a.cached;
    --a.charged;
  }

 private:
  struct block_record {
    int32_t owner : 31;
    bool sealed : 1;
  };
  const block_record& record(int32_t g, block_id b) const noexcept {
    return owner_[static_cast<size_t>(g)][index(b)];
  }
  struct account {
    int32_t limit, charged, cached;
  };
  account& owner_of(int32_t g, block_id b) noexcept { return account_[static_cast<size_t>(owner(g, b))]; }

  int32_t groups_ = 0;
  std::array<A, max_groups> pool_;
  std::array<block_pool, max_groups> open_;
  std::array<fixed_array<block_record>, max_groups> owner_;
  fixed_array<account> account_;
  seal_list seals_;
};

template <block_allocator A>
status pools<A>::create(const geometry& geo, std::span<const int32_t> limits) noexcept {
  groups_ = geo.groups;
  if (!account_.create(limits.empty() ? 1 : limits.size())) return {errc::out_of_memory, "account_limits"};
  for (size_t i = 0; i < account_.size(); ++i) {
    const int32_t limit = limits.empty() ? INT32_MAX : limits[i];
    if (limit < 0) return {errc::bad_argument, "account_limits", limit};
    account_[i] = {limit, 0, 0};
  }
  for (int32_t g = 0; g < groups_; ++g) {
    const group_geometry& x = geo.group[g];
    if (status s = pool(g).create(blocks{x.total}, x.reserve_blocks); !s) return s;
    if (status s = open(g).create(blocks{x.open}); !s) return s;
    if (!owner_[static_cast<size_t>(g)].create(static_cast<size_t>(x.total))) {
      return {errc::out_of_memory, "total", x.total};
    }
  }
  return seals_.create(geo);
}

}  // namespace kvcache::detail
