// SPDX-License-Identifier: Apache-2.0
// Strings: escapes, and bytes that must be UTF-8.
#include "trace/scanner.hpp"

namespace kvcache::cli {

/// Reads a string from behind its first quote to behind its last one, into text_ if it is to be kept.
void scanner::fill_text(const char* field, std::size_t most, bool keep) {
  text_.clear();
  while (true) {
    const char* from = at_;
    while (static_cast<unsigned char>(*at_) - 32u < 95u && *at_ != '"' && *at_ != '\\') ++at_;
    if (keep) text_.append(from, at_);
    if (text_.size() > most) fail("too_long", field, text_);
    if (at_ == end_) {
      if (room(1) == 0) fail("truncated", field, text_);
    } else if (*at_ == '"') {
      ++at_;
      return;
    } else if (*at_ == '\\') {
      escape(field, keep);
    } else if (*at_ == '\n' && in_row_) {
      fail("truncated", field, text_);
    } else {
      sequence(field, keep);
    }
  }
}

void scanner::escape(const char* field, bool keep) {
  room(16);
  const char c = at_[1];
  constexpr std::string_view from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
  const std::size_t i = c != 0 ? from.find(c) : std::string_view::npos;
  if (i != std::string_view::npos) {
    at_ += 2;
    if (keep) text_.push_back(to[i]);
    return;
  }
  if (c != 'u') fail(room(2) < 2 ? "truncated" : "bad_syntax", field, excerpt());
  std::uint32_t code = hex4(field);
  const bool high = code >= 0xd800 && code < 0xdc00;
  if (high && at_[0] == '\\' && at_[1] == 'u') {
    const std::uint32_t low = hex4(field);
    if (low < 0xdc00 || low >= 0xe000) fail("bad_utf8", field, "a half of a surrogate pair");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  } else if (code >= 0xd800 && code < 0xe000) {
    fail("bad_utf8", field, "a half of a surrogate pair");
  }
  if (keep) append_utf8(code);
}

/// Reads \uXXXX.
std::uint32_t scanner::hex4(const char* field) {
  std::uint32_t code = 0;
  for (int i = 2; i < 6; ++i) {
    const char c = at_[i];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) fail(room(6) < 6 ? "truncated" : "bad_syntax", field, excerpt());
    code = code << 4 | static_cast<std::uint32_t>(digit);
  }
  at_ += 6;
  return code;
}

void scanner::append_utf8(std::uint32_t c) {
  const auto put = [&](std::uint32_t byte) { text_.push_back(static_cast<char>(byte)); };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xc0 | c >> 6);
  } else {
    if (c < 0x10000) {
      put(0xe0 | c >> 12);
    } else {
      put(0xf0 | c >> 18);
      put(0x80 | (c >> 12 & 0x3f));
    }
    put(0x80 | (c >> 6 & 0x3f));
  }
  put(0x80 | (c & 0x3f));
}

/// Reads one character of two to four bytes; refuses overlong forms, surrogates and what lies past U+10FFFF.
void scanner::sequence(const char* field, bool keep) {
  room(4);
  const auto byte = [&](int i) { return static_cast<unsigned char>(at_[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) fail("bad_syntax", field, excerpt());  // a control character
  int length = 0;
  unsigned low = 0x80, high = 0xbf;  // what the second byte may be
  if (first >= 0xc2 && first < 0xe0) length = 2;
  if (first >= 0xe0 && first < 0xf0) {
    length = 3;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;
  }
  if (first >= 0xf0 && first < 0xf5) {
    length = 4;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
  }
  bool good = length > 0 && byte(1) >= low && byte(1) <= high;
  for (int i = 2; i < length; ++i) good = good && (byte(i) & 0xc0) == 0x80;
  if (!good) fail("bad_utf8", field, excerpt());
  if (keep) text_.append(at_, static_cast<std::size_t>(length));
  at_ += length;
}

}  // namespace kvcache::cli
