// SPDX-License-Identifier: Apache-2.0
// The command as a user runs it: documents, text, errors, exit codes.
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.hpp"
#include "support/environment.hpp"

using namespace kvcache::test;

namespace {

outcome run(const std::string& arguments) {
  return run_command(arguments);
}

// Under --json the error is the document; without, one line on stderr. Never any part of a result.
void check_error(const std::string& arguments, int code, const std::string& field, const std::string& value) {
  INFO(arguments);
  const outcome as_json = run(arguments + " --json");
  CHECK(as_json.code == code);
  CHECK(as_json.err.empty());
  const json document = as_json.document();
  CHECK(document["schema"] == "kvcache.error.v1");
  CHECK(document["error"]["field"] == field);
  if (!value.empty()) CHECK(document["error"]["value"] == value);
  for (const char* key : {"code", "field", "value", "file", "line"}) CHECK(document["error"].contains(key));
  const outcome as_text = run(arguments);
  CHECK(as_text.code == code);
  CHECK(as_text.out.empty());
  CHECK(as_text.err.rfind("error: ", 0) == 0);
  CHECK(std::count(as_text.err.begin(), as_text.err.end(), '\n') == 1);
}

}  // namespace

TEST_CASE("documents are as they were") {
  const auto same = [](const char* arguments, const char* file) {
    INFO(arguments);
    const outcome o = run(std::string(arguments) + " --json");
    CHECK(o.code == 0);
    CHECK(o.err.empty());
    const json wanted = json::parse(read_file(KVCACHE_EXPECTED "/" + std::string(file)));
    const json got = o.document();
    CHECK(got == wanted);
    if (got != wanted) UNSCOPED_INFO(json::diff(wanted, got).dump(1));
  };
  same("plan --model llama-2-70b --context 4k --batch 32 --memory 320GB --bandwidth 3.35TB/s",
       "llama-2-70b.json");
  same("plan --model gpt-oss-20b --context 32k --batch 8 --kv kv4 --weights-bits 4 --memory 24GB",
       "gpt-oss-20b.json");
  same("plan --shape layers=2,latent=512,rope=64 --context 100", "latent.json");
}

TEST_CASE("what a program asks for is there") {
  const json d = run("plan --model llama-3-8b --context 8k --batch 32 --memory 80GiB --json").document();
  CHECK(d["schema"] == "kvcache.plan.v1");
  CHECK(d["bytes_per_token"] == 131072);
  CHECK(d["values_per_token_layer"] == 2048);
  CHECK(d["kv_bytes"] == 34359738368);
  CHECK(d["weight_bytes"] == 16060522496);
  CHECK(d["blocks"] == 33301);
  CHECK(d["max_batch"] == 65);
  CHECK(d["max_context"] == 16640);
  CHECK(d["kv_over_weights"].get<double>() == Approx(2.1394).margin(1e-4));
  CHECK(d["regime"] == "cache_dominated");
  CHECK(d["layers"].size() == 32);
  CHECK(d["levers"].size() == 8);
  for (const json& l : d["levers"]) CHECK((l.contains("name") && l["step_time_factor"].is_number()));
  // Without a memory the blocks are those that the batch needs.
  CHECK(run("plan --model llama-3-8b --context 8k --batch 32 --json").document()["blocks"] == 16384);
}

TEST_CASE("the same model by name, by configuration and by shape is the same plan") {
  const scratch folder;
  const std::string config = folder.file(
      "config.json", R"({"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
                         "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336,
                         "vocab_size": 128256, "max_position_embeddings": 8192})");
  const std::string rest = " --context 5000 --batch 3 --memory 24GB --kv k8v4 --json";
  json by_name = run("plan --model 'Llama 3 8B'" + rest).document();
  json by_config = run("plan --config '" + config + "'" + rest).document();
  json by_shape =
      run("plan --parameters 8030261248 --shape layers=32,kv_heads=8,q_heads=32,head_dim=128" + rest)
          .document();
  for (json* d : {&by_name, &by_config, &by_shape}) d->erase("model");
  CHECK(by_name == by_config);
  CHECK(by_name == by_shape);
}

TEST_CASE("people get text, and the page of the documents has it as it is") {
  const outcome o =
      run("plan --model llama-3-8b --context 8k --batch 32 --memory 80GiB --bandwidth 3.35TB/s");
  CHECK(o.code == 0);
  CHECK(o.err.empty());
  CHECK(read_file(KVCACHE_DOCS "/plan.md").find(o.out) != std::string::npos);
  const outcome none = run("plan --model llama-3-70b --memory 80GiB");
  CHECK(none.code == 0);
  CHECK(none.out.find("DOES NOT FIT") != std::string::npos);
}

TEST_CASE("the catalogue is listed") {
  const json d = run("plan --list --json").document();
  CHECK(d["schema"] == "kvcache.models.v1");
  CHECK(d["models"].size() >= 60);
  const outcome text = run("plan --list");
  CHECK(text.code == 0);
  for (const json& m : d["models"]) CHECK(text.out.find(m["name"].get<std::string>()) != std::string::npos);
}

TEST_CASE("help and version are answers") {
  for (const char* arguments : {"--help", "plan --help", "--version"}) {
    const outcome o = run(arguments);
    CHECK(o.code == 0);
    CHECK(o.err.empty());
    CHECK(!o.out.empty());
  }
  CHECK(run("--version").out.rfind("kvcache 0.", 0) == 0);
  CHECK(run("plan --help").out.find("Examples:") != std::string::npos);
}

TEST_CASE("wrong command lines end with 2 and name option and value") {
  check_error("plan", 2, "model", "");
  check_error("plan --model llama-3-8b --shape layers=1,kv_heads=1,head_dim=64", 2, "model",
              "--model --shape");
  check_error("plan --model lama-3-8b", 2, "--model", "lama-3-8b");
  check_error("plan --model ''", 2, "--model", "empty");
  check_error("plan --model llama-3-8b --memory 80G", 2, "--memory", "80G");
  check_error("plan --model llama-3-8b --memory ''", 2, "--memory", "empty");
  check_error("plan --model llama-3-8b --bandwidth 3TB", 2, "--bandwidth", "3TB");
  check_error("plan --model llama-3-8b --context 0", 2, "--context", "0");
  check_error("plan --model llama-3-8b --context 512M", 2, "--context", "512M");
  check_error("plan --model llama-3-8b --batch 1.5", 2, "--batch", "1.5");
  check_error("plan --model llama-3-8b --batch -1", 2, "--batch", "-1");
  for (const char* bits : {"5", "0", "-4", "x"})
    check_error(std::string("plan --model llama-3-8b --weights-bits ") + bits, 2, "--weights-bits", bits);
  check_error("plan --model llama-3-8b --block 24", 2, "--block", "24");
  check_error("plan --model llama-3-8b --block 16 --kv kv4", 2, "--block", "16");
  check_error("plan --model llama-3-8b --kv int9", 2, "--kv", "int9");
  check_error("plan --shape layers=1", 2, "--shape kv_heads", "");
  check_error("plan --shape layers=1,kv_heads=1,head_dim=64 --parameters 0", 2, "--parameters", "0");
  check_error("plan --list --model llama-3-8b", 2, "--list", "--model");
  check_error("plan --model llama-3-8b stray", 2, "arguments", "stray");
  check_error("plan --model llama-3-8b ''", 2, "arguments", "");
  check_error("plan --model llama-3-8b --frobnicate", 2, "arguments", "");
  check_error("frobnicate", 2, "arguments", "");
  check_error("", 2, "arguments", "");
}

TEST_CASE("what cannot be done ends with 1") {
  check_error("plan --model deepseek-v3 --kv kv4", 1, "--kv", "kv4");
  check_error("plan --model llama-3-8b --context 256M --batch 1048576", 1, "--batch", "");
  check_error("plan --model smollm2-135m --block 1 --memory 1000TB", 1, "--memory", "");
}

TEST_CASE("a result that cannot be written is no success") {
  const scratch folder;
  for (const char* json : {"", " --json"}) {
    const std::string err = folder.path + "/err";
    const std::string command = std::string("'" KVCACHE_COMMAND "' plan --model llama-3-8b") + json;
    const int status = std::system((command + " >/dev/full 2>" + err).c_str());
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 1);
    CHECK(read_file(err) == "error: stdout: cannot_write\n");
  }
}

TEST_CASE("bad files end with 3 and name file, field and value") {
  const scratch folder;
  const auto refused = [&](const std::string& option, const std::string& content, const char* field,
                           const char* value) {
    const std::string path = folder.file("input", content);
    check_error("plan " + option + " '" + path + "'", 3, field, value);
    CHECK(run("plan " + option + " '" + path + "' --json").document()["error"]["file"] == path);
  };
  refused("--config", "{", "byte", "2");
  refused("--config", "{}", "num_hidden_layers", "");
  refused("--config", R"({"num_hidden_layers": -1})", "num_hidden_layers", "-1");
  refused("--gguf", "", "gguf", "empty file");
  refused("--gguf", "GGUF", "version", "the file ends at byte 4");
  refused("--gguf", "ELF!", "magic", "558255173");
  check_error("plan --gguf /nonexistent", 3, "gguf", "No such file or directory");
  check_error("plan --config /nonexistent", 3, "config", "No such file or directory");
}

TEST_CASE("the header of a real model is read", "[sample]") {
  const json d = run("plan --gguf '" + kvcache::test::model_path() + "' --memory 2GB --json").document();
  CHECK(d["model"]["layers"] == 30);
  CHECK(d["model"]["parameters"] == 134515008);
  CHECK(d["bytes_per_token"] == 23040);
  CHECK(d["model"]["parameters_by"] == "tensors");
  const auto size = static_cast<double>(read_file(kvcache::test::model_path()).size());
  CHECK(d["weight_bytes"].get<double>() < size);
  CHECK(d["weight_bytes"].get<double>() > 0.95 * size);
  // Sixteen bits when that is asked for.
  CHECK(run("plan --weights-bits 16 --gguf '" + kvcache::test::model_path() + "' --json")
            .document()["weight_bytes"] == 2 * 134515008);
}
