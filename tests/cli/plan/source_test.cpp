// SPDX-License-Identifier: Apache-2.0
// Models from config.json and from --shape.
#include "plan/source.hpp"

#include <catch2/catch.hpp>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "error.hpp"
#include "plan/catalogue.hpp"
#include "support/environment.hpp"

namespace cli = kvcache::cli;
using cli::layer_kind;
using nlohmann::json;

namespace {

cli::model read(const json& config) {
  return cli::model_of_config(config.dump(), "config.json");
}

void check_error(const std::function<void()>& what, cli::failure kind, const std::string& code,
                 const std::string& field, const std::string& value) {
  try {
    what();
    FAIL_CHECK("was accepted: " << field << " " << value);
  } catch (const cli::error& e) {
    CHECK(e.kind == kind);
    CHECK(e.code == code);
    CHECK(e.field == field);
    CHECK(e.value == value);
  }
}

void check_config_error(const json& config, const char* code, const char* field, const char* value) {
  check_error([&] { (void)read(config); }, cli::failure::bad_input, code, field, value);
}

json llama() {
  return {{"model_type", "llama"},       {"num_hidden_layers", 32},
          {"num_attention_heads", 32},   {"num_key_value_heads", 8},
          {"hidden_size", 4096},         {"intermediate_size", 14336},
          {"vocab_size", 128256},        {"max_position_embeddings", 8192},
          {"tie_word_embeddings", false}};
}

// The same layers and the same parameters as the model of the catalogue.
void check_equal(const cli::model& m, const char* name) {
  INFO(name);
  const cli::model wanted = cli::model_of(*cli::find_model(name));
  CHECK(m.layers == wanted.layers);
  CHECK(m.parameters == wanted.parameters);
  CHECK(m.expert_parameters == wanted.expert_parameters);
  CHECK(m.parameters_by == "computed");
}

}  // namespace

TEST_CASE("configurations of known kinds give what the catalogue has") {
  check_equal(read(llama()), "llama-3-8b");
  check_equal(read({{"model_type", "mistral"},
                    {"num_hidden_layers", 32},
                    {"num_attention_heads", 32},
                    {"num_key_value_heads", 8},
                    {"hidden_size", 4096},
                    {"intermediate_size", 14336},
                    {"vocab_size", 32000},
                    {"max_position_embeddings", 32768},
                    {"sliding_window", 4096}}),
              "mistral-7b-v0.1");
  check_equal(read({{"model_type", "mixtral"},
                    {"num_hidden_layers", 32},
                    {"num_attention_heads", 32},
                    {"num_key_value_heads", 8},
                    {"hidden_size", 4096},
                    {"intermediate_size", 14336},
                    {"vocab_size", 32000},
                    {"num_local_experts", 8},
                    {"num_experts_per_tok", 2},
                    {"sliding_window", nullptr}}),
              "mixtral-8x7b");
  check_equal(read({{"model_type", "qwen2"},
                    {"num_hidden_layers", 28},
                    {"num_attention_heads", 28},
                    {"num_key_value_heads", 4},
                    {"hidden_size", 3584},
                    {"intermediate_size", 18944},
                    {"vocab_size", 152064},
                    {"tie_word_embeddings", false},
                    {"use_sliding_window", false},
                    {"sliding_window", 131072},
                    {"max_window_layers", 28}}),
              "qwen2.5-7b");
  check_equal(read({{"model_type", "qwen3_moe"},
                    {"num_hidden_layers", 48},
                    {"num_attention_heads", 32},
                    {"num_key_value_heads", 4},
                    {"head_dim", 128},
                    {"hidden_size", 2048},
                    {"intermediate_size", 6144},
                    {"moe_intermediate_size", 768},
                    {"num_experts", 128},
                    {"num_experts_per_tok", 8},
                    {"vocab_size", 151936},
                    {"attention_bias", false}}),
              "qwen3-30b-a3b");
  check_equal(read({{"model_type", "gemma2"},
                    {"num_hidden_layers", 42},
                    {"num_attention_heads", 16},
                    {"num_key_value_heads", 8},
                    {"head_dim", 256},
                    {"hidden_size", 3584},
                    {"intermediate_size", 14336},
                    {"vocab_size", 256000},
                    {"sliding_window", 4096},
                    {"max_position_embeddings", 8192}}),
              "gemma-2-9b");
  check_equal(read({{"model_type", "phi3"},
                    {"num_hidden_layers", 32},
                    {"num_attention_heads", 32},
                    {"num_key_value_heads", 32},
                    {"hidden_size", 3072},
                    {"intermediate_size", 8192},
                    {"vocab_size", 32064},
                    {"max_position_embeddings", 4096},
                    {"sliding_window", 2047},
                    {"attention_bias", false}}),
              "phi-3-mini-4k");
}

TEST_CASE("hybrid configurations give what the catalogue has") {
  // Gemma 3 states little and leaves the rest to its class.
  check_equal(read({{"model_type", "gemma3"},
                    {"text_config",
                     {{"model_type", "gemma3_text"},
                      {"num_hidden_layers", 34},
                      {"hidden_size", 2560},
                      {"intermediate_size", 10240},
                      {"sliding_window", 1024}}}}),
              "gemma-3-4b");
  json gpt = {{"model_type", "gpt_oss"},
              {"num_hidden_layers", 24},
              {"num_attention_heads", 64},
              {"num_key_value_heads", 8},
              {"head_dim", 64},
              {"hidden_size", 2880},
              {"intermediate_size", 2880},
              {"vocab_size", 201088},
              {"num_local_experts", 32},
              {"num_experts_per_tok", 4},
              {"sliding_window", 128},
              {"attention_bias", true},
              {"max_position_embeddings", 131072},
              {"tie_word_embeddings", false}};
  check_equal(read(gpt), "gpt-oss-20b");
  gpt["layer_types"] = json::array();
  for (int i = 0; i < 24; ++i)
    gpt["layer_types"].push_back(i % 2 == 0 ? "sliding_attention" : "full_attention");
  check_equal(read(gpt), "gpt-oss-20b");
  check_equal(read({{"model_type", "deepseek_v3"},
                    {"num_hidden_layers", 61},
                    {"num_attention_heads", 128},
                    {"num_key_value_heads", 128},
                    {"hidden_size", 7168},
                    {"intermediate_size", 18432},
                    {"moe_intermediate_size", 2048},
                    {"n_routed_experts", 256},
                    {"n_shared_experts", 1},
                    {"num_experts_per_tok", 8},
                    {"first_k_dense_replace", 3},
                    {"kv_lora_rank", 512},
                    {"q_lora_rank", 1536},
                    {"qk_nope_head_dim", 128},
                    {"qk_rope_head_dim", 64},
                    {"v_head_dim", 128},
                    {"vocab_size", 129280},
                    {"max_position_embeddings", 163840}}),
              "deepseek-v3");
  check_equal(read({{"model_type", "deepseek_v2"},
                    {"num_hidden_layers", 27},
                    {"num_attention_heads", 16},
                    {"num_key_value_heads", 16},
                    {"hidden_size", 2048},
                    {"intermediate_size", 10944},
                    {"moe_intermediate_size", 1408},
                    {"n_routed_experts", 64},
                    {"n_shared_experts", 2},
                    {"num_experts_per_tok", 6},
                    {"first_k_dense_replace", 1},
                    {"kv_lora_rank", 512},
                    {"q_lora_rank", nullptr},
                    {"qk_nope_head_dim", 128},
                    {"qk_rope_head_dim", 64},
                    {"v_head_dim", 128},
                    {"vocab_size", 102400}}),
              "deepseek-v2-lite");
}

TEST_CASE("a window that the configuration turns off or that nothing reaches is none") {
  json c = llama();
  c["sliding_window"] = 8192;
  CHECK(read(c).layers[0].kind == layer_kind::full);
  c["sliding_window"] = 4096;
  CHECK(read(c).layers[0].window == 4096);
  c["model_type"] = "qwen2";
  c["max_window_layers"] = 20;
  CHECK(read(c).layers[31].kind == layer_kind::full);
  c["use_sliding_window"] = true;
  CHECK(read(c).layers[19].kind == layer_kind::full);
  CHECK(read(c).layers[20].kind == layer_kind::window);
}

TEST_CASE("an unknown kind with the fields that matter is accepted with a note") {
  json c = llama();
  c["model_type"] = "novel";
  const cli::model m = read(c);
  CHECK(m.layers.size() == 32);
  CHECK(m.parameters_by == "estimated");
  REQUIRE(m.notes.size() == 1);
  CHECK(m.notes[0].find("novel") != std::string::npos);
  c.erase("vocab_size");
  CHECK(read(c).parameters == 0);
  c["layer_types"] = json::array();
  for (int i = 0; i < 32; ++i) c["layer_types"].push_back(i % 4 == 3 ? "full_attention" : "linear_attention");
  CHECK(read(c).layers[0].kind == layer_kind::none);
  CHECK(read(c).layers[3].kind == layer_kind::full);
}

TEST_CASE("chunked attention counts its chunk, convolutions and state space layers count nothing") {
  json c = llama();
  c["model_type"] = "llama4_text";
  c["max_position_embeddings"] = 1 << 20;
  c["attention_chunk_size"] = 8192;
  c["layer_types"] = json::array();
  const char* types[] = {"chunked_attention", "full_attention", "conv", "mamba"};
  for (int i = 0; i < 32; ++i) c["layer_types"].push_back(types[i % 4]);
  const cli::model m = read(c);
  CHECK(m.layers[0] == cli::layer{layer_kind::window, 8192, 8, 128, 128});
  CHECK(m.layers[1].kind == layer_kind::full);
  CHECK(m.layers[2].kind == layer_kind::none);
  CHECK(m.layers[3].kind == layer_kind::none);
}

TEST_CASE("damaged configurations are read or refused, never followed") {
  const std::string whole = llama().dump();
  std::mt19937 random(static_cast<uint32_t>(kvcache::test::test_seed("config", 9)));
  int refused = 0;
  const int64_t rounds = kvcache::test::effort(20000);
  for (int64_t round = 0; round < rounds; ++round) {
    std::string text = whole;
    for (int64_t n = 1 + random() % 3; n > 0; --n)
      text[random() % text.size()] = static_cast<char>(random() % 256);
    try {
      (void)cli::model_of_config(text, "c");
    } catch (const cli::error& e) {
      refused += e.kind == cli::failure::bad_input;
    }
  }
  CHECK(refused > rounds / 10);
}

TEST_CASE("what is missing or wrong in a configuration is named") {
  const auto without = [](const char* name) {
    json c = llama();
    c.erase(name);
    return c;
  };
  const auto with = [](const char* name, json value) {
    json c = llama();
    c[name] = std::move(value);
    return c;
  };
  check_config_error(without("num_hidden_layers"), "missing_field", "num_hidden_layers", "");
  check_config_error(without("num_attention_heads"), "missing_field", "num_attention_heads", "");
  check_config_error(without("hidden_size"), "missing_field", "head_dim", "");
  CHECK(read(without("num_key_value_heads")).layers[0].kv_heads == 32);
  check_config_error(with("num_hidden_layers", 0), "bad_value", "num_hidden_layers", "0");
  check_config_error(with("num_hidden_layers", -1), "bad_value", "num_hidden_layers", "-1");
  check_config_error(with("num_hidden_layers", 1e6), "bad_value", "num_hidden_layers", "1000000");
  check_config_error(with("num_hidden_layers", 5000), "bad_value", "num_hidden_layers", "5000");
  check_config_error(with("num_hidden_layers", "32"), "bad_value", "num_hidden_layers", "\"32\"");
  check_config_error(with("num_hidden_layers", 18446744073709551615u), "bad_value", "num_hidden_layers",
                     "18446744073709551615");
  check_config_error(with("num_key_value_heads", 5), "bad_value", "num_key_value_heads", "5");
  check_config_error(with("hidden_size", 4097), "bad_value", "hidden_size", "4097");
  check_config_error(with("tie_word_embeddings", 1), "bad_value", "tie_word_embeddings", "1");
  check_config_error(with("model_type", 1), "bad_value", "model_type", "1");
  check_config_error(with("layer_types", json::array()), "bad_value", "layer_types", "0 of them");
  check_config_error(with("layer_types", json(std::vector<std::string>(32, "odd"))), "bad_value",
                     "layer_types[0]", "odd");
  check_config_error({{"text_config", {{"num_hidden_layers", 0}}}}, "bad_value",
                     "text_config.num_hidden_layers", "0");
  check_config_error(with("kv_lora_rank", 512), "missing_field", "qk_rope_head_dim", "");
}

TEST_CASE("text that is no configuration is refused") {
  const auto refused = [](const char* text, const char* field) {
    check_error([&] { (void)cli::model_of_config(text, "c"); }, cli::failure::bad_input, "bad_json", field,
                *field == 'b' ? std::to_string(std::string_view(text).size() + 1) : "array");
  };
  refused("", "byte");
  refused("{\"a\": ", "byte");
  refused("[]", "document");
  const std::string deep(100000, '[');
  CHECK_THROWS_AS(cli::model_of_config(deep, "c"), cli::error);
  CHECK_THROWS_AS(cli::read_config("/nonexistent/config.json"), cli::error);
  CHECK_THROWS_AS(cli::read_config("/"), cli::error);
  CHECK_THROWS_AS(cli::read_config("/dev/zero"), cli::error);  // has no end
}

TEST_CASE("shapes are read key by key") {
  const cli::model m = cli::model_of_shape("--shape", "layers=80,kv_heads=8,q_heads=64,head_dim=128");
  REQUIRE(m.layers.size() == 80);
  CHECK(m.layers[79] == cli::layer{layer_kind::full, 0, 8, 128, 128});
  CHECK(m.q_heads == 64);
  const cli::model v = cli::model_of_shape("--shape", "layers=1,kv_heads=2,head_dim=192,head_dim_v=128");
  CHECK(v.layers[0] == cli::layer{layer_kind::full, 0, 2, 192, 128});
  const cli::model l = cli::model_of_shape("--shape", "layers=2,latent=512,rope=64");
  CHECK(l.layers[1] == cli::layer{layer_kind::latent, 0, 1, 576, 512});
  const cli::model w =
      cli::model_of_shape("--shape", "layers=6,kv_heads=1,head_dim=64,window=512,full_every=3");
  CHECK(w.layers[1] == cli::layer{layer_kind::window, 512, 1, 64, 64});
  CHECK(w.layers[2].kind == layer_kind::full);
}

TEST_CASE("shapes that say too little, too much or nonsense are refused") {
  const auto refused = [](const char* text, const char* code, const char* field, const char* value) {
    INFO(text);
    check_error([&] { (void)cli::model_of_shape("--shape", text); }, cli::failure::usage, code, field, value);
  };
  refused("layers=80,kv_heads=8", "missing_field", "--shape head_dim", "");
  refused("kv_heads=8,head_dim=128", "missing_field", "--shape layers", "");
  refused("layers=80,head_dim=128", "missing_field", "--shape kv_heads", "");
  refused("layers=0,kv_heads=8,head_dim=128", "bad_value", "--shape layers", "0");
  refused("layers=4097,kv_heads=8,head_dim=128", "bad_value", "--shape layers", "4097");
  refused("layers=8x,kv_heads=8,head_dim=128", "bad_value", "--shape layers", "8x");
  refused("layers=8,layers=8", "given_twice", "--shape layers", "layers=8");
  refused("layer=8", "unknown_key", "--shape", "layer=8");
  refused("layers", "unknown_key", "--shape", "layers");
  refused("layers=8,,", "bad_value", "--shape", "layers=8,,");
  refused("layers=8,kv_heads=8,q_heads=12,head_dim=64", "bad_value", "--shape q_heads", "12");
  refused("layers=8,latent=512,kv_heads=8", "conflict", "--shape kv_heads", "8");
  refused("layers=8,kv_heads=8,head_dim=64,rope=64", "conflict", "--shape rope", "64");
  refused("layers=8,kv_heads=8,head_dim=64,full_every=2", "conflict", "--shape full_every", "2");
}
