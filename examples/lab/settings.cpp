// SPDX-License-Identifier: Apache-2.0
#include "settings.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "generators.hpp"
#include "summary.hpp"

namespace lab {
namespace {

using engine::json;

std::string leaf_of(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : "+") + name;
  return out;
}

// Of this program, so that a results file never answers for another build. Empty where the system does not
// say which file that is.
const std::string& program_hash() {
  static const std::string hash = [] {
    std::ifstream in("/proc/self/exe", std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    return bytes.empty() ? std::string() : hex16(fnv1a(bytes));
  }();
  return hash;
}

engine::error damaged(const std::string& path, int line, const std::string& what) {
  engine::error e = engine::bad_input("bad_value", "results", what);
  e.file = path;
  e.line = line;
  return e;
}

}  // namespace

engine::result<std::unique_ptr<laboratory>> open_laboratory(const lab_options& o) {
  auto out = std::make_unique<laboratory>();
  std::vector<std::string> texts;
  std::uint64_t text_hash = fnv1a({});
  for (const std::string& name : o.text_files) {
    auto read = engine::read_file(name, "--text-file");
    if (!read) return read.error();
    text_hash = fnv1a(*read, text_hash);
    texts.push_back(std::move(*read));
  }
  if (!texts.empty()) out->text_hash = hex16(text_hash);
  if (!o.user_file.empty()) {
    auto read = engine::read_file(o.user_file, "--user-file");
    if (!read) return read.error();
    out->user_tasks = std::move(*read);
    out->user_hash = hex16(fnv1a(out->user_tasks));
  }
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  out->parts = std::move(*parts);
  const auto file = engine::read_file(o.common.model, "--model");
  if (!file) return file.error();
  out->model_hash = hex16(fnv1a(*file));
  for (const std::string& text : texts) {
    const auto ids = out->parts->text->encode(text, engine::specials::as_text);
    out->text.insert(out->text.end(), ids.begin(), ids.end());
  }
  return out;
}

engine::result<std::vector<trial>> make_trials(const lab_options& o, const laboratory& lab,
                                               const std::string& task, int length) {
  task_request r;
  r.task = task;
  r.length = length;
  r.trials = o.trials;
  r.seed = o.seed;
  r.question_inside = o.question_inside;
  r.text = lab.text;
  r.text_name = joined(o.text_files);
  r.score = o.score;
  r.starts = o.starts;
  r.user_tasks = lab.user_tasks;
  auto made = make_trials(r, *lab.parts->text);
  if (!made && task == "user") {
    engine::error e = made.error();
    e.file = o.user_file;
    return e;
  }
  return made;
}

json settings_of(const lab_options& o, const laboratory& lab, const std::string& task, int length) {
  const task_info* info = find_task(task);
  json out = {{"lab", 1},
              {"model", leaf_of(o.common.model)},
              {"model_fnv", lab.model_hash},
              {"simd", std::string(engine::name_of(lab.parts->model->target()))},
              {"kv", o.common.type},
              {"block", o.common.block_size},
              {"chunk", o.common.chunk},
              {"mode", name_of(o.how)},
              {"batch", o.batch},
              {"task", task}};
  if (info != nullptr && info->has_length) out["length"] = length;
  if (task == "user") {
    out["user_file"] = leaf_of(o.user_file);
    out["user_fnv"] = lab.user_hash;
  } else {
    const bool cut = info != nullptr && info->needs_text && !o.starts.empty();
    out["trials"] = cut ? static_cast<int>(o.starts.size()) : o.trials;
  }
  if (info != nullptr && info->needs_text) {
    std::vector<std::string> leaves;
    for (const std::string& name : o.text_files) leaves.push_back(leaf_of(name));
    out["text_file"] = joined(leaves);
    out["text_fnv"] = lab.text_hash;
    out["start"] = o.starts.empty()       ? json(-1)
                   : o.starts.size() == 1 ? json(o.starts.front())
                                          : json(o.starts);
  } else {
    out["seed"] = o.seed;
  }
  if (task == "kl" || task == "repeat" || task == "induction") out["score"] = o.score;
  if (task != "kl") out["question"] = o.question_inside ? "inside" : "after";
  return out;
}

setting_difference first_difference(const json& a, const json& b) {
  for (const auto& item : a.items()) {
    const json other = b.contains(item.key()) ? b[item.key()] : json("absent");
    if (other != item.value()) return {item.key(), item.value().dump(), other.dump()};
  }
  for (const auto& item : b.items()) {
    if (!a.contains(item.key())) return {item.key(), "absent", item.value().dump()};
  }
  return {};
}

engine::result<result_store> result_store::open(const std::string& path) {
  result_store out;
  out.path_ = path;
  if (!std::filesystem::exists(path)) return out;
  const auto content = engine::read_file(path, "results");
  if (!content) return content.error();
  const std::size_t complete = content->rfind('\n') + 1;  // 0 if there is none
  int number = 0;
  for (std::size_t at = 0; at < complete;) {
    const std::size_t end = content->find('\n', at);
    const json line = json::parse(content->begin() + static_cast<std::ptrdiff_t>(at),
                                  content->begin() + static_cast<std::ptrdiff_t>(end), nullptr, false);
    ++number;
    at = end + 1;
    if (!line.is_object() || !line.contains("key") || !line["key"].is_string() || !line.contains("score"))
      return damaged(path, number, "not a result");
    auto score = score_from_json(line["score"]);
    if (!score) return damaged(path, number, score.error().value);
    out.scores_[line["key"].get<std::string>()] = std::move(*score);
  }
  if (complete < content->size()) std::filesystem::resize_file(path, complete);
  return out;
}

std::string result_store::key_of(const json& settings, const std::string& policy, const std::string& control,
                                 const std::string& trial) {
  std::uint64_t hash = fnv1a(engine::to_text(settings), fnv1a(program_hash()));
  for (const std::string* part : {&policy, &control, &trial}) hash = fnv1a("\n" + *part, hash);
  return hex16(hash);
}

const trial_score* result_store::find(const std::string& key) const {
  const auto at = scores_.find(key);
  return at == scores_.end() ? nullptr : &at->second;
}

engine::status result_store::add(const std::string& key, const json& about, const trial_score& score) {
  const json line = {{"key", key}, {"about", about}, {"score", to_json(score)}};
  // As it will be read back, so that a run that was stopped reports the same as one that was not.
  auto kept = score_from_json(json::parse(engine::to_text(line["score"])));
  if (!kept) return kept.error();
  scores_[key] = std::move(*kept);
  if (path_.empty()) return {};
  std::ofstream out(path_, std::ios::app | std::ios::binary);
  out << engine::to_text(line) << '\n';
  out.flush();
  if (out) return {};
  engine::error e = engine::bad_input("cannot_write", "results", std::strerror(errno));
  e.file = path_;
  return e;
}

}  // namespace lab
