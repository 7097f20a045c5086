// SPDX-License-Identifier: Apache-2.0
#pragma once

// A Llama transformer read from a GGUF file, computed in f32. One call of forward() is one step: any number
// of rows (tokens) of any number of sequences. A row's results are the same bits whatever other rows share
// the step, however a prompt is cut into steps, and for every number of threads (see gemm.hpp for how).

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gemm.hpp"
#include "gguf.hpp"
#include "kv_backend.hpp"
#include "panel_matrix.hpp"
#include "thread_pool.hpp"

namespace engine {

struct model_shape {
  int width = 0;         ///< values per token between layers
  int feed_forward = 0;  ///< values per token inside the feed-forward part
  int vocabulary = 0;
  float epsilon = 0;  ///< of the RMS norms
  kv_shape kv;
};

/// Weights and forward pass. Owns its weights; the file may be closed after loading.
/// Thread safety: forward() by one thread at a time.
class llama_model {
 public:
  /// Reads and widens the weights. `pool` must outlive the model.
  /// Fails: bad_input for missing or misshapen parts, cannot_run for features this engine does not have.
  static result<std::unique_ptr<llama_model>> load(const gguf_file& file, thread_pool& pool,
                                                   simd_target target = best_simd_target());

  const model_shape& shape() const { return shape_; }
  simd_target target() const { return target_; }
  /// Bytes of weights in memory.
  std::size_t weight_bytes() const;

  /// One step. `tokens` are the rows, cut into sequences by `segments`; `logit_rows` names the rows whose
  /// logits are wanted, in any order. logits: [logit_rows][vocabulary]. Fails: a token outside the
  /// vocabulary, sizes that do not fit, what backend.begin_step() refuses; then no key or value was written.
  status forward(std::span<const token_id> tokens, std::span<const step_segment> segments,
                 std::span<const int> logit_rows, kv_backend& backend, std::span<float> logits);

 private:
  struct layer {
    std::vector<float> attention_norm;
    panel_matrix query, key, value, attention_out;
    std::vector<float> feed_norm;
    panel_matrix gate, up, down;
  };

  class loader;
  llama_model(thread_pool& pool, simd_target target);

  const panel_matrix& output() const { return untied_ ? output_ : embedding_; }
  void size_buffers(int rows);
  void embed(std::span<const token_id> tokens);
  void normalise(const std::vector<float>& weight);
  const float* product(const panel_matrix& weights, int panel, const float* x, int columns, int worker);
  void project(const panel_matrix& weights, int panel, float* to, int worker);
  void project_qkv(const layer& at);
  void add_product(const panel_matrix& weights, const std::vector<float>& x);
  void feed_forward(const layer& at);
  void write_logits(std::span<const int> logit_rows, std::span<float> logits);

  thread_pool& pool_;
  simd_target target_;
  panel_product product_;
  model_shape shape_;
  panel_matrix embedding_;
  panel_matrix output_;
  bool untied_ = false;
  std::vector<float> output_norm_;
  std::vector<layer> layers_;

  // Buffers of the step under way. Those read by a product have columns up to the next multiple of 4, the
  // extra ones zero.
  int rows_ = 0;
  int columns_ = 0;
  std::vector<float> residual_;             ///< [rows][width]
  std::vector<float> normed_;               ///< [columns][width]
  std::vector<float> query_, key_, value_;  ///< [rows][heads * head_dim]
  std::vector<float> attended_;             ///< [columns][query_heads * head_dim]
  std::vector<float> activated_;            ///< [columns][feed_forward]
  struct scratch {
    std::vector<float> first, second;  ///< [columns][96]
  };
  std::vector<scratch> scratch_;  ///< one per worker
};

}  // namespace engine
