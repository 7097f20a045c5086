// SPDX-License-Identifier: Apache-2.0
#pragma once

// The control whose right keep-set is known. On a text of pairs a question is answered exactly if the pair it
// names is held (constructed.hpp), so each outcome can be told from what the policy kept:
//
//   text        pair pair pair ... pair          policy acts        question   question   ...
//   held        is the pair among session::kept of its head?   ──>  right      unknown
//
// Any other outcome is a fault of the cache, not of the policy: tokens at a wrong place, mixed up heads or
// blocks. And for policies that know nothing of the questions the share that is right is known beforehand.

#include <string>
#include <vector>

#include "program.hpp"
#include "score.hpp"

namespace lab {

struct recall_options {
  engine::common_options common;  ///< without a model
  std::vector<std::string> policies;
  int length = 4096;  ///< pairs
  int asked = 64;     ///< of them are asked for, evenly spread
  std::uint64_t seed = 0;
  bool question_inside = false;  ///< asked once before the policy acts, then again
  mode how = mode::oneshot;
  int random_seeds = 3;
};

/// What one configuration answered.
struct recall_row {
  std::string policy;
  std::string control;     ///< "full", "window", "random", "oracle"; empty: a policy asked for
  int right = 0;           ///< of recall_options::asked
  int unknown = 0;         ///< answered with "not known"
  int held = 0;            ///< pairs asked for that their head held
  int differs = 0;         ///< outcomes that are not as the kept positions say
  bool ruled = false;      ///< the policy's rule says which answers must be right
  int breaks_rule = 0;     ///< outcomes that are not as it says
  double tokens_held = 0;  ///< before the questions, mean over the heads
  std::size_t bytes_held = 0;
  std::size_t bytes_full = 0;
};

/// Runs all policies, each beside window, random (several seeds) and oracle of equal bytes: the oracle keeps
/// what is going to be asked. Fails: usage for a policy that is no good; as the engine.
engine::result<std::vector<recall_row>> run_recall(const recall_options& options);

/// As a document. Fails: cannot_run "differs" naming the first policy with an outcome that is not as the kept
/// positions, or its rule, say.
engine::result<engine::json> recall_document(const recall_options& options,
                                             const std::vector<recall_row>& rows);

}  // namespace lab
