// SPDX-License-Identifier: Apache-2.0
#include "trace/msgpack.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "error.hpp"

namespace kvcache::cli {
namespace {

/// Most bytes of one payload: it is in memory at once, unlike anything else that is read.
constexpr std::int64_t longest_payload = std::int64_t{16} << 20;
constexpr std::size_t deepest = 64;

/// Bytes of the packed file, one at a time.
class packed_bytes {
 public:
  explicit packed_bytes(std::unique_ptr<byte_source> from)
      : from_(std::move(from)), buffer_(std::size_t{1} << 16) {}
  const std::string& name() const { return from_->name(); }
  bool at_end() {
    if (at_ == size_ && !ended_) {
      at_ = 0;
      size_ = from_->read(buffer_.data(), buffer_.size());
      ended_ = size_ < buffer_.size();
    }
    return at_ == size_;
  }
  char current() const { return buffer_[at_]; }
  void advance() {
    ++at_;
    ++used_;
  }
  void begin_payload() { used_ = 0; }
  /// The end of the file, or of what one payload may take.
  bool stops() {
    missed_ = used_ <= longest_payload && at_end();
    return missed_ || too_long();
  }
  /// Whether a byte was wanted behind the end of the file.
  bool missed() const { return missed_; }
  bool too_long() const { return used_ > longest_payload; }

 private:
  std::unique_ptr<byte_source> from_;
  std::vector<char> buffer_;
  std::size_t at_ = 0, size_ = 0;
  std::int64_t used_ = 0;
  bool ended_ = false, missed_ = false;
};

/// What the msgpack reader of nlohmann-json walks along.
class byte_iterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  explicit byte_iterator(packed_bytes* bytes = nullptr) : bytes_(bytes) {}
  char operator*() const { return bytes_->current(); }
  byte_iterator& operator++() {
    bytes_->advance();
    return *this;
  }
  byte_iterator operator++(int) {
    bytes_->advance();
    return *this;
  }
  /// Compared with the end only.
  friend bool operator!=(const byte_iterator& a, const byte_iterator& b) { return !(a == b); }
  friend bool operator==(const byte_iterator& a, const byte_iterator& b) {
    packed_bytes* bytes = a.bytes_ != nullptr ? a.bytes_ : b.bytes_;
    return bytes == nullptr || bytes->stops();
  }

 private:
  packed_bytes* bytes_;
};

/// Writes what is read as JSON text.
class json_writer : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit json_writer(std::string& out) : out_(out) {}
  bool null() override { return value("null"); }
  bool boolean(bool v) override { return value(v ? "true" : "false"); }
  bool number_integer(number_integer_t v) override { return value(std::to_string(v)); }
  bool number_unsigned(number_unsigned_t v) override { return value(std::to_string(v)); }
  bool number_float(number_float_t v, const string_t&) override {
    if (!std::isfinite(v)) return value("NaN");
    char text[64];
    return value({text, std::to_chars(text, text + sizeof text, v).ptr});
  }
  bool string(string_t& v) override {
    separate();
    quote(v);
    return true;
  }
  bool binary(binary_t& v) override {
    constexpr char hex[] = "0123456789abcdef";
    separate();
    out_.push_back('"');
    for (const std::uint8_t b : v) out_.append(1, hex[b >> 4]).append(1, hex[b & 15]);
    out_.push_back('"');
    return true;
  }
  bool start_object(std::size_t) override { return open('{'); }
  bool key(string_t& v) override {
    separate();
    quote(v);
    out_.push_back(':');
    first_ = true;
    return true;
  }
  bool end_object() override { return close('}'); }
  bool start_array(std::size_t) override { return open('['); }
  bool end_array() override { return close(']'); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

  bool too_deep() const { return depth_ > deepest; }

 private:
  void separate() {
    if (!first_) out_.push_back(',');
    first_ = false;
  }
  bool value(std::string_view text) {
    separate();
    out_.append(text);
    return true;
  }
  bool open(char c) {
    separate();
    out_.push_back(c);
    first_ = true;
    return ++depth_ <= deepest;
  }
  bool close(char c) {
    out_.push_back(c);
    first_ = false;
    --depth_;
    return true;
  }
  void quote(const std::string& v) {
    constexpr char hex[] = "0123456789abcdef";
    out_.push_back('"');
    for (const char c : v) {
      const auto u = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') out_.push_back('\\');
      if (u < ' ') {
        out_.append("\\u00").append(1, hex[u >> 4]).append(1, hex[u & 15]);
      } else {
        out_.push_back(c);
      }
    }
    out_.push_back('"');
  }

  std::string& out_;
  bool first_ = true;
  std::size_t depth_ = 0;
};

class json_source final : public byte_source {
 public:
  explicit json_source(std::unique_ptr<byte_source> packed)
      : byte_source(packed->name()), bytes_(std::move(packed)) {}

  std::size_t read(char* to, std::size_t room) override {
    std::size_t got = 0;
    while (got < room) {
      try {
        if (at_ == text_.size() && !next_payload()) break;
      } catch (const broken_data& e) {
        throw e.at_line(std::max<std::int64_t>(payload_, 1));
      }
      const std::size_t n = std::min(room - got, text_.size() - at_);
      std::copy_n(text_.data() + at_, n, to + got);
      got += n;
      at_ += n;
    }
    return got;
  }

 private:
  bool next_payload() {
    text_.clear();
    at_ = 0;
    if (bytes_.at_end()) return false;
    ++payload_;
    bytes_.begin_payload();
    json_writer writer(text_);
    const bool good = nlohmann::json::sax_parse(byte_iterator(&bytes_), byte_iterator(), &writer,
                                                nlohmann::json::input_format_t::msgpack, false);
    if (!good) {
      const char* code = writer.too_deep() ? "too_deep" : bytes_.too_long() ? "too_long" : nullptr;
      if (code == nullptr) code = bytes_.missed() ? "truncated" : "damaged";
      throw error(failure::bad_input, code, "msgpack payload", "", name(), payload_);
    }
    text_.push_back('\n');
    return true;
  }

  packed_bytes bytes_;
  std::string text_;
  std::size_t at_ = 0;
  std::int64_t payload_ = 0;
};

}  // namespace

bool is_msgpack(std::string_view front) {
  if (front.empty()) return false;
  const auto first = static_cast<unsigned char>(front.front());
  return (first >= 0x92 && first <= 0x9f) || first == 0xdc || first == 0xdd;
}

std::unique_ptr<byte_source> json_of_msgpack(std::unique_ptr<byte_source> packed) {
  return std::make_unique<json_source>(std::move(packed));
}

}  // namespace kvcache::cli
