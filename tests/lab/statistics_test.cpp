// SPDX-License-Identifier: Apache-2.0
#include "statistics.hpp"

#include <catch2/catch.hpp>
#include <cmath>

using namespace lab;

TEST_CASE("Wilson's interval has the published values") {
  // Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
  const auto check = [](int successes, int trials, double low, double high) {
    const interval w = wilson(successes, trials);
    CHECK(w.value == Approx(static_cast<double>(successes) / trials));
    CHECK(w.low == Approx(low).margin(5e-5));
    CHECK(w.high == Approx(high).margin(5e-5));
  };
  check(81, 263, 0.2553, 0.3662);
  check(15, 148, 0.0624, 0.1605);
  check(0, 20, 0.0, 0.1611);
  check(1, 29, 0.0061, 0.1718);
  CHECK(wilson(20, 20).high == 1);
  CHECK(wilson(20, 20).low == Approx(1 - 0.1611).margin(5e-5));
  CHECK(wilson(0, 0).low == 0);
  CHECK(wilson(0, 0).high == 1);
}

TEST_CASE("a bootstrap interval is as wide as theory says, and repeats") {
  std::vector<double> values;
  for (int i = 0; i < 400; ++i) values.push_back(i % 2);
  // Independent values of deviation 0.5: 1.96 * 0.5 / 20 to each side.
  std::vector<double> mixed = values;
  for (std::size_t i = 0; i < mixed.size(); ++i) mixed[i] = (i * 7919 % 400) < 200 ? 0 : 1;
  const interval b = bootstrap_mean(mixed);
  CHECK(b.value == Approx(0.5));
  CHECK(b.low == Approx(0.451).margin(0.008));
  CHECK(b.high == Approx(0.549).margin(0.008));
  CHECK(bootstrap_mean(mixed).low == b.low);
  std::vector<double> fine;
  for (int i = 0; i < 50; ++i) fine.push_back(std::sin(i));
  CHECK(bootstrap_mean(fine, 1, 2).low != bootstrap_mean(fine, 1, 1).low);
}

TEST_CASE("neighbours that are alike widen the interval") {
  std::vector<double> values;
  for (int i = 0; i < 512; ++i) values.push_back(i / 32 % 2);
  const interval alone = bootstrap_mean(values, 1);
  const interval runs = bootstrap_mean(values, 32);
  CHECK(runs.high - runs.low > 2 * (alone.high - alone.low));
}

TEST_CASE("values at the ends count as much as those between them") {
  std::vector<double> values(40, 0.0);
  for (std::size_t i = 0; i < 8; ++i) values[i] = values[39 - i] = 10;
  const interval b = bootstrap_mean(values, 16);
  CHECK(b.value == Approx(4));
  CHECK(b.low < 4);
  CHECK(b.high > 4);
  CHECK((b.low + b.high) / 2 == Approx(4).margin(0.5));
}

TEST_CASE("too few values give no bounds instead of wrong ones") {
  CHECK(std::isnan(bootstrap_mean(std::vector<double>{1.0}).low));
  CHECK(std::isnan(bootstrap_mean(std::vector<double>{1.0, 2.0, 3.0}, 2).high));
  CHECK(std::isnan(mean({})));
}

TEST_CASE("a quantile is the value at the nearest rank") {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  CHECK(quantile(values, 0.99) == 99);
  CHECK(quantile(values, 0.5) == 50);
  CHECK(quantile(values, 1) == 100);
  CHECK(quantile({7}, 0.01) == 7);
}

TEST_CASE("rows are compared by divergence and by their most likely tokens") {
  const std::vector<float> full = {0, 0, 0, 0, 0, 0, 0, 0};
  CHECK(compare_rows(full, full).kl == 0);
  // p = 1/2, 1/2 against q = 3/4, 1/4: 1/2 ln(2/3) + 1/2 ln 2.
  const std::vector<float> p = {0, 0};
  const std::vector<float> q = {static_cast<float>(std::log(3.0)), 0};
  CHECK(compare_rows(p, q).kl == Approx(0.5 * std::log(2.0 / 3) + 0.5 * std::log(2.0)).margin(1e-6));
  CHECK(compare_rows(q, p).kl == Approx(0.75 * std::log(1.5) + 0.25 * std::log(0.5)).margin(1e-6));
  const std::vector<float> a = {9, 8, 7, 6, 5, 1, 1, 1};
  const std::vector<float> b = {8, 9, 1, 1, 5, 6, 7, 0};
  CHECK_FALSE(compare_rows(a, b).top1);
  CHECK(compare_rows(a, b).top5 == Approx(0.6));  // 0, 1 and 4
  CHECK(compare_rows(a, a).top1);
  CHECK(compare_rows(a, a).top5 == Approx(1));
  // An offset of all logits means nothing.
  std::vector<float> shifted = a;
  for (float& x : shifted) x += 100;
  CHECK(compare_rows(a, shifted).kl == Approx(0).margin(1e-6));
  // Ties go to the lower token, as in the model's greedy choice.
  const std::vector<float> ties = {3, 1, 3, 3, 3, 3, 3};
  const std::vector<float> lower = {9, 1, 8, 7, 6, 5, 4};  // 0, 2, 3, 4 and 5
  CHECK(compare_rows(ties, lower).top1);
  CHECK(compare_rows(ties, lower).top5 == Approx(1));
}
