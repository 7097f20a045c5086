// SPDX-License-Identifier: Apache-2.0
#pragma once
// A data plane that stores one number per slot: enough to see whether a sequence would read what it wrote.
#include <algorithm>
#include <random>

#include "scenarios/fixture.hpp"

namespace kvcache::test {

/// Memory of the only group of a cache with a lossless format.
class mock_plane {
 public:
  explicit mock_plane(const geometry& g)
      : block_size_(static_cast<size_t>(g.group[0].block_size)),
        slot_(static_cast<size_t>(g.group[0].total) * block_size_, -1) {}

  /// Runs the queued commands, those of one stage in random order, and ends the step.
  template <class Traits>
  void run(basic_cache<Traits>& c) {
    std::vector<kvc_command> list(c.commands().view().begin(), c.commands().view().end());
    std::shuffle(list.begin(), list.end(), random_);
    std::stable_sort(list.begin(), list.end(), [](auto& a, auto& b) { return a.stage < b.stage; });
    for (const kvc_command& k : list) {
      REQUIRE(k.op == KVC_OP_COPY);
      for (size_t t = 0; t < static_cast<size_t>(k.tokens); ++t)
        at(block_id{k.dst}, t) = at(block_id{k.src}, t);
    }
    c.end_step();
  }
  /// Writes tokens [from, t.size()) of a sequence whose text is `t`.
  template <class Traits>
  void append(const basic_sequence<Traits>& s, const text& t, size_t from) {
    for (size_t i = from; i < t.size(); ++i) at(s.table()[i / block_size_], i % block_size_) = t[i];
  }
  template <class Traits>
  bool holds(const basic_sequence<Traits>& s, const text& t) const {
    if (s.held() != static_cast<int32_t>(t.size())) return false;
    for (size_t i = 0; i < t.size(); ++i) {
      if (slot_[index(s.table()[i / block_size_]) * block_size_ + i % block_size_] != t[i]) return false;
    }
    return true;
  }

 private:
  token_id& at(block_id b, size_t offset) { return slot_[index(b) * block_size_ + offset]; }
  size_t block_size_;
  std::vector<token_id> slot_;
  std::mt19937 random_{1};
};

}  // namespace kvcache::test
