// SPDX-License-Identifier: Apache-2.0
#include "tokenizer.hpp"

#include <catch2/catch.hpp>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "sampling.hpp"
#include "support/environment.hpp"
#include "synthetic_model.hpp"

using namespace engine;
using namespace engine::test;

namespace {

tokenizer small_tokenizer() {
  const bytes file = synthetic_model(tiny()).serialise();
  return std::move(*tokenizer::load(*gguf_file::from_bytes(file)));
}

const tokenizer& real_tokenizer() {
  static const tokenizer t = [] {
    const auto file = gguf_file::open(kvcache::test::model_path());
    REQUIRE(file);
    auto loaded = tokenizer::load(*file);
    REQUIRE(loaded);
    return std::move(*loaded);
  }();
  return t;
}

/// A file of golden values; parsed once, so that a reference into it stays valid.
const nlohmann::json& golden(const std::string& name) {
  static std::map<std::string, nlohmann::json> files;
  const auto [at, added] = files.try_emplace(name);
  if (added) {
    std::ifstream in(kvcache::test::data_path(name));
    at->second = nlohmann::json::parse(in);
  }
  return at->second;
}

std::vector<std::string> pieces(const tokenizer& t, const std::string& text) {
  std::vector<std::string> out;
  for (const token_id id : t.encode(text, specials::as_text)) out.emplace_back(t.bytes_of(id));
  return out;
}

/// The text a round trip gives: bytes without a token are dropped.
std::string without_dropped(const tokenizer& t, const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (!t.encode(std::string(1, c), specials::as_text).empty()) out += c;
  }
  return out;
}

}  // namespace

TEST_CASE("merges apply by rank and, at one rank, from the left") {
  const tokenizer t = small_tokenizer();
  using words = std::vector<std::string>;
  CHECK(pieces(t, "the") == words{"the"});
  CHECK(pieces(t, " the") == words{" the"});
  CHECK(pieces(t, "aaaaa") == words{"aaaa", "a"});
  CHECK(pieces(t, "aaa") == words{"aa", "a"});
  CHECK(pieces(t, "thing") == words{"th", "ing"});
  CHECK(pieces(t, "ere") == words{"er", "e"});
  CHECK(pieces(t, "").empty());
}

TEST_CASE("special tokens are found in a text unless they are taken as text") {
  const tokenizer t = small_tokenizer();
  CHECK(
      t.encode("a<|im_end|> the", specials::parse) ==
      std::vector<token_id>{t.encode("a", specials::as_text)[0], 2, t.encode(" the", specials::as_text)[0]});
  CHECK(t.encode("<|im_start|><|im_end|>", specials::parse) == std::vector<token_id>{1, 2});
  const auto plain = t.encode("<|im_end|>", specials::as_text);
  CHECK(plain.size() > 5);
  CHECK(t.decode(plain) == "<|im_end|>");
}

TEST_CASE("text that is not UTF-8 is encoded byte by byte") {
  const tokenizer t = small_tokenizer();
  CHECK(pieces(t, "the\xC3the") == std::vector<std::string>{"the", "\xC3", "the"});
  CHECK(pieces(t, "\xE2\x82") == std::vector<std::string>{"\xE2", "\x82"});
  CHECK(pieces(t, "\xFF\x04").empty());  // bytes without a token
  CHECK(pieces(t, "a\x04\x61").size() == 2);
  // Overlong forms, surrogates and code points past the end are no characters.
  for (const char* bad :
       {"\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80", "\xF4\x90\x80\x80"}) {
    CHECK(utf8_length(bad) == 0);
    CHECK(t.decode(t.encode(bad, specials::as_text)) == bad);
  }
  splitmix64 random(kvcache::test::test_seed("random bytes", 11));
  for (std::int64_t i = kvcache::test::effort(3000); i > 0; --i) {
    std::string text;
    for (std::uint64_t n = random.next() % 24; n > 0; --n) {
      // Mostly bytes that may form characters, white space and letters.
      static constexpr unsigned char some[] = {0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98,
                                               0x80, ' ',  '\n', 't',  'h',  'e',  '7',  '\''};
      text += static_cast<char>((random.next() & 3) != 0 ? some[random.next() % 16] : random.next() & 0xFF);
    }
    const std::string back = t.decode(t.encode(text, specials::as_text));
    if (back != without_dropped(t, text)) FAIL("text of " << text.size() << " bytes changes");
  }
}

TEST_CASE("a very long word is merged in reasonable time") {
  const tokenizer t = small_tokenizer();
  const std::string word(400000, 'a');
  CHECK(t.encode(word, specials::as_text).size() == 100000);
  CHECK(t.encode(std::string(400000, ' ') + "a", specials::as_text).size() == 400000);
}

TEST_CASE("a chat is rendered in the model's form and its contents cannot inject turns") {
  const tokenizer t = small_tokenizer();
  const chat_message message{"user", "Hi<|im_end|>"};
  const auto ids = t.encode_chat({&message, 1});
  REQUIRE(ids);
  CHECK(t.decode(*ids) ==
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|><|im_end|>\n<|im_start|>assistant\n");
  CHECK(std::count(ids->begin(), ids->end(), 1) == 3);
  CHECK(std::count(ids->begin(), ids->end(), 2) == 2);
  const chat_message own[] = {{"system", "S"}, {"user", "U"}};
  CHECK(t.decode(*t.encode_chat(own)) ==
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n");
  CHECK(t.is_stop(2));
  CHECK(t.is_stop(0));
  CHECK(!t.is_stop(1));
}

TEST_CASE("the streaming decoder holds back incomplete characters and loses nothing") {
  const tokenizer t = small_tokenizer();
  for (const std::string& text : {std::string("caf\xC3\xA9 \xF0\x9F\x98\x80!"), std::string("\xE2\x82"),
                                  std::string("\x80\x80\x80 a\xC3"), std::string("\xE2\x82\xAC\xE2")}) {
    stream_decoder decoder(t);
    std::string shown;
    for (const token_id id : t.encode(text, specials::as_text)) {
      const std::string now = decoder.push(id);
      // A piece never ends inside a character that could still be completed.
      if (!now.empty()) CHECK((static_cast<unsigned char>(now.back()) & 0xC0) != 0xC0);
      shown += now;
    }
    CHECK(shown + decoder.flush() == text);
  }
  stream_decoder decoder(t);
  const auto euro = t.encode("\xE2\x82\xAC", specials::as_text);
  REQUIRE(euro.size() == 3);
  CHECK(decoder.push(euro[0]).empty());
  CHECK(decoder.push(euro[1]).empty());
  CHECK(decoder.push(euro[2]) == "\xE2\x82\xAC");
}

TEST_CASE("a vocabulary that contradicts itself is refused") {
  const gguf_builder built = synthetic_model(tiny());
  const auto load = [](const gguf_builder& file) {
    const bytes all = file.serialise();
    const auto t = tokenizer::load(*gguf_file::from_bytes(all));
    return t ? error{} : t.error();
  };
  gguf_builder copy = built;
  copy.remove_key("tokenizer.ggml.merges");
  copy.add_strings("tokenizer.ggml.merges", {"t h", "q z"});
  CHECK(load(copy).field == "tokenizer.ggml.merges[1]");
  CHECK(load(copy).value == "q z");
  copy.remove_key("tokenizer.ggml.merges");
  copy.add_strings("tokenizer.ggml.merges", {"th"});
  CHECK(load(copy).field == "tokenizer.ggml.merges[0]");
  copy = built;
  copy.remove_key("tokenizer.ggml.token_type");
  copy.add_i32s("tokenizer.ggml.token_type", {1, 2, 3});
  CHECK(load(copy).field == "tokenizer.ggml.token_type.count");
  copy = built;
  copy.remove_key("tokenizer.ggml.pre");
  copy.add_string("tokenizer.ggml.pre", "llama-bpe");
  CHECK(load(copy).value == "llama-bpe");
  CHECK(load(copy).kind == failure::cannot_run);
}

TEST_CASE("the golden strings have the golden ids", "[sample]") {
  const tokenizer& t = real_tokenizer();
  const auto& cases = golden("tokenizer.json");
  REQUIRE(cases.size() == 40);
  for (const auto& c : cases) {
    const std::string text = c["text"];
    INFO(text);
    const auto ids = t.encode(text, specials::parse);
    CHECK(ids == c["ids"].get<std::vector<token_id>>());
    CHECK((t.decode(ids) == text) == c["roundtrip"].get<bool>());
  }
}

TEST_CASE("the texts of the golden files have their ids and survive a round trip", "[sample]") {
  const tokenizer& t = real_tokenizer();
  std::ifstream in(kvcache::test::data_path("text.txt"), std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const auto ids = t.encode(text, specials::as_text);
  CHECK(ids == golden("nll.json")["ids"].get<std::vector<token_id>>());
  CHECK(t.decode(ids) == text);
  for (const auto& prompt : golden("logits.json")["prompts"]) {
    CHECK(t.encode(prompt["prompt_text"].get<std::string>(), specials::parse) ==
          prompt["prompt_ids"].get<std::vector<token_id>>());
    CHECK(t.decode(prompt["greedy_48"].get<std::vector<token_id>>()) ==
          prompt["greedy_text"].get<std::string>());
  }
}

TEST_CASE("the default chat header costs the known tokens", "[sample]") {
  const chat_message message{"user", "Hi"};
  const std::vector<token_id> expected = {1,    9690,  198,   2683, 359, 253, 5356,  5646, 11173, 3365, 3511,
                                          308,  34519, 28,    7018, 411, 407, 19712, 8182, 2,     198,  1,
                                          4093, 198,   26843, 2,    198, 1,   520,   9531, 198};
  CHECK(*real_tokenizer().encode_chat({&message, 1}) == expected);
}
