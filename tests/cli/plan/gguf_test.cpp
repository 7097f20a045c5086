// SPDX-License-Identifier: Apache-2.0
// Models from GGUF metadata, and what files that lie get told.
#include <catch2/catch.hpp>
#include <cstring>
#include <random>

#include "error.hpp"
#include "plan/source.hpp"
#include "support/environment.hpp"

namespace cli = kvcache::cli;
using cli::layer_kind;

namespace {

/// Writes headers, right ones and wrong ones.
class writer {
 public:
  template <class T>
  writer& raw(T value) {
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
    return *this;
  }
  writer& text(std::string_view s) {
    raw<uint64_t>(s.size());
    for (const char c : s) bytes.push_back(static_cast<std::byte>(c));
    return *this;
  }
  writer& start(uint64_t tensors, uint64_t keys, uint32_t version = 3) {
    for (const char c : std::string_view("GGUF")) bytes.push_back(static_cast<std::byte>(c));
    return raw(version).raw(tensors).raw(keys);
  }
  writer& number(std::string_view key, uint32_t n) { return text(key).raw<uint32_t>(4).raw(n); }
  writer& word(std::string_view key, std::string_view value) {
    return text(key).raw<uint32_t>(8).text(value);
  }
  template <class T>
  writer& array(std::string_view key, uint32_t type, const std::vector<T>& values) {
    text(key).raw<uint32_t>(9).raw(type).template raw<uint64_t>(values.size());
    for (const T& v : values) raw(v);
    return *this;
  }
  writer& words(std::string_view key, const std::vector<std::string>& values) {
    text(key).raw<uint32_t>(9).raw<uint32_t>(8).raw<uint64_t>(values.size());
    for (const auto& v : values) text(v);
    return *this;
  }
  writer& tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type) {
    text(name).raw(static_cast<uint32_t>(dims.size()));
    for (const uint64_t d : dims) raw(d);
    return raw(type).raw<uint64_t>(0);
  }

  std::vector<std::byte> bytes;
};

// A small model with a vocabulary, floats and every kind of key that is read.
writer sample() {
  writer w;
  w.start(3, 11).word("general.architecture", "llama").word("general.name", "small one");
  w.words("tokenizer.ggml.tokens", {"a", "bc", ""}).array<float>("tokenizer.ggml.scores", 6, {0, 1, 2});
  w.number("llama.block_count", 4).number("llama.embedding_length", 64).number("llama.context_length", 2048);
  w.number("llama.attention.head_count", 8).number("llama.attention.head_count_kv", 2);
  w.text("llama.attention.layer_norm_rms_epsilon").raw<uint32_t>(6).raw(1e-5f);
  w.text("general.flag").raw<uint32_t>(7).raw<uint8_t>(1);
  w.tensor("token_embd.weight", {64, 3}, 0).tensor("blk.0.ffn_down.weight", {64, 32}, 8);
  return w.tensor("blk.0.ffn_gate_exps.weight", {256, 2, 4}, 12);
}

cli::model read(const writer& w) {
  return cli::model_of_gguf(w.bytes, "m.gguf");
}

// Layers from keys alone.
writer keys_only(uint64_t keys, const char* architecture) {
  writer w;
  w.start(0, keys).word("general.architecture", architecture);
  return w;
}

void check_error(const writer& w, const std::string& code, const std::string& field,
                 const std::string& value) {
  INFO(field << " " << value);
  try {
    (void)read(w);
    FAIL_CHECK("was read");
  } catch (const cli::error& e) {
    CHECK(e.kind == cli::failure::bad_input);
    CHECK(e.code == code);
    CHECK(e.field == field);
    CHECK(e.value == value);
    CHECK(e.file == "m.gguf");
  }
}

}  // namespace

TEST_CASE("the metadata of a GGUF file gives layers and weights") {
  const cli::model m = read(sample());
  CHECK(m.name == "small one");
  CHECK(m.layers == std::vector<cli::layer>(4, {layer_kind::full, 0, 2, 8, 8}));
  CHECK(m.q_heads == 8);
  CHECK(m.context == 2048);
  CHECK(m.parameters == 64 * 3 + 64 * 32 + 256 * 2 * 4);
  CHECK(m.stored_bytes == 64 * 3 * 4 + 64 * 32 / 32 * 34 + 8 * 144);
  CHECK(m.parameters_by == "tensors");
}

TEST_CASE("heads, lengths and windows are read as each architecture has them") {
  writer w = keys_only(7, "gemma3");
  w.number("gemma3.block_count", 12).number("gemma3.attention.head_count", 4);
  w.number("gemma3.attention.head_count_kv", 1).number("gemma3.attention.key_length", 256);
  w.number("gemma3.attention.value_length", 128).number("gemma3.attention.sliding_window", 512);
  const cli::model gemma = read(w);
  for (size_t i = 0; i < 12; ++i) {
    const bool full = i % 6 == 5;
    CHECK(gemma.layers[i] ==
          cli::layer{full ? layer_kind::full : layer_kind::window, full ? 0 : 512, 1, 256, 128});
  }

  writer arrays = keys_only(6, "deci");
  arrays.number("deci.block_count", 3).array<uint32_t>("deci.attention.head_count", 4, {8, 0, 8});
  arrays.array<int32_t>("deci.attention.head_count_kv", 5, {4, 0, 2}).number("deci.embedding_length", 512);
  arrays.number("deci.attention.sliding_window", 128);
  const cli::model deci = read(arrays);
  CHECK(deci.layers[0] == cli::layer{layer_kind::full, 0, 4, 64, 64});
  CHECK(deci.layers[1].kind == layer_kind::none);
  CHECK(deci.layers[2] == cli::layer{layer_kind::full, 0, 2, 64, 64});
  CHECK(deci.notes.size() == 2);  // the window is of no layer that is known; a layer caches nothing

  writer listed = keys_only(7, "new");
  listed.number("new.block_count", 3)
      .number("new.attention.head_count", 2)
      .number("new.embedding_length", 128);
  listed.number("new.attention.sliding_window", 64).number("new.attention.shared_kv_layers", 1);
  listed.array<uint8_t>("new.attention.sliding_window_pattern", 7, {1, 0, 1});
  const cli::model borrowed = read(listed);
  CHECK(borrowed.layers[0].window == 64);
  CHECK(borrowed.layers[1].window == 0);
  CHECK(borrowed.layers[2].kind == layer_kind::none);

  writer mla = keys_only(5, "deepseek2");
  mla.number("deepseek2.block_count", 2).number("deepseek2.attention.head_count", 16);
  mla.number("deepseek2.attention.kv_lora_rank", 512).number("deepseek2.rope.dimension_count", 64);
  CHECK(read(mla).layers[1] == cli::layer{layer_kind::latent, 0, 1, 576, 512});
}

TEST_CASE("a file that ends anywhere in its header is refused") {
  const writer whole = sample();
  for (size_t n = 0; n < whole.bytes.size(); ++n) {
    CAPTURE(n);
    // A copy of its own, so that a read behind the end is seen.
    const std::vector<std::byte> cut(whole.bytes.begin(),
                                     whole.bytes.begin() + static_cast<std::ptrdiff_t>(n));
    try {
      (void)cli::model_of_gguf(cut, "m.gguf");
      FAIL_CHECK("was read");
    } catch (const cli::error& e) {
      CHECK(e.kind == cli::failure::bad_input);
      CHECK(!e.field.empty());
    }
  }
}

TEST_CASE("counts and lengths beyond the file are refused before anything is taken for them") {
  const uint64_t huge = UINT64_MAX;
  check_error(writer().start(huge, 0), "bad_value", "tensor_count", "18446744073709551615");
  check_error(writer().start(0, huge), "bad_value", "key_count", "18446744073709551615");
  check_error(writer().start(0, 0, 1), "unsupported", "version", "1");
  check_error(writer().raw(0x12345678u), "bad_magic", "magic", "305419896");
  writer name;
  name.start(0, 1).raw(huge).raw<uint64_t>(0);
  check_error(name, "truncated", "key[0].name.length", "18446744073709551615");
  writer array;
  array.start(0, 1).text("a").raw<uint32_t>(9).raw<uint32_t>(4).raw(huge);
  check_error(array, "bad_value", "a.count", "18446744073709551615");
  writer words;
  words.start(0, 1).text("a").raw<uint32_t>(9).raw<uint32_t>(8).raw<uint64_t>(2).text("x").raw(huge);
  check_error(words, "truncated", "a[1].length", "18446744073709551615");
  writer nested;
  nested.start(0, 1).text("a").raw<uint32_t>(9).raw<uint32_t>(9).raw<uint64_t>(1);
  check_error(nested, "bad_value", "a.element_type", "9");
  writer type;
  type.start(0, 1).text("a").raw<uint32_t>(13).raw<uint32_t>(0);
  check_error(type, "bad_value", "a.type", "13");
  check_error(writer(keys_only(2, "x")).word("general.architecture", "y"), "duplicate", "key",
              "general.architecture");
  check_error(writer().start(0, 0), "missing_field", "general.architecture", "");
}

TEST_CASE("tensors that cannot be are refused") {
  const auto with = [](const std::vector<uint64_t>& dims, uint32_t type) {
    writer w;
    w.start(1, 1).word("general.architecture", "x").tensor("t", dims, type);
    return w;
  };
  check_error(with({}, 0), "bad_value", "t.n_dims", "0");
  check_error(with({1, 1, 1, 1, 1}, 0), "bad_value", "t.n_dims", "5");
  check_error(with({0}, 0), "bad_value", "t.dims[0]", "0");
  check_error(with({UINT64_MAX, 2}, 0), "bad_value", "t.dims[0]", "18446744073709551615");
  check_error(with({1ull << 40, 1ull << 40}, 0), "bad_value", "t.dims[1]", "1099511627776");
  check_error(with({33}, 8), "bad_value", "t.dims[0]", "33");
}

TEST_CASE("values that a model cannot have are refused by name") {
  const auto base = [](uint32_t layers, uint32_t heads, uint32_t hidden) {
    writer w = keys_only(4, "x");
    return w.number("x.block_count", layers)
        .number("x.attention.head_count", heads)
        .number("x.embedding_length", hidden);
  };
  CHECK(read(base(2, 4, 64)).layers.size() == 2);
  check_error(base(0, 4, 64), "bad_value", "x.block_count", "0");
  check_error(base(4294967295u, 4, 64), "bad_value", "x.block_count", "4294967295");
  check_error(base(2, 0, 64), "bad_value", "x.embedding_length", "64");
  check_error(base(2, 3, 64), "bad_value", "x.embedding_length", "64");
  check_error(keys_only(1, "x"), "missing_field", "x.block_count", "");
  check_error(writer(keys_only(2, "x")).word("x.block_count", "4"), "wrong_type", "x.block_count", "8");
  writer heads = keys_only(4, "x");
  heads.number("x.block_count", 2)
      .array<uint32_t>("x.attention.head_count", 4, {1, 2, 3})
      .number("x.embedding_length", 8);
  check_error(heads, "bad_value", "x.attention.head_count", "3 elements");
  writer floats = keys_only(3, "x");
  floats.number("x.block_count", 1).array<float>("x.attention.head_count", 6, {1});
  check_error(floats, "wrong_type", "x.attention.head_count", "6");
  writer wide = keys_only(2, "x");
  wide.text("x.block_count").raw<uint32_t>(10).raw(UINT64_MAX);
  check_error(wide, "bad_value", "x.block_count", "-1");
}

TEST_CASE("parts of a model and tensors of unknown types leave the weights unknown, with a note") {
  writer part = keys_only(5, "x");
  part.number("x.block_count", 1).number("x.attention.head_count", 1).number("x.embedding_length", 8);
  part.number("split.count", 3);
  CHECK(read(part).parameters == 0);
  CHECK(read(part).notes.size() == 1);
  writer odd;
  odd.start(1, 4)
      .word("general.architecture", "x")
      .number("x.block_count", 1)
      .number("x.attention.head_count", 1);
  odd.number("x.embedding_length", 8).tensor("t", {77}, 999);
  CHECK(read(odd).parameters == 77);
  CHECK(read(odd).stored_bytes == 0);
  CHECK(read(odd).notes.size() == 1);
}

TEST_CASE("damaged bytes are read or refused, never followed") {
  const writer whole = sample();
  std::mt19937 random(static_cast<uint32_t>(kvcache::test::test_seed("gguf", 7)));
  int refused = 0;
  const int64_t rounds = kvcache::test::effort(20000);
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<std::byte> bytes = whole.bytes;
    for (int64_t n = 1 + random() % 3; n > 0; --n)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    try {
      (void)cli::model_of_gguf(bytes, "m.gguf");
    } catch (const cli::error&) {
      ++refused;
    }
  }
  CHECK(refused > rounds / 10);
}

TEST_CASE("files that cannot be mapped are refused") {
  CHECK_THROWS_AS(cli::read_gguf("/nonexistent.gguf"), cli::error);
  CHECK_THROWS_AS(cli::read_gguf("/"), cli::error);
  CHECK_THROWS_AS(cli::read_gguf("/dev/null"), cli::error);
}
