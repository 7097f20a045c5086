// SPDX-License-Identifier: Apache-2.0
#include "workload.hpp"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

namespace engine {
namespace {

using nlohmann::json;

constexpr std::int64_t last_arrival = 1'000'000'000;
constexpr std::int64_t most_new = 1 << 24;
constexpr std::int64_t most_samples = 4096;
constexpr std::size_t shown_characters = 60;

std::string shortened(std::string text) {
  if (text.size() <= shown_characters) return text;
  text.resize(shown_characters);
  return text + "...";
}

// A value for a message. Nested ones are not written out: how deep they are is up to the file.
std::string shown(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array of " + std::to_string(value.size());
  return shortened(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

error bad_type(const std::string& field, const json& value) {
  return bad_input("bad_type", field, shown(value));
}

error bad_value(const std::string& field, const json& value) {
  return bad_input("bad_value", field, shown(value));
}

// A key as a field of a message; it may be empty.
std::string named(const std::string& key) {
  return key.empty() ? "\"\"" : shortened(key);
}

// The line as an object; remembers a key that occurs twice in one object, which JSON parsers drop silently.
result<json> parse_object(std::string_view text) {
  std::vector<std::unordered_set<std::string>> keys;
  std::optional<std::string> twice;
  const auto watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  json object = json::parse(text.begin(), text.end(), watch, false);
  if (object.is_discarded()) return bad_input("not_json", "line", shortened(std::string(text)));
  if (!object.is_object()) return bad_type("line", object);
  if (twice) return bad_input("duplicate", named(*twice), "key occurs twice");
  return object;
}

status only_keys(const json& object, const std::string& where, std::initializer_list<const char*> known) {
  for (const auto& [key, value] : object.items()) {
    const bool found =
        std::any_of(known.begin(), known.end(), [&k = key](const char* name) { return k == name; });
    if (!found) return bad_input("unknown_key", where + named(key), shown(value));
  }
  return {};
}

/// Reads the fields of one line into a workload_line.
class line_reader {
 public:
  line_reader(const json& object, workload_line& to) : object_(object), to_(to) {}

  status run() {
    if (status s = only_keys(
            object_, "", {"id", "arrival", "turns", "agent", "max_new", "scope", "n", "temperature", "seed"});
        !s)
      return s;
    for (const char* key : {"id", "turns", "max_new", "scope"}) {
      if (!object_.contains(key)) return bad_input("missing", key, "absent");
    }
    if (status s = text(object_["id"], "id", to_.id); !s) return s;
    if (to_.id.empty()) return bad_value("id", object_["id"]);
    if (status s = turns(); !s) return s;
    if (status s = agent(); !s) return s;
    if (status s = scope(); !s) return s;
    return numbers();
  }

 private:
  static status text(const json& value, const std::string& field, std::string& to) {
    if (!value.is_string()) return bad_type(field, value);
    to = value.get<std::string>();
    return {};
  }

  static status message(const json& value, const std::string& field, chat_message& to) {
    if (!value.is_object()) return bad_type(field, value);
    if (status s = only_keys(value, field + ".", {"role", "content"}); !s) return s;
    for (const char* key : {"role", "content"}) {
      if (!value.contains(key)) return bad_input("missing", field + "." + key, "absent");
    }
    if (status s = text(value["role"], field + ".role", to.role); !s) return s;
    if (to.role != "system" && to.role != "user" && to.role != "assistant")
      return bad_value(field + ".role", value["role"]);
    return text(value["content"], field + ".content", to.content);
  }

  status turns() {
    const json& list = object_["turns"];
    if (!list.is_array()) return bad_type("turns", list);
    if (list.empty()) return bad_value("turns", list);
    for (const json& value : list) {
      const std::string field = "turns[" + std::to_string(to_.turns.size()) + "]";
      if (status s = message(value, field, to_.turns.emplace_back()); !s) return s;
    }
    return {};
  }

  status agent() {
    const auto found = object_.find("agent");
    if (found == object_.end()) return {};
    if (!found->is_array()) return bad_type("agent", *found);
    if (found->empty()) return bad_value("agent", *found);
    for (const json& value : *found) {
      const std::string field = "agent[" + std::to_string(to_.agent.size()) + "]";
      if (status s = text(value, field, to_.agent.emplace_back()); !s) return s;
    }
    return {};
  }

  status scope() {
    const json& value = object_["scope"];
    if (value.is_string()) {
      if (value != "shared") return bad_value("scope", value);
      to_.scope = cache_scope::everyone();
      return {};
    }
    if (!value.is_object()) return bad_type("scope", value);
    if (status s = only_keys(value, "scope.", {"tenant"}); !s) return s;
    if (!value.contains("tenant")) return bad_input("missing", "scope.tenant", "absent");
    std::string tenant;
    if (status s = text(value["tenant"], "scope.tenant", tenant); !s) return s;
    if (tenant.empty()) return bad_value("scope.tenant", value["tenant"]);
    to_.scope = cache_scope::only(std::move(tenant));
    return {};
  }

  // An integer in [least, most]; an absent one leaves `to` as it is.
  template <class Integer>
  status integer(const char* field, std::int64_t least, std::int64_t most, Integer& to) {
    const auto found = object_.find(field);
    if (found == object_.end()) return {};
    if (!found->is_number_integer()) return bad_type(field, *found);
    const bool huge = found->is_number_unsigned() &&
                      found->get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()};
    if (huge || found->get<std::int64_t>() < least || found->get<std::int64_t>() > most)
      return bad_value(field, *found);
    to = static_cast<Integer>(found->get<std::int64_t>());
    return {};
  }

  status numbers() {
    if (status s = integer("arrival", 0, last_arrival, to_.arrival); !s) return s;
    if (status s = integer("max_new", 0, most_new, to_.max_new); !s) return s;
    if (status s = integer("n", 1, most_samples, to_.samples); !s) return s;
    if (to_.samples > 1 && !to_.agent.empty()) return bad_value("n", object_["n"]);  // which answer to go on?
    if (status s = integer("seed", 0, std::numeric_limits<std::int64_t>::max(), to_.how.seed); !s) return s;
    const auto found = object_.find("temperature");
    if (found == object_.end()) return {};
    if (!found->is_number()) return bad_type("temperature", *found);
    to_.how.temperature = found->get<double>();
    if (!(to_.how.temperature >= 0 && to_.how.temperature <= 100)) return bad_value("temperature", *found);
    return {};
  }

  const json& object_;
  workload_line& to_;
};

error located(error e, const std::string& path, std::int64_t line) {
  e.file = path;
  e.line = line;
  return e;
}

/// Puts user messages behind an answer, token by token as encode_chat would have put them.
class follow_up_encoder {
 public:
  explicit follow_up_encoder(const tokenizer& text) : text_(text) {}

  // encode_chat ends with the assistant's header; the length of a first turn is what a second one adds.
  status create() {
    const chat_message first{"system", ""};
    const auto one = text_.encode_chat(std::vector<chat_message>{first});
    if (!one) return one.error();
    const auto two = text_.encode_chat(std::vector<chat_message>{first, first});
    if (!two) return two.error();
    skip_ = two->size() - one->size();
    newline_ = text_.encode("\n", specials::as_text);
    const std::vector<token_id> end = text_.encode("<|im_end|>", specials::parse);
    if (end.size() != 1) return cannot_run("unsupported", "tokenizer.ggml.tokens", "no <|im_end|>");
    end_of_turn_ = end[0];
    return {};
  }

  token_id end_of_turn() const { return end_of_turn_; }

  result<std::vector<token_id>> encode(const std::string& user) const {
    const auto all = text_.encode_chat(std::vector<chat_message>{{"system", ""}, {"user", user}});
    if (!all) return all.error();
    std::vector<token_id> out = newline_;
    out.insert(out.end(), all->begin() + static_cast<std::ptrdiff_t>(skip_), all->end());
    return out;
  }

 private:
  const tokenizer& text_;
  std::size_t skip_ = 0;
  std::vector<token_id> newline_;
  token_id end_of_turn_ = -1;
};

result<job> tokenise(const workload_line& line, const tokenizer& text, const follow_up_encoder& follow_ups,
                     int context) {
  job out;
  out.id = line.id;
  out.line = line.line;
  out.arrival = line.arrival;
  out.max_new = line.max_new;
  out.scope = line.scope;
  out.samples = line.samples;
  out.how = line.how;
  out.end_of_turn = follow_ups.end_of_turn();
  auto prompt = text.encode_chat(line.turns);
  if (!prompt) return prompt.error();
  out.prompt = std::move(*prompt);
  if (out.prompt.size() > static_cast<std::size_t>(context))
    return bad_input("too_long", "turns.tokens", std::to_string(out.prompt.size()));
  for (const std::string& user : line.agent) {
    auto tokens = follow_ups.encode(user);
    if (!tokens) return tokens.error();
    out.follow_ups.push_back(std::move(*tokens));
  }
  const std::int64_t longest = most_tokens(out, out.follow_ups.size()) - out.max_new;
  if (longest > context) return bad_input("too_long", "agent.tokens", std::to_string(longest));
  return out;
}

}  // namespace

result<std::vector<workload_line>> parse_workload(std::string_view text, const std::string& path) {
  std::vector<workload_line> lines;
  std::unordered_set<std::string> ids;
  for (std::int64_t number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto object = parse_object(line);
    if (!object) return located(object.error(), path, number);
    workload_line& to = lines.emplace_back();
    to.line = number;
    if (status s = line_reader(*object, to).run(); !s) return located(s.error(), path, number);
    if (!ids.insert(to.id).second) return located(bad_input("duplicate", "id", to.id), path, number);
  }
  if (lines.empty()) return located(bad_input("bad_value", "requests", "no lines"), path, -1);
  return lines;
}

result<std::vector<job>> tokenise(std::span<const workload_line> lines, const tokenizer& text, int context,
                                  const std::string& path) {
  follow_up_encoder follow_ups(text);
  if (status s = follow_ups.create(); !s) return s.error();
  std::vector<job> jobs;
  for (const workload_line& line : lines) {
    auto made = tokenise(line, text, follow_ups, context);
    if (!made) return located(made.error(), path, line.line);
    jobs.push_back(std::move(*made));
  }
  return jobs;
}

}  // namespace engine
