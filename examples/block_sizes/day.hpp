// SPDX-License-Identifier: Apache-2.0
#pragma once

// A server's day as token ids: chats on a few system prompts, agents that resend their history, and questions
// about long documents. The same seed gives the same day everywhere.

#include <vector>

#include "kv_backend.hpp"
#include "sampling.hpp"

namespace block_sizes {

using engine::token_id;

/// One request: a prompt and how it will be answered.
struct job {
  std::vector<token_id> text;  ///< prompt, then answer
  int prompt = 0;
  int after = -1;  ///< the turn before it, which must be answered first
};

/// Writes the requests of a day, `scale` conversations of each kind.
class day {
 public:
  day(int scale, std::uint64_t seed) : random_(seed) {
    std::vector<std::vector<token_id>> systems;
    for (int i = 0; i < 3; ++i) systems.push_back(words(between({150, 700})));
    for (int i = 0; i < scale; ++i) {
      const auto& system = systems[random_.next() % systems.size()];
      add(system, {20, 200}, {30, 400}, -1);
      int turn = -1;
      for (int t = between({3, 6}); t > 0; --t)
        turn = add(turn < 0 ? systems[0] : jobs_[static_cast<std::size_t>(turn)].text, {30, 250}, {20, 150},
                   turn);
      const auto document = words(between({800, 2600}));
      add(document, {10, 60}, {50, 300}, -1);
      add(document, {10, 60}, {50, 300}, -1);
    }
  }
  std::vector<job> take() { return std::move(jobs_); }

 private:
  struct range {
    int low, high;
  };
  int between(range r) {
    return r.low + static_cast<int>(random_.next() % static_cast<std::uint64_t>(r.high - r.low));
  }
  std::vector<token_id> words(int n) {
    std::vector<token_id> out;
    while (static_cast<int>(out.size()) < n) out.push_back(static_cast<token_id>(random_.next() % 50000));
    return out;
  }
  int add(std::vector<token_id> text, range message, range answer, int after) {
    const auto append = [&](range tokens) {
      const auto more = words(between(tokens));
      text.insert(text.end(), more.begin(), more.end());
    };
    append(message);
    const int prompt = static_cast<int>(text.size());
    append(answer);
    jobs_.push_back({std::move(text), prompt, after});
    return static_cast<int>(jobs_.size()) - 1;
  }

  engine::splitmix64 random_;
  std::vector<job> jobs_;
};

}  // namespace block_sizes
