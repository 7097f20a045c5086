// SPDX-License-Identifier: Apache-2.0
#include "user_tasks.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace lab {
namespace {

using nlohmann::json;

engine::error wrong(const char* code, const std::string& field, std::string value) {
  return engine::bad_input(code, field, std::move(value));
}

std::string shown(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::optional<engine::error> check_keys(const json& object) {
  constexpr const char* known[] = {"prompt", "question", "answer", "options", "right", "chat"};
  for (const auto& item : object.items()) {
    const auto same = [&](const char* name) { return item.key() == name; };
    if (std::none_of(std::begin(known), std::end(known), same))
      return wrong("unknown_key", item.key(), shown(item.value()));
  }
  for (const char* key : {"prompt", "question", "answer"}) {
    if (object.contains(key) && !object[key].is_string()) return wrong("bad_type", key, shown(object[key]));
  }
  if (object.contains("chat") && !object["chat"].is_boolean())
    return wrong("bad_type", "chat", shown(object["chat"]));
  if (!object.contains("prompt")) return wrong("missing", "prompt", "absent");
  if (object.contains("answer") == object.contains("options"))
    return wrong(object.contains("answer") ? "bad_value" : "missing", "answer",
                 "one of answer and options is needed");
  if (object.contains("right") && !object.contains("options"))
    return wrong("bad_value", "right", "needs options");
  return std::nullopt;
}

std::optional<engine::error> check_options(const json& object) {
  if (!object.contains("options")) return std::nullopt;
  const json& options = object["options"];
  const auto is_text = [](const json& option) { return option.is_string(); };
  if (!options.is_array() || !std::all_of(options.begin(), options.end(), is_text))
    return wrong("bad_type", "options", shown(options));
  if (options.size() < 2) return wrong("bad_value", "options", "at least two are needed");
  if (!object.contains("right")) return wrong("missing", "right", "absent");
  const json& right = object["right"];
  if (!right.is_number_unsigned() || right.get<std::size_t>() >= options.size())
    return wrong("bad_value", "right", shown(right));
  return std::nullopt;
}

engine::result<user_task> read_line(std::string_view line, const engine::tokenizer& text) {
  const json object = json::parse(line.begin(), line.end(), nullptr, false);
  if (object.is_discarded() || !object.is_object())
    return wrong("not_json", "line", std::string(line.substr(0, 60)));
  if (const auto e = check_keys(object)) return *e;
  if (const auto e = check_options(object)) return *e;
  const auto handling = object.value("chat", false) ? engine::specials::parse : engine::specials::as_text;
  user_task out;
  out.prompt = text.encode(object["prompt"].get<std::string>(), handling);
  out.question = text.encode(object.value("question", std::string()), handling);
  const json options = object.contains("options") ? object["options"] : json::array({object["answer"]});
  for (const json& option : options) {
    out.options.push_back(text.encode(option.get<std::string>(), handling));
    if (out.options.back().empty())
      return wrong("bad_value", object.contains("options") ? "options" : "answer", "no tokens");
  }
  out.right = object.value("right", std::size_t{0});
  if (out.prompt.size() < 2) return wrong("bad_value", "prompt", "at least two tokens are needed");
  return out;
}

}  // namespace

engine::result<std::vector<user_task>> read_user_tasks(std::string_view jsonl,
                                                       const engine::tokenizer& text) {
  std::vector<user_task> out;
  int number = 0;
  while (!jsonl.empty()) {
    const std::size_t end = std::min(jsonl.find('\n'), jsonl.size());
    const std::string_view line = jsonl.substr(0, end);
    jsonl.remove_prefix(std::min(end + 1, jsonl.size()));
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    auto task = read_line(line, text);
    if (!task) {
      engine::error e = task.error();
      e.line = number;
      return e;
    }
    task->line = number;
    out.push_back(std::move(*task));
  }
  if (out.empty()) return wrong("missing", "lines", "none");
  return out;
}

}  // namespace lab
