// SPDX-License-Identifier: Apache-2.0
#include "trace/scanner.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvcache::cli {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{1} << 18;
constexpr std::size_t zeros_behind = 64;
constexpr std::size_t longest_text = std::size_t{1} << 16;
constexpr std::size_t longest_number = 256;
constexpr int deepest = 64;

/// Text that any terminal and any JSON document can take.
std::string printable(std::string_view text) {
  constexpr char hex[] = "0123456789abcdef";
  constexpr std::size_t longest = 100;
  std::string out;
  for (const char c : text.substr(0, longest)) {
    const auto u = static_cast<unsigned char>(c);
    if (u >= ' ' && u < 127) {
      out.push_back(c);
    } else {
      out.append("\\x").append(1, hex[u >> 4]).append(1, hex[u & 15]);
    }
  }
  return text.size() > longest ? out.append("...") : out;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

}  // namespace

scanner::scanner(byte_source& from)
    : from_(from),
      buffer_(std::make_unique_for_overwrite<char[]>(buffer_bytes + zeros_behind)),
      at_(buffer_.get()),
      end_(at_) {
  std::memset(buffer_.get(), 0, zeros_behind);
}

std::size_t scanner::refill(std::size_t wanted) {
  auto have = static_cast<std::size_t>(end_ - at_);
  std::memmove(buffer_.get(), at_, have);
  at_ = buffer_.get();
  while (have < std::min(wanted, buffer_bytes) && !ended_) {
    const std::size_t got = read_behind(have);
    ended_ = have + got < buffer_bytes;
    have += got;
  }
  end_ = at_ + have;
  std::memset(buffer_.get() + have, 0, zeros_behind);
  return have;
}

// A broken file is broken behind what lies in the buffer.
std::size_t scanner::read_behind(std::size_t have) {
  try {
    return from_.read(buffer_.get() + have, buffer_bytes - have);
  } catch (const broken_data& e) {
    throw e.at_line(line_ + std::count(buffer_.get(), buffer_.get() + have, '\n') + e.lines);
  }
}

std::string_view scanner::ahead(std::size_t most) {
  const std::size_t have = room(most);
  return {at_, std::min(have, most)};
}

void scanner::skip_byte_order_mark() {
  if (room(3) >= 3 && std::memcmp(at_, "\xef\xbb\xbf", 3) == 0) at_ += 3;
}

void scanner::fail(const char* code, std::string field, std::string value) const {
  fail_at(line_, code, std::move(field), std::move(value));
}

void scanner::fail_at(std::int64_t line, const char* code, std::string field, std::string value) const {
  throw error(failure::bad_input, code, printable(field), printable(value), file(), line);
}

std::string scanner::excerpt() {
  const std::size_t have = std::min<std::size_t>(room(64), 40);
  const bool quoted = *at_ == '"';
  std::size_t n = 0;
  for (; n < have; ++n) {
    const char c = at_[n];
    if (c == '\n' || c == '\r' || (n > 0 && !quoted && (c == ',' || c == ']' || c == '}'))) break;
    if (n > 0 && quoted && c == '"') return {at_, n + 1};
  }
  return {at_, n};
}

void scanner::fail_value(const char* field, std::int64_t index, const char* code) {
  std::string name = field;
  if (index >= 0) name.append("[").append(std::to_string(index)).append("]");
  if (room(1) == 0) fail("truncated", name, "");
  fail(code, name, excerpt());
}

/// Called at a character that may be white space or the end of the buffer; false if it is neither.
bool scanner::space() {
  if (at_ == end_) return room(1) > 0;
  switch (*at_) {
    case '\n':
      if (in_row_) fail("truncated", "line", "");
      ++line_;
      break;
    case ' ':
    case '\t':
    case '\r':
      break;
    default:
      return false;
  }
  ++at_;
  return true;
}

bool scanner::at_end() {
  skip_space();
  return at_ == end_;
}

void scanner::end_row() {
  in_row_ = false;
  while (room(1) > 0 && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) ++at_;
  if (room(1) > 0 && *at_ != '\n') fail("bad_syntax", "after the object", excerpt());
}

void scanner::open(char c, const char* field) {
  if (peek() != c) fail_value(field, -1, "bad_type");
  if (++depth_ > deepest) fail("too_deep", field, std::to_string(depth_));
  ++at_;
}

bool scanner::take_if(char c) {
  if (peek() != c) return false;
  ++at_;
  return true;
}

/// After a member or element: true if another follows.
bool scanner::more(char closing, const char* field) {
  if (take_if(',')) return true;
  if (take_if(closing)) return false;
  if (room(1) == 0) fail("truncated", field, "");
  fail("bad_syntax", field, excerpt());
}

std::string_view scanner::member_name() {
  if (peek() != '"') {
    if (room(1) == 0) fail("truncated", "object", "");
    fail("bad_syntax", "member name", excerpt());
  }
  ++at_;
  room(256);
  // Nearly every name is short and plain, and can stay where it is.
  const char* p = at_;
  while (*p >= ' ' && *p < 127 && *p != '"' && *p != '\\') ++p;
  std::string_view name;
  if (*p == '"') {
    // Only what has to be read for the colon could move the buffer: keep the name if that may happen.
    name = {at_, static_cast<std::size_t>(p - at_)};
    at_ = p + 1;
    if (*at_ == ':') {
      ++at_;
      return name;
    }
    text_ = name;
  } else {
    fill_text("member name", longest_text, true);
  }
  name = text_;
  if (!take_if(':')) {
    const std::string field = text_.empty() ? "member name" : text_;
    if (room(1) == 0) fail("truncated", field, "");
    fail("bad_syntax", field, excerpt());
  }
  return name;
}

bool scanner::take_null() {
  if (peek() != 'n') return false;
  literal("null");
  return true;
}

void scanner::literal(const char* word) {
  const std::size_t length = std::strlen(word);
  if (room(length) < length || std::memcmp(at_, word, length) != 0) fail_value("value", -1, "bad_value");
  at_ += length;
}

scanner::number scanner::scan_number(const char* field, std::int64_t index) {
  skip_space();
  room(longest_number + 1);
  number n;
  const char* p = at_;
  if (*p == '-') {
    n.negative = true;
    ++p;
  }
  if (!is_digit(*p)) {
    const bool kind = *at_ == '"' || *at_ == '{' || *at_ == '[' || *at_ == 't' || *at_ == 'f' || *at_ == 'n';
    fail_value(field, index, kind ? "bad_type" : "bad_value");
  }
  const bool leading_zero = *p == '0' && is_digit(p[1]);
  while (is_digit(*p)) ++p;
  n.whole = *p != '.' && *p != 'e' && *p != 'E';
  bool good = !leading_zero;
  if (*p == '.') {
    good = good && is_digit(p[1]);
    ++p;
    while (is_digit(*p)) ++p;
  }
  if (*p == 'e' || *p == 'E') {
    ++p;
    if (*p == '+' || *p == '-') ++p;
    good = good && is_digit(*p);
    while (is_digit(*p)) ++p;
  }
  n.text = {at_, static_cast<std::size_t>(p - at_)};
  if (!good || n.text.size() > longest_number) fail_value(field, index, good ? "out_of_range" : "bad_value");
  return n;
}

std::int64_t scanner::count(const char* field, std::int64_t most) {
  const number n = scan_number(field, -1);
  std::int64_t value = 0;
  bool good = false;
  if (n.whole) {
    const auto [end, code] = std::from_chars(n.text.data(), n.text.data() + n.text.size(), value);
    good = code == std::errc{};
  } else {
    double d = 0;
    const auto [end, code] = std::from_chars(n.text.data(), n.text.data() + n.text.size(), d);
    good = code == std::errc{} && d >= 0 && d <= 9007199254740992.0 && d == std::floor(d);
    if (code == std::errc{} && d != std::floor(d)) fail_value(field, -1, "bad_value");
    if (good) value = static_cast<std::int64_t>(d);
  }
  if (!good || value < 0 || value > most) fail_value(field, -1, "out_of_range");
  at_ += n.text.size();
  return value;
}

std::int64_t scanner::time_us(const char* field, std::int64_t unit_us) {
  constexpr std::int64_t latest = std::int64_t{1} << 60;  // us, 36,000 years
  const number n = scan_number(field, -1);
  std::int64_t value = 0;
  bool good = false;
  if (n.whole && n.text.size() <= 18) {
    std::from_chars(n.text.data(), n.text.data() + n.text.size(), value);
    good = value >= 0 && value <= latest / unit_us;
    value *= good ? unit_us : 0;
  } else {
    double d = 0;
    const auto [end, code] = std::from_chars(n.text.data(), n.text.data() + n.text.size(), d);
    d *= static_cast<double>(unit_us);
    good = code == std::errc{} && d >= 0 && d <= static_cast<double>(latest);
    if (good) value = std::llround(d);
  }
  if (!good || (n.negative && value != 0)) fail_value(field, -1, "out_of_range");
  at_ += n.text.size();
  return value;
}

std::string_view scanner::text(const char* field) {
  if (peek() != '"') fail_value(field, -1, "bad_type");
  ++at_;
  fill_text(field, longest_text, true);
  return text_;
}

scanned_id scanner::id(const char* field, std::int64_t index) {
  scanned_id out;
  if (peek() == '"') {
    ++at_;
    room(256);
    const char* p = at_;
    while (*p >= ' ' && *p < 127 && *p != '"' && *p != '\\') ++p;
    out.is = scanned_id::kind::text;
    if (*p == '"') {  // plain and short, as nearly all are: it can stay where it is
      out.text = {at_, static_cast<std::size_t>(p - at_)};
      at_ = p + 1;
      return out;
    }
    fill_text(field, longest_text, true);
    out.text = text_;
    return out;
  }
  const number n = scan_number(field, index);
  if (!n.whole) fail_value(field, index, "bad_value");
  const char* last = n.text.data() + n.text.size();
  if (std::from_chars(n.text.data(), last, out.integer).ec != std::errc{}) {
    out.is = scanned_id::kind::large;
    if (n.negative || std::from_chars(n.text.data(), last, out.large).ec != std::errc{}) {
      out.is = scanned_id::kind::decimal;
      text_ = n.text;
      out.text = text_;
    }
  }
  at_ += n.text.size();
  return out;
}

void scanner::skip() {
  switch (peek()) {
    case '{':
      object("value", [&](std::string_view) { skip(); });
      break;
    case '[':
      array("value", [&](std::int64_t) { skip(); });
      break;
    case '"':
      ++at_;
      fill_text("string", std::numeric_limits<std::size_t>::max(), false);
      break;
    case 't':
      literal("true");
      break;
    case 'f':
      literal("false");
      break;
    case 'n':
      literal("null");
      break;
    default:
      at_ += scan_number("value", -1).text.size();
  }
}

std::string_view scanner::raw_line() {
  text_.clear();
  while (room(1) > 0 && *at_ != '\n') {
    const char* stop = static_cast<const char*>(std::memchr(at_, '\n', static_cast<std::size_t>(end_ - at_)));
    const char* to = stop != nullptr ? stop : end_;
    if (text_.size() + static_cast<std::size_t>(to - at_) > longest_text) fail("too_long", "line", excerpt());
    text_.append(at_, to);
    at_ = to;
  }
  if (at_ != end_) {
    ++at_;
    ++line_;
  }
  if (!text_.empty() && text_.back() == '\r') text_.pop_back();
  return text_;
}

}  // namespace kvcache::cli
