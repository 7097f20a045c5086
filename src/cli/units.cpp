// SPDX-License-Identifier: Apache-2.0
#include "units.hpp"

#include <charconv>
#include <cmath>
#include <iterator>
#include <system_error>

#include "error.hpp"

namespace kvcache::cli {
namespace {

[[noreturn]] void refuse(std::string_view option, std::string_view text, const char* wanted) {
  throw error(failure::usage, "bad_value", std::string(option), text.empty() ? "empty" : std::string(text))
      .wanting(wanted);
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

struct split_number {
  std::string_view number;  ///< digits, at most one point
  std::string_view unit;
};

// "3.35TB/s" into "3.35" and "TB/s"; an empty number if none stands there.
split_number split(std::string_view text) {
  std::size_t end = 0;
  bool point = false;
  while (end < text.size() && (is_digit(text[end]) || (text[end] == '.' && !point))) {
    point |= text[end] == '.';
    ++end;
  }
  if (end == 0 || !is_digit(text[0]) || !is_digit(text[end - 1])) return {{}, text};
  return {text.substr(0, end), text.substr(end)};
}

// number * scale as a whole number; false if it is none or 2^62 or more. Whole numbers are exact to the last
// digit, fractions round to the nearest.
bool scaled(std::string_view number, std::int64_t scale, std::int64_t& out) {
  constexpr std::int64_t limit = std::int64_t{1} << 62;
  const char* end = number.data() + number.size();
  if (number.find('.') == std::string_view::npos) {
    std::int64_t whole = 0;
    const auto read = std::from_chars(number.data(), end, whole);
    return read.ec == std::errc() && read.ptr == end && !__builtin_mul_overflow(whole, scale, &out) &&
           out < limit;
  }
  double value = 0;
  const auto read = std::from_chars(number.data(), end, value, std::chars_format::fixed);
  if (read.ec != std::errc() || read.ptr != end) return false;
  value *= static_cast<double>(scale);
  if (!(value < static_cast<double>(limit))) return false;
  out = std::llround(value);
  return true;
}

struct unit_scale {
  const char* name;
  std::int64_t scale;
};

constexpr std::int64_t kibi = 1024, kilo = 1000;
constexpr unit_scale byte_units[] = {
    {"kb", kilo},  {"mb", kilo* kilo},  {"gb", kilo* kilo* kilo},  {"tb", kilo* kilo* kilo* kilo},
    {"kib", kibi}, {"mib", kibi* kibi}, {"gib", kibi* kibi* kibi}, {"tib", kibi* kibi* kibi* kibi}};

template <std::size_t N>
std::int64_t find_scale(const unit_scale (&units)[N], std::string_view name) {
  for (const unit_scale& u : units) {
    if (name == u.name) return u.scale;
  }
  return 0;
}

// 0 for an unknown unit. "Gb" is refused: it means bits to many.
std::int64_t byte_scale(std::string_view unit) {
  if (unit.empty() || unit == "B") return 1;
  const std::string name = lower(unit);
  return unit.back() == 'B' || unit == name ? find_scale(byte_units, name) : 0;
}

std::int64_t token_scale(std::string_view unit) {
  constexpr unit_scale units[] = {{"", 1}, {"k", kibi}, {"m", kibi * kibi}};
  return find_scale(units, lower(unit));
}

constexpr const char* bytes_wanted =
    "bytes such as 80GiB (2^30 each) or 24GB (10^9 each): B, kB, MB, GB, TB, KiB, MiB, GiB, TiB";

}  // namespace

std::int64_t parse_count(std::string_view option, std::string_view text, std::int64_t least,
                         std::int64_t most) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  if (text.empty() || read.ec != std::errc() || read.ptr != end || value < least || value > most) {
    const std::string wanted = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
    refuse(option, text, wanted.c_str());
  }
  return value;
}

std::int64_t parse_bytes(std::string_view option, std::string_view text) {
  const split_number parts = split(text);
  const std::int64_t scale = byte_scale(parts.unit);
  std::int64_t out = 0;
  if (scale == 0 || !scaled(parts.number, scale, out)) refuse(option, text, bytes_wanted);
  return out;
}

double parse_bandwidth(std::string_view option, std::string_view text) {
  constexpr const char* wanted = "bytes per second such as 3.35TB/s or 900GB/s";
  std::string_view amount = text;
  if (amount.size() < 2 || amount.substr(amount.size() - 2) != "/s") refuse(option, text, wanted);
  amount.remove_suffix(2);
  const split_number parts = split(amount);
  const std::int64_t scale = byte_scale(parts.unit);
  std::int64_t out = 0;
  if (scale == 0 || !scaled(parts.number, scale, out) || out == 0) refuse(option, text, wanted);
  return static_cast<double>(out);
}

std::int64_t parse_tokens(std::string_view option, std::string_view text) {
  const split_number parts = split(text);
  const std::int64_t scale = token_scale(parts.unit);
  std::int64_t out = 0;
  const bool fraction_of_one = scale == 1 && parts.number.find('.') != std::string_view::npos;
  if (scale == 0 || fraction_of_one || !scaled(parts.number, scale, out) || out == 0) {
    refuse(option, text, "tokens such as 4096, 8k (2^10 each) or 4M (2^20 each)");
  }
  return out;
}

std::int64_t parse_amount(std::string_view option, std::string_view text) {
  constexpr const char* wanted = "a number such as 8030261248, 8.03B or 70e9";
  constexpr unit_scale units[] = {
      {"", 1}, {"k", kilo}, {"m", kilo * kilo}, {"b", kilo * kilo * kilo}, {"t", kilo * kilo * kilo * kilo}};
  const split_number parts = split(text);
  std::int64_t scale = find_scale(units, lower(parts.unit));
  if (parts.unit.size() > 1 && (parts.unit[0] == 'e' || parts.unit[0] == 'E')) {
    std::int64_t power = 0;
    const char* end = parts.unit.data() + parts.unit.size();
    const auto read = std::from_chars(parts.unit.data() + 1, end, power);
    if (read.ec != std::errc() || read.ptr != end || power < 0 || power > 18) refuse(option, text, wanted);
    scale = 1;
    for (std::int64_t i = 0; i < power; ++i) scale *= 10;
  }
  std::int64_t out = 0;
  const bool fraction_of_one = scale == 1 && parts.number.find('.') != std::string_view::npos;
  if (scale == 0 || fraction_of_one || !scaled(parts.number, scale, out) || out == 0) {
    refuse(option, text, wanted);
  }
  return out;
}

capacity parse_capacity(std::string_view option, std::string_view text) {
  constexpr const char* wanted =
      "a capacity such as 2048b (blocks), 4M (2^20 tokens each), 80GiB (with a model) or inf";
  const std::string all = lower(text);
  if (all == "inf") return {};
  const split_number parts = split(text);
  const std::string unit = lower(parts.unit);
  std::int64_t out = 0;
  if (parts.unit == "b" || unit == "blocks" || unit == "block") {  // "B" is a byte, as everywhere
    if (parts.number.find('.') != std::string_view::npos || !scaled(parts.number, 1, out) || out == 0) {
      refuse(option, text, wanted);
    }
    return {capacity::unit::blocks, out};
  }
  if (token_scale(unit) != 0) return {capacity::unit::tokens, parse_tokens(option, text)};
  const std::int64_t scale = byte_scale(parts.unit);
  if (scale == 0 || !scaled(parts.number, scale, out) || out == 0) refuse(option, text, wanted);
  return {capacity::unit::bytes, out};
}

std::vector<std::string> split_list(std::string_view option, std::string_view text) {
  std::vector<std::string> out;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    if (part.empty()) refuse(option, text, "a list such as a,b,c without empty parts");
    out.emplace_back(part);
    if (comma == std::string_view::npos) return out;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace kvcache::cli
