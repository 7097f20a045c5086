// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "example.hpp"

namespace lab {
namespace {

using engine::formatted;
using engine::json;

json row_json(const matrix_group& group, const matrix_row& row, measure m, const summary& full,
              const summary& none, const gate& passed) {
  const summary s = summarise(row.trials, row.draws);
  json out = {{"policy", row.policy}, {"control", row.control}, {"draws", row.draws}};
  out.update(to_json(s));
  out["share_of_bytes"] = s.bytes_full > 0 ? s.bytes_held / s.bytes_full : 0;
  out["figure"] = to_json(figure(s, m));
  out["quality"] = passed.open ? json(quality(m, full, none, s)) : json(nullptr);
  if (m == measure::kl) out["by_distance"] = by_distance(row.trials);
  if (!row.control.empty() || !passed.open) return out;
  for (const char* control : {"window", "random"}) {
    const matrix_row* beside = group.find(row.policy, control);
    if (beside == nullptr) continue;
    const auto against = compare_trials(m, row.trials, beside->trials);
    if (against)
      out["against_" + std::string(control)] = {{"difference", to_json(against->difference)},
                                                {"verdict", against->verdict}};
  }
  return out;
}

json group_json(const matrix_group& group) {
  const measure m = find_task(group.task)->judged_by;
  const summary full = summarise(group.find("", "full")->trials);
  const summary none = summarise(group.find("", "none")->trials);
  const gate passed = check_gate(m, full, none);
  json rows = json::array();
  for (const matrix_row& row : group.rows) rows.push_back(row_json(group, row, m, full, none, passed));
  return {{"task", group.task},
          {"length", group.length},
          {"context_tokens", {{"shortest", group.shortest}, {"longest", group.longest}}},
          {"judged_by", name_of(m)},
          {"measurable", passed.open},
          {"gate", passed.threshold},
          {"settings", group.settings},
          {"rows", rows}};
}

std::string shown(const json& interval, int digits) {
  const auto number = [&](const char* key) {
    return interval[key].is_number() && std::isfinite(interval[key].get<double>())
               ? formatted("%.*f", digits, interval[key].get<double>())
               : std::string("-");
  };
  if (number("value") == "-") return "-";
  if (number("low") == "-") return number("value");
  return number("value") + " (" + number("low") + " to " + number("high") + ")";
}

std::string percent(const json& share) {
  // Plus zero: no "-0.0 %".
  return share.is_number() && std::isfinite(share.get<double>())
             ? formatted("%.1f %%", std::round(1000 * share.get<double>()) / 10 + 0.0)
             : "-";
}

std::string name_of_row(const json& row) {
  const std::string policy = row["policy"];
  const std::string control = row["control"];
  if (control.empty()) return "`" + policy + "`";
  if (policy.empty()) return control;
  const int draws = row["draws"];
  return "&nbsp;&nbsp;" + control + ", equal bytes" +
         (draws > 1 ? ", " + std::to_string(draws) + " lots" : std::string());
}

std::string verdict(const json& row, const char* against) {
  return row.contains(against) ? row[against]["verdict"].get<std::string>() : "";
}

void add_group(const json& group, std::string& out) {
  const std::string m = group["judged_by"];
  const std::string title = group["task"].get<std::string>() +
                            (group["length"] > 0 ? ", " + group["length"].dump() + " tokens" : "");
  out += "\n## " + title + "\n\n" + std::string(find_task(group["task"].get<std::string>())->what) +
         "; context " + group["context_tokens"]["shortest"].dump() + " to " +
         group["context_tokens"]["longest"].dump() + " tokens. " +
         (group["measurable"] ? "Gate: " : "**Not measurable with this model:** ") +
         group["gate"].get<std::string>() + ".\n\n";
  out += "| policy | bytes held | " + m +
         " (95 %) | quality | correct | nll | kl | top-1 | against window | against random |\n";
  out += "|---|---|---|---|---|---|---|---|---|---|\n";
  for (const json& row : group["rows"]) {
    const int digits = m == "kl" ? 4 : 3;
    out += "| " + name_of_row(row) + " | " + percent(row["share_of_bytes"]) + " | " +
           shown(row["figure"], digits) + " | " + percent(row["quality"]) + " | " + row["correct"].dump() +
           "/" + row["trials"].dump() + " | " +
           shown({{"value", row["nll"]["value"]}, {"low", nullptr}, {"high", nullptr}}, 3) + " | " +
           shown({{"value", row["kl"]["value"]}, {"low", nullptr}, {"high", nullptr}}, 4) + " | " +
           percent(row["top1"]) + " | " + verdict(row, "against_window") + " | " +
           verdict(row, "against_random") + " |\n";
  }
}

// --- plot
// -----------------------------------------------------------------------------------------------------

constexpr int panel_width = 360;
constexpr int panel_height = 300;
constexpr double plot_left = 50;
constexpr double plot_right = 340;
constexpr double plot_top = 40;
constexpr double plot_bottom = 250;

std::string family_of(const json& row) {
  const std::string control = row["control"];
  if (!control.empty()) return control;
  const std::string policy = row["policy"];
  return policy.substr(0, policy.find(':'));
}

std::string colour_of(const std::string& family, std::map<std::string, std::string>& known) {
  static constexpr const char* colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                            "#e69f00", "#56b4e9", "#7f3c8d", "#666600"};
  if (family == "full") return "#000000";
  if (family == "none" || family == "random" || family == "window") return "#999999";
  const auto at = known.find(family);
  if (at != known.end()) return at->second;
  return known[family] = colours[known.size() % std::size(colours)];
}

void draw_frame(const std::string& title, std::string& out) {
  out += formatted("<text x=\"%g\" y=\"24\" text-anchor=\"middle\" font-size=\"14\">%s</text>\n",
                   (plot_left + plot_right) / 2, title.c_str());
  for (int i = 0; i <= 4; ++i) {
    const double y = plot_bottom - (plot_bottom - plot_top) * i / 4;
    const double x = plot_left + (plot_right - plot_left) * i / 4;
    out += formatted("<line x1=\"%g\" y1=\"%g\" x2=\"%g\" y2=\"%g\" stroke=\"#dddddd\"/>\n", plot_left, y,
                     plot_right, y);
    out +=
        formatted("<text x=\"%g\" y=\"%g\" text-anchor=\"end\">%d %%</text>\n", plot_left - 6, y + 4, 25 * i);
    out += formatted("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">%d %%</text>\n", x, plot_bottom + 18,
                     25 * i);
  }
}

void draw_point(const json& row, const std::string& colour, std::string& out) {
  if (!row["quality"].is_number()) return;
  const double share = std::clamp(row["share_of_bytes"].get<double>(), 0.0, 1.0);
  const double quality = std::clamp(row["quality"].get<double>(), 0.0, 1.0);
  const double x = plot_left + (plot_right - plot_left) * share;
  const double y = plot_bottom - (plot_bottom - plot_top) * quality;
  const std::string control = row["control"];
  const std::string label = control.empty() ? row["policy"].get<std::string>() : control;
  if (control == "window" || control == "random") {
    out += formatted("<path d=\"M%.1f %.1fl%s\" stroke=\"%s\" fill=\"none\">", x - 3, y - 3,
                     control == "window" ? "6 0l0 6l-6 0z" : "6 6m0 -6l-6 6", colour.c_str());
  } else {
    out += formatted("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\">", x, y, colour.c_str());
  }
  const bool marker_is_path = control == "window" || control == "random";
  out += "<title>" + label + "</title>" + (marker_is_path ? "</path>\n" : "</circle>\n");
}

}  // namespace

std::vector<std::string> warnings_of(const std::vector<matrix_group>& groups, const lab_options& options) {
  std::vector<std::string> out;
  int longest = 0;
  for (const matrix_group& group : groups) {
    longest = std::max(longest, group.longest);
    if (group.length > 0 && group.longest < group.length * 9 / 10)
      out.push_back(group.task + ": the longest context tested has " + std::to_string(group.longest) +
                    " tokens, less than the " + std::to_string(group.length) + " asked for");
  }
  if (options.about > longest)
    out.push_back("the longest context tested has " + std::to_string(longest) +
                  " tokens; nothing here says what happens at " + std::to_string(options.about));
  return out;
}

engine::result<json> report_json(const std::vector<matrix_group>& groups,
                                 const std::vector<std::string>& warnings) {
  json list = json::array();
  for (const matrix_group& group : groups) {
    list.push_back(group_json(group));
    // Within one document all groups differ in nothing but task and length.
    json a = groups.front().settings;
    json b = group.settings;
    for (const char* key : {"model_fnv", "kv", "block", "chunk", "mode", "batch", "simd"}) {
      if (a[key] != b[key])
        return engine::bad_input("not_comparable", key, a[key].dump() + " and " + b[key].dump());
    }
  }
  return json{{"schema", "kvcache.lab.v1"}, {"warnings", warnings}, {"groups", list}};
}

std::string report_markdown(const json& report) {
  std::string out = "# What a cache policy costs\n";
  for (const json& warning : report["warnings"])
    out += "\n**Warning:** " + warning.get<std::string>() + ".\n";
  if (!report["groups"].empty()) {
    out += "\nSettings:";
    for (const auto& item : report["groups"][0]["settings"].items()) {
      if (item.key() != "task" && item.key() != "length")
        out += " " + item.key() + "=" +
               (item.value().is_string() ? item.value().get<std::string>() : item.value().dump());
    }
    out += "\n";
  }
  for (const json& group : report["groups"]) add_group(group, out);
  out +=
      "\nQuality: 100 % is the full cache, 0 % no context at all. Bytes: held when the context was complete, "
      "of "
      "the full cache's.\nThe likelihood of running text (nll) alone is a weak witness: most tokens follow "
      "from "
      "the last few, which every policy keeps.\n";
  return out;
}

std::string report_svg(const json& report) {
  const auto panels = static_cast<int>(report["groups"].size());
  const int columns = std::clamp(panels, 1, 3);
  const int lines = std::max(1, (panels + columns - 1) / columns);
  std::map<std::string, std::string> colours;
  std::string body;
  int index = 0;
  for (const json& group : report["groups"]) {
    body += formatted("<g transform=\"translate(%d %d)\">\n", panel_width * (index % columns),
                      panel_height * (index / columns));
    const std::string length = group["length"] > 0 ? " " + group["length"].dump() : "";
    draw_frame(group["task"].get<std::string>() + length, body);
    if (!group["measurable"].get<bool>())
      body += formatted("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">not measurable</text>\n",
                        (plot_left + plot_right) / 2, (plot_top + plot_bottom) / 2);
    for (const json& row : group["rows"]) draw_point(row, colour_of(family_of(row), colours), body);
    body += formatted(
        "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">bytes held, of the full cache</text>\n</g>\n",
        (plot_left + plot_right) / 2, plot_bottom + 38);
    ++index;
  }
  const int height = panel_height * lines + 40;
  std::string out = formatted(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
      "font-family=\"sans-serif\" font-size=\"11\" fill=\"#222222\">\n<rect width=\"100%%\" height=\"100%%\" "
      "fill=\"#ffffff\"/>\n",
      panel_width * columns, height, panel_width * columns, height);
  out += body;
  double x = 20;
  out += formatted("<text x=\"%g\" y=\"%d\">quality, of the full cache:</text>\n", x, height - 16);
  x += 160;
  for (const auto& [family, colour] : colours) {
    out += formatted("<circle cx=\"%g\" cy=\"%d\" r=\"4\" fill=\"%s\"/><text x=\"%g\" y=\"%d\">%s</text>\n",
                     x, height - 20, colour.c_str(), x + 8, height - 16, family.c_str());
    x += 24 + 7 * static_cast<double>(family.size());
  }
  out += formatted("<text x=\"%g\" y=\"%d\">square: window, cross: random, at equal bytes</text>\n</svg>\n",
                   x, height - 16);
  return out;
}

}  // namespace lab
