// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"

namespace kvcache::cli {

command add_plan(CLI::App& program) {
  command c;
  c.app = program.add_subcommand("plan", "what fits, and what a decode step costs");
  c.run = [](progress&) { return json::object(); };
  c.describe = [](const json&) { return std::string(); };
  return c;
}

}  // namespace kvcache::cli
