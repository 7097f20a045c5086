// SPDX-License-Identifier: Apache-2.0
// What is refused: command lines with 2, inputs with 3, each naming what is wrong.
#include <sys/stat.h>

#include <thread>

#include "program.hpp"

using namespace kvcache::test;

TEST_CASE("wrong command lines of replay end with 2 and name option and value") {
  const scratch folder;
  const std::string trace = std::string("'") + folder.file("small.jsonl", small_trace) + "'";
  const auto wrong = [&](const std::string& arguments, const char* field, const char* value) {
    check_error(trace + " " + arguments, 2, field, value);
  };
  wrong("--policy mru", "--policy", "mru");
  wrong("--policy lru,,fifo", "--policy", "lru,,fifo");
  wrong("--policy ''", "--policy", "empty");
  wrong("--policy lru,fifo,lru", "--policy", "lru");
  wrong("--policy s3_fifo:small=200", "--policy", "s3_fifo:small=200");
  wrong("--policy belady:1", "--policy", "belady:1");
  wrong("--capacity 0", "--capacity", "0");
  wrong("--capacity 0b", "--capacity", "0b");
  wrong("--capacity -5b", "--capacity", "-5b");
  wrong("--capacity 1.5b", "--capacity", "1.5b");
  wrong("--capacity 4611686018427387904b", "--capacity", "4611686018427387904b");
  wrong("--capacity 4X", "--capacity", "4X");
  wrong("--capacity nan", "--capacity", "nan");
  wrong("--capacity 15", "--capacity", "15");
  wrong("--capacity 4GiB", "--capacity", "4GiB");
  wrong("--capacity 4096B", "--capacity", "4096B");
  wrong("--capacity 4b,4b", "--capacity", "4b");
  wrong("--capacity 1b --workers 2", "--capacity", "1b");
  wrong("--model llama-3-8b --capacity 1kB", "--capacity", "1kB");
  wrong("--model lama --capacity 1GiB", "--model", "lama");
  wrong("--model llama-3-8b --kv int9", "--kv", "int9");
  wrong("--kv fp8", "--kv", "fp8");
  wrong("--policy ttl", "--ttl", "");
  wrong("--policy ttl --ttl nan", "--ttl", "nan");
  wrong("--policy ttl --ttl inf", "--ttl", "inf");
  wrong("--policy ttl --ttl -1", "--ttl", "-1");
  wrong("--policy ttl --ttl 2e9", "--ttl", "2e9");
  wrong("--policy ttl --ttl 2000000000", "--ttl", "2000000000");
  wrong("--policy ttl --ttl 60,60", "--ttl", "60");
  wrong("--policy lru --ttl 60", "--ttl", "60");
  wrong("--workers 0", "--workers", "0");
  wrong("--workers 4097", "--workers", "4097");
  wrong("--workers 2.5", "--workers", "2.5");
  wrong("--workers 2 --route random", "--seed", "");
  wrong("--workers 2 --route nearest", "--route", "nearest");
  wrong("--workers 2 --route random,random --seed 1", "--route", "random");
  wrong("--workers 2 --route random --seed -1", "--seed", "-1");
  wrong("--curve --sample 0", "--sample", "0");
  wrong("--curve --sample 1.5", "--sample", "1.5");
  wrong("--curve --sample nan", "--sample", "nan");
  wrong("--sample 0.5", "--sample", "0.5");
  wrong("--block 0", "--block", "0");
  wrong("--ids mine", "--ids", "mine");
  wrong("--session-gap -1", "--session-gap", "-1");
  wrong(trace, "FILE", "");
  wrong("--frobnicate", "arguments", "");
  check_error("", 2, "FILE", "");
}

TEST_CASE("policies may be called as in their papers") {
  const scratch folder;
  const std::string trace = std::string("'") + folder.file("small.jsonl", small_trace) + "' ";
  const json d = answer(trace + "--policy s3-fifo:small=20,uses=1,2q --capacity 8b --no-optimum");
  CHECK(d["results"][0]["policy"] == "s3_fifo:small=20,uses=1");
  CHECK(d["results"][1]["policy"] == "two_q");
  check_error(trace + "--policy 2q,two_q", 2, "--policy", "two_q");
}

TEST_CASE("help that cannot be printed ends with 1") {
  CHECK(run("--help >/dev/full 2>/dev/null; test $? = 1").code == 0);
  CHECK(run("--help").code == 0);
}

TEST_CASE("bad traces end with 3 and name the file") {
  const scratch folder;
  const auto refused = [&](const std::string& content, const char* field) {
    const std::string path = folder.file("input", content);
    check_error("'" + path + "' --capacity 8b", 3, field, "");
    const json e = run("'" + path + "' --capacity 8b --json").document()["error"];
    CHECK(e["file"] == path);
  };
  refused("", "file");
  refused("hello\n", "begin of file");
  refused(
      "{\"timestamp\": 0, \"input_length\": 16, \"hash_ids\": [1]}\n{\"timestamp\": -1, \"hash_ids\": [1]}\n",
      "timestamp");
  check_error("'" + folder.path + "'", 3, "file", "");
  check_error("/dev/null", 3, "file", "");
  check_error("/nonexistent/trace", 3, "file", "");
}

TEST_CASE("a trace of lengths only is refused with the reason") {
  check_error(published("azure_llm_2023_code.csv.zst"), 3, "hash_ids", "missing");
  const json e = run(published("azure_llm_2023_code.csv.zst") + " --json").document()["error"];
  CHECK(e["code"] == "lengths_only");
}

TEST_CASE("a pipe is a trace, and so is one request") {
  const scratch folder;
  const std::string pipe = folder.path + "/pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  std::thread writer([&] { std::ofstream(pipe) << small_trace; });
  const json d = answer("'" + pipe + "' --capacity inf");
  writer.join();
  CHECK(d["results"][0]["hit_blocks"] == 8);
  const std::string one = folder.file("one", R"({"timestamp": 0, "input_length": 16, "hash_ids": [1]})");
  for (const char* options : {"", " --capacity 1b --curve --policy lru,belady_bypass"}) {
    const json single = answer("'" + one + "'" + options);
    CHECK(single["results"][0]["hit_blocks"] == 0);
    CHECK(single["knee"]["hit_blocks"] == 0);
    CHECK(run("'" + one + "'" + options).code == 0);
  }
}

TEST_CASE("help of replay names every option") {
  const outcome o = run("--help");
  CHECK(o.code == 0);
  CHECK(o.err.empty());
  for (const char* option :
       {"--policy",      "--capacity",   "--ttl",  "--workers",  "--route",   "--seed",     "--curve",
        "--sample",      "--model",      "--kv",   "--block",    "--plot",    "--html",     "--ids",
        "--session-gap", "--no-optimum", "--json", "--progress", "Examples:", "Exit codes:"}) {
    INFO(option);
    CHECK(o.out.find(option) != std::string::npos);
  }
}

TEST_CASE("progress is told on stderr when asked for, and never on stdout") {
  const std::string arguments = published("mooncake_synthetic.jsonl.zst") + " --capacity 2048b --json";
  const outcome quiet = run(arguments), told = run(arguments + " --progress");
  CHECK(quiet.err.empty());
  CHECK(told.err.find("reading") != std::string::npos);
  CHECK(told.out == quiet.out);
}

TEST_CASE("a result that cannot be written is no success of replay") {
  const scratch folder;
  const std::string trace = folder.file("small.jsonl", small_trace);
  const int status = std::system(("'" KVCACHE_COMMAND "' replay '" + trace + "' >/dev/full 2>&1").c_str());
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 1);
}
