// SPDX-License-Identifier: Apache-2.0
// The example programs as a user runs them, on a small synthetic model: what they report, and that their
// claims can fail.
#include <catch2/catch.hpp>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "engine/program_runner.hpp"
#include "example.hpp"
#include "plot.hpp"
#include "support/environment.hpp"
#include "synthetic_model.hpp"

using namespace engine::test;
using nlohmann::json;

namespace {

// Bytes are tokens in this model, so its prompts are some four times as long as those of a real one.
std::string model_file(const scratch& folder) {
  synthetic_options options;
  options.context = 8192;
  return folder.file("m.gguf", synthetic_model(options).serialise());
}

std::string command(const std::string& program, const std::string& arguments) {
  return std::string(EXAMPLES_FOLDER) + "/" + program + " " + arguments;
}

struct example {
  const char* program;
  const char* arguments;
};

std::string last_line(const std::string& text) {
  REQUIRE(!text.empty());
  REQUIRE(text.back() == '\n');
  const std::size_t begin = text.rfind('\n', text.size() - 2);
  return text.substr(begin == std::string::npos ? 0 : begin + 1, text.size() - 1 - (begin + 1));
}

// Under a sanitizer a program takes a second or more: there each runs once, for its document.
bool brief() {
  return kvcache::test::effort(100) < 100;
}

// A claim that does not hold: code 1, the claim is named, and no result is stated.
void expect_failed_claim(const std::string& program, const std::string& arguments, const std::string& part) {
  INFO(program << " " << arguments);
  const outcome o = run(command(program, arguments + " --json"));
  CHECK(o.code == 1);
  const json d = o.document();
  CHECK(d["schema"] == "kvcache.error.v1");
  CHECK(d["error"]["code"] == "claim_fails");
  CHECK(d["result"].is_null());
  bool named = false;
  for (const json& c : d["claims"]) {
    named =
        named || (!c["holds"].get<bool>() && c["claim"].get<std::string>().find(part) != std::string::npos);
  }
  CHECK(named);
  if (brief()) return;
  const outcome text = run(command(program, arguments));
  CHECK(text.code == 1);
  CHECK(last_line(text.out).rfind(program + ": FAILED, ", 0) == 0);
}

}  // namespace

TEST_CASE("an example reports figures, claims and a result, as a document and as text") {
  const scratch folder;
  const std::string model = " --model " + model_file(folder);
  const example all[] = {
      {"prefix_sharing", "--requests 3 --new 3"},
      {"parallel_sampling", "--samples 3 --new 6 --temperature 4"},
      {"beam_search", "--width 3 --depth 6 --small-vocabulary 2"},
      {"agent_loop", "--steps 6 --new 3 --without 2"},
      {"tenants", "--rounds 1"},
      {"block_sizes", ""},
      {"eviction_policies", ""},
  };
  for (const example& e : all) {
    const std::string name = e.program;
    INFO(name);
    const std::string arguments = e.arguments + (*e.arguments == 0 ? std::string() : model);
    const outcome o = run(command(name, arguments + " --json"));
    CHECK(o.code == 0);
    const json d = o.document();
    CHECK(d["schema"] == "kvcache.example." + name + ".v1");
    CHECK(d["claims"].size() >= 3);
    for (const json& c : d["claims"]) {
      INFO(c.dump());
      CHECK(c["holds"] == true);
    }
    CHECK(d["result"].get<std::string>().find_first_of("0123456789") != std::string::npos);
    if (brief() && name != "tenants") continue;
    const outcome text = run(command(name, arguments));
    CHECK(text.code == 0);
    CHECK(last_line(text.out).rfind(name + ": ", 0) == 0);
  }
}

TEST_CASE("speculation equals plain decoding also where a guess is hardly ever right") {
  const scratch folder;
  const json d =
      run(command("speculative", "--json --new 12 --match 2 --draft 5 --model " + model_file(folder)))
          .document();
  REQUIRE(d["claims"].size() == 7);
  int equal = 0;
  for (const json& c : d["claims"]) {
    const std::string what = c["claim"].get<std::string>();
    if (what.find("steps are saved") != std::string::npos) continue;  // that depends on the model
    INFO(what);
    CHECK(c["holds"] == true);
    ++equal;
  }
  CHECK(equal == 6);
  CHECK(d["copy"]["ids"].size() == 12);
}

TEST_CASE(
    "what the library finds behind another prefix is right, whatever a careless reuse does to the model") {
  const scratch folder;
  const json d = run(command("rope_offset", "--json --offset 32 --model " + model_file(folder))).document();
  REQUIRE(d["claims"].size() == 7);
  for (const std::size_t i : {0, 3, 4, 5, 6}) CHECK(d["claims"][i]["holds"] == true);
  REQUIRE(d["cases"].size() == 4);
  CHECK(d["cases"][0]["largest_logit_difference"] == 0.0);
  for (const std::size_t i : {1, 2, 3}) CHECK(d["cases"][i]["largest_logit_difference"].get<double>() > 0);
}

TEST_CASE("the examples of policies keep what they say in as much memory as they say, on any model") {
  const scratch folder;
  const std::string model = " --json --model " + model_file(folder);
  const std::string text = model + " --text-file " + kvcache::test::data_path("text.txt");
  // What the model knows is not this model's business, what the cache does is.
  struct run_of {
    const char* program;
    std::string arguments;
    std::vector<std::size_t> holds;  // claims that do not depend on the model
    std::size_t claims;
  };
  const run_of all[] = {{"streaming_llm",
                         "--tokens 400 --read 160 --policy streaming_llm:sinks=4,window=60" + text,
                         {0, 2, 3},
                         6},
                        {"h2o", "--tokens 200 --policy h2o:heavy=20,recent=12" + text, {0, 1, 2}, 6},
                        {"snapkv", "--trials 1 --sentences 12" + model, {3, 4, 5, 6}, 7},
                        {"far_rms", "--prompt 400 --score 20 --trials 1" + text, {0, 1}, 8},
                        {"own_policy", "--trials 1" + model, {0, 1, 2, 4, 5}, 7},
                        {"quantized_kv",
                         "--prompt 200 --score 8 --new 8 --mib 64" + text,
                         {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13},
                         17},
                        {"h2o_quantized", "--prompt 1024 --score 8" + text, {0, 1, 4, 5}, 6}};
  for (const run_of& e : all) {
    INFO(e.program);
    const json d = run(command(e.program, e.arguments)).document();
    REQUIRE(d["claims"].size() == e.claims);
    for (const std::size_t i : e.holds) {
      INFO(d["claims"][i].dump());
      CHECK(d["claims"][i]["holds"] == true);
    }
  }
}

TEST_CASE("an example whose claim does not hold says so and ends with code 1") {
  const scratch folder;
  const std::string model = " --model " + model_file(folder);
  expect_failed_claim("prefix_sharing", "--requests 1 --new 1" + model, "something to share");
  expect_failed_claim("prefix_sharing", "--requests 2 --new 1 --cache contiguous" + model,
                      "finds the whole system");
  expect_failed_claim("parallel_sampling", "--samples 2 --new 2 --temperature 0" + model, "not all the same");
  expect_failed_claim("beam_search", "--width 2 --depth 1 --small-vocabulary 2 --small-depth 1" + model,
                      "beams were reassigned");
  expect_failed_claim("speculative", "--draft 0 --new 3" + model, "steps are saved");
  expect_failed_claim("agent_loop", "--steps 4 --new 1 --without 1 --cache contiguous" + model,
                      "what is new");
  expect_failed_claim("tenants", "--rounds 1 --share" + model, "by nobody else");
  expect_failed_claim("tenants", "--rounds 1 --cache contiguous" + model, "by the tenant who sent it");
  expect_failed_claim("rope_offset", "--offset 0" + model, "at another offset");
  expect_failed_claim("block_sizes", "--region 16384", "20 to 40 %");
  expect_failed_claim("eviction_policies", "--blocks 20000", "a priority keeps more");
  const std::string text = model + " --text-file " + kvcache::test::data_path("text.txt");
  expect_failed_claim("streaming_llm", "--tokens 200 --read 64 --policy full" + text, "no byte more");
  expect_failed_claim("streaming_llm", "--tokens 200 --read 64 --policy window:32" + text, "first token");
  expect_failed_claim("h2o", "--tokens 128 --policy window:32" + text, "heads differ");
  expect_failed_claim("h2o", "--tokens 128 --policy tova:32" + text, "without a gap");
  expect_failed_claim("snapkv", "--trials 1 --sentences 8 --policy full" + model, "gives the blocks back");
  expect_failed_claim("far_rms", "--prompt 200 --score 4 --trials 1" + text, "knows the key");
  expect_failed_claim("own_policy", "--trials 1 --policy full" + model, "drops the sentences");
  expect_failed_claim("quantized_kv", "--prompt 70 --score 2 --new 4 --mib 64 --formats kv8 kv8 kv8" + text,
                      "nearly twice as many");
  expect_failed_claim("h2o_quantized", "--prompt 512 --score 2 --format kv8" + text, "a seventh");
}

TEST_CASE("an example ends with code 2 for a wrong option and with 1 for a cache that cannot do it") {
  const scratch folder;
  const std::string model = " --json --model " + model_file(folder);
  const example wrong[] = {
      {"prefix_sharing", "--requests 0"}, {"parallel_sampling", "--samples 0"},
      {"beam_search", "--width 1"},       {"speculative", "--match 1"},
      {"agent_loop", "--steps 3"},        {"tenants", "--rounds 0"},
      {"rope_offset", "--offset 20"},     {"streaming_llm", "--tokens 1"},
      {"h2o", "--policy h2o:recent=0"},   {"snapkv", "--policy snapkv:capacity=8,kernel=2"},
      {"far_rms", "--policy none"},       {"own_policy", "--trials 0"},
      {"quantized_kv", "--prompt 1"},     {"h2o_quantized", "--score 1"}};
  for (const example& e : wrong) {
    INFO(e.program);
    const std::string option = std::string(e.arguments).substr(0, std::string(e.arguments).find(' '));
    expect_error(run(command(e.program, e.arguments + model)), 2, option, "");
    expect_error(run(command(e.program, "--nothing 1" + model)), 2, "arguments", "");
    CHECK(run(command(e.program, "--help")).code == 0);
  }
  expect_error(run(command("block_sizes", "--json --batch 0")), 2, "--batch", "");
  CHECK(run(command("block_sizes", "--json --region 1024")).document()["error"]["code"] == "too_long");
  expect_error(run(command("rope_offset", "--block 4096 --offset 0" + model)), 2, "--block", "");
  expect_error(run(command("parallel_sampling", "--cache contiguous" + model)), 1, "contiguous", "");
  expect_error(run(command("beam_search", "--cache contiguous" + model)), 1, "contiguous", "");
  expect_error(run(command("speculative", "--cache reference" + model)), 1, "draft", "reference");
  expect_error(run(command("snapkv", "--cache paged" + model)), 2, "arguments", "");  // a session is paged
  const outcome unknown = run(command("h2o", "--json --policy h20 --text-file x --model x"));
  CHECK(unknown.document()["error"]["value"].get<std::string>().find("allowed: full, window") !=
        std::string::npos);
  expect_error(run(command("h2o", "--text-file /nonexistent" + model)), 3, "--text-file", "");
  const std::string brief = folder.file("brief.txt", std::string("brief"));
  expect_error(run(command("h2o", "--text-file " + brief + model)), 3, "--text-file", "5 tokens");
}

TEST_CASE("the model of an example may come from the environment") {
  const scratch folder;
  const std::string plain = command("tenants", "--json --rounds 1");
  CHECK(run("env KVCACHE_MODEL=" + model_file(folder) + " " + plain).code == 0);
  expect_error(run("env -u KVCACHE_MODEL " + plain), 2, "arguments", "--model is required");
  expect_error(run("env KVCACHE_MODEL=/nonexistent " + plain), 3, "model", "No such file or directory");
}

TEST_CASE("agent_loop writes a plot with a point for every step of both lines") {
  const scratch folder;
  const std::string base =
      command("agent_loop", "--steps 5 --new 1 --without 1 --json --model " + model_file(folder));
  CHECK(run(base + " --plot '" + folder.path + "/plot.svg'").code == 0);
  std::ifstream in(folder.path + "/plot.svg");
  const std::string svg(std::istreambuf_iterator<char>(in), {});
  CHECK(svg.rfind("<svg ", 0) == 0);
  std::size_t points = 0;
  for (std::size_t at = svg.find("<circle"); at != std::string::npos; at = svg.find("<circle", at + 1))
    ++points;
  CHECK(points == 10);
  for (const char* text : {">step<", ">without reuse<", ">with reuse<"})
    CHECK(svg.find(text) != std::string::npos);
  expect_error(run(base + " --plot /nonexistent/plot.svg"), 3, "--plot", "/nonexistent/plot.svg");
}

TEST_CASE("a plot has round ticks, escaped text, and every point inside its axes") {
  const engine::plot_line lines[] = {{"a < b & c", "#000000", {1, 70, 7}, {true, false, false}}};
  const std::string svg = engine::svg_plot({"t", "x", "y", ""}, lines);
  CHECK(svg.find(">a &lt; b &amp; c<") != std::string::npos);
  for (const char* tick : {">0<", ">20<", ">80<", ">3<"}) CHECK(svg.find(tick) != std::string::npos);
  CHECK(svg.find(">100<") == std::string::npos);
  CHECK(svg.find("fill=\"#ffffff\"/>\n<circle") != std::string::npos);  // the ring
  CHECK_FALSE(engine::svg_plot({"t", "x", "y", ""}, std::vector<engine::plot_line>{{"none", "#000", {0}, {}}})
                  .empty());
}

TEST_CASE("numbers in an example's text: thousands, medians, one line of UTF-8") {
  CHECK(engine::thousands(0) == "0");
  CHECK(engine::thousands(999) == "999");
  CHECK(engine::thousands(1000) == "1,000");
  CHECK(engine::thousands(-1234567) == "-1,234,567");
  CHECK(engine::thousands(-123) == "-123");
  CHECK(engine::median({3, 1, 2}) == 2);
  CHECK(engine::median({4, 1, 3, 2}) == 2);
  CHECK(engine::one_line("a\nb\tc") == "a b c");
  CHECK(engine::one_line("aaaa\xC3\xA4zz", 5) == "aaaa...");
  CHECK(engine::one_line("aaaa\xC3\xA4zz", 6) == "aaaa\xC3\xA4...");
}

TEST_CASE("two recorded answers differ when a token or a bit of a logit differs") {
  engine::recorded a;
  a.made.ids = {1, 2};
  a.bits = 7;
  engine::recorded b = a;
  CHECK(a.same_answer(b));
  b.bits = 8;
  CHECK_FALSE(a.same_answer(b));
  b = a;
  b.made.ids[1] = 3;
  CHECK_FALSE(a.same_answer(b));
}
