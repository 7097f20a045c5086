// SPDX-License-Identifier: Apache-2.0
#pragma once

// A strict JSON scanner over a stream: no tree, no copy, one buffer of fixed size whatever the length of a
// line or of the file. The reader asks for what it expects and gets it, or an error with file, line, field
// and value.
//
//   buffer_  [ consumed | at_ ......... end_ | zeros ]
//                         └─ room(n) makes n bytes lie here, unless the file ends
//
// Zeros behind the end stop every loop over characters without a test of its own.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"
#include "trace/source.hpp"

namespace kvcache::cli {

/// An id as it stands in a file.
struct scanned_id {
  enum class kind : std::uint8_t { integer, large, decimal, text };
  kind is = kind::integer;
  std::int64_t integer = 0;  ///< if `integer`
  std::uint64_t large = 0;   ///< if `large`: above the largest signed number of 64 bits
  std::string_view text;  ///< if `decimal` (digits of a still larger number) or `text`; until the next call
};

/// Reads JSON values one after the other.
class scanner {
 public:
  explicit scanner(byte_source& from);

  /// Line of the next character, from 1.
  std::int64_t line() const { return line_; }
  const std::string& file() const { return from_.name(); }

  /// What lies ahead, up to `most` bytes (at most the buffer's size), for whoever guesses the format.
  std::string_view ahead(std::size_t most);

  /// Skips the mark that some programs write at the start of a text.
  void skip_byte_order_mark();
  /// Whether only white space and ends of lines are left; skips them.
  bool at_end();
  /// From here to end_row() everything must be on one line.
  void begin_row() { in_row_ = true; }
  /// Nothing else may follow on this line.
  void end_row();

  /// Calls on_field(name) for each member of an object; it must read the value. `name` lives until it does.
  template <class F>
  void object(const char* field, F&& on_field) {
    open('{', field);
    if (take_if('}')) return close();
    do {
      const std::string_view name = member_name();
      on_field(name);
    } while (more('}', field));
    close();
  }
  /// Calls on_element(index) for each element of an array; it must read the value.
  template <class F>
  void array(const char* field, F&& on_element) {
    open('[', field);
    if (take_if(']')) return close();
    std::int64_t index = 0;
    do on_element(index++);
    while (more(']', field));
    close();
  }

  /// Calls on_id(scanned_id) for each id of an array, on_small(number) for those of at most 7 digits.
  template <class Small, class Any>
  void ids(const char* field, Small&& on_small, Any&& on_id);

  /// The first character of the next value, 0 at the end: tells an object from a number.
  char peek() {
    skip_space();
    return *at_;
  }
  /// Reads `null` if that comes next.
  bool take_null();
  /// A whole number in [0, most]; also written 12.0.
  std::int64_t count(const char* field, std::int64_t most);
  /// A time in units of `unit_us` microseconds: finite and not negative.
  std::int64_t time_us(const char* field, std::int64_t unit_us);
  /// A string, unescaped, at most 64 KiB; lives until the next call.
  std::string_view text(const char* field);
  /// A number or a string; the index is that of an element of `field`, -1 for `field` itself.
  scanned_id id(const char* field, std::int64_t index = -1);
  /// Any value.
  void skip();

  /// The next line without its end, at most 64 KiB, for files that are not JSON.
  std::string_view raw_line();

  /// What a message says of the value that comes next.
  std::string excerpt();
  [[noreturn]] void fail(const char* code, std::string field, std::string value) const;
  /// The same, of a line that was already read.
  [[noreturn]] void fail_at(std::int64_t line, const char* code, std::string field, std::string value) const;

 private:
  struct number {
    std::string_view text;
    bool whole = false;  ///< digits only, but for a sign
    bool negative = false;
  };

  /// Bytes that lie ahead; reads more if they are fewer than `wanted` and there are more.
  std::size_t room(std::size_t wanted) {
    const auto have = static_cast<std::size_t>(end_ - at_);
    return have >= wanted || ended_ ? have : refill(wanted);
  }
  std::size_t refill(std::size_t wanted);
  std::size_t read_behind(std::size_t have);
  void skip_space() {
    while (static_cast<unsigned char>(*at_) <= ' ' && space()) {
    }
  }
  bool space();
  void open(char c, const char* field);
  void close() { --depth_; }
  bool take_if(char c);
  bool more(char closing, const char* field);
  std::string_view member_name();
  number scan_number(const char* field, std::int64_t index);
  void fill_text(const char* field, std::size_t most, bool keep);
  void escape(const char* field, bool keep);
  std::uint32_t hex4(const char* field);
  void append_utf8(std::uint32_t c);
  void sequence(const char* field, bool keep);
  void literal(const char* word);
  [[noreturn]] void fail_value(const char* field, std::int64_t index, const char* code);

  byte_source& from_;
  std::unique_ptr<char[]> buffer_;
  const char* at_;
  const char* end_;
  bool ended_ = false;
  bool in_row_ = false;
  int depth_ = 0;
  std::int64_t line_ = 1;
  std::string text_;
};

namespace detail {

/// Digits at the front of 8 characters, at most 7: their number and their value. No branch depends on how
/// many.
struct digits {
  int count;
  std::uint32_t value;
};
inline digits leading_digits(std::uint64_t chars) {
  constexpr std::uint64_t each = 0x0101010101010101;
  const std::uint64_t less = chars ^ (each * '0');                          // 0..9 where there is a digit
  const std::uint64_t other = ((less + each * 0x76) | less) & (each << 7);  // high bit where there is none
  const int count = other == 0 ? 8 : __builtin_ctzll(other) / 8;
  if (count == 0) return {0, 0};
  std::uint64_t d = less << (64 - 8 * count);  // last digit in the highest byte, zeros before the first
  d = (d * 10 + (d >> 8)) & 0x00ff00ff00ff00ff;
  d = (d * 100 + (d >> 16)) & 0x0000ffff0000ffff;
  d = d * 10000 + (d >> 32);
  return {count, static_cast<std::uint32_t>(d)};
}

}  // namespace detail

template <class Small, class Any>
void scanner::ids(const char* field, Small&& on_small, Any&& on_id) {
  open('[', field);
  if (take_if(']')) return close();
  std::int64_t index = 0;
  do {
    if (end_ - at_ < 32) room(32);
    while (*at_ == ' ') ++at_;
    std::uint64_t chars = 0;
    __builtin_memcpy(&chars, at_, 8);
    const detail::digits d = detail::leading_digits(chars);
    const char next = at_[d.count];
    if (d.count > 0 && d.count < 8 && (next == ',' || next == ']') && (*at_ != '0' || d.count == 1)) {
      on_small(d.value);
      at_ += d.count;
      if (next == ']') break;
      ++at_;
      ++index;
      continue;
    }
    on_id(id(field, index++));
    if (!more(']', field)) return close();
  } while (true);
  ++at_;
  close();
}

}  // namespace kvcache::cli
