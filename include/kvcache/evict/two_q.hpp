// SPDX-License-Identifier: Apache-2.0
#pragma once
// Two queues and a memory: what comes for the first time waits in a queue in order of insertion, whether it
// is used there or not; only what comes again after it went is worth a place in the main queue, which is LRU.
//
//   stored ──> in (25 %) ──> evicted, its print ──> ghosts (50 %)
//     └─ remembered ──> main, least recently used first ──> evicted
//
// Paper: Johnson, Shasha: 2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm, VLDB
// 1994, section 3 (full version).
#include <algorithm>

#include "kvcache/evict/concept.hpp"
#include "kvcache/evict/ghosts.hpp"
#include "kvcache/evict/heaps.hpp"

namespace kvcache {

/// Evicts the leaf that came first while the first queue has more than its share, else the leaf of the main
/// queue that was used least recently. Requires: the cache tells it of all that comes and goes
/// (`remembering_eviction_policy`). Cost: O(log candidates). Memory: 16 bytes per candidate, 12 per node, 24
/// per ghost.
class two_q {
 public:
  /// As in the paper: a first queue of 25 %, 50 % remembered.
  two_q() noexcept : two_q(25, 50) {}
  /// `in`: percent of the nodes that the first queue may have. `out`: as many are remembered, in percent of
  /// the nodes.
  explicit two_q(int32_t in, int32_t out = 50) noexcept
      : in_(std::clamp(in, 1, 99)), out_(std::clamp(out, 1, 1000)) {}

  /// Starts over, empty, ghosts too. Fails: out_of_memory; then nothing has changed.
  status create(int32_t nodes, int32_t lanes) noexcept {
    two_q fresh(in_, out_);
    if (!fresh.order_.create(static_cast<size_t>(nodes)) ||
        !fresh.count_.create(2 * static_cast<size_t>(lanes))) {
      return {errc::out_of_memory, "nodes", nodes};
    }
    if (status s = fresh.heaps_.create(nodes, 2 * lanes); !s) return s;
    const int64_t ghosts = std::min<int64_t>(int64_t{nodes} * out_ / 100, INT32_MAX / 2);
    if (status s = fresh.ghosts_.create(static_cast<int32_t>(ghosts)); !s) return s;
    *this = std::move(fresh);
    return {};
  }
  /// No: a parent may wait in the first queue while its child is in the main one.
  static constexpr bool monotone() noexcept { return false; }
  /// A node was added: to the main queue if it is remembered, else to the first one.
  void stored(node_id r, int32_t lane, const node_meta& m) noexcept {
    const bool main = ghosts_.take(m.print);
    order_[index(r)] = main ? 0 : ++next_;
    ++count_[static_cast<size_t>(heap(lane, main))];
  }
  /// A candidate, at its place in its queue. Cost: O(log candidates).
  void enter(node_id r, int32_t lane, const node_meta& m) noexcept {
    heaps_.add(r, heap(lane, main(r)), main(r) ? m.last : order_[index(r)]);
  }
  /// No candidate any more. Cost: O(log candidates).
  void leave(node_id r, int32_t lane) noexcept { heaps_.remove(r, heap(lane, main(r))); }
  /// The head of the queue whose turn it is; `no_node` without a candidate. Cost: O(1).
  node_id victim(int32_t lane) const noexcept {
    const int64_t in = count_[static_cast<size_t>(heap(lane, false))];
    const int64_t all = in + count_[static_cast<size_t>(heap(lane, true))];
    const bool many = in * 100 > in_ * all;
    return heaps_.first(heap(lane, many ? heaps_.empty(heap(lane, false)) : !heaps_.empty(heap(lane, true))));
  }
  /// Nothing has to be moved.
  void settle(int32_t) noexcept {}
  /// Goes for good; from the first queue it is remembered.
  void evicted(node_id r, int32_t lane, const node_meta& m) noexcept {
    leave(r, lane);
    --count_[static_cast<size_t>(heap(lane, main(r)))];
    if (!main(r)) ghosts_.add(m.print);
  }

 private:
  static int32_t heap(int32_t lane, bool main) noexcept { return 2 * lane + main; }
  bool main(node_id r) const noexcept { return order_[index(r)] == 0; }

  detail::lane_heaps heaps_;     // [lane][in, main], candidates
  fixed_array<int32_t> count_;   // [lane][in, main], all nodes
  fixed_array<uint64_t> order_;  // [node] of insertion; 0 in the main queue
  detail::ghost_list ghosts_;
  uint64_t next_ = 0;
  int32_t in_;
  int32_t out_;
};

static_assert(remembering_eviction_policy<two_q>);

}  // namespace kvcache
