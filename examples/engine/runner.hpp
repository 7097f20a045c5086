// SPDX-License-Identifier: Apache-2.0
#pragma once

// One prompt through model and cache: prefill in chunks, then token by token. Every line of the programs that
// touches the cache for a single sequence is in here.

#include <functional>
#include <span>
#include <vector>

#include "cache_kind.hpp"
#include "model.hpp"
#include "sampling.hpp"

namespace engine {

/// An open sequence of a cache, closed when the object goes.
class open_slot {
 public:
  open_slot(cache_kind& cache, int slot) : cache_(&cache), slot_(slot) {}
  open_slot(const open_slot&) = delete;
  open_slot& operator=(const open_slot&) = delete;
  ~open_slot() { cache_->close(slot_); }

  int slot() const { return slot_; }

 private:
  cache_kind* cache_;
  int slot_;
};

/// Called for computed positions in order: `position` is the last token consumed, `logits` predict the next.
using logits_observer = std::function<void(int position, std::span<const float> logits)>;

/// Which positions the observer sees.
enum class observe { last, all };

/// Runs `tokens`, which follow what the sequence holds already, in chunks of at most `chunk` rows.
/// Fails: as cache_kind::extend and llama_model::forward; tokens of finished chunks stay in the sequence.
status feed(llama_model& model, cache_kind& cache, int slot, std::span<const token_id> tokens, int chunk,
            observe which, const logits_observer& observer);

struct generation_options {
  int max_new = 0;
  int chunk = 128;
  sampling how;
  bool stop_at_end = true;
  observe which = observe::last;  ///< last: positions that produce a token
};

struct generation {
  std::vector<token_id> ids;  ///< generated, the stop token included
  const char* stop = "";      ///< "length", "eos" or "context"
  int reused = 0;
  int prefilled = 0;
  cache_bytes bytes;  ///< at the end, the sequence still open
  double prefill_seconds = 0;
  double decode_seconds = 0;
};

/// Chooses tokens from `last` until the text ends; `advance` computes the logits after a token into `last`
/// again and says false when the context is full. Fills out.ids and out.stop.
status choose_tokens(const generation_options& options, const std::function<bool(token_id)>& is_stop,
                     const std::function<void(token_id)>& on_token, const std::vector<float>& last,
                     const std::function<result<bool>(token_id)>& advance, generation& out);

/// Generates after `prompt` in a sequence of its own, and commits what was written.
/// `is_stop` decides which token ends the text; `on_token` is called for each generated token.
result<generation> generate(llama_model& model, cache_kind& cache, std::span<const token_id> prompt,
                            const cache_scope& scope, const generation_options& options,
                            const std::function<bool(token_id)>& is_stop,
                            const std::function<void(token_id)>& on_token, const logits_observer& observer);

/// Negative log-likelihood of each token but the first, given those before it.
result<std::vector<double>> score(llama_model& model, cache_kind& cache, std::span<const token_id> ids,
                                  int chunk);

}  // namespace engine
