// SPDX-License-Identifier: Apache-2.0
#include "output.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace kvcache::cli {
namespace {

std::string printed(const char* format, int digits, double value) {
  char text[400];
  const int length = std::snprintf(text, sizeof text, format, digits, value);
  return {text, static_cast<std::size_t>(std::clamp(length, 0, int{sizeof text} - 1))};
}

std::string quoted(const json& scalar) {
  return scalar.dump(-1, ' ', false, json::error_handler_t::replace);
}

void append(const json& node, std::string& out) {
  if (node.is_number_float()) {
    const double value = node.get<double>();
    out += std::isfinite(value) ? printed("%.*g", 9, value) : "null";
    return;
  }
  if (!node.is_structured()) {
    out += quoted(node);
    return;
  }
  out += node.is_object() ? '{' : '[';
  bool first = true;
  for (auto item = node.begin(); item != node.end(); ++item) {
    if (!first) out += ", ";
    first = false;
    if (node.is_object()) out += quoted(json(item.key())) + ": ";
    append(*item, out);
  }
  out += node.is_object() ? '}' : ']';
}

}  // namespace

std::string to_text(const json& document) {
  std::string out;
  append(document, out);
  return out;
}

json to_json(const error& e) {
  json inner = {
      {"code", e.code}, {"field", e.field}, {"value", e.value}, {"file", nullptr}, {"line", nullptr}};
  if (!e.file.empty()) inner["file"] = e.file;
  if (e.line >= 0) inner["line"] = e.line;
  if (!e.wanted.empty()) inner["wanted"] = e.wanted;
  return {{"schema", "kvcache.error.v1"}, {"error", std::move(inner)}};
}

std::string harmless(std::string text) {
  for (char& c : text) {
    if ((static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7F) c = '?';
  }
  return text;
}

std::string describe(const error& e) {
  std::string text = harmless(e.what());
  std::replace(text.begin(), text.end(), '\n', '?');
  return text;
}

std::string concat(std::initializer_list<std::string_view> parts) {
  std::string out;
  for (const std::string_view part : parts) out += part;
  return out;
}

std::string count_text(std::int64_t n) {
  std::string digits = std::to_string(n);
  const std::size_t first = n < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

std::string number_text(double x, int digits) {
  return printed("%.*f", digits, x);
}

std::string bytes_text(std::int64_t bytes) {
  static constexpr const char* decimal[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  static constexpr const char* binary[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1000) return std::to_string(bytes) + " B";
  const auto value = static_cast<double>(bytes);
  int power = 1;
  double tens = 1000, twos = 1024;
  for (; value >= tens * 999.995 && power < 6; ++power) {
    tens *= 1000;
    twos *= 1024;
  }
  return number_text(value / tens, 2) + " " + decimal[power] + " = " + number_text(value / twos, 2) + " " +
         binary[power];
}

std::string table::text(std::size_t indent) const {
  std::vector<std::size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line(indent, ' ');
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string filling(widths[i] - row[i].size(), ' ');
      if (i != 0) line += "  ";
      line += i == 0 ? row[i] + filling : filling + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + '\n';
  }
  return out;
}

progress::progress(bool asked_for)
    : shown_(asked_for || isatty(STDERR_FILENO) == 1), terminal_(isatty(STDERR_FILENO) == 1) {}

void progress::update(std::string_view what, std::int64_t done, std::int64_t total) {
  const auto now = std::chrono::steady_clock::now();
  if (!shown_ || now < next_) return;
  next_ = now + std::chrono::milliseconds(200);
  std::string line = harmless(std::string(what)) + ": " + count_text(done);
  if (total > 0) line += " of " + count_text(total);
  std::fprintf(stderr, terminal_ ? "\r%s\033[K" : "%s\n", line.c_str());
  std::fflush(stderr);
  open_ = terminal_;
}

void progress::finish() {
  if (!open_) return;
  std::fputc('\n', stderr);
  open_ = false;
  next_ = {};
}

}  // namespace kvcache::cli
