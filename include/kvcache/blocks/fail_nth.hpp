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
  static constexpr bool shareable = A::shareable;

  /// Arms the adaptor: `n` admissions pass, then one is refused, or every later one if `permanent`.
  /// n < 0 disarms.
  void arm(int64_t n, bool permanent = false) noexcept {
    left_ = n;
    permanent_ = permanent;
  }
  /// Admissions refused so far.
  int64_t refused() const noexcept { return refused_; }

  status create(blocks n, int32_t reserve = 0) noexcept { return up_.create(n, reserve); }
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
  status allocate(std::span<block_id> out) noexcept { return up_.allocate(out); }
  void share(std::span<const block_id> in) noexcept { up_.share(in); }
  void release(std::span<const block_id> in) noexcept { up_.release(in); }
  void index(block_id b) noexcept { up_.index(b); }
  void unindex(block_id b) noexcept { up_.unindex(b); }
  int32_t shares(block_id b) const noexcept { return up_.shares(b); }
  bool indexed(block_id b) const noexcept { return up_.indexed(b); }
  bool immutable(block_id b) const noexcept { return up_.immutable(b); }
  int32_t free_blocks() const noexcept { return up_.free_blocks(); }
  int32_t used_blocks() const noexcept { return up_.used_blocks(); }
  int32_t cached_blocks() const noexcept { return up_.cached_blocks(); }
  int32_t total_blocks() const noexcept { return up_.total_blocks(); }

 private:
  A up_;
  int64_t left_ = -1;
  int64_t refused_ = 0;
  bool permanent_ = false;
};

}  // namespace kvcache
