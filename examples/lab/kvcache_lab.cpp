// SPDX-License-Identifier: Apache-2.0
//
// kvcache_lab: what a cache policy costs, at equal bytes, before it is shipped.
//
//   kvcache_lab cell     one policy in one task
//   kvcache_lab run      the matrix, with controls
//   kvcache_lab recall   a model made by hand whose answer is known
//   kvcache_lab compare  two cells
//   kvcache_lab tasks    what there is
//
// Each verb has --help.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cell.hpp"
#include "constructed.hpp"
#include "known.hpp"
#include "recall.hpp"
#include "report.hpp"
#include "session_bench.hpp"

namespace {

using engine::json;
using engine::result;
using lab::lab_options;

struct cell_options {
  lab_options lab;
  std::string policy = "full";
  std::string task;
  int length = 512;
  int prompt = 0;
  int chunks = 0;
  bool controls = false;
};

struct matrix_options {
  lab_options lab;
  std::vector<std::string> policies, tasks;
  std::vector<int> lengths;
  std::string out;
  bool controls = true;
  bool quick = false;
};

engine::error usage(const char* code, const char* field, const std::string& value) {
  return {engine::failure::usage, code, field, value, {}, -1};
}

void add_when_and_where(CLI::App& app, bool& question_inside, lab::mode& how) {
  app.add_option_function<std::string>(
         "--question", [&question_inside](const std::string& text) { question_inside = text == "inside"; },
         "whether the question is compressed with the context or comes after: inside, after (default)")
      ->check(CLI::IsMember({"inside", "after"}));
  app.add_option_function<std::string>(
         "--mode",
         [&how](const std::string& text) { how = text == "stream" ? lab::mode::stream : lab::mode::oneshot; },
         "when the policy acts: oneshot (default), once the context is complete; stream, from the first "
         "token")
      ->check(CLI::IsMember({"oneshot", "stream"}));
}

void add_lab_options(engine::command_line& line, lab_options& o) {
  o.common.chunk = 256;
  o.common.cache = "paged";
  o.common.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  engine::add_common_options(line, o.common);
  CLI::App& app = line.app();
  app.add_option("--text-file", o.text_files,
                 "text for the tasks kl and repeat; several, separated by commas, are one text")
      ->delimiter(',');
  app.add_option("--user-file", o.user_file, "your own trials (JSONL) for the task user");
  app.add_option("--trials", o.trials, "trials of a task")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--seed", o.seed, "seed of the prompts")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--score", o.score, "rows scored at most where a text goes on")
      ->check(CLI::Range(1, 8192))
      ->capture_default_str();
  app.add_option("--start", o.starts,
                 "kl and repeat: first token of each trial, separated by commas; default: --trials of them, "
                 "spread over the text")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 30));
  app.add_option("--batch", o.batch, "texts that share a step while answers are fed, token by token")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--about", o.about, "context length you want to know about: warns if none tested is as long")
      ->check(CLI::Range(1, 1 << 30));
  add_when_and_where(app, o.question_inside, o.how);
}

std::string task_names() {
  std::string out;
  for (const lab::task_info& task : lab::tasks()) out += (out.empty() ? "" : ", ") + std::string(task.name);
  return out;
}

engine::status check_task(const std::string& name, const lab_options& o) {
  const lab::task_info* task = lab::find_task(name);
  if (task == nullptr) return usage("bad_value", "--task", name + "; allowed: " + task_names());
  if (task->needs_text && o.text_files.empty())
    return usage("missing", "--text-file", "the task " + name + " needs one");
  if (name == "user" && o.user_file.empty())
    return usage("missing", "--user-file", "the task user needs one");
  return {};
}

void print_cell(const json& cell) {
  std::printf("%s, %s: kl %.6f (p99 %.4f), top-1 %.3f, nll %.3f (full cache %.3f)\n",
              cell["policy"].get<std::string>().c_str(), cell["task"].get<std::string>().c_str(),
              cell["kl_mean"].get<double>(), cell["kl_p99"].get<double>(), cell["top1"].get<double>(),
              cell["nll"].get<double>(), cell["nll_full"].get<double>());
  if (cell.contains("correct"))
    std::printf("  correct in %d of %d trials\n", cell["correct"].get<int>(), cell["trials"].get<int>());
  std::printf("  bytes held %.0f of %.0f, %.3f bits a value (%.3f with open blocks)\n",
              cell["bytes_held"].get<double>(), cell["bytes_full"].get<double>(),
              cell["bits_per_value"].get<double>(), cell["bits_with_open"].get<double>());
  std::printf("  %s: %s\n", cell["measurable"].get<bool>() ? "gate" : "not measurable with this model",
              cell["gate"].get<std::string>().c_str());
  for (const json& warning : cell["warnings"])
    std::printf("  warning: %s\n", warning.get<std::string>().c_str());
}

// Blocks are alike for all rows, so that they can be compared.
void choose_block(const std::vector<std::string>& policies, lab_options& o) {
  for (const std::string& text : policies) {
    const auto policy = lab::parse_lab_policy(text);
    if (policy && policy->packs()) o.common.block_size = engine::block_size_of(o.common, true);
  }
}

// Chunks of 1,024 tokens, each from an empty cache, the second half of each scored.
void cut_into_chunks(cell_options& o) {
  constexpr int chunk = 1024;
  o.task = "kl";
  o.prompt = chunk / 2;
  o.lab.score = chunk / 2 - 1;
  o.lab.starts.clear();
  for (int i = 0; i < o.chunks; ++i) o.lab.starts.push_back(i * chunk);
}

result<json> cell(cell_options o) {
  if (o.chunks > 0) cut_into_chunks(o);
  const auto policy = lab::check_policy(o.policy);
  if (!policy) return policy.error();
  choose_block({o.policy}, o.lab);
  if (o.task.empty()) return usage("missing", "--task", "one of " + task_names());
  if (auto s = check_task(o.task, o.lab); !s) return s.error();
  const auto lab = lab::open_laboratory(o.lab);
  if (!lab) return lab.error();
  lab::session_bench bench(o.lab.common, *(*lab)->parts, o.lab.batch);
  const int length = o.prompt > 0 ? o.prompt : o.length;
  auto document = lab::run_cell(o.lab, **lab, *policy, o.task, length, o.controls, bench);
  if (document && !o.lab.common.as_json) print_cell(*document);
  return document;
}

engine::status write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  file.close();
  if (file) return {};
  return engine::bad_input("cannot_write", "--out", path.string());
}

// The smallest matrix that tells policies apart, in minutes.
void make_quick(matrix_options& o) {
  if (o.tasks.empty()) o.tasks = {"passkey", "repeat", "kl"};
  if (o.lengths.empty()) o.lengths = {256};
  if (o.policies.empty())
    o.policies = {"streaming_llm:sinks=4,window=60,positions=text", "h2o:heavy=32,recent=32",
                  "snapkv:capacity=64,window=32,kernel=1"};
  o.lab.trials = std::min(o.lab.trials, 3);
  o.lab.score = std::min(o.lab.score, 64);
}

void make_whole(matrix_options& o) {
  if (o.tasks.empty())
    o.tasks = {"passkey", "two_keys", "first_turn", "repeat", "key_values", "edits", "sums", "kl"};
  if (o.lengths.empty()) o.lengths = {512, 1024};
  if (o.policies.empty())
    o.policies = {"streaming_llm:sinks=4,window=124,positions=text", "h2o:heavy=64,recent=64",
                  "snapkv:capacity=128,window=32,kernel=1"};
}

result<json> matrix(matrix_options o) {
  if (o.quick) make_quick(o);
  make_whole(o);
  if (o.lab.text_files.empty())
    std::erase_if(o.tasks, [](const std::string& t) {
      return lab::find_task(t) != nullptr && lab::find_task(t)->needs_text;
    });
  lab::matrix_plan plan;
  for (const std::string& text : o.policies) {
    auto policy = lab::check_policy(text);
    if (!policy) return policy.error();
    plan.policies.push_back(std::move(*policy));
  }
  for (const std::string& task : o.tasks) {
    if (auto s = check_task(task, o.lab); !s) return s.error();
  }
  choose_block(o.policies, o.lab);
  plan.tasks = o.tasks;
  plan.lengths = o.lengths;
  plan.controls = o.controls;
  std::error_code code;
  std::filesystem::create_directories(o.out, code);
  auto store = lab::result_store::open(o.out + "/results.jsonl");
  if (!store) return store.error();
  const auto lab = lab::open_laboratory(o.lab);
  if (!lab) return lab.error();
  lab::session_bench bench(o.lab.common, *(*lab)->parts, o.lab.batch);
  const auto groups = lab::run_matrix(o.lab, **lab, plan, bench, *store);
  if (!groups) return groups.error();
  const auto warnings = lab::warnings_of(*groups, o.lab);
  const auto report = lab::report_json(*groups, warnings);
  if (!report) return report.error();
  const std::filesystem::path out(o.out);
  const std::string table = lab::report_markdown(*report);
  if (auto s = write_file(out / "report.json", engine::to_text(*report) + "\n"); !s) return s.error();
  if (auto s = write_file(out / "report.md", table); !s) return s.error();
  if (auto s = write_file(out / "report.svg", lab::report_svg(*report)); !s) return s.error();
  if (!o.lab.common.as_json) std::printf("%s", table.c_str());
  if (o.quick) {
    if (auto s = lab::check_known(*report); !s) return s.error();
  }
  return report;
}

result<json> read_json(const std::string& path) {
  const auto text = engine::read_file(path, "file");
  if (!text) return text.error();
  json document = json::parse(*text, nullptr, false);
  if (!document.is_discarded()) return document;
  engine::error e = engine::bad_input("not_json", "file", path);
  e.file = path;
  return e;
}

result<json> compare(const std::string& a, const std::string& b, bool as_json) {
  const auto first = read_json(a);
  if (!first) return first.error();
  const auto second = read_json(b);
  if (!second) return second.error();
  auto document = lab::compare_cells(*first, *second);
  if (document && !as_json) {
    const json& d = (*document)["difference"];
    std::printf(
        "%s is %s than %s in %s: %s %.4f (%.4f to %.4f)\n", (*document)["a"].get<std::string>().c_str(),
        (*document)["verdict"].get<std::string>().c_str(), (*document)["b"].get<std::string>().c_str(),
        (*document)["task"].get<std::string>().c_str(), (*document)["judged_by"].get<std::string>().c_str(),
        d["value"].get<double>(), d["low"].is_number() ? d["low"].get<double>() : 0,
        d["high"].is_number() ? d["high"].get<double>() : 0);
  }
  return document;
}

result<json> list_tasks(const cell_options& o) {
  json out = {{"schema", "kvcache.lab.tasks.v1"}, {"tasks", json::array()}};
  for (const lab::task_info& task : lab::tasks()) {
    out["tasks"].push_back({{"name", task.name},
                            {"judged_by", lab::name_of(task.judged_by)},
                            {"has_length", task.has_length},
                            {"needs_text", task.needs_text},
                            {"what", task.what}});
    if (!o.lab.common.as_json && o.lab.common.model.empty())
      std::printf("%-11s %-8s %s\n", std::string(task.name).c_str(),
                  std::string(lab::name_of(task.judged_by)).c_str(), std::string(task.what).c_str());
  }
  return out;
}

int run_cell_verb(int argc, char** argv) {
  engine::command_line line("One policy in one task: what it costs, with interval and gate.",
                            "kvcache_lab cell");
  cell_options o;
  add_lab_options(line, o.lab);
  CLI::App& app = line.app();
  app.add_option("--policy", o.policy, "policy, format or both, such as h2o:heavy=64,recent=64+kv8")
      ->required();
  app.add_option("--task", o.task, "task: " + task_names());
  app.add_option(
         "--chunks", o.chunks,
         "kl over so many chunks of 1,024 tokens, each from an empty cache, scored from position 512 on")
      ->check(CLI::Range(1, 1000));
  app.add_option("--length", o.length, "tokens of the prompt, roughly")
      ->check(CLI::Range(16, 8192))
      ->capture_default_str();
  app.add_option("--prompt", o.prompt, "kl: tokens of the prompt, exactly")->check(CLI::Range(2, 8192));
  app.add_flag("--controls", o.controls, "also window and random at equal bytes");
  return engine::run_program(line, argc, argv, o.lab.common, [&] { return cell(o); });
}

int run_matrix_verb(int argc, char** argv) {
  engine::command_line line("Policies in tasks at lengths, each beside its controls.", "kvcache_lab run");
  matrix_options o;
  add_lab_options(line, o.lab);
  CLI::App& app = line.app();
  app.add_option("--policy", o.policies,
                 "policies and formats (kv4, h2o:...+kv8); may be given several times")
      ->take_all()
      ->expected(1);
  app.add_option("--task", o.tasks, "tasks, separated by commas")->delimiter(',');
  app.add_option("--length", o.lengths, "lengths, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(16, 8192));
  app.add_option("--out", o.out, "folder for report.json, report.md, report.svg and results.jsonl")
      ->required();
  app.add_flag("!--no-controls", o.controls, "without window and random at equal bytes");
  app.add_flag("--quick", o.quick, "a small matrix: at most 3 minutes on two cores");
  return engine::run_program(line, argc, argv, o.lab.common, [&] { return matrix(o); });
}

void print_recall(const std::vector<lab::recall_row>& rows, int asked) {
  std::printf("%-62s %10s %8s %8s %8s\n", "policy", "bytes held", "right", "unknown", "pairs held");
  for (const lab::recall_row& row : rows) {
    const std::string name =
        row.control.empty() || row.control == "full" ? row.policy : "  " + row.policy + " (control)";
    std::printf("%-62s %8.1f %% %4d/%d %8d %8d\n", name.c_str(),
                100 * static_cast<double>(row.bytes_held) / static_cast<double>(row.bytes_full), row.right,
                asked, row.unknown, row.held);
  }
}

result<json> recall(lab::recall_options o) {
  if (o.asked > o.length)
    return usage("bad_value", "--asked", std::to_string(o.asked) + "; at most the length");
  if (o.policies.empty()) o.policies = {"window:" + std::to_string(o.length / 4)};
  const auto rows = lab::run_recall(o);
  if (!rows) return rows.error();
  auto document = lab::recall_document(o, *rows);
  if (!o.common.as_json) print_recall(*rows, o.asked);
  return document;
}

int run_recall_verb(int argc, char** argv) {
  engine::command_line line(
      "A model made by hand that answers exactly if the right token is held: what a policy kept, and whether "
      "the cache gives back what it holds.",
      "kvcache_lab recall");
  lab::recall_options o;
  o.common.chunk = 256;
  o.common.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  engine::add_common_options(line, o.common);
  CLI::App& app = line.app();
  app.get_option("--model")->required(false)->group("");
  app.get_option("--cache")->group("");
  app.add_option("--policy", o.policies, "policies; may be given several times")->take_all()->expected(1);
  app.add_option("--length", o.length, "tokens of the text: pairs")
      ->check(CLI::Range(2, lab::most_pairs))
      ->capture_default_str();
  app.add_option("--asked", o.asked, "pairs that are asked for, evenly spread")
      ->check(CLI::Range(1, lab::most_pairs))
      ->capture_default_str();
  app.add_option("--seed", o.seed, "seed of the text")->check(CLI::Range(0, 1 << 20))->capture_default_str();
  add_when_and_where(app, o.question_inside, o.how);
  return engine::run_program(line, argc, argv, o.common, [&] { return recall(o); });
}

int run_compare_verb(int argc, char** argv) {
  engine::command_line line("Two cells. Refuses when a setting differs, and names it.",
                            "kvcache_lab compare");
  engine::common_options common;
  std::string a, b;
  CLI::App& app = line.app();
  app.add_option("--a", a, "a cell's document")->required();
  app.add_option("--b", b, "another one's")->required();
  app.add_flag("--json", common.as_json, "one JSON document on stdout");
  return engine::run_program(line, argc, argv, common, [&] { return compare(a, b, common.as_json); });
}

int run_tasks_verb(int argc, char** argv) {
  engine::command_line line("The tasks there are.", "kvcache_lab tasks");
  cell_options o;
  line.add("--json", o.lab.common.as_json, "one JSON document on stdout");
  return engine::run_program(line, argc, argv, o.lab.common, [&] { return list_tasks(o); });
}

}  // namespace

int main(int argc, char** argv) {
  const auto verb = [&](const char* name) { return argc > 1 && std::strcmp(argv[1], name) == 0; };
  if (verb("cell")) return run_cell_verb(argc - 1, argv + 1);
  if (verb("run")) return run_matrix_verb(argc - 1, argv + 1);
  if (verb("recall")) return run_recall_verb(argc - 1, argv + 1);
  if (verb("compare")) return run_compare_verb(argc - 1, argv + 1);
  if (verb("tasks")) return run_tasks_verb(argc - 1, argv + 1);
  engine::command_line line(
      "What a cache policy costs, at equal bytes. Verbs: cell, run, recall, compare, tasks; each has --help.",
      "kvcache_lab");
  engine::common_options common;
  line.add("--json", common.as_json, "errors as a JSON document");
  return engine::run_program(line, argc, argv, common, []() -> result<json> {
    return usage("missing", "verb", "one of cell, run, recall, compare, tasks");
  });
}
