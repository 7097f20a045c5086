// SPDX-License-Identifier: Apache-2.0
// Scoring, gates and comparisons on a bench whose right answers are known.
#include "score.hpp"

#include <catch2/catch.hpp>
#include <cmath>

#include "fake_bench.hpp"
#include "matrix.hpp"
#include "report.hpp"
#include "summary.hpp"

using namespace lab;
using lab::test::fake_bench;
using lab::test::needing;

namespace {

std::vector<trial_score> put(const std::vector<trial>& trials, const std::string& policy,
                             mode how = mode::oneshot) {
  std::vector<trial_score> out;
  for (const trial& t : trials) {
    fake_bench bench;
    trial_run run(bench, t);
    auto score = run.full();
    if (score && policy == "none") score = run.none();
    if (score && policy != "none" && policy != "full") score = run.policy(policy, how);
    REQUIRE(score);
    out.push_back(*score);
  }
  return out;
}

const std::vector<trial> ten = [] {
  std::vector<trial> out;
  for (int i = 1; i <= 10; ++i) out.push_back(needing(10 * i, 100));
  return out;
}();

}  // namespace

TEST_CASE("keeping everything scores everything, in both modes") {
  for (const mode how : {mode::oneshot, mode::stream}) {
    const summary s = summarise(put(ten, "window:1000", how));
    CHECK(s.correct == 10);
    CHECK(s.tokens.value == 1);
    CHECK(s.kl.value == 0);
    CHECK(s.top1 == 1);
    CHECK(s.bytes_held == s.bytes_full);
  }
}

TEST_CASE("a window solves what lies inside it and nothing else") {
  // Token 10 i of 100 is among the last 50 for i >= 6: positions 51 to 100.
  CHECK(summarise(put(ten, "window:50")).correct == 5);
  CHECK(summarise(put(ten, "first:50")).correct == 5);
  CHECK(summarise(put(ten, "window:50")).bytes_held == 500);
  CHECK(summarise(put(ten, "none")).correct == 0);
  CHECK(summarise(put(ten, "full")).correct == 10);
}

TEST_CASE("a one-shot policy acts behind the context, a stream policy inside it") {
  fake_bench bench;
  const trial t = needing(60, 100);
  trial_run run(bench, t);
  REQUIRE(run.full());
  CHECK(bench.prefilled == 100);
  const auto once = run.policy("window:50", mode::oneshot);
  REQUIRE(once);
  CHECK(bench.prefilled == 100);  // forked, not computed again
  CHECK(once->correct);
  const auto stream = run.policy("window:50", mode::stream);
  REQUIRE(stream);
  CHECK(bench.prefilled == 200);
}

TEST_CASE("a forced choice is right when the right option is the most likely one") {
  trial t = needing(30, 100);
  continuation wrong = t.options[0];
  wrong.targets = {7, 8};
  t.options = {wrong, t.options[0]};
  t.without_context = t.options;
  t.right = 1;
  CHECK(put({t}, "full")[0].correct);
  t.right = 0;
  CHECK_FALSE(put({t}, "full")[0].correct);
}

TEST_CASE("a gate opens where the full cache solves the task, and says what is missing where not") {
  const summary full = summarise(put(ten, "full"));
  const summary half = summarise(put(ten, "window:50"));
  const summary none = summarise(put(ten, "none"));
  CHECK(check_gate(measure::correct, full, none).open);
  const gate closed = check_gate(measure::correct, half, none);
  CHECK_FALSE(closed.open);
  CHECK(closed.threshold.find("5 of 10") != std::string::npos);
  CHECK(closed.threshold.find("0.80") != std::string::npos);
  CHECK(check_gate(measure::nll, full, none).open);
  CHECK_FALSE(check_gate(measure::nll, none, none).open);
  CHECK_FALSE(check_gate(measure::tokens, none, none).open);
}

TEST_CASE("quality is 1 for the full cache and 0 for no context, whatever the measure") {
  const summary full = summarise(put(ten, "full"));
  const summary half = summarise(put(ten, "window:50"));
  const summary none = summarise(put(ten, "none"));
  for (const measure m : {measure::correct, measure::tokens, measure::nll, measure::kl}) {
    CHECK(quality(m, full, none, full) == Approx(1));
    CHECK(quality(m, full, none, none) == Approx(0).margin(1e-12));
    CHECK(quality(m, full, none, half) == Approx(0.5).margin(1e-6));
  }
}

TEST_CASE("a comparison is paired and says what it cannot tell") {
  const auto half = put(ten, "window:50");
  const auto most = put(ten, "window:95");
  CHECK(std::string(compare_trials(measure::correct, most, half)->verdict) == "better");
  CHECK(std::string(compare_trials(measure::correct, half, most)->verdict) == "worse");
  CHECK(std::string(compare_trials(measure::nll, most, half)->verdict) == "better");
  CHECK(std::string(compare_trials(measure::correct, half, half)->verdict) == "no difference shown");
  const auto nearly = put(ten, "window:55");
  CHECK(std::string(compare_trials(measure::correct, nearly, half)->verdict) == "no difference shown");
  auto other = half;
  other[3].trial = "another";
  const auto refused = compare_trials(measure::correct, half, other);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == "not_comparable");
  CHECK(refused.error().value == "needs 40 and another");
  other.pop_back();
  CHECK_FALSE(compare_trials(measure::correct, half, other));
}

TEST_CASE("controls hold as many bytes as the policy they stand beside") {
  CHECK(window_of(500, 10, 1) == "window:window=50");
  CHECK(window_of(3, 10, 1) == "window:window=1");
  CHECK(window_of(640, 10, 16) == "window:window=64");
  CHECK(window_of(700, 10, 16) == "window:window=64");  // 4.4 blocks
  CHECK(window_of(730, 10, 16) == "window:window=80");
  CHECK(random_of(500, 10, 1, 7) == "random:capacity=50,seed=7");
}

TEST_CASE("a score survives its document") {
  const auto made = put(ten, "window:50")[2];
  const auto read = score_from_json(engine::json::parse(engine::to_text(to_json(made))));
  REQUIRE(read);
  CHECK(engine::to_text(to_json(*read)) == engine::to_text(to_json(made)));
  CHECK(read->bytes_held == made.bytes_held);
  CHECK_FALSE(score_from_json({{"trial", "x"}}));
}

TEST_CASE("the buckets by distance cover all rows once") {
  trial_score t;
  for (int i = 0; i < 300; ++i) {
    t.kl.push_back(i);
    t.top1.push_back(1);
    t.top5.push_back(0.5);
  }
  const engine::json buckets = by_distance(std::vector<trial_score>{t});
  REQUIRE(buckets.size() == 4);
  CHECK(buckets[0]["rows"] == 16);
  CHECK(buckets[0]["kl_mean"] == 7.5);
  CHECK(buckets[1]["rows"] == 48);
  CHECK(buckets[2]["rows"] == 192);
  CHECK(buckets[3]["rows"] == 44);
  CHECK(buckets[3]["kl_max"] == 299);
}

TEST_CASE("a control of several lots counts each trial once, with the mean of its lots") {
  const auto score = [](const std::string& trial, bool correct, double kl) {
    trial_score s;
    s.trial = trial;
    s.correct = correct;
    s.tokens = 2;
    s.tokens_right = correct ? 2 : 1;
    s.right = {1, correct ? 1.0 : 0.0};
    s.nll = {kl, kl};
    s.kl = {kl, kl + 1};
    s.top1 = {1, 0};
    s.top5 = {1, 1};
    s.bytes_held = 10;
    return s;
  };
  std::vector<trial_score> policy, lots;
  for (int i = 0; i < 6; ++i) {
    const std::string name = "t" + std::to_string(i);
    policy.push_back(score(name, true, i));
    for (int draw = 0; draw < 3; ++draw) lots.push_back(score(name, draw == 0, i + draw));
  }
  const summary s = summarise(lots, 3);
  CHECK(s.trials == 18);
  CHECK(s.correct == 6);
  CHECK(s.correct_share.value == Approx(1.0 / 3));
  CHECK(s.tokens.value == Approx(2.0 / 3));
  CHECK(s.nll.value == Approx(2.5 + 1));
  CHECK(s.bytes_held == Approx(10));
  // As wide as six trials make it, not eighteen.
  std::vector<double> six;
  for (int i = 0; i < 6; ++i) six.push_back(i + 1);
  CHECK(s.nll.low == Approx(bootstrap_mean(six).low));
  const auto c = compare_trials(measure::nll, policy, lots);
  REQUIRE(c);
  CHECK(c->difference.value == Approx(-1));
  CHECK(c->difference.low == Approx(-1));
  CHECK(std::string(c->verdict) == "better");
  CHECK(compare_trials(measure::correct, policy, lots)->difference.value == Approx(2.0 / 3));
  // Fewer than five trials: rows decide, the same way.
  const auto few = compare_trials(measure::kl, std::span(policy).first(4), std::span(lots).first(12));
  REQUIRE(few);
  CHECK(few->difference.value == Approx(-1));
  lots[4].trial = "other";
  CHECK_FALSE(compare_trials(measure::nll, policy, lots));
  lots.pop_back();
  CHECK_FALSE(compare_trials(measure::nll, policy, lots));
}
