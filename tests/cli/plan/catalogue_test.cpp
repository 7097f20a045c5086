// SPDX-License-Identifier: Apache-2.0
#include "plan/catalogue.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <set>

#include "error.hpp"
#include "plan/source.hpp"

namespace cli = kvcache::cli;
using cli::layer_kind;

namespace {

const cli::architecture& known(const char* name) {
  const cli::architecture* a = cli::find_model(name);
  INFO(name);
  REQUIRE(a != nullptr);
  return *a;
}

int64_t count(const std::vector<cli::layer>& layers, layer_kind kind) {
  int64_t n = 0;
  for (const cli::layer& l : layers) n += l.kind == kind;
  return n;
}

}  // namespace

TEST_CASE("the shapes of every model give the number of parameters that its authors state") {
  CHECK(cli::catalogue().size() >= 60);
  for (const cli::architecture& a : cli::catalogue()) {
    const double computed = static_cast<double>(cli::parameters_of(a)) / 1e9;
    INFO(a.name << ": computed " << computed << "e9, stated " << a.stated_billions << "e9");
    CHECK(std::fabs(computed / a.stated_billions - 1) < 0.002);
  }
}

TEST_CASE("parameters are exact where the checkpoint's size is known to the last one") {
  CHECK(cli::parameters_of(known("llama-3-8b")) == 8'030'261'248);
  CHECK(cli::parameters_of(known("llama-2-70b")) == 68'976'648'192);
  CHECK(cli::parameters_of(known("llama-3.1-405b")) == 405'853'388'800);
  CHECK(cli::parameters_of(known("mixtral-8x7b")) == 46'702'792'704);
  CHECK(cli::parameters_of(known("qwen2.5-7b")) == 7'615'616'512);
  CHECK(cli::parameters_of(known("gemma-2-9b")) == 9'241'705'984);
  CHECK(cli::parameters_of(known("smollm2-135m")) == 134'515'008);
  CHECK(cli::parameters_of(known("deepseek-v3")) == 671'026'419'200);
}

TEST_CASE("names are found in the spellings that people use") {
  const auto is = [](const char* text, const char* name) {
    const cli::architecture* a = cli::find_model(text);
    INFO(text);
    REQUIRE(a != nullptr);
    CHECK(std::string(a->name) == name);
  };
  is("Llama 2 7B", "llama-2-7b");
  is("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b");
  is("LLAMA-3.1-70B", "llama-3.1-70b");
  is("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b");
  is("google/gemma-3-27b-it", "gemma-3-27b");
  is("openai/gpt-oss-120b", "gpt-oss-120b");
  is("mistral-7b", "mistral-7b-v0.1");
  is("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b");
  is("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b");
  is("deepseek-ai/DeepSeek-V3", "deepseek-v3");
  for (const char* none : {"", "llama", "llama-2", "7b", "-instruct", "gpt-4"}) {
    INFO(none);
    CHECK(cli::find_model(none) == nullptr);
  }
}

TEST_CASE("every name of the catalogue finds itself and nothing else has it") {
  std::set<const cli::architecture*> found;
  for (const cli::architecture& a : cli::catalogue()) {
    CHECK(cli::find_model(a.name) == &a);
    found.insert(cli::find_model(a.name));
  }
  CHECK(found.size() == cli::catalogue().size());
}

TEST_CASE("a name that is nearly right is answered with those it may have meant") {
  CHECK(cli::near_names("lama-3-8b").at(0) == "llama-3-8b");
  CHECK(cli::near_names("gemma3-26b").at(0) == "gemma-3-27b");
  CHECK(cli::near_names("gpt-oss").at(0) == "gpt-oss-20b");
  CHECK(cli::near_names("xyzzy").empty());
  CHECK(cli::near_names("").empty());
  CHECK(cli::near_names(std::string(100000, 'x')).empty());
  try {
    (void)cli::model_of_name("--model", "lama-3-8b");
    FAIL("was found");
  } catch (const cli::error& e) {
    CHECK(e.kind == cli::failure::usage);
    CHECK(e.field == "--model");
    CHECK(e.value == "lama-3-8b");
    CHECK(e.wanted.find("llama-3-8b") != std::string::npos);
  }
}

TEST_CASE("hybrid models have their windows in the layers that have them") {
  const auto gemma = cli::layers_of(known("gemma-3-27b"));
  REQUIRE(gemma.size() == 62);
  for (size_t i = 0; i < gemma.size(); ++i) {
    CHECK((gemma[i].kind == layer_kind::full) == (i % 6 == 5));  // five local layers, then a global one
    CHECK(gemma[i].window == (i % 6 == 5 ? 0 : 1024));
  }
  CHECK(count(cli::layers_of(known("gemma-3-1b")), layer_kind::full) == 4);
  const auto gpt = cli::layers_of(known("gpt-oss-20b"));
  CHECK(count(gpt, layer_kind::window) == 12);
  CHECK(gpt[0].window == 128);
  CHECK(gpt[1].kind == layer_kind::full);
  CHECK(count(cli::layers_of(known("mistral-7b-v0.1")), layer_kind::window) == 32);
  CHECK(count(cli::layers_of(known("mistral-7b-v0.3")), layer_kind::full) == 32);
  const auto deepseek = cli::layers_of(known("deepseek-v2"));
  CHECK(count(deepseek, layer_kind::latent) == 60);
  CHECK(deepseek[0] == cli::layer{layer_kind::latent, 0, 1, 576, 512});
}

TEST_CASE("a shape that is too large to count is refused") {
  cli::architecture a = known("deepseek-v3");
  a.layers = 4096;
  a.experts = 1 << 20;
  a.expert_ffn = 1 << 24;
  CHECK_THROWS_AS(cli::parameters_of(a), cli::error);
}
