// SPDX-License-Identifier: Apache-2.0
// From text to tokens: where trials are cut and which rows are scored. With the vocabulary of a small
// synthetic model; what depends on the real vocabulary is tagged [sample].
#include "task.hpp"

#include <catch2/catch.hpp>

#include "generators.hpp"
#include "gguf.hpp"
#include "program_runner.hpp"
#include "real_model.hpp"
#include "synthetic_model.hpp"
#include "user_tasks.hpp"

using namespace lab;
using engine::specials;

namespace {

const engine::tokenizer& small_tokenizer() {
  static const engine::tokenizer text = [] {
    const engine::test::scratch folder;
    folder.file("m.gguf", engine::test::synthetic_model({}).serialise());
    const auto file = engine::gguf_file::open(folder.path + "/m.gguf");
    REQUIRE(file);
    auto made = engine::tokenizer::load(*file);
    REQUIRE(made);
    return std::move(*made);
  }();
  return text;
}

std::vector<trial> make(task_request r) {
  auto made = make_trials(r, small_tokenizer());
  INFO((made ? std::string() : engine::describe(made.error())));
  REQUIRE(made);
  return *made;
}

std::vector<token_id> whole(const trial& t, std::size_t option = 0) {
  std::vector<token_id> out = t.context;
  out.insert(out.end(), t.options[option].feed.begin(), t.options[option].feed.end());
  return out;
}

std::vector<token_id> scored(const continuation& c) {
  std::vector<token_id> out;
  for (const token_id t : c.targets) {
    if (t != unscored) out.push_back(t);
  }
  return out;
}

}  // namespace

TEST_CASE("every task makes trials whose scored rows predict the token that follows") {
  const std::string prose(4000, 'x');
  std::vector<token_id> text;
  for (int i = 0; i < 3000; ++i) text.push_back(40 + i % 97);
  for (const task_info& info : tasks()) {
    if (info.name == "user") continue;
    for (const bool inside : {false, true}) {
      INFO(info.name << (inside ? " inside" : " after"));
      task_request r;
      r.task = info.name;
      r.length = 256;
      r.trials = 4;
      r.question_inside = inside;
      r.text = text;
      for (const trial& t : make(r)) {
        REQUIRE(t.options.size() == 1);
        const continuation& c = t.options[0];
        REQUIRE(c.targets.size() == c.feed.size());
        CHECK_FALSE(t.context.empty());
        for (std::size_t row = 0; row + 1 < c.feed.size(); ++row) {
          if (c.targets[row] != unscored) CHECK(c.targets[row] == c.feed[row + 1]);
        }
        // The floor answers for the same tokens.
        CHECK(scored(t.without_context[0]) == scored(c));
      }
    }
  }
}

TEST_CASE("a question inside the context costs the first token of the answer, and nothing else") {
  task_request r;
  r.task = "passkey";
  r.length = 128;
  r.trials = 3;
  const auto after = make(r);
  r.question_inside = true;
  const auto inside = make(r);
  for (std::size_t i = 0; i < after.size(); ++i) {
    CHECK(whole(after[i]) == whole(inside[i]));
    CHECK(after[i].context.size() < inside[i].context.size());
    std::vector<token_id> all = scored(after[i].options[0]);
    REQUIRE(all.size() == 5);
    all.erase(all.begin());
    CHECK(scored(inside[i].options[0]) == all);
  }
}

TEST_CASE("depths go from shallow to deep, and one trial takes the middle") {
  task_request r;
  r.task = "passkey";
  r.length = 256;
  const auto made = make(r);
  REQUIRE(made.size() == 10);
  CHECK(made.front().name == "depth 50");
  CHECK(made[3].name == "depth 350");
  CHECK(made.back().name == "depth 950");
  r.trials = 1;
  CHECK(make(r)[0].name == "depth 500");
  // Seed 1000 * length + trial; the prompt is the generator's.
  const auto text = pass_key(256003, 17, 350, key_style::chat_sp);
  std::vector<token_id> ids = small_tokenizer().encode(text.prompt() + text.answer, specials::parse);
  ids.pop_back();
  CHECK(whole(made[3]) == ids);
}

TEST_CASE("running text is scored in each of its rows") {
  std::vector<token_id> text;
  for (int i = 0; i < 61; ++i) text.push_back(i);
  task_request r;
  r.task = "kl";
  r.length = 40;
  r.score = 10;
  r.starts = {10};
  r.text = text;
  const auto made = make(r);
  REQUIRE(made.size() == 1);
  CHECK(made[0].context.front() == 10);
  CHECK(made[0].context.back() == 49);
  CHECK(made[0].options[0].feed == std::vector<token_id>{50, 51, 52, 53, 54, 55, 56, 57, 58, 59});
  CHECK(made[0].options[0].targets.back() == 60);
  r.starts = {11};  // the last row predicts what the text no longer shows
  CHECK(make(r)[0].options[0].targets.back() == unscored);
  r.starts = {12};
  const auto refused = make_trials(r, small_tokenizer());
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == "too_short");
  CHECK(refused.error().value == "61, 62 needed");
  r.starts.clear();
  r.trials = 3;
  r.length = 20;
  const auto spread = make(r);
  REQUIRE(spread.size() == 3);
  CHECK(spread[0].context.front() == 0);
  CHECK(spread[2].options[0].feed.back() == 60);
}

TEST_CASE("trials cut out of a text begin where they are told to") {
  std::vector<token_id> text;
  for (int i = 0; i < 100; ++i) text.push_back(i);
  task_request r;
  r.length = 40;
  r.score = 10;
  r.trials = 7;
  r.text = text;
  for (const char* task : {"kl", "repeat"}) {
    r.task = task;
    r.starts = {30, 0, 50};
    const auto made = make(r);
    REQUIRE(made.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) CHECK(made[i].context.front() == r.starts[i]);
    r.starts = {30, 0, 61};
    const auto refused = make_trials(r, small_tokenizer());
    REQUIRE_FALSE(refused);
    CHECK(refused.error().value == "100, " + std::to_string(task[0] == 'k' ? 111 : 101) + " needed");
  }
}

TEST_CASE("a repeated passage comes again token for token, later parts of it in later trials") {
  std::vector<token_id> text;
  for (int i = 0; i < 900; ++i) text.push_back(i);
  task_request r;
  r.task = "repeat";
  r.length = 600;
  r.trials = 3;
  r.score = 100;
  r.text = text;
  const auto made = make(r);
  CHECK(made[0].context.size() == 600);
  CHECK(made[0].options[0].feed.front() == made[0].context.front());
  CHECK(made[2].options[0].feed.front() == made[2].context[600 - 116]);
  CHECK(scored(made[1].options[0]).size() == 100);
  CHECK(scored(made[1].options[0]).front() == made[1].options[0].feed[16]);
}

TEST_CASE("unknown tasks and missing texts are refused") {
  task_request r;
  r.task = "nothing";
  CHECK(make_trials(r, small_tokenizer()).error().kind == engine::failure::usage);
  r.task = "kl";
  CHECK(make_trials(r, small_tokenizer()).error().field == "--text-file");
}

TEST_CASE("a user's trials are read, answers and options") {
  task_request r;
  r.task = "user";
  r.user_tasks =
      "{\"prompt\": \"one two\", \"answer\": \" three\"}\n\n"
      "{\"prompt\": \"a b c\", \"question\": \" d?\", \"options\": [\" x\", \" yes\"], \"right\": 1}\n";
  const auto made = make(r);
  REQUIRE(made.size() == 2);
  CHECK(made[0].name == "line 1");
  CHECK(scored(made[0].options[0]) == small_tokenizer().encode(" three", specials::as_text));
  REQUIRE(made[1].options.size() == 2);
  CHECK(made[1].right == 1);
  CHECK(made[1].context == small_tokenizer().encode("a b c", specials::as_text));
  CHECK(scored(made[1].options[1]) == small_tokenizer().encode(" yes", specials::as_text));
}

TEST_CASE("a wrong line of a user's file is named with field and value") {
  const auto refuse = [](const std::string& line, const char* code, const char* field) {
    INFO(line);
    const auto read =
        read_user_tasks("{\"prompt\": \"one two\", \"answer\": \"x\"}\n" + line + "\n", small_tokenizer());
    REQUIRE_FALSE(read);
    CHECK(read.error().kind == engine::failure::bad_input);
    CHECK(read.error().code == code);
    CHECK(read.error().field == field);
    CHECK(read.error().line == 2);
  };
  refuse("{", "not_json", "line");
  refuse("[1]", "not_json", "line");
  refuse("{\"prompt\": \"one two\", \"answr\": \"x\"}", "unknown_key", "answr");
  refuse("{\"answer\": \"x\"}", "missing", "prompt");
  refuse("{\"prompt\": \"one two\"}", "missing", "answer");
  refuse("{\"prompt\": 3, \"answer\": \"x\"}", "bad_type", "prompt");
  refuse("{\"prompt\": \"one two\", \"answer\": \"\"}", "bad_value", "answer");
  refuse("{\"prompt\": \"\", \"answer\": \"x\"}", "bad_value", "prompt");
  refuse("{\"prompt\": \"one two\", \"options\": [\"a\"], \"right\": 0}", "bad_value", "options");
  refuse("{\"prompt\": \"one two\", \"options\": [\"a\", \"b\"], \"right\": 2}", "bad_value", "right");
  refuse("{\"prompt\": \"one two\", \"options\": [\"a\", \"b\"]}", "missing", "right");
  refuse("{\"prompt\": \"one two\", \"options\": [\"a\", 1], \"right\": 0}", "bad_type", "options");
  refuse("{\"prompt\": \"one two\", \"answer\": \"x\", \"right\": 0}", "bad_value", "right");
  refuse("{\"prompt\": \"one two\", \"answer\": \"x\", \"chat\": 1}", "bad_type", "chat");
  CHECK_FALSE(read_user_tasks("\n\n", small_tokenizer()));
}

TEST_CASE("cutting a prompt in two changes no token, and prompts have the known lengths", "[sample]") {
  const engine::tokenizer& text = *engine::test::real_model().text;
  const auto length = [&](std::uint64_t seed, int sentences) {
    return text.encode(pass_key(seed, sentences, 550, key_style::chat_sp).prompt(), specials::parse).size();
  };
  CHECK(length(5, 17) == 268);
  CHECK(length(6, 84) == 1023);
  CHECK(length(7, 360) == 4034);
  const auto uncut = [&](const prompt_text& made) {
    std::vector<token_id> parts = text.encode(made.context, specials::parse);
    for (const std::string* part : {&made.question, &made.answer}) {
      const auto ids = text.encode(*part, specials::parse);
      parts.insert(parts.end(), ids.begin(), ids.end());
    }
    CHECK(parts == text.encode(made.prompt() + made.answer, specials::parse));
  };
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    uncut(pass_key(seed, 20, 400, key_style::chat_sp));
    uncut(pass_key(seed, 20, 400, key_style::plain));
    uncut(two_keys(seed, 20, 300));
    uncut(first_turn(seed, 20));
    uncut(key_values(seed, 10, line_style::plain));
    uncut(key_values(seed, 10, line_style::brief));
    uncut(word_copy(seed, 30));
    uncut(edited_copy(seed, 30, 4));
    uncut(running_sums(seed, 10));
    uncut(variable_trace(seed, 2, 10));
    uncut(frequent_word(seed, 30));
    uncut(recall(seed, 3, fact::name));
  }
}
