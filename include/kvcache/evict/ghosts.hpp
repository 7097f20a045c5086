// SPDX-License-Identifier: Apache-2.0
#pragma once
// Texts that went lately, by fingerprint: what a policy knows of nodes that are gone. Two texts with one
// fingerprint are taken for each other, which changes a rank and nothing else.
//
//   oldest ⇄ ... ⇄ newest      entries in one list, found by a table of open addresses
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache::detail {

/// The last `capacity` fingerprints that were added and not taken again. Cost: O(1) each. Memory: 24 bytes
/// per entry.
class ghost_list {
 public:
  /// Starts over, empty. Fails: out_of_memory; then nothing has changed.
  status create(int32_t capacity) noexcept {
    const auto n = static_cast<size_t>(capacity);
    fixed_array<entry> fresh;
    fixed_array<uint32_t> fresh_table;
    if (!fresh.create(n) || !fresh_table.create(2 * n + 1)) {
      return {errc::out_of_memory, "nodes", capacity};
    }
    entry_ = std::move(fresh);
    table_ = std::move(fresh_table);
    size_ = 0;
    free_ = oldest_ = newest_ = -1;
    return {};
  }
  int32_t size() const noexcept { return size_; }
  /// The newest from now on; the oldest one is forgotten if there is no room.
  void add(uint64_t print) noexcept {
    if (entry_.size() == 0) return;
    (void)take(print);
    if (size_ == static_cast<int32_t>(entry_.size())) remove(slot_of(at(oldest_).print));
    const int32_t i = free_ >= 0 ? free_ : size_;
    if (free_ >= 0) free_ = at(free_).next;
    ++size_;
    at(i) = {print, newest_, -1};
    (newest_ < 0 ? oldest_ : at(newest_).next) = i;
    newest_ = i;
    table_[slot_of(print)] = static_cast<uint32_t>(i) + 1;
  }
  /// Whether it was there; it is not afterwards.
  bool take(uint64_t print) noexcept {
    const uint32_t s = slot_of(print);
    if (table_[s] == 0) return false;
    remove(s);
    return true;
  }

 private:
  struct entry {
    uint64_t print;
    int32_t prev, next;  // next also links the free ones
  };
  entry& at(int32_t i) noexcept { return entry_[static_cast<size_t>(i)]; }
  uint32_t home(uint64_t print) const noexcept {
    return static_cast<uint32_t>((mix64(print) >> 32) * table_.size() >> 32);
  }
  uint32_t after(uint32_t s) const noexcept { return s + 1 == table_.size() ? 0 : s + 1; }
  // Where it is, or would be.
  uint32_t slot_of(uint64_t print) noexcept {
    uint32_t s = home(print);
    while (table_[s] != 0 && at(static_cast<int32_t>(table_[s] - 1)).print != print) s = after(s);
    return s;
  }
  // Backward-shift deletion (Knuth, TAOCP vol. 3, section 6.4, algorithm R).
  void remove(uint32_t s) noexcept {
    const auto i = static_cast<int32_t>(table_[s] - 1);
    const entry e = at(i);
    (e.prev < 0 ? oldest_ : at(e.prev).next) = e.next;
    (e.next < 0 ? newest_ : at(e.next).prev) = e.prev;
    at(i).next = free_;
    free_ = i;
    --size_;
    const auto n = static_cast<uint32_t>(table_.size());
    const auto distance = [n](uint32_t from, uint32_t to) { return to >= from ? to - from : to + n - from; };
    for (uint32_t j = after(s); table_[j] != 0; j = after(j)) {
      if (distance(home(at(static_cast<int32_t>(table_[j] - 1)).print), j) < distance(s, j)) continue;
      table_[s] = table_[j];
      s = j;
    }
    table_[s] = 0;
  }

  fixed_array<entry> entry_;
  fixed_array<uint32_t> table_;  // entry plus one; 0 = vacant
  int32_t size_ = 0;
  int32_t free_ = -1;  // entries given back; those from size_ on are new while there are none
  int32_t oldest_ = -1, newest_ = -1;
};

}  // namespace kvcache::detail
