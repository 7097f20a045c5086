// SPDX-License-Identifier: Apache-2.0
#pragma once

// What lies behind session.hpp. Which file does what:
//
//   session.cpp          begin, fork and commit a text, and questions about it
//   session_feed.cpp     tokens into a text: feed, draft, accept, and a batch of texts
//   session_cache.cpp    memory: caches, planes, room for tokens, queued commands
//   session_step.cpp     one step of the model: append, then attend
//   session_observe.cpp  what a policy sees: keys read back, queries shown, scores
//   session_drop.cpp     a drop: who stays, and the table that all heads share
//   session_packed.cpp   packed blocks: which policies go with them, what a step says of them, packing a
//   prompt session_heads.cpp    a table per head: how a text comes to them, attends through them, drops from
//   them head_slots.hpp       which tokens a head holds, and in which slots
//
// Two forms of dropping. A gather moves what stays together: slots keep the order of the text. Where a single
// token goes in every step, the next one takes its slot (drop_form::overwrite): slots are then in no order,
// so whatever depends on it goes by rank: protection, ties, kept(). Attention needs no order: the one row of
// a step sees all slots, and rows behind it lie behind it. What an observer adds up per slot needs none
// either, if every query saw all slots (takes_over()).

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "head_slots.hpp"
#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/attend/rope.hpp"
#include "kvcache/cache.hpp"
#include "observer.hpp"
#include "packed_blocks.hpp"
#include "session.hpp"

namespace engine {

using kvcache::drop_form;
using kvcache::keep_plan;

struct session::state {
  llama_model* model = nullptr;
  session_cache::parts* cache = nullptr;
  kvcache::retention what;
  session_options options;
  int slot = -1;

  kvcache::sequence whole;               // one table for all heads
  std::vector<kvcache::sequence> heads;  // [layers * kv_heads] a table each, or none
  std::vector<head_slots> tokens;        // [layers * kv_heads] who lies where
  bool overwrites = false;               // the step under way takes slots of tokens that went
  bool due = false;                      // a step was taken since the policy was last asked
  int position = 0;                      // tokens computed
  int reused = 0;
  attention_observer seen;

  // A draft under way: its queries, shown to the observer when they are accepted.
  struct pending_layer {
    std::vector<float> q, lse2;
  };
  bool drafting = false;
  std::vector<pending_layer> pending;  // [layers]
  int drafted = 0;

  ~state();
  bool split() const { return !heads.empty(); }
  std::size_t index(int layer, int kv_head) const;
  std::int64_t tokens_held() const;
  int mean_held() const { return static_cast<int>(tokens_held() / static_cast<std::int64_t>(tokens.size())); }
  // Slots of the table that all heads share, a vacant one included.
  int slots() const { return tokens[0].slots(); }
};

/// Why a drop is tried.
enum class drop_reason { token, prompt_end, no_block };

/// The cache: memory, steps and drops of all texts.
struct session_cache::parts final : kv_backend {
  using state = session::state;

  status create(const cache_config& c);
  status make_split();
  kv_shape shape() const { return config.shape; }
  int head_count() const { return config.shape.layers * config.shape.kv_heads; }
  bool packed() const { return !config.formats.empty(); }

  status begin_step(std::span<const step_segment> segments) override;
  void attend(int layer, const float* q, const float* k, const float* v, float* out) override;
  void end_step() override;

  layer_keys keys_of(const state& s, int layer);
  std::vector<float> value_norms(const state& s, int layer, int kv_head) const;
  int rows_until_drop(const kvcache::retention& what, int held, int rows) const;
  std::pair<int, int> reusable(const kvcache::retention& what, const session_options& with) const;
  result<int> prepare(state& s, int tokens, bool draft);
  result<int> make_room(state& s, int tokens, bool draft);
  result<int> extend(state& s, int tokens, bool draft);
  result<int> extend_whole(state& s, int tokens, bool draft);
  void give_back_room(std::span<const step_segment> segments);
  void count_overwritten(state& s);
  void move_blocks(std::span<const kvc_keep> keeps);
  void run_commands(std::span<const kvc_keep> keeps = {});
  void run_split_commands(std::span<const kvc_keep> keeps = {});

  // Dropping.
  status settle(state& s);
  status drop(state& s, drop_reason why);
  status retain_whole(state& s, const keep_plan& plan, bool at_a_loss);
  status cut(state& s, const keep_plan& plan, bool at_a_loss);
  bool takes_over(const state& s, const keep_plan& plan) const;
  void vacate(state& s, const std::vector<std::vector<std::int32_t>>& kept);
  result<std::vector<std::vector<float>>> scores(state& s);
  result<std::vector<std::vector<std::int32_t>>> choose(state& s, const keep_plan& plan);
  status gather_whole(state& s, const keep_plan& plan, const std::vector<std::vector<std::int32_t>>& kept,
                      bool at_a_loss);
  status pack(state& s);
  status gather_packed(state& s, const std::vector<std::vector<std::int32_t>>& kept);
  status gather_heads(state& s, const std::vector<std::vector<std::int32_t>>& kept);
  status split(state& s, const std::vector<std::vector<std::int32_t>>& kept);

  cache_config config;
  kvcache::cache whole;
  kvcache::host_planes whole_planes;
  std::optional<kvcache::cache> heads;  // one sequence per text, layer and kv head
  kvcache::host_planes head_planes;     // one layer of one head
  kvcache::rope rope;
  kvcache::attention whole_attention;
  kvcache::attention head_attention;
  kvcache::attention whole_observing;  // planned for any number of rows
  kvcache::attention head_observing;
  kvc_executor executor{};
  std::vector<state*> by_slot;

 private:
  // Consecutive segments of a step that are read in the same way.
  struct stretch {
    std::size_t first, count;
    int row, rows;
    bool split;
  };
  static void run_tasks(void* self, void (*task)(void*, std::int32_t), void* arg, std::int32_t n);
  status plan(kvcache::attention& which, const kvc_kv& kv, int query_heads, int sequences, int rows,
              int slots);
  status plan_step();
  void plan_scores();
  float* scores_of(std::size_t row);
  void attend_whole(int layer, const stretch& part, const float* k, const float* v, float* out);
  void attend_split(int layer, const stretch& part, const float* k, const float* v, float* out);
  // A table that is read, and the heads that share it; `rows` of the step belong to it.
  struct reading {
    const kvcache::sequence* table;
    const head_slots* heads;  // [kv_heads]
    int rows;
  };
  void attend_heads(std::span<const reading> tables, const float* q, const float* k, const float* v,
                    float* out, float* lse2, const kvc_kv& kv, kvcache::attention& with, int query_heads,
                    int kv_heads, std::span<const int> text_positions, float* scores);
  void write_head_slots(const reading& of, int kv_heads, std::span<std::int64_t> out) const;
  void describe_packed();
  void observe(int layer);

  std::vector<step_segment> segments_;
  std::vector<stretch> stretches_;
  std::vector<int> positions_;  // [rows] in the text
  std::vector<float> rotated_;  // [rows][query_heads][head_dim]
  std::vector<float> lse2_;     // [rows][query_heads]
  std::vector<float> scores_;   // [rows][query_heads][score_stride_], of a step of single rows
  std::int64_t score_stride_ = 0;
  packed_rows extra_;  // if packed()
};

}  // namespace engine
