// SPDX-License-Identifier: Apache-2.0
#pragma once
// Candidates in order of a 64-bit key, one heap per lane: what the policies that are not a list stand on. Any
// node may sit in any lane, so every lane has an array of the full size, whose pages cost memory only when
// they are used.
#include <algorithm>

#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache::detail {

/// Invariant: a node is in at most one heap. Equal keys are in order of their node ids. Memory: 16 bytes per
/// node in a heap and 4 per node.
class lane_heaps {
 public:
  /// Starts over, empty. Fails: out_of_memory; then nothing has changed.
  status create(int32_t nodes, int32_t lanes) noexcept {
    fixed_array<entry> fresh_heap;
    fixed_array<int32_t> fresh_size;
    fixed_array<int32_t> fresh_place;
    const auto n = static_cast<size_t>(nodes);
    const auto l = static_cast<size_t>(lanes);
    if (!fresh_heap.create(n * l) || !fresh_size.create(l) || !fresh_place.create(n)) {
      return {errc::out_of_memory, "nodes", nodes};
    }
    heap_ = std::move(fresh_heap);
    size_ = std::move(fresh_size);
    place_ = std::move(fresh_place);
    return {};
  }
  /// Cost: O(log nodes of the lane).
  void add(node_id r, int32_t lane, uint64_t key) noexcept {
    up(heap(lane), size_[static_cast<size_t>(lane)]++, {key, r});
  }
  /// Cost: O(log nodes of the lane).
  void remove(node_id r, int32_t lane) noexcept {
    entry* h = heap(lane);
    const int32_t n = --size_[static_cast<size_t>(lane)];
    const int32_t i = place_[index(r)];
    const entry last = h[n];
    if (i == n) return;
    if (i > 0 && before(last, h[above(i)])) {
      up(h, i, last);
    } else {
      down(h, n, i, last);
    }
  }
  int32_t lanes() const noexcept { return static_cast<int32_t>(size_.size()); }
  bool empty(int32_t lane) const noexcept { return size_[static_cast<size_t>(lane)] == 0; }
  /// The node with the smallest key; `no_node` if there is none. Cost: O(1).
  node_id first(int32_t lane) const noexcept { return empty(lane) ? no_node : heap(lane)[0].node; }
  /// Its key. Requires: not empty.
  uint64_t first_key(int32_t lane) const noexcept { return heap(lane)[0].key; }
  /// Whether a node is in the heap of the lane.
  bool contains(node_id r, int32_t lane) const noexcept {
    const int32_t i = place_[index(r)];
    return i < size_[static_cast<size_t>(lane)] && heap(lane)[i].node == r;
  }
  /// Key of a node in the heap of the lane.
  uint64_t key(node_id r, int32_t lane) const noexcept { return heap(lane)[place_[index(r)]].key; }

 private:
  struct entry {
    uint64_t key;
    node_id node;
  };
  // Four children to a node: half the levels of a binary heap, and those of one node share a cache line or
  // two (LaMarca, Ladner: The Influence of Caches on the Performance of Heaps, JEA 1, 1996, section 4).
  static constexpr int32_t ways = 4;
  static int32_t above(int32_t i) noexcept { return (i - 1) / ways; }
  static bool before(const entry& a, const entry& b) noexcept {
    return a.key != b.key ? a.key < b.key : raw(a.node) < raw(b.node);
  }
  entry* heap(int32_t lane) noexcept { return heap_.data() + static_cast<size_t>(lane) * place_.size(); }
  const entry* heap(int32_t lane) const noexcept {
    return heap_.data() + static_cast<size_t>(lane) * place_.size();
  }
  void put(entry* h, int32_t i, entry e) noexcept {
    h[i] = e;
    place_[index(e.node)] = i;
  }
  void up(entry* h, int32_t i, entry e) noexcept {
    for (; i > 0 && before(e, h[above(i)]); i = above(i)) put(h, i, h[above(i)]);
    put(h, i, e);
  }
  void down(entry* h, int32_t n, int32_t i, entry e) noexcept {
    for (int32_t first; (first = ways * i + 1) < n;) {
      int32_t least = first;
      for (int32_t c = first + 1; c < std::min(first + ways, n); ++c) {
        if (before(h[c], h[least])) least = c;
      }
      if (!before(h[least], e)) break;
      put(h, i, h[least]);
      i = least;
    }
    put(h, i, e);
  }

  fixed_array<entry> heap_;  // [lane][node]
  fixed_array<int32_t> size_;
  fixed_array<int32_t> place_;  // of a node in its lane's heap
};

}  // namespace kvcache::detail
