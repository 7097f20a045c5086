// SPDX-License-Identifier: Apache-2.0
// Workload files, and engine_serve as a user runs it. Cases tagged [sample] use the real model and are short
// enough for every build; the case tagged [model] serves the workload that ships with the engine.
#include <catch2/catch.hpp>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "cache_kind.hpp"
#include "program_runner.hpp"
#include "scheduler.hpp"
#include "serve_support.hpp"
#include "support/environment.hpp"
#include "synthetic_model.hpp"
#include "workload.hpp"

using namespace engine::test;
using engine::token_id;
using nlohmann::json;

namespace {

const std::string main_workload = ENGINE_WORKLOADS "/main.jsonl";

const std::string good_line =
    R"({"id": "a", "turns": [{"role": "user", "content": "the thing"}], "max_new": 4, "scope": "shared"})";

/// good_line with one field replaced, added, or (null pointer) removed.
std::string line_with(const std::string& key, const char* value) {
  json object = json::parse(good_line);
  object.erase(key);
  if (value != nullptr) object[key] = json::parse(value);
  return object.dump();
}

struct fault {
  std::string line;
  const char* code;
  const char* field;
  const char* value;
};

std::vector<fault> faults() {
  return {
      {"{\"id\": \"a\",", "not_json", "line", "{\"id\": \"a\","},
      {"hello", "not_json", "line", "hello"},
      {good_line + good_line, "not_json", "line", nullptr},
      {"{\"id\": \"\xFF\"}", "not_json", "line", nullptr},
      {std::string(100000, '['), "not_json", "line", nullptr},
      {std::string(100000, '[') + std::string(100000, ']'), "bad_type", "line", "an array of 1"},
      {"[]", "bad_type", "line", "an array of 0"},
      {"12", "bad_type", "line", "12"},
      {line_with("id", nullptr), "missing", "id", "absent"},
      {line_with("id", "7"), "bad_type", "id", "7"},
      {line_with("id", "\"\""), "bad_value", "id", "\"\""},
      {line_with("colour", "\"red\""), "unknown_key", "colour", "\"red\""},
      {line_with("", "1"), "unknown_key", "\"\"", "1"},
      {"{\"id\": \"a\", \"id\": \"b\"}", "duplicate", "id", "key occurs twice"},
      {line_with("arrival", "-1"), "bad_value", "arrival", "-1"},
      {line_with("arrival", "1.5"), "bad_type", "arrival", "1.5"},
      {line_with("arrival", "\"soon\""), "bad_type", "arrival", "\"soon\""},
      {line_with("arrival", "18446744073709551615"), "bad_value", "arrival", "18446744073709551615"},
      {line_with("turns", nullptr), "missing", "turns", "absent"},
      {line_with("turns", "[]"), "bad_value", "turns", "an array of 0"},
      {line_with("turns", "\"hi\""), "bad_type", "turns", "\"hi\""},
      {line_with("turns", "[\"hi\"]"), "bad_type", "turns[0]", "\"hi\""},
      {line_with("turns", R"([{"role": "user"}])"), "missing", "turns[0].content", "absent"},
      {line_with("turns", R"([{"content": "x"}])"), "missing", "turns[0].role", "absent"},
      {line_with("turns", R"([{"role": "god", "content": "x"}])"), "bad_value", "turns[0].role", "\"god\""},
      {line_with("turns", R"([{"role": "user", "content": "x"}, {"role": "user", "content": 3}])"),
       "bad_type", "turns[1].content", "3"},
      {line_with("turns", R"([{"role": "user", "content": "x", "name": "y"}])"), "unknown_key",
       "turns[0].name", "\"y\""},
      {line_with("agent", "[]"), "bad_value", "agent", "an array of 0"},
      {line_with("agent", "\"go on\""), "bad_type", "agent", "\"go on\""},
      {line_with("agent", "[\"go on\", 5]"), "bad_type", "agent[1]", "5"},
      {line_with("max_new", nullptr), "missing", "max_new", "absent"},
      {line_with("max_new", "-1"), "bad_value", "max_new", "-1"},
      {line_with("max_new", "16777217"), "bad_value", "max_new", "16777217"},
      {line_with("max_new", "true"), "bad_type", "max_new", "true"},
      {line_with("scope", nullptr), "missing", "scope", "absent"},
      {line_with("scope", "\"mine\""), "bad_value", "scope", "\"mine\""},
      {line_with("scope", "3"), "bad_type", "scope", "3"},
      {line_with("scope", "{}"), "missing", "scope.tenant", "absent"},
      {line_with("scope", R"({"tenant": ""})"), "bad_value", "scope.tenant", "\"\""},
      {line_with("scope", R"({"tenant": 1})"), "bad_type", "scope.tenant", "1"},
      {line_with("scope", R"({"tenant": "a", "adapter": "b"})"), "unknown_key", "scope.adapter", "\"b\""},
      {line_with("n", "0"), "bad_value", "n", "0"},
      {line_with("n", "-3"), "bad_value", "n", "-3"},
      {line_with("n", "4097"), "bad_value", "n", "4097"},
      {line_with("n", "\"4\""), "bad_type", "n", "\"4\""},
      {line_with("temperature", "-0.5"), "bad_value", "temperature", "-0.5"},
      {line_with("temperature", "101"), "bad_value", "temperature", "101"},
      {line_with("temperature", "\"hot\""), "bad_type", "temperature", "\"hot\""},
      {line_with("seed", "-1"), "bad_value", "seed", "-1"},
      {line_with("seed", "1.5"), "bad_type", "seed", "1.5"},
  };
}

/// A small workload in which every kind of line occurs.
std::string small_workload() {
  return R"({"id": "one", "turns": [{"role": "user", "content": "the thing and the thing"}], "max_new": 6, "scope": "shared"}
{"id": "two", "arrival": 2, "turns": [{"role": "system", "content": "a"}, {"role": "user", "content": "the"}], "max_new": 5, "scope": {"tenant": "x"}, "n": 3, "temperature": 1.5, "seed": 9}

{"id": "three", "arrival": 1, "turns": [{"role": "user", "content": "and"}], "agent": ["the", "a thing"], "max_new": 4, "scope": {"tenant": "y"}}
{"id": "none", "arrival": 9, "turns": [{"role": "user", "content": "the thing and the thing"}], "max_new": 0, "scope": "shared"}
)";
}

std::string synthetic_base(const scratch& folder) {
  return serve_program + " --threads 1 --model " + folder.file("m.gguf", synthetic_model({}).serialise());
}

}  // namespace

TEST_CASE("a workload line that is wrong is an error with file, line, field and value") {
  for (const fault& f : faults()) {
    // A good line and a blank one before it: the number counts lines of the file.
    const std::string text = line_with("id", "\"before\"") + "\n\n" + f.line + "\n" + good_line + "\n";
    const auto parsed = engine::parse_workload(text, "some.jsonl");
    INFO(f.line.substr(0, 200));
    REQUIRE_FALSE(parsed);
    const engine::error& e = parsed.error();
    CHECK(e.kind == engine::failure::bad_input);
    CHECK(e.code == f.code);
    CHECK(e.field == f.field);
    if (f.value != nullptr) CHECK(e.value == f.value);
    CHECK(e.value.size() < 100);
    CHECK(e.file == "some.jsonl");
    CHECK(e.line == 3);
  }
}

TEST_CASE("an id occurs once, n and agent exclude each other, and a workload has a line") {
  const auto twice = engine::parse_workload(good_line + "\n" + good_line, "f");
  REQUIRE_FALSE(twice);
  CHECK(twice.error().code == "duplicate");
  CHECK(twice.error().field == "id");
  CHECK(twice.error().value == "a");
  CHECK(twice.error().line == 2);
  json both = json::parse(good_line);
  both["agent"] = {"x"};
  both["n"] = 2;
  const auto mixed = engine::parse_workload(both.dump(), "f");
  REQUIRE_FALSE(mixed);
  CHECK(mixed.error().field == "n");
  for (const char* nothing : {"", "\n", " \r\n\t\n"}) {
    const auto empty = engine::parse_workload(nothing, "f");
    REQUIRE_FALSE(empty);
    CHECK(empty.error().field == "requests");
  }
}

TEST_CASE("a workload line is read as it was written, with defaults for what is absent") {
  const auto lines = engine::parse_workload(small_workload(), "f");
  REQUIRE(lines);
  REQUIRE(lines->size() == 4);
  const engine::workload_line& one = (*lines)[0];
  CHECK(one.id == "one");
  CHECK(one.line == 1);
  CHECK(one.arrival == 0);
  CHECK(one.samples == 1);
  CHECK(one.how.temperature == 0);
  CHECK(one.how.seed == 0);
  CHECK(one.scope.shared);
  CHECK(one.agent.empty());
  const engine::workload_line& two = (*lines)[1];
  CHECK(two.turns.size() == 2);
  CHECK(two.turns[0].role == "system");
  CHECK(two.turns[1].content == "the");
  CHECK(two.samples == 3);
  CHECK(two.how.temperature == 1.5);
  CHECK(two.how.seed == 9);
  CHECK_FALSE(two.scope.shared);
  CHECK(two.scope.tenant == "x");
  CHECK((*lines)[2].line == 4);
  CHECK((*lines)[2].agent == std::vector<std::string>{"the", "a thing"});
  // A last line without a newline, and one from another system.
  CHECK(engine::parse_workload(good_line + "\r", "f"));
}

TEST_CASE("random damage to a workload gives lines or an error, nothing else") {
  engine::splitmix64 random(kvcache::test::test_seed("damaged workloads", 11));
  const std::string good = small_workload();
  int refused = 0;
  for (std::int64_t round = kvcache::test::effort(20000); round > 0; --round) {
    std::string text = good;
    for (int i = 1 + static_cast<int>(random.next() % 3); i > 0; --i) {
      const std::size_t at = random.next() % text.size();
      const auto kind = random.next() % 3;
      if (kind == 0) text[at] = static_cast<char>(random.next());
      if (kind == 1) text.erase(at, 1 + random.next() % 8);
      if (kind == 2) text.insert(at, 1, "{}[]\",:-0"[random.next() % 9]);
    }
    const auto parsed = engine::parse_workload(text, "f");
    if (parsed) continue;
    ++refused;
    CHECK(parsed.error().kind == engine::failure::bad_input);
    CHECK_FALSE(parsed.error().field.empty());
    CHECK(parsed.error().file == "f");
  }
  CHECK(refused > 0);
}

TEST_CASE("a conversation's next prompt is the chat form of the whole conversation") {
  const auto file = engine::gguf_file::from_bytes([]() -> const bytes& {
    static const bytes model = synthetic_model({}).serialise();
    return model;
  }());
  REQUIRE(file);
  const auto text = engine::tokenizer::load(*file);
  REQUIRE(text);
  const auto lines = engine::parse_workload(small_workload(), "f");
  REQUIRE(lines);
  const auto jobs = engine::tokenise(*lines, *text, 1024, "f");
  REQUIRE(jobs);
  const engine::job& agent = (*jobs)[2];
  REQUIRE(agent.follow_ups.size() == 2);
  std::vector<token_id> history = agent.prompt;
  const auto answer = text->encode("a and the", engine::specials::as_text);
  history.insert(history.end(), answer.begin(), answer.end());
  history.push_back(agent.end_of_turn);
  history.insert(history.end(), agent.follow_ups[0].begin(), agent.follow_ups[0].end());
  const auto whole = text->encode_chat(
      std::vector<engine::chat_message>{{"user", "and"}, {"assistant", "a and the"}, {"user", "the"}});
  REQUIRE(whole);
  CHECK(history == *whole);
}

TEST_CASE("a prompt longer than the context, and a conversation that may become so, are refused by name") {
  const scratch folder;
  synthetic_options small = tiny();
  small.context = 256;
  const std::string base =
      serve_program + " --json --model " + folder.file("m.gguf", synthetic_model(small).serialise());
  json line = json::parse(good_line);
  line["turns"][0]["content"] = std::string(300, 'x');
  const outcome prompt =
      run(base + " --requests " + folder.file("w", good_line + "\n" + line.dump().replace(7, 1, "b")));
  expect_error(prompt, 3, "turns.tokens", "");
  CHECK(prompt.document()["error"]["line"] == 2);
  CHECK(prompt.document()["error"]["file"] == folder.path + "/w");
  line = json::parse(good_line);
  line["turns"] = {{{"role", "system"}, {"content", "a"}}, {{"role", "user"}, {"content", "a"}}};
  line["agent"] = {"one", "two"};
  line["max_new"] = 110;
  expect_error(run(base + " --requests " + folder.file("v", line.dump())), 3, "agent.tokens", "");
}

TEST_CASE("engine_serve prints one document with every request and the totals") {
  const scratch folder;
  const std::string base =
      synthetic_base(folder) + " --json --requests " + folder.file("w", small_workload());
  const std::string model = "'" + folder.path + "/m.gguf'";
  for (const std::string_view kind : engine::cache_kind_names()) {
    INFO(kind);
    const outcome o = run(base + " --cache " + std::string(kind));
    CHECK(o.code == 0);
    const json d = o.document();
    CHECK(d["schema"] == "kvcache.engine_serve.v1");
    CHECK(d["block_tokens"] == 16);
    CHECK_FALSE(d.contains("answers_equal"));
    REQUIRE(d["runs"].size() == 1);
    const json& r = d["runs"][0];
    CHECK(r["cache"] == std::string(kind));
    REQUIRE(r["requests"].size() == 8);
    json sum = {{"asked", 0}, {"reused", 0}, {"prefilled", 0}, {"generated", 0}};
    for (const json& request : r["requests"]) {
      for (const char* key :
           {"id", "turn", "sample", "temperature", "seed", "prompt_ids", "ids", "text", "stop", "asked",
            "reused", "prefilled", "recomputed", "preempted", "fnv", "first_token_step", "finish_step"}) {
        CHECK(request.contains(key));
      }
      CHECK(request["asked"] == request["prompt_ids"].size());
      CHECK(request["fnv"].get<std::string>().size() == 16);
      sum["asked"] = sum["asked"].get<int>() + request["asked"].get<int>();
      sum["reused"] = sum["reused"].get<int>() + request["reused"].get<int>();
      sum["prefilled"] = sum["prefilled"].get<int>() + request["prefilled"].get<int>();
      sum["generated"] = sum["generated"].get<int>() + static_cast<int>(request["ids"].size());
      CHECK(request["temperature"] == (request["id"] == "two" ? 1.5 : 0.0));
      const std::string temperature = " --temperature " + request["temperature"].dump();
      if (kind != "reference") compare_with_generate(model, request, " --cache contiguous" + temperature);
    }
    const json& totals = r["totals"];
    for (const auto& [key, value] : sum.items()) CHECK(totals[key] == value);
    for (const char* key :
         {"recomputed", "steps", "peak_running", "peak_blocks", "peak_bytes_held", "peak_bytes_reserved",
          "pool_blocks", "pool_bytes", "waste_percent", "preemptions", "evictions", "copies", "seconds"}) {
      CHECK(totals[key].is_number());
    }
    CHECK(totals["peak_bytes_held"].get<std::int64_t>() > 0);
    CHECK(totals["peak_bytes_reserved"] >= totals["peak_bytes_held"]);
    CHECK(request_of(r, "none")["ids"].empty());
    CHECK(request_of(r, "none")["first_token_step"] == -1);
    CHECK(request_of(r, "two", 0, 2)["seed"] == 11);
  }
}

TEST_CASE("by default both kinds run in the same memory and their answers are compared") {
  const scratch folder;
  const std::string base = synthetic_base(folder) + " --requests " + folder.file("w", small_workload());
  for (const char* options : {"", " --batch 1", " --block 32 --chunk 3", " --kv f16 --eviction s3_fifo"}) {
    INFO(options);
    const outcome o = run(base + " --json" + options);
    CHECK(o.code == 0);
    const json d = o.document();
    REQUIRE(d["runs"].size() == 2);
    CHECK(d["answers_equal"] == true);
    CHECK(d["runs"][0]["cache"] == "contiguous");
    CHECK(d["runs"][1]["cache"] == "paged");
    CHECK(d["runs"][0]["totals"]["pool_bytes"] == d["runs"][1]["totals"]["pool_bytes"]);
    CHECK(d["runs"][0]["sequences"].get<int>() <= 3);
    for (std::size_t i = 0; i < 8; ++i) {
      CHECK(d["runs"][0]["requests"][i]["ids"] == d["runs"][1]["requests"][i]["ids"]);
      CHECK(d["runs"][0]["requests"][i]["fnv"] == d["runs"][1]["requests"][i]["fnv"]);
    }
  }
  const outcome table = run(base);
  CHECK(table.code == 0);
  for (const char* word :
       {"contiguous", "paged", "memory for keys and values", "found in the cache", "yes, all 8"})
    CHECK(table.out.find(word) != std::string::npos);
  const outcome progress = run("( " + base + " 2>&1 >/dev/null )");
  CHECK(progress.out.find("answers 8/8") != std::string::npos);
}

TEST_CASE("a pool that is too small ends with code 1, names the request, and keeps the other answers") {
  const scratch folder;
  const std::string lines =
      good_line + "\n" +
      R"({"id": "big", "turns": [{"role": "user", "content": "the thing"}], "max_new": 300, "scope": "shared"})";
  const std::string base = synthetic_base(folder) + " --ignore-eos --requests " + folder.file("w", lines);
  for (const char* kind : {"both", "contiguous"}) {  // there is no region for it
    const outcome o = run(base + " --json --blocks 10 --cache " + kind);
    expect_error(o, 1, "id", "big");
    CHECK(o.document()["error"]["code"] == "out_of_blocks");
    CHECK(o.document()["error"]["line"] == 2);
    CHECK(o.document()["error"]["file"] == folder.path + "/w");
  }
  const outcome o = run(base + " --json --blocks 10 --cache paged");
  expect_error(o, 1, "id", "big");
  const json d = o.document();
  CHECK(d["error"]["line"] == 2);
  CHECK(request_of(d["runs"][0], "a")["ids"].size() == 4);
  CHECK(request_of(d["runs"][0], "big")["stop"] == "out_of_blocks");
  const outcome text = run(base + " --blocks 10 --cache paged");
  CHECK(text.code == 1);
  CHECK(text.out.find("big") != std::string::npos);
}

TEST_CASE("engine_serve refuses wrong options and files with the right code") {
  const scratch folder;
  const std::string requests = " --requests " + folder.file("w", small_workload());
  const std::string base = synthetic_base(folder) + " --json";
  expect_error(run(base), 2, "arguments", "");
  expect_error(run(base + requests + " --blocks 0"), 2, "--blocks", "");
  expect_error(run(base + requests + " --batch 0"), 2, "--batch", "");
  expect_error(run(base + requests + " --cache nothing"), 2, "--cache", "");
  expect_error(run(base + requests + " --eviction random"), 2, "--eviction", "");
  expect_error(run(base + requests + " --chunk 0"), 2, "--chunk", "");
  expect_error(run(base + requests + " --block 12"), 2, "--block", "");
  expect_error(run(base + requests + " --block 0"), 2, "--block", "");
  expect_error(run(base + " --requests /nonexistent"), 3, "--requests", "");
  expect_error(run(base + " --requests " + folder.file("bad", std::string("{}\n"))), 3, "id", "absent");
  const outcome o = run(base + " --requests " + folder.file("bad2", good_line + "\n" + line_with("n", "0")));
  expect_error(o, 3, "n", "0");
  CHECK(o.document()["error"]["line"] == 2);
  CHECK(o.document()["error"]["file"] == folder.path + "/bad2");
  CHECK(run(serve_program + " --help").code == 0);
}

TEST_CASE("the real model gives the same answers paged, contiguous and alone", "[sample]") {
  const scratch folder;
  const std::string model = "'" + kvcache::test::model_path() + "'";
  const std::string notes =
      "You answer in one short sentence. The ferry leaves at nine and costs two crowns.";
  std::string lines;
  for (const char* question : {"When does the ferry leave?", "What does the ferry cost?"}) {
    const json system = {{"role", "system"}, {"content", notes}};
    const json user = {{"role", "user"}, {"content", question}};
    const json line = {{"id", question},
                       {"arrival", lines.empty() ? 0 : 2},
                       {"turns", {system, user}},
                       {"max_new", 6},
                       {"scope", "shared"}};
    lines += line.dump() + "\n";
  }
  const outcome o = run(serve_program + " --json --threads 2 --chunk 40 --model " + model + " --requests " +
                        folder.file("w", lines));
  CHECK(o.code == 0);
  const json d = o.document();
  CHECK(d["answers_equal"] == true);
  REQUIRE(d["runs"].size() == 2);
  CHECK(d["runs"][1]["totals"]["reused"].get<int>() >= 16);
  for (const json& request : d["runs"][1]["requests"])
    compare_with_generate(model, request, " --cache contiguous");
}

TEST_CASE("the workload that ships is what it is described as, and paging serves it in a small pool",
          "[model]") {
  const outcome o = run(serve_program + " --json --cache paged --threads 2 --model '" +
                        kvcache::test::model_path() + "' --requests '" + main_workload + "'");
  CHECK(o.code == 0);
  const json d = o.document();
  const json& r = d["runs"][0];
  const json& totals = r["totals"];
  CHECK(totals["preemptions"].get<int>() > 0);
  CHECK(totals["evictions"].get<int>() > 0);
  CHECK(totals["waste_percent"].get<double>() < 10);
  CHECK(totals["reused"].get<int>() > 3 * totals["prefilled"].get<int>());

  // 16 requests share a system prompt of 600 tokens.
  std::size_t common = 100000;
  const json& first = request_of(r, "museum-01")["prompt_ids"];
  int visitors = 0;
  for (const json& request : r["requests"]) {
    if (request["id"].get<std::string>().rfind("museum-", 0) != 0) continue;
    ++visitors;
    const json& prompt = request["prompt_ids"];
    std::size_t same = 0;
    while (same < std::min(prompt.size(), first.size()) && prompt[same] == first[same]) ++same;
    if (visitors > 1) common = std::min(common, same);
  }
  CHECK(visitors == 16);
  CHECK(common >= 600);
  CHECK(common < 640);

  // An agent of 20 steps resends its history: each prompt begins with the one before and its answer.
  for (int turn = 1; turn < 20; ++turn) {
    const json& before = request_of(r, "story-agent", turn - 1);
    const json& now = request_of(r, "story-agent", turn);
    std::vector<token_id> history = before["prompt_ids"];
    const std::vector<token_id> ids = before["ids"];
    history.insert(history.end(), ids.begin(), ids.end());
    const std::vector<token_id> prompt = now["prompt_ids"];
    REQUIRE(prompt.size() > history.size());
    CHECK(std::equal(history.begin(), history.end(), prompt.begin()));
  }

  // Four samples of one prompt: computed once. Two tenants with one prompt: nothing is shared between them.
  for (int sample = 1; sample < 4; ++sample) {
    const json& song = request_of(r, "ferry-song", 0, sample);
    CHECK(song["reused"] == song["asked"]);
    CHECK(song["ids"] != request_of(r, "ferry-song")["ids"]);
  }
  const json& prompt = request_of(r, "notes-north-1")["prompt_ids"];
  for (const char* tenant : {"north", "south"}) {
    const json& once = request_of(r, std::string("notes-") + tenant + "-1");
    const json& again = request_of(r, std::string("notes-") + tenant + "-2");
    CHECK(once["prompt_ids"] == prompt);
    CHECK(again["prompt_ids"] == prompt);
    CHECK(once["reused"] == 0);
    CHECK(again["reused"].get<int>() >= 240);
  }
}
