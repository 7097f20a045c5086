// SPDX-License-Identifier: Apache-2.0
// CSV with a header: TIMESTAMP,ContextTokens,GeneratedTokens. Lengths and times, no blocks.
#include <array>
#include <charconv>

#include "trace/formats.hpp"

namespace kvcache::cli {
namespace {

std::string_view cut(std::string_view& rest, char at) {
  const std::size_t i = rest.find(at);
  const std::string_view head = rest.substr(0, i);
  rest = i == std::string_view::npos ? std::string_view{} : rest.substr(i + 1);
  return head;
}

/// Exactly `width` digits from the front of `rest`, at most `most`; -1 if they are not there.
std::int64_t take_digits(std::string_view& rest, std::size_t width, std::int64_t most) {
  std::int64_t value = 0;
  if (rest.size() < width) return -1;
  for (std::size_t i = 0; i < width; ++i) {
    if (rest[i] < '0' || rest[i] > '9') return -1;
    value = value * 10 + (rest[i] - '0');
  }
  rest.remove_prefix(width);
  return value <= most ? value : -1;
}

bool take(std::string_view& rest, char c) {
  if (rest.empty() || rest.front() != c) return false;
  rest.remove_prefix(1);
  return true;
}

bool leap(std::int64_t y) {
  return (y % 4 == 0 && y % 100 != 0) || y % 400 == 0;
}

/// Days since 1970-01-01 of a date from 1970 on; -1 if there is no such day.
std::int64_t days_since_1970(std::int64_t year, std::int64_t month, std::int64_t day) {
  constexpr std::array<std::int64_t, 13> before{0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334, 365};
  if (year < 1970 || month < 1 || month > 12 || day < 1) return -1;
  const auto m = static_cast<std::size_t>(month);
  const std::int64_t in_month = before[m] - before[m - 1] + (month == 2 && leap(year) ? 1 : 0);
  if (day > in_month) return -1;
  const std::int64_t y = year - 1;  // whole years, with their leap days
  const std::int64_t leaps = y / 4 - y / 100 + y / 400 - (1969 / 4 - 1969 / 100 + 1969 / 400);
  return (year - 1970) * 365 + leaps + before[m - 1] + (month > 2 && leap(year) ? 1 : 0) + day - 1;
}

/// "2023-11-16 18:17:03.9799600", maybe followed by Z or +hh:mm, in microseconds since 1970; -1 if it is
/// none.
std::int64_t read_time(std::string_view text) {
  const std::int64_t year = take_digits(text, 4, 9999);
  const bool a = take(text, '-');
  const std::int64_t month = take_digits(text, 2, 12);
  const bool b = take(text, '-');
  const std::int64_t days = days_since_1970(year, month, take_digits(text, 2, 31));
  if (!a || !b || days < 0 || (!take(text, ' ') && !take(text, 'T'))) return -1;
  const std::int64_t hour = take_digits(text, 2, 23);
  const bool c = take(text, ':');
  const std::int64_t minute = take_digits(text, 2, 59);
  const bool d = take(text, ':');
  const std::int64_t second = take_digits(text, 2, 59);
  if (!c || !d || hour < 0 || minute < 0 || second < 0) return -1;
  std::int64_t us = 0, unit = 100'000;
  if (take(text, '.')) {
    if (text.empty() || text.front() < '0' || text.front() > '9') return -1;
    for (; !text.empty() && text.front() >= '0' && text.front() <= '9'; text.remove_prefix(1), unit /= 10) {
      us += (text.front() - '0') * unit;
    }
  }
  std::int64_t offset = 0;  // minutes
  if (!text.empty() && (text.front() == '+' || text.front() == '-')) {
    const std::int64_t sign = text.front() == '+' ? 1 : -1;
    text.remove_prefix(1);
    const std::int64_t h = take_digits(text, 2, 23);
    const bool e = take(text, ':');
    const std::int64_t m = take_digits(text, 2, 59);
    if (!e || h < 0 || m < 0) return -1;
    offset = sign * (h * 60 + m);
  } else {
    take(text, 'Z');
  }
  if (!text.empty()) return -1;
  const std::int64_t seconds = ((days * 24 + hour) * 60 + minute - offset) * 60 + second;
  return seconds < 0 ? -1 : seconds * 1'000'000 + us;
}

std::int64_t read_length(scanner& in, std::int64_t line, const char* field, std::string_view text) {
  std::int64_t value = -1;
  const char* last = text.data() + text.size();
  const auto [end, code] = std::from_chars(text.data(), last, value);
  if (end != last || (code != std::errc{} && code != std::errc::result_out_of_range)) {
    in.fail_at(line, "bad_value", field, std::string(text));
  }
  if (code != std::errc{} || value < 0 || value > trace_builder::most_tokens) {
    in.fail_at(line, "out_of_range", field, std::string(text));
  }
  return value;
}

struct columns {
  int time = -1, input = -1, output = -1, count = 0;
};

columns read_header(scanner& in) {
  columns c;
  std::string_view rest = in.raw_line();
  while (!rest.empty()) {
    const std::string_view name = cut(rest, ',');
    if (name == "TIMESTAMP") c.time = c.count;
    if (name == "ContextTokens") c.input = c.count;
    if (name == "GeneratedTokens") c.output = c.count;
    ++c.count;
  }
  if (c.time < 0) in.fail_at(1, "missing_field", "TIMESTAMP", "");
  if (c.input < 0) in.fail_at(1, "missing_field", "ContextTokens", "");
  return c;
}

}  // namespace

void read_azure(scanner& in, trace_builder& out) {
  out.start_file(in, "azure");
  const columns c = read_header(in);
  time_order order;
  while (!in.at_end()) {
    const std::int64_t line = in.line();
    std::string_view rest = in.raw_line();
    request_facts facts;
    facts.has_blocks = false;
    facts.time_us = -1;
    int column = 0;
    for (; !rest.empty(); ++column) {
      const std::string_view value = cut(rest, ',');
      if (column == c.time) {
        facts.time_us = read_time(value);
        if (facts.time_us < 0) in.fail_at(line, "bad_value", "TIMESTAMP", std::string(value));
      }
      if (column == c.input) facts.input_tokens = read_length(in, line, "ContextTokens", value);
      if (column == c.output) facts.output_tokens = read_length(in, line, "GeneratedTokens", value);
    }
    if (column < c.count) in.fail_at(line, "missing_field", "column " + std::to_string(column + 1), "");
    if (column > c.count) in.fail_at(line, "bad_value", "columns", std::to_string(column));
    order.check(in, line, "TIMESTAMP", facts.time_us);
    out.begin();
    out.end(facts);
  }
}

}  // namespace kvcache::cli
