// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace engine {
namespace {

constexpr std::uint64_t most_layers = 4096;
constexpr std::uint64_t most_values = 1u << 20;

void rms_norm(const float* x, const std::vector<float>& weight, float epsilon, float* out) {
  double squares = 0;
  for (std::size_t i = 0; i < weight.size(); ++i) squares += double{x[i]} * x[i];
  const auto mean = squares / static_cast<double>(weight.size());
  const auto scale = static_cast<float>(1.0 / std::sqrt(mean + epsilon));
  for (std::size_t i = 0; i < weight.size(); ++i) out[i] = x[i] * scale * weight[i];
}

float silu(float x) {
  return x / (1.0f + std::exp(-x));
}

}  // namespace

llama_model::llama_model(thread_pool& pool, simd_target target)
    : pool_(pool),
      target_(target),
      product_(panel_product_for(target)),
      scratch_(static_cast<std::size_t>(pool.size())) {}

// Reads metadata first, then the tensors the metadata ask for, each with exactly the shape it must have.
class llama_model::loader {
 public:
  loader(const gguf_file& file, llama_model& model) : file_(file), model_(model), shape_(model.shape_) {}

  status run() {
    if (status s = metadata(); !s) return s;
    if (status s = refuse_unknown_features(); !s) return s;
    if (status s = embeddings(); !s) return s;
    model_.layers_.resize(static_cast<std::size_t>(shape_.kv.layers));
    for (int i = 0; i < shape_.kv.layers; ++i) {
      if (status s = read_layer(i); !s) return s;
    }
    return {};
  }

 private:
  status read_count(const char* key, std::uint64_t limit, int& out) {
    const auto value = file_.unsigned_value(key);
    if (!value) return value.error();
    if (*value < 1 || *value > limit) return bad_input("bad_value", key, std::to_string(*value));
    out = static_cast<int>(*value);
    return {};
  }

  status read_positive(const char* key, double& out) {
    const auto value = file_.float_value(key);
    if (!value) return value.error();
    if (!std::isfinite(*value) || *value <= 0) return bad_input("bad_value", key, std::to_string(*value));
    out = *value;
    return {};
  }

  status metadata() {
    const auto architecture = file_.string_value("general.architecture");
    if (!architecture) return architecture.error();
    if (*architecture != "llama")
      return cannot_run("unsupported", "general.architecture", std::string(*architecture));
    kv_shape& kv = shape_.kv;
    if (status s = read_count("llama.block_count", most_layers, kv.layers); !s) return s;
    if (status s = read_count("llama.embedding_length", most_values, shape_.width); !s) return s;
    if (status s = read_count("llama.feed_forward_length", most_values, shape_.feed_forward); !s) return s;
    if (status s = read_count("llama.attention.head_count", most_values, kv.query_heads); !s) return s;
    kv.kv_heads = kv.query_heads;
    if (file_.has("llama.attention.head_count_kv")) {
      if (status s = read_count("llama.attention.head_count_kv", most_values, kv.kv_heads); !s) return s;
    }
    if (status s = read_count("llama.context_length", 1u << 30, kv.max_positions); !s) return s;
    double epsilon = 0;
    if (status s = read_positive("llama.attention.layer_norm_rms_epsilon", epsilon); !s) return s;
    shape_.epsilon = static_cast<float>(epsilon);
    kv.rope_base = 10000.0;
    if (file_.has("llama.rope.freq_base")) {
      if (status s = read_positive("llama.rope.freq_base", kv.rope_base); !s) return s;
    }
    return heads();
  }

  status heads() {
    kv_shape& kv = shape_.kv;
    if (shape_.width % kv.query_heads != 0)
      return bad_input("bad_value", "llama.attention.head_count", std::to_string(kv.query_heads));
    if (kv.query_heads % kv.kv_heads != 0)
      return bad_input("bad_value", "llama.attention.head_count_kv", std::to_string(kv.kv_heads));
    kv.head_dim = shape_.width / kv.query_heads;
    int rotated = kv.head_dim;
    if (file_.has("llama.rope.dimension_count")) {
      if (status s = read_count("llama.rope.dimension_count", most_values, rotated); !s) return s;
    }
    if (rotated != kv.head_dim)
      return cannot_run("unsupported", "llama.rope.dimension_count", std::to_string(rotated));
    if (kv.head_dim % 2 != 0) return cannot_run("unsupported", "head_dim", std::to_string(kv.head_dim));
    return {};
  }

  // What this engine would silently compute wrongly.
  status refuse_unknown_features() {
    for (const char* key : {"llama.attention.key_length", "llama.attention.value_length"}) {
      if (!file_.has(key)) continue;
      int length = 0;
      if (status s = read_count(key, most_values, length); !s) return s;
      if (length != shape_.kv.head_dim) return cannot_run("unsupported", key, std::to_string(length));
    }
    for (const char* key : {"llama.rope.scaling.type", "llama.rope.scale_linear", "llama.expert_count",
                            "llama.attention.sliding_window", "llama.logit_scale"}) {
      if (file_.has(key)) return cannot_run("unsupported", key, "present");
    }
    for (const gguf_tensor& tensor : file_.tensors()) {
      const std::string_view name = tensor.name;
      const bool bias = name.size() > 5 && name.substr(name.size() - 5) == ".bias";
      if (bias || name == "rope_freqs.weight") return cannot_run("unsupported", "tensor", tensor.name);
    }
    return {};
  }

  // The tensor, if it is there and its dims are [in, out] (out 0: one-dimensional).
  result<const gguf_tensor*> tensor(const std::string& name, int in, int out) {
    const gguf_tensor* found = file_.find(name);
    if (found == nullptr) return bad_input("missing_tensor", name, "absent");
    const int rank = out == 0 ? 1 : 2;
    if (found->rank != rank) return bad_input("bad_value", name + ".n_dims", std::to_string(found->rank));
    if (found->dims[0] != static_cast<std::uint64_t>(in))
      return bad_input("bad_value", name + ".dims[0]", std::to_string(found->dims[0]));
    if (out != 0 && found->dims[1] != static_cast<std::uint64_t>(out))
      return bad_input("bad_value", name + ".dims[1]", std::to_string(found->dims[1]));
    return found;
  }

  status matrix(const std::string& name, int in, int out, panel_matrix& to) {
    const auto found = tensor(name, in, out);
    if (!found) return found.error();
    to = panel_matrix(**found, model_.pool_);
    return {};
  }

  status vector(const std::string& name, int size, std::vector<float>& to) {
    const auto found = tensor(name, size, 0);
    if (!found) return found.error();
    to.resize(static_cast<std::size_t>(size));
    dequantise_row(**found, 0, to.data());
    return {};
  }

  status embeddings() {
    const gguf_tensor* table = file_.find("token_embd.weight");
    if (table == nullptr) return bad_input("missing_tensor", "token_embd.weight", "absent");
    if (table->rank != 2 || table->dims[1] > static_cast<std::uint64_t>(std::numeric_limits<int>::max() / 2))
      return bad_input("bad_value", "token_embd.weight.dims[1]", std::to_string(table->dims[1]));
    shape_.vocabulary = static_cast<int>(table->dims[1]);
    if (status s = matrix("token_embd.weight", shape_.width, shape_.vocabulary, model_.embedding_); !s)
      return s;
    model_.untied_ = file_.find("output.weight") != nullptr;
    if (model_.untied_) {
      if (status s = matrix("output.weight", shape_.width, shape_.vocabulary, model_.output_); !s) return s;
    }
    return vector("output_norm.weight", shape_.width, model_.output_norm_);
  }

  status read_layer(int index) {
    layer& at = model_.layers_[static_cast<std::size_t>(index)];
    const std::string prefix = "blk." + std::to_string(index) + ".";
    const int width = shape_.width;
    const int kv_width = shape_.kv.kv_heads * shape_.kv.head_dim;
    if (status s = vector(prefix + "attn_norm.weight", width, at.attention_norm); !s) return s;
    if (status s = matrix(prefix + "attn_q.weight", width, width, at.query); !s) return s;
    if (status s = matrix(prefix + "attn_k.weight", width, kv_width, at.key); !s) return s;
    if (status s = matrix(prefix + "attn_v.weight", width, kv_width, at.value); !s) return s;
    if (status s = matrix(prefix + "attn_output.weight", width, width, at.attention_out); !s) return s;
    if (status s = vector(prefix + "ffn_norm.weight", width, at.feed_norm); !s) return s;
    if (status s = matrix(prefix + "ffn_gate.weight", width, shape_.feed_forward, at.gate); !s) return s;
    if (status s = matrix(prefix + "ffn_up.weight", width, shape_.feed_forward, at.up); !s) return s;
    return matrix(prefix + "ffn_down.weight", shape_.feed_forward, width, at.down);
  }

  const gguf_file& file_;
  llama_model& model_;
  model_shape& shape_;
};

result<std::unique_ptr<llama_model>> llama_model::load(const gguf_file& file, thread_pool& pool,
                                                       simd_target target) {
  std::unique_ptr<llama_model> model(new llama_model(pool, target));
  if (status s = loader(file, *model).run(); !s) {
    error e = s.error();
    e.file = file.path();
    return e;
  }
  return model;
}

std::size_t llama_model::weight_bytes() const {
  const auto bytes = [](const panel_matrix& m) {
    return static_cast<std::size_t>(m.panels()) * panel_rows * static_cast<std::size_t>(m.in()) *
           sizeof(float);
  };
  std::size_t total = bytes(embedding_) + bytes(output_);
  for (const layer& at : layers_) {
    total += bytes(at.query) + bytes(at.key) + bytes(at.value) + bytes(at.attention_out);
    total += bytes(at.gate) + bytes(at.up) + bytes(at.down);
  }
  return total;
}

void llama_model::size_buffers(int rows) {
  rows_ = rows;
  columns_ = padded_columns(rows);
  const auto columns = static_cast<std::size_t>(columns_);
  const auto width = static_cast<std::size_t>(shape_.width);
  const auto kv_width = static_cast<std::size_t>(shape_.kv.kv_heads) * shape_.kv.head_dim;
  residual_.resize(columns * width);
  query_.resize(columns * width);
  key_.resize(columns * kv_width);
  value_.resize(columns * kv_width);
  // Padding columns are multiplied too: zero, lest what a longer step left there costs time (denormals).
  normed_.assign(columns * width, 0.0f);
  attended_.assign(columns * width, 0.0f);
  activated_.assign(columns * static_cast<std::size_t>(shape_.feed_forward), 0.0f);
  for (scratch& s : scratch_) {
    s.first.resize(std::max(s.first.size(), columns * panel_rows));
    s.second.resize(std::max(s.second.size(), columns * panel_rows));
  }
}

void llama_model::embed(std::span<const token_id> tokens) {
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    embedding_.read_row(tokens[row], residual_.data() + row * static_cast<std::size_t>(shape_.width));
  }
}

void llama_model::normalise(const std::vector<float>& weight) {
  const auto width = static_cast<std::size_t>(shape_.width);
  for (std::size_t row = 0; row < static_cast<std::size_t>(rows_); ++row) {
    rms_norm(residual_.data() + row * width, weight, shape_.epsilon, normed_.data() + row * width);
  }
}

// Returns [columns][96] in the worker's first scratch buffer.
const float* llama_model::product(const panel_matrix& weights, int panel, const float* x, int columns,
                                  int worker) {
  float* y = scratch_[static_cast<std::size_t>(worker)].first.data();
  product_(weights.panel(panel), weights.in(), x, columns, y);
  return y;
}

void llama_model::project(const panel_matrix& weights, int panel, float* to, int worker) {
  const float* y = product(weights, panel, normed_.data(), columns_, worker);
  const int count = weights.rows_in(panel);
  for (int row = 0; row < rows_; ++row) {
    float* out = to + static_cast<std::size_t>(row) * weights.out() + panel * panel_rows;
    std::copy_n(y + static_cast<std::size_t>(row) * panel_rows, count, out);
  }
}

void llama_model::project_qkv(const layer& at) {
  const int query_panels = at.query.panels();
  const int key_panels = at.key.panels();
  pool_.parallel_for(query_panels + 2 * key_panels, [&](int index, int worker) {
    if (index < query_panels) return project(at.query, index, query_.data(), worker);
    index -= query_panels;
    if (index < key_panels) return project(at.key, index, key_.data(), worker);
    project(at.value, index - key_panels, value_.data(), worker);
  });
}

// residual += weights * x
void llama_model::add_product(const panel_matrix& weights, const std::vector<float>& x) {
  pool_.parallel_for(weights.panels(), [&](int panel, int worker) {
    const float* y = product(weights, panel, x.data(), columns_, worker);
    const int count = weights.rows_in(panel);
    for (int row = 0; row < rows_; ++row) {
      float* out = residual_.data() + static_cast<std::size_t>(row) * weights.out() + panel * panel_rows;
      const float* add = y + static_cast<std::size_t>(row) * panel_rows;
      for (int i = 0; i < count; ++i) out[i] += add[i];
    }
  });
}

void llama_model::feed_forward(const layer& at) {
  pool_.parallel_for(at.gate.panels(), [&](int panel, int worker) {
    const float* gate = product(at.gate, panel, normed_.data(), columns_, worker);
    float* up = scratch_[static_cast<std::size_t>(worker)].second.data();
    product_(at.up.panel(panel), at.up.in(), normed_.data(), columns_, up);
    const int count = at.gate.rows_in(panel);
    for (int row = 0; row < rows_; ++row) {
      const std::size_t from = static_cast<std::size_t>(row) * panel_rows;
      float* out = activated_.data() + static_cast<std::size_t>(row) * at.gate.out() + panel * panel_rows;
      for (int i = 0; i < count; ++i) out[i] = silu(gate[from + i]) * up[from + i];
    }
  });
  add_product(at.down, activated_);
}

// The output matrix is by far the largest: only the rows asked for are multiplied with it.
void llama_model::write_logits(std::span<const int> logit_rows, std::span<float> logits) {
  const auto width = static_cast<std::size_t>(shape_.width);
  const int wanted = static_cast<int>(logit_rows.size());
  const int columns = padded_columns(wanted);
  normed_.assign(static_cast<std::size_t>(columns) * width, 0.0f);
  for (std::size_t i = 0; i < logit_rows.size(); ++i) {
    const float* from = residual_.data() + static_cast<std::size_t>(logit_rows[i]) * width;
    rms_norm(from, output_norm_, shape_.epsilon, normed_.data() + i * width);
  }
  for (scratch& s : scratch_) {
    s.first.resize(std::max(s.first.size(), static_cast<std::size_t>(columns) * panel_rows));
  }
  pool_.parallel_for(output().panels(), [&](int panel, int worker) {
    const float* y = product(output(), panel, normed_.data(), columns, worker);
    const int count = output().rows_in(panel);
    for (int i = 0; i < wanted; ++i) {
      float* out = logits.data() + static_cast<std::size_t>(i) * shape_.vocabulary + panel * panel_rows;
      std::copy_n(y + static_cast<std::size_t>(i) * panel_rows, count, out);
    }
  });
}

status llama_model::forward(std::span<const token_id> tokens, std::span<const step_segment> segments,
                            std::span<const int> logit_rows, kv_backend& backend, std::span<float> logits) {
  const int rows = static_cast<int>(tokens.size());
  std::int64_t in_segments = 0;
  for (const step_segment& segment : segments) in_segments += segment.rows;
  if (rows == 0 || in_segments != rows) return bad_input("bad_step", "rows", std::to_string(in_segments));
  for (const token_id token : tokens) {
    if (token < 0 || token >= shape_.vocabulary)
      return bad_input("bad_value", "token", std::to_string(token));
  }
  for (const int row : logit_rows) {
    if (row < 0 || row >= rows) return bad_input("bad_step", "logit_row", std::to_string(row));
  }
  if (logits.size() < logit_rows.size() * static_cast<std::size_t>(shape_.vocabulary))
    return bad_input("bad_step", "logits.size", std::to_string(logits.size()));
  if (status s = backend.begin_step(segments); !s) return s;
  size_buffers(rows);
  embed(tokens);
  for (int i = 0; i < shape_.kv.layers; ++i) {
    const layer& at = layers_[static_cast<std::size_t>(i)];
    normalise(at.attention_norm);
    project_qkv(at);
    backend.attend(i, query_.data(), key_.data(), value_.data(), attended_.data());
    add_product(at.attention_out, attended_);
    normalise(at.feed_norm);
    feed_forward(at);
  }
  backend.end_step();
  if (!logit_rows.empty()) write_logits(logit_rows, logits);
  return {};
}

}  // namespace engine
