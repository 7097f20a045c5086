// SPDX-License-Identifier: Apache-2.0
#pragma once

// One prompt through model and session: as runner.hpp, but tokens leave by a retention policy.

#include <functional>
#include <span>
#include <string>

#include "runner.hpp"
#include "session.hpp"

namespace engine {

/// How tokens leave while a text is generated, and how blocks are packed.
struct dropping {
  kvcache::retention policy;
  drop_mode mode = drop_mode::oneshot;  ///< oneshot: once, when the prompt is complete
  kvcache::kv_format format{};          ///< oneshot: the prompt's blocks, when it is complete

  /// Whether anything is rounded when a block is full.
  bool packs() const { return kvcache::lossy(format); }
};

/// Policy and format as text (policy_text.hpp).
std::string policy_text(const dropping& how);

/// A text generated under a policy.
struct kept_generation : generation {
  int dropped = 0;  ///< at the end, on average over the heads
};

/// Generates after `prompt` in a session of its own, and commits what was written, unless it has dropped.
/// Else as generate() of runner.hpp. bytes: held = values of tokens that are kept, reserved = blocks of its
/// tables.
result<kept_generation> generate(llama_model& model, session_cache& cache, const dropping& how,
                                 std::span<const token_id> prompt, const cache_scope& scope, kv_type type,
                                 const generation_options& options,
                                 const std::function<bool(token_id)>& is_stop,
                                 const std::function<void(token_id)>& on_token,
                                 const logits_observer& observer);

/// As score() of runner.hpp, under a policy that is in force from the first token on.
result<std::vector<double>> score(llama_model& model, session_cache& cache, const dropping& how,
                                  std::span<const token_id> ids, int chunk);

}  // namespace engine
