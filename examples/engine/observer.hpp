// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a retention policy sees of the attention of one text: sums that every query adds to, and the last
// queries themselves, from which votes are counted when the policy decides.
//
//   step: rows of queries ──┬─> sums[query head][slot]     column_sums, far_squares
//                           └─> log of the last queries    votes, last_row, hits, moved
//
// A weight is exp2(scale log2(e) (q.k) - lse2): a second pass over scores, exact, because attention reports
// lse2. Rows are added strictly in the order of the text, so every cut of a prompt into steps gives the same
// bits.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kv_backend.hpp"
#include "kvcache/attend/rope.hpp"
#include "kvcache/retain/any_retention.hpp"
#include "thread_pool.hpp"

namespace engine {

/// Queries of one layer, of consecutive tokens of one text, rotated.
struct query_rows {
  const float* q = nullptr;     ///< [rows][query_heads][head_dim]
  const float* lse2 = nullptr;  ///< [rows][query_heads]
  std::span<const int> positions;
};

/// The keys that one kv head holds.
struct head_keys {
  std::vector<float> k;            ///< [head_dim][slots], rotated
  std::span<const int> positions;  ///< [slots], ascending unless slots were taken over
  std::vector<float> norms;        ///< [slots] of the values; only when a policy decides
};

/// How much of a head is wanted.
enum class wanted { positions, keys, keys_and_norms };

/// Reads what a kv head of the layer holds.
using key_reader = std::function<head_keys(int kv_head, wanted what)>;

/// out[j] = weight that the query gives slot j, for j < out.size(). keys: [dim][stride].
void weights_of(std::span<const float> query, const float* keys, int stride, float lse2,
                std::span<float> out);

/// See above. A value: copied with its text.
class attention_observer {
 public:
  attention_observer() = default;
  /// For a policy that needs `needs`; with `remember` every query is kept.
  attention_observer(const kv_shape& shape, kvcache::observe needs, const kvcache::watch_options& watch,
                     bool remember);

  /// Whether steps must be shown to it.
  bool active() const { return sums() || logs(); }
  /// Shows the queries of a layer, in order of the text; their keys are stored. Layers of a step in order.
  void add(int layer, const query_rows& rows, const key_reader& keys, thread_pool& pool);
  /// What a policy wants of a layer: [kv_heads] observations into memory that lasts until the next call.
  std::vector<kvcache::observation> look(int layer, int next_position, std::span<const head_keys> keys,
                                         const kvcache::rope& rope, thread_pool& pool);
  /// Slot t of the head becomes slot kept[t].
  void gather(int layer, int kv_head, std::span<const std::int32_t> kept);
  /// The slot's token went, another takes its place: the slot's sums begin anew. From now on slots need not
  /// be in order of the text; what is then shown sees all of them (session_state.hpp says for whom that is
  /// right).
  void renew(int layer, int kv_head, int slot);
  /// Replays what `other` remembers, as if it had been shown to this one.
  void replay(int layer, const attention_observer& other, const key_reader& keys, thread_pool& pool);
  /// Bytes of sums and queries.
  std::size_t bytes() const;

 private:
  struct layer_state {
    std::vector<std::vector<float>> sums;         ///< [query_heads][slots]
    std::vector<std::vector<std::int32_t>> seen;  ///< [kv_heads][slots]
    std::vector<float> q;                         ///< log: [rows][query_heads][head_dim]
    std::vector<float> lse2;                      ///< [rows][query_heads]
    std::vector<std::int32_t> saw;                ///< [rows][kv_heads] slots the query saw
    std::vector<int> positions;                   ///< [rows]
  };

  bool sums() const {
    return needs_ == kvcache::observe::column_sums || needs_ == kvcache::observe::far_squares;
  }
  bool logs() const { return remember_ || (needs_ != kvcache::observe::nothing && !sums()); }
  int group() const { return shape_.query_heads / shape_.kv_heads; }
  void add_sums(layer_state& at, const query_rows& rows, std::span<const head_keys> keys, thread_pool& pool);
  void add_log(layer_state& at, const query_rows& rows, std::span<const std::int32_t> saw);
  void count_votes(const layer_state& at, int head, const head_keys& keys, std::span<float> out) const;
  void count_moved(const layer_state& at, int head, const head_keys& keys, int next_position,
                   const kvcache::rope& rope, std::span<float> out) const;
  std::size_t first_row(const layer_state& at) const;

  kv_shape shape_;
  kvcache::observe needs_ = kvcache::observe::nothing;
  kvcache::watch_options watch_;
  bool remember_ = false;
  std::vector<layer_state> layers_;
  std::vector<std::vector<float>> looked_;              ///< [kv_heads][group][slots]
  std::vector<std::vector<std::int32_t>> looked_seen_;  ///< [kv_heads][slots]
};

}  // namespace engine
