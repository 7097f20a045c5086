// SPDX-License-Identifier: Apache-2.0
// kvcache_lab as a user runs it: documents, exit codes, resuming. With a small synthetic model, except where
// tagged [sample].
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "program_runner.hpp"
#include "support/environment.hpp"
#include "synthetic_model.hpp"

using namespace engine::test;
using nlohmann::json;

namespace {

const std::string program = KVCACHE_LAB;

struct lab_folder : scratch {
  std::string model = file("m.gguf", synthetic_model({}).serialise());
  std::string text;

  lab_folder() {
    std::string prose;
    for (int i = 0; i < 40; ++i) prose += "the thing " + std::to_string(i * i) + " and another one; ";
    text = file("text", prose);
  }
  std::string cell(const std::string& rest) const {
    return program + " cell --json --model " + model + " --text-file " + text + " " + rest;
  }
  std::string read(const std::string& name) const {
    std::ifstream in(path + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
};

// Found by asking for more than there are.
int tokens_of(const lab_folder& folder, const std::string& file) {
  const json d = run(program + " cell --json --model " + folder.model +
                     " --task kl --prompt 900 --score 900 " + "--policy full --text-file " + file)
                     .document();
  return std::stoi(d["error"]["value"].get<std::string>());
}

double mean_of(const json& values) {
  double sum = 0;
  for (const json& v : values) sum += v.get<double>();
  return sum / static_cast<double>(values.size());
}

constexpr const char* window_kl = "--task kl --start 0 --prompt 64 --score 32 ";

}  // namespace

TEST_CASE("a cell of running text has every figure, its interval, and every setting") {
  const lab_folder folder;
  const outcome o = run(folder.cell(std::string(window_kl) + "--policy window:32"));
  INFO(o.out);
  CHECK(o.code == 0);
  const json d = o.document();
  CHECK(d["schema"] == "kvcache.lab.cell.v1");
  for (const char* key : {"kl_mean", "kl_p99", "kl_low", "kl_high", "top1", "top5", "nll", "nll_full",
                          "bytes_held", "bytes_full", "bits_per_value"}) {
    INFO(key);
    CHECK(d[key].is_number());
  }
  CHECK(d["kl_mean"] > 0);
  // 2 layers, 2 kv heads of 64, keys and values in f32: 2048 bytes a token.
  CHECK(d["bytes_full"] == 64 * 2048);
  CHECK(d["bytes_held"] == 32 * 2048);
  CHECK(d["bits_per_value"] == 32);
  CHECK(d["tokens_held"] == 32);
  CHECK(d["measurable"] == true);
  for (const char* key :
       {"model_fnv", "text_fnv", "kv", "block", "chunk", "mode", "task", "length", "start", "score", "simd"})
    CHECK(d["settings"].contains(key));
  CHECK(d["by_distance"][0]["rows"] == 16);
  CHECK(d["scores"][0]["kl"].size() == 32);
}

TEST_CASE("keeping everything changes no bit of any task") {
  const lab_folder folder;
  for (const std::string policy : {"full", "window:4000", "streaming_llm:sinks=4,window=4000,positions=text",
                                   "h2o:heavy=2000,recent=2000"}) {
    for (const std::string mode : {"oneshot", "stream"}) {
      INFO(policy << " " << mode);
      const json d =
          run(folder.cell(std::string(window_kl) + "--mode " + mode + " --policy " + policy)).document();
      CHECK(d["kl_mean"] == 0);
      CHECK(d["top1"] == 1);
      CHECK(d["top5"] == Approx(1));
      CHECK(d["nll"] == d["nll_full"]);
      CHECK(d["bytes_held"] == d["bytes_full"]);
    }
  }
}

TEST_CASE("a cell of a task counts trials and says when the model cannot solve it") {
  const lab_folder folder;
  for (const std::string question : {"inside", "after"}) {
    const json d = run(folder.cell("--task passkey --length 128 --trials 3 --question " + question +
                                   " --policy window:32"))
                       .document();
    CHECK(d["trials"] == 3);
    CHECK(d["correct"] == 0);  // a random model knows no keys
    CHECK(d["measurable"] == false);
    CHECK(d["gate"].get<std::string>().find("0 of 3") != std::string::npos);
    CHECK(d["settings"]["question"] == question);
    CHECK(d["scores"][0]["tokens"] == (question == "inside" ? 4 : 5));
    CHECK(d["scores"][0]["kl"].size() == d["scores"][0]["tokens"]);
  }
  const json repeat =
      run(folder.cell("--task repeat --length 64 --trials 2 --score 32 --controls --policy window:32"))
          .document();
  CHECK(repeat["trials"] == 2);
  CHECK(repeat["nll"].is_number());
  CHECK(repeat["rows"].size() == 5);
}

TEST_CASE("several texts are one text, and several windows of it are trials") {
  const lab_folder folder;
  const auto cell = [&](const std::string& files, const std::string& starts) {
    return run(program + " cell --json --model " + folder.model +
               " --task kl --prompt 64 --score 16 --policy " + "window:32 --text-file " + files +
               " --start " + starts)
        .document();
  };
  const json alone = cell(folder.text, "7");
  const std::string other = folder.file("other", std::string(600, 'x'));
  const json both = cell(other + "," + folder.text, "0," + std::to_string(7 + tokens_of(folder, other)));
  REQUIRE(both["scores"].size() == 2);
  CHECK(both["trials"] == 2);
  CHECK(both["scores"][1]["kl"] == alone["scores"][0]["kl"]);
  CHECK(both["kl_mean"] ==
        Approx((mean_of(both["scores"][0]["kl"]) + mean_of(alone["scores"][0]["kl"])) / 2));
  CHECK(both["settings"]["text_file"] == "other+text");
  CHECK(both["settings"]["start"].size() == 2);
  CHECK(both["settings"]["text_fnv"] != alone["settings"]["text_fnv"]);
  CHECK(alone["settings"]["start"] == 7);
}

TEST_CASE("no figure depends on which policies are beside it, though they share what they looked at") {
  const lab_folder folder;
  const std::string names[] = {"h2o:heavy=16,recent=16",
                               "h2o:heavy=8,recent=8",
                               "snapkv:capacity=32,window=8,kernel=1",
                               "snapkv:capacity=24,window=8,kernel=5",
                               "snapkv:capacity=24,window=4,kernel=5",
                               "tova:capacity=32",
                               "tova:capacity=16",
                               "scissorhands:capacity=32",
                               "scissorhands:capacity=64",
                               "far_rms:capacity=48,recent=8",
                               "far_rms:capacity=40,recent=8,budget=global",
                               "far_rms:capacity=40,recent=8,distance=16",
                               "moved_queries:capacity=48,recent=8",
                               "moved_queries:capacity=40,recent=8,budget=head",
                               "h2o:heavy=400,recent=400",
                               "moved_queries:capacity=40,recent=8,ahead=32"};
  std::string all;
  for (const std::string& name : names) all += " --policy " + name;
  const json together =
      run(program + " run --json --no-controls --out " + folder.path + "/out --model " + folder.model +
          " --text-file " + folder.text + " --task kl --start 0 --length 64" + " --score 32" + all)
          .document();
  std::size_t row = 2;  // behind full and none
  for (const std::string& name : names) {
    INFO(name);
    const json alone = run(folder.cell(std::string(window_kl) + "--policy " + name)).document();
    const json& beside = together["groups"][0]["rows"][row++];
    CHECK(beside["policy"] == alone["policy"]);
    CHECK(beside["kl"]["value"] == alone["kl_mean"]);
    CHECK(beside["nll"]["value"] == alone["nll"]);
    CHECK(beside["bytes_held"] == alone["bytes_held"]);
    CHECK(alone["kl_mean"].get<double>() >= (alone["bytes_held"] == alone["bytes_full"] ? 0 : 1e-9));
  }
  CHECK(together["groups"][0]["rows"].size() == row);
}

TEST_CASE("no figure depends on threads") {
  const lab_folder folder;
  const std::string base = std::string(window_kl) + "--policy h2o:heavy=16,recent=16 --threads ";
  CHECK(run(folder.cell(base + "1")).document() == run(folder.cell(base + "2")).document());
}

TEST_CASE("no figure depends on the batch") {
  const lab_folder folder;
  for (const std::string mode : {"oneshot", "stream"}) {
    const std::string base =
        std::string(window_kl) + "--policy h2o:heavy=16,recent=16 --mode " + mode + " --batch ";
    const json alone = run(folder.cell(base + "1")).document();
    const json among_others = run(folder.cell(base + "3")).document();
    CHECK(among_others["settings"]["batch"] == 3);
    CHECK(among_others["scores"] == alone["scores"]);
  }
}

TEST_CASE("a user's file is a task") {
  const lab_folder folder;
  const std::string own = folder.file("own", std::string("{\"prompt\": \"one two\", \"answer\": \" three\"}\n"
                                                         "{\"prompt\": \"a b\", \"options\": [\"c\", \"d\"], "
                                                         "\"right\": 0}\n"));
  const json d = run(folder.cell("--task user --policy full --user-file " + own)).document();
  CHECK(d["trials"] == 2);
  CHECK(d["settings"]["user_fnv"].get<std::string>().size() == 16);
  const std::string bad = folder.file("bad", std::string("{\"prompt\": \"one two\"}\n"));
  const outcome o = run(folder.cell("--task user --policy full --user-file " + bad));
  expect_error(o, 3, "answer", "");
  CHECK(o.document()["error"]["line"] == 1);
  CHECK(o.document()["error"]["file"] == folder.path + "/bad");
}

TEST_CASE("wrong policies and options end with code 2 and name the key and what is allowed") {
  const lab_folder folder;
  const auto refuse = [&](const std::string& policy, const std::string& field, const std::string& allowed) {
    INFO(policy);
    const outcome o = run(folder.cell(std::string(window_kl) + "--policy '" + policy + "'"));
    expect_error(o, 2, field, "");
    CHECK(o.document()["error"]["value"].get<std::string>().find(allowed) != std::string::npos);
  };
  refuse("nothing:3", "policy", "streaming_llm");
  refuse("h2o:heavy=64,resent=64", "resent", "recent");
  refuse("h2o:heavy=x,recent=64", "heavy", "whole number");
  refuse("snapkv:capacity=64,window=32,kernel=2", "kernel", "odd");
  refuse("window", "window", "");
  expect_error(run(folder.cell("--task nothing --policy full")), 2, "--task", "");
  expect_error(run(folder.cell("--task user --policy full")), 2, "--user-file", "");
  expect_error(run(folder.cell("--task kl --policy full --mode sometimes")), 2, "--mode", "");
  expect_error(run(program + " cell --json --model x --task kl --policy full"), 2, "--text-file", "");
  expect_error(run(program + " nothing --json"), 2, "arguments", "");
  expect_error(run(program + " --json"), 2, "verb", "");
  expect_error(run(folder.cell("--task kl --policy full --prompt 100000")), 2, "--prompt", "");
  expect_error(run(folder.cell("--task kl --policy full --start 0 --prompt 900 --score 900")), 3,
               "text.tokens", "");
}

TEST_CASE("a context shorter than asked about is warned of") {
  const lab_folder folder;
  const json quiet = run(folder.cell(std::string(window_kl) + "--policy full --about 64")).document();
  CHECK(quiet["warnings"].empty());
  const json d = run(folder.cell(std::string(window_kl) + "--policy full --about 4096")).document();
  REQUIRE(d["warnings"].size() == 1);
  CHECK(d["warnings"][0].get<std::string>().find("4096") != std::string::npos);
}

TEST_CASE("cells whose settings differ are not compared, and the setting is named") {
  const lab_folder folder;
  const auto save = [&](const std::string& name, const std::string& rest) {
    return folder.file(name, run(folder.cell("--task passkey --length 128 " + rest)).out);
  };
  const std::string a = save("a", "--trials 3 --policy window:32");
  const std::string b = save("b", "--trials 3 --policy window:64");
  const std::string fewer = save("fewer", "--trials 2 --policy window:64");
  const std::string stream = save("stream", "--trials 3 --policy window:64 --mode stream");
  const std::string half = save("half", "--trials 3 --policy window:64 --kv f16");
  const auto compare = [&](const std::string& x, const std::string& y) {
    return run(program + " compare --json --a " + x + " --b " + y);
  };
  const outcome same = compare(a, b);
  CHECK(same.code == 0);
  CHECK(same.document()["verdict"] == "too few trials");
  expect_error(compare(a, fewer), 3, "trials", "3 and 2");
  expect_error(compare(b, stream), 3, "mode", "\"oneshot\" and \"stream\"");
  expect_error(compare(b, half), 3, "kv", "\"f32\" and \"f16\"");
  expect_error(compare(a, folder.file("other", std::string("{}"))), 3, "schema", "");
  expect_error(compare(a, folder.file("no", std::string("x"))), 3, "file", "");
}

TEST_CASE("a run that was stopped goes on where it was and reports the same") {
  const lab_folder folder;
  const std::string rest = " --json --model " + folder.model + " --text-file " + folder.text +
                           " --task passkey,kl --length 64 --trials 2 --score 16 --policy window:32 --policy "
                           "h2o:heavy=16,recent=16 ";
  const outcome whole = run(program + " run --out " + folder.path + "/one" + rest);
  INFO(whole.out);
  REQUIRE(whole.code == 0);
  const std::string results = folder.read("one/results.jsonl");
  const auto lines = static_cast<int>(std::count(results.begin(), results.end(), '\n'));
  // Tasks, trials, full and none, policies with a window and three lots each.
  CHECK(lines == 2 * 2 * (2 + 2 * (1 + 1 + 3)));
  CHECK(folder.read("one/report.svg").rfind("<svg", 0) == 0);
  const json reported = whole.document();
  for (const json& row : reported["groups"][0]["rows"]) {
    const int draws = row["control"] == "random" ? 3 : 1;
    CHECK(row["draws"] == draws);
    CHECK(row["trials"] == 2 * draws);
  }
  CHECK(folder.read("one/report.md").find("random, equal bytes, 3 lots") != std::string::npos);
  CHECK(folder.read("one/report.md").find("| `window:window=32` | 50.0 % |") != std::string::npos);
  // Stopped in the middle of a line.
  std::filesystem::create_directory(folder.path + "/two");
  std::size_t cut = 0;
  for (int i = 0; i < 11; ++i) cut = results.find('\n', cut) + 1;
  std::ofstream(folder.path + "/two/results.jsonl", std::ios::binary) << results.substr(0, cut + 40);
  const outcome rested = run(program + " run --out " + folder.path + "/two" + rest);
  CHECK(rested.code == 0);
  CHECK(rested.out == whole.out);
  CHECK(folder.read("two/report.md") == folder.read("one/report.md"));
  CHECK(std::filesystem::file_size(folder.path + "/two/results.jsonl") == results.size());
  // Nothing is left to do: the file does not grow. Another setting is another result.
  CHECK(run(program + " run --out " + folder.path + "/two" + rest).out == whole.out);
  CHECK(folder.read("two/results.jsonl").size() == results.size());
  CHECK(run(program + " run --out " + folder.path + "/two --seed 1" + rest).code == 0);
  CHECK(folder.read("two/results.jsonl").size() > results.size());
}

TEST_CASE("a damaged results file is named with its line") {
  const lab_folder folder;
  std::filesystem::create_directory(folder.path + "/out");
  folder.file("out/results.jsonl", std::string("{}\n"));
  const outcome o = run(program + " run --json --out " + folder.path + "/out --model " + folder.model +
                        " --task passkey --length 64 --trials 1 --policy full");
  expect_error(o, 3, "results", "not a result");
  CHECK(o.document()["error"]["line"] == 1);
}

TEST_CASE("the constructed model needs no file, and says what is wrong with its options") {
  const std::string base = program + " recall --json --length 256 --asked 32 ";
  const outcome o = run(base + "--policy window:64 --policy h2o:heavy=32,recent=32");
  CHECK(o.code == 0);
  const json d = o.document();
  CHECK(d["schema"] == "kvcache.lab.recall.v1");
  CHECK(d["settings"]["length"] == 256);
  // full, window, its controls (three of random), h2o, whose controls are the same.
  REQUIRE(d["rows"].size() == 1 + 1 + 1 + 3 + 1 + 1);
  for (const json& row : d["rows"]) {
    INFO(row.dump());
    CHECK(row["right"] == row["held"]);
    CHECK(row["differs"] == 0);
  }
  CHECK(d["rows"][0]["right"] == 32);
  CHECK(d["rows"][1]["right"] == 8);
  CHECK(d["rows"][1]["bytes_held"] == 64 * 512);
  expect_error(run(base + "--policy window:0"), 2, "window", "");
  expect_error(run(program + " recall --json --length 16 --asked 17"), 2, "--asked", "");
  expect_error(run(program + " recall --json --length 40000"), 2, "--length", "");
}

TEST_CASE("the tasks are listed") {
  const json d = run(program + " tasks --json").document();
  CHECK(d["tasks"][0]["name"] == "passkey");
  CHECK(d["tasks"].size() >= 15);
}

// Independent reference, first 1,024 tokens of the text: 4 sinks + recent at 20 %, KL 0.1035; window alone
// 0.805; H2O 0.0511; full NLL 3.147. Here a smaller window, so that it is quick: only the order is asked for.
TEST_CASE("on the real model sinks are worth more than anything else", "[sample]") {
  const std::string base = program + " cell --json --threads 2 --model '" + kvcache::test::model_path() +
                           "' --task kl --start 0 --prompt 96 --score 32 --text-file '" +
                           kvcache::test::data_path("text.txt") + "' --policy ";
  const json sinks = run(base + "streaming_llm:sinks=4,window=44,positions=text --controls").document();
  CHECK(sinks["bytes_held"] == 48 * 46080);
  CHECK(sinks["kl_mean"] > 0);
  const json& window = sinks["rows"][3];
  REQUIRE(window["control"] == "window");
  CHECK(window["bytes_held"] == sinks["bytes_held"]);
  CHECK(window["kl"]["value"] > 3 * sinks["kl_mean"].get<double>());
  CHECK(sinks["rows"][2]["against_window"]["verdict"] == "better");
}
