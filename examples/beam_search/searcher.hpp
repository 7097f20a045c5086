// SPDX-License-Identifier: Apache-2.0
#pragma once

// Beam search over one cache: a beam is a sequence, and the only verbs it needs are fork and assign.
//
//   children of all beams ── best `width` ──> place: heirs stay, the others take over the slots of dead beams
//                                             write: one row per beam in one step

#include <functional>
#include <span>
#include <vector>

#include "example.hpp"

namespace beams {

using engine::token_id;

/// The tokens worth considering after one row of logits.
using candidates = std::function<std::vector<token_id>(std::span<const float> logits)>;

struct beam {
  std::vector<token_id> ids;
  double score = 0;  ///< sum of the log-probabilities, added in text order
};

/// Better first; among equals the text that comes first, so that the order is never an accident.
inline bool better(const beam& a, const beam& b) {
  return a.score != b.score ? a.score > b.score : a.ids < b.ids;
}

struct step_cost {
  int reassigned = 0;       ///< beams that became a copy of another
  int entries = 0;          ///< table entries changed by that
  std::int64_t copies = 0;  ///< blocks copied because a writer found them shared
};

struct outcome {
  std::vector<beam> beams;  ///< best first
  std::vector<step_cost> steps;
  std::int64_t blocks = 0;          ///< in use at the end
  std::vector<float> first_logits;  ///< what follows the prompt
};

/// One search. Closes its sequences when it goes.
class searcher {
 public:
  /// Requires: `choose` returns at least one token, and the cache has room for `width` sequences.
  searcher(engine::llama_model& model, engine::cache_kind& cache, candidates choose, int width);
  searcher(const searcher&) = delete;
  searcher& operator=(const searcher&) = delete;
  ~searcher();

  /// Requires: called once. depth is at least 1.
  engine::result<outcome> run(std::span<const token_id> prompt, int depth, int chunk);

 private:
  struct child {
    beam text;
    std::size_t parent;  ///< index of a beam
  };

  std::vector<child> best_children() const;
  engine::status place(const std::vector<child>& children, step_cost& cost);
  engine::status write();

  engine::llama_model& model_;
  engine::cache_kind& cache_;
  candidates choose_;
  std::size_t width_;
  std::vector<int> slots_;  ///< the beams' sequences, in the order of beams_
  std::vector<beam> beams_;
  std::vector<float> logits_;  ///< [beams][vocabulary]
};

}  // namespace beams
