// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which tokens of a text one kv head holds, and in which slots. As long as tokens are only added and
// gathered, slot i is the i-th token. Once a token goes and the next one takes its slot, slots are in no
// order:
//
//   slot              0   1   2   3   4
//   text position     0   7   2   5   6       7 took the slot of a token that went
//   positions()       0   2   5   6   7       what is held, in order of the text
//   slot_of(rank)     0   2   3   4   1

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace engine {

/// See above. A value. Invariant: positions ascend; every slot but the vacant one holds one of them.
class head_slots {
 public:
  head_slots() = default;
  /// The first `n` tokens of a text.
  explicit head_slots(int n) : positions_(static_cast<std::size_t>(n)) {
    std::iota(positions_.begin(), positions_.end(), 0);
  }

  /// Text positions held, ascending.
  std::span<const int> positions() const { return positions_; }
  /// Text position of each slot's token; of a vacant slot's, the last it had.
  std::span<const int> by_slot() const { return ordered() ? positions_ : by_slot_; }
  /// Tokens held.
  int size() const { return static_cast<int>(positions_.size()); }
  /// Slots in use: as many, and the vacant one.
  int slots() const { return static_cast<int>(by_slot().size()); }
  /// Whether the next token takes the slot of one that went.
  bool vacant() const { return vacant_ >= 0; }
  /// Whether slot i is the i-th token.
  bool ordered() const { return slot_of_.empty(); }
  /// Slot of the token of that rank.
  std::int32_t slot_of(int rank) const { return ordered() ? rank : slot_of_[static_cast<std::size_t>(rank)]; }

  /// One more token, behind all others of the text.
  void add(int position) {
    positions_.push_back(position);
    if (ordered()) return;
    if (vacant_ < 0) {
      slot_of_.push_back(static_cast<std::int32_t>(by_slot_.size()));
      by_slot_.push_back(position);
      return;
    }
    slot_of_.push_back(vacant_);
    by_slot_[static_cast<std::size_t>(vacant_)] = position;
    taken_ = vacant_;
    vacant_ = -1;
  }
  /// The last `n` tokens were not to be. Requires: they were added since the last drop.
  void take_back(int n) {
    for (; n > 0; --n) {
      positions_.pop_back();
      if (ordered()) continue;
      if (slot_of_.back() == taken_) {
        vacant_ = taken_;
      } else {
        by_slot_.pop_back();
      }
      slot_of_.pop_back();
    }
  }
  /// The token of that rank goes; the next one takes its slot, which is returned. Requires: none is vacant.
  int vacate(int rank) {
    if (ordered()) {
      by_slot_ = positions_;
      slot_of_.resize(positions_.size());
      std::iota(slot_of_.begin(), slot_of_.end(), 0);
    }
    vacant_ = slot_of(rank);
    taken_ = -1;
    positions_.erase(positions_.begin() + rank);
    slot_of_.erase(slot_of_.begin() + rank);
    return vacant_;
  }
  /// `of_slots` [slots()] in order of the text: [size()].
  std::vector<float> by_rank(std::span<const float> of_slots) const {
    std::vector<float> out;
    for (int r = 0; r < size(); ++r) out.push_back(of_slots[static_cast<std::size_t>(slot_of(r))]);
    return out;
  }
  /// The slots that hold the tokens of these ranks, ascending.
  std::vector<std::int32_t> slots_of(std::span<const std::int32_t> ranks) const {
    std::vector<std::int32_t> out;
    for (const std::int32_t r : ranks) out.push_back(slot_of(r));
    std::sort(out.begin(), out.end());
    return out;
  }
  /// Only these slots, ascending, stay, and move together: slot t becomes what slot slots[t] was.
  void gather(std::span<const std::int32_t> slots) {
    std::vector<int> kept;
    for (const std::int32_t s : slots) kept.push_back(by_slot()[static_cast<std::size_t>(s)]);
    slot_of_.resize(kept.size());
    std::iota(slot_of_.begin(), slot_of_.end(), 0);
    std::sort(slot_of_.begin(), slot_of_.end(), [&](std::int32_t a, std::int32_t b) {
      return kept[static_cast<std::size_t>(a)] < kept[static_cast<std::size_t>(b)];
    });
    by_slot_ = kept;
    std::sort(kept.begin(), kept.end());
    positions_ = std::move(kept);
    if (positions_ == by_slot_) slot_of_.clear();
    vacant_ = taken_ = -1;
  }
  /// Slots [first, first + n) go, and the others close up. Requires: ordered().
  void erase(int first, int n) {
    positions_.erase(positions_.begin() + first, positions_.begin() + first + n);
  }

 private:
  std::vector<int> positions_;
  std::vector<int> by_slot_;           // meaningful if not ordered()
  std::vector<std::int32_t> slot_of_;  // by rank; empty: the rank
  std::int32_t vacant_ = -1;
  std::int32_t taken_ = -1;  // vacant before the last add that filled one
};

}  // namespace engine
