// SPDX-License-Identifier: Apache-2.0
// The real model against values from an independent float64 implementation, for every cache kind. Tests
// tagged [sample] are short enough for the sanitizer builds.
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "program.hpp"
#include "real_model.hpp"
#include "runner.hpp"
#include "support/environment.hpp"

using namespace engine;

namespace {

constexpr double logit_tolerance = 2e-3;
constexpr double kv_tolerance = 1e-4;

/// A file of golden values; parsed once, so that a reference into it stays valid.
const json& golden(const std::string& name) {
  static std::map<std::string, json> files;
  const auto [at, added] = files.try_emplace(name);
  if (added) {
    std::ifstream in(kvcache::test::data_path(name));
    at->second = json::parse(in);
  }
  return at->second;
}

std::unique_ptr<cache_kind> cache_of(std::string_view kind, int max_tokens) {
  common_options options;
  options.cache = kind;
  auto made = open_cache(options, test::real_model(), max_tokens);
  if (!made) FAIL(describe(made.error()));
  return std::move(*made);
}

void compare_position(const json& expected, std::span<const float> logits) {
  INFO("position " << expected["pos"]);
  CHECK(log_sum_exp(logits) == Approx(expected["lse"].get<double>()).margin(logit_tolerance).epsilon(0));
  for (const json& pair : expected["top10"]) {
    const double logit = logits[pair[0].get<std::size_t>()];
    CHECK(logit == Approx(pair[1].get<double>()).margin(logit_tolerance).epsilon(0));
  }
}

/// Feeds the prompt and the golden continuation; compares the stored positions below `limit`.
void compare_prompt(std::string_view kind, const json& prompt, int limit) {
  std::vector<token_id> ids = prompt["prompt_ids"];
  const std::vector<token_id> greedy_ids = prompt["greedy_48"];
  ids.insert(ids.end(), greedy_ids.begin(), greedy_ids.end() - 1);
  ids.resize(std::min(ids.size(), static_cast<std::size_t>(limit)));
  const auto cache = cache_of(kind, static_cast<int>(ids.size()));
  const open_slot slot(*cache, cache->open(ids, cache_scope::only("golden"))->slot);
  int compared = 0;
  REQUIRE(feed(*test::real_model().model, *cache, slot.slot(), ids, 64, observe::all,
               [&](int position, std::span<const float> logits) {
                 for (const json& expected : prompt["positions"]) {
                   if (expected["pos"] != position) continue;
                   compare_position(expected, logits);
                   ++compared;
                 }
               }));
  CHECK(compared > 0);
  if (ids.size() < static_cast<std::size_t>(limit)) CHECK(compared == 10);
}

void compare_greedy(std::string_view kind, const json& prompt, int count) {
  std::vector<token_id> expected = prompt["greedy_48"];
  expected.resize(static_cast<std::size_t>(count));
  const std::vector<token_id> ids = prompt["prompt_ids"];
  const auto cache = cache_of(kind, static_cast<int>(ids.size()) + count);
  generation_options options;
  options.max_new = count;
  options.stop_at_end = false;
  const auto made = generate(
      *test::real_model().model, *cache, ids, cache_scope::only("golden"), options,
      [](token_id) { return false; }, [](token_id) {}, [](int, std::span<const float>) {});
  REQUIRE(made);
  CHECK(made->ids == expected);
}

double norm(std::span<const float> values) {
  double squares = 0;
  for (const float v : values) squares += double{v} * v;
  return std::sqrt(squares);
}

void compare_kv(const cache_kind& cache, int slot, int layer, const json& expected) {
  const kv_shape& shape = test::real_model().model->shape().kv;
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  std::vector<float> k(dim * static_cast<std::size_t>(shape.kv_heads));
  std::vector<float> v(k.size());
  cache.read(slot, layer, expected["pos"], k.data(), v.data());
  INFO("layer " << layer << " position " << expected["pos"]);
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(k[i] == Approx(expected["K"][i].get<double>()).margin(kv_tolerance).epsilon(0));
    CHECK(v[i] == Approx(expected["V"][i].get<double>()).margin(kv_tolerance).epsilon(0));
  }
  for (std::size_t head = 0; head < 3; ++head) {
    const std::span<const float> all_k(k.data() + head * dim, dim);
    const std::span<const float> all_v(v.data() + head * dim, dim);
    CHECK(norm(all_k) == Approx(expected["K_norm"][head].get<double>()).margin(kv_tolerance).epsilon(0));
    CHECK(norm(all_v) == Approx(expected["V_norm"][head].get<double>()).margin(kv_tolerance).epsilon(0));
  }
}

}  // namespace

TEST_CASE("the golden files hold all that is compared") {
  const json& prompts = golden("logits.json")["prompts"];
  CHECK(prompts.size() == 3);
  for (const json& prompt : prompts) {
    CHECK(prompt["positions"].size() == 10);
    CHECK(prompt["greedy_48"].size() == 48);
  }
  CHECK(golden("nll.json")["nll"].size() == 1848);
  CHECK(golden("kv_values.json")["layers"].size() == 3);
}

TEST_CASE("logits and log-sum-exp of a short prompt are the golden ones", "[sample]") {
  for (const std::string_view kind : cache_kind_names()) {
    INFO(kind);
    compare_prompt(kind, golden("logits.json")["prompts"]["p1_plain_short"], 14);
  }
}

TEST_CASE("the first greedy tokens of a short prompt are the golden ones", "[sample]") {
  for (const std::string_view kind : cache_kind_names()) {
    INFO(kind);
    compare_greedy(kind, golden("logits.json")["prompts"]["p1_plain_short"], 6);
  }
}

TEST_CASE("logits and log-sum-exp at every stored position are the golden ones", "[model]") {
  for (const std::string_view kind : cache_kind_names()) {
    for (const auto& [name, prompt] : golden("logits.json")["prompts"].items()) {
      INFO(kind << " " << name);
      compare_prompt(kind, prompt, 100000);
    }
  }
}

TEST_CASE("greedy continuations of 48 tokens are the golden ones", "[model]") {
  for (const std::string_view kind : cache_kind_names()) {
    for (const auto& [name, prompt] : golden("logits.json")["prompts"].items()) {
      INFO(kind << " " << name);
      compare_greedy(kind, prompt, 48);
    }
  }
}

TEST_CASE("the negative log-likelihood of every token of the text is the golden one", "[model]") {
  const json& expected = golden("nll.json");
  const std::vector<token_id> ids = expected["ids"];
  for (const std::string_view kind : cache_kind_names()) {
    const auto cache = cache_of(kind, static_cast<int>(ids.size()));
    const auto nll = score(*test::real_model().model, *cache, ids, 256);
    REQUIRE(nll);
    REQUIRE(nll->size() == expected["nll"].size());
    double worst = 0;
    double sum = 0;
    for (std::size_t i = 0; i < nll->size(); ++i) {
      worst = std::max(worst, std::abs((*nll)[i] - expected["nll"][i].get<double>()));
      sum += (*nll)[i];
    }
    INFO(kind);
    CHECK(worst < logit_tolerance);
    CHECK(sum / static_cast<double>(nll->size()) ==
          Approx(expected["mean_nll"].get<double>()).margin(1e-5).epsilon(0));
  }
}

TEST_CASE("keys and values in the cache are the golden ones", "[model]") {
  const json& expected = golden("kv_values.json");
  const std::vector<token_id> ids = expected["prompt_ids"];
  for (const std::string_view kind : cache_kind_names()) {
    INFO(kind);
    const auto cache = cache_of(kind, static_cast<int>(ids.size()));
    const open_slot slot(*cache, cache->open(ids, cache_scope::only("golden"))->slot);
    REQUIRE(feed(*test::real_model().model, *cache, slot.slot(), ids, 100, observe::last,
                 [](int, std::span<const float>) {}));
    for (const auto& [layer, positions] : expected["layers"].items()) {
      for (const json& position : positions) compare_kv(*cache, slot.slot(), std::stoi(layer), position);
    }
  }
}
