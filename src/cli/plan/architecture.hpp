// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decoder in numbers, as its configuration file states them: enough to know what each layer caches and how
// many parameters the model has. The catalogue and config.json end here; the planner goes on from `model`.
//
//   catalogue (facts)  ──┐
//   config.json        ──┴─> architecture ──> model_of ──┐
//   GGUF metadata      ───────────────────────────────────┼─> model ──> planner
//   --shape            ───────────────────────────────────┘

#include <cstdint>
#include <string>
#include <vector>

namespace kvcache::cli {

/// Numbers of a decoder. What a model does not have is 0 or false.
struct architecture {
  const char* name = "";  ///< in the catalogue

  std::int32_t layers = 0;
  std::int32_t hidden = 0;
  std::int32_t q_heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t ffn = 0;  ///< of dense layers
  std::int32_t vocabulary = 0;
  bool tied = false;         ///< output layer = embedding
  std::int32_t context = 0;  ///< trained for, 0 = not known

  std::int32_t window = 0;  ///< tokens, the query's own counted
  /// Of the layers with a window every n-th is full: the n-th, the 2n-th, ...; 0 = all have the window.
  std::int32_t full_every = 0;

  std::int32_t experts = 0;       ///< routed ones, per layer that has them
  std::int32_t experts_used = 0;  ///< of these, per token
  std::int32_t expert_ffn = 0;
  std::int32_t shared_ffn = 0;    ///< of the experts that every token uses, together
  std::int32_t dense_layers = 0;  ///< first layers without experts

  std::int32_t latent = 0;    ///< MLA: values of the compressed K and V
  std::int32_t rope_dim = 0;  ///< MLA: values of the rotated key beside it
  std::int32_t q_latent = 0;  ///< MLA: rank of the query projection, 0 = a full one
  std::int32_t nope_dim = 0;  ///< MLA: values of a key head without rotation
  std::int32_t v_dim = 0;     ///< MLA: values of a value head

  bool qkv_bias = false;
  bool output_bias = false;
  bool ffn_bias = false;     ///< of experts and their router, too
  bool router_bias = false;  ///< DeepSeek V3's correction
  bool norm_bias = false;    ///< LayerNorm
  bool plain_ffn = false;    ///< two matrices, not a gate beside them
  bool head_norm = false;    ///< of q and k, per head
  bool wide_norm = false;    ///< of q and k, over all heads
  bool sinks = false;        ///< a learned number per query head
  std::int32_t norms = 2;    ///< per layer
  std::int32_t learned_positions = 0;

  double published_bits = 16;  ///< of the weights as published, about
  /// Parameters as the model card or paper states them, in thousands of millions: a test compares them with
  /// what `parameters_of` computes.
  double stated_billions = 0;
};

/// What a layer caches.
enum class layer_kind : std::uint8_t {
  full,    ///< K and V of the whole text
  window,  ///< K and V of the last tokens
  latent,  ///< MLA: one latent per token
  none,    ///< nothing that grows with the text: recurrent, or another layer's cache
};

/// "full", "window", "latent", "none".
const char* name_of(layer_kind kind);

/// One layer's cache.
struct layer {
  layer_kind kind = layer_kind::full;
  std::int32_t window = 0;      ///< tokens; 0 = all
  std::int32_t kv_heads = 0;    ///< 1 for a latent
  std::int32_t head_dim_k = 0;  ///< of a latent: all it stores
  std::int32_t head_dim_v = 0;  ///< of a latent: its first values, stored once
  bool operator==(const layer&) const = default;
};

/// A model as the planner sees it.
struct model {
  std::string name;
  std::string source;  ///< "catalogue", "config", "gguf", "shape"
  std::string file;    ///< may be empty
  std::vector<layer> layers;
  std::int32_t q_heads = 0;            ///< 0 = not known
  std::int32_t context = 0;            ///< trained for, 0 = not known
  std::int64_t parameters = 0;         ///< 0 = not known
  std::string parameters_by;           ///< "computed", "estimated", "tensors", "given"
  std::int64_t stored_bytes = 0;       ///< weights as the file has them; 0 = not known
  double published_bits = 16;          ///< of the weights, about
  std::int64_t expert_parameters = 0;  ///< of these, those of all routed experts
  std::int32_t experts = 0;            ///< per layer, 0 = none
  std::int32_t experts_used = 0;       ///< per token
  std::vector<std::string> notes;      ///< what a reader of the plan should know
};

/// Parameters of all routed experts together. Requires: parameters_of has answered.
std::int64_t expert_parameters_of(const architecture& a);

/// Parameters from the shapes of all matrices, biases and norms. Fails: bad_input if they are 2^55 or more.
std::int64_t parameters_of(const architecture& a);

/// The layers one by one.
std::vector<layer> layers_of(const architecture& a);

/// Everything the planner needs.
model model_of(const architecture& a);

}  // namespace kvcache::cli
