// SPDX-License-Identifier: Apache-2.0
#pragma once
// engine_serve's answers beside engine_generate's.
#include <catch2/catch.hpp>
#include <string>

#include "program_runner.hpp"
#include "scheduler.hpp"

namespace engine::test {

inline const std::string serve_program = ENGINE_SERVE;
inline const std::string generate_program = ENGINE_GENERATE;

inline std::string joined(const nlohmann::json& ids) {
  std::string text;
  for (const nlohmann::json& id : ids) {
    if (!text.empty()) text += ',';
    text += std::to_string(id.get<int>());
  }
  return text;
}

/// The answer must be what engine_generate gives for the same ids under `options`, with the same logits in
/// every step.
inline void compare_with_generate(const std::string& model, const nlohmann::json& request,
                                  const std::string& options) {
  if (request["ids"].empty()) return;
  const outcome o = run(generate_program + " --json --model " + model + " --ids " +
                        joined(request["prompt_ids"]) + " --new " + std::to_string(request["ids"].size()) +
                        " --seed " + std::to_string(request["seed"].get<int>()) + options);
  const nlohmann::json alone = o.document();
  INFO(request["id"] << " turn " << request["turn"] << " sample " << request["sample"]);
  CHECK(alone["ids"] == request["ids"]);
  std::uint64_t fnv = chain_start;
  for (const nlohmann::json& step : alone["steps"]) {
    fnv = chain(fnv, std::stoull(step["fnv"].get<std::string>(), nullptr, 16));
  }
  CHECK(fnv == std::stoull(request["fnv"].get<std::string>(), nullptr, 16));
}

inline const nlohmann::json& request_of(const nlohmann::json& run, const std::string& id, int turn = 0,
                                        int sample = 0) {
  for (const nlohmann::json& r : run["requests"]) {
    if (r["id"] == id && r["turn"] == turn && r["sample"] == sample) return r;
  }
  FAIL("no request " << id);
  return run;
}

}  // namespace engine::test
