// SPDX-License-Identifier: Apache-2.0
#pragma once

// Byte-level BPE as the model file describes it ("gpt2" vocabulary, "smollm" splitting):
//
//   text -> special tokens cut out -> words (Unicode classes) -> bytes -> merges by rank -> ids
//
// Text is untrusted: it need not be UTF-8. Each byte that is not part of a well-formed character becomes a
// word of its own. Bytes for which the vocabulary has no token are dropped.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "error.hpp"
#include "gguf.hpp"
#include "kv_backend.hpp"

namespace engine {

struct chat_message {
  std::string role;
  std::string content;
};

/// Whether the text of special tokens inside a text stands for the tokens.
enum class specials { parse, as_text };

/// Turns text into tokens and back. Movable.
/// Thread safety: const functions by any number of threads at a time.
class tokenizer {
 public:
  /// Reads vocabulary and merges; nothing refers to the file afterwards.
  static result<tokenizer> load(const gguf_file& file);

  tokenizer(tokenizer&&) noexcept;
  tokenizer& operator=(tokenizer&&) noexcept;
  ~tokenizer();

  /// Cost: O(n log n) in the length of the longest word, linear in the text.
  std::vector<token_id> encode(std::string_view text, specials handling) const;

  /// The messages in the model's chat form, ready for the assistant's turn; a default system message is put
  /// in front when the first message is not one. Contents are taken as plain text: they cannot inject turns.
  /// Fails: cannot_run when the vocabulary lacks the chat markers.
  result<std::vector<token_id>> encode_chat(std::span<const chat_message> messages) const;

  /// The bytes of one token, empty for an id outside the vocabulary.
  std::string_view bytes_of(token_id id) const;

  std::string decode(std::span<const token_id> ids) const;

  int size() const { return static_cast<int>(bytes_.size()); }
  /// Whether generation ends with this token.
  bool is_stop(token_id id) const;

 private:
  struct pattern;
  struct merge {
    std::uint32_t rank = 0;
    token_id merged = 0;
  };

  struct part;
  struct candidate;

  tokenizer();
  status load_vocabulary(const gguf_file& file);
  status load_specials(const gguf_file& file);
  status load_merges(const gguf_file& file);
  status load_stops(const gguf_file& file);

  void encode_plain(std::string_view text, std::vector<token_id>& out) const;
  void encode_valid(std::string_view text, std::vector<token_id>& out) const;
  void encode_word(std::string_view word, std::vector<token_id>& out) const;
  void consider(const std::vector<part>& parts, int left, std::vector<candidate>& waiting) const;
  const merge* find_merge(token_id left, token_id right) const;
  std::pair<token_id, std::size_t> special_at(std::string_view text) const;

  std::unordered_map<std::string, token_id> ids_;  ///< by the vocabulary's own spelling
  std::vector<std::string> bytes_;                 ///< by id
  std::vector<token_id> special_ids_;              ///< longest first
  bool special_first_[256] = {};                   ///< bytes some special token begins with
  token_id byte_ids_[256] = {};                    ///< -1: no token
  std::unordered_map<std::uint64_t, merge> merges_;
  std::vector<token_id> stops_;
  std::unique_ptr<pattern> pattern_;
};

/// Decodes token by token for a printer: bytes that may still become a character are held back.
class stream_decoder {
 public:
  explicit stream_decoder(const tokenizer& t) : tokenizer_(&t) {}

  /// Complete characters that are known after this token.
  std::string push(token_id id);
  /// What was held back.
  std::string flush();

 private:
  const tokenizer* tokenizer_;
  std::string held_;
};

/// Length in bytes of the well-formed UTF-8 character at the start of `text`; 0 when there is none.
std::size_t utf8_length(std::string_view text);

}  // namespace engine
