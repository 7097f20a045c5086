// SPDX-License-Identifier: Apache-2.0
#include "gpu/report.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "gpu/statistics.hpp"

namespace kvcache::gpu_check {
namespace {

std::string quoted(const std::string& s) {
  std::string out = "\"";
  for (const char c : s) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", unsigned(static_cast<unsigned char>(c)));
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string json_value(const field& f) {
  if (f.is_text) return quoted(f.text);
  return std::isfinite(f.number) ? number_text(f.number, 6) : "null";
}

void add_member(std::string& out, const std::string& name, const std::string& value) {
  if (out.back() != '{') out.append(", ");
  out.append(quoted(name)).append(": ").append(value);
}

std::string cell(const field& f) {
  if (!f.is_text) return number_text(f.number, 4);
  std::string out;
  for (const char c : f.text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

template <class T>
void add_once(std::vector<T>& all, const T& one) {
  if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
}

std::string line_of(const std::vector<std::string>& cells) {
  std::string out = "|";
  for (const std::string& c : cells) out.append(" ").append(c).append(" |");
  return out + "\n";
}

/// What was refused of a table, a line per reason.
std::string refusals_of(const std::string& table, const std::vector<row>& rows) {
  std::vector<std::string> reasons;
  const auto reason_of = [](const row& r) {
    return (r.fields.empty() ? std::string() : cell(r.fields.front()) + ": ") + r.refused;
  };
  for (const row& r : rows) {
    if (r.table == table && !r.refused.empty()) add_once(reasons, reason_of(r));
  }
  std::string out;
  for (const std::string& reason : reasons) {
    const auto n = std::count_if(rows.begin(), rows.end(), [&](const row& r) {
      return r.table == table && !r.refused.empty() && reason_of(r) == reason;
    });
    out.append("- ").append(reason).append(" (").append(std::to_string(n));
    out.append(n == 1 ? " row)\n" : " rows)\n");
  }
  return out.empty() ? out : std::string("\nWithout figures:\n\n").append(out);
}

}  // namespace

std::vector<row> targets_of(const std::vector<row>& rows) {
  const auto value = [](const row& r, const char* name) -> const field* {
    const auto at =
        std::find_if(r.fields.begin(), r.fields.end(), [&](const field& f) { return f.name == name; });
    return at != r.fields.end() ? &*at : nullptr;
  };
  std::vector<std::string> formats;
  for (const row& r : rows) {
    if (r.table == "Decode" && r.refused.empty()) add_once(formats, value(r, "format")->text);
  }
  std::vector<row> out;
  for (const std::string& format : formats) {
    std::vector<double> parts;
    for (const row& r : rows) {
      if (r.table != "Decode" || !r.refused.empty() || value(r, "format")->text != format) continue;
      if (value(r, "KV MB")->number >= 2000) parts.push_back(value(r, "of ceiling")->number);
    }
    const double aim = format == "f16" || format == "bf16"    ? 0.9
                       : format == "e4m3" || format == "int8" ? 0.8
                                                              : 0.7;
    row line{
        "Decode of 2 GB or more", {{"format", format}, {"rows", static_cast<int64_t>(parts.size())}}, {}};
    if (parts.empty()) {
      line.refused = "no such row";
    } else {
      const spread s = spread_of(parts);
      line.fields.emplace_back("of ceiling, lowest", s.low);
      line.fields.emplace_back("median", s.median);
      line.fields.emplace_back("aim", aim);
      line.fields.emplace_back("reached", s.low >= aim ? "yes" : s.median >= aim ? "by half" : "no");
    }
    out.push_back(line);
  }
  return out;
}

std::string number_text(double v, int digits) {
  char text[64];
  if (!std::isfinite(v)) return v > 0 ? "inf" : v < 0 ? "-inf" : "nan";
  const bool whole = std::fabs(v) < 1e15 && v == std::floor(v);
  if (whole) {
    std::snprintf(text, sizeof text, "%.0f", v);
  } else {
    // Large numbers whole rather than with an exponent, small ones with the digits asked for.
    const int before = std::fabs(v) >= 1 ? int(std::floor(std::log10(std::fabs(v)))) + 1 : 0;
    if (before > 0) {
      std::snprintf(text, sizeof text, "%.*f", std::max(0, digits - before), v);
    } else {
      std::snprintf(text, sizeof text, "%.*g", digits, v);
    }
  }
  return text;
}

std::string json_of(const std::vector<field>& common, const std::vector<row>& rows) {
  std::string out = "[";
  for (const row& r : rows) {
    std::string object = "{";
    add_member(object, "table", quoted(r.table));
    for (const field& f : r.fields) add_member(object, f.name, json_value(f));
    if (!r.refused.empty()) add_member(object, "refused", quoted(r.refused));
    for (const field& f : common) add_member(object, f.name, json_value(f));
    out.append(out.size() > 1 ? ",\n " : "\n ").append(object).append("}");
  }
  return out + "\n]\n";
}

std::string markdown_of(const std::vector<field>& common, const std::vector<row>& rows) {
  std::string out;
  for (const field& f : common)
    out.append(out.empty() ? "" : " · ").append(f.name).append(" ").append(cell(f));
  if (!out.empty()) out += "\n";
  std::vector<std::string> tables;
  for (const row& r : rows) add_once(tables, r.table);
  for (const std::string& table : tables) {
    std::vector<std::string> columns;
    for (const row& r : rows) {
      if (r.table != table || !r.refused.empty()) continue;
      for (const field& f : r.fields) add_once(columns, f.name);
    }
    out.append("\n### ").append(table).append("\n");
    if (!columns.empty()) {
      const std::vector<std::string> rule(columns.size(), "---");
      out.append("\n").append(line_of(columns)).append(line_of(rule));
    }
    for (const row& r : rows) {
      if (r.table != table || !r.refused.empty()) continue;
      std::vector<std::string> cells(columns.size());
      for (const field& f : r.fields) {
        cells[size_t(std::find(columns.begin(), columns.end(), f.name) - columns.begin())] = cell(f);
      }
      out += line_of(cells);
    }
    out += refusals_of(table, rows);
  }
  return out;
}

bool write_file(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return false;
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  return std::fclose(file) == 0 && written;
}

}  // namespace kvcache::gpu_check
