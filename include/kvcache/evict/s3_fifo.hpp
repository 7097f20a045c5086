// SPDX-License-Identifier: Apache-2.0
#pragma once
// Three queues instead of recency: most of what is stored is never used again, and a small queue finds out
// soon. In the tree a queue is in order of insertion among its leaves.
//
//   stored ──> small ──────────────> evicted, its print ──> ghosts
//     │          └ used `uses` times ──┐                       │
//     │                                v                       │ stored again
//     └─────────────────────────────> main ──> evicted <───────┘
//                                      └ used: goes round once per use, at most three times
//
// Paper: Yang, Zhang, Qiu, Yue, Vigfusson: FIFO Queues are All You Need for Cache Eviction, SOSP 2023,
// section 4 and algorithm 1.
#include <algorithm>

#include "kvcache/evict/concept.hpp"
#include "kvcache/evict/ghosts.hpp"
#include "kvcache/evict/heaps.hpp"

namespace kvcache {

/// Evicts the leaf of the small queue that was stored first, while that queue has its share, else of the main
/// one. Requires: the cache tells it of all that comes and goes (`remembering_eviction_policy`). Cost: O(log
/// candidates), and for each candidate that is moved. Memory: 16 bytes per candidate, 20 per node, 24 per
/// ghost, of which there are as many as nodes of the main queue.
class s3_fifo {
 public:
  /// As in the paper: a small queue of 10 %, two uses.
  s3_fifo() noexcept : s3_fifo(10, 2) {}
  /// `small`: percent of the nodes that the small queue may have. `uses`: by how many sequences beside the
  /// one that stored it a node must have been held to be moved to the main queue, 1 to 3.
  explicit s3_fifo(int32_t small, int32_t uses = 2) noexcept
      : percent_(std::clamp(small, 1, 99)), promote_(std::clamp(uses, 1, most_uses)) {}

  /// Starts over, empty, ghosts too. Fails: out_of_memory; then nothing has changed.
  status create(int32_t nodes, int32_t lanes) noexcept {
    s3_fifo fresh(percent_, promote_);
    if (!fresh.state_.create(static_cast<size_t>(nodes)) ||
        !fresh.count_.create(2 * static_cast<size_t>(lanes))) {
      return {errc::out_of_memory, "nodes", nodes};
    }
    if (status s = fresh.heaps_.create(nodes, 2 * lanes); !s) return s;
    const int64_t ghosts = int64_t{nodes} * (100 - percent_) / 100;
    if (status s = fresh.ghosts_.create(static_cast<int32_t>(ghosts)); !s) return s;
    *this = std::move(fresh);
    return {};
  }
  /// No: the queue of a parent may go before that of its child.
  static constexpr bool monotone() noexcept { return false; }
  /// A node was added: to the main queue if it is remembered, else to the small one.
  void stored(node_id r, int32_t lane, const node_meta& m) noexcept {
    const bool main = ghosts_.take(m.print);
    state_[index(r)] = {++next_, m.uses, 0, main};
    ++count_[queue(lane, main)];
  }
  /// A candidate, at its place in its queue. Cost: O(log candidates).
  void enter(node_id r, int32_t lane, const node_meta& m) noexcept {
    state& n = state_[index(r)];
    n.uses =
        static_cast<int8_t>(std::min<uint32_t>(most_uses, static_cast<uint32_t>(n.uses) + m.uses - n.seen));
    n.seen = m.uses;
    heaps_.add(r, heap(lane, n.main), n.order);
  }
  /// No candidate any more. Cost: O(log candidates).
  void leave(node_id r, int32_t lane) noexcept { heaps_.remove(r, heap(lane, state_[index(r)].main)); }
  /// The head of the queue whose turn it is; `no_node` without a candidate. Cost: O(1).
  node_id victim(int32_t lane) const noexcept { return heaps_.first(heap(lane, turn_of_main(lane))); }
  /// Moves what has been used out of the way, until the victim is one that was not.
  void settle(int32_t lane) noexcept {
    for (;;) {
      const bool main = turn_of_main(lane);
      const node_id r = heaps_.first(heap(lane, main));
      if (r == no_node) return;
      state& n = state_[index(r)];
      if (n.uses < (main ? 1 : promote_)) return;
      heaps_.remove(r, heap(lane, main));
      n.uses = main ? static_cast<int8_t>(n.uses - 1) : int8_t{0};
      --count_[queue(lane, main)];
      ++count_[queue(lane, true)];
      n.main = true;
      n.order = ++next_;
      heaps_.add(r, heap(lane, true), n.order);
    }
  }
  /// Goes for good; from the small queue it is remembered.
  void evicted(node_id r, int32_t lane, const node_meta& m) noexcept {
    const bool main = state_[index(r)].main;
    leave(r, lane);
    --count_[queue(lane, main)];
    if (!main) ghosts_.add(m.print);
  }

 private:
  static constexpr int32_t most_uses = 3;  // two bits in the paper
  struct state {
    uint64_t order;  // in its queue
    uint32_t seen;   // uses when it was a candidate last
    int8_t uses;     // since it came to its queue, less those that it went round for
    bool main;
  };
  static int32_t heap(int32_t lane, bool main) noexcept { return 2 * lane + main; }
  static size_t queue(int32_t lane, bool main) noexcept { return static_cast<size_t>(heap(lane, main)); }
  bool turn_of_main(int32_t lane) const noexcept {
    const int64_t small = count_[queue(lane, false)];
    const bool full = small * 100 >= percent_ * (small + count_[queue(lane, true)]);
    return full ? heaps_.empty(heap(lane, false)) : !heaps_.empty(heap(lane, true));
  }

  detail::lane_heaps heaps_;    // [lane][small, main], candidates
  fixed_array<int32_t> count_;  // [lane][small, main], all nodes
  fixed_array<state> state_;    // [node]
  detail::ghost_list ghosts_;
  uint64_t next_ = 0;
  int32_t percent_;
  int32_t promote_;
};

static_assert(remembering_eviction_policy<s3_fifo>);

}  // namespace kvcache
