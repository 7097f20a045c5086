// SPDX-License-Identifier: Apache-2.0
// The programs as a user runs them: output, exit codes, error documents.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "cache_kind.hpp"
#include "program_runner.hpp"
#include "support/environment.hpp"
#include "synthetic_model.hpp"

using namespace engine::test;
using nlohmann::json;

namespace {

const std::string generate_program = ENGINE_GENERATE;
const std::string score_program = ENGINE_SCORE;

}  // namespace

TEST_CASE("engine_generate prints one document with ids, steps, runs and bytes") {
  const scratch folder;
  const std::string model = folder.file("m.gguf", synthetic_model({}).serialise());
  for (const std::string_view kind : engine::cache_kind_names()) {
    const std::string base =
        generate_program + " --model " + model + " --cache " + std::string(kind) + " --json ";
    const outcome o = run(base + "--ids 5,6,7,8 --new 6 --ignore-eos --top 3");
    INFO(kind);
    CHECK(o.code == 0);
    const json d = o.document();
    CHECK(d["schema"] == "kvcache.engine_generate.v1");
    CHECK(d["prompt_ids"] == json({5, 6, 7, 8}));
    REQUIRE(d["ids"].size() == 6);
    CHECK(d["stop"] == "length");
    REQUIRE(d["steps"].size() == 6);
    for (int i = 0; i < 6; ++i) {
      const json& step = d["steps"][static_cast<std::size_t>(i)];
      CHECK(step["pos"] == 3 + i);
      CHECK(step["top"].size() == 3);
      CHECK(step["top"][0][0] == d["ids"][static_cast<std::size_t>(i)]);
      CHECK(step["lse"].get<double>() >= step["top"][0][1].get<double>());
      CHECK(step["fnv"].get<std::string>().size() == 16);
    }
    CHECK(d["runs"] == json({{{"reused", 0}, {"prefilled", 4}}}));
    CHECK(d["bytes"]["held"].get<std::size_t>() >= 9 * 2 * 2 * 2 * 64 * sizeof(float));
    CHECK(d["bytes"]["reserved"] >= d["bytes"]["held"]);
    // The chunk size, the threads and what is reported change no bit.
    const json all =
        run(base + "--ids 5,6,7,8 --new 6 --ignore-eos --at all --chunk 3 --threads 2").document();
    CHECK(all["steps"].size() == 9);
    for (std::size_t i = 0; i < 6; ++i) CHECK(all["steps"][i + 3]["fnv"] == d["steps"][i]["fnv"]);
    const json twice = run(base + "--ids 5,6,7,8 --new 6 --ignore-eos --repeat 2").document();
    CHECK(twice["runs"].size() == 2);
    CHECK(twice["ids"] == d["ids"]);
    CHECK(twice["steps"].back()["fnv"] == d["steps"].back()["fnv"]);
    const json none = run(base + "--ids 5,6 --new 0 --at all").document();
    CHECK(none["ids"].empty());
    CHECK(none["steps"].size() == 2);
  }
}

TEST_CASE("engine_generate drops tokens by a policy given as text") {
  const scratch folder;
  const std::string base = generate_program + " --model " +
                           folder.file("m.gguf", synthetic_model({}).serialise()) + " --json --block 4 " +
                           "--ids 5,6,7,8,9,10,11,12,13,14,15,16 --new 12 --ignore-eos ";
  const json all = run(base + "--cache paged").document();
  CHECK(run(base + "--cache paged --policy full").document() == all);
  CHECK_FALSE(all.contains("dropped"));
  // A budget that is not reached changes no bit.
  const json roomy = run(base + "--policy h2o:heavy=20,recent=20 --mode stream").document();
  CHECK(roomy["steps"] == all["steps"]);
  CHECK(roomy["dropped"] == 0);
  CHECK(roomy["policy"] == "h2o:heavy=20,recent=20,every=1");
  CHECK(roomy["mode"] == "stream");
  const json once = run(base + "--policy h2o:heavy=3,recent=5").document();
  CHECK(once["dropped"] == 4);
  CHECK(once["mode"] == "oneshot");
  CHECK(once["steps"][0] == all["steps"][0]);  // the prompt was computed with all of it
  CHECK(once["steps"][1]["fnv"] != all["steps"][1]["fnv"]);
  CHECK(run(base + "--policy h2o:heavy=3,recent=5 --chunk 1 --threads 2").document() == once);
  const json stream = run(base + "--policy h2o:heavy=3,recent=5 --mode stream").document();
  CHECK(stream["dropped"] == 23 - 8);
  CHECK(stream["bytes"]["reserved"] < all["bytes"]["reserved"]);
  CHECK(run(base + "--policy h2o:heavy=3,recent=5 --mode stream --chunk 5").document() == stream);
  const std::string full_pool = base + "--mode out_of_blocks --blocks 4 --policy ";
  const json late = run(full_pool + "window:9").document();
  CHECK(late["dropped"] == 7);  // at token 16
  for (std::size_t i = 0; i < 5; ++i) CHECK(late["steps"][i] == all["steps"][i]);
  expect_error(run(full_pool + "window:40"), 1, "blocks", "1");
  expect_error(run(base + "--policy window:9 --cache reference"), 1, "--cache",
               "reference; a policy needs paged");
  expect_error(run(base + "--blocks 9"), 1, "--blocks", "without a policy");
  const outcome unknown = run(base + "--policy nothing:3");
  CHECK(unknown.code == 3);
  CHECK(unknown.document()["error"]["field"] == "policy");
  expect_error(run(base + "--policy h2o:light=3"), 3, "light",
               "3; allowed: heavy, recent, every, budget, floor");
  const outcome wrong = run(base + "--policy snapkv:capacity=64,kernel=4");
  expect_error(wrong, 3, "kernel", "; allowed: an odd number");
  expect_error(run(base + "--policy window:9 --mode never"), 2, "--mode",
               "never not in {oneshot,stream,out_of_blocks}");
}

TEST_CASE("engine_generate takes text, a file, a chat turn, and a seed") {
  const scratch folder;
  const std::string base = generate_program + " --model " +
                           folder.file("m.gguf", synthetic_model({}).serialise()) + " --json --new 4 ";
  const json text = run(base + "--prompt 'the <|im_end|>'").document();
  CHECK(text["prompt_ids"].back() == 2);
  const json plain = run(base + "--plain --prompt 'the <|im_end|>'").document();
  CHECK(plain["prompt_ids"].size() > text["prompt_ids"].size());
  const json file = run(base + "--prompt-file " + folder.file("p", std::string("the <|im_end|>"))).document();
  CHECK(file["prompt_ids"] == text["prompt_ids"]);
  const json chat = run(base + "--chat 'the'").document();
  CHECK(chat["prompt_ids"][0] == 1);
  const std::string sampled = base + "--ids 9,8 --ignore-eos --temperature 2 ";
  const json one = run(sampled + "--seed 1").document();
  CHECK(run(sampled + "--seed 1").document()["ids"] == one["ids"]);
  CHECK(run(sampled + "--seed 2").document()["ids"] != one["ids"]);
  // Without --json the text is on stdout.
  CHECK(run(generate_program + " --model '" + folder.path + "/m.gguf' --prompt a --new 1").code == 0);
}

TEST_CASE("a wrong command line ends with code 2 and names the option") {
  const std::string base = generate_program + " --json --model x ";
  expect_error(run(base + "--prompt a"), 2, "arguments", "");
  expect_error(run(base + "--new -1 --prompt a"), 2, "--new", "");
  expect_error(run(base + "--new 1"), 2, "arguments", "");
  expect_error(run(base + "--new 1 --prompt a --chat b"), 2, "arguments", "");
  expect_error(run(base + "--new 1 --prompt a --cache nothing"), 2, "--cache", "");
  expect_error(run(base + "--new 1 --prompt a --chunk 0"), 2, "--chunk", "");
  expect_error(run(base + "--new 1 --prompt a --kv f8"), 2, "--kv", "");
  expect_error(run(base + "--new 1 --prompt a --block 12"), 2, "--block", "");
  expect_error(run(base + "--new 1 --prompt a b"), 2, "arguments", "");
  expect_error(run(base + "--new 1 --prompt a ''"), 2, "arguments", "");
  expect_error(run(score_program + " --json --model x"), 2, "arguments", "");
  const outcome quiet = run(generate_program + " --new 1");
  CHECK(quiet.code == 2);
  CHECK(quiet.out.empty());
  CHECK(run(generate_program + " --help").code == 0);
}

TEST_CASE("bad input ends with code 3, what cannot run with code 1, both naming field and value") {
  const scratch folder;
  const gguf_builder good = synthetic_model(tiny());
  const std::string model = folder.file("m.gguf", good.serialise());
  const std::string end = " --json --new 1 --ids 1,2";
  expect_error(run(generate_program + " --model /nonexistent" + end), 3, "model",
               "No such file or directory");
  bytes part = good.serialise();
  part.resize(good.header_size() / 2);
  CHECK(run(generate_program + " --model " + folder.file("cut.gguf", part) + end).code == 3);
  gguf_builder unknown = good;
  unknown.find_tensor("blk.0.attn_q.weight").type = 14;
  expect_error(run(generate_program + " --model " + folder.file("q6.gguf", unknown.serialise()) + end), 1,
               "blk.0.attn_q.weight.type", "Q6_K (14)");
  gguf_builder missing = good;
  missing.remove_key("llama.block_count");
  const outcome o = run(generate_program + " --model " + folder.file("key.gguf", missing.serialise()) + end);
  expect_error(o, 3, "llama.block_count", "absent");
  CHECK(o.document()["error"]["file"] == folder.path + "/key.gguf");
  const std::string base = generate_program + " --json --new 1 --model " + model;
  expect_error(run(base + " --ids 1,100000"), 3, "--ids", "100000");
  expect_error(run(base + " --ids=-1"), 3, "--ids", "-1");
  expect_error(run(base + " --prompt ''"), 3, "prompt", "no tokens");
  expect_error(run(base + " --prompt-file /nonexistent"), 3, "--prompt-file", "");
  std::string many = " --ids 1";
  for (int i = 0; i < 64; ++i) many += ",1";
  expect_error(run(base + many), 3, "prompt.tokens", "65");  // the context is 64
  const std::string score = score_program + " --json --model " + model + " --text-file ";
  expect_error(run(score + folder.file("short", std::string("a"))), 3, "text.tokens", "1");
  expect_error(run(score + folder.file("long", std::string(65, 'x'))), 3, "text.tokens", "65");
  expect_error(run(score + "/nonexistent"), 3, "--text-file", "");
}

TEST_CASE("generation stops at the end of the context") {
  const scratch folder;
  const std::string base = generate_program + " --json --ignore-eos --model " +
                           folder.file("m.gguf", synthetic_model(tiny()).serialise());
  const json d = run(base + " --ids 1,2,3 --new 500").document();
  CHECK(d["stop"] == "context");
  CHECK(d["ids"].size() == 62);  // the token after position 63 is still predicted
  CHECK(d["steps"].back()["pos"] == 63);
}

TEST_CASE("engine_score prints the likelihood of each token") {
  const scratch folder;
  const std::string model = folder.file("m.gguf", synthetic_model({}).serialise());
  const std::string text = folder.file("t", std::string("the thing and a \xFF<|im_end|> 12"));
  const json d = run(score_program + " --json --model " + model + " --text-file " + text).document();
  CHECK(d["schema"] == "kvcache.engine_score.v1");
  REQUIRE(d["nll"].size() + 1 == d["ids"].size());
  double sum = 0;
  for (const json& n : d["nll"]) sum += n.get<double>();
  CHECK(d["mean_nll"].get<double>() == Approx(sum / static_cast<double>(d["nll"].size())).epsilon(1e-8));
  const json small =
      run(score_program + " --json --chunk 3 --model " + model + " --text-file " + text).document();
  CHECK(small == d);
}
