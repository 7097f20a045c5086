// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs `kvcache replay` as a user does.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "support/environment.hpp"

namespace kvcache::test {

using nlohmann::json;

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE(in);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// A folder that goes with the object.
struct scratch {
  std::string path;
  scratch() {
    char name[] = "/tmp/kvcache_replay_XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    path = name;
  }
  scratch(const scratch&) = delete;
  ~scratch() { CHECK(std::system(("rm -r '" + path + "'").c_str()) == 0); }
  std::string file(const std::string& name, const std::string& content) const {
    std::ofstream(path + "/" + name, std::ios::binary) << content;
    return path + "/" + name;
  }
};

struct outcome {
  int code = -1;
  std::string out, err;
  json document() const {
    INFO(out << err);
    const json parsed = json::parse(out, nullptr, false);
    REQUIRE(!parsed.is_discarded());
    CHECK(std::count(out.begin(), out.end(), '\n') == 1);
    return parsed;
  }
};

/// `arguments` go through the shell; `folder` is where the program runs.
inline outcome run(const std::string& arguments, const std::string& folder = ".") {
  const scratch output;
  const std::string out = output.path + "/out", err = output.path + "/err";
  const std::string command = "cd '" + folder + "' && '" KVCACHE_COMMAND "' replay " + arguments;
  const int status = std::system((command + " >" + out + " 2>" + err).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
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
