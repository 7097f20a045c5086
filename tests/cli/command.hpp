// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs the `kvcache` command as a user does. KVCACHE_COMMAND is the program's path.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

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
    char name[] = "/tmp/kvcache_cli_XXXXXX";
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
inline outcome run_command(const std::string& arguments, const std::string& folder = ".") {
  const scratch output;
  const std::string out = output.path + "/out", err = output.path + "/err";
  const std::string command = "cd '" + folder + "' && '" KVCACHE_COMMAND "' " + arguments;
  const int status = std::system((command + " >" + out + " 2>" + err).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
}

}  // namespace kvcache::test
