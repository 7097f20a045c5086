// SPDX-License-Identifier: Apache-2.0
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.hpp"

#include <pcre2.h>

#include <algorithm>
#include <new>

namespace engine {
namespace {

// First alternative that matches. Digits of any script are words of their own and come first; they also end a
// run, so white space before one is not shortened by the look-ahead. White space is spelled out: PCRE2's \s
// has one character more (U+180E) than Unicode's White_Space.
#define ENGINE_SPACE \
  "\\x09-\\x0D\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
constexpr char word_pattern[] = "\\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?[^" ENGINE_SPACE
                                "\\p{L}\\p{N}]+"
                                "|[" ENGINE_SPACE "]+(?![^" ENGINE_SPACE "\\p{N}])|[" ENGINE_SPACE "]+";
#undef ENGINE_SPACE

constexpr std::string_view default_system =
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

// The printable character that stands for a byte in the vocabulary's spelling.
std::uint32_t spelling_of(unsigned byte) {
  const auto printable = [](unsigned b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  };
  if (printable(byte)) return byte;
  std::uint32_t next = 256;
  for (unsigned b = 0; b < byte; ++b) next += printable(b) ? 0 : 1;
  return next;
}

// Code points used here are below 0x800.
std::string utf8(std::uint32_t code_point) {
  if (code_point < 0x80) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xC0 | (code_point >> 6)), static_cast<char>(0x80 | (code_point & 0x3F))};
}

using spelling_map = std::unordered_map<std::string, char>;

// The bytes a vocabulary entry stands for; a character that stands for no byte is kept as it is.
std::string unspell(std::string_view spelled, const spelling_map& byte_of) {
  std::string out;
  for (std::size_t at = 0; at < spelled.size();) {
    const std::size_t length = std::max<std::size_t>(1, utf8_length(spelled.substr(at)));
    const std::string character(spelled.substr(at, length));
    const auto found = byte_of.find(character);
    if (found == byte_of.end()) {
      out += character;
    } else {
      out += found->second;
    }
    at += length;
  }
  return out;
}

std::uint64_t pair_key(token_id left, token_id right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

}  // namespace

std::size_t utf8_length(std::string_view text) {
  if (text.empty()) return 0;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto continues = [&](std::size_t i) { return i < text.size() && (byte(i) & 0xC0) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4 || !continues(1)) return 0;
  const unsigned second = byte(1);
  if (first < 0xE0) return 2;
  if (first < 0xF0) {
    const bool overlong = first == 0xE0 && second < 0xA0;
    const bool surrogate = first == 0xED && second >= 0xA0;
    return !overlong && !surrogate && continues(2) ? 3 : 0;
  }
  const bool overlong = first == 0xF0 && second < 0x90;
  const bool too_large = first == 0xF4 && second >= 0x90;
  return !overlong && !too_large && continues(2) && continues(3) ? 4 : 0;
}

struct tokenizer::pattern {
  pcre2_code* code = nullptr;
  pattern() = default;
  pattern(const pattern&) = delete;
  pattern& operator=(const pattern&) = delete;
  ~pattern() { pcre2_code_free(code); }
};

tokenizer::tokenizer() = default;
tokenizer::tokenizer(tokenizer&&) noexcept = default;
tokenizer& tokenizer::operator=(tokenizer&&) noexcept = default;
tokenizer::~tokenizer() = default;

result<tokenizer> tokenizer::load(const gguf_file& file) {
  tokenizer t;
  const auto fail = [&](error e) {
    e.file = file.path();
    return e;
  };
  for (const auto& [key, wanted] : {std::pair<const char*, std::string_view>{"tokenizer.ggml.model", "gpt2"},
                                    {"tokenizer.ggml.pre", "smollm"}}) {
    const auto found = file.string_value(key);
    if (!found) return fail(found.error());
    if (*found != wanted) return fail(cannot_run("unsupported", key, std::string(*found)));
  }
  if (status s = t.load_vocabulary(file); !s) return fail(s.error());
  if (status s = t.load_specials(file); !s) return fail(s.error());
  if (status s = t.load_merges(file); !s) return fail(s.error());
  if (status s = t.load_stops(file); !s) return fail(s.error());

  int code = 0;
  PCRE2_SIZE offset = 0;
  t.pattern_ = std::make_unique<pattern>();
  t.pattern_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(word_pattern), sizeof(word_pattern) - 1,
                                   PCRE2_UTF | PCRE2_UCP, &code, &offset, nullptr);
  if (t.pattern_->code == nullptr)
    return cannot_run("unsupported", "pcre2",
                      "error " + std::to_string(code) + " (Unicode support missing?)");
  // Without the compiler the interpreter gives the same answers, only slower.
  static_cast<void>(pcre2_jit_compile(t.pattern_->code, PCRE2_JIT_COMPLETE));
  return t;
}

status tokenizer::load_vocabulary(const gguf_file& file) {
  const auto tokens = file.string_array("tokenizer.ggml.tokens");
  if (!tokens) return tokens.error();
  if (tokens->empty() || tokens->size() > 0x7FFFFFFF)
    return bad_input("bad_value", "tokenizer.ggml.tokens.count", std::to_string(tokens->size()));
  spelling_map byte_of;
  for (unsigned byte = 0; byte < 256; ++byte) byte_of[utf8(spelling_of(byte))] = static_cast<char>(byte);
  bytes_.reserve(tokens->size());
  ids_.reserve(tokens->size());
  for (const std::string_view token : *tokens) {
    ids_.emplace(std::string(token), static_cast<token_id>(bytes_.size()));
    bytes_.push_back(unspell(token, byte_of));
  }
  for (unsigned byte = 0; byte < 256; ++byte) {
    const auto found = ids_.find(utf8(spelling_of(byte)));
    byte_ids_[byte] = found == ids_.end() ? -1 : found->second;
  }
  return {};
}

status tokenizer::load_specials(const gguf_file& file) {
  const auto types = file.integer_array("tokenizer.ggml.token_type");
  if (!types) return types.error();
  if (types->size() != bytes_.size())
    return bad_input("bad_value", "tokenizer.ggml.token_type.count", std::to_string(types->size()));
  const auto tokens = file.string_array("tokenizer.ggml.tokens");
  if (!tokens) return tokens.error();
  constexpr std::int64_t control = 3;
  for (std::size_t id = 0; id < types->size(); ++id) {
    if ((*types)[id] != control) continue;
    const std::string_view text = (*tokens)[id];
    if (text.empty())
      return bad_input("bad_value", "tokenizer.ggml.tokens[" + std::to_string(id) + "]", "empty");
    bytes_[id] = std::string(text);
    special_ids_.push_back(static_cast<token_id>(id));
    special_first_[static_cast<unsigned char>(text[0])] = true;
  }
  std::stable_sort(special_ids_.begin(), special_ids_.end(), [this](token_id a, token_id b) {
    return bytes_[static_cast<std::size_t>(a)].size() > bytes_[static_cast<std::size_t>(b)].size();
  });
  return {};
}

status tokenizer::load_merges(const gguf_file& file) {
  const auto merges = file.string_array("tokenizer.ggml.merges");
  if (!merges) return merges.error();
  merges_.reserve(merges->size());
  for (std::size_t rank = 0; rank < merges->size(); ++rank) {
    const std::string_view text = (*merges)[rank];
    const std::size_t space = text.find(' ', 1);
    const auto fail = [&] {
      return bad_input("bad_value", "tokenizer.ggml.merges[" + std::to_string(rank) + "]", std::string(text));
    };
    if (space == std::string_view::npos) return fail();
    const std::string left(text.substr(0, space));
    const std::string right(text.substr(space + 1));
    const auto left_id = ids_.find(left);
    const auto right_id = ids_.find(right);
    const auto merged_id = ids_.find(left + right);
    if (left_id == ids_.end() || right_id == ids_.end() || merged_id == ids_.end()) return fail();
    merges_.emplace(pair_key(left_id->second, right_id->second),
                    merge{static_cast<std::uint32_t>(rank), merged_id->second});
  }
  return {};
}

status tokenizer::load_stops(const gguf_file& file) {
  const auto eos = file.unsigned_value("tokenizer.ggml.eos_token_id");
  if (!eos) return eos.error();
  if (*eos >= bytes_.size())
    return bad_input("bad_value", "tokenizer.ggml.eos_token_id", std::to_string(*eos));
  stops_.push_back(static_cast<token_id>(*eos));
  for (const char* text : {"<|endoftext|>", "<|im_end|>"}) {
    const auto found = ids_.find(text);
    if (found != ids_.end() && !is_stop(found->second)) stops_.push_back(found->second);
  }
  return {};
}

bool tokenizer::is_stop(token_id id) const {
  return std::find(stops_.begin(), stops_.end(), id) != stops_.end();
}

std::string_view tokenizer::bytes_of(token_id id) const {
  if (id < 0 || id >= size()) return {};
  return bytes_[static_cast<std::size_t>(id)];
}

std::string tokenizer::decode(std::span<const token_id> ids) const {
  std::string out;
  for (const token_id id : ids) out += bytes_of(id);
  return out;
}

// The special token `text` begins with and its length, or {-1, 0}.
std::pair<token_id, std::size_t> tokenizer::special_at(std::string_view text) const {
  for (const token_id id : special_ids_) {
    const std::string& special = bytes_[static_cast<std::size_t>(id)];
    if (text.substr(0, special.size()) == special) return {id, special.size()};
  }
  return {-1, 0};
}

std::vector<token_id> tokenizer::encode(std::string_view text, specials handling) const {
  std::vector<token_id> out;
  std::size_t begin = 0;
  for (std::size_t at = 0; handling == specials::parse && at < text.size();) {
    const auto [id, length] = special_first_[static_cast<unsigned char>(text[at])]
                                  ? special_at(text.substr(at))
                                  : std::pair<token_id, std::size_t>{-1, 0};
    if (length == 0) {
      ++at;
      continue;
    }
    encode_plain(text.substr(begin, at - begin), out);
    out.push_back(id);
    at += length;
    begin = at;
  }
  encode_plain(text.substr(begin), out);
  return out;
}

// Cuts the text into runs of well-formed UTF-8 and single stray bytes.
void tokenizer::encode_plain(std::string_view text, std::vector<token_id>& out) const {
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text.substr(at, 4));
    if (length != 0) {
      at += length;
      continue;
    }
    encode_valid(text.substr(begin, at - begin), out);
    encode_word(text.substr(at, 1), out);
    begin = ++at;
  }
  encode_valid(text.substr(begin), out);
}

void tokenizer::encode_valid(std::string_view text, std::vector<token_id>& out) const {
  if (text.empty()) return;
  const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match(
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  if (match == nullptr) throw std::bad_alloc();
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  for (std::size_t at = 0; at < text.size();) {
    const int found = pcre2_match(pattern_->code, subject, text.size(), at,
                                  PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    // Every character matches some alternative; should PCRE2 hit a limit of its own, go on by characters.
    std::size_t end = at + utf8_length(text.substr(at, 4));
    if (found > 0) end = std::max<std::size_t>(end, pcre2_get_ovector_pointer(match.get())[1]);
    encode_word(text.substr(at, end - at), out);
    at = end;
  }
}

const tokenizer::merge* tokenizer::find_merge(token_id left, token_id right) const {
  if (left < 0 || right < 0) return nullptr;
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

// The parts of a word while they merge: a linked list over the word's bytes, where a merge grows the left
// part.
struct tokenizer::part {
  token_id id;
  int previous;
  int next;
};

// A merge that was possible when it was found. Ordered so that the heap's top is the lowest rank, then the
// leftmost.
struct tokenizer::candidate {
  std::uint32_t rank;
  int left;
  token_id left_id, right_id, merged;
  bool operator<(const candidate& other) const {
    return rank != other.rank ? rank > other.rank : left > other.left;
  }
};

void tokenizer::consider(const std::vector<part>& parts, int left, std::vector<candidate>& waiting) const {
  if (left < 0) return;
  const part& at = parts[static_cast<std::size_t>(left)];
  if (at.next < 0) return;
  const token_id right_id = parts[static_cast<std::size_t>(at.next)].id;
  const merge* m = find_merge(at.id, right_id);
  if (m == nullptr) return;
  waiting.push_back({m->rank, left, at.id, right_id, m->merged});
  std::push_heap(waiting.begin(), waiting.end());
}

// Candidates wait in a heap; one whose parts have changed meanwhile is dropped when it comes up.
void tokenizer::encode_word(std::string_view word, std::vector<token_id>& out) const {
  if (word.empty()) return;
  const int count = static_cast<int>(word.size());
  std::vector<part> parts;
  parts.reserve(word.size());
  for (int i = 0; i < count; ++i) {
    const auto byte = static_cast<unsigned char>(word[static_cast<std::size_t>(i)]);
    parts.push_back({byte_ids_[byte], i - 1, i + 1 < count ? i + 1 : -1});
  }
  const auto at = [&](int i) -> part& { return parts[static_cast<std::size_t>(i)]; };
  std::vector<candidate> waiting;
  for (int i = 0; i < count; ++i) consider(parts, i, waiting);
  while (!waiting.empty()) {
    std::pop_heap(waiting.begin(), waiting.end());
    const candidate c = waiting.back();
    waiting.pop_back();
    const int right = at(c.left).next;
    if (at(c.left).id != c.left_id || right < 0 || at(right).id != c.right_id) continue;
    at(c.left).id = c.merged;
    at(c.left).next = at(right).next;
    if (at(right).next >= 0) at(at(right).next).previous = c.left;
    at(right).id = -2;  // consumed
    consider(parts, at(c.left).previous, waiting);
    consider(parts, c.left, waiting);
  }
  for (int i = 0; i >= 0; i = at(i).next) {
    if (at(i).id >= 0) out.push_back(at(i).id);
  }
}

result<std::vector<token_id>> tokenizer::encode_chat(std::span<const chat_message> messages) const {
  const auto marker = [&](const char* text) {
    const auto found = ids_.find(text);
    return found == ids_.end() ? token_id{-1} : found->second;
  };
  const token_id begin = marker("<|im_start|>");
  const token_id end = marker("<|im_end|>");
  if (begin < 0 || end < 0) return cannot_run("unsupported", "tokenizer.ggml.tokens", "no chat markers");
  std::vector<token_id> out;
  const auto turn = [&](std::string_view role, std::string_view content) {
    out.push_back(begin);
    encode_plain(std::string(role) + "\n" + std::string(content), out);
    out.push_back(end);
    encode_plain("\n", out);
  };
  if (messages.empty() || messages[0].role != "system") turn("system", default_system);
  for (const chat_message& m : messages) turn(m.role, m.content);
  out.push_back(begin);
  encode_plain("assistant\n", out);
  return out;
}

std::string stream_decoder::push(token_id id) {
  held_ += tokenizer_->bytes_of(id);
  // Only the last three bytes can be the start of a character that is not complete yet.
  std::size_t keep = 0;
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, held_.size()); ++back) {
    const auto byte = static_cast<unsigned char>(held_[held_.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;
    const std::size_t needed = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    if (needed > back) keep = back;
    break;
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return out;
}

std::string stream_decoder::flush() {
  return std::exchange(held_, {});
}

}  // namespace engine
