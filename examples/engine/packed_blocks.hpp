// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed blocks, as the caches of the engine use them: what the library is to be created with, and what a
// step says beside its tables. One rule holds for every row (kvcache/cache/sealing.hpp):
//
//   slots of a text    | packed | packed | open | open |
//   rows are written                      ^ here, in open blocks
//   a row reads        packed below row_sealed, open from there on; the first tokens from exact copies
//
// In every layer: append, then the seals of the step, then attention. Without formats none of this applies.

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "cache_kind.hpp"
#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/cache/packed.hpp"

namespace engine {

/// The library's words for the shape of all layers.
kvcache::group_shape group_of(const cache_config& config);

/// Whether anything is rounded when a block is full.
bool is_packed(const cache_config& config);

/// The format of a layer; without formats: exact.
kvcache::kv_format format_of(const cache_config& config, int layer);

/// Groups for `blocks` blocks. Fails: as kvcache::packed_groups, naming what the shape or the block size does
/// not allow.
result<kvcache::packed_group_set> groups_for(const cache_config& config, std::int32_t blocks);

/// Memory for all blocks of a cache that was made of these groups.
/// `rope`: for formats that keep K before its rotation; outlives the planes.
result<kvcache::host_planes> planes_for(const cache_config& config, const kvcache::geometry& made,
                                        const kvc_rope& rope);

/// Adds up what tables hold, each block once.
class table_census {
 public:
  explicit table_census(const kvcache::geometry& made) : made_(made) {}
  /// A table whose first `slots` slots are written.
  template <class Sequence>
  void add(const Sequence& of, int slots) {
    const bool copies = made_.groups > 1 && slots > 0;
    add(of.table(), of.open_table(), copies ? of.table(1) : std::span<const kvcache::block_id>{}, slots);
  }
  /// Held: by what is written; reserved: all of the blocks.
  cache_bytes total() const;

 private:
  void add(std::span<const kvcache::block_id> table, std::span<const kvcache::block_id> open,
           std::span<const kvcache::block_id> copies, int slots);

  const kvcache::geometry& made_;
  std::map<kvcache::block_id, int> blocks_, open_, copies_;  // slots written
};

/// What the rows of a step need beside slots and tables. Filled text by text, then read in every layer.
class packed_rows {
 public:
  /// Begins a step; `exempt`: first tokens that have exact copies.
  void begin(int block_size, int exempt) {
    *this = {};
    block_size_ = block_size;
    exempt_ = exempt;
  }
  /// The rows of a text that go to the slots from `first` on.
  template <class Sequence>
  void add(const Sequence& of, int first, int rows) {
    const auto copies = exempt_ > 0 ? of.table(1) : std::span<const kvcache::block_id>{};
    add_tables(of.open_table(), copies, first, rows);
    sealed_.push_back(of.sealed());
    for (int row = 0; row < rows; ++row) row_sealed_.push_back(of.sealed_at(first + row + 1));
  }
  /// What append stores where: `with`, and open and exact slots.
  kvcache::append_options where(kvcache::append_options with) const;
  /// What attention reads where. The batch must not outlive this.
  void describe(kvc_batch& batch);

 private:
  void add_tables(std::span<const kvcache::block_id> open, std::span<const kvcache::block_id> copies,
                  int first, int rows);

  int block_size_ = 0;
  int exempt_ = 0;
  std::vector<std::span<const kvcache::block_id>> open_;  // [texts]
  std::vector<std::int32_t> sealed_;                      // [texts]
  std::vector<std::int32_t> row_sealed_;                  // [rows]
  std::vector<std::int32_t> copies_;                      // [texts]
  std::vector<std::int64_t> open_slots_;                  // [rows]
  std::vector<std::int64_t> exempt_slots_;                // [rows]
  std::vector<std::int32_t> open_table_;                  // [texts][columns]
};

/// Where one token lies that is to be read back.
struct stored_token {
  kvcache::block_id block = kvcache::no_block;  ///< packed
  kvcache::block_id open = kvcache::no_block;   ///< if not no_block, the token is read from here
  kvcache::block_id copy = kvcache::no_block;   ///< of the first tokens, read before all others
  int slot = 0;                                 ///< of the table
};

/// K, or V, of one head of one token as attention reads it: unpacked, rotated back, widened to f32.
void read_token(const kvc_kv& kv, const kvcache::kv_format& format, kv_type type, bool keys, int head,
                const stored_token& at, std::span<float> out);

}  // namespace engine
