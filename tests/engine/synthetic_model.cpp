// SPDX-License-Identifier: Apache-2.0
#include "synthetic_model.hpp"

#include <algorithm>
#include <cmath>

#include "numeric.hpp"
#include "sampling.hpp"

namespace engine::test {
namespace {

constexpr std::uint32_t u32_type = 4;
constexpr std::uint32_t i32_type = 5;
constexpr std::uint32_t f32_type = 6;
constexpr std::uint32_t string_type = 8;
constexpr std::uint32_t array_type = 9;

// Printable stand-in of a byte, as byte-level vocabularies spell it.
std::string spelled(unsigned byte) {
  unsigned code = byte;
  const auto plain = [](unsigned b) {
    return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
  };
  if (!plain(byte)) {
    code = 0x100;
    for (unsigned b = 0; b < byte; ++b) code += plain(b) ? 0 : 1;
  }
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

// `count` values in the given format, about uniform in [-range, range].
bytes weights(tensor_type type, std::uint64_t count, float range, splitmix64& random) {
  bytes out;
  const auto value = [&] { return static_cast<float>((random.uniform() * 2 - 1) * range); };
  if (type == tensor_type::f32) {
    for (std::uint64_t i = 0; i < count; ++i) put(out, value());
  } else if (type == tensor_type::f16) {
    for (std::uint64_t i = 0; i < count; ++i) put(out, float_to_half(value()));
  } else if (type == tensor_type::q4_1) {
    for (std::uint64_t i = 0; i < count; i += 32) {
      put(out, float_to_half(range / 7.5f));
      put(out, float_to_half(-range));
      for (int j = 0; j < 16; ++j) put(out, static_cast<std::uint8_t>(random.next()));
    }
  } else {
    for (std::uint64_t i = 0; i < count; i += 32) {
      put(out, float_to_half(range / 127));
      for (int j = 0; j < 32; ++j) put(out, static_cast<std::uint8_t>(random.next()));
    }
  }
  return out;
}

struct vocabulary {
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;
  std::vector<std::string> merges;
};

vocabulary make_vocabulary() {
  vocabulary v;
  for (const char* special : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
    v.tokens.emplace_back(special);
    v.types.push_back(3);
  }
  const auto add = [&](const std::string& token) {
    v.tokens.push_back(token);
    v.types.push_back(1);
  };
  for (unsigned byte = 0; byte < 256; ++byte) {
    if (byte != 0x04 && byte != 0xFF) add(spelled(byte));
  }
  const std::string space = spelled(' ');
  const std::pair<std::string, std::string> merges[] = {
      {"t", "h"}, {"th", "e"}, {space, "the"}, {"i", "n"}, {"in", "g"}, {"a", "a"}, {"aa", "aa"}, {"e", "r"},
      {"a", "n"}, {"an", "d"}, {space, "a"},   {"o", "u"}, {"l", "l"},  {"o", "n"}, {"r", "e"},   {"s", "t"}};
  for (const auto& [left, right] : merges) {
    v.merges.push_back(left + " " + right);
    add(left + right);
  }
  return v;
}

class model_builder {
 public:
  explicit model_builder(const synthetic_options& options) : o_(options), random_(options.seed) {}

  gguf_builder build() {
    const vocabulary words = make_vocabulary();
    metadata(words);
    const auto width = static_cast<std::uint64_t>(o_.query_heads) * o_.head_dim;
    const auto kv_width = static_cast<std::uint64_t>(o_.kv_heads) * o_.head_dim;
    const auto feed = static_cast<std::uint64_t>(o_.feed_forward);
    add("token_embd.weight", {width, words.tokens.size()}, tensor_type::q8_0, 1.0f);
    // Logits about as large as those of a trained model: their rounding is what a test can ask for.
    add("output_norm.weight", {width}, tensor_type::f32, 0.5f);
    // Large enough that attention is far from uniform and a wrong bit anywhere reaches the logits.
    const float range = 2.0f / std::sqrt(static_cast<float>(width));
    for (int i = o_.layers - 1; i >= 0; --i) {
      const std::string prefix = "blk." + std::to_string(i) + ".";
      add(prefix + "attn_norm.weight", {width}, tensor_type::f32, 2.0f);
      add(prefix + "attn_q.weight", {width, width}, tensor_type::q4_1, range);
      add(prefix + "attn_k.weight", {width, kv_width}, tensor_type::f16, range);
      add(prefix + "attn_v.weight", {width, kv_width}, tensor_type::f32, range);
      add(prefix + "attn_output.weight", {width, width}, tensor_type::q4_1, range);
      add(prefix + "ffn_norm.weight", {width}, tensor_type::f32, 2.0f);
      add(prefix + "ffn_gate.weight", {width, feed}, tensor_type::q4_1, range);
      add(prefix + "ffn_up.weight", {width, feed}, tensor_type::q8_0, range);
      add(prefix + "ffn_down.weight", {feed, width}, tensor_type::q4_1, range);
    }
    file_.place();
    return std::move(file_);
  }

 private:
  void metadata(const vocabulary& words) {
    file_.add_string("general.architecture", "llama");
    file_.add_u32("llama.block_count", static_cast<std::uint32_t>(o_.layers));
    file_.add_u32("llama.context_length", static_cast<std::uint32_t>(o_.context));
    file_.add_u32("llama.embedding_length", static_cast<std::uint32_t>(o_.query_heads * o_.head_dim));
    file_.add_u32("llama.feed_forward_length", static_cast<std::uint32_t>(o_.feed_forward));
    file_.add_u32("llama.attention.head_count", static_cast<std::uint32_t>(o_.query_heads));
    file_.add_u32("llama.attention.head_count_kv", static_cast<std::uint32_t>(o_.kv_heads));
    file_.add_u32("llama.rope.dimension_count", static_cast<std::uint32_t>(o_.head_dim));
    file_.add_f32("llama.rope.freq_base", 10000.0f);
    file_.add_f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    file_.add_string("tokenizer.ggml.model", "gpt2");
    file_.add_string("tokenizer.ggml.pre", "smollm");
    file_.add_strings("tokenizer.ggml.tokens", words.tokens);
    file_.add_i32s("tokenizer.ggml.token_type", words.types);
    file_.add_strings("tokenizer.ggml.merges", words.merges);
    file_.add_u32("tokenizer.ggml.eos_token_id", 2);
  }

  void add(const std::string& name, std::vector<std::uint64_t> dims, tensor_type type, float range) {
    std::uint64_t count = 1;
    for (const std::uint64_t d : dims) count *= d;
    file_.tensors.push_back(
        {name, std::move(dims), static_cast<std::uint32_t>(type), 0, weights(type, count, range, random_)});
  }

  synthetic_options o_;
  splitmix64 random_;
  gguf_builder file_;
};

}  // namespace

void put_string(bytes& out, const std::string& text) {
  put(out, static_cast<std::uint64_t>(text.size()));
  for (const char c : text) out.push_back(static_cast<std::byte>(c));
}

void gguf_builder::add_u32(const std::string& name, std::uint32_t value) {
  put(keys.emplace_back(key{name, u32_type, {}}).payload, value);
}

void gguf_builder::add_f32(const std::string& name, float value) {
  put(keys.emplace_back(key{name, f32_type, {}}).payload, value);
}

void gguf_builder::add_string(const std::string& name, const std::string& value) {
  put_string(keys.emplace_back(key{name, string_type, {}}).payload, value);
}

void gguf_builder::add_strings(const std::string& name, const std::vector<std::string>& values) {
  bytes& out = keys.emplace_back(key{name, array_type, {}}).payload;
  put(out, string_type);
  put(out, static_cast<std::uint64_t>(values.size()));
  for (const std::string& value : values) put_string(out, value);
}

void gguf_builder::add_i32s(const std::string& name, const std::vector<std::int32_t>& values) {
  bytes& out = keys.emplace_back(key{name, array_type, {}}).payload;
  put(out, i32_type);
  put(out, static_cast<std::uint64_t>(values.size()));
  for (const std::int32_t value : values) put(out, value);
}

gguf_builder::key& gguf_builder::find_key(const std::string& name) {
  return *std::find_if(keys.begin(), keys.end(), [&](const key& k) { return k.name == name; });
}

gguf_builder::tensor& gguf_builder::find_tensor(const std::string& name) {
  return *std::find_if(tensors.begin(), tensors.end(), [&](const tensor& t) { return t.name == name; });
}

void gguf_builder::remove_key(const std::string& name) {
  std::erase_if(keys, [&](const key& k) { return k.name == name; });
}

void gguf_builder::remove_tensor(const std::string& name) {
  std::erase_if(tensors, [&](const tensor& t) { return t.name == name; });
}

void gguf_builder::place() {
  std::uint64_t at = 0;
  for (tensor& t : tensors) {
    t.offset = at;
    at += (t.data.size() + alignment - 1) / alignment * alignment;
  }
}

std::size_t gguf_builder::header_size() const {
  gguf_builder empty = *this;
  for (tensor& t : empty.tensors) t.data.clear();
  empty.alignment = 1;
  return empty.serialise().size();
}

bytes gguf_builder::serialise() const {
  bytes out;
  for (const char c : magic) out.push_back(static_cast<std::byte>(c));
  put(out, version);
  put(out, static_cast<std::uint64_t>(tensors.size()));
  put(out, static_cast<std::uint64_t>(keys.size()));
  for (const key& k : keys) {
    put_string(out, k.name);
    put(out, k.type);
    out.insert(out.end(), k.payload.begin(), k.payload.end());
  }
  for (const tensor& t : tensors) {
    put_string(out, t.name);
    put(out, static_cast<std::uint32_t>(t.dims.size()));
    for (const std::uint64_t d : t.dims) put(out, d);
    put(out, t.type);
    put(out, t.offset);
  }
  for (const tensor& t : tensors) {
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    out.insert(out.end(), t.data.begin(), t.data.end());
  }
  return out;
}

gguf_builder synthetic_model(const synthetic_options& options) {
  return model_builder(options).build();
}

synthetic_options tiny() {
  synthetic_options o;
  o.layers = 1;
  o.query_heads = 2;
  o.kv_heads = 1;
  o.head_dim = 16;
  o.feed_forward = 32;
  o.context = 64;
  return o;
}

}  // namespace engine::test
