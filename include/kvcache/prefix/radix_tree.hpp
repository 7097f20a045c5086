// SPDX-License-Identifier: Apache-2.0
#pragma once
// Radix tree over fixed units of tokens. Labels live in one array, so nothing is split, moved or allocated
// after creation, and a chain of only children (the compressed edge of a radix tree) is followed by comparing
// memory, without hashing. Only where a node has several children is the child found through one table keyed
// by (scope, parent, tokens).
//
//   first units ──┬─ n0 ── n1 ── n2 ─┬─ n3      n0→n1→n2: memcmp of the label, no hash
//                 │                  └─ n7      n2→{n3,n7}: one probe of the table, then memcmp
//                 └─ n9
//
// Ids are handed out in order and come back in order, so a prompt that is inserted at once usually lies in
// consecutive nodes, and so do its labels. One byte per node says "only child of the node before me", and a
// whole run of such nodes is one comparison of memory.
#include <algorithm>
#include <cstring>

#include "kvcache/core/config.hpp"
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/prefix/concept.hpp"

namespace kvcache {

/// Spreads (scope, parent, tokens of one unit) over 32 bits by folded 128-bit products. A poor hash costs
/// time, never a wrong hit.
struct unit_hash {
  /// The hash of one unit below `parent`. Cost: O(tokens).
  uint32_t operator()(int32_t scope, node_id parent, std::span<const token_id> t) const noexcept {
    uint64_t h = fold((uint64_t(uint32_t(raw(parent))) << 32 | uint32_t(scope)) ^ 0x9e3779b97f4a7c15ull,
                      0xff51afd7ed558ccdull);
    size_t i = 0;
    for (; i + 8 <= t.size(); i += 8) {  // two independent products a round
      const token_id* p = t.data() + i;
      h = fold(h ^ two(p), two(p + 2) ^ 0xc4ceb9fe1a85ec53ull) ^
          fold(two(p + 4) ^ 0xbf58476d1ce4e5b9ull, two(p + 6) ^ 0x94d049bb133111ebull);
    }
    for (; i < t.size(); ++i) h = fold(h ^ uint32_t(t[i]), 0xff51afd7ed558ccdull);
    return static_cast<uint32_t>(h ^ (h >> 32));
  }

 private:
  __extension__ using uint128 = unsigned __int128;
  static uint64_t fold(uint64_t a, uint64_t b) noexcept {
    const uint128 p = uint128{a} * b;
    return static_cast<uint64_t>(p) ^ static_cast<uint64_t>(p >> 64);
  }
  static uint64_t two(const token_id* t) noexcept {
    uint64_t v;
    std::memcpy(&v, t, sizeof v);
    return v;
  }
};

/// Index of prefixes by content. Cost: match and insert O(tokens) comparisons plus one probe where a node
/// branches; erase O(1). Memory: 37 bytes per node, 16 bytes of table, and the tokens.
template <class Hash>
class basic_radix_tree {
 public:
  /// Starts over, empty. Fails: bad_argument, out_of_memory; then the tree is unchanged.
  status create(int32_t nodes, int32_t unit) noexcept;

  int32_t unit() const noexcept { return unit_; }                                   ///< tokens of a node
  int32_t capacity() const noexcept { return static_cast<int32_t>(node_.size()); }  ///< most nodes
  int32_t size() const noexcept { return used_ - top_; }                            ///< nodes stored now
  /// Follows whole units of `tokens` below `parent` (`no_node`: from the first unit of a text) and writes the
  /// node of each to `out`. Returns how many; changes nothing. Cost: O(tokens matched).
  int32_t match(int32_t scope, node_id parent, std::span<const token_id> tokens,
                std::span<node_id> out) const noexcept;
  /// The node of one unit below `parent`, added if it is not there. Requires: tokens.size() == unit(). The
  /// answer is `no_node` if it is not there and the tree is full. Cost: O(unit).
  inserted insert(int32_t scope, node_id parent, std::span<const token_id> tokens) noexcept;
  /// Removes a leaf. Requires: `r` is stored and nothing hangs below it.
  void erase(node_id r) noexcept;

  /// The unit before `r`; `no_node` if it begins a text.
  node_id parent(node_id r) const noexcept { return node_[index(r)].parent; }
  /// Whether no unit follows `r`.
  bool leaf(node_id r) const noexcept { return node_[index(r)].children == 0; }
  /// A unit that follows `r`, or a first unit for `no_node`; the others are its siblings.
  node_id first_child(node_id r) const noexcept { return r == no_node ? first_ : node_[index(r)].first; }
  /// The next unit with the same parent; `no_node` after the last.
  node_id sibling(node_id r) const noexcept { return node_[index(r)].next; }
  /// Scope id `r` was inserted with.
  int32_t scope_of(node_id r) const noexcept { return node_[index(r)].scope; }
  /// The unit's tokens [unit()]. Valid while `r` is stored.
  std::span<const token_id> tokens(node_id r) const noexcept {
    return {label_.data() + index(r) * static_cast<size_t>(unit_), static_cast<size_t>(unit_)};
  }

 private:
  struct node {
    node_id parent;
    node_id first;       // child
    node_id next, prev;  // siblings
    int32_t children;
    int32_t scope;
    uint32_t slot;  // in table_, plus one; 0 = not in it
    bool stored;
  };
  struct entry {
    uint32_t hash;
    uint32_t node;  // plus one; 0 = vacant
  };

  // Sixteen tokens at a time without a call: labels are short, and where they do not lie in a run the
  // processor should already be loading the next one.
  bool same(node_id r, const token_id* t) const noexcept {
    const token_id* l = tokens(r).data();
    int32_t i = 0;
    for (; i + 16 <= unit_; i += 16) {
      uint32_t differ = 0;
      for (int32_t k = i; k < i + 16; ++k) differ |= uint32_t(l[k] ^ t[k]);
      if (differ != 0) return false;
    }
    for (; i < unit_; ++i) {
      if (l[i] != t[i]) return false;
    }
    return true;
  }
  uint32_t hash_of(int32_t scope, node_id parent, const token_id* t) const noexcept {
    return Hash{}(scope, parent, {t, static_cast<size_t>(unit_)});
  }
  node_id find(int32_t scope, node_id parent, const token_id* t) const noexcept;
  size_t run_length(node_id r, const token_id* t, size_t most) const noexcept;
  void chain(node_id parent) noexcept;
  void link(node_id r, node_id parent) noexcept;
  void unlink(node_id r) noexcept;
  // Place in the table by multiplication (Lemire: Fast Random Integer Generation in an Interval, ACM TOMACS
  // 29, 2019, section 4), so that its size need not be a power of two.
  uint32_t home(uint32_t hash) const noexcept { return static_cast<uint32_t>(uint64_t{hash} * slots_ >> 32); }
  uint32_t after(uint32_t i) const noexcept { return i + 1 == slots_ ? 0 : i + 1; }
  uint32_t distance(uint32_t from, uint32_t to) const noexcept {
    return to >= from ? to - from : to + slots_ - from;
  }
  void add_slot(node_id r) noexcept;
  void remove_slot(uint32_t i) noexcept;

  int32_t unit_ = 1;
  uint32_t slots_ = 0;
  int32_t used_ = 0;  // nodes from here on were never stored, so their memory has not been touched
  int32_t top_ = 0;   // free ones of those before
  node_id first_ = no_node;
  fixed_array<node> node_;
  fixed_array<token_id> label_;
  fixed_array<uint8_t> chained_;  // 1: the only child of the node with the id before, in the same scope
  fixed_array<entry> table_;      // first units, and nodes that have had a sibling
  fixed_array<node_id> free_;
};

/// The index that caches use.
using radix_tree = basic_radix_tree<unit_hash>;
static_assert(prefix_index<radix_tree>);

template <class Hash>
status basic_radix_tree<Hash>::create(int32_t nodes, int32_t unit) noexcept {
  if (nodes < 0 || nodes > (1 << 29)) return {errc::bad_argument, "nodes", nodes};
  if (unit < 1) return {errc::bad_argument, "unit", unit};
  const auto n = static_cast<size_t>(nodes);
  const size_t slots = 2 * n + 1;  // at most half full: short probes, and short shifts when a node goes
  basic_radix_tree t;
  if (!t.node_.create(n) || !t.label_.create(n * static_cast<size_t>(unit)) || !t.table_.create(slots) ||
      !t.chained_.create(n) || !t.free_.create(n)) {
    return {errc::out_of_memory, "nodes", nodes};
  }
  t.unit_ = unit;
  t.slots_ = static_cast<uint32_t>(slots);
  *this = std::move(t);
  return {};
}

template <class Hash>
node_id basic_radix_tree<Hash>::find(int32_t scope, node_id parent, const token_id* t) const noexcept {
  if (parent != no_node) {
    const node& p = node_[index(parent)];
    if (p.children == 0) return no_node;
    if (p.children == 1) {
      return node_[index(p.first)].scope == scope && same(p.first, t) ? p.first : no_node;
    }
  }
  const uint32_t h = hash_of(scope, parent, t);
  for (uint32_t i = home(h); table_[i].node != 0; i = after(i)) {
    if (table_[i].hash != h) continue;
    const node_id r{static_cast<int32_t>(table_[i].node - 1)};
    const node& n = node_[index(r)];
    if (n.parent == parent && n.scope == scope && same(r, t)) return r;
  }
  return no_node;
}

template <class Hash>
int32_t basic_radix_tree<Hash>::match(int32_t scope, node_id parent, std::span<const token_id> tokens,
                                      std::span<node_id> out) const noexcept {
  const size_t units = std::min(tokens.size() / static_cast<size_t>(unit_), out.size());
  const token_id* t = tokens.data();
  size_t n = 0;
  while (n < units) {
    const node_id r = find(scope, parent, t);
    if (r == no_node) break;
    const size_t run = 1 + run_length(r, t + unit_, units - n - 1);
    for (size_t i = 0; i < run; ++i) out[n + i] = node_id{raw(r) + static_cast<int32_t>(i)};
    n += run;
    t += run * static_cast<size_t>(unit_);
    parent = out[n - 1];
  }
  return static_cast<int32_t>(n);
}

// How many units at `t` are the labels of the chained nodes behind `r`, at most `most`.
template <class Hash>
size_t basic_radix_tree<Hash>::run_length(node_id r, const token_id* t, size_t most) const noexcept {
  const size_t first = index(r) + 1;
  most = std::min(most, node_.size() - first);
  if (most == 0 || chained_[first] == 0) return 0;
  const void* end = std::memchr(chained_.data() + first, 0, most);
  const size_t chained =
      end == nullptr ? most : static_cast<size_t>(static_cast<const uint8_t*>(end) - &chained_[first]);
  const token_id* label = label_.data() + first * static_cast<size_t>(unit_);
  constexpr size_t step = 32;  // units compared before looking for the one that differs
  const auto differs = [&](size_t at, size_t units) {
    const size_t offset = at * static_cast<size_t>(unit_);
    return std::memcmp(label + offset, t + offset, units * static_cast<size_t>(unit_) * sizeof(token_id)) !=
           0;
  };
  size_t n = 0;
  while (n + step <= chained && !differs(n, step)) n += step;
  while (n < chained && !differs(n, 1)) ++n;
  return n;
}

// Restates whether the children of `parent` are a run with it.
template <class Hash>
void basic_radix_tree<Hash>::chain(node_id parent) noexcept {
  if (parent == no_node) return;
  const node& p = node_[index(parent)];
  const node_id next{raw(parent) + 1};
  if (index(next) >= node_.size() || p.children == 0) return;
  if (!node_[index(next)].stored || node_[index(next)].parent != parent) return;
  chained_[index(next)] = p.children == 1 && node_[index(next)].scope == p.scope;
}

template <class Hash>
inserted basic_radix_tree<Hash>::insert(int32_t scope, node_id parent,
                                        std::span<const token_id> tokens) noexcept {
  if (!KVCACHE_CONTRACT(tokens.size() == static_cast<size_t>(unit_))) return {};
  if (const node_id r = find(scope, parent, tokens.data()); r != no_node) return {r, false};
  if (top_ == 0 && used_ == capacity()) return {};
  const node_id r = top_ > 0 ? free_[static_cast<size_t>(--top_)] : node_id{used_++};
  std::memcpy(label_.data() + index(r) * tokens.size(), tokens.data(), tokens.size_bytes());
  node_[index(r)] = {parent, no_node, no_node, no_node, 0, scope, 0, true};
  link(r, parent);
  return {r, true};
}

template <class Hash>
void basic_radix_tree<Hash>::erase(node_id r) noexcept {
  if (!KVCACHE_CONTRACT(index(r) < node_.size() && node_[index(r)].stored && leaf(r))) return;
  if (node_[index(r)].slot != 0) remove_slot(node_[index(r)].slot - 1);
  node_[index(r)].stored = false;
  unlink(r);
  free_[static_cast<size_t>(top_++)] = r;
}

// An only child is found through its parent; the table holds the others, and the first units.
template <class Hash>
void basic_radix_tree<Hash>::link(node_id r, node_id parent) noexcept {
  node_id& head = parent == no_node ? first_ : node_[index(parent)].first;
  if (head != no_node) {
    node_[index(head)].prev = r;
    if (node_[index(head)].slot == 0) add_slot(head);
  }
  if (head != no_node || parent == no_node) add_slot(r);
  node_[index(r)].next = head;
  head = r;
  if (parent == no_node) return;
  ++node_[index(parent)].children;
  chain(parent);
}

template <class Hash>
void basic_radix_tree<Hash>::add_slot(node_id r) noexcept {
  node& n = node_[index(r)];
  const uint32_t h = hash_of(n.scope, n.parent, tokens(r).data());
  uint32_t i = home(h);
  while (table_[i].node != 0) i = after(i);
  table_[i] = {h, static_cast<uint32_t>(raw(r)) + 1};
  n.slot = i + 1;
}

template <class Hash>
void basic_radix_tree<Hash>::unlink(node_id r) noexcept {
  const node& n = node_[index(r)];
  node_id& head = n.parent == no_node ? first_ : node_[index(n.parent)].first;
  (n.prev == no_node ? head : node_[index(n.prev)].next) = n.next;
  if (n.next != no_node) node_[index(n.next)].prev = n.prev;
  chained_[index(r)] = 0;
  if (n.parent == no_node) return;
  --node_[index(n.parent)].children;
  chain(n.parent);
}

// Backward-shift deletion (Knuth, TAOCP vol. 3, section 6.4, algorithm R): no tombstones, so lookups never
// slow down.
template <class Hash>
void basic_radix_tree<Hash>::remove_slot(uint32_t i) noexcept {
  for (uint32_t j = i;;) {
    j = after(j);
    if (table_[j].node == 0) break;
    if (distance(home(table_[j].hash), j) >= distance(i, j)) {
      table_[i] = table_[j];
      node_[table_[i].node - 1].slot = i + 1;
      i = j;
    }
  }
  table_[i].node = 0;
}

}  // namespace kvcache
