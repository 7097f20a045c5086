// SPDX-License-Identifier: Apache-2.0
#include "matrix.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>

namespace lab {
namespace {

using engine::json;

int equal_tokens(std::size_t bytes, double token_bytes, int block) {
  const double blocks = static_cast<double>(bytes) / (token_bytes * block);
  return std::max(1, block * static_cast<int>(std::lround(blocks)));
}

// A task whose prompts are as long as they are is run once.
std::vector<std::pair<std::string, int>> groups_of(const matrix_plan& plan) {
  std::vector<std::pair<std::string, int>> out;
  for (const std::string& task : plan.tasks) {
    const task_info* info = find_task(task);
    if (info != nullptr && !info->has_length) {
      out.emplace_back(task, 0);
    } else {
      for (const int length : plan.lengths) out.emplace_back(task, length);
    }
  }
  return out;
}

std::vector<matrix_row> rows_of(const matrix_plan& plan) {
  std::vector<matrix_row> rows = {{"", "full", 1, {}}, {"", "none", 1, {}}};
  for (const std::string& policy : plan.policies) {
    rows.push_back({policy, "", 1, {}});
    if (!plan.controls || policy == "full") continue;
    rows.push_back({policy, "window", 1, {}});
    rows.push_back({policy, "random", random_draws, {}});
  }
  return rows;
}

int runs_of(std::span<const matrix_row> rows) {
  return std::accumulate(rows.begin(), rows.end(), 0,
                         [](int sum, const matrix_row& row) { return sum + row.draws; });
}

double work_of(const trial& t, int runs, mode how) {
  const auto context = static_cast<double>(t.context.size());
  double feed = 0;
  for (const continuation& option : t.options) feed += static_cast<double>(option.feed.size()) + 8;
  const auto n = static_cast<double>(runs);
  return how == mode::stream ? n * (context + feed) : context + n * feed + 0.05 * n * context;
}

class group_runner {
 public:
  group_runner(const lab_options& options, matrix_group& group, bench& where, result_store& store,
               progress& shown)
      : options_(options), group_(group), bench_(where), store_(store), shown_(shown) {}

  engine::status run(const std::vector<trial>& trials) {
    for (std::size_t i = 0; i < trials.size(); ++i) {
      const std::string what = group_.task + (group_.length > 0 ? " " + std::to_string(group_.length) : "") +
                               ", trial " + std::to_string(i + 1) + " of " + std::to_string(trials.size());
      if (auto s = run_trial(trials[i], what); !s) return s;
    }
    return {};
  }

  bool complete(const trial& t) const {
    return std::all_of(group_.rows.begin(), group_.rows.end(), [&](const matrix_row& row) {
      for (int draw = 0; draw < row.draws; ++draw) {
        if (store_.find(key_of(row, draw, t)) == nullptr) return false;
      }
      return true;
    });
  }

 private:
  std::string key_of(const matrix_row& row, int draw, const trial& t) const {
    const std::string control = row.draws > 1 ? row.control + " " + std::to_string(draw) : row.control;
    return result_store::key_of(group_.settings, row.policy, control, t.name);
  }

  engine::status run_trial(const trial& t, const std::string& what) {
    const int runs = runs_of(group_.rows);
    const double share = work_of(t, runs, options_.how) / runs;
    const bool all_known = complete(t);
    trial_run run(bench_, t);
    computed_.clear();
    for (matrix_row& row : group_.rows) {
      for (int draw = 0; draw < row.draws; ++draw) {
        const std::string key = key_of(row, draw, t);
        const trial_score* known = store_.find(key);
        // The full cache runs whenever anything is missing: the others are compared with it.
        if (known == nullptr || (row.control == "full" && !all_known)) {
          if (auto s = run_draw(run, row, draw, t, key, known == nullptr); !s) return s;
          known = store_.find(key);
        }
        row.trials.push_back(*known);
        if (!all_known) shown_.add(share, what + (row.policy.empty() ? "" : ", " + row.policy));
      }
    }
    return {};
  }

  engine::status run_draw(trial_run& run, const matrix_row& row, int draw, const trial& t,
                          const std::string& key, bool is_new) {
    auto made = run_row(run, row, draw, t);
    if (!made) return made.error();
    if (!is_new) return {};
    const json about = {{"policy", row.policy}, {"control", row.control}, {"settings", group_.settings}};
    return store_.add(key, about, *made);
  }

  engine::result<trial_score> run_row(trial_run& run, const matrix_row& row, int draw, const trial& t) {
    if (row.control == "full") return run.full();
    if (row.control == "none") return run.none();
    if (row.control.empty()) {
      auto made = run.policy(row.policy, options_.how);
      if (made) computed_[row.policy] = *made;
      return made;
    }
    const matrix_row beside{row.policy, "", 1, {}};
    const trial_score* policy = store_.find(key_of(beside, 0, t));
    const double token_bytes = static_cast<double>(bench_.bytes_per_token());
    const std::string text = row.control == "window"
                                 ? window_of(policy->bytes_held, token_bytes, bench_.block_tokens())
                                 : random_of(policy->bytes_held, token_bytes, bench_.block_tokens(),
                                             options_.seed + 1 + static_cast<std::uint64_t>(draw));
    // Policies of equal bytes share their controls, and a window is its own.
    const auto at = computed_.find(text);
    if (at != computed_.end()) return at->second;
    auto made = run.policy(text, options_.how);
    if (made) computed_[text] = *made;
    return made;
  }

  const lab_options& options_;
  matrix_group& group_;
  bench& bench_;
  result_store& store_;
  progress& shown_;
  std::map<std::string, trial_score> computed_;  ///< of the trial under way, by their text
};

}  // namespace

const matrix_row* matrix_group::find(const std::string& policy, const std::string& control) const {
  const auto same = [&](const matrix_row& row) { return row.policy == policy && row.control == control; };
  const auto at = std::find_if(rows.begin(), rows.end(), same);
  return at == rows.end() ? nullptr : &*at;
}

void progress::add(double work, const std::string& what) {
  done_ += work;
  const auto now = clock::now();
  if (now - last_ < std::chrono::seconds(1) && done_ < total_) return;
  last_ = now;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double left = done_ > 0 ? seconds * std::max(0.0, total_ - done_) / done_ : 0;
  std::fprintf(stderr, "%3.0f %% done, %d:%02d left: %s\n", 100 * done_ / total_, static_cast<int>(left) / 60,
               static_cast<int>(left) % 60, what.c_str());
}

std::string window_of(std::size_t bytes, double token_bytes, int block) {
  return "window:window=" + std::to_string(equal_tokens(bytes, token_bytes, block));
}

std::string random_of(std::size_t bytes, double token_bytes, int block, std::uint64_t seed) {
  return "random:capacity=" + std::to_string(equal_tokens(bytes, token_bytes, block)) +
         ",seed=" + std::to_string(seed);
}

engine::result<std::vector<matrix_group>> run_matrix(const lab_options& options, const laboratory& lab,
                                                     const matrix_plan& plan, bench& where,
                                                     result_store& store) {
  std::vector<matrix_group> groups;
  std::vector<std::vector<trial>> trials;
  for (const auto& [task, length] : groups_of(plan)) {
    auto made = make_trials(options, lab, task, length);
    if (!made) return made.error();
    matrix_group& group = groups.emplace_back();
    group.task = task;
    group.length = length;
    group.settings = settings_of(options, lab, task, length);
    group.rows = rows_of(plan);
    const auto shorter = [](const trial& a, const trial& b) { return a.context.size() < b.context.size(); };
    const auto [low, high] = std::minmax_element(made->begin(), made->end(), shorter);
    group.shortest = static_cast<int>(low->context.size());
    group.longest = static_cast<int>(high->context.size());
    trials.push_back(std::move(*made));
  }
  double total = 0;
  progress none(1);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const group_runner known(options, groups[i], where, store, none);
    for (const trial& t : trials[i]) {
      if (!known.complete(t)) total += work_of(t, runs_of(groups[i].rows), options.how);
    }
  }
  progress shown(total);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    group_runner runner(options, groups[i], where, store, shown);
    if (auto s = runner.run(trials[i]); !s) return s.error();
  }
  return groups;
}

}  // namespace lab
