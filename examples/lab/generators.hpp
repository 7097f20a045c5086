// SPDX-License-Identifier: Apache-2.0
#pragma once

// Prompts for tasks, as text. Integer arithmetic on one generator (splitmix64) and fixed word lists, so a
// seed gives the same bytes everywhere, in this program and in any port of it.
//
//   prompt = context + question      the answer follows the prompt directly
//
// The cut lies between words, so that the tokens of the parts are those of the whole.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sampling.hpp"

namespace lab {

/// splitmix64 and what the generators draw from it.
class draws {
 public:
  explicit draws(std::uint64_t seed) : random_(seed) {}

  std::uint64_t next() { return random_.next(); }
  /// 0 .. n-1, by remainder. Requires: n > 0.
  std::uint64_t below(std::uint64_t n) { return random_.next() % n; }
  /// `n` digits, the first of them not 0.
  std::string digits(int n);

  template <class T>
  const T& pick(const std::vector<T>& from) {
    return from[static_cast<std::size_t>(below(from.size()))];
  }
  /// Fisher-Yates from the end.
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i-- > 1;) {
      const auto j = static_cast<std::size_t>(below(i + 1));
      std::swap(items[i], items[j]);
    }
  }

 private:
  engine::splitmix64 random_;
};

/// A prompt in two parts, and what must follow it.
struct prompt_text {
  std::string context;   ///< what a cache policy may drop from
  std::string question;  ///< behind it: compressed with the context, or fed afterwards
  std::string answer;

  std::string prompt() const { return context + question; }
};

/// How a pass key is asked for. `chat_sp`: chat form, the prompt ends with the space before the digits.
/// `chat_free`: chat form without the beginning of an answer. `plain1`: the key is stated once.
enum class key_style { plain, plain1, chat, chat_free, chat_sp };

/// A key of five digits in `sentences` sentences of filler, in front of sentence `sentences * depth / 1000`.
prompt_text pass_key(std::uint64_t seed, int sentences, int depth_permille, key_style style);

/// Two keys, a red one and a blue one, at two depths; one of them is asked for. Chat form, as `chat_sp`.
prompt_text two_keys(std::uint64_t seed, int sentences, int depth_permille);

/// A key told in the first turn of a chat, filler in the turns between, asked for in the last.
prompt_text first_turn(std::uint64_t seed, int sentences);

/// `plain`: sentences and a question; `brief`: "word: 1234"; `word`: "word: word"; `chat`: as plain, as a
/// chat.
enum class line_style { plain, brief, word, chat };

/// `n` pairs of key and value; one value is asked for. Requires: n <= 64.
prompt_text key_values(std::uint64_t seed, int n, line_style style);

/// `n` random token ids from [low, high), once. The task is to see them again.
std::vector<std::int32_t> induction_ids(std::uint64_t seed, int n, int low = 1000, int high = 41000);

/// `n` random words, then the same words again.
prompt_text word_copy(std::uint64_t seed, int n);

/// Short prompts with a rule: a cycle of colours, a progression, copying, a repeated mapping, capitals.
enum class rule { cycle, count, copy, map, upper };
prompt_text pattern(std::uint64_t seed, rule kind);

enum class fact { name, city, color };
/// A fact about the user in the first turn, `turns` questions and answers between, the fact asked for.
prompt_text recall(std::uint64_t seed, int turns, fact what);

/// A list of `n` words, then the same list with every `every`-th word replaced as the instruction says: each
/// word of the second list needs the first list, the edited ones also the instruction.
prompt_text edited_copy(std::uint64_t seed, int n, int every);

/// `steps` additions with their results: each needs the result before it. The answer is the later half.
prompt_text running_sums(std::uint64_t seed, int steps);

/// A chain of `hops` assignments in filler ("Let B = A."); the value of the last variable is asked for.
prompt_text variable_trace(std::uint64_t seed, int hops, int sentences);

/// `n` words of which one occurs `n / 3` times; that word is asked for.
prompt_text frequent_word(std::uint64_t seed, int n);

/// Messages in the model's chat form behind the default system message, without the assistant's turn.
std::string chat_of(const std::vector<std::pair<std::string, std::string>>& turns);

/// FNV-1a, 64 bit.
std::uint64_t fnv1a(std::string_view bytes, std::uint64_t start = 0xCBF29CE484222325u);
std::string hex16(std::uint64_t value);

}  // namespace lab
