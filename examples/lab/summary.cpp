// SPDX-License-Identifier: Apache-2.0
#include "summary.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "example.hpp"

namespace lab {
namespace {

using engine::formatted;
using engine::json;

constexpr double nothing = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t few = 5;           ///< below so many trials their rows are drawn, not the trials
constexpr std::size_t rows_in_run = 16;  ///< neighbouring rows of one text are alike

double share_right(const trial_score& t) {
  return t.tokens == 0 ? 0 : static_cast<double>(t.tokens_right) / t.tokens;
}

double of_trial(measure m, const trial_score& t) {
  if (m == measure::correct) return t.correct ? 1 : 0;
  if (m == measure::tokens) return share_right(t);
  return mean(m == measure::nll ? t.nll : t.kl);
}

const std::vector<double>& rows_of(measure m, const trial_score& t) {
  if (m == measure::tokens) return t.right;
  return m == measure::nll ? t.nll : t.kl;
}

// Means of `draws` neighbours.
std::vector<double> each_trial(measure m, std::span<const trial_score> trials, std::size_t draws) {
  std::vector<double> out(trials.size() / draws);
  for (std::size_t i = 0; i < trials.size(); ++i)
    out[i / draws] += of_trial(m, trials[i]) / static_cast<double>(draws);
  return out;
}

std::vector<double> each_row(measure m, std::span<const trial_score> trials, std::size_t draws) {
  std::vector<double> out;
  for (std::size_t i = 0; i < trials.size(); i += draws) {
    const std::size_t first = out.size();
    out.resize(first + rows_of(m, trials[i]).size());
    for (std::size_t draw = 0; draw < draws; ++draw) {
      const std::vector<double>& rows = rows_of(m, trials[i + draw]);
      for (std::size_t row = 0; row < rows.size(); ++row)
        out[first + row] += rows[row] / static_cast<double>(draws);
    }
  }
  return out;
}

// Trials are the independent unit. Where there are too few of them, runs of rows have to do.
interval mean_with_bounds(measure m, std::span<const trial_score> trials, std::size_t draws) {
  const std::vector<double> values = each_trial(m, trials, draws);
  if (values.size() >= few || m == measure::correct) return bootstrap_mean(values);
  interval out = bootstrap_mean(each_row(m, trials, draws), rows_in_run);
  out.value = mean(values);
  return out;
}

}  // namespace

summary summarise(std::span<const trial_score> trials, int draws) {
  summary out;
  out.trials = static_cast<int>(trials.size());
  std::vector<double> kl, top1, top5;
  for (const trial_score& t : trials) {
    out.correct += t.correct ? 1 : 0;
    kl.insert(kl.end(), t.kl.begin(), t.kl.end());
    top1.insert(top1.end(), t.top1.begin(), t.top1.end());
    top5.insert(top5.end(), t.top5.begin(), t.top5.end());
    const auto n = static_cast<double>(trials.size());
    out.bytes_held += static_cast<double>(t.bytes_held) / n;
    out.bytes_full += static_cast<double>(t.bytes_full) / n;
    out.bytes_state += static_cast<double>(t.bytes_state) / n;
    out.values_held += static_cast<double>(t.values_held) / n;
  }
  out.correct_share = wilson(out.correct, out.trials);
  const auto side_by_side = static_cast<std::size_t>(draws);
  out.tokens = mean_with_bounds(measure::tokens, trials, side_by_side);
  out.nll = mean_with_bounds(measure::nll, trials, side_by_side);
  out.kl = mean_with_bounds(measure::kl, trials, side_by_side);
  out.kl_p99 = kl.empty() ? nothing : quantile(kl, 0.99);
  out.top1 = mean(top1);
  out.top5 = mean(top5);
  return out;
}

interval figure(const summary& s, measure m) {
  if (m == measure::correct) return s.correct_share;
  if (m == measure::tokens) return s.tokens;
  return m == measure::nll ? s.nll : s.kl;
}

gate check_gate(measure m, const summary& full, const summary& none) {
  if (m == measure::kl) return {true, "none: the full cache is the measure itself"};
  if (m == measure::nll) {
    const double worth = none.nll.value - full.nll.value;
    return {worth >= gate_nats,
            formatted("the context is worth %.3f nats a token (full cache %.3f, no context %.3f), at least "
                      "%.2f needed",
                      worth, full.nll.value, none.nll.value, gate_nats)};
  }
  const interval got = figure(full, m);
  const std::string what = m == measure::correct
                               ? formatted("full cache correct in %d of %d", full.correct, full.trials)
                               : formatted("full cache has %.3f of the answer's tokens", got.value);
  return {got.value >= gate_correct && got.value > figure(none, m).value,
          what + formatted(" (%.3f to %.3f; no context %.3f), at least %.2f needed", got.low, got.high,
                           figure(none, m).value, gate_correct)};
}

double quality(measure m, const summary& full, const summary& none, const summary& s) {
  const double top = m == measure::kl ? 0 : figure(full, m).value;
  const double floor = figure(none, m).value;
  if (!(std::abs(top - floor) > 0)) return nothing;
  return (figure(s, m).value - floor) / (top - floor);
}

engine::result<contrast> compare_trials(measure m, std::span<const trial_score> a,
                                        std::span<const trial_score> b) {
  if (a.empty() || b.empty() || b.size() % a.size() != 0)
    return engine::bad_input("not_comparable", "trials",
                             std::to_string(a.size()) + " and " + std::to_string(b.size()));
  const std::size_t draws = b.size() / a.size();
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (a[i / draws].trial != b[i].trial)
      return engine::bad_input("not_comparable", "trial", a[i / draws].trial + " and " + b[i].trial);
  }
  const bool by_rows = a.size() < few && m != measure::correct;
  std::vector<double> first = by_rows ? each_row(m, a, 1) : each_trial(m, a, 1);
  const std::vector<double> second = by_rows ? each_row(m, b, draws) : each_trial(m, b, draws);
  for (std::size_t i = 0; i < first.size() && i < second.size(); ++i) first[i] -= second[i];
  contrast out;
  out.difference = bootstrap_mean(first, by_rows ? rows_in_run : 1);
  if (a.size() < few && !by_rows) {
    out.verdict = "too few trials";
    return out;
  }
  const bool more = out.difference.low > 0;
  const bool less = out.difference.high < 0;
  if (more || less) out.verdict = more == rises(m) ? "better" : "worse";
  return out;
}

engine::json by_distance(std::span<const trial_score> trials) {
  constexpr std::size_t edges[] = {0, 16, 64, 256, std::size_t(1) << 40};
  json out = json::array();
  for (std::size_t bucket = 0; bucket + 1 < std::size(edges); ++bucket) {
    std::vector<double> kl, top1, top5;
    for (const trial_score& t : trials) {
      for (std::size_t row = edges[bucket]; row < std::min(edges[bucket + 1], t.kl.size()); ++row) {
        kl.push_back(t.kl[row]);
        top1.push_back(t.top1[row]);
        top5.push_back(t.top5[row]);
      }
    }
    if (kl.empty()) break;
    out.push_back({{"first", edges[bucket] + 1},
                   {"rows", kl.size()},
                   {"kl_mean", mean(kl)},
                   {"kl_max", *std::max_element(kl.begin(), kl.end())},
                   {"top1", mean(top1)},
                   {"top5", mean(top5)}});
  }
  return out;
}

json to_json(const interval& i) {
  return {{"value", i.value}, {"low", i.low}, {"high", i.high}};
}

json to_json(const summary& s) {
  return {{"trials", s.trials},
          {"correct", s.correct},
          {"correct_share", to_json(s.correct_share)},
          {"tokens", to_json(s.tokens)},
          {"nll", to_json(s.nll)},
          {"kl", to_json(s.kl)},
          {"kl_p99", s.kl_p99},
          {"top1", s.top1},
          {"top5", s.top5},
          {"bytes_held", s.bytes_held},
          {"bytes_full", s.bytes_full},
          {"bytes_state", s.bytes_state},
          {"values_held", s.values_held}};
}

json to_json(const trial_score& s) {
  return {{"trial", s.trial},
          {"correct", s.correct},
          {"tokens", s.tokens},
          {"tokens_right", s.tokens_right},
          {"right", s.right},
          {"nll", s.nll},
          {"kl", s.kl},
          {"top1", s.top1},
          {"top5", s.top5},
          {"bytes_held", s.bytes_held},
          {"bytes_full", s.bytes_full},
          {"bytes_state", s.bytes_state},
          {"values_held", s.values_held}};
}

engine::result<trial_score> score_from_json(const json& j) {
  try {
    trial_score out;
    j.at("trial").get_to(out.trial);
    j.at("correct").get_to(out.correct);
    j.at("tokens").get_to(out.tokens);
    j.at("tokens_right").get_to(out.tokens_right);
    j.at("right").get_to(out.right);
    j.at("nll").get_to(out.nll);
    j.at("kl").get_to(out.kl);
    j.at("top1").get_to(out.top1);
    j.at("top5").get_to(out.top5);
    j.at("bytes_held").get_to(out.bytes_held);
    j.at("bytes_full").get_to(out.bytes_full);
    j.at("bytes_state").get_to(out.bytes_state);
    j.at("values_held").get_to(out.values_held);
    return out;
  } catch (const json::exception& e) {
    return engine::bad_input("bad_type", "score", e.what());
  }
}

}  // namespace lab
