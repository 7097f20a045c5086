// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the prefix index did in this step, in order, for whoever mirrors it: a router, a metrics exporter, a
// debugger. The log has a fixed size. When it is full later events are counted as lost, and the mirror has to
// start over from a walk of the tree; nothing is ever dropped silently.
#include <cstdint>
#include <span>

#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/units.hpp"
#include "kvcache/kvcache.h"

namespace kvcache {

/// Events since the last clear. Cost: O(1) each. Memory: 32 bytes per event of capacity.
class event_log {
 public:
  /// Capacity 0 records nothing and loses nothing.
  [[nodiscard]] bool create(int32_t capacity) noexcept {
    size_ = 0;
    lost_ = 0;
    return list_.create(static_cast<size_t>(capacity));
  }
  /// Records one event (KVC_EVENT_*), or counts it as lost when the log is full.
  void add(uint16_t kind, node_id r, node_id parent, int32_t depth, int32_t scope, uint64_t clock) noexcept {
    if (list_.size() == 0) return;
    if (size_ == list_.size()) {
      ++lost_;
      return;
    }
    list_[size_++] = {kind, 0, raw(r), raw(parent), depth, scope, 0, clock};
  }
  /// The events since the last clear, in order.
  std::span<const kvc_event> view() const noexcept { return {list_.data(), size_}; }
  /// Events that did not fit, ever.
  uint64_t lost() const noexcept { return lost_; }
  /// Makes room for the next step; the count of lost ones stays.
  void clear() noexcept { size_ = 0; }

 private:
  fixed_array<kvc_event> list_;
  size_t size_ = 0;
  uint64_t lost_ = 0;
};

}  // namespace kvcache
