// SPDX-License-Identifier: Apache-2.0
#pragma once
// The reservation baseline that paging replaces: every sequence gets one region of consecutive blocks, long
// enough for the longest text, for its whole life. Nothing is shared and nothing is indexed. It exists so
// that a user can measure what paging buys him with everything else equal.
//
//   region 0              region 1              region 2
//   | 0 1 2 ... r-1 |     | r ... 2r-1 |        | 2r ... 3r-1 |     one sequence each
#include "kvcache/blocks/concept.hpp"
#include "kvcache/core/config.hpp"
#include "kvcache/core/fixed_array.hpp"

namespace kvcache {

/// Hands out whole regions of consecutive blocks. Use it with `group_config::reserve`, the tokens of a
/// region, so that a sequence asks once. Cost: O(1) per block. Memory: 8 bytes per region and 1 per block.
class contiguous {
 public:
  static constexpr bool shareable = false;  ///< a block belongs to one sequence, for its whole life

  /// `reserve` = blocks of a region. Fails: bad_argument unless it divides the number of blocks;
  /// out_of_memory.
  status create(blocks n, int32_t reserve) noexcept {
    if (reserve < 1) return {errc::bad_argument, "reserve", reserve};
    if (n.count < 0 || n.count % reserve != 0) return {errc::bad_argument, "blocks", n.count};
    fixed_array<int32_t> fresh_free;
    fixed_array<int32_t> fresh_held;
    fixed_array<uint8_t> fresh_used;
    const auto regions = static_cast<size_t>(n.count / reserve);
    if (!fresh_free.create(regions) || !fresh_held.create(regions) ||
        !fresh_used.create(static_cast<size_t>(n.count))) {
      return {errc::out_of_memory, "blocks", n.count};
    }
    free_ = std::move(fresh_free);
    held_ = std::move(fresh_held);
    used_ = std::move(fresh_used);
    region_ = reserve;
    top_ = used_regions_ = 0;
    for (auto i = static_cast<int32_t>(regions); i-- > 0;) free_[static_cast<size_t>(top_++)] = i;
    return {};
  }
  /// Whether a region is free. Fails: out_of_blocks; unsupported unless `n` is 0 or the blocks of a region.
  status admit(int32_t n) const noexcept {
    if (n == 0) return {};
    if (n != region_) return {errc::unsupported, "contiguous", n};
    return top_ > 0 ? status{} : status{errc::out_of_blocks, "blocks", n};
  }
  /// Fills `out` with the ids of a free region, ascending. Fails: as admit; then nothing is taken.
  status allocate(std::span<block_id> out) noexcept {
    if (out.empty()) return {};
    if (status s = admit(static_cast<int32_t>(out.size())); !s) return s;
    const int32_t region = free_[static_cast<size_t>(--top_)];
    held_[static_cast<size_t>(region)] = region_;
    ++used_regions_;
    for (int32_t i = 0; i < region_; ++i) {
      out[static_cast<size_t>(i)] = block_id{region * region_ + i};
      used_[static_cast<size_t>(region * region_ + i)] = 1;
    }
    return {};
  }
  /// A violation: nothing is shared here.
  void share(std::span<const block_id> in) noexcept { (void)KVCACHE_CONTRACT(in.empty()); }
  /// Gives blocks back; their region is free when the last of them has come.
  void release(std::span<const block_id> in) noexcept {
    for (const block_id b : in) {
      if (b == no_block) continue;
      if (!KVCACHE_CONTRACT(kvcache::index(b) < used_.size() && used_[kvcache::index(b)] != 0)) continue;
      used_[kvcache::index(b)] = 0;
      const int32_t region = raw(b) / region_;
      if (--held_[static_cast<size_t>(region)] != 0) continue;
      --used_regions_;
      free_[static_cast<size_t>(top_++)] = region;
    }
  }
  void index(block_id) noexcept { (void)KVCACHE_CONTRACT(!"indexable"); }    ///< a violation
  void unindex(block_id) noexcept { (void)KVCACHE_CONTRACT(!"indexable"); }  ///< a violation
  /// 1 while a sequence holds `b`, else 0.
  int32_t shares(block_id b) const noexcept { return used_[kvcache::index(b)]; }
  bool indexed(block_id) const noexcept { return false; }    ///< never
  bool immutable(block_id) const noexcept { return false; }  ///< never: who holds a block may write it
  /// Blocks of the regions that nobody holds.
  int32_t free_blocks() const noexcept { return top_ * region_; }
  /// Whole regions, as long as any of their blocks is held: a reservation is use.
  int32_t used_blocks() const noexcept { return used_regions_ * region_; }
  int32_t cached_blocks() const noexcept { return 0; }  ///< none: nothing outlives its sequence
  /// Blocks of all regions.
  int32_t total_blocks() const noexcept { return static_cast<int32_t>(used_.size()); }

 private:
  fixed_array<int32_t> free_;  // regions
  fixed_array<int32_t> held_;  // blocks of a region not yet released
  fixed_array<uint8_t> used_;
  int32_t region_ = 1;  // blocks
  int32_t top_ = 0;
  int32_t used_regions_ = 0;
};

static_assert(block_allocator<contiguous>);

}  // namespace kvcache
