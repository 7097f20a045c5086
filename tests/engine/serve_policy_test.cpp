// SPDX-License-Identifier: Apache-2.0
// engine_serve --policy as a user runs it. The case tagged [sample] uses the real model.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "serve_support.hpp"
#include "support/environment.hpp"

using namespace engine::test;
using nlohmann::json;

namespace {

/// Four requests of a few dozen tokens: one sampled three times, one a conversation.
std::string workload() {
  return R"({"id": "one", "turns": [{"role": "user", "content": "the thing and the thing, and another thing"}], "max_new": 12, "scope": "shared"}
{"id": "two", "arrival": 2, "turns": [{"role": "system", "content": "a"}, {"role": "user", "content": "the sea"}], "max_new": 9, "scope": {"tenant": "x"}, "n": 3, "temperature": 1.5, "seed": 9}
{"id": "three", "arrival": 1, "turns": [{"role": "user", "content": "and then there was more of it"}], "agent": ["the", "a thing"], "max_new": 8, "scope": {"tenant": "y"}}
{"id": "four", "arrival": 3, "turns": [{"role": "user", "content": "the thing and the thing, and another thing"}], "max_new": 0, "scope": "shared"}
)";
}

struct fixture : scratch {
  std::string model = file("m.gguf", synthetic_model({}).serialise());
  std::string base =
      serve_program + " --json --threads 1 --model " + model + " --requests " + file("w", workload());
};

int dropped_of(const json& run) {
  int sum = 0;
  for (const json& request : run["requests"]) sum += request["dropped"].get<int>();
  CHECK(run["totals"]["dropped"] == sum);
  return sum;
}

}  // namespace

TEST_CASE("a request served under a policy gets what engine_generate gives it under the same policy") {
  const fixture f;
  const char* const policies[] = {"window:20", "streaming_llm:sinks=4,window=20", "h2o:heavy=10,recent=10",
                                  "snapkv:capacity=24,window=8,kernel=3",
                                  "far_rms:capacity=24,recent=8,distance=8,budget=layer"};
  int round = 0;
  for (const char* policy : policies) {
    for (const char* mode : {"stream", "oneshot"}) {
      CAPTURE(policy, mode);
      const std::string how = std::string(" --policy ") + policy + " --mode " + mode;
      const char* const batches[] = {" --batch 1", " --batch 8 --chunk 7", " --batch 4 --blocks 12"};
      const outcome o = run(f.base + how + batches[round++ % 3]);
      CHECK(o.code == 0);
      const json d = o.document();
      REQUIRE(d["runs"].size() == 1);
      const json& r = d["runs"][0];
      CHECK(r["cache"] == "paged");
      CHECK(r["policy"].get<std::string>().rfind(std::string(policy).substr(0, 5), 0) == 0);
      CHECK(r["mode"] == mode);
      CHECK(dropped_of(r) > 0);
      REQUIRE(r["requests"].size() == 8);
      for (const json& request : r["requests"])
        compare_with_generate(f.model, request, how + " --temperature " + request["temperature"].dump());
    }
  }
}

TEST_CASE(
    "the policy full serves what no policy serves, and a policy's default is to act from the first token") {
  const fixture f;
  const json plain = run(f.base + " --cache paged").document();
  const json full = run(f.base + " --policy full").document();
  CHECK_FALSE(plain["runs"][0].contains("policy"));
  CHECK(full["runs"][0]["policy"] == "full");
  CHECK(full["runs"][0]["mode"] == "stream");
  CHECK(full["runs"][0]["requests"] == plain["runs"][0]["requests"]);
  const json first = run(f.base + " --policy window:20").document();
  const json same = run(f.base + " --cache paged --drop stream --policy window:20").document();
  CHECK(first["runs"][0]["requests"] == same["runs"][0]["requests"]);
  CHECK(first["runs"][0]["requests"] != plain["runs"][0]["requests"]);
}

TEST_CASE("a pool that is too small for the texts serves them by dropping when blocks run out") {
  const fixture f;
  const outcome refused = run(f.base + " --cache paged --blocks 3");
  CHECK(refused.code == 1);
  const outcome served = run(f.base + " --policy h2o:heavy=10,recent=10 --drop out_of_blocks --blocks 3");
  CHECK(served.code == 0);
  const json d = served.document();
  CHECK(d["runs"][0]["mode"] == "out_of_blocks");
  CHECK(dropped_of(d["runs"][0]) > 0);
  CHECK(d["runs"][0]["totals"]["peak_blocks"] <= 3);
}

TEST_CASE("a policy is shown in the table, and wrong or contradicting options are refused by name") {
  const fixture f;
  const outcome table = run(f.base.substr(0, f.base.find(" --json")) +
                            f.base.substr(f.base.find(" --json") + 7) + " --policy window:20");
  CHECK(table.code == 0);
  for (const char* word : {"policy window:window=20, stream", "tokens dropped by the policy"})
    CHECK(table.out.find(word) != std::string::npos);
  expect_error(run(f.base + " --policy window:20 --cache contiguous"), 2, "--cache",
               "contiguous; with --policy: paged");
  expect_error(run(f.base + " --policy window:20 --cache both"), 2, "--cache", "both; with --policy: paged");
  expect_error(run(f.base + " --policy full --cache reference"), 2, "--cache",
               "reference; with --policy: paged");
  expect_error(run(f.base + " --policy window:20 --eviction lfu"), 2, "--eviction",
               "lfu; with --policy: lru");
  expect_error(run(f.base + " --mode oneshot"), 2, "--mode", "oneshot without --policy");
  expect_error(run(f.base + " --drop stream --cache paged"), 2, "--mode", "stream without --policy");
  CHECK(run(f.base + " --policy window:20 --drop never").code == 2);
  const outcome bad = run(f.base + " --policy h2o:weight=3");
  expect_error(bad, 3, "weight", "");
  CHECK(bad.document()["error"]["code"] == "bad_policy");
  CHECK(bad.document()["error"]["value"].get<std::string>().find("heavy") != std::string::npos);
  const outcome help = run(serve_program + " --help");
  for (const char* word : {"--policy", "--mode,--drop", "oneshot"})
    CHECK(help.out.find(word) != std::string::npos);
}

TEST_CASE("the real model under a policy answers in a batch what it answers alone", "[sample]") {
  const scratch folder;
  const std::string model = "'" + kvcache::test::model_path() + "'";
  const std::string notes =
      "You answer in one short sentence. The ferry leaves at nine and costs two crowns. It carries people, "
      "horses and carts, but no cattle, and takes an hour.";
  std::string lines;
  for (const char* question : {"When does the ferry leave?", "What does the ferry cost?"}) {
    const json line = {
        {"id", question},
        {"arrival", lines.empty() ? 0 : 2},
        {"turns", {{{"role", "system"}, {"content", notes}}, {{"role", "user"}, {"content", question}}}},
        {"max_new", 6},
        {"scope", "shared"}};
    lines += line.dump() + "\n";
  }
  const std::string requests = folder.file("w", lines);
  for (const char* how : {" --policy streaming_llm:sinks=4,window=12 --mode stream",
                          " --policy snapkv:capacity=24,window=8 --mode oneshot"}) {
    INFO(how);
    const outcome o = run(serve_program + " --json --threads 2 --chunk 40 --model " + model + " --requests " +
                          requests + how);
    CHECK(o.code == 0);
    const json d = o.document();
    const json& r = d["runs"][0];
    CHECK(dropped_of(r) > 0);
    CHECK(r["totals"]["reused"].get<int>() >= 16);
    for (const json& request : r["requests"]) compare_with_generate(model, request, how);
  }
}
