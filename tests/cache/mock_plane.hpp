// SPDX-License-Identifier: Apache-2.0
#pragma once
// A data plane whose slots hold one number each: the fingerprint of the text up to their token, in an open
// block as it is and in a packed one as packed_form() of it. It runs the commands of a stage in random order,
// since the stages promise that this may not matter, and refuses a stage whose commands touch each other.
#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kvcache/blocks/command_list.hpp"
#include "oracle.hpp"

namespace kvcache::test {

class mock_plane {
 public:
  mock_plane(const rules& r, uint64_t seed)
      : random_(static_cast<std::minstd_rand::result_type>(seed % 1000003 + 1)) {
    for (const group_rule& g : r.groups) {
      block_size_.push_back(static_cast<size_t>(g.block_size));
      space_.emplace_back(static_cast<size_t>(g.total * g.block_size));
      space_.emplace_back(static_cast<size_t>(g.open * g.block_size));
    }
  }

  /// Slot of group g, in the open space or not. Null if there is no such slot.
  uint64_t* slot(int32_t g, bool open, block_id b, int32_t offset) {
    const auto k = static_cast<size_t>(g);
    const size_t at = index(b) * block_size_[k] + static_cast<size_t>(offset);
    auto& space = space_[2 * k + open];
    return b == no_block || at >= space.size() ? nullptr : &space[at];
  }

  /// Runs the seals of a step, after its appends. Returns what is wrong with them, or nothing.
  std::string seal(std::span<const kvc_command> all) {
    stage_.assign(all.begin(), all.end());
    if (std::string why = independent(); !why.empty()) return why;
    std::shuffle(stage_.begin(), stage_.end(), random_);
    for (const kvc_command& c : stage_) {
      if (c.op != KVC_OP_SEAL || c.stage != 0) return "the seals hold something else";
      if (!execute(c)) return "a seal names a slot that does not exist";
    }
    return {};
  }

  /// Runs a list. Returns what is wrong with it, or nothing.
  std::string run(const command_list& list) {
    const std::span<const kvc_command> all = list.view();
    stage_.clear();
    for (int32_t s = 0, done = 0; s < list.stages(); ++s) {
      stage_.clear();
      for (const kvc_command& c : all) {
        if (c.stage == s) stage_.push_back(c);
      }
      if (stage_.empty()) return "a stage is empty";
      done += static_cast<int32_t>(stage_.size());
      if (s + 1 == list.stages() && done != list.size()) return "a command lies behind the last stage";
      if (std::string why = independent(); !why.empty()) return why;
      std::shuffle(stage_.begin(), stage_.end(), random_);
      for (const kvc_command& c : stage_) {
        if (!execute(c)) return "a command names a slot that does not exist";
      }
    }
    return {};
  }

 private:
  static bool source_open(const kvc_command& c) { return c.op != KVC_OP_COPY; }
  static bool target_open(const kvc_command& c) { return c.op == KVC_OP_COPY_OPEN; }

  std::string independent() const {
    for (const kvc_command& a : stage_) {
      for (const kvc_command& b : stage_) {
        if (&a == &b || a.group != b.group) continue;
        if (a.dst == b.dst && target_open(a) == target_open(b))
          return "two commands of a stage write one block";
        if (a.dst == b.src && target_open(a) == source_open(b)) return "a stage reads a block that it writes";
      }
    }
    return {};
  }

  bool execute(const kvc_command& c) {
    if (c.op != KVC_OP_COPY && c.op != KVC_OP_COPY_OPEN && c.op != KVC_OP_SEAL) return false;
    if (c.tokens < 1 || static_cast<size_t>(c.tokens) > block_size_[c.group]) return false;
    if (c.op == KVC_OP_SEAL && static_cast<size_t>(c.tokens) != block_size_[c.group]) return false;
    uint64_t* from = slot(c.group, source_open(c), block_id{c.src}, 0);
    uint64_t* to = slot(c.group, target_open(c), block_id{c.dst}, 0);
    if (from == nullptr || to == nullptr) return false;
    if (c.op == KVC_OP_SEAL) {
      std::transform(from, from + c.tokens, to, packed_form);
    } else {
      std::copy_n(from, c.tokens, to);
    }
    return true;
  }

  std::minstd_rand random_;
  std::vector<size_t> block_size_;
  std::vector<std::vector<uint64_t>> space_;  // 2g, 2g + 1: as in the command list
  std::vector<kvc_command> stage_;
};

}  // namespace kvcache::test
