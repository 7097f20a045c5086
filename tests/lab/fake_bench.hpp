// SPDX-License-Identifier: Apache-2.0
#pragma once
// A bench without a model: every token predicts itself plus one, as long as the text holds the tokens it
// needs. Quick, and the right answer is known.
#include <algorithm>
#include <charconv>
#include <memory>
#include <string>
#include <vector>

#include "score.hpp"

namespace lab::test {

/// Policies: `full`, `window:N`, `random:capacity=N,seed=S`, `worse:N` (holds N tokens, knows nothing). A row
/// is sure of the next token (t + 1) if the token 100 below it is still held or was never fed; else all are
/// alike.
class fake_subject : public subject {
 public:
  fake_subject(std::string policy, mode how, int* prefilled)
      : policy_(std::move(policy)), mode_(how), prefilled_(prefilled) {}

  engine::status feed(std::span<const token_id> tokens, std::vector<float>* rows) override {
    if (rows == nullptr) *prefilled_ += static_cast<int>(tokens.size());
    for (const token_id t : tokens) {
      fed_.push_back(t);
      held_.push_back(t);
      if (mode_ == mode::stream) drop();
      if (rows == nullptr) continue;
      std::vector<float> row(vocabulary, 0);
      const bool asked = t >= 200;
      const bool known = std::find(held_.begin(), held_.end(), t - 200) != held_.end();
      if (asked && known) row[static_cast<std::size_t>(t + 1)] = 20;
      rows->insert(rows->end(), row.begin(), row.end());
    }
    return {};
  }
  engine::status compress() override {
    drop();
    return {};
  }
  engine::result<std::unique_ptr<subject>> fork(const std::string& policy) override {
    auto copy = std::make_unique<fake_subject>(*this);
    if (!policy.empty()) copy->policy_ = policy;
    return std::unique_ptr<subject>(std::move(copy));
  }
  std::size_t bytes_held() const override { return held_.size() * 10; }
  std::size_t bytes_full() const override { return fed_.size() * 10; }
  std::size_t values_held() const override { return held_.size(); }
  std::size_t bytes_state() const override { return 0; }

  static constexpr std::size_t vocabulary = 500;

 private:
  void drop() {
    const std::size_t colon = policy_.find_first_of("0123456789");
    if (policy_ == "full" || colon == std::string::npos) return;
    std::size_t most = 0;
    std::from_chars(policy_.data() + colon, policy_.data() + policy_.size(), most);
    if (held_.size() <= most) return;
    if (policy_.rfind("window", 0) == 0)
      held_.erase(held_.begin(), held_.end() - static_cast<std::ptrdiff_t>(most));
    if (policy_.rfind("worse", 0) == 0) held_.assign(most, 499);
    if (policy_.rfind("first", 0) == 0 || policy_.rfind("random", 0) == 0) held_.resize(most);
  }

  std::string policy_;
  mode mode_;
  int* prefilled_;
  std::vector<token_id> fed_, held_;
};

class fake_bench : public bench {
 public:
  int vocabulary() const override { return static_cast<int>(fake_subject::vocabulary); }
  std::size_t values_per_token() const override { return 1; }
  std::size_t bytes_per_token() const override { return 10; }
  engine::result<std::unique_ptr<subject>> open(const std::string& policy, mode how, int) override {
    ++opened;
    return std::unique_ptr<subject>(std::make_unique<fake_subject>(policy, how, &prefilled));
  }
  int opened = 0;
  int prefilled = 0;  ///< tokens fed without asking for rows
};

/// Context 1 2 3 ... n; the answer needs token `needed` of it.
inline trial needing(int needed, int n) {
  trial t;
  t.name = "needs " + std::to_string(needed);
  for (int i = 1; i <= n; ++i) t.context.push_back(i);
  continuation c;
  c.feed = {200 + needed, 200 + needed};
  c.targets = {201 + needed, 201 + needed};
  t.options = {c};
  t.without_context = {c};
  return t;
}

}  // namespace lab::test
