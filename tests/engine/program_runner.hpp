// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the engine's programs as a user does, for tests.
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "synthetic_model.hpp"

namespace engine::test {

struct outcome {
  int code = -1;
  std::string out;

  /// The one document on stdout.
  nlohmann::json document() const {
    INFO(out);
    const auto parsed = nlohmann::json::parse(out, nullptr, false);
    REQUIRE(!parsed.is_discarded());
    return parsed;
  }
};

/// Runs a shell command; stderr is dropped.
inline outcome run(const std::string& command) {
  outcome o;
  std::FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  REQUIRE(pipe != nullptr);
  char part[4096];
  while (const std::size_t n = std::fread(part, 1, sizeof(part), pipe)) o.out.append(part, n);
  const int status = pclose(pipe);
  o.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return o;
}

/// A folder that goes away with the test.
struct scratch {
  std::string path;
  scratch() {
    char name[] = "/tmp/kvcache_engine_XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    path = name;
  }
  ~scratch() { run("rm -r '" + path + "'"); }
  std::string file(const std::string& name, const std::string& content) const {
    std::ofstream(path + "/" + name, std::ios::binary) << content;
    return "'" + path + "/" + name + "'";
  }
  std::string file(const std::string& name, const bytes& content) const {
    return file(name, std::string(reinterpret_cast<const char*>(content.data()), content.size()));
  }
};

inline void expect_error(const outcome& o, int code, const std::string& field, const std::string& value) {
  CHECK(o.code == code);
  const nlohmann::json document = o.document();
  CHECK(document["schema"] == "kvcache.error.v1");
  CHECK(document["error"]["field"] == field);
  if (!value.empty()) CHECK(document["error"]["value"] == value);
  for (const char* key : {"code", "field", "value", "file", "line"}) CHECK(document["error"].contains(key));
}

}  // namespace engine::test
