// SPDX-License-Identifier: Apache-2.0
#pragma once
// Counters of a cache, and the board on which any thread may read them while the owner works.
//
// The owner publishes once per step under a sequence lock (Boehm: Can Seqlocks Get Along With Programming
// Language Memory Models?, MSPC 2012, section 4): readers never block him and retry if they met a
// publication.
#include <atomic>
#include <cstdint>
#include <cstring>

namespace kvcache {

/// Invariant: blocks_used + blocks_cached + blocks_free + blocks_moving == blocks_total, in every snapshot.
struct stats {
  uint64_t steps = 0;             ///< end_step calls
  uint64_t sequences_live = 0;    ///< open now
  uint64_t sequences_opened = 0;  ///< by open and fork, ever
  uint64_t tokens_asked = 0;      ///< prompt tokens given to open
  uint64_t tokens_reused = 0;     ///< of these, found in the index
  uint64_t tokens_extended = 0;   ///< slots handed out by extend
  uint64_t nodes = 0;             ///< units in the index now
  uint64_t nodes_stored = 0;      ///< units ever indexed
  uint64_t nodes_evicted = 0;     ///< units evicted to make room
  uint64_t events_lost = 0;       ///< index events that found their log full
  uint64_t blocks_copied = 0;     ///< copies on write
  uint64_t refusals = 0;          ///< calls refused for want of blocks, quota, length or commands
  uint64_t blocks_used = 0;       ///< in some sequence's table, each block once; or reserved
  uint64_t blocks_cached = 0;     ///< only in the index; evictable
  uint64_t blocks_free = 0;       ///< held by nobody
  uint64_t blocks_moving = 0;     ///< on the way to or from another tier
  uint64_t blocks_total = 0;      ///< of all groups
};

/// Single writer, any number of readers, wait-free for the writer.
class stats_board {
 public:
  /// Thread safety: the owner only.
  void publish(const stats& s) noexcept {
    uint64_t v[words];
    std::memcpy(v, &s, sizeof s);
    const uint64_t q = sequence_.load(std::memory_order_relaxed);
    sequence_.store(q + 1, std::memory_order_relaxed);
    for (int i = 0; i < words; ++i) word_[i].store(v[i], std::memory_order_release);
    sequence_.store(q + 2, std::memory_order_release);
  }
  /// The last published counters. Thread safety: any thread.
  stats read() const noexcept {
    for (;;) {
      const uint64_t before = sequence_.load(std::memory_order_acquire);
      uint64_t v[words];
      for (int i = 0; i < words; ++i) v[i] = word_[i].load(std::memory_order_acquire);
      if ((before & 1) == 0 && sequence_.load(std::memory_order_relaxed) == before) {
        stats s;
        std::memcpy(&s, v, sizeof s);
        return s;
      }
    }
  }

 private:
  static constexpr int words = sizeof(stats) / 8;
  static_assert(sizeof(stats) % 8 == 0);
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> word_[words] = {};
};

}  // namespace kvcache
