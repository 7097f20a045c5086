// SPDX-License-Identifier: Apache-2.0
#pragma once

// Continuous batching: many requests share the model's steps and the cache.
//
//   pending ── arrives ──> waiting ── admitted ──> running ── last token ──> answered
//                             ^                       │
//                             └─ preempted: no blocks ┘   what was computed stays findable as a prefix
//
// A step is a ragged batch: one row for each request that is decoding, then pieces of prompts, together at
// most `chunk` rows. Time is the number of the step, so a workload always runs the same way; only what the
// cache answers (room, reuse) differs between its kinds. Which tokens a request gets does not depend on any
// of it: not on its neighbours, the chunk, the block size, preemptions or the cache kind.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache_kind.hpp"
#include "model.hpp"
#include "sampling.hpp"

namespace engine {

/// One entry of a workload, as tokens. With follow-ups it is a conversation: each turn is a request of its
/// own, which resends everything before it and begins when the turn before is answered.
struct job {
  std::string id;
  std::int64_t line = -1;    ///< in the workload file, for messages
  std::int64_t arrival = 0;  ///< step
  std::vector<token_id> prompt;
  std::vector<std::vector<token_id>> follow_ups;
  token_id end_of_turn = -1;  ///< put behind an answer that lacks it before a follow-up
  int max_new = 0;
  cache_scope scope;
  int samples = 1;  ///< answers to the prompt; sample i draws with seed + i. More than 1: no follow-ups
  sampling how;
};

/// The most tokens that turn `turn` of the job may come to, its answer included.
std::int64_t most_tokens(const job& from, std::size_t turn);

/// What became of one request.
struct answer {
  const job* from = nullptr;
  int turn = 0;
  int sample = 0;
  std::vector<token_id> text;  ///< prompt, then what was generated
  int prompt_tokens = 0;
  const char* stop = "";  ///< "length", "eos", "context"; "out_of_blocks": it does not fit even alone
  int reused = 0;         ///< prompt tokens found in the cache or shared by a fork
  int prefilled = 0;      ///< prompt tokens computed; reused + prefilled = prompt_tokens
  int recomputed = 0;     ///< tokens computed once more after a preemption
  int preempted = 0;      ///< times
  int dropped = 0;        ///< tokens that a policy had let go when its last one was computed
  std::uint64_t fnv = 0;  ///< see chain()
  std::int64_t first_token_step = -1;
  std::int64_t finish_step = -1;

  std::span<const token_id> ids() const {
    return std::span(text).subspan(static_cast<std::size_t>(prompt_tokens));
  }
};

/// Before the first step of an answer.
inline constexpr std::uint64_t chain_start = 0xCBF29CE484222325u;

/// FNV-1a, 64 bit, over the fingerprints of an answer's steps in order, each as 8 bytes, lowest first: one
/// number that is equal if every logit of every step has the same bits.
std::uint64_t chain(std::uint64_t so_far, std::uint64_t step_fingerprint);

struct serve_totals {
  std::int64_t steps = 0;
  std::int64_t asked = 0;  ///< prompt tokens of all requests that arrived
  std::int64_t reused = 0;
  std::int64_t prefilled = 0;
  std::int64_t recomputed = 0;
  std::int64_t generated = 0;
  std::int64_t preemptions = 0;
  std::int64_t dropped = 0;  ///< of all answers, see answer::dropped
  int peak_running = 0;
  // Sampled in each step, all sequences of the step still open.
  std::int64_t peak_blocks = 0;
  std::size_t peak_held = 0;      ///< bytes
  std::size_t peak_reserved = 0;  ///< bytes
  double held_steps = 0;          ///< bytes x steps
  double reserved_steps = 0;      ///< bytes x steps

  /// Of the memory set aside for open sequences, the part in which no token was stored, averaged over steps.
  double waste_percent() const {
    return reserved_steps > 0 ? 100.0 * (1.0 - held_steps / reserved_steps) : 0.0;
  }
};

struct serve_progress {
  std::int64_t answered = 0;
  std::int64_t answers_expected = 0;
  std::int64_t tokens_done = 0;
  std::int64_t tokens_expected = 0;  ///< falls when an answer ends early
  std::size_t running = 0;
  std::size_t waiting = 0;
};

struct scheduler_options {
  int batch = 8;    ///< requests running at the same time; at most the cache's max_sequences
  int chunk = 128;  ///< rows of a step
  std::function<bool(token_id)> is_stop;
};

/// Serves jobs over one cache. The jobs, the model and the cache must outlive it.
/// Thread safety: one thread at a time.
class scheduler {
 public:
  scheduler(llama_model& model, cache_kind& cache, std::span<const job> jobs, scheduler_options options);
  scheduler(const scheduler&) = delete;
  scheduler& operator=(const scheduler&) = delete;
  /// Closes the sequences that are still open.
  ~scheduler();

  bool done() const { return pending_.empty() && waiting_.empty() && running_.empty(); }

  /// One step. A request that does not fit into the cache even alone is answered with stop "out_of_blocks",
  /// and the others go on. Fails: what the model or the cache refuses for another reason.
  status step();

  /// Steps until done; `after_step` may be empty.
  status run(const std::function<void()>& after_step);

  /// Answers by job, turn and sample. Requires: done().
  std::vector<const answer*> answers() const;
  /// The first request that did not fit: code out_of_blocks, field "id".
  const std::optional<error>& failure() const { return failure_; }
  const serve_totals& totals() const { return totals_; }
  serve_progress progress() const;

 private:
  struct request;
  using age = std::pair<std::int64_t, int>;  ///< order of arrival, then sample: the largest is the youngest
  using queue = std::map<age, request*>;
  struct planned {
    request* who;
    int rows;
  };

  request& make_request(const job& from, int turn, int sample, std::vector<token_id> prompt);
  void arrive();
  int places_taken() const;
  status plan_running(bool decoding);
  result<int> make_room(request& r, int rows);
  status preempt(request& r);
  void refuse(request& r);
  status admit();
  status execute();
  status after_forward(const planned& p);
  status give_logits(request& r, std::span<const float> logits);
  result<std::vector<request*>> branch(request& r);
  void take_token(request& r, std::span<const float> logits, std::uint64_t hash);
  status finish(request& r);
  void measure();

  llama_model& model_;
  cache_kind& cache_;
  std::span<const job> jobs_;
  scheduler_options options_;
  std::vector<std::unique_ptr<request>> requests_;
  std::multimap<std::int64_t, request*> pending_;  ///< by arrival
  queue waiting_;
  queue running_;
  std::int64_t now_ = 0;
  std::int64_t next_ticket_ = 0;
  serve_totals totals_;
  serve_progress progress_;
  std::optional<error> failure_;

  // The step under way.
  std::vector<planned> plan_;
  int left_ = 0;  ///< rows
  bool preempted_now_ = false;
  std::vector<token_id> tokens_;
  std::vector<step_segment> segments_;
  std::vector<int> wanted_;
  std::vector<float> logits_;
};

}  // namespace engine
