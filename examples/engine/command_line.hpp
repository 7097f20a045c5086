// SPDX-License-Identifier: Apache-2.0
#pragma once

// A program's options. CLI11 parses them, but only command_line.cpp and programs that want more of it than is
// offered here include it: it is one large header, and would take half of the time that an example compiles.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace engine {

/// Options are written into variables, which must live until they are parsed. What a variable holds when it
/// is added is the default, shown by --help. A wrong value ends the program with exit code 2 (run_program).
class command_line {
 public:
  /// `about`: a sentence for --help.
  command_line(const std::string& about, const std::string& name);
  ~command_line();
  command_line(const command_line&) = delete;
  command_line& operator=(const command_line&) = delete;

  std::string name() const;

  /// A number from `least` to `most`.
  void add(const char* option, int& value, const char* text, int least, int most);
  void add(const char* option, double& value, const char* text, double least, double most);
  /// Any number of 64 bits.
  void add(const char* option, std::uint64_t& value, const char* text);
  /// Any text; nothing is said of a default that is empty.
  void add(const char* option, std::string& value, const char* text);
  /// One of these texts.
  void add(const char* option, std::string& value, const char* text, const std::vector<std::string>& among);
  /// As many texts as it holds now.
  void add(const char* option, std::vector<std::string>& values, const char* text);
  /// True if the option, which has no value, is there.
  void add(const char* option, bool& value, const char* text);

  /// The parser itself (CLI/CLI.hpp).
  CLI::App& app() { return *app_; }

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace engine
