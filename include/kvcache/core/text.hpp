// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pieces of the texts that choose a policy or a format: reading without a copy, writing without allocation.
// For retain/parse.hpp and quant/parse.hpp.
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvcache::detail {

/// Text written into memory of a fixed size; what does not fit is counted, not written.
class text_out {
 public:
  explicit text_out(std::span<char> to) noexcept : to_(to) {
    if (!to_.empty()) to_[0] = 0;
  }
  text_out& add(std::string_view s) noexcept {
    for (const char c : s) {
      if (size_ + 1 < to_.size()) {
        to_[size_] = c;
        to_[size_ + 1] = 0;
      }
      ++size_;
    }
    return *this;
  }
  text_out& add(int64_t n) noexcept {
    char digits[24];
    const auto end = std::to_chars(digits, digits + sizeof digits, n);
    return add({digits, static_cast<size_t>(end.ptr - digits)});
  }
  size_t size() const noexcept { return size_; }

 private:
  std::span<char> to_;
  size_t size_ = 0;
};

/// Cuts `text` at the first `at`; the rest is empty if there is none.
constexpr std::string_view cut(std::string_view& text, char at) noexcept {
  const size_t i = text.find(at);
  const std::string_view head = text.substr(0, i);
  text = i == std::string_view::npos ? std::string_view{} : text.substr(i + 1);
  return head;
}

inline bool read_int(std::string_view text, int32_t& out) noexcept {
  const auto r = std::from_chars(text.data(), text.data() + text.size(), out);
  return r.ec == std::errc{} && r.ptr == text.data() + text.size();
}

/// Index of `word` among `words` ("a|b|c"), or −1.
constexpr int32_t word_index(std::string_view word, std::string_view words) noexcept {
  for (int32_t i = 0; !words.empty(); ++i) {
    if (cut(words, '|') == word) return i;
  }
  return -1;
}
constexpr std::string_view word_at(int32_t index, std::string_view words) noexcept {
  for (; index > 0; --index) cut(words, '|');
  return cut(words, '|');
}

}  // namespace kvcache::detail
