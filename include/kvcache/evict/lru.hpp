// SPDX-License-Identifier: Apache-2.0
#pragma once
// Least recently used, as one doubly linked list per lane through arrays indexed by node.
//
//   head (goes first) ⇄ ... ⇄ tail (released last)
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/evict/concept.hpp"

namespace kvcache {

/// Evicts what was released longest ago. Cost: O(1) per node. Memory: 8 bytes per node.
class lru {
 public:
  /// Starts over, empty. Fails: out_of_memory; then nothing has changed.
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
  /// Yes: whoever is released deepest first lies in front of its parent.
  static constexpr bool monotone() noexcept { return true; }
  /// Puts `r` at the end of the list of `lane`: it goes last.
  void enter(node_id r, int32_t lane, const node_meta&) noexcept {
    ends& e = ends_[static_cast<size_t>(lane)];
    links_[index(r)] = {e.tail, no_node};
    (e.tail == no_node ? e.head : links_[index(e.tail)].next) = r;
    e.tail = r;
  }
  /// Takes `r` out of the list of `lane`.
  void leave(node_id r, int32_t lane) noexcept {
    ends& e = ends_[static_cast<size_t>(lane)];
    const links l = links_[index(r)];
    (l.prev == no_node ? e.head : links_[index(l.prev)].next) = l.next;
    (l.next == no_node ? e.tail : links_[index(l.next)].prev) = l.prev;
  }
  /// Enters a path, the last node first. Cost: O(nodes).
  void enter_path(std::span<const node_id> path, int32_t lane) noexcept {
    if (path.empty()) return;
    ends& e = ends_[static_cast<size_t>(lane)];
    const size_t last = path.size() - 1;
    (e.tail == no_node ? e.head : links_[index(e.tail)].next) = path[last];
    node_id before = e.tail;
    for (size_t i = last; i > 0; --i) {
      links_[index(path[i])] = {before, path[i - 1]};
      before = path[i];
    }
    links_[index(path[0])] = {before, no_node};
    e.tail = path[0];
  }
  /// Takes a path out. One that was released at once lies together in the list, the last node first: such a
  /// run is unlinked as a whole, by writing to its two neighbours only.
  void leave_path(std::span<const node_id> path, int32_t lane) noexcept {
    ends& e = ends_[static_cast<size_t>(lane)];
    for (size_t i = path.size(); i > 0; --i) {
      const node_id before = links_[index(path[i - 1])].prev;
      node_id after = links_[index(path[i - 1])].next;
      while (i > 1 && after == path[i - 2]) {
        --i;
        after = links_[index(path[i - 1])].next;
      }
      (before == no_node ? e.head : links_[index(before)].next) = after;
      (after == no_node ? e.tail : links_[index(after)].prev) = before;
    }
  }
  /// The head of the list; `no_node` if it is empty.
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

static_assert(path_eviction_policy<lru>);

}  // namespace kvcache
