// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every eviction policy of the library once more, as the definition says it: lists that are searched anew
// each time, no heaps, no links, no tables. The oracle of tests/evict and tests/cache.
#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kvcache/evict/parse.hpp"

namespace kvcache::test {

/// Told the same as a policy, by every node from its insertion on.
class naive_order {
 public:
  naive_order() = default;
  naive_order(const eviction_choice& what, int32_t nodes, int32_t lanes)
      : name_(eviction_name(what.policy)),
        first_(what.value[0]),
        second_(what.value[1]),
        floor_(static_cast<size_t>(lanes)) {
    queues_ = name_ == "s3_fifo" || name_ == "two_q";
    if (queues_) room_ = int64_t{nodes} * (name_ == "two_q" ? second_ : 100 - first_) / 100;
  }

  bool monotone() const { return name_ == "lru" || name_ == "ttl"; }
  void stored(int32_t id, int32_t lane, const node_meta& m) {
    item x;
    x.id = id;
    x.lane = lane;
    x.meta = m;
    x.seen = m.uses;
    x.order = ++next_;
    const auto ghost = std::find(ghosts_.begin(), ghosts_.end(), m.print);
    if (ghost != ghosts_.end()) {
      ghosts_.erase(ghost);
      x.main = true;
    }
    items_.push_back(x);
  }
  /// `tie`: what ranks it among equals, its own number unless it has another.
  void enter(int32_t id, const node_meta& m, int32_t tie = -1) {
    item& x = at(id);
    x.tie = tie < 0 ? id : tie;
    x.candidate = true;
    x.used = std::min(3u, x.used + (m.uses - x.seen));
    x.seen = m.uses;
    x.meta = m;
    x.entered = ++next_;
    x.released = now_;
    x.worth = floor_[static_cast<size_t>(x.lane)] +
              m.uses * (static_cast<uint64_t>(first_) + static_cast<uint64_t>(m.depth) + 1);
  }
  void leave(int32_t id) { at(id).candidate = false; }
  bool candidate(int32_t id) { return at(id).candidate; }
  void advance(uint64_t now) { now_ = now; }
  void evicted(int32_t id) {
    const item x = at(id);
    floor_[static_cast<size_t>(x.lane)] = x.worth;
    items_.erase(std::find_if(items_.begin(), items_.end(), [&](const item& i) { return i.id == id; }));
    if (!queues_ || x.main) return;
    ghosts_.erase(std::remove(ghosts_.begin(), ghosts_.end(), x.meta.print), ghosts_.end());
    ghosts_.push_back(x.meta.print);
    if (static_cast<int64_t>(ghosts_.size()) > room_) ghosts_.erase(ghosts_.begin());
  }
  /// Moves the used ones of s3_fifo on.
  void settle(int32_t lane) {
    if (name_ != "s3_fifo") return;
    for (;;) {
      const int32_t v = victim(lane);
      if (v < 0) return;
      item& x = at(v);
      if (x.used < (x.main ? 1u : static_cast<uint32_t>(second_))) return;
      x.used = x.main ? x.used - 1 : 0;
      x.main = true;
      x.order = ++next_;
    }
  }
  /// −1 without a candidate.
  int32_t victim(int32_t lane) const {
    const item* best = nullptr;
    for (const item& x : items_) {
      if (!x.candidate || x.lane != lane || !in_turn(x)) continue;
      if (best == nullptr || rank(x) < rank(*best)) best = &x;
    }
    return best == nullptr ? -1 : best->id;
  }
  int32_t expired(int32_t lane) const {
    if (name_ != "ttl") return -1;
    for (const item& x : items_) {
      if (x.candidate && x.lane == lane && now_ - x.released > uint64_t(first_) * 1'000'000'000) {
        return victim(lane);
      }
    }
    return -1;
  }
  /// The level that `m` has now.
  static int32_t level(const node_meta& m, uint64_t now) {
    return m.priority_ms != 0 && now > m.time + m.priority_ms * uint64_t{1'000'000} ? 0 : m.priority;
  }

 private:
  struct item {
    int32_t id = 0, lane = 0, tie = 0;
    node_meta meta;
    bool candidate = false, main = false;
    uint32_t used = 0, seen = 0;
    uint64_t order = 0, entered = 0, released = 0, worth = 0;
  };
  using rank_type = std::tuple<int64_t, uint64_t, int32_t>;

  item& at(int32_t id) {
    return *std::find_if(items_.begin(), items_.end(), [&](const item& x) { return x.id == id; });
  }
  rank_type rank(const item& x) const {
    const node_meta& m = x.meta;
    if (name_ == "lfu") return {m.uses, m.last, x.tie};
    if (name_ == "fifo") return {0, m.born, x.tie};
    if (name_ == "slru") return {m.uses >= 2, m.last, x.tie};
    if (name_ == "priority") return {level(m, now_), m.last, x.tie};
    if (name_ == "gdsf") return {0, x.worth, x.tie};
    if (name_ == "s3_fifo") return {0, x.order, x.tie};
    if (name_ == "two_q") return {0, x.main ? m.last : x.order, x.tie};
    return {0, x.entered, 0};
  }
  // Whether it is the turn of the queue that x is in.
  bool in_turn(const item& x) const {
    if (!queues_) return true;
    int64_t all = 0, small = 0, candidates[2] = {0, 0};
    for (const item& y : items_) {
      if (y.lane != x.lane) continue;
      ++all;
      small += !y.main;
      candidates[y.main] += y.candidate;
    }
    const bool many = name_ == "s3_fifo" ? small * 100 >= first_ * all : small * 100 > first_ * all;
    bool main = !many;
    if (candidates[main] == 0) main = !main;
    return x.main == main;
  }

  std::string name_ = "lru";
  int32_t first_ = 0, second_ = 0;
  std::vector<uint64_t> floor_ = {0};
  std::vector<item> items_;
  std::vector<uint64_t> ghosts_;  // the oldest first
  int64_t room_ = 0;              // for so many
  bool queues_ = false;
  uint64_t next_ = 0, now_ = 0;
};

}  // namespace kvcache::test
