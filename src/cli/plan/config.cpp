// SPDX-License-Identifier: Apache-2.0
// config.json of Hugging Face models. Field names and what a kind takes for granted where its file is silent
// are those of the model classes that read these files.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>

#include "output.hpp"
#include "plan/source.hpp"

namespace kvcache::cli {
namespace {

constexpr std::size_t largest_file = 16 << 20;

/// What is special about a `model_type`.
struct kind {
  const char* type;
  bool tied = false;               ///< unless the file says otherwise
  bool qkv_bias = false;           ///< always
  bool head_norm = false;          ///< of q and k
  std::int32_t norms = 2;          ///< per layer
  std::int32_t full_every = 0;     ///< unless the file says otherwise; 0 = all layers have the window
  bool latent = false;             ///< MLA
  bool router_bias = false;        ///< DeepSeek V3
  bool gpt_oss = false;            ///< its biases and sinks
  bool window_must_be_on = false;  ///< `use_sliding_window`
};

constexpr kind kinds[] = {
    {.type = "llama"},
    {.type = "mistral"},
    {.type = "mixtral"},
    {.type = "phi3"},
    {.type = "smollm3", .tied = true},
    {.type = "qwen2", .qkv_bias = true, .window_must_be_on = true},
    {.type = "qwen3", .head_norm = true, .window_must_be_on = true},
    {.type = "qwen3_moe", .head_norm = true, .window_must_be_on = true},
    {.type = "gemma", .tied = true},
    {.type = "gemma2", .tied = true, .norms = 4, .full_every = 2},
    {.type = "gemma3_text", .tied = true, .head_norm = true, .norms = 4, .full_every = 6},
    {.type = "gpt_oss", .full_every = 2, .gpt_oss = true},
    {.type = "deepseek_v2", .latent = true},
    {.type = "deepseek_v3", .latent = true, .router_bias = true},
    {.type = "kimi_k2", .latent = true, .router_bias = true},
};

const kind* find_kind(const std::string& type) {
  const auto* found =
      std::find_if(std::begin(kinds), std::end(kinds), [&](const kind& k) { return type == k.type; });
  return found == std::end(kinds) ? nullptr : found;
}

/// Reads fields and says which one is wrong.
class fields {
 public:
  fields(const json& object, std::string prefix, std::string file)
      : object_(&object), prefix_(std::move(prefix)), file_(std::move(file)) {}

  bool has(const char* name) const {
    const auto at = object_->find(name);
    return at != object_->end() && !at->is_null();
  }
  const json& at(const char* name) const { return *object_->find(name); }

  [[noreturn]] void fail(const char* code, const std::string& name, std::string value) const {
    throw error(failure::bad_input, code, prefix_ + name, std::move(value), file_);
  }

  /// The number; `absent` where there is none.
  std::int32_t number(const char* name, std::int32_t absent, std::int64_t most = 1 << 20,
                      std::int64_t least = 1) const {
    if (!has(name)) return absent;
    const json& value = at(name);
    const bool whole = value.is_number_integer() &&
                       (!value.is_number_unsigned() || value.get<std::uint64_t>() <= std::uint64_t(most));
    if (!whole || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most) {
      fail("bad_value", name, to_text(value));
    }
    return value.get<std::int32_t>();
  }

  /// The first of the names that is there. Fails: missing_field naming the first.
  std::int32_t needed(std::initializer_list<const char*> names, std::int64_t most = 1 << 20) const {
    for (const char* name : names) {
      if (has(name)) return number(name, 0, most);
    }
    fail("missing_field", *names.begin(), {});
  }

  bool flag(const char* name, bool absent) const {
    if (!has(name)) return absent;
    if (!at(name).is_boolean()) fail("bad_value", name, to_text(at(name)));
    return at(name).get<bool>();
  }

  std::string word(const char* name) const {
    if (!has(name)) return {};
    if (!at(name).is_string()) fail("bad_value", name, to_text(at(name)));
    return at(name).get<std::string>();
  }

 private:
  const json* object_;
  std::string prefix_;
  std::string file_;
};

// The published Gemma 3 files leave out what equals the class's own numbers.
std::int32_t heads_or(const fields& f, bool gemma3, const char* name, std::int32_t gemma) {
  return gemma3 ? f.number(name, gemma) : f.needed({name});
}

void read_heads(const fields& f, const kind& k, architecture& a) {
  const bool gemma3 = std::strcmp(k.type, "gemma3_text") == 0;
  a.layers = f.needed({"num_hidden_layers", "n_layer", "n_layers"}, 4096);
  a.q_heads = heads_or(f, gemma3, "num_attention_heads", 8);
  a.hidden = f.number("hidden_size", 0);
  if (k.latent || f.has("kv_lora_rank")) {
    a.latent = f.needed({"kv_lora_rank"});
    a.rope_dim = f.needed({"qk_rope_head_dim"});
    a.nope_dim = f.number("qk_nope_head_dim", 128);
    a.v_dim = f.number("v_head_dim", 128);
    a.q_latent = f.number("q_lora_rank", 0);
    return;
  }
  a.kv_heads = f.number("num_key_value_heads", gemma3 ? 4 : a.q_heads);
  if (a.q_heads % a.kv_heads != 0) f.fail("bad_value", "num_key_value_heads", std::to_string(a.kv_heads));
  a.head_dim = f.number("head_dim", gemma3 ? 256 : 0);
  if (a.head_dim != 0) return;
  if (a.hidden == 0) f.fail("missing_field", "head_dim", {});
  if (a.hidden % a.q_heads != 0) f.fail("bad_value", "hidden_size", std::to_string(a.hidden));
  a.head_dim = a.hidden / a.q_heads;
}

void read_mixture(const fields& f, architecture& a) {
  a.experts = f.number("num_local_experts", f.number("num_experts", f.number("n_routed_experts", 0)));
  if (a.experts == 0) return;
  a.experts_used = f.number("num_experts_per_tok", f.number("experts_per_token", 1));
  if (a.experts_used > a.experts) f.fail("bad_value", "num_experts_per_tok", std::to_string(a.experts_used));
  a.expert_ffn = f.number("moe_intermediate_size", a.ffn, 1 << 24);
  a.shared_ffn = f.number("n_shared_experts", 0, 1 << 20, 0) * a.expert_ffn;
  a.dense_layers = f.number("first_k_dense_replace", 0, a.layers, 0);
}

void read_rest(const fields& f, const kind& k, architecture& a) {
  a.ffn = f.number("intermediate_size", 0, 1 << 24);
  const bool gemma3 = std::strcmp(k.type, "gemma3_text") == 0;
  a.vocabulary = f.number("vocab_size", gemma3 ? 262208 : 0, 1 << 24);
  a.tied = f.flag("tie_word_embeddings", k.tied);
  a.context = f.number("max_position_embeddings", gemma3 ? 131072 : 0, 1 << 30);
  a.norms = k.norms;
  a.head_norm = k.head_norm;
  a.qkv_bias = k.qkv_bias || f.flag("attention_bias", false);
  a.output_bias = !k.qkv_bias && f.flag("attention_bias", false);
  a.router_bias = k.router_bias;
  if (k.gpt_oss) a.qkv_bias = a.output_bias = a.ffn_bias = a.sinks = true;
  read_mixture(f, a);
}

// Names of layer_types; the window of the layers that have one.
bool read_layer_type(const std::string& type, std::int32_t window, layer& l) {
  if (type == "full_attention" || type == "attention") {
    l.window = 0;
    l.kind = layer_kind::full;
    return true;
  }
  if (type == "sliding_attention" || type == "chunked_attention") {
    l.window = window;
    l.kind = window == 0 ? layer_kind::full : layer_kind::window;
    return true;
  }
  if (type != "linear_attention" && type != "conv" && type != "mamba") return false;
  l = {.kind = layer_kind::none};
  return true;
}

// layer_types, where the file has it, says it all.
bool read_layer_types(const fields& f, model& m, std::int32_t window) {
  if (!f.has("layer_types")) return false;
  const json& types = f.at("layer_types");
  if (!types.is_array() || types.size() != m.layers.size()) {
    f.fail("bad_value", "layer_types",
           types.is_array() ? std::to_string(types.size()) + " of them" : to_text(types));
  }
  bool recurrent = false;
  for (std::size_t i = 0; i < types.size(); ++i) {
    const std::string name = "layer_types[" + std::to_string(i) + "]";
    if (!types[i].is_string()) f.fail("bad_value", name, to_text(types[i]));
    if (!read_layer_type(types[i].get<std::string>(), window, m.layers[i])) {
      f.fail("bad_value", name, types[i].get<std::string>());
    }
    recurrent |= m.layers[i].kind == layer_kind::none;
  }
  if (recurrent) {
    m.notes.emplace_back("recurrent layers keep a state of fixed size, which is not counted");
  }
  return true;
}

std::int32_t read_window(const fields& f, const kind& k, std::int32_t context) {
  const std::int32_t window =
      f.number("sliding_window", f.number("attention_chunk_size", 0, 1 << 30), 1 << 30);
  if (k.window_must_be_on && !f.flag("use_sliding_window", false)) return 0;
  return context != 0 && window >= context ? 0 : window;
}

void read_windows(const fields& f, const kind& k, const architecture& a, model& m) {
  const std::int32_t window = read_window(f, k, a.context);
  if (read_layer_types(f, m, window) || window == 0) return;
  const std::int32_t full_every = f.number("sliding_window_pattern", k.full_every, 4096);
  const std::int32_t first = k.window_must_be_on ? f.number("max_window_layers", 0, 4096, 0) : 0;
  for (std::int32_t i = first; i < a.layers; ++i) {
    if (full_every != 0 && (i + 1) % full_every == 0) continue;
    layer& l = m.layers[static_cast<std::size_t>(i)];
    l.kind = layer_kind::window;
    l.window = window;
  }
}

// Parameters only where every number they come from is known.
void count_parameters(const architecture& a, bool known, model& m) {
  const bool complete = a.hidden != 0 && a.vocabulary != 0 && (a.ffn != 0 || a.expert_ffn != 0);
  const bool recurrent = std::any_of(m.layers.begin(), m.layers.end(),
                                     [](const layer& l) { return l.kind == layer_kind::none; });
  if (!complete || recurrent) {
    m.notes.emplace_back("the number of parameters is not known from this file; say it with --parameters");
    return;
  }
  m.parameters = parameters_of(a);
  m.parameters_by = known ? "computed" : "estimated";
  m.expert_parameters = expert_parameters_of(a);
  m.experts = a.experts;
  m.experts_used = a.experts_used;
}

// The part of the file that describes the language model.
const json& text_part(const json& all, std::string& prefix) {
  const auto text = all.find("text_config");
  if (text == all.end() || !text->is_object() || all.contains("num_hidden_layers")) return all;
  prefix = "text_config.";
  return *text;
}

}  // namespace

model model_of_config(std::string_view text, const std::string& file) {
  json all;
  try {
    all = json::parse(text.begin(), text.end());
  } catch (const json::parse_error& e) {
    throw error(failure::bad_input, "bad_json", "byte", std::to_string(e.byte), file);
  } catch (const json::exception&) {  // a number that no double holds
    throw error(failure::bad_input, "bad_json", "number", "out of range", file);
  }
  if (!all.is_object()) throw error(failure::bad_input, "bad_json", "document", all.type_name(), file);
  std::string prefix;
  const json& part = text_part(all, prefix);
  const fields f(part, prefix, file);
  std::string type = f.word("model_type");
  if (type.empty()) type = fields(all, "", file).word("model_type");
  if (type == "gemma3") type = "gemma3_text";
  const kind* known = find_kind(type);
  constexpr kind unknown{.type = ""};
  const kind& k = known != nullptr ? *known : unknown;

  architecture a;
  read_heads(f, k, a);
  read_rest(f, k, a);
  model m;
  m.name = type.empty() ? "model" : type;
  m.source = "config";
  m.file = file;
  m.q_heads = a.q_heads;
  m.context = a.context;
  m.layers = layers_of(a);
  if (known == nullptr) {
    m.notes.push_back("model_type " + (type.empty() ? std::string("is missing") : type + " is not known") +
                      ": its fields are read like those of a Llama");
  }
  if (!prefix.empty()) m.notes.emplace_back("counted is the language model (text_config) alone");
  if (a.latent == 0) read_windows(f, k, a, m);
  count_parameters(a, known != nullptr, m);
  return m;
}

model read_config(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> in(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!in) throw error(failure::bad_input, "cannot_open", "config", std::strerror(errno), path);
  // Devices and pipes have no end that could be asked for, so no more than the limit is taken.
  std::string text(largest_file + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), in.get()));
  if (std::ferror(in.get()) != 0)
    throw error(failure::bad_input, "cannot_read", "config", std::strerror(errno), path);
  if (text.size() > largest_file) {
    throw error(failure::bad_input, "too_large", "config", "more than 16 MiB", path);
  }
  return model_of_config(text, path);
}

}  // namespace kvcache::cli
