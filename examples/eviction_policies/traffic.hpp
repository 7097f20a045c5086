// SPDX-License-Identifier: Apache-2.0
#pragma once

// An hour of two servers with little memory, made from a seed alone. On one, agents whose context grows step
// by step and people who read and think between the turns of a chat. On the other, questions about documents:
// a few are asked about again and again, most once.

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kvcache/core/units.hpp"

namespace eviction_policies {

using kvcache::token_id;

struct request {
  double at = 0;  // s
  bool agent = false;
  std::vector<token_id> text;
};

class hour {
 public:
  explicit hour(std::uint64_t seed) : random_(seed) {}

  void conversations(int scale) {
    for (int i = 0; i < scale; ++i) agent();
    for (int i = 0; i < 3 * scale; ++i) chat();
  }
  /// `once` documents that one question is asked about, beside 40 that as many questions together are: the
  /// second half as often as the first, the third a third, and so on.
  void documents(int once) {
    std::vector<std::vector<token_id>> popular(40);
    for (auto& d : popular) d = words(any(400, 1500));
    for (int i = 0; i < once; ++i) {
      question(words(any(400, 1500)));
      double left = std::uniform_real_distribution<double>(0, 4.2785)(random_);  // the sum of 1/1 to 1/40
      std::size_t which = 0;
      while (which + 1 < popular.size() && (left -= 1.0 / static_cast<double>(which + 1)) > 0) ++which;
      question(popular[which]);
    }
  }
  /// In the order in which they come.
  std::vector<request> take() {
    std::stable_sort(all_.begin(), all_.end(),
                     [](const request& a, const request& b) { return a.at < b.at; });
    return std::move(all_);
  }

 private:
  int any(int least, int most) {
    return least + static_cast<int>(random_() % static_cast<std::uint64_t>(most - least + 1));
  }
  std::vector<token_id> words(int n) {
    std::vector<token_id> t(static_cast<std::size_t>(n));
    for (token_id& x : t) x = any(1000, 30000);
    return t;
  }
  static void append(std::vector<token_id>& to, const std::vector<token_id>& more) {
    to.insert(to.end(), more.begin(), more.end());
  }
  /// System prompt number `which`: the same tokens each time.
  static std::vector<token_id> system(int which, int n) {
    std::vector<token_id> t(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < t.size(); ++i) t[i] = static_cast<token_id>(i) % 500 + which * 500 + 40000;
    return t;
  }
  void add(double at, bool is_agent, std::vector<token_id> text) {
    all_.push_back({at, is_agent, std::move(text)});
  }
  void question(std::vector<token_id> document) {
    append(document, words(any(20, 60)));
    add(any(0, 3600), false, std::move(document));
  }
  void agent() {
    std::vector<token_id> text = system(any(0, 2), 480);
    double at = any(0, 3000);
    for (int step = any(8, 20); step > 0; --step) {
      append(text, words(any(30, 120)));
      add(at, true, text);
      at += any(0, 9) == 0 ? any(60, 300) : any(2, 30);  // now and then a test suite runs
    }
  }
  void chat() {
    std::vector<token_id> text = system(3, 240);
    double at = any(0, 3000);
    for (int turn = any(1, 6); turn > 0; --turn) {
      append(text, words(any(40, 200)));
      add(at, false, text);
      at += any(20, 400);
    }
  }

  std::mt19937_64 random_;
  std::vector<request> all_;
};

}  // namespace eviction_policies
