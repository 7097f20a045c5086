// SPDX-License-Identifier: Apache-2.0
#include "cell.hpp"

#include "report.hpp"

namespace lab {
namespace {

using engine::json;

void add_figures(const summary& s, const summary& full, measure m, const matrix_row& row, std::size_t values,
                 double sealed_bits, json& out) {
  out["trials"] = s.trials;
  if (m != measure::kl) {
    out["correct"] = s.correct;
    out["correct_share"] = to_json(s.correct_share);
    out["tokens"] = to_json(s.tokens);
  }
  out["kl_mean"] = s.kl.value;
  out["kl_low"] = s.kl.low;
  out["kl_high"] = s.kl.high;
  out["kl_p99"] = s.kl_p99;
  out["top1"] = s.top1;
  out["top5"] = s.top5;
  out["nll"] = s.nll.value;
  out["nll_low"] = s.nll.low;
  out["nll_high"] = s.nll.high;
  out["nll_full"] = full.nll.value;
  out["bytes_held"] = s.bytes_held;
  out["bytes_full"] = s.bytes_full;
  out["bytes_state"] = s.bytes_state;
  const double held = s.values_held > 0 ? 8 * s.bytes_held / s.values_held : 0;
  out["bits_per_value"] = sealed_bits > 0 ? sealed_bits : held;
  out["bits_with_open"] = held;
  out["tokens_held"] = s.values_held / static_cast<double>(values);
  if (m == measure::kl) out["by_distance"] = by_distance(row.trials);
}

std::vector<trial_score> scores_of(const json& cell, engine::status& problem) {
  std::vector<trial_score> out;
  if (!cell.is_object() || cell.value("schema", "") != "kvcache.lab.cell.v1" || !cell.contains("scores") ||
      !cell.contains("settings")) {
    problem = engine::bad_input("bad_type", "schema", "not a cell");
    return out;
  }
  for (const json& score : cell["scores"]) {
    auto read = score_from_json(score);
    if (!read) {
      problem = read.error();
      return out;
    }
    out.push_back(std::move(*read));
  }
  return out;
}

}  // namespace

engine::result<json> run_cell(const lab_options& options, const laboratory& lab, const std::string& policy,
                              const std::string& task, int length, bool controls, bench& where) {
  matrix_plan plan;
  plan.policies = {policy};
  plan.tasks = {task};
  plan.lengths = {length};
  plan.controls = controls;
  result_store store;
  auto groups = run_matrix(options, lab, plan, where, store);
  if (!groups) return groups.error();
  const matrix_group& group = groups->front();
  const measure m = find_task(task)->judged_by;
  const matrix_row& row = *group.find(policy, "");
  const summary full = summarise(group.find("", "full")->trials);
  const std::vector<std::string> warnings = warnings_of(*groups, options);
  auto report = report_json(*groups, warnings);
  if (!report) return report.error();
  const json& told = (*report)["groups"][0];
  json out = {{"schema", "kvcache.lab.cell.v1"}, {"policy", policy}, {"task", task}};
  add_figures(summarise(row.trials), full, m, row, where.values_per_token(), where.sealed_bits(policy), out);
  for (const char* key : {"judged_by", "measurable", "gate", "context_tokens", "settings"})
    out[key] = told[key];
  out["warnings"] = warnings;
  out["rows"] = told["rows"];
  out["scores"] = json::array();
  for (const trial_score& score : row.trials) out["scores"].push_back(to_json(score));
  return out;
}

engine::result<json> compare_cells(const json& a, const json& b) {
  engine::status problem;
  const auto first = scores_of(a, problem);
  if (!problem) return problem.error();
  const auto second = scores_of(b, problem);
  if (!problem) return problem.error();
  const setting_difference differs = first_difference(a["settings"], b["settings"]);
  if (!differs.name.empty())
    return engine::bad_input("not_comparable", differs.name, differs.a + " and " + differs.b);
  const task_info* task = find_task(a["task"].get<std::string>());
  if (task == nullptr) return engine::bad_input("bad_value", "task", a["task"].dump());
  const auto found = compare_trials(task->judged_by, first, second);
  if (!found) return found.error();
  return json{{"schema", "kvcache.lab.compare.v1"},
              {"task", task->name},
              {"judged_by", name_of(task->judged_by)},
              {"a", a["policy"]},
              {"b", b["policy"]},
              {"difference", to_json(found->difference)},
              {"verdict", std::string(found->verdict)},
              {"bytes_a", a["bytes_held"]},
              {"bytes_b", b["bytes_held"]},
              {"settings", a["settings"]}};
}

}  // namespace lab
