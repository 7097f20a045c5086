// SPDX-License-Identifier: Apache-2.0
// What the command answers: the fields, figures known from elsewhere, the order of rows, the curve.
#include <string>
#include <tuple>
#include <vector>

#include "program.hpp"

using namespace kvcache::test;

namespace {

// The first row of that policy and capacity; -1: without bound.
json row_of(const json& document, const std::string& policy, std::int64_t capacity) {
  for (const json& r : document["results"]) {
    const bool here = capacity < 0 ? r["capacity_blocks"].is_null() : r["capacity_blocks"] == capacity;
    if (r["policy"] == policy && here) return r;
  }
  FAIL("no row of " << policy << " at " << capacity);
  return {};
}

std::string small(const scratch& folder) {
  return std::string("'") + folder.file("small.jsonl", small_trace) + "'";
}

}  // namespace

TEST_CASE("the figures of mooncake_conversation are found to the token") {
  const json d = answer(published("mooncake_conversation.jsonl.zst") +
                        " --policy lru --capacity 2048b,4M,32768blocks,inf --curve");
  CHECK(d["schema"] == "kvcache.replay.v1");
  CHECK(d["trace"]["requests"] == 12031);
  CHECK(d["trace"]["blocks"] == 288500);
  CHECK(d["trace"]["unique_blocks"] == 182790);
  CHECK(d["trace"]["tokens"] == 144793823);
  CHECK(d["trace"]["block_tokens"] == 512);
  const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> known = {
      {2048, 15857, 8114541}, {8192, 52381, 26803109}, {32768, 96618, 49444886}, {-1, 105710, 54098411}};
  REQUIRE(d["results"].size() == 8);  // and the optimum beside each
  for (std::size_t i = 0; i < known.size(); ++i) {
    const auto [capacity, blocks, tokens] = known[i];
    const json& r = d["results"][i];
    CHECK(r == row_of(d, "lru", capacity));
    CHECK(r["hit_blocks"] == blocks);
    CHECK(r["hit_tokens"] == tokens);
    CHECK(r["asked"] == true);
    CHECK(d["results"][i + 4]["policy"] == "belady");
    CHECK(d["results"][i + 4]["asked"] == false);
    CHECK(d["results"][i + 4]["hit_tokens"] >= r["hit_tokens"]);
  }
  // The curve says the same, as a point of its own.
  for (const auto& [capacity, blocks, tokens] : known) {
    bool found = capacity < 0;
    for (const json& p : d["curve"]) {
      if (p["capacity_blocks"] != capacity) continue;
      found = true;
      CHECK(p["hit_blocks"] == blocks);
      CHECK(p["hit_tokens"] == tokens);
    }
    CHECK(found);
  }
  CHECK(d["curve"].back()["hit_blocks"] == 105710);
  CHECK(d["knee"]["capacity_blocks"] == 38222);
  CHECK(d["summary"]["ceiling"]["hit_tokens"] == 54098411);
}

TEST_CASE("a trace small enough to follow by hand is answered in every field") {
  const scratch folder;
  const json d = answer(small(folder) + " --policy lru,ttl --ttl 2 --capacity 4b,inf");
  const json wanted = {{"policy", "lru"},  {"capacity_blocks", 4},   {"ttl_s", nullptr},
                       {"workers", 1},     {"route", nullptr},       {"hit_blocks", 5},
                       {"hit_tokens", 80}, {"requests_with_hit", 3}, {"evictions", 6},
                       {"resident_end", 4}};
  for (const auto& [key, value] : wanted.items()) {
    INFO(key);
    CHECK(d["results"][0][key] == value);
  }
  CHECK(d["trace"]["requests"] == 6);
  CHECK(d["trace"]["blocks"] == 15);
  CHECK(d["trace"]["unique_blocks"] == 7);
  CHECK(d["trace"]["tokens"] == 232);
  CHECK(d["trace"]["block_tokens"] == 16);
  const json unbounded = row_of(d, "lru", -1);
  CHECK(unbounded["hit_blocks"] == 8);
  CHECK(unbounded["hit_tokens"] == 128);
  CHECK(unbounded["requests_with_hit"] == 4);
  CHECK(unbounded["mean_resident_blocks"].get<double>() == Approx(55.0 / 9));
  const json timed = row_of(d, "ttl", -1);
  CHECK(timed["ttl_s"] == 2);
  CHECK(timed["hit_blocks"] == 6);
  CHECK(timed["hit_tokens"] == 96);
  CHECK(d["results"][0]["lost_to_capacity"]["tokens"] == 48);
  CHECK(d["summary"]["share_less_than_block"] == 2);
  CHECK(d["curve"].is_null());
}

TEST_CASE("rows come policy by policy, then by capacity, time and route; the optimum last") {
  const scratch folder;
  const json d = answer(small(folder) +
                        " --policy ttl,lru,ttl:9,s3_fifo:small=20,uses=1 --ttl 2,0.5 --capacity 8b,inf"
                        " --workers 2 --route round_robin,prefix_affinity");
  std::string order;
  for (const json& r : d["results"]) {
    order += r["policy"].get<std::string>() + " " + r["capacity_blocks"].dump() + " " + r["ttl_s"].dump() +
             " " + (r["route"].is_null() ? "-" : r["route"].get<std::string>().substr(0, 1)) + "\n";
  }
  CHECK(order ==
        "ttl 8 2 r\nttl 8 2 p\nttl 8 0.5 r\nttl 8 0.5 p\nttl null 2 r\nttl null 2 p\nttl null 0.5 r\nttl "
        "null 0.5 p\n"
        "lru 8 null r\nlru 8 null p\nlru null null r\nlru null null p\n"
        "ttl:9 8 9 r\nttl:9 8 9 p\nttl:9 null 9 r\nttl:9 null 9 p\n"
        "s3_fifo:small=20,uses=1 8 null r\ns3_fifo:small=20,uses=1 8 null p\n"
        "s3_fifo:small=20,uses=1 null null r\ns3_fifo:small=20,uses=1 null null p\n"
        "belady 8 null -\nbelady null null -\n");
  const json lru = row_of(d, "lru", 8);
  CHECK(lru["hit_blocks"] == 5);
  CHECK(lru["workers"] == 2);
  CHECK(lru["lost_to_capacity"]["blocks"] == 0);
  CHECK(lru["lost_to_routing"]["blocks"] == 3);
}

TEST_CASE("every way to say a capacity means the same blocks") {
  const scratch folder;
  const std::string trace = small(folder);
  for (const char* text : {"64b", "64blocks", "64block", "1k", "1K", "1024", "1.0k"}) {
    CHECK(answer(trace + " --no-optimum --capacity " + text)["results"][0]["capacity_blocks"] == 64);
  }
  CHECK(answer(trace + " --no-optimum --capacity 1M")["results"][0]["capacity_blocks"] == 65536);
  CHECK(answer(trace + " --no-optimum --capacity 33")["results"][0]["capacity_blocks"] == 2);
  CHECK(answer(trace + " --no-optimum --capacity inf")["results"][0]["capacity_blocks"].is_null());
  // llama-3-8b: 128 KiB per token in f16, half of it in fp8.
  const json d = answer(trace + " --model llama-3-8b --capacity 2MiB,1GiB,1GB --no-optimum");
  CHECK(d["model"]["bytes_per_token"] == 131072);
  CHECK(d["results"][0]["capacity_blocks"] == 1);
  CHECK(d["results"][1]["capacity_blocks"] == 512);
  CHECK(d["results"][1]["capacity_bytes"] == 1 << 30);
  CHECK(d["results"][2]["capacity_blocks"] == 476);
  const json fp8 = answer(trace + " --model llama-3-8b --kv fp8 --capacity 1GiB --no-optimum");
  const auto token = fp8["model"]["bytes_per_token"].get<std::int64_t>();  // half, and scales
  CHECK(token > 65536);
  CHECK(token < 70000);
  CHECK(fp8["results"][0]["capacity_blocks"] == (1 << 30) / token / 16);
}

TEST_CASE("a capacity that no trace fills finds what no bound finds") {
  const scratch folder;
  const json d = answer(small(folder) + " --policy lru,belady_bypass --capacity 4611686018427387903b,inf");
  for (const json& r : d["results"]) CHECK(r["hit_blocks"] == 8);
}

TEST_CASE("without a capacity some are chosen, and the same command gives the same bytes") {
  const scratch folder;
  const json d = answer(published("lmcache_agent_miniswe_64.jsonl.zst"));
  CHECK(d["results"].size() >= 6);
  CHECK(d["results"].back()["policy"] == "belady");
  CHECK(d["results"].back()["capacity_blocks"].is_null());
  const std::string arguments =
      published("lmcache_agent_miniswe_64.jsonl.zst") +
      " --workers 3 --route random,affinity_load --seed 7 --policy lru,gdsf --curve --json";
  CHECK(run(arguments).out == run(arguments).out);
}

TEST_CASE("several files are one trace, a sampled curve says so") {
  const scratch folder;
  const std::string a = folder.file("a.jsonl", R"({"timestamp": 0, "input_length": 16, "hash_ids": [1]})");
  const std::string b = folder.file("b.jsonl", R"({"timestamp": 5, "input_length": 16, "hash_ids": [1]})");
  const std::string both = "'" + a + "' '" + b + "'";
  CHECK(answer(both + " --capacity inf")["results"][0]["hit_blocks"] == 1);
  CHECK(answer(both + " --capacity inf --ids per_file")["results"][0]["hit_blocks"] == 0);
  const json sampled =
      answer(published("mooncake_synthetic.jsonl.zst") + " --capacity inf --curve --sample 0.1");
  CHECK(sampled["curve_rate"] == Approx(0.1));
  CHECK(sampled["curve"].size() > 100);
}

TEST_CASE("a log of tokens is a trace with times or without, with lengths beside them or without") {
  const scratch folder;
  const std::string tokens = R"("tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9])";
  for (const char* beside :
       {"", R"("timestamp": 3, )", R"("timestamp": 3, "session": "a", )", R"("input_length": 9, )"}) {
    const std::string line = std::string("{") + beside + tokens + "}\n";
    const std::string trace = std::string("'") + folder.file("log.jsonl", line + line) + "'";
    INFO(line);
    const json d = answer(trace + " --block 4 --capacity inf,1b");
    CHECK(d["trace"]["block_tokens"] == 4);
    CHECK(d["trace"]["tokens"] == 18);
    CHECK(d["results"][0]["hit_tokens"] == 8);
    CHECK(d["results"][1]["hit_tokens"] == 4);
  }
  // Without times nothing runs out, and that is said.
  const std::string trace =
      std::string("'") + folder.file("log.jsonl", std::string("{") + tokens + "}\n") + "'";
  const json timed = answer(trace + " --block 4 --policy ttl --ttl 1 --capacity inf");
  CHECK(timed["notes"].dump().find("nothing runs out") != std::string::npos);
}

TEST_CASE("people read what is lost where, and what engines would say") {
  const outcome o =
      run(published("mooncake_synthetic.jsonl.zst") +
          " --policy lru,slru --capacity 2048b --workers 4 --route round_robin,prefix_affinity");
  CHECK(o.code == 0);
  CHECK(o.err.empty());
  for (const char* part :
       {"3,993 requests", "of optimum", "belady *", "prefix_affinity", "lost to capacity",
        "share less than one block", "bends at", "Routing at 2,048 blocks (1M tokens)", "What to do"}) {
    INFO(o.out);
    CHECK(o.out.find(part) != std::string::npos);
  }
}

TEST_CASE("the page of the documents has the text as it is") {
  const outcome o =
      run("mooncake_conversation.jsonl.zst --policy lru,s3_fifo --capacity 1M,4M,16M", data_path("traces"));
  CHECK(o.code == 0);
  INFO(o.out);
  CHECK(read_file(KVCACHE_DOCS "/replay.md").find(o.out) != std::string::npos);
}
