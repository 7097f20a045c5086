// SPDX-License-Identifier: Apache-2.0
// The generators against prompts and hashes of an independent implementation (tests/data/tasks.json).
#include "generators.hpp"

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/environment.hpp"

using nlohmann::json;

namespace {

const json& golden() {
  static const json values = [] {
    std::ifstream in(kvcache::test::data_path("tasks.json"));
    return json::parse(in);
  }();
  return values;
}

void expect(const char* name, const lab::prompt_text& made) {
  INFO(name);
  REQUIRE(golden().contains(name));
  CHECK(made.prompt() == golden()[name][0].get<std::string>());
  CHECK(made.answer == golden()[name][1].get<std::string>());
}

}  // namespace

TEST_CASE("a seed gives the known numbers") {
  lab::draws random(42);
  for (const json& value : golden()["splitmix64_seed42"])
    CHECK(lab::hex16(random.next()) == value.get<std::string>());
}

TEST_CASE("the prompts are the known ones to the byte") {
  using namespace lab;
  expect("passkey(1,4,500,chat_sp)", pass_key(1, 4, 500, key_style::chat_sp));
  expect("passkey(1,3,1000,plain)", pass_key(1, 3, 1000, key_style::plain));
  expect("kv_lines(1,3,short)", key_values(1, 3, line_style::brief));
  expect("kv_lines(2,4,plain)", key_values(2, 4, line_style::plain));
  expect("kv_lines(1,3,word)", key_values(1, 3, line_style::word));
  expect("pattern(1,cycle)", pattern(1, rule::cycle));
  expect("pattern(1,count)", pattern(1, rule::count));
  expect("pattern(1,copy)", pattern(1, rule::copy));
  expect("pattern(1,map)", pattern(1, rule::map));
  expect("pattern(1,upper)", pattern(1, rule::upper));
  expect("recall(1,2,city)", recall(1, 2, fact::city));
  const auto once = induction_ids(3, 8);
  std::vector<std::int32_t> twice = once;
  twice.insert(twice.end(), once.begin(), once.end());
  CHECK(json(twice) == golden()["induction_ids(3,8)"]);
}

TEST_CASE("long prompts have the known hashes") {
  const auto check = [](const char* name, std::uint64_t seed, int sentences) {
    INFO(name);
    const auto made = lab::pass_key(seed, sentences, 550, lab::key_style::chat_sp);
    const json& expected = golden()["fnv1a64"][name];
    CHECK(lab::hex16(lab::fnv1a(made.prompt())) == expected[0].get<std::string>());
    CHECK(made.answer == expected[1].get<std::string>());
  };
  check("passkey(5,17,550,chat_sp)", 5, 17);
  check("passkey(6,84,550,chat_sp)", 6, 84);
  check("passkey(7,360,550,chat_sp)", 7, 360);
}

TEST_CASE("the styles of a pass key differ as they say") {
  using namespace lab;
  const auto plain = pass_key(9, 20, 300, key_style::plain);
  const auto once = pass_key(9, 20, 300, key_style::plain1);
  const std::string again = plain.answer + " is the pass key.";
  CHECK(plain.context.size() == once.context.size() + again.size());
  const auto chat = pass_key(9, 20, 300, key_style::chat);
  const auto with_space = pass_key(9, 20, 300, key_style::chat_sp);
  CHECK(chat.prompt() + " " == with_space.prompt());
  CHECK(chat.answer == " " + with_space.answer);
  CHECK(chat.context == with_space.context);
  CHECK(pass_key(9, 20, 300, key_style::chat_free).prompt() + "The pass key is" == chat.prompt());
}

TEST_CASE("what is asked for stands in the context, and only where it should") {
  using namespace lab;
  const auto count = [](const std::string& text, const std::string& part) {
    int n = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
    return n;
  };
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const int depth = static_cast<int>(seed * 33);
    const auto two = two_keys(seed, 30, depth);
    CHECK(count(two.context, two.answer) == 2);
    CHECK(count(two.question, two.answer) == 0);
    const bool red = two.question.find("red") != std::string::npos;
    CHECK(two.context.find(std::string(red ? "red" : "blue") + " pass key is " + two.answer) !=
          std::string::npos);
    const auto first = first_turn(seed, 20);
    CHECK(count(first.context, first.answer) == 2);
    CHECK(first.context.find(first.answer) < 250);
    const auto trace = variable_trace(seed, 3, 20);
    CHECK(count(trace.context, trace.answer) == 1);
    CHECK(count(trace.context, "is the value of") == 3);
    const auto often = frequent_word(seed, 60);
    CHECK(count(often.context, often.answer.substr(1)) == 20);
    const auto edited = edited_copy(seed, 24, 4);
    CHECK(edited.answer.size() > 24);
    CHECK(edited.context.find(edited.answer) == std::string::npos);
  }
}

TEST_CASE("running sums add up") {
  const auto made = lab::running_sums(4, 12);
  const std::string all = made.context + made.answer;
  std::size_t at = all.find("Start with ") + 11;
  int sum = std::stoi(all.substr(at));
  int steps = 0;
  while ((at = all.find("Add ", at)) != std::string::npos) {
    sum += std::stoi(all.substr(at + 4));
    at = all.find(": ", at) + 2;
    CHECK(std::stoi(all.substr(at)) == sum);
    ++steps;
  }
  CHECK(steps == 12);
  CHECK(made.answer.find("Add ") == 0);
}
