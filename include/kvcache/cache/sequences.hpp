// SPDX-License-Identifier: Apache-2.0
#pragma once
// The live sequences: their lengths and tables, in memory that is taken once for as many as the configuration
// names.
//
//   0 ........ committed ........ accepted ....... held        tokens
//   |  in the index |   final       |  drafts       |
//   table:      | b | b | b | b | b | b |                      one entry per block, no_block where absent
//   open table: | - | - | o | o | o | o |                      lossy formats: blocks that have an open form
//                 packed .. sealed                             sealed in this step: both forms are readable
#include <array>
#include <cstdint>
#include <span>

#include "kvcache/cache/config.hpp"
#include "kvcache/cache/level.hpp"
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/prefix/scope.hpp"

namespace kvcache::detail {

/// Lengths of one sequence, in tokens unless said.
struct sequence_state {
  uint32_t generation;  // counts the sequences that lived in this place
  bool live;
  int32_t account;
  int32_t held;                 // slots handed out
  int32_t accepted;             // of these, final ones: prompt and sampled tokens
  int32_t committed;            // of these, in the index
  int32_t path;                 // nodes pinned: committed / unit
  int32_t reused;               // found by open
  int32_t exclusive;            // slots from held up to here lie in blocks that nobody else has; 0 = unknown
  int32_t dropped;              // tokens that went: text position = slot + dropped for slots from floor on
  int32_t floor;                // slots that a drop left; which positions they hold the cache does not know
  int32_t columns[max_groups];  // table entries in use
  int32_t sealed[max_groups];   // leading tokens that are packed (lossy formats)
  int32_t packed[max_groups];   // of these, those that had no open form any more when the step began
  int32_t horizon;              // tokens that a cold run would have computed alike; only they are indexed
  scope_ids scopes;
  retention_level level;  // of what it finds and indexes
};

/// Storage of all sequences. Cost: acquire and release O(1). Memory: 4 bytes per table entry and path node,
/// taken as address space at creation.
class sequences {
 public:
  status create(const geometry& geo) noexcept {
    geo_ = geo;
    const auto n = static_cast<size_t>(geo.max_sequences);
    path_columns_ = static_cast<size_t>(geo.max_sequence_tokens / geo.unit);
    bool ok = state_.create(n) && free_.create(n) && path_.create(n * path_columns_);
    bool seals = false;
    for (int32_t g = 0; g < geo.groups; ++g) {
      const size_t entries = n * static_cast<size_t>(geo.group[g].columns);
      ok = ok && table_[static_cast<size_t>(g)].create(entries);
      if (geo.group[g].format.lossy) ok = ok && open_[static_cast<size_t>(g)].create(entries);
      seals |= geo.group[g].seals_in_step();
    }
    if (seals) ok = ok && sealing_.create(n) && seals_.create(n);
    if (!ok) return {errc::out_of_memory, "max_sequences", geo.max_sequences};
    top_ = sealing_size_ = 0;
    for (int32_t i = geo.max_sequences; i-- > 0;) free_[static_cast<size_t>(top_++)] = i;
    return {};
  }

  /// A vacant place, or −1.
  int32_t acquire() noexcept {
    if (top_ == 0) return -1;
    const int32_t i = free_[static_cast<size_t>(--top_)];
    const uint32_t generation = state(i).generation;
    state(i) = {};
    state(i).generation = generation;
    state(i).live = true;
    return i;
  }
  void release(int32_t i) noexcept {
    state(i).live = false;
    ++state(i).generation;
    free_[static_cast<size_t>(top_++)] = i;
  }
  /// Remembers that the sequence has sealed blocks whose open forms go when the step ends.
  void note_sealing(int32_t i) noexcept {
    if (seals_[static_cast<size_t>(i)] != 0) return;
    seals_[static_cast<size_t>(i)] = 1;
    sealing_[static_cast<size_t>(sealing_size_++)] = i;
  }
  /// Places whose sequence may have such blocks; it may also have closed, or another one may live there.
  std::span<const int32_t> sealing() const noexcept {
    return {sealing_.data(), static_cast<size_t>(sealing_size_)};
  }
  bool noted(int32_t i) const noexcept { return seals_.size() != 0 && seals_[static_cast<size_t>(i)] != 0; }
  void forget_sealing() noexcept {
    for (const int32_t i : sealing()) seals_[static_cast<size_t>(i)] = 0;
    sealing_size_ = 0;
  }
  int32_t live() const noexcept { return static_cast<int32_t>(state_.size()) - top_; }
  int32_t capacity() const noexcept { return static_cast<int32_t>(state_.size()); }

  sequence_state& state(int32_t i) noexcept { return state_[static_cast<size_t>(i)]; }
  const sequence_state& state(int32_t i) const noexcept { return state_[static_cast<size_t>(i)]; }
  /// All columns of the table, in use or not.
  std::span<block_id> row(int32_t i, int32_t g) noexcept { return slice(table_, i, g); }
  std::span<const block_id> table(int32_t i, int32_t g) const noexcept {
    return view(table_, i, g).first(static_cast<size_t>(state(i).columns[g]));
  }
  std::span<block_id> open_row(int32_t i, int32_t g) noexcept { return slice(open_, i, g); }
  /// Same columns as the table; empty if the format is lossless.
  std::span<const block_id> open_table(int32_t i, int32_t g) const noexcept {
    if (!geo_.group[g].format.lossy) return {};
    return view(open_, i, g).first(static_cast<size_t>(state(i).columns[g]));
  }
  std::span<node_id> path_row(int32_t i) noexcept {
    return {path_.data() + static_cast<size_t>(i) * path_columns_, path_columns_};
  }
  std::span<const node_id> path(int32_t i) const noexcept {
    return {path_.data() + static_cast<size_t>(i) * path_columns_, static_cast<size_t>(state(i).path)};
  }

 private:
  using tables = std::array<fixed_array<block_id>, max_groups>;
  std::span<block_id> slice(tables& t, int32_t i, int32_t g) noexcept {
    const auto n = static_cast<size_t>(geo_.group[g].columns);
    return {t[static_cast<size_t>(g)].data() + static_cast<size_t>(i) * n, n};
  }
  std::span<const block_id> view(const tables& t, int32_t i, int32_t g) const noexcept {
    const auto n = static_cast<size_t>(geo_.group[g].columns);
    return {t[static_cast<size_t>(g)].data() + static_cast<size_t>(i) * n, n};
  }

  geometry geo_{};
  size_t path_columns_ = 0;
  int32_t top_ = 0;
  int32_t sealing_size_ = 0;
  fixed_array<sequence_state> state_;
  fixed_array<int32_t> free_;
  fixed_array<int32_t> sealing_;  // places, in the order in which they were noted
  fixed_array<uint8_t> seals_;    // [place] whether it is among them
  fixed_array<node_id> path_;
  tables table_;
  tables open_;
};

}  // namespace kvcache::detail
