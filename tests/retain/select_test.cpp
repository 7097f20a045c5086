// SPDX-License-Identifier: Apache-2.0
// Which slots stay, given scores: against a statement of the rule that sorts everything.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "kvcache/retain/select.hpp"
#include "support/environment.hpp"

using namespace kvcache;

namespace {

std::vector<int32_t> select(const std::vector<float>& scores, const protection& p, int32_t budget) {
  std::vector<int32_t> scratch(scores.size()), kept(scores.size());
  const auto n = select_slots(scores, p, budget, scratch, kept);
  REQUIRE(n);
  kept.resize(static_cast<size_t>(*n));
  return kept;
}

// The rule in its own words: rank slots by (pinned, sink from the first, recent from the last, score, lower).
std::vector<int32_t> by_the_rule(const std::vector<float>& scores, const protection& p, int32_t budget) {
  const auto held = static_cast<int32_t>(scores.size());
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto grade = [&](int32_t i) -> std::pair<int, double> {
    if (std::count(p.pinned.begin(), p.pinned.end(), i) > 0) return {0, 0};
    if (i < p.sinks) return {1, i};
    if (i >= held - p.recent) return {2, held - i};
    const float s = scores[static_cast<size_t>(i)];
    return {3, std::isnan(s) ? INFINITY : -static_cast<double>(s)};
  };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return grade(a) < grade(b); });
  order.resize(static_cast<size_t>(std::min(budget, held)));
  std::sort(order.begin(), order.end());
  return order;
}

// Scores from few values, so that ties are everywhere.
std::vector<float> few_values(std::mt19937& random, int32_t n) {
  std::vector<float> s;
  for (int32_t i = 0; i < n; ++i) s.push_back(static_cast<float>(random() % 5));
  if (n > 3 && random() % 4 == 0) s[random() % static_cast<size_t>(n)] = NAN;
  return s;
}

}  // namespace

TEST_CASE("what stays is protected or best, ties go to the lower slot, for every budget") {
  std::mt19937 random(static_cast<uint32_t>(test::test_seed("select", 1)));
  for (int round = 0; round < test::effort(400); ++round) {
    const auto n = static_cast<int32_t>(random() % 30);
    const auto scores = few_values(random, n);
    std::vector<int32_t> pinned;
    for (int32_t i = 0; i < n; ++i) {
      if (random() % 9 == 0) pinned.push_back(i);
    }
    const protection p{static_cast<int32_t>(random() % 5), static_cast<int32_t>(random() % 6), pinned};
    for (auto budget = static_cast<int32_t>(pinned.size()); budget <= n + 1; ++budget) {
      CAPTURE(round, n, budget, p.sinks, p.recent);
      CHECK(select(scores, p, budget) == by_the_rule(scores, p, budget));
    }
  }
}

TEST_CASE("of equals the first ones stay, where a sort or a heap would take any") {
  std::vector<float> scores(12);
  scores[3] = 1;
  CHECK(select(scores, {}, 5) == std::vector<int32_t>{0, 1, 2, 3, 4});
  CHECK(select(scores, {}, 1) == std::vector<int32_t>{3});
  CHECK(select(scores, {0, 2, {}}, 5) == std::vector<int32_t>{0, 1, 3, 10, 11});
}

TEST_CASE("more pinned slots than may stay are refused by number") {
  const std::vector<float> scores(8);
  std::vector<int32_t> scratch(8), kept(8);
  const int32_t pinned[] = {1, 3, 5};
  const auto r = select_slots(scores, {0, 0, pinned}, 2, scratch, kept);
  CHECK(r.error().code == errc::bad_argument);
  CHECK(std::string(r.error().field) == "pinned");
  CHECK(r.error().value == 3);
}

TEST_CASE("a divided budget is exact, gives everyone the sure share, and otherwise goes to the best") {
  std::mt19937 random(static_cast<uint32_t>(test::test_seed("divide", 1)));
  for (int round = 0; round < test::effort(300); ++round) {
    const int32_t per_layer = 1 + static_cast<int32_t>(random() % 3);
    const int32_t layers = 1 + static_cast<int32_t>(random() % 3);
    const int32_t n = 8 + static_cast<int32_t>(random() % 20);
    const int32_t keep = 5 + static_cast<int32_t>(random() % 6);
    const protection safe{1, 2, {}};
    std::vector<std::vector<float>> scores;
    std::vector<head_scores> heads;
    for (int32_t h = 0; h < layers * per_layer; ++h) {
      scores.push_back(few_values(random, n));
      for (float& s : scores.back()) s = std::isnan(s) ? 0 : s + static_cast<float>(h % 2);
    }
    for (const auto& s : scores) heads.push_back({s, safe});
    std::vector<ranked_slot> ranking(scores.size() * static_cast<size_t>(n));
    std::vector<int32_t> slots(static_cast<size_t>(n)), kept(static_cast<size_t>(n));
    for (const budget_scope scope :
         {budget_scope::uniform, budget_scope::head, budget_scope::layer, budget_scope::global}) {
      CAPTURE(round, static_cast<int>(scope), n, keep, layers, per_layer);
      const budget_rule rule{scope, 1, 2};
      std::vector<int32_t> counts(scores.size());
      REQUIRE(divide_budget(rule, heads, per_layer, keep, {ranking, slots, kept}, counts));
      CHECK(std::accumulate(counts.begin(), counts.end(), 0) == std::min(keep, n) * layers * per_layer);
      const int32_t sure = std::min(std::max(keep / 2, 3), n);
      for (size_t h = 0; h < counts.size(); ++h) {
        const auto first = h / static_cast<size_t>(per_layer) * static_cast<size_t>(per_layer);
        if (scope != budget_scope::layer) CHECK(counts[h] >= sure);
        CHECK(counts[h] <= n);
        if (scope == budget_scope::uniform) CHECK(counts[h] == std::min(keep, n));
        if (scope == budget_scope::layer) CHECK(std::abs(counts[h] - counts[first]) <= 1);
        if (scope == budget_scope::head) {
          const auto begin = counts.begin() + static_cast<std::ptrdiff_t>(first);
          CHECK(std::accumulate(begin, begin + per_layer, 0) == std::min(keep, n) * per_layer);
        }
      }
      if (scope != budget_scope::global) continue;
      // Nothing that stays beyond the sure share is worse than anything that went.
      float worst_kept = INFINITY, best_gone = -INFINITY;
      for (size_t h = 0; h < counts.size(); ++h) {
        const auto all = select(scores[h], safe, counts[h]);
        const auto base = select(scores[h], safe, sure);
        for (int32_t i = 0; i < n; ++i) {
          const float s = scores[h][static_cast<size_t>(i)];
          const bool is_kept = std::binary_search(all.begin(), all.end(), i);
          if (!is_kept) best_gone = std::max(best_gone, s);
          if (is_kept && !std::binary_search(base.begin(), base.end(), i))
            worst_kept = std::min(worst_kept, s);
        }
      }
      CHECK(worst_kept >= best_gone);
    }
  }
}

TEST_CASE("heads too short for their part keep all they have") {
  const std::vector<float> scores(4);
  const std::vector<head_scores> heads(3, {scores, {}});
  std::vector<ranked_slot> ranking(12);
  std::vector<int32_t> slots(4), kept(4), counts(3);
  REQUIRE(divide_budget({budget_scope::global, 1, 5}, heads, 3, 9, {ranking, slots, kept}, counts));
  CHECK(counts == std::vector<int32_t>{4, 4, 4});
}

TEST_CASE("the victim is the lowest score that may go, of equals the highest position") {
  std::mt19937 random(static_cast<uint32_t>(test::test_seed("victim", 5)));
  for (int64_t round = 0; round < test::effort(2000); ++round) {
    const size_t n = random() % (round % 8 == 0 ? 1000 : 70);
    std::vector<float> scores(n);
    std::vector<int32_t> positions(n);
    std::iota(positions.begin(), positions.end(), 3);
    std::shuffle(positions.begin(), positions.end(), random);
    for (float& s : scores) s = static_cast<float>(random() % (round % 2 == 0 ? 4 : 1000));
    if (n > 0 && round % 5 == 0) scores[random() % n] = std::numeric_limits<float>::infinity();
    const auto before = static_cast<int32_t>(random() % (n + 10));
    int32_t right = -1;
    for (size_t i = 0; i < n; ++i) {
      if (positions[i] >= before) continue;
      const auto best = static_cast<size_t>(right);
      const bool goes = right < 0 || scores[i] < scores[best] ||
                        (scores[i] == scores[best] && positions[i] > positions[best]);
      if (goes) right = static_cast<int32_t>(i);
    }
    CAPTURE(round, n, before);
    REQUIRE(victim_slot(scores, positions, before) == right);
  }
}
