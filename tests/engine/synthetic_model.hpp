// SPDX-License-Identifier: Apache-2.0
#pragma once
// Writes small model files for tests: a general GGUF builder, whose parts can be damaged one by one, and a
// seeded Llama model with a byte vocabulary.
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gguf.hpp"

namespace engine::test {

using bytes = std::vector<std::byte>;

/// Appends a value as it lies in memory (little-endian).
template <class T>
void put(bytes& out, T value) {
  const auto* from = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), from, from + sizeof(T));
}

/// u64 length and the characters.
void put_string(bytes& out, const std::string& text);

/// A GGUF file in parts. Everything may be changed before serialise(), also to values that make no sense.
struct gguf_builder {
  struct key {
    std::string name;
    std::uint32_t type = 0;
    bytes payload;
  };
  struct tensor {
    std::string name;
    std::vector<std::uint64_t> dims;
    std::uint32_t type = 0;
    std::uint64_t offset = 0;  ///< set by place()
    bytes data;
  };

  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;  ///< of the padding that is written
  std::vector<key> keys;
  std::vector<tensor> tensors;

  void add_u32(const std::string& name, std::uint32_t value);
  void add_f32(const std::string& name, float value);
  void add_string(const std::string& name, const std::string& value);
  void add_strings(const std::string& name, const std::vector<std::string>& values);
  void add_i32s(const std::string& name, const std::vector<std::int32_t>& values);

  key& find_key(const std::string& name);
  tensor& find_tensor(const std::string& name);
  void remove_key(const std::string& name);
  void remove_tensor(const std::string& name);

  /// Gives the tensors consecutive aligned offsets.
  void place();
  /// Size of everything before the padding.
  std::size_t header_size() const;
  bytes serialise() const;
};

struct synthetic_options {
  int layers = 2;
  int query_heads = 6;
  int kv_heads = 2;
  int head_dim = 64;
  int feed_forward = 512;
  int context = 1024;
  std::uint64_t seed = 1;
};

/// A placed model: every tensor format the reader knows occurs, sizes are no multiples of the panel height,
/// the vocabulary has three special tokens, the bytes (without 0x04 and 0xFF) and a few merges.
gguf_builder synthetic_model(const synthetic_options& options);

/// The options of a file small enough to cut it at every byte.
synthetic_options tiny();

}  // namespace engine::test
