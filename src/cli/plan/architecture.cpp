// SPDX-License-Identifier: Apache-2.0
#include "plan/architecture.hpp"

#include "error.hpp"

namespace kvcache::cli {
namespace {

// T is double to see how large it gets, then int64 to be exact.
template <class T>
T attention_parameters(const architecture& a) {
  const T hidden = a.hidden, heads = a.q_heads;
  if (a.latent != 0) {
    const T key = T(a.nope_dim) + T(a.rope_dim);
    const T query = a.q_latent == 0 ? hidden * heads * key
                                    : hidden * T(a.q_latent) + T(a.q_latent) + T(a.q_latent) * heads * key;
    const T down = hidden * (T(a.latent) + T(a.rope_dim)) + T(a.latent);
    const T up = T(a.latent) * heads * (T(a.nope_dim) + T(a.v_dim));
    return query + down + up + heads * T(a.v_dim) * hidden;
  }
  const T q = heads * T(a.head_dim), kv = T(a.kv_heads) * T(a.head_dim);
  T sum = 2 * hidden * q + 2 * hidden * kv;
  if (a.qkv_bias) sum += q + 2 * kv;
  if (a.output_bias) sum += hidden;
  if (a.head_norm) sum += 2 * T(a.head_dim);
  if (a.wide_norm) sum += q + kv;
  if (a.sinks) sum += heads;
  return sum;
}

template <class T>
T ffn_parameters(const architecture& a, T width) {
  const T inner = a.plain_ffn ? 1 : 2;  // matrices that lead in
  return (inner + 1) * T(a.hidden) * width + (a.ffn_bias ? inner * width + T(a.hidden) : T(0));
}

template <class T>
T routed_parameters(const architecture& a) {
  return T(a.layers - a.dense_layers) * T(a.experts) * ffn_parameters<T>(a, a.expert_ffn);
}

template <class T>
T all_parameters(const architecture& a) {
  const T hidden = a.hidden, norm = hidden * (a.norm_bias ? 2 : 1);
  const T plain = a.experts == 0 ? a.layers : a.dense_layers;
  T sum = T(a.layers) * (attention_parameters<T>(a) + T(a.norms) * norm) + norm;
  sum += plain * ffn_parameters<T>(a, a.ffn);
  if (a.experts != 0) {
    T router = hidden * T(a.experts);
    if (a.router_bias || a.ffn_bias) router += T(a.experts);
    const T shared = a.shared_ffn == 0 ? T(0) : ffn_parameters<T>(a, a.shared_ffn);
    sum += routed_parameters<T>(a) + (T(a.layers) - plain) * (router + shared);
  }
  return sum + T(a.vocabulary) * hidden * (a.tied ? 1 : 2) + T(a.learned_positions) * hidden;
}

}  // namespace

const char* name_of(layer_kind kind) {
  constexpr const char* names[] = {"full", "window", "latent", "none"};
  return names[static_cast<int>(kind)];
}

std::int64_t expert_parameters_of(const architecture& a) {
  return a.experts == 0 ? 0 : routed_parameters<std::int64_t>(a);
}

std::int64_t parameters_of(const architecture& a) {
  const double about = all_parameters<double>(a);
  if (about >= 36028797018963968.0) {  // 2^55: bits still fit 64
    throw error(failure::bad_input, "too_large", "parameters", std::to_string(about));
  }
  return all_parameters<std::int64_t>(a);
}

std::vector<layer> layers_of(const architecture& a) {
  std::vector<layer> out(static_cast<std::size_t>(a.layers));
  for (std::int32_t i = 0; i < a.layers; ++i) {
    layer& l = out[static_cast<std::size_t>(i)];
    if (a.latent != 0) {
      l = {layer_kind::latent, 0, 1, a.latent + a.rope_dim, a.latent};
      continue;
    }
    const bool full = a.window == 0 || (a.full_every != 0 && (i + 1) % a.full_every == 0);
    l = {full ? layer_kind::full : layer_kind::window, full ? 0 : a.window, a.kv_heads, a.head_dim,
         a.head_dim};
  }
  return out;
}

model model_of(const architecture& a) {
  model m;
  m.name = a.name;
  m.source = "catalogue";
  m.layers = layers_of(a);
  m.q_heads = a.q_heads;
  m.context = a.context;
  m.parameters = parameters_of(a);
  m.parameters_by = "computed";
  m.published_bits = a.published_bits;
  m.expert_parameters = expert_parameters_of(a);
  m.experts = a.experts;
  m.experts_used = a.experts_used;
  return m;
}

}  // namespace kvcache::cli
