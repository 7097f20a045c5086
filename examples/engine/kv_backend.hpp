// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the model knows of the cache: where its keys and values go and what comes back. One step is a ragged
// batch of rows; a row is one token. Each sequence in the step owns one run of rows, a segment:
//
//   rows      0 1 2 3 4 5 | 6 | 7 | 8 9
//   segments  slot 2      | 0 | 5 | slot 3      (prefill chunk, decode, decode, short chunk)
//
// The model hands over q, k and v as the linear layers leave them. RoPE, storing and attention belong to the
// backend, because it is the cache that knows a token's position and which numeric format it is stored in.

#include <cstdint>
#include <span>

#include "error.hpp"

namespace engine {

using token_id = std::int32_t;

/// The part of a model's shape that a cache depends on.
struct kv_shape {
  int layers = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  double rope_base = 10000.0;
  int max_positions = 0;  ///< context length of the model
};

/// Consecutive tokens of one sequence in a step.
struct step_segment {
  int slot = 0;               ///< the sequence, as named by the cache
  std::int64_t position = 0;  ///< of the first row
  int rows = 0;               ///< at least 1
};

/// The cache as the model sees it during a step.
/// Thread safety: called by one thread; may use a thread pool inside.
class kv_backend {
 public:
  virtual ~kv_backend() = default;

  /// Announces the rows of the step. All that can fail is checked here, before anything is written.
  /// Requires: a slot occurs once; room for the rows was made before (cache_kind::extend).
  /// Fails: a slot that is not open, a position that is not the next one, no room.
  virtual status begin_step(std::span<const step_segment> segments) = 0;

  /// For one layer: rotates q and k (interleaved pairs) by the rows' positions, stores k and v, then lets
  /// each row attend to all tokens of its sequence up to itself. Called once per layer, in order. q:
  /// [rows][query_heads][head_dim], k and v: [rows][kv_heads][head_dim], out: [rows][query_heads][head_dim];
  /// all f32, dense, before RoPE. Scores are scaled by 1/sqrt(head_dim).
  virtual void attend(int layer, const float* q, const float* k, const float* v, float* out) = 0;

  /// The step is over: its rows are part of their sequences.
  virtual void end_step() = 0;
};

}  // namespace engine
