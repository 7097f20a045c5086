// SPDX-License-Identifier: Apache-2.0
#pragma once
// The packing that a step does inside its layers: a block that the step's own tokens make final is sealed
// after the layer's append and before its attention, while its open form stays readable for the queries that
// come before. So seals wait in a list of their own, one per block, in any order.
//
//   list_   | seal | seal | seal |      in_step groups only, at most one per open block
//   place_  packed block -> 1 + where its seal waits, 0 = none
#include <array>
#include <cstdint>
#include <span>

#include "kvcache/cache/config.hpp"
#include "kvcache/core/config.hpp"
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/kvcache.h"

namespace kvcache::detail {

/// Seals queued since the last clear. Cost: O(1) each to add and to take out. Memory: 20 bytes per open block
/// and 4 per packed block of the groups that seal in their step.
class seal_list {
 public:
  status create(const geometry& geo) noexcept {
    size_t room = 0;
    for (int32_t g = 0; g < geo.groups; ++g) {
      const group_geometry& x = geo.group[g];
      if (!x.seals_in_step()) continue;
      room += static_cast<size_t>(x.open);
      if (!place_[static_cast<size_t>(g)].create(static_cast<size_t>(x.total))) {
        return {errc::out_of_memory, "total", x.total};
      }
    }
    if (!list_.create(room)) return {errc::out_of_memory, "open", static_cast<int64_t>(room)};
    size_ = 0;
    return {};
  }

  /// Requires: no seal of `packed` waits.
  void add(int32_t g, block_id open, block_id packed, int32_t tokens, int32_t exempt) noexcept {
    if (!KVCACHE_CONTRACT(size_ < list_.size() && !waits(g, packed))) return;
    list_[size_++] = {KVC_OP_SEAL, static_cast<uint8_t>(g), 0, tokens, raw(open), raw(packed), exempt};
    place(g, packed) = static_cast<int32_t>(size_);
  }
  /// Whether a seal of `packed` waits; false for groups that do not seal in their step.
  bool waits(int32_t g, block_id packed) const noexcept {
    return size_ != 0 && place_[static_cast<size_t>(g)].size() != 0 &&
           place_[static_cast<size_t>(g)][index(packed)] != 0;
  }
  /// Whether any seal of the group may wait.
  bool watches(int32_t g) const noexcept { return size_ != 0 && place_[static_cast<size_t>(g)].size() != 0; }
  /// Takes the seal of `packed` out; returns the open block it would have read. The last one moves to its
  /// place. Requires: it waits.
  block_id remove(int32_t g, block_id packed) noexcept {
    int32_t& at = place(g, packed);
    kvc_command& gone = list_[static_cast<size_t>(at - 1)];
    const block_id open{gone.src};
    gone = list_[--size_];
    place(gone.group, block_id{gone.dst}) = at;
    at = 0;
    return open;
  }
  /// Forgets all of them. Cost: O(seals).
  void clear() noexcept {
    for (const kvc_command& c : view()) place(c.group, block_id{c.dst}) = 0;
    size_ = 0;
  }
  std::span<const kvc_command> view() const noexcept { return {list_.data(), size_}; }

 private:
  int32_t& place(int32_t g, block_id packed) noexcept {
    return place_[static_cast<size_t>(g)][index(packed)];
  }

  fixed_array<kvc_command> list_;
  std::array<fixed_array<int32_t>, max_groups> place_;
  size_t size_ = 0;
};

}  // namespace kvcache::detail
