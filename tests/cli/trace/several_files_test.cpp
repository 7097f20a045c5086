// SPDX-License-Identifier: Apache-2.0
// Several files as one trace: merged by time, ids shared or apart as their format says.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "cli/trace/support.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// Files in a folder of their own that goes when the test ends.
class files {
 public:
  files()
      : folder_(std::filesystem::temp_directory_path() / ("kvcache_trace_" + std::to_string(++count()) + "_" +
                                                          std::to_string(std::random_device{}()))) {
    std::filesystem::create_directories(folder_);
  }
  ~files() { std::filesystem::remove_all(folder_); }
  files(const files&) = delete;
  files& operator=(const files&) = delete;
  void add(const std::string& content) {
    paths_.push_back((folder_ / std::to_string(paths_.size())).string());
    std::ofstream(paths_.back(), std::ios::binary) << content;
  }
  const std::vector<std::string>& paths() const { return paths_; }

 private:
  static int& count() {
    static int n = 0;
    return n;
  }
  std::filesystem::path folder_;
  std::vector<std::string> paths_;
};

std::string row(int time, const std::string& ids, const std::string& more = "") {
  return "{\"timestamp\":" + std::to_string(time) + ",\"input_length\":512,\"hash_ids\":[" + ids + "]" +
         more + "}\n";
}

}  // namespace

TEST_CASE("files merge by time, and equal times keep the order of the files") {
  files f;
  f.add(row(10, "5", ",\"session_id\":\"b\"") + row(20, "6"));
  f.add(packed(row(5, "7", ",\"session_id\":\"a\"") + row(20, "5", ",\"session_id\":\"b\"") + row(30, "8")));
  const trace t = cli::read_trace(f.paths());
  REQUIRE(t.requests.size() == 5);
  const std::vector<std::int64_t> times{0, 5000, 15000, 15000, 25000};
  const std::vector<int> ids{0, 1, 2, 1, 3}, sessions{0, 1, -1, 1, -1};
  for (std::size_t i = 0; i < 5; ++i) {
    CHECK(t.requests[i].time_us == times[i]);
    CHECK(ids_of(t, i) == std::vector<int>{ids[i]});
    CHECK(t.requests[i].session == sessions[i]);
  }
  read_options apart;
  apart.ids = cli::id_scope::per_file;
  const trace u = cli::read_trace(f.paths(), apart);
  CHECK(u.distinct == 5);
  CHECK(u.requests[3].session == 2);
}

TEST_CASE("weka sessions read together keep their ids apart") {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(data_path("traces/weka_raw")))
    paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  REQUIRE(paths.size() == 8);
  std::size_t requests = 0, units = 0;
  std::int32_t distinct = 0;
  for (const std::string& path : paths) {
    const trace one = cli::read_trace(std::vector<std::string>{path});
    requests += one.requests.size();
    units += one.units.size();
    distinct += one.distinct;
  }
  std::vector<cli::read_progress> seen;
  const trace all = cli::read_trace(paths, {}, [&](const cli::read_progress& p) { seen.push_back(p); });
  CHECK(all.requests.size() == requests);
  CHECK(all.units.size() == units);
  CHECK(all.distinct == distinct);
  CHECK(std::is_sorted(all.requests.begin(), all.requests.end(),
                       [](const auto& a, const auto& b) { return a.time_us < b.time_us; }));
  REQUIRE(!seen.empty());
  CHECK(seen.back().bytes == seen.back().total);
  std::int32_t next = 0;  // ids are numbered in the order in which requests now stand
  for (const cli::request& r : all.requests) {
    for (const std::int32_t unit : all.units_of(r)) {
      REQUIRE(unit <= next);
      if (unit == next) ++next;
    }
  }
  CHECK(next == all.distinct);
}

TEST_CASE("one trace in two files is the trace in one") {
  files whole, parts;
  std::string first, second;
  for (int i = 0; i < 200; ++i)
    (i < 90 ? first : second) += row(i / 3, std::to_string(i % 17) + "," + std::to_string(i % 29));
  whole.add(first + second);
  parts.add(first);
  parts.add(second);
  const trace a = cli::read_trace(whole.paths()), b = cli::read_trace(parts.paths());
  CHECK(a.units == b.units);
  CHECK(a.block_tokens == b.block_tokens);
  CHECK(a.requests.size() == b.requests.size());
}

TEST_CASE("files of two formats or two block sizes make no trace") {
  files formats;
  formats.add(row(1, "1"));
  formats.add("{\"tokens\":[1]}\n");
  const cli::error mixed = refusal([&] { cli::read_trace(formats.paths()); });
  CHECK(mixed.code == "mixed_formats");
  CHECK(mixed.value == "tokens after mooncake");
  CHECK(mixed.file == formats.paths()[1]);
  files sizes;
  sizes.add(
      "{\"timestamp\":0,\"input_length\":64,\"hash_ids\":[1]}\n{\"timestamp\":0,\"input_length\":65,\"hash_"
      "ids\":[1,2]}\n");
  sizes.add(
      "{\"timestamp\":0,\"input_length\":16,\"hash_ids\":[1]}\n{\"timestamp\":0,\"input_length\":17,\"hash_"
      "ids\":[1,2]}\n");
  const cli::error two = refusal([&] { cli::read_trace(sizes.paths()); });
  CHECK(two.field == "block size");
  CHECK(two.value == "16, 64 before");
  CHECK(two.file == sizes.paths()[1]);
}

TEST_CASE("nothing is returned when the last of many files is wrong") {
  files f;
  f.add(row(1, "1"));
  f.add(row(1, "1") + "{");
  const cli::error e = refusal([&] { cli::read_trace(f.paths()); });
  CHECK(e.file == f.paths()[1]);
  CHECK(e.line == 2);
}
