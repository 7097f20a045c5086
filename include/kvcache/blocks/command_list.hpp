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
  /// `ids` = numbers of room for the lists of gathers.
  status create(std::span<const int32_t> blocks_per_space, int32_t capacity, int32_t ids = 0) noexcept;
  /// True if `n` more commands fit, gathers with `ids` numbers among them.
  bool room(int32_t n, int32_t ids = 0) const noexcept {
    return int64_t{size_} + n <= static_cast<int64_t>(list_.size()) &&
           int64_t{n_ids_} + ids <= static_cast<int64_t>(ids_.size());
  }
  /// Numbers that a gather from `src` to `dst` blocks takes.
  static constexpr int32_t gather_ids(size_t src, size_t dst) noexcept {
    return 3 + static_cast<int32_t>(src + dst);
  }
  /// Queues `op` from `src` (or no_block) to `dst`. Requires: room(1).
  void add(int32_t op, int32_t group, size_t src_space, block_id src, size_t dst_space, block_id dst,
           int32_t tokens, int32_t arg = 0) noexcept;
  /// Queues KVC_OP_GATHER: slot t of the run of blocks `dst` becomes one of the slots of the run `src`, for
  /// t < `tokens`; which one says keep-list `keep` when the command runs. A block may be in both, in `dst`
  /// not later than in `src`. Requires: room(1, gather_ids(...)).
  void add_gather(int32_t group, size_t space, std::span<const block_id> src, std::span<const block_id> dst,
                  int32_t keep, int32_t tokens) noexcept;
  /// Payload of the gathers: what `kvc_run::ids` wants. Valid until the next call.
  std::span<const int32_t> ids() const noexcept { return {ids_.data(), static_cast<size_t>(n_ids_)}; }
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
  fixed_array<int32_t> ids_;
  int32_t n_ids_ = 0;
  int32_t size_ = 0;
  int32_t stages_ = 0;
};

inline status command_list::create(std::span<const int32_t> blocks_per_space, int32_t capacity,
                                   int32_t ids) noexcept {
  if (ids < 0) return {errc::bad_argument, "ids", ids};
  if (capacity < 1 || capacity > max_capacity) return {errc::bad_argument, "max_commands", capacity};
  command_list c;
  size_t total = 0;
  if (!c.base_.create(blocks_per_space.size())) return {errc::out_of_memory, "max_commands", capacity};
  for (size_t i = 0; i < blocks_per_space.size(); ++i) {
    c.base_[i] = total;
    total += static_cast<size_t>(blocks_per_space[i]);
  }
  if (!c.hazard_.create(total) || !c.list_.create(static_cast<size_t>(capacity)) ||
      !c.touched_.create(static_cast<size_t>(capacity)) || !c.ids_.create(static_cast<size_t>(ids))) {
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

inline void command_list::add_gather(int32_t group, size_t space, std::span<const block_id> src,
                                     std::span<const block_id> dst, int32_t keep, int32_t tokens) noexcept {
  if (!KVCACHE_CONTRACT(room(1, gather_ids(src.size(), dst.size())) && !dst.empty())) return;
  const size_t base = base_[space];
  uint16_t stage = 0;
  for (const block_id b : src) stage = std::max(stage, hazard_[base + index(b)].written);
  for (const block_id b : dst) {
    const hazard& h = hazard_[base + index(b)];
    stage = std::max({stage, h.written, h.read});
  }
  const auto next = static_cast<uint16_t>(stage + 1);
  for (const block_id b : src) {
    hazard& h = hazard_[base + index(b)];
    h.read = std::max(h.read, next);
  }
  for (const block_id b : dst) hazard_[base + index(b)].written = next;
  stages_ = std::max<int32_t>(stages_, next);
  const int32_t at = n_ids_;
  int32_t* p = ids_.data() + at;
  *p++ = static_cast<int32_t>(src.size());
  *p++ = static_cast<int32_t>(dst.size());
  *p++ = keep;
  for (const block_id b : src) *p++ = raw(b);
  for (const block_id b : dst) *p++ = raw(b);
  n_ids_ += gather_ids(src.size(), dst.size());
  touched_[static_cast<size_t>(size_)] = {base, base};
  list_[static_cast<size_t>(size_++)] = {
      KVC_OP_GATHER, static_cast<uint8_t>(group), stage, tokens, raw(dst[0]), raw(dst[0]), at};
}

inline void command_list::clear() noexcept {
  for (size_t i = 0; i < static_cast<size_t>(size_); ++i) {
    const pair& p = touched_[i];
    if (list_[i].op != KVC_OP_GATHER) {
      hazard_[p.src] = hazard_[p.dst] = {};
      continue;
    }
    const int32_t* id = ids_.data() + list_[i].arg;
    for (int32_t k = 0; k < id[0] + id[1]; ++k) hazard_[p.src + static_cast<size_t>(id[3 + k])] = {};
  }
  size_ = stages_ = n_ids_ = 0;
}

}  // namespace kvcache
