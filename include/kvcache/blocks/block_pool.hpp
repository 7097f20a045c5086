// SPDX-License-Identifier: Apache-2.0
#pragma once
// The production allocator: a stack of free ids and one word per block.
//
//   meta word:  | 31 ............ 1 | 0       |
//               | number of shares  | indexed |
//
// The free order is a contract: fresh ids ascend, and the block released last is handed out first (it is the
// one most likely still in a cache).
#include "kvcache/blocks/concept.hpp"
#include "kvcache/core/config.hpp"
#include "kvcache/core/fixed_array.hpp"

namespace kvcache {

/// Hands out and counts the blocks of one group. Cost: O(1) per block. Memory: 8 bytes per block.
class block_pool {
 public:
  static constexpr bool shareable = true;

  /// Starts over with `n` free blocks. Fails: bad_argument, out_of_memory; then the pool is unchanged.
  status create(blocks n, int32_t reserve = 0) noexcept;
  status admit(int32_t n) const noexcept {
    const int64_t have = int64_t{top_} + cached_;
    return n <= have ? status{} : status{errc::out_of_blocks, "blocks", n - have};
  }
  status allocate(std::span<block_id> out) noexcept;
  void share(std::span<const block_id> in) noexcept;
  void release(std::span<const block_id> in) noexcept;
  void set_indexed(block_id b, bool on) noexcept;

  int32_t shares(block_id b) const noexcept { return static_cast<int32_t>(meta_[index(b)] >> 1); }
  bool indexed(block_id b) const noexcept { return (meta_[index(b)] & 1) != 0; }
  bool immutable(block_id b) const noexcept { return meta_[index(b)] > 3 || (meta_[index(b)] & 1) != 0; }
  int32_t free_blocks() const noexcept { return top_; }
  int32_t cached_blocks() const noexcept { return cached_; }
  int32_t total_blocks() const noexcept { return static_cast<int32_t>(meta_.size()); }
  /// Free ids, the next one to be handed out last. For tests and dumps.
  std::span<const block_id> free_list() const noexcept { return {free_.data(), static_cast<size_t>(top_)}; }

 private:
  bool valid(block_id b) const noexcept { return index(b) < meta_.size(); }
  void push(block_id b) noexcept { free_[static_cast<size_t>(top_++)] = b; }

  fixed_array<block_id> free_;
  fixed_array<uint32_t> meta_;
  int32_t top_ = 0;
  int32_t cached_ = 0;
};

static_assert(block_allocator<block_pool>);

inline status block_pool::create(blocks n, int32_t) noexcept {
  if (n.count < 0) return {errc::bad_argument, "blocks", n.count};
  fixed_array<block_id> fresh_free;
  fixed_array<uint32_t> fresh_meta;
  const auto size = static_cast<size_t>(n.count);
  if (!fresh_free.create(size) || !fresh_meta.create(size)) return {errc::out_of_memory, "blocks", n.count};
  free_ = std::move(fresh_free);
  meta_ = std::move(fresh_meta);
  top_ = cached_ = 0;
  for (int32_t i = n.count; i-- > 0;) push(block_id{i});
  return {};
}

inline status block_pool::allocate(std::span<block_id> out) noexcept {
  const auto n = static_cast<int64_t>(out.size());
  if (n > top_) return {errc::out_of_blocks, "blocks", n - top_};
  const block_id* next = free_.data() + top_;
  for (block_id& b : out) {
    b = *--next;
    meta_[index(b)] = 2;
  }
  top_ -= static_cast<int32_t>(n);
  return {};
}

inline void block_pool::share(std::span<const block_id> in) noexcept {
  for (const block_id b : in) {
    if (b == no_block) continue;
    if (!KVCACHE_CONTRACT(valid(b) && meta_[index(b)] != 0)) continue;
    cached_ -= meta_[index(b)] == 1;
    meta_[index(b)] += 2;
  }
}

inline void block_pool::release(std::span<const block_id> in) noexcept {
  for (const block_id b : in) {
    if (b == no_block) continue;
    if (!KVCACHE_CONTRACT(valid(b) && meta_[index(b)] > 1)) continue;
    const uint32_t left = meta_[index(b)] -= 2;
    if (left == 0) push(b);
    cached_ += left == 1;
  }
}

inline void block_pool::set_indexed(block_id b, bool on) noexcept {
  if (!KVCACHE_CONTRACT(valid(b) && meta_[index(b)] != 0)) return;
  uint32_t& m = meta_[index(b)];
  if (on) {
    m |= 1;
  } else if (m == 1) {
    m = 0;
    --cached_;
    push(b);
  } else {
    m &= ~1u;
  }
}

}  // namespace kvcache
