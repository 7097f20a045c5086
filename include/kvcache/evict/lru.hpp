// SPDX-License-Identifier: Apache-2.0
#pragma once
// Least recently used, as one doubly linked list per lane through arrays indexed by node.
//
//   head (goes first) ⇄ ... ⇄ tail (released last)
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/evict/concept.hpp"

namespace kvcache {

/// Evicts what was released longest ago. Cost: O(1). Memory: 8 bytes per node.
class lru {
 public:
  status create(int32_t nodes, int32_t lanes) noexcept {
    fixed_array<ends> fresh_ends;
    fixed_array<links> fresh_links;
    if (!fresh_ends.create(static_cast<size_t>(lanes)) || !fresh_links.create(static_cast<size_t>(nodes))) {
      return {errc::out_of_memory, "nodes", nodes};
    }
    for (ends& e : fresh_ends) e = {no_node, no_node};
    ends_ = std::move(fresh_ends);
    links_ = std::move(fresh_links);
    return {};
  }
  static constexpr bool monotone() noexcept { return true; }
  void enter(node_id r, int32_t lane, const node_meta&) noexcept {
    ends& e = ends_[static_cast<size_t>(lane)];
    links_[index(r)] = {e.tail, no_node};
    (e.tail == no_node ? e.head : links_[index(e.tail)].next) = r;
    e.tail = r;
  }
  void leave(node_id r, int32_t lane) noexcept {
    ends& e = ends_[static_cast<size_t>(lane)];
    const links l = links_[index(r)];
    (l.prev == no_node ? e.head : links_[index(l.prev)].next) = l.next;
    (l.next == no_node ? e.tail : links_[index(l.next)].prev) = l.prev;
  }
  node_id victim(int32_t lane) const noexcept { return ends_[static_cast<size_t>(lane)].head; }

 private:
  struct ends {
    node_id head, tail;
  };
  struct links {
    node_id prev, next;
  };
  fixed_array<ends> ends_;
  fixed_array<links> links_;
};

static_assert(eviction_policy<lru>);

}  // namespace kvcache
