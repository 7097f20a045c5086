// SPDX-License-Identifier: Apache-2.0
#pragma once
// Adaptor that refuses one admission or all from one on: the tool with which an engine's tests prove that its
// handling of scarcity loses nothing.
#include <utility>

#include "kvcache/blocks/concept.hpp"

namespace kvcache {

/// Wraps an allocator; the n-th `admit` (n = 0, 1, ...) that asks for at least one block is refused.
template <block_allocator A>
class fail_nth {
 public:
  static constexpr bool shareable = A::shareable;  ///< as the allocator inside

  /// Arms the adaptor: `n` admissions pass, then one is refused, or every later one if `permanent`.
  /// n < 0 disarms.
  void arm(int64_t n, bool permanent = false) noexcept {
    left_ = n;
    permanent_ = permanent;
  }
  /// Admissions refused so far.
  int64_t refused() const noexcept { return refused_; }

  /// Starts the allocator inside over; what was armed stays armed.
  status create(blocks n, int32_t reserve = 0) noexcept { return up_.create(n, reserve); }
  /// Refuses if it is this call's turn, else asks the allocator inside. Fails: out_of_blocks.
  status admit(int32_t n) noexcept {
    if (n > 0 && left_ >= 0) {
      if (left_ == 0) {
        if (!permanent_) left_ = -1;
        ++refused_;
        return {errc::out_of_blocks, "blocks", n};
      }
      --left_;
    }
    return up_.admit(n);
  }
  /// Never refused by the adaptor: after an admission it must not fail.
  status allocate(std::span<block_id> out) noexcept { return up_.allocate(out); }
  // Everything else is the allocator inside.
  void share(std::span<const block_id> in) noexcept { up_.share(in); }      ///< one more share for each
  void release(std::span<const block_id> in) noexcept { up_.release(in); }  ///< one share less for each
  void index(block_id b) noexcept { up_.index(b); }                         ///< one more node holds `b`
  void unindex(block_id b) noexcept { up_.unindex(b); }                     ///< one node less holds `b`
  int32_t shares(block_id b) const noexcept { return up_.shares(b); }       ///< tables that hold `b`
  bool indexed(block_id b) const noexcept { return up_.indexed(b); }        ///< whether a node holds `b`
  bool immutable(block_id b) const noexcept { return up_.immutable(b); }  ///< whether a writer must copy `b`
  int32_t free_blocks() const noexcept { return up_.free_blocks(); }      ///< held by nobody
  int32_t used_blocks() const noexcept { return up_.used_blocks(); }      ///< in some table
  int32_t cached_blocks() const noexcept { return up_.cached_blocks(); }  ///< only in nodes
  int32_t total_blocks() const noexcept { return up_.total_blocks(); }    ///< sum of the three

 private:
  A up_;
  int64_t left_ = -1;
  int64_t refused_ = 0;
  bool permanent_ = false;
};

}  // namespace kvcache
