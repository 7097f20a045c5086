// SPDX-License-Identifier: Apache-2.0
// The seeds of the fuzz targets reach what they are meant to reach.
#include <catch2/catch.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "error.hpp"
#include "trace/read.hpp"

TEST_CASE("every seed of a trace format is read as that format") {
  int seen = 0;
  for (const std::string folder : {"mooncake", "weka", "logs", "kv_events", "packed"}) {
    for (const auto& entry :
         std::filesystem::directory_iterator(std::string(KVCACHE_FUZZ_CORPUS "/") + folder)) {
      const std::string path = entry.path().string(), file = entry.path().filename().string();
      INFO(path);
      // The first word of the name is the format; "refused" seeds are there for what they are refused for.
      const std::string format = file.substr(0, file.find('-'));
      ++seen;
      if (format == "refused") {
        CHECK_THROWS_AS(kvcache::cli::read_trace(std::vector<std::string>{path}), kvcache::cli::error);
      } else {
        CHECK(kvcache::cli::read_trace(std::vector<std::string>{path}).format == format);
      }
    }
  }
  CHECK(seen >= 20);
}
