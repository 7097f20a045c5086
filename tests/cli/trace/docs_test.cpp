// SPDX-License-Identifier: Apache-2.0
// The example lines of docs/traces.md are read as the format that they stand under.
#include <fstream>
#include <map>

#include "cli/trace/support.hpp"

using namespace kvcache;
using namespace kvcache::test;

TEST_CASE("every format of docs/traces.md has an example that is read as that format") {
  std::ifstream page(KVCACHE_DOCS "/traces.md");
  REQUIRE(page.is_open());
  std::map<std::string, std::string> examples;
  std::string name, line;
  for (bool code = false; std::getline(page, line);) {
    if (line.starts_with("## How many")) break;
    if (line.starts_with("```")) {
      code = !code;
    } else if (code) {
      examples[name].append(line).append("\n");
    } else if (line.starts_with("**")) {
      name = line.substr(2, line.find("**", 2) - 2);
    }
  }
  CHECK(examples.size() == 7);
  for (const auto& [format, text] : examples) {
    INFO(format << ": " << text);
    const trace t = read_text(text);
    CHECK(t.format == format);
    CHECK((t.block_tokens > 0 || format == "azure"));
    CHECK((t.units.size() > 0 || format == "azure"));
  }
}
