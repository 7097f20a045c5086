// SPDX-License-Identifier: Apache-2.0
#include "generators.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace lab {
namespace {

using words = std::vector<std::string>;

const words& filler() {
  static const words lines = {
      "The bus to the market leaves at the corner of the old square.",
      "A row of tall trees stands along the road to the mill.",
      "Most shops in the valley close early when it rains.",
      "The baker puts fresh bread on the wooden shelf each morning.",
      "Two dogs sleep in the shade near the stone bridge.",
      "The river is slow in summer and fast in spring.",
      "Children play with a red ball behind the school.",
      "The clock on the tower has been late for years.",
      "An old woman sells apples and pears from a small cart.",
      "The path turns left after the white gate.",
      "Soft snow covers the roofs for most of the winter.",
      "The library keeps its maps in a long drawer.",
      "Farmers bring their cheese to town in the evening.",
      "A thin cloud moved slowly over the green hills.",
      "The ferry carries people and goods across the lake.",
      "Someone left a blue umbrella on the bench by the pond.",
  };
  return lines;
}

const words& nouns() {
  static const words list = {"apple",   "river",  "stone",  "tiger",  "candle", "window", "garden", "silver",
                             "doctor",  "bottle", "market", "winter", "forest", "engine", "button", "letter",
                             "pencil",  "mirror", "basket", "guitar", "hammer", "island", "jacket", "kitchen",
                             "ladder",  "monkey", "needle", "orange", "pepper", "rabbit", "saddle", "tunnel",
                             "valley",  "wagon",  "yellow", "anchor", "bridge", "castle", "desert", "eagle",
                             "feather", "goblet", "honey",  "igloo",  "jungle", "kettle", "lemon",  "marble",
                             "nectar",  "oyster", "parrot", "quartz", "rocket", "shadow", "temple", "urchin",
                             "violin",  "walnut", "xenon",  "yogurt", "zebra",  "copper", "dragon", "flower"};
  return list;
}

const words& colors() {
  static const words list = {"red",    "blue",  "green", "yellow", "purple",
                             "orange", "black", "white", "brown",  "pink"};
  return list;
}

using pairs = std::vector<std::pair<std::string, std::string>>;

std::string join(const words& parts, std::string_view between) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += between;
    out += parts[i];
  }
  return out;
}

words first_of(words all, std::size_t n) {
  all.resize(std::min(n, all.size()));
  return all;
}

constexpr std::string_view end_of_turn = "<|im_end|>\n<|im_start|>assistant\n";

const char* const find_it = "A pass key is hidden in the text below. Find it and remember it.\n\n";

/// The context is cut in front of the last `question` of the chat's only message.
prompt_text asked_in_chat(const std::string& body, const std::string& question, const std::string& begun,
                          std::string answer) {
  const std::string whole = chat_of({{"user", body}});
  const std::string open = whole.substr(0, whole.size() - std::string_view("<|im_end|>\n").size());
  return {open, question + std::string(end_of_turn) + begun, std::move(answer)};
}

/// Filler with each needle in front of the sentence it names; `at` in rising order.
words filler_with(draws& random, int sentences, const std::vector<std::pair<int, std::string>>& needles) {
  words parts;
  std::size_t next = 0;
  for (int i = 0; i <= sentences; ++i) {
    while (next < needles.size() && (needles[next].first <= i || i == sentences))
      parts.push_back(needles[next++].second);
    if (i < sentences) parts.push_back(random.pick(filler()));
  }
  return parts;
}

int at_depth(int sentences, int permille) {
  return static_cast<int>(static_cast<std::int64_t>(sentences) * permille / 1000);
}

}  // namespace

std::string draws::digits(int n) {
  std::string out = std::to_string(1 + below(9));
  for (int i = 1; i < n; ++i) out += std::to_string(below(10));
  return out;
}

std::string chat_of(const pairs& turns) {
  std::string out =
      "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";
  for (const auto& [role, text] : turns) out += "<|im_start|>" + role + "\n" + text + "<|im_end|>\n";
  return out;
}

prompt_text pass_key(std::uint64_t seed, int sentences, int depth_permille, key_style style) {
  draws random(seed);
  const std::string key = random.digits(5);
  std::string needle = "The pass key is " + key + ". Remember it.";
  if (style != key_style::plain1) needle += " " + key + " is the pass key.";
  const words parts = filler_with(random, sentences, {{at_depth(sentences, depth_permille), needle}});
  const std::string body = find_it + join(parts, " ");
  const std::string question = "\n\nWhat is the pass key?";
  if (style == key_style::chat) return asked_in_chat(body, question, "The pass key is", " " + key);
  if (style == key_style::chat_free) return asked_in_chat(body, question, "", key);
  if (style == key_style::chat_sp) return asked_in_chat(body, question, "The pass key is ", key);
  return {body, question + " The pass key is", " " + key};
}

prompt_text two_keys(std::uint64_t seed, int sentences, int depth_permille) {
  draws random(seed);
  const std::string keys[2] = {random.digits(5), random.digits(5)};
  const std::string names[2] = {"red", "blue"};
  const auto asked = static_cast<std::size_t>(random.below(2));
  std::vector<std::pair<int, std::string>> needles;
  for (std::size_t i = 0; i < 2; ++i) {
    const int depth = i == asked ? depth_permille : 1000 - depth_permille;
    needles.emplace_back(at_depth(sentences, depth), "The " + names[i] + " pass key is " + keys[i] +
                                                         ". Remember it. " + keys[i] + " is the " + names[i] +
                                                         " pass key.");
  }
  std::stable_sort(needles.begin(), needles.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const std::string body =
      "A red and a blue pass key are hidden in the text below. Find them and remember them.\n\n" +
      join(filler_with(random, sentences, needles), " ");
  return asked_in_chat(body, "\n\nWhat is the " + names[asked] + " pass key?",
                       "The " + names[asked] + " pass key is ", keys[asked]);
}

prompt_text first_turn(std::uint64_t seed, int sentences) {
  draws random(seed);
  const std::string key = random.digits(5);
  pairs turns = {
      {"user", "The pass key is " + key + ". Remember it. " + key + " is the pass key."},
      {"assistant", "I will remember that the pass key is the number you told me."},
  };
  for (int left = sentences; left > 0; left -= 8) {
    words lines;
    for (int i = 0; i < std::min(left, 8); ++i) lines.push_back(random.pick(filler()));
    turns.emplace_back("user", "Here is more of my story. " + join(lines, " "));
    turns.emplace_back("assistant", "Thank you. Please go on.");
  }
  return {chat_of(turns),
          "<|im_start|>user\nWhat is the pass key?" + std::string(end_of_turn) + "The pass key is ", key};
}

prompt_text key_values(std::uint64_t seed, int n, line_style style) {
  draws random(seed);
  words keys = nouns();
  random.shuffle(keys);
  keys = first_of(keys, static_cast<std::size_t>(n));
  words values;
  for (std::size_t i = 0; i < keys.size(); ++i) values.push_back(random.digits(4));
  const auto asked = static_cast<std::size_t>(random.below(static_cast<std::uint64_t>(n)));
  if (style == line_style::word) {
    words others;
    for (const std::string& word : nouns()) {
      if (std::find(keys.begin(), keys.end(), word) == keys.end()) others.push_back(word);
    }
    if (2 * keys.size() <= nouns().size()) {
      random.shuffle(others);
      values = first_of(others, keys.size());
    } else {
      for (std::string& value : values) value = random.pick(nouns());
    }
  }
  const bool lines = style == line_style::brief || style == line_style::word;
  words body;
  for (std::size_t i = 0; i < keys.size(); ++i)
    body.push_back(lines ? keys[i] + ": " + values[i] : "The code of " + keys[i] + " is " + values[i] + ".");
  const std::string& key = keys[asked];
  const std::string answer = " " + values[asked];
  if (lines) return {join(body, "\n"), "\n\n" + key + ":", answer};
  const std::string question = "What is the code of " + key + "?";
  const std::string begun = "The code of " + key + " is";
  if (style == line_style::chat) return asked_in_chat(join(body, "\n"), "\n\n" + question, begun, answer);
  return {join(body, "\n"), "\n\nQuestion: " + question + "\nAnswer: " + begun, answer};
}

std::vector<std::int32_t> induction_ids(std::uint64_t seed, int n, int low, int high) {
  draws random(seed);
  std::vector<std::int32_t> ids;
  for (int i = 0; i < n; ++i)
    ids.push_back(low + static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(high - low))));
  return ids;
}

prompt_text word_copy(std::uint64_t seed, int n) {
  draws random(seed);
  words list;
  for (int i = 0; i < n; ++i) list.push_back(random.pick(nouns()));
  const std::string text = join(list, " ");
  return {"Words: " + text, "\nThe same words again:", " " + text};
}

namespace {

prompt_text cycle_of_colors(draws& random) {
  words list = colors();
  random.shuffle(list);
  const auto count = static_cast<std::size_t>(15 + random.below(3));
  words shown;
  for (std::size_t i = 0; i < count; ++i) shown.push_back(list[i % 3]);
  return {join(shown, ", ") + ",", "", " " + list[count % 3]};
}

prompt_text progression(draws& random) {
  const std::uint64_t first = 1 + random.below(20);
  const std::uint64_t step = 1 + random.below(5);
  words shown;
  for (std::uint64_t i = 0; i < 8; ++i) shown.push_back(std::to_string(first + step * i));
  return {join(shown, ", ") + ",", "", " " + std::to_string(first + step * 8)};
}

prompt_text copied_words(draws& random) {
  words list = nouns();
  random.shuffle(list);
  std::string shown;
  for (std::size_t i = 0; i < 6; ++i) shown += list[i] + " -> " + list[i] + "\n";
  return {shown, list[6] + " ->", " " + list[6]};
}

prompt_text mapped_words(draws& random) {
  words list = nouns();
  random.shuffle(list);
  words values = colors();
  random.shuffle(values);
  const auto asked = static_cast<std::size_t>(random.below(6));
  std::string shown;
  for (std::size_t i = 0; i < 6; ++i) shown += list[i] + " -> " + values[i] + "\n";
  return {shown, list[asked] + " ->", " " + values[asked]};
}

prompt_text capitals(draws& random) {
  pairs list = {{"France", "Paris"}, {"Germany", "Berlin"}, {"Italy", "Rome"},     {"Spain", "Madrid"},
                {"Japan", "Tokyo"},  {"Austria", "Vienna"}, {"Ireland", "Dublin"}, {"England", "London"},
                {"Egypt", "Cairo"},  {"Russia", "Moscow"}};
  random.shuffle(list);
  std::string shown;
  for (std::size_t i = 0; i < 4; ++i) shown += list[i].first + ": " + list[i].second + "\n";
  return {shown, list[4].first + ":", " " + list[4].second};
}

}  // namespace

prompt_text pattern(std::uint64_t seed, rule kind) {
  draws random(seed);
  if (kind == rule::cycle) return cycle_of_colors(random);
  if (kind == rule::count) return progression(random);
  if (kind == rule::copy) return copied_words(random);
  return kind == rule::map ? mapped_words(random) : capitals(random);
}

prompt_text recall(std::uint64_t seed, int turns, fact what) {
  static const words names = {"Anna",  "Peter", "Maria",  "James", "Laura",
                              "David", "Emma",  "Daniel", "Sarah", "Thomas"};
  static const words cities = {"Paris", "London", "Berlin",  "Madrid", "Rome",
                               "Tokyo", "Boston", "Chicago", "Dublin", "Vienna"};
  draws random(seed);
  const std::string name = random.pick(names);
  const std::string city = random.pick(cities);
  const std::string color = random.pick(colors());
  pairs chat = {{"user", "Hello! My name is " + name + ". I live in " + city + " and my favourite color is " +
                             color + "."},
                {"assistant", "Hello " + name + "! It is nice to meet you."}};
  pairs between = {{"How many days are there in a week?", "There are seven days in a week."},
                   {"What do bees make?", "Bees make honey."},
                   {"Which animal says meow?", "A cat says meow."},
                   {"What is the opposite of hot?", "The opposite of hot is cold."},
                   {"What do we drink when we are thirsty?", "We drink water when we are thirsty."},
                   {"What falls from the clouds?", "Rain falls from the clouds."},
                   {"What do you use to cut paper?", "You use scissors to cut paper."},
                   {"Where do fish live?", "Fish live in water."}};
  random.shuffle(between);
  between.resize(std::min(between.size(), static_cast<std::size_t>(turns)));
  for (const auto& [question, answer] : between) {
    chat.emplace_back("user", question);
    chat.emplace_back("assistant", answer);
  }
  const auto ask = [&](const char* question, const char* begun, const std::string& answer) {
    return prompt_text{chat_of(chat),
                       "<|im_start|>user\n" + std::string(question) + std::string(end_of_turn) + begun,
                       " " + answer};
  };
  if (what == fact::name) return ask("What is my name?", "Your name is", name);
  if (what == fact::city) return ask("Which city do I live in?", "You live in", city);
  return ask("What is my favourite color?", "Your favourite color is", color);
}

prompt_text edited_copy(std::uint64_t seed, int n, int every) {
  draws random(seed);
  words list;
  for (int i = 0; i < n; ++i) list.push_back(random.pick(nouns()));
  const std::string& replacement = random.pick(colors());
  words edited = list;
  for (std::size_t i = static_cast<std::size_t>(every) - 1; i < edited.size();
       i += static_cast<std::size_t>(every))
    edited[i] = replacement;
  const std::string number = std::to_string(every);
  return {"Words: " + join(list, " ") + "\nThe same words again, with every word number " + number +
              " replaced by " + replacement + ":",
          "", " " + join(edited, " ")};
}

prompt_text running_sums(std::uint64_t seed, int steps) {
  draws random(seed);
  std::uint64_t sum = 1 + random.below(9);
  std::string shown = "Start with " + std::to_string(sum) + ".\n";
  std::string answer;
  for (int i = 0; i < steps; ++i) {
    const std::uint64_t add = 1 + random.below(9);
    sum += add;
    (2 * i < steps ? shown : answer) += "Add " + std::to_string(add) + ": " + std::to_string(sum) + "\n";
  }
  return {shown, "", answer};
}

prompt_text variable_trace(std::uint64_t seed, int hops, int sentences) {
  draws random(seed);
  const std::string value = random.digits(5);
  words names = nouns();
  random.shuffle(names);
  std::vector<std::pair<int, std::string>> needles;
  for (int hop = 0; hop <= hops; ++hop) {
    const auto at = static_cast<std::size_t>(hop);
    const std::string from = hop == 0 ? value : "the value of " + names[at - 1];
    needles.emplace_back(at_depth(sentences, 50 + 900 * hop / (hops + 1)),
                         "The value of " + names[at] + " is " + from + ".");
  }
  const std::string& last = names[static_cast<std::size_t>(hops)];
  return asked_in_chat(
      "Remember the values in the text below.\n\n" + join(filler_with(random, sentences, needles), " "),
      "\n\nWhat number is the value of " + last + "?", "The value of " + last + " is ", value);
}

prompt_text frequent_word(std::uint64_t seed, int n) {
  draws random(seed);
  words names = nouns();
  random.shuffle(names);
  words list;
  for (int i = 0; i < n; ++i) {
    const auto other = static_cast<std::size_t>(1 + random.below(31));
    list.push_back(i % 3 == 0 ? names[0] : names[other]);
  }
  random.shuffle(list);
  return asked_in_chat("Below is a list of words.\n\n" + join(list, ", "),
                       "\n\nWhich word occurs most often in the list?", "The word that occurs most often is",
                       " " + names[0]);
}

std::uint64_t fnv1a(std::string_view bytes, std::uint64_t start) {
  std::uint64_t hash = start;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash;
}

std::string hex16(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace lab
