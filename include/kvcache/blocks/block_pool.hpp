// SPDX-License-Identifier: Apache-2.0
#pragma once
// The production allocator: a stack of free ids and one word per block.
//
//   meta word:  | 63 ........ 32   | 31 ............... 0   |
//               | shares (tables)  | nodes that index it    |
//
// The free order is a contract: fresh ids ascend, and the block released last is handed out first (it is the
// one most likely still in a cache).
#include "kvcache/blocks/concept.hpp"
#include "kvcache/core/config.hpp"
#include "kvcache/core/fixed_array.hpp"

namespace kvcache {

/// Hands out and counts the blocks of one group. Cost: O(1) per block. Memory: 12 bytes per block.
class block_pool {
 public:
  static constexpr bool shareable = true;  ///< a block may be in many tables and in the index

  /// Starts over with `n` free blocks. Fails: bad_argument, out_of_memory; then the pool is unchanged.
  status create(blocks n, int32_t reserve = 0) noexcept;
  /// Whether `n` blocks are free or cached. Fails: out_of_blocks, the value being how many are missing.
  status admit(int32_t n) const noexcept {
    const int64_t have = int64_t{top_} + cached_;
    return n <= have ? status{} : status{errc::out_of_blocks, "blocks", n - have};
  }
  /// Fills `out` with free blocks, one share each. Fails: out_of_blocks; then none is taken.
  status allocate(std::span<block_id> out) noexcept;
  /// One more share for each block of `in`; a cached block becomes used again.
  void share(std::span<const block_id> in) noexcept;
  /// One share less for each; a block without shares becomes cached if a node holds it, else free.
  void release(std::span<const block_id> in) noexcept;
  /// One more node holds `b`.
  void index(block_id b) noexcept;
  /// One node less holds `b`; it becomes free if nobody shares it either.
  void unindex(block_id b) noexcept;

  /// Tables that hold `b`.
  int32_t shares(block_id b) const noexcept { return static_cast<int32_t>(at(b) >> 32); }
  /// Whether a node holds `b`.
  bool indexed(block_id b) const noexcept { return static_cast<uint32_t>(at(b)) != 0; }
  /// Whether a writer must copy `b` first: it is shared or indexed.
  bool immutable(block_id b) const noexcept { return at(b) > one_share; }
  /// Blocks that nobody holds.
  int32_t free_blocks() const noexcept { return top_; }
  /// Blocks in some table, each counted once.
  int32_t used_blocks() const noexcept { return used_; }
  /// Blocks only in nodes: free for whoever evicts these.
  int32_t cached_blocks() const noexcept { return cached_; }
  /// Blocks of the pool; ids are in [0, total_blocks()).
  int32_t total_blocks() const noexcept { return static_cast<int32_t>(meta_.size()); }
  /// Free ids, the next one to be handed out last. For tests and dumps.
  std::span<const block_id> free_list() const noexcept { return {free_.data(), static_cast<size_t>(top_)}; }

 private:
  static constexpr uint64_t one_share = uint64_t{1} << 32;

  uint64_t& at(block_id b) noexcept { return meta_[kvcache::index(b)]; }
  uint64_t at(block_id b) const noexcept { return meta_[kvcache::index(b)]; }
  bool valid(block_id b) const noexcept { return kvcache::index(b) < meta_.size(); }
  void push(block_id b) noexcept { free_[static_cast<size_t>(top_++)] = b; }

  fixed_array<block_id> free_;
  fixed_array<uint64_t> meta_;
  int32_t top_ = 0;
  int32_t used_ = 0;
  int32_t cached_ = 0;
};

static_assert(block_allocator<block_pool>);

inline status block_pool::create(blocks n, int32_t) noexcept {
  if (n.count < 0) return {errc::bad_argument, "blocks", n.count};
  fixed_array<block_id> fresh_free;
  fixed_array<uint64_t> fresh_meta;
  const auto size = static_cast<size_t>(n.count);
  if (!fresh_free.create(size) || !fresh_meta.create(size)) return {errc::out_of_memory, "blocks", n.count};
  free_ = std::move(fresh_free);
  meta_ = std::move(fresh_meta);
  top_ = used_ = cached_ = 0;
  for (int32_t i = n.count; i-- > 0;) push(block_id{i});
  return {};
}

inline status block_pool::allocate(std::span<block_id> out) noexcept {
  const auto n = static_cast<int64_t>(out.size());
  if (n > top_) return {errc::out_of_blocks, "blocks", n - top_};
  const block_id* next = free_.data() + top_;
  for (block_id& b : out) {
    b = *--next;
    at(b) = one_share;
  }
  top_ -= static_cast<int32_t>(n);
  used_ += static_cast<int32_t>(n);
  return {};
}

inline void block_pool::share(std::span<const block_id> in) noexcept {
  int32_t found = 0;  // in the cache; counted here, since a counter in memory would tie each step to the last
  for (const block_id b : in) {
    if (b == no_block) continue;
    if (!KVCACHE_CONTRACT(valid(b) && at(b) != 0)) continue;
    found += at(b) < one_share;
    at(b) += one_share;
  }
  cached_ -= found;
  used_ += found;
}

inline void block_pool::release(std::span<const block_id> in) noexcept {
  int32_t unused = 0;
  int32_t cached = 0;
  for (const block_id b : in) {
    if (b == no_block) continue;
    if (!KVCACHE_CONTRACT(valid(b) && at(b) >= one_share)) continue;
    const uint64_t left = at(b) -= one_share;
    unused += left < one_share;
    if (left != 0) {
      cached += left < one_share;
    } else {
      push(b);
    }
  }
  used_ -= unused;
  cached_ += cached;
}

inline void block_pool::index(block_id b) noexcept {
  if (KVCACHE_CONTRACT(valid(b) && at(b) != 0)) ++at(b);
}

inline void block_pool::unindex(block_id b) noexcept {
  if (!KVCACHE_CONTRACT(valid(b) && indexed(b))) return;
  if (--at(b) == 0) {
    --cached_;
    push(b);
  }
}

}  // namespace kvcache
