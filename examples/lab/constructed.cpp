// SPDX-License-Identifier: Apache-2.0
#include "constructed.hpp"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gguf.hpp"
#include "sampling.hpp"

namespace lab {
namespace {

// Channels of the residual stream. A pair has 21 that are not zero, a question 16; all of them 1 or -1.
constexpr int width = 64;
constexpr int key_bits = 15;
constexpr int value_bits = 6;
constexpr int asked_by_first = 0;
constexpr int asked_by_second = asked_by_first + key_bits;
constexpr int pair_key = asked_by_second + key_bits;
constexpr int pair_value = pair_key + key_bits;
constexpr int is_question = pair_value + value_bits;
constexpr int answered = is_question + 1;
constexpr int not_known = answered + value_bits;
static_assert(not_known < width);

// Channels of a head. RoPE turns pair i by base^(-2i / 32): from channel 16 on by less than 1e-10 at the end
// of the longest text.
constexpr int heads = 2;
constexpr int head_dim = width / heads;
constexpr int first_code = head_dim / 2;
constexpr int self_code = first_code + key_bits;
static_assert(self_code < head_dim);
constexpr float rope_base = 1e30f;

constexpr double nats_per_bit = 20;  ///< a pair that differs in one bit of its key is 40 nats away
constexpr double pair_norm = key_bits + value_bits;
constexpr double question_norm = key_bits + 1;

// What RMS normalisation leaves of a channel that was 1.
double normed(double squares) {
  return std::sqrt(width / squares);
}

float bit(int code, int i) {
  return ((code >> i) & 1) != 0 ? 1.0f : -1.0f;
}

// [out][in], as a GGUF file stores a matrix.
struct matrix {
  matrix(int in, int out)
      : in(in), out(out), values(static_cast<std::size_t>(in) * static_cast<std::size_t>(out)) {}
  float& at(int to, int from) {
    return values[static_cast<std::size_t>(to) * static_cast<std::size_t>(in) +
                  static_cast<std::size_t>(from)];
  }
  int in, out;
  std::vector<float> values;
};

matrix embeddings(const recall_vocabulary& words) {
  matrix m(width, words.size());
  for (int key = 0; key < words.keys; ++key) {
    const int asked = words.head_of(key) == 0 ? asked_by_first : asked_by_second;
    for (int i = 0; i < key_bits; ++i) {
      m.at(words.pair(key), pair_key + i) = bit(key, i);
      m.at(words.question(key), asked + i) = bit(key, i);
    }
    for (int i = 0; i < value_bits; ++i) m.at(words.pair(key), pair_value + i) = bit(words.value_of(key), i);
    m.at(words.question(key), is_question) = 1;
  }
  return m;
}

// A question's own head asks with the key's code; both heads look at questions, one bit worse than a match.
matrix queries() {
  matrix m(width, width);
  const auto one = static_cast<float>(nats_per_bit * std::sqrt(head_dim) / normed(question_norm));
  for (int head = 0; head < heads; ++head) {
    const int asked = head == 0 ? asked_by_first : asked_by_second;
    for (int i = 0; i < key_bits; ++i) m.at(head * head_dim + first_code + i, asked + i) = one;
    m.at(head * head_dim + self_code, is_question) = (key_bits - 1) * one;
  }
  return m;
}

matrix keys() {
  matrix m(width, width);
  for (int head = 0; head < heads; ++head) {
    for (int i = 0; i < key_bits; ++i)
      m.at(head * head_dim + first_code + i, pair_key + i) = static_cast<float>(1 / normed(pair_norm));
    m.at(head * head_dim + self_code, is_question) = static_cast<float>(1 / normed(question_norm));
  }
  return m;
}

matrix values() {
  matrix m(width, width);
  for (int head = 0; head < heads; ++head) {
    for (int i = 0; i < value_bits; ++i)
      m.at(head * head_dim + i, pair_value + i) = static_cast<float>(1 / normed(pair_norm));
    m.at(head * head_dim + value_bits, is_question) = static_cast<float>(1 / normed(question_norm));
  }
  return m;
}

matrix attention_output() {
  matrix m(width, width);
  for (int head = 0; head < heads; ++head) {
    for (int i = 0; i <= value_bits; ++i) m.at(answered + i, head * head_dim + i) = 1;
  }
  return m;
}

// A value that was found scores 6, another at most 4, "not known" 2.5 from the head that did not ask; where
// nothing was found, values score 0 and "not known" 5.
matrix output(const recall_vocabulary& words) {
  matrix m(width, words.size());
  for (int value = 0; value < recall_values; ++value) {
    for (int i = 0; i < value_bits; ++i) m.at(words.answer(value), answered + i) = bit(value, i);
  }
  m.at(words.unknown(), not_known) = 2.5f;
  return m;
}

// As a GGUF file in memory, which is what the engine reads models from.
class model_file {
 public:
  void key(const std::string& name, const std::string& value) {
    start_key(name, 8);
    put_text(header_, value);
  }
  void key(const std::string& name, std::uint32_t value) {
    start_key(name, 4);
    put(header_, value);
  }
  void key(const std::string& name, float value) {
    start_key(name, 6);
    put(header_, value);
  }
  void tensor(const std::string& name, const matrix& m) { add(name, m.values, {m.in, m.out}); }
  void ones(const std::string& name, int size) {
    add(name, std::vector<float>(static_cast<std::size_t>(size), 1.0f), {size});
  }
  void zeros(const std::string& name, int in, int out) { tensor(name, matrix(in, out)); }

  std::vector<std::byte> finish() const {
    std::vector<std::byte> out;
    for (const char c : {'G', 'G', 'U', 'F'}) put(out, c);
    put(out, std::uint32_t{3});
    put(out, tensors_);
    put(out, keys_);
    out.insert(out.end(), header_.begin(), header_.end());
    out.insert(out.end(), table_.begin(), table_.end());
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    out.insert(out.end(), data_.begin(), data_.end());
    return out;
  }

 private:
  static constexpr std::size_t alignment = 32;

  template <class T>
  static void put(std::vector<std::byte>& out, T value) {
    const std::size_t at = out.size();
    out.resize(at + sizeof value);
    std::memcpy(out.data() + at, &value, sizeof value);
  }
  static void put_text(std::vector<std::byte>& out, const std::string& text) {
    put(out, static_cast<std::uint64_t>(text.size()));
    for (const char c : text) put(out, c);
  }
  void start_key(const std::string& name, std::uint32_t type) {
    ++keys_;
    put_text(header_, name);
    put(header_, type);
  }
  void add(const std::string& name, const std::vector<float>& values, const std::vector<int>& dims) {
    ++tensors_;
    put_text(table_, name);
    put(table_, static_cast<std::uint32_t>(dims.size()));
    for (const int d : dims) put(table_, static_cast<std::uint64_t>(d));
    put(table_, static_cast<std::uint32_t>(engine::tensor_type::f32));
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    put(table_, static_cast<std::uint64_t>(data_.size()));
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    data_.insert(data_.end(), bytes, bytes + values.size() * sizeof(float));
  }

  std::uint64_t tensors_ = 0, keys_ = 0;
  std::vector<std::byte> header_, table_, data_;
};

}  // namespace

int recall_vocabulary::value_of(int key) const {
  engine::splitmix64 random(seed + static_cast<std::uint64_t>(key) * 0x9E3779B97F4A7C15u);
  return static_cast<int>(random.next() % recall_values);
}

engine::result<std::unique_ptr<engine::llama_model>> constructed_recall(const recall_vocabulary& words,
                                                                        engine::thread_pool& pool) {
  constexpr int feed_forward = 2;  // there is none: its weights are zero
  model_file file;
  file.key("general.architecture", std::string("llama"));
  file.key("llama.block_count", 1u);
  file.key("llama.embedding_length", std::uint32_t{width});
  file.key("llama.feed_forward_length", std::uint32_t{feed_forward});
  file.key("llama.attention.head_count", std::uint32_t{heads});
  file.key("llama.context_length", std::uint32_t{2 * most_pairs});
  file.key("llama.attention.layer_norm_rms_epsilon", 1e-12f);
  file.key("llama.rope.freq_base", rope_base);
  file.tensor("token_embd.weight", embeddings(words));
  file.tensor("output.weight", output(words));
  file.ones("output_norm.weight", width);
  file.ones("blk.0.attn_norm.weight", width);
  file.tensor("blk.0.attn_q.weight", queries());
  file.tensor("blk.0.attn_k.weight", keys());
  file.tensor("blk.0.attn_v.weight", values());
  file.tensor("blk.0.attn_output.weight", attention_output());
  file.ones("blk.0.ffn_norm.weight", width);
  file.zeros("blk.0.ffn_gate.weight", width, feed_forward);
  file.zeros("blk.0.ffn_up.weight", width, feed_forward);
  file.zeros("blk.0.ffn_down.weight", feed_forward, width);
  const std::vector<std::byte> bytes = file.finish();
  const auto opened = engine::gguf_file::from_bytes(bytes);
  if (!opened) return opened.error();
  return engine::llama_model::load(*opened, pool);
}

}  // namespace lab
