// SPDX-License-Identifier: Apache-2.0
#include "gguf.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "model.hpp"
#include "numeric.hpp"
#include "reference_cache.hpp"
#include "sampling.hpp"
#include "support/environment.hpp"
#include "synthetic_model.hpp"
#include "tokenizer.hpp"

using namespace engine;
using namespace engine::test;

namespace {

/// The error of opening the file, of loading the tokenizer from it or of loading the model, in this order; an
/// empty code when all went well.
error load_all(const bytes& file) {
  const auto opened = gguf_file::from_bytes(file);
  if (!opened) return opened.error();
  const auto text = tokenizer::load(*opened);
  if (!text) return text.error();
  thread_pool pool(1);
  const auto model = llama_model::load(*opened, pool);
  if (!model) return model.error();
  return {};
}

error load_all(const gguf_builder& file) {
  return load_all(file.serialise());
}

/// Cuts or changes must be refused with a field.
void expect(const error& e, const std::string& code, const std::string& field, const std::string& value) {
  CHECK(e.code == code);
  CHECK(e.field == field);
  CHECK(e.value == value);
}

template <class T>
void overwrite(bytes& file, std::size_t at, T value) {
  std::memcpy(file.data() + at, &value, sizeof(T));
}

}  // namespace

TEST_CASE("a written model file is read back with its keys and tensors") {
  const gguf_builder built = synthetic_model({});
  const bytes file = built.serialise();
  const auto opened = gguf_file::from_bytes(file);
  REQUIRE(opened);
  CHECK(opened->header_bytes() == built.header_size());
  CHECK(opened->tensors().size() == built.tensors.size());
  CHECK(*opened->string_value("general.architecture") == "llama");
  CHECK(*opened->unsigned_value("llama.attention.head_count") == 6);
  CHECK(*opened->float_value("llama.rope.freq_base") == 10000.0);
  CHECK(opened->string_array("tokenizer.ggml.tokens")->at(1) == "<|im_start|>");
  CHECK(opened->integer_array("tokenizer.ggml.token_type")->at(0) == 3);
  CHECK(opened->find("blk.1.attn_q.weight") != nullptr);
  CHECK(opened->find("blk.2.attn_q.weight") == nullptr);
  CHECK(load_all(file).code.empty());
  CHECK(load_all(synthetic_model(tiny())).code.empty());
}

TEST_CASE("blocks are widened as the format says") {
  gguf_builder file;
  bytes q4, q8, f16;
  put(q4, float_to_half(0.5f));
  put(q4, float_to_half(-2.0f));
  for (int j = 0; j < 16; ++j) put(q4, static_cast<std::uint8_t>(j | (15 - j) << 4));
  put(q8, float_to_half(0.25f));
  for (int j = 0; j < 32; ++j) put(q8, static_cast<std::int8_t>(j - 16));
  put(f16, std::uint16_t{0x3C00});
  put(f16, std::uint16_t{0x0001});
  file.tensors = {{"a", {32}, 3, 0, q4}, {"b", {32}, 8, 0, q8}, {"c", {2}, 1, 0, f16}};
  file.place();
  const bytes all = file.serialise();
  const auto opened = gguf_file::from_bytes(all);
  REQUIRE(opened);
  float row[32];
  dequantise_row(*opened->find("a"), 0, row);
  for (int j = 0; j < 16; ++j) {
    CHECK(row[j] == 0.5f * static_cast<float>(j) - 2.0f);
    CHECK(row[j + 16] == 0.5f * static_cast<float>(15 - j) - 2.0f);
  }
  dequantise_row(*opened->find("b"), 0, row);
  for (int j = 0; j < 32; ++j) CHECK(row[j] == 0.25f * static_cast<float>(j - 16));
  dequantise_row(*opened->find("c"), 0, row);
  CHECK(row[0] == 1.0f);
  CHECK(row[1] == std::ldexp(1.0f, -24));
}

TEST_CASE("every half converts to float and back to itself") {
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const bool nan = (half & 0x7C00) == 0x7C00 && (half & 0x3FF) != 0;
    if (!nan && float_to_half(half_to_float(half)) != half) FAIL("half " << h);
    if (nan && !std::isnan(half_to_float(half))) FAIL("half " << h);
  }
  CHECK(float_to_half(65519.0f) == 0x7BFF);
  CHECK(float_to_half(65520.0f) == 0x7C00);
  CHECK(float_to_half(1.0f + 0x1p-11f) == 0x3C00);             // tie goes to even
  CHECK(float_to_half(1.0f + 0x1p-11f + 0x1p-20f) == 0x3C01);  // above the tie
  CHECK(float_to_half(0x1p-25f) == 0x0000);
  CHECK(round_to_bfloat(1.0f + 0x1p-8f) == 1.0f);
  CHECK(round_to_bfloat(1.0f + 3 * 0x1p-8f) == 1.0f + 4 * 0x1p-8f);
}

TEST_CASE("a model file cut at any byte is refused with the name of a field") {
  const gguf_builder built = synthetic_model(tiny());
  const bytes whole = built.serialise();
  const std::size_t header = built.header_size();
  std::size_t step = 1;
  for (std::size_t cut = 0; cut < whole.size(); cut += step) {
    // An allocation of exactly the size, so that a sanitizer sees a read behind the end.
    const bytes part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(cut));
    const auto opened = gguf_file::from_bytes(part);
    if (opened) FAIL("cut at " << cut << " is accepted");
    if (opened.error().field.empty() || opened.error().value.empty())
      FAIL("cut at " << cut << " names no field");
    if (cut > header) step = 97;
  }
}

TEST_CASE("damaged bytes give an error or a usable model, never a crash") {
  const bytes whole = synthetic_model(tiny()).serialise();
  const std::size_t header = synthetic_model(tiny()).header_size();
  splitmix64 random(kvcache::test::test_seed("gguf damage", 20240611));
  int refused = 0;
  const auto rounds = kvcache::test::effort(4000);
  for (std::int64_t i = 0; i < rounds; ++i) {
    bytes file = whole;
    const int changes = 1 + static_cast<int>(random.next() % 3);
    for (int c = 0; c < changes; ++c) {
      const std::size_t at = random.next() % header;
      file[at] =
          (random.next() & 1) != 0 ? static_cast<std::byte>(random.next()) : file[at] ^ std::byte{0x80};
    }
    const auto opened = gguf_file::from_bytes(file);
    if (!opened) {
      ++refused;
      continue;
    }
    const auto text = tokenizer::load(*opened);
    if (text) CHECK(text->encode("the thing <|im_end|>\xFF and 12", specials::parse).size() > 2);
    thread_pool pool(1);
    const auto model = llama_model::load(*opened, pool);
    if (!model) continue;
    cache_config config;
    config.shape = (*model)->shape().kv;
    config.max_tokens = 4;
    config.pool = &pool;
    reference_cache cache(config);
    const token_id prompt[] = {1, 2};
    REQUIRE(cache.open(prompt, cache_scope::everyone()));
    REQUIRE(cache.extend(0, 2));
    const step_segment segment{0, 0, 2};
    REQUIRE((*model)->forward(prompt, {&segment, 1}, {}, cache.backend(), {}));
  }
  CHECK(refused > rounds / 10);
}

TEST_CASE("a wrong magic, version or count is refused") {
  gguf_builder built = synthetic_model(tiny());
  const bytes whole = built.serialise();
  built.magic = "GGML";
  CHECK(load_all(built).code == "bad_magic");
  CHECK(load_all(built).field == "magic");
  built.magic = "GGUF";
  built.version = 1;
  expect(load_all(built), "unsupported", "version", "1");
  bytes file = whole;
  overwrite<std::uint64_t>(file, 8, 1ull << 63);
  expect(load_all(file), "bad_value", "tensor_count", "9223372036854775808");
  file = whole;
  overwrite<std::uint64_t>(file, 16, std::numeric_limits<std::uint64_t>::max());
  expect(load_all(file), "bad_value", "key_count", "18446744073709551615");
  file = whole;
  overwrite<std::uint64_t>(file, 24, std::numeric_limits<std::uint64_t>::max());  // length of the first name
  CHECK(load_all(file).field == "key[0].name.length");
}

TEST_CASE("absurd lengths, counts and types of keys are refused") {
  gguf_builder built = synthetic_model(tiny());
  const auto damage = [&](const std::string& name, auto&& change) {
    gguf_builder copy = built;
    change(copy.find_key(name));
    return load_all(copy);
  };
  using key = gguf_builder::key;
  const auto count_at = [](key& k, std::uint64_t v) { overwrite(k.payload, 4, v); };
  const std::string tokens = "tokenizer.ggml.tokens";
  expect(damage(tokens, [&](key& k) { count_at(k, 1ull << 61); }), "bad_value", tokens + ".count",
         "2305843009213693952");
  const std::string types = "tokenizer.ggml.token_type";
  expect(damage(types, [&](key& k) { count_at(k, 1ull << 62); }), "bad_value", types + ".count",
         "4611686018427387904");
  expect(damage(types, [](key& k) { overwrite<std::uint32_t>(k.payload, 0, 9); }), "bad_value",
         types + ".element_type", "9");
  const std::string width = "llama.embedding_length";
  expect(damage(width, [](key& k) { k.type = 13; }), "bad_value", width + ".type", "13");
  expect(damage("general.architecture", [](key& k) { overwrite(k.payload, 0, std::uint64_t{1} << 60); }),
         "truncated", "general.architecture.length", "1152921504606846976");
  gguf_builder twice = built;
  twice.add_u32(width, 32);
  expect(load_all(twice), "duplicate", "key[16].name", width);
  for (const std::uint32_t bad : {0u, 3u, 1u << 31}) {
    gguf_builder aligned = built;
    aligned.add_u32("general.alignment", bad);
    expect(load_all(aligned), "bad_value", "general.alignment", std::to_string(bad));
  }
  gguf_builder aligned = built;
  aligned.add_u32("general.alignment", 64);
  aligned.alignment = 64;
  aligned.place();
  CHECK(load_all(aligned).code.empty());
}

TEST_CASE("tensors of unknown type or impossible place are refused") {
  const gguf_builder built = synthetic_model(tiny());
  const std::string name = "blk.0.attn_k.weight";
  const auto damage = [&](auto&& change) {
    gguf_builder copy = built;
    change(copy.find_tensor(name));
    return load_all(copy);
  };
  using tensor = gguf_builder::tensor;
  const error unknown = damage([](tensor& t) { t.type = 14; });
  expect(unknown, "unsupported_tensor_type", name + ".type", "Q6_K (14)");
  CHECK(unknown.kind == failure::cannot_run);
  expect(damage([](tensor& t) { t.type = 4000000000u; }), "unsupported_tensor_type", name + ".type",
         "type (4000000000)");
  expect(damage([](tensor& t) { t.offset = 1ull << 40; }), "truncated", name + ".offset", "1099511627776");
  expect(damage([](tensor& t) { t.offset = ~std::uint64_t{31}; }), "truncated", name + ".offset",
         std::to_string(~std::uint64_t{31}));
  expect(damage([](tensor& t) { t.offset += 4; }), "bad_value", name + ".offset",
         std::to_string(gguf_builder(built).find_tensor(name).offset + 4));
  CHECK(damage([&](tensor& t) { t.offset -= 32; }).code == "overlap");
  expect(damage([](tensor& t) {
           t.dims = {32, 1ull << 62};
         }),
         "bad_value", name + ".dims[1]", "4611686018427387904");
  expect(damage([](tensor& t) {
           t.dims = {1ull << 63, 16};
         }),
         "bad_value", name + ".dims[0]", "9223372036854775808");
  expect(damage([](tensor& t) { t.dims = {32, 0}; }), "bad_value", name + ".dims[1]", "0");
  expect(damage([](tensor& t) { t.dims = {1, 1, 1, 1, 1}; }), "bad_value", name + ".n_dims", "5");
  expect(damage([](tensor& t) { t.dims.clear(); }), "bad_value", name + ".n_dims", "0");
  gguf_builder quantised = built;
  quantised.find_tensor("blk.0.attn_q.weight").dims = {33, 32};
  expect(load_all(quantised), "bad_value", "blk.0.attn_q.weight.dims[0]", "33");
}

TEST_CASE("a model whose parts are missing or do not fit together is refused") {
  const gguf_builder built = synthetic_model(tiny());
  for (const auto& key : built.keys) {
    if (key.name == "llama.rope.dimension_count" || key.name == "llama.rope.freq_base") continue;
    gguf_builder copy = built;
    copy.remove_key(key.name);
    const error e = load_all(copy);
    INFO(key.name);
    if (key.name == "llama.attention.head_count_kv") {
      CHECK(e.field == "blk.0.attn_k.weight.dims[1]");  // without the key there are as many as query heads
    } else {
      CHECK(e.code == "missing_key");
      CHECK(e.field == key.name);
    }
  }
  for (const auto& tensor : built.tensors) {
    gguf_builder copy = built;
    copy.remove_tensor(tensor.name);
    copy.place();
    INFO(tensor.name);
    expect(load_all(copy), "missing_tensor", tensor.name, "absent");
  }
  const auto with = [&](const std::string& name, std::uint32_t value) {
    gguf_builder copy = built;
    overwrite(copy.find_key(name).payload, 0, value);
    return load_all(copy);
  };
  CHECK(with("llama.attention.head_count", 0).field == "llama.attention.head_count");
  CHECK(with("llama.attention.head_count", 5).field == "llama.attention.head_count");
  CHECK(with("llama.attention.head_count_kv", 3).field == "llama.attention.head_count_kv");
  CHECK(with("llama.rope.dimension_count", 8).field == "llama.rope.dimension_count");
  CHECK(with("llama.block_count", 2).field == "blk.1.attn_norm.weight");
  CHECK(with("llama.block_count", 1000000).field == "llama.block_count");
  CHECK(with("llama.feed_forward_length", 64).field == "blk.0.ffn_gate.weight.dims[1]");
  CHECK(with("tokenizer.ggml.eos_token_id", 100000).field == "tokenizer.ggml.eos_token_id");
  CHECK(with("llama.attention.layer_norm_rms_epsilon", 0x7FC00000).field ==
        "llama.attention.layer_norm_rms_epsilon");  // not a number
  gguf_builder scaled = built;
  scaled.add_string("llama.rope.scaling.type", "yarn");
  expect(load_all(scaled), "unsupported", "llama.rope.scaling.type", "present");
}

TEST_CASE("the real model file cut anywhere in its header is refused", "[sample]") {
  const auto whole = gguf_file::open(kvcache::test::model_path());
  REQUIRE(whole);
  std::FILE* in = std::fopen(kvcache::test::model_path().c_str(), "rb");
  bytes header(whole->header_bytes() + 4096);
  REQUIRE(std::fread(header.data(), 1, header.size(), in) == header.size());
  std::fclose(in);
  splitmix64 random(kvcache::test::test_seed("cuts of the real header", 7));
  const auto check = [&](std::size_t cut) {
    const bytes part(header.begin(), header.begin() + static_cast<std::ptrdiff_t>(cut));
    const auto opened = gguf_file::from_bytes(part);
    if (opened || opened.error().field.empty()) FAIL("cut at " << cut);
  };
  for (std::size_t cut = 0; cut < 1500; ++cut) check(cut);
  const auto samples = kvcache::test::effort(300);
  for (std::int64_t i = 0; i < samples; ++i) check(random.next() % header.size());
  check(whole->header_bytes());
}

TEST_CASE("a path that is no model file is refused with the path") {
  const auto missing = gguf_file::open("/nonexistent/model.gguf");
  REQUIRE(!missing);
  CHECK(missing.error().code == "cannot_open");
  CHECK(missing.error().file == "/nonexistent/model.gguf");
  CHECK(!gguf_file::open("/"));
  CHECK(!gguf_file::open("/dev/null"));
}
