// SPDX-License-Identifier: Apache-2.0
#pragma once
// Contract of a prefix index, and the model that indexes nothing.
//
// The index stores fixed units of tokens as nodes of a tree. It knows no blocks and no recency: the cache
// keeps those per node. A lookup is const; keys never change while a node lives.
#include <concepts>
#include <cstdint>
#include <span>

#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// Outcome of an insertion: the node that holds the unit, and whether it is new. `no_node` when the index is
/// full.
struct inserted {
  node_id node = no_node;  ///< holds the unit
  bool fresh = false;      ///< it was added by this call
};

/// What the cache needs of an index. `parent == no_node` means the first unit of a text. Two units are the
/// same only if scope, parent and all tokens are equal; a hash alone decides nothing.
///
///  - `match` follows whole units of `tokens` below `parent` and writes their nodes; it returns how many.
///  - `insert` adds one unit (`tokens.size() == unit()`) or finds it.
///  - `erase` removes a leaf.
///  - `first_child(no_node)` and `sibling` list the children of a node, or the first units, in no promised
///  order.
// clang-format off
template <class X>
concept prefix_index = std::movable<X> &&
    requires(X& x, const X& c, int32_t n, std::span<const token_id> t, std::span<node_id> out, node_id r) {
      { x.create(n, n) } noexcept -> std::same_as<status>;  // nodes, unit
      { c.unit() } noexcept -> std::same_as<int32_t>;
      { c.capacity() } noexcept -> std::same_as<int32_t>;
      { c.size() } noexcept -> std::same_as<int32_t>;
      { c.match(n, r, t, out) } noexcept -> std::same_as<int32_t>;  // scope, parent, tokens, nodes
      { x.insert(n, r, t) } noexcept -> std::same_as<inserted>;  // scope, parent, tokens of one unit
      { x.erase(r) } noexcept;
      { c.parent(r) } noexcept -> std::same_as<node_id>;
      { c.leaf(r) } noexcept -> std::same_as<bool>;
      { c.first_child(r) } noexcept -> std::same_as<node_id>;
      { c.sibling(r) } noexcept -> std::same_as<node_id>;
      { c.scope_of(r) } noexcept -> std::same_as<int32_t>;
      { c.tokens(r) } noexcept -> std::same_as<std::span<const token_id>>;
    };
// clang-format on

/// The index of an engine that wants no reuse between sequences: every lookup misses.
class no_index {
 public:
  /// Remembers the unit; the number of nodes does not matter.
  status create(int32_t, int32_t unit) noexcept {
    unit_ = unit;
    return {};
  }
  int32_t unit() const noexcept { return unit_; }  ///< tokens of a node
  int32_t capacity() const noexcept { return 0; }  ///< no node fits
  int32_t size() const noexcept { return 0; }      ///< no node is stored
  /// Always 0: a miss.
  int32_t match(int32_t, node_id, std::span<const token_id>, std::span<node_id>) const noexcept { return 0; }
  /// Always `no_node`: full.
  inserted insert(int32_t, node_id, std::span<const token_id>) noexcept { return {}; }
  void erase(node_id) noexcept {}                                          ///< nothing to erase
  node_id parent(node_id) const noexcept { return no_node; }               ///< there is none
  bool leaf(node_id) const noexcept { return true; }                       ///< nothing hangs below
  node_id first_child(node_id) const noexcept { return no_node; }          ///< there is none
  node_id sibling(node_id) const noexcept { return no_node; }              ///< there is none
  int32_t scope_of(node_id) const noexcept { return -1; }                  ///< of no scope
  std::span<const token_id> tokens(node_id) const noexcept { return {}; }  ///< no tokens are kept

 private:
  int32_t unit_ = 1;
};

static_assert(prefix_index<no_index>);

}  // namespace kvcache
