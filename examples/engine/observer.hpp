// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a retention policy sees of the attention of one text: sums that every query adds to, and the last
// queries themselves, from which votes are counted when the policy decides.
//
//   step: rows of queries ──┬─> sums[query head][slot]     column_sums, far_squares
//                           └─> log of the last queries    votes, last_row, hits, moved
//
// The arithmetic is the library's (kvc_cpu_score): a weight is 2^(score - lse2), keys are read where they lie
// or the scores of a step's attention are used again, and rows are added strictly in the order of the text,
// so every cut of a prompt into steps gives the same bits.

#include <cstdint>
#include <span>
#include <vector>

#include "kv_backend.hpp"
#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/rope.hpp"
#include "kvcache/retain/any_retention.hpp"

namespace engine {

/// Queries of one layer, of consecutive tokens of one text, rotated.
struct query_rows {
  const float* q = nullptr;     ///< [rows][query_heads][head_dim]
  const float* lse2 = nullptr;  ///< [rows][query_heads]
  std::span<const int> positions;
  const float* scores =
      nullptr;  ///< of one row, as its attention stored them, or null: [query_heads][stride]
  std::int64_t score_stride = 0;
};

/// What the kv heads of a layer hold: their slots, where the keys of these lie, and what reads them.
struct layer_keys {
  const kvc_kv* kv = nullptr;                     ///< of all kv heads, or of one where each has a table
  std::vector<std::vector<std::int32_t>> tables;  ///< block ids, for all kv heads or one for each
  bool open = false;                              ///< they are ids of open blocks
  std::vector<std::span<const int>> positions;    ///< [kv_heads][slots], ascending unless taken over
  std::vector<std::vector<float>> norms;          ///< [kv_heads][slots] of the values, to decide
  kvcache::attention* with = nullptr;             ///< planned for kv, any number of rows
  const kvc_executor* executor = nullptr;

  int slots(std::size_t kv_head) const { return static_cast<int>(positions[kv_head].size()); }
  bool split() const { return tables.size() > 1; }
};

/// See above. A value: copied with its text.
class attention_observer {
 public:
  attention_observer() = default;
  /// For a policy that needs `needs`; with `remember` every query is kept.
  attention_observer(const kv_shape& shape, kvcache::observe needs, const kvcache::watch_options& watch,
                     bool remember);

  /// Whether steps must be shown to it.
  bool active() const { return sums() || logs(); }
  /// Whether it can use the scores of a row's attention (query_rows::scores).
  bool sums() const {
    return needs_ == kvcache::observe::column_sums || needs_ == kvcache::observe::far_squares;
  }
  /// Shows the queries of a layer, in order of the text; their keys are stored. Layers of a step in order.
  void add(int layer, const query_rows& rows, const layer_keys& keys);
  /// What a policy wants of a layer: [kv_heads] observations into memory that lasts until the next call; keys
  /// with norms.
  std::vector<kvcache::observation> look(int layer, int next_position, const layer_keys& keys,
                                         const kvcache::rope& rope);
  /// Slot t of the head becomes slot kept[t].
  void gather(int layer, int kv_head, std::span<const std::int32_t> kept);
  /// The slot's token went, another takes its place: the slot's sums begin anew. From now on slots need not
  /// be in order of the text; what is then shown sees all of them (session_state.hpp says for whom that is
  /// right).
  void renew(int layer, int kv_head, int slot);
  /// Replays what `other` remembers, as if it had been shown to this one.
  void replay(int layer, const attention_observer& other, const layer_keys& keys);
  /// Bytes of sums and queries.
  std::size_t bytes() const;

 private:
  struct layer_state {
    std::vector<float> sums;                      ///< [query_heads][stride]
    std::int64_t stride = 0;                      ///< at least the slots of any head
    std::vector<std::vector<std::int32_t>> seen;  ///< [kv_heads][slots]
    std::vector<float> q;                         ///< log: [rows][query_heads][head_dim]
    std::vector<float> lse2;                      ///< [rows][query_heads]
    std::vector<std::int32_t> saw;                ///< [rows][kv_heads] slots the query saw
    std::vector<int> positions;                   ///< [rows]
  };
  // Rows added to sums, each to the slots below its bound.
  struct addition {
    int kind;
    query_rows rows;
    std::vector<std::int32_t> upto;  // [rows][kv_heads]
    std::vector<float> least;        // the same, for hits
  };

  bool logs() const { return remember_ || (needs_ != kvcache::observe::nothing && !sums()); }
  int group() const { return shape_.query_heads / shape_.kv_heads; }
  void make_room(layer_state& at, const layer_keys& keys) const;
  void add_sums(layer_state& at, const query_rows& rows, const layer_keys& keys) const;
  void add_log(layer_state& at, const query_rows& rows, std::span<const std::int32_t> saw);
  void add_up(const addition& what, const layer_keys& keys, std::span<float* const> sums,
              std::int64_t stride) const;
  void count_votes(const layer_state& at, const layer_keys& keys, std::span<float* const> sums) const;
  void count_moved(const layer_state& at, const layer_keys& keys, int next_position,
                   const kvcache::rope& rope, std::span<float* const> sums) const;
  void normalise(const layer_keys& keys, std::span<const float> rows, std::int32_t n,
                 std::span<float> lse2) const;
  void look_at(const layer_state& at, const layer_keys& keys, int kv_head, std::span<float> weights);
  std::size_t first_row(const layer_state& at) const;

  kv_shape shape_;
  kvcache::observe needs_ = kvcache::observe::nothing;
  kvcache::watch_options watch_;
  bool remember_ = false;
  std::vector<layer_state> layers_;
  std::vector<float> looked_;                           ///< [kv_heads][group][slots]
  std::vector<std::vector<std::int32_t>> looked_seen_;  ///< [kv_heads][slots]
};

}  // namespace engine
