// SPDX-License-Identifier: Apache-2.0
// The published traces: all rows arrive, with the sums that other tools find in them.
#include <algorithm>

#include "cli/trace/support.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

struct sums {
  std::string format;
  std::size_t requests, blocks;
  std::int32_t distinct, block_tokens, sessions;
  std::int64_t tokens, last_us;
};

trace read_file(const std::string& name) {
  return cli::read_trace(std::vector<std::string>{data_path("traces/" + name)});
}

void check_sums(const trace& t, const sums& s) {
  std::int64_t tokens = 0;
  std::int32_t sessions = 0;
  for (const cli::request& r : t.requests) {
    tokens += r.input_tokens;
    sessions = std::max(sessions, r.session + 1);
  }
  CHECK(t.format == s.format);
  CHECK(t.requests.size() == s.requests);
  CHECK(t.units.size() == s.blocks);
  CHECK(t.distinct == s.distinct);
  CHECK(t.block_tokens == s.block_tokens);
  CHECK(sessions == s.sessions);
  CHECK(tokens == s.tokens);
  CHECK(t.requests.back().time_us == s.last_us);
  CHECK(t.repeated_ids == 0);
}

}  // namespace

TEST_CASE("published traces read to the last row") {
  check_sums(read_file("mooncake_conversation.jsonl.zst"),
             {"mooncake", 12031, 288500, 182790, 512, 0, 144793823, 3536999000});
  check_sums(read_file("mooncake_synthetic.jsonl.zst"),
             {"mooncake", 3993, 121877, 43924, 512, 0, 61194628, 1022025000});
  check_sums(read_file("lmcache_agent_miniswe_64.jsonl.zst"),
             {"mooncake", 402, 37582, 2366, 64, 20, 2418842, 552131000});
  check_sums(read_file("lmcache_agent_magagent_64.jsonl.zst"),
             {"mooncake", 746, 23266, 3735, 64, 25, 1512159, 6448642000});
  check_sums(read_file("lmcache_agent_taubench_64.jsonl.zst"),
             {"mooncake", 471, 980, 142, 64, 24, 78233, 180918000});
  check_sums(read_file("azure_llm_2023_code.csv.zst"), {"azure", 8819, 0, 0, 0, 0, 18059974, 3435948056});
  check_sums(read_file("tair_kvcm_event_publisher.log.zst"),
             {"tair", 102, 4246, 980, 16, 0, 67936, 1168889555});
}

TEST_CASE("the Claude Code trace of 10.7 million blocks reads to the last row") {
  const trace t = read_file("weka_cc_512.jsonl.zst");
  check_sums(t, {"mooncake", 46218, 10655473, 399146, 512, 692, 5467403989, 440563797000});
  CHECK(t.notes.empty());
}

// Session 266 of the converted trace was made of weka_raw/trace_0274: sub-agents placed in time, every eighth
// id.
TEST_CASE("a raw session with sub-agents is what the converted trace has of it") {
  const trace raw = read_file("weka_raw/trace_0274.json.zst"), all = read_file("weka_cc_512.jsonl.zst");
  std::vector<cli::request> converted;
  for (const cli::request& r : all.requests) {
    if (r.session == 266) converted.push_back(r);
  }
  REQUIRE(converted.size() == 105);
  REQUIRE(raw.requests.size() == 105);
  CHECK(raw.block_tokens == 64);
  std::vector<std::int32_t> in_raw(static_cast<std::size_t>(all.distinct), -1);
  for (std::size_t i = 0; i < raw.requests.size(); ++i) {
    const cli::request &a = raw.requests[i], &b = converted[i];
    CHECK(a.time_us == b.time_us - converted[0].time_us);
    CHECK(a.input_tokens == b.input_tokens);
    CHECK(a.output_tokens == b.output_tokens);
    REQUIRE(a.count / 8 == b.count);
    // The same ids are the same in both: a block of 512 goes with one block of 64, always the same.
    for (std::int32_t k = 0; k < b.count; ++k) {
      std::int32_t& other = in_raw[static_cast<std::size_t>(all.units_of(b)[static_cast<std::size_t>(k)])];
      const std::int32_t mine = raw.units_of(a)[static_cast<std::size_t>(8 * k + 7)];
      if (other < 0) other = mine;
      REQUIRE(other == mine);
    }
  }
}
