// SPDX-License-Identifier: Apache-2.0
#pragma once
// Adaptor that keeps a second, naive record of every block and compares: for debugging an engine, or an
// allocator of one's own. A difference is a contract violation; a call that breaks the contract does not
// reach the allocator.
#include <utility>

#include "kvcache/blocks/concept.hpp"
#include "kvcache/core/config.hpp"
#include "kvcache/core/fixed_array.hpp"

namespace kvcache {

/// Wraps an allocator and checks both sides of the contract. Cost: O(1) per block on top. Memory: 8 bytes per
/// block.
template <block_allocator A>
class checked {
 public:
  static constexpr bool shareable = A::shareable;  ///< as the allocator inside

  /// Starts over, the record included. Fails: as the allocator inside, and out_of_memory for the record.
  status create(blocks n, int32_t reserve = 0) noexcept {
    fixed_array<record> fresh;
    if (n.count > 0 && !fresh.create(static_cast<size_t>(n.count))) {
      return {errc::out_of_memory, "blocks", n.count};
    }
    if (status s = up_.create(n, reserve); !s) return s;
    shadow_ = std::move(fresh);
    used_ = 0;
    cached_ = 0;
    return {};
  }
  /// Asks the allocator inside.
  status admit(int32_t n) noexcept { return up_.admit(n); }
  /// Allocates; a violation if an id handed out was held already.
  status allocate(std::span<block_id> out) noexcept {
    const status s = up_.allocate(out);
    if (!s) return s;
    for (const block_id b : out) {
      if (!KVCACHE_CONTRACT(known(b) && at(b).shares == 0 && at(b).nodes == 0)) continue;
      at(b).shares = 1;
      ++used_;
    }
    compare();
    return s;
  }
  /// Shares those blocks that are held; the others are violations and are left alone.
  void share(std::span<const block_id> in) noexcept {
    for (const block_id b : in) {
      if (b == no_block) continue;
      if (!KVCACHE_CONTRACT(live(b))) continue;
      if (at(b).shares++ == 0) ++used_, --cached_;
      up_.share({&b, 1});
    }
    compare();
  }
  /// Releases those blocks that have a share; the others are violations and are left alone.
  void release(std::span<const block_id> in) noexcept {
    for (const block_id b : in) {
      if (b == no_block) continue;
      if (!KVCACHE_CONTRACT(known(b) && at(b).shares > 0)) continue;
      if (--at(b).shares == 0) --used_, cached_ += at(b).nodes > 0;
      up_.release({&b, 1});
    }
    compare();
  }
  /// Indexes a block that is held; else a violation, and nothing happens.
  void index(block_id b) noexcept {
    if (!KVCACHE_CONTRACT(live(b))) return;
    ++at(b).nodes;
    up_.index(b);
    compare();
  }
  /// Unindexes a block that some node holds; else a violation, and nothing happens.
  void unindex(block_id b) noexcept {
    if (!KVCACHE_CONTRACT(known(b) && at(b).nodes > 0)) return;
    if (--at(b).nodes == 0 && at(b).shares == 0) --cached_;
    up_.unindex(b);
    compare();
  }
  // Counters are those of the allocator inside.
  int32_t shares(block_id b) const noexcept { return up_.shares(b); }     ///< tables that hold `b`
  bool indexed(block_id b) const noexcept { return up_.indexed(b); }      ///< whether a node holds `b`
  bool immutable(block_id b) const noexcept { return up_.immutable(b); }  ///< whether a writer must copy `b`
  int32_t free_blocks() const noexcept { return up_.free_blocks(); }      ///< held by nobody
  int32_t used_blocks() const noexcept { return up_.used_blocks(); }      ///< in some table
  int32_t cached_blocks() const noexcept { return up_.cached_blocks(); }  ///< only in nodes
  int32_t total_blocks() const noexcept { return up_.total_blocks(); }    ///< sum of the three

 private:
  struct record {
    int32_t shares;
    int32_t nodes;
  };
  record& at(block_id b) noexcept { return shadow_[kvcache::index(b)]; }
  const record& at(block_id b) const noexcept { return shadow_[kvcache::index(b)]; }
  bool known(block_id b) const noexcept { return kvcache::index(b) < shadow_.size(); }
  bool live(block_id b) const noexcept { return known(b) && (at(b).shares > 0 || at(b).nodes > 0); }
  void compare() const noexcept {
    (void)KVCACHE_CONTRACT(up_.cached_blocks() == cached_);
    // A reserving allocator holds back whole regions, so it may count more as used than was asked for, never
    // less.
    (void)KVCACHE_CONTRACT(up_.used_blocks() >= used_);
    (void)KVCACHE_CONTRACT(up_.used_blocks() + up_.cached_blocks() + up_.free_blocks() == up_.total_blocks());
  }

  A up_;
  fixed_array<record> shadow_;
  int32_t used_ = 0;
  int32_t cached_ = 0;
};

}  // namespace kvcache
