// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs `kvcache replay` as a user does.

#include <cstdint>
#include <string>

#include "cli/command.hpp"
#include "support/environment.hpp"

namespace kvcache::test {

/// As run_command.
inline outcome run(const std::string& arguments, const std::string& folder = ".") {
  return run_command("replay " + arguments, folder);
}

/// The document of a run that must succeed.
inline json answer(const std::string& arguments) {
  INFO(arguments);
  const outcome o = run(arguments + " --json");
  INFO(o.out);
  CHECK(o.code == 0);
  CHECK(o.err.empty());
  return o.document();
}

/// A published trace, quoted for the shell.
inline std::string published(const std::string& name) {
  return std::string("'") + data_path("traces/" + name) + "'";
}

/// Under --json the error is the document; without, one line on stderr. Never any part of a result.
inline void check_error(const std::string& arguments, int code, const std::string& field,
                        const std::string& value) {
  INFO(arguments);
  const outcome as_json = run(arguments + " --json");
  CHECK(as_json.code == code);
  CHECK(as_json.err.empty());
  const json document = as_json.document();
  INFO(as_json.out);
  CHECK(document["schema"] == "kvcache.error.v1");
  CHECK(document["error"]["field"] == field);
  if (!value.empty()) CHECK(document["error"]["value"] == value);
  const outcome as_text = run(arguments);
  CHECK(as_text.code == code);
  CHECK(as_text.out.empty());
  CHECK(as_text.err.rfind("error: ", 0) == 0);
  CHECK(std::count(as_text.err.begin(), as_text.err.end(), '\n') == 1);
}

/// Six requests of two sessions, blocks of 16 tokens, a second apart.
inline const char* small_trace =
    "{\"timestamp\": 0, \"input_length\": 48, \"output_length\": 4, \"hash_ids\": [1, 2, 3]}\n"
    "{\"timestamp\": 1000, \"input_length\": 40, \"output_length\": 4, \"hash_ids\": [1, 2, 4]}\n"
    "{\"timestamp\": 2000, \"input_length\": 32, \"output_length\": 4, \"hash_ids\": [7, 8]}\n"
    "{\"timestamp\": 3000, \"input_length\": 64, \"output_length\": 4, \"hash_ids\": [1, 2, 3, 5]}\n"
    "{\"timestamp\": 4000, \"input_length\": 32, \"output_length\": 4, \"hash_ids\": [7, 8]}\n"
    "{\"timestamp\": 9000, \"input_length\": 16, \"output_length\": 4, \"hash_ids\": [1]}\n";

}  // namespace kvcache::test
