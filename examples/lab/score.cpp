// SPDX-License-Identifier: Apache-2.0
#include "score.hpp"

#include <algorithm>

#include "sampling.hpp"

namespace lab {

std::string_view name_of(mode m) {
  return m == mode::oneshot ? "oneshot" : "stream";
}

namespace {

std::span<const float> row_at(const std::vector<float>& rows, std::size_t row, int vocabulary) {
  const auto width = static_cast<std::size_t>(vocabulary);
  return std::span<const float>(rows).subspan(row * width, width);
}

// -log p of what the row should predict.
double negative_log(const continuation& option, const option_rows& rows, std::size_t index, std::size_t row,
                    int vocabulary) {
  return rows.sums[index][row] -
         double{row_at(rows.logits[index], row, vocabulary)[static_cast<std::size_t>(option.targets[row])]};
}

double sum_nll(const continuation& option, const option_rows& rows, std::size_t index, int vocabulary) {
  double sum = 0;
  for (std::size_t row = 0; row < option.targets.size(); ++row) {
    if (option.targets[row] != unscored) sum += negative_log(option, rows, index, row, vocabulary);
  }
  return sum;
}

// Rows that are compared with the full cache: those that predict an answer, and the last one of a running
// text, which predicts what the text no longer shows.
std::vector<std::size_t> compared_rows(const continuation& option) {
  std::vector<std::size_t> out;
  for (std::size_t row = 0; row < option.targets.size(); ++row) {
    if (option.targets[row] != unscored || row + 1 == option.targets.size()) out.push_back(row);
  }
  return out;
}

void compare_with_full(const trial& t, const continuation& right, const option_rows& rows,
                       const option_rows& full, bench& where, trial_score& out) {
  const auto here = compared_rows(right);
  const auto there = compared_rows(t.options[t.right]);
  std::vector<row_difference> all(std::min(here.size(), there.size()));
  const int width = where.vocabulary();
  where.each(static_cast<int>(all.size()), [&](int index) {
    const auto i = static_cast<std::size_t>(index);
    all[i] = compare_rows(row_at(full.logits[t.right], there[i], width), full.sums[t.right][there[i]],
                          row_at(rows.logits[t.right], here[i], width), rows.sums[t.right][here[i]]);
  });
  for (const row_difference& d : all) {
    out.kl.push_back(d.kl);
    out.top1.push_back(d.top1 ? 1 : 0);
    out.top5.push_back(d.top5);
  }
}

}  // namespace

trial_score score_rows(const trial& t, std::span<const continuation> options, const option_rows& rows,
                       const option_rows* full, bench& where) {
  const int vocabulary = where.vocabulary();
  trial_score out;
  out.trial = t.name;
  std::vector<double> sums;
  for (std::size_t i = 0; i < options.size(); ++i) sums.push_back(sum_nll(options[i], rows, i, vocabulary));
  const continuation& right = options[t.right];
  for (std::size_t row = 0; row < right.targets.size(); ++row) {
    if (right.targets[row] == unscored) continue;
    const auto logits = row_at(rows.logits[t.right], row, vocabulary);
    ++out.tokens;
    const bool is_right = engine::greedy(logits) == right.targets[row];
    out.tokens_right += is_right ? 1 : 0;
    out.right.push_back(is_right ? 1 : 0);
    out.nll.push_back(negative_log(right, rows, t.right, row, vocabulary));
  }
  if (full != nullptr) compare_with_full(t, right, rows, *full, where, out);
  const auto best = static_cast<std::size_t>(std::min_element(sums.begin(), sums.end()) - sums.begin());
  out.correct = options.size() > 1 ? best == t.right : out.tokens > 0 && out.tokens_right == out.tokens;
  return out;
}

int trial_run::max_tokens() const {
  std::size_t longest = 0;
  for (const continuation& option : trial_.options) longest = std::max(longest, option.feed.size());
  for (const continuation& option : trial_.without_context) longest = std::max(longest, option.feed.size());
  return static_cast<int>(trial_.context.size() + longest);
}

// Each option goes on from the same state.
engine::result<option_rows> trial_run::feed_options(subject& held, std::span<const continuation> options) {
  option_rows out;
  out.logits.resize(options.size());
  out.sums.resize(options.size());
  for (std::size_t i = 0; i < options.size(); ++i) {
    const bool last = i + 1 == options.size();
    std::unique_ptr<subject> copy;
    if (!last) {
      auto forked = held.fork({});
      if (!forked) return forked.error();
      copy = std::move(*forked);
    }
    if (auto s = (last ? held : *copy).feed(options[i].feed, &out.logits[i]); !s) return s.error();
    out.sums[i].resize(options[i].feed.size());
    bench_.each(static_cast<int>(out.sums[i].size()), [&](int row) {
      const auto at = static_cast<std::size_t>(row);
      out.sums[i][at] = engine::log_sum_exp(row_at(out.logits[i], at, bench_.vocabulary()));
    });
  }
  return out;
}

// The context is complete: what it holds is noted, then the answer is fed.
engine::result<trial_score> trial_run::go_on(subject& held) {
  trial_score sizes;
  sizes.bytes_held = held.bytes_held();
  sizes.bytes_full = held.bytes_full();
  sizes.bytes_state = held.bytes_state();
  sizes.values_held = held.values_held();
  auto rows = feed_options(held, trial_.options);
  if (!rows) return rows.error();
  const option_rows* got = &*rows;
  if (full_rows_.logits.empty()) {  // the first one is the full cache
    full_rows_ = std::move(*rows);
    got = &full_rows_;
  }
  trial_score out = score_rows(trial_, trial_.options, *got, &full_rows_, bench_);
  out.bytes_held = sizes.bytes_held;
  out.bytes_full = sizes.bytes_full;
  out.bytes_state = sizes.bytes_state;
  out.values_held = sizes.values_held;
  return out;
}

engine::result<trial_score> trial_run::full() {
  auto opened = bench_.open("full", mode::oneshot, max_tokens());
  if (!opened) return opened.error();
  prefilled_ = std::move(*opened);
  if (auto s = prefilled_->feed(trial_.context, nullptr); !s) return s.error();
  auto held = prefilled_->fork("full");
  if (!held) return held.error();
  return go_on(**held);
}

engine::result<trial_score> trial_run::none() {
  auto opened = bench_.open("full", mode::oneshot, max_tokens());
  if (!opened) return opened.error();
  const auto rows = feed_options(**opened, trial_.without_context);
  if (!rows) return rows.error();
  trial_score out = score_rows(trial_, trial_.without_context, *rows, &full_rows_, bench_);
  out.bytes_full = prefilled_->bytes_full();
  return out;
}

engine::result<trial_score> trial_run::policy(const std::string& text, mode how) {
  const bool forked = how == mode::oneshot && bench_.forks(text);
  auto held = forked ? prefilled_->fork(text) : bench_.open(text, how, max_tokens());
  if (!held) return held.error();
  if (!forked) {
    if (auto s = (*held)->feed(trial_.context, nullptr); !s) return s.error();
  }
  if (how == mode::oneshot) {
    if (auto s = (*held)->compress(); !s) return s.error();
  }
  return go_on(**held);
}

}  // namespace lab
