// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model whose weights were written by hand, so that it is known which token it needs: associative recall by
// one layer of attention. A text is made of pairs; a question names a key, and the answer is the pair's
// value.
//
//   pair 17        key code 15 bits ── K ─┐
//                  value code 6 bits ─ V ─┼─ attention ── value bits ──> answer 42
//   question 17    key code 15 bits ── Q ─┘
//
// A question's score, in nats: 300 with its pair, 280 with another question, at most 260 with another pair.
// So nothing but its pair answers, at every length up to 32,768; without the pair it looks at itself, whose
// value says "not known". Never is another value named: an answer is right, or unknown, or the cache is
// wrong.
//
// Questions of one half of the keys are asked by the first head, those of the other half by the second, so a
// right keep-set is one position in one kv head. Codes lie in channels that RoPE does not turn (its base is
// 1e30): a text may be of any order and length.

#include <cstdint>
#include <memory>

#include "model.hpp"

namespace lab {

/// Keys there are, at most: also the longest text.
constexpr int most_pairs = 32768;
/// Values there are.
constexpr int recall_values = 64;

/// Token ids of a model with `keys` keys: pairs, then questions, then answers, then "not known".
struct recall_vocabulary {
  int keys = 0;
  std::uint64_t seed = 0;  ///< which key has which value

  engine::token_id pair(int key) const { return key; }
  engine::token_id question(int key) const { return keys + key; }
  engine::token_id answer(int value) const { return 2 * keys + value; }
  engine::token_id unknown() const { return 2 * keys + recall_values; }
  int size() const { return 2 * keys + recall_values + 1; }
  /// The value of a key, one of recall_values.
  int value_of(int key) const;
  /// The kv head whose keys the question is compared with.
  int head_of(int key) const { return key % 2; }
};

/// The model. `pool` must outlive it. Fails: as llama_model::load. Requires: 1 <= keys <= most_pairs.
engine::result<std::unique_ptr<engine::llama_model>> constructed_recall(const recall_vocabulary& words,
                                                                        engine::thread_pool& pool);

}  // namespace lab
