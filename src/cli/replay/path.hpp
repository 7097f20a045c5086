// SPDX-License-Identifier: Apache-2.0
#pragma once

// What every pass over a trace does with the library's tree.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "error.hpp"
#include "kvcache/prefix/radix_tree.hpp"
#include "replay/replay.hpp"

namespace kvcache::cli {

inline error out_of_memory(const char* field, std::int64_t value) {
  return {failure::cannot_run, "out_of_memory", field, std::to_string(value)};
}

/// A tree with room for so many nodes of one id each.
inline radix_tree tree_of(std::int64_t nodes) {
  constexpr std::int64_t most = std::int64_t{1} << 29;
  radix_tree t;
  if (nodes > most) throw error(failure::cannot_run, "too_large", "nodes", std::to_string(nodes));
  if (!t.create(static_cast<std::int32_t>(nodes), 1)) throw out_of_memory("nodes", nodes);
  return t;
}

/// Adds units[from, to) below path[from - 1] and writes their nodes behind it. Returns how many of the path
/// are there then: fewer than `to` when the tree is full.
inline std::int32_t extend_path(radix_tree& tree, std::span<const std::int32_t> units,
                                std::span<node_id> path, std::int32_t from, std::int32_t to) {
  node_id parent = from == 0 ? no_node : path[static_cast<std::size_t>(from - 1)];
  for (std::int32_t i = from; i < to; ++i) {
    const auto at = static_cast<std::size_t>(i);
    parent = tree.insert(0, parent, units.subspan(at, 1)).node;
    if (parent == no_node) return i;
    path[at] = parent;
  }
  return to;
}

/// Tells at the start of about every thousandth part of the work.
class teller {
 public:
  teller(const replay_progress& tell, std::int64_t total)
      : tell_(tell), total_(total), step_(total / 1000 + 1) {}
  void at(std::int64_t done) {
    if (done < next_) return;
    next_ = done + step_;
    if (tell_) tell_(done, total_);
  }
  void end() {
    if (tell_) tell_(total_, total_);
  }

 private:
  const replay_progress& tell_;
  std::int64_t total_, step_, next_ = 0;
};

}  // namespace kvcache::cli
