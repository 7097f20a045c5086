// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a command joins the program: one function per command, listed in main.cpp. It describes its options to
// CLI11 and hands back what to run; main parses, runs, prints and turns errors into exit codes.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "output.hpp"

namespace kvcache::cli {

/// One command of the program.
struct command {
  CLI::App* app = nullptr;  ///< its options
  /// Does the work. The document is all that is printed under --json. Throws `error`.
  std::function<json(progress&)> run;
  /// The same document for people.
  std::function<std::string(const json&)> describe;
};

/// What fits, and what a decode step costs.
command add_plan(CLI::App& program);

/// What a trace of requests would hit.
command add_replay(CLI::App& program);

}  // namespace kvcache::cli
