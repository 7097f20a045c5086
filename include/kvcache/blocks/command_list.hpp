// SPDX-License-Identifier: Apache-2.0
#pragma once
// The byte movements of a step, in hazard stages. The control plane moves no bytes: it queues kvc_command
// entries, and the data plane (CPU, CUDA or an engine's own) runs them before the step's appends. Commands of
// one stage touch disjoint blocks in every way that matters, so a stage may run in any order, or as one
// kernel launch per kind.
//
//   copy X→Y      stage 0        X is freed and handed out again before the list has run:
//   copy Z→X      stage 1        the write to X waits for the read of X, and no source needs to be pinned
//
// Spaces: blocks of group g are space 2g, its open blocks (lossy formats) are space 2g + 1.
#include <algorithm>
#include <cstdint>
#include <span>

#include "kvcache/core/config.hpp"
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"
#include "kvcache/kvcache.h"

namespace kvcache {

/// Commands queued since the last clear. Cost: O(1) per command. Memory: 4 bytes per block of every space.
class command_list {
 public:
  /// Most commands between two steps.
  static constexpr int32_t max_capacity =
      65535;  // a stage number is 16 bits, and each command adds at most one

  /// `blocks_per_space[s]` ids in space s. Fails: bad_argument, out_of_memory; then the list is unchanged.
  status create(std::span<const int32_t> blocks_per_space, int32_t capacity) noexcept;
  /// True if `n` more commands fit.
  bool room(int32_t n) const noexcept { return int64_t{size_} + n <= static_cast<int64_t>(list_.size()); }
  /// Queues `op` from `src` (or no_block) to `dst`. Requires: room(1).
  void add(int32_t op, int32_t group, size_t src_space, block_id src, size_t dst_space, block_id dst,
           int32_t tokens, int32_t arg = 0) noexcept;
  /// The commands in the order in which they were queued; stages are not sorted. Valid until the next call.
  std::span<const kvc_command> view() const noexcept { return {list_.data(), static_cast<size_t>(size_)}; }
  /// Commands queued.
  int32_t size() const noexcept { return size_; }
  /// Stages they need: every command's stage is in [0, stages()).
  int32_t stages() const noexcept { return stages_; }
  /// Forgets all of them and what they touched. Cost: O(commands).
  void clear() noexcept;

 private:
  struct hazard {
    uint16_t written, read;  // stage + 1 of the last writer and reader since the last clear
  };
  struct pair {
    size_t src, dst;  // hazards of one command
  };

  fixed_array<kvc_command> list_;
  fixed_array<hazard> hazard_;
  fixed_array<pair> touched_;  // of the commands in list_
  fixed_array<size_t> base_;
  int32_t size_ = 0;
  int32_t stages_ = 0;
};

inline status command_list::create(std::span<const int32_t> blocks_per_space, int32_t capacity) noexcept {
  if (capacity < 1 || capacity > max_capacity) return {errc::bad_argument, "max_commands", capacity};
  command_list c;
  size_t total = 0;
  if (!c.base_.create(blocks_per_space.size())) return {errc::out_of_memory, "max_commands", capacity};
  for (size_t i = 0; i < blocks_per_space.size(); ++i) {
    c.base_[i] = total;
    total += static_cast<size_t>(blocks_per_space[i]);
  }
  if (!c.hazard_.create(total) || !c.list_.create(static_cast<size_t>(capacity)) ||
      !c.touched_.create(static_cast<size_t>(capacity))) {
    return {errc::out_of_memory, "max_commands", capacity};
  }
  *this = std::move(c);
  return {};
}

inline void command_list::add(int32_t op, int32_t group, size_t src_space, block_id src, size_t dst_space,
                              block_id dst, int32_t tokens, int32_t arg) noexcept {
  if (!KVCACHE_CONTRACT(room(1))) return;
  const size_t to = base_[dst_space] + index(dst);
  const size_t from = src == no_block ? to : base_[src_space] + index(src);
  hazard& d = hazard_[to];
  hazard& s = hazard_[from];
  const uint16_t stage = std::max({s.written, d.written, d.read});
  const auto next = static_cast<uint16_t>(stage + 1);
  d.written = next;
  if (src != no_block) s.read = std::max(s.read, next);
  touched_[static_cast<size_t>(size_)] = {from, to};
  stages_ = std::max<int32_t>(stages_, next);
  list_[static_cast<size_t>(size_++)] = {static_cast<uint8_t>(op),
                                         static_cast<uint8_t>(group),
                                         stage,
                                         tokens,
                                         src == no_block ? raw(dst) : raw(src),
                                         raw(dst),
                                         arg};
}

inline void command_list::clear() noexcept {
  for (const pair& p : touched_.view().first(static_cast<size_t>(size_)))
    hazard_[p.src] = hazard_[p.dst] = {};
  size_ = stages_ = 0;
}

}  // namespace kvcache
