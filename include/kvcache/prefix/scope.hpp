// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who may share a cached prefix. A scope is a canonical byte string of typed, length-prefixed parts, so that
// adapter "x", salt "x", the empty salt and no salt are four different scopes; two sequences share only if
// these bytes are equal. There is no default: isolation is chosen.
//
//   segment = part*     part = | tag 1 byte | length 2 bytes, little endian | value |
//
// A scope may narrow along the text: the first segment holds from token 0, the next one from a given token
// on. That is how a public system prompt stays shared while what follows is a tenant's own, and how a
// picture's digest separates two texts only from the picture on.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// A sharing domain, chosen by the server and never by the caller of a request: whoever may name a scope may
/// probe what is cached in it. Values longer than `max_bytes` together make the scope invalid, and opening
/// with it is refused.
class scope {
 public:
  static constexpr size_t max_bytes = 160;    ///< of one segment, the three of each part's head included
  static constexpr int32_t max_segments = 4;  ///< the first one and three borders along the text

  scope() = delete;
  /// Everyone shares: for a single user, or for prompts that are public.
  static scope shared() noexcept { return scope(tag::shared, {}); }
  /// Only requests with the same salt share.
  static scope tenant(std::string_view salt) noexcept { return scope(tag::tenant, salt); }

  /// Weights differ: adapter `id` in its `generation` (a counter that grows when the same name gets new
  /// weights).
  scope& adapter(std::string_view id, uint64_t generation) noexcept {
    put(tag::adapter, id);
    return number(tag::generation, generation);
  }
  /// Content that the token ids do not show: digest of pictures, sound or embeddings.
  scope& media(std::string_view digest) noexcept { return put(tag::media, digest); }
  /// Version of the base weights; a new one makes everything older unreachable.
  scope& weights(uint64_t version) noexcept { return number(tag::weights, version); }
  /// From token `first` on, `narrower` holds instead. Segments come in ascending order of `first`.
  scope& from(int32_t first, const scope& narrower) noexcept;

  /// Segments along the text, at least one.
  int32_t segments() const noexcept { return count_; }
  /// Token from which segment `i` holds.
  int32_t first_token(int32_t i) const noexcept { return segment_[i].first; }
  /// Canonical bytes of segment `i`, in the form drawn above.
  std::string_view key(int32_t i) const noexcept { return {segment_[i].data, segment_[i].size}; }
  /// Why this scope cannot be used: bad_argument for parts that are too long or borders out of order.
  status check() const noexcept { return error_; }

 private:
  friend class scope_table;
  enum class tag : char { shared = 1, tenant, adapter, generation, media, weights, codec, border };
  struct segment {
    int32_t first;
    uint16_t size;
    char data[max_bytes];
  };

  scope(tag t, std::string_view value) noexcept { put(t, value); }
  scope& put(tag t, std::string_view value) noexcept;
  scope& number(tag t, uint64_t v) noexcept {
    char b[8];
    for (int i = 0; i < 8; ++i) b[i] = static_cast<char>(v >> (8 * i));
    return put(t, {b, 8});
  }

  segment segment_[max_segments] = {};
  int32_t count_ = 1;
  status error_{};
};

/// The scope ids of one sequence: id(i) holds from unit first(i) on.
struct scope_ids {
  int32_t count = 0;                             ///< segments
  int32_t first_unit[scope::max_segments] = {};  ///< [count] first unit of each
  int32_t id[scope::max_segments] = {};          ///< [count] id of each

  /// Equal ids from equal units on.
  constexpr bool operator==(const scope_ids&) const noexcept = default;
  /// The id that holds for a unit (not a token).
  int32_t at(int32_t unit) const noexcept {
    int32_t i = count - 1;
    while (i > 0 && first_unit[i] > unit) --i;
    return id[i];
  }
};

/// Gives equal scope keys equal small ids, by comparing all their bytes. An id lives as long as a sequence or
/// a node refers to it. Cost: O(scopes in use) 4-byte comparisons per acquire. Memory: 184 bytes per scope.
class scope_table {
 public:
  /// `codec` is mixed into every key: sequences of caches with other formats never meet.
  status create(int32_t capacity, uint64_t codec) noexcept;
  /// Ids for all segments, each with one more reference. A unit belongs to the segment of its last token, and
  /// to all others that begin in it. Fails: the scope's own error (also when the segments of one unit are
  /// longer than scope::max_bytes together), out_of_scopes; then nothing is held.
  result<scope_ids> acquire(const scope& s, int32_t unit) noexcept;
  /// Ids of those segments that are known, −1 for the others; nothing changes. Empty for an invalid scope.
  scope_ids find(const scope& s, int32_t unit) const noexcept;
  /// One reference less for every id of a sequence.
  void release(const scope_ids& ids) noexcept {
    for (int32_t i = 0; i < ids.count; ++i) drop(ids.id[i]);
  }
  /// One reference more for every id of a sequence: a fork.
  void hold(const scope_ids& ids) noexcept {
    for (int32_t i = 0; i < ids.count; ++i) hold(ids.id[i]);
  }
  /// One reference more: a node stored under it.
  void hold(int32_t id) noexcept { ++entry_[static_cast<size_t>(id)].refs; }
  /// One reference less; without any the id may be given to another key.
  void drop(int32_t id) noexcept {
    entry& e = entry_[static_cast<size_t>(id)];
    if (--e.refs == 0) --used_;
  }
  /// Keys in use.
  int32_t size() const noexcept { return used_; }
  /// Hash of the key of an id: the same for the same key, whatever its id; others may share it.
  uint32_t fingerprint(int32_t id) const noexcept { return hash_[static_cast<size_t>(id)]; }
  /// Sequences and nodes that refer to an id.
  int32_t references(int32_t id) const noexcept { return entry_[static_cast<size_t>(id)].refs; }

 private:
  static constexpr size_t codec_bytes = 11;
  struct entry {
    int32_t refs;
    uint16_t size;
    char data[scope::max_bytes + codec_bytes];
  };
  struct key_buffer {
    char data[scope::max_bytes + codec_bytes];
  };
  result<std::string_view> full_key(const scope& s, int32_t i, int32_t unit, key_buffer& out) const noexcept;
  static uint32_t hash_of(std::string_view key) noexcept;
  int32_t lookup(std::string_view key, uint32_t hash) const noexcept;
  int32_t find_or_add(std::string_view key) noexcept;

  fixed_array<entry> entry_;
  fixed_array<uint32_t> hash_;
  int32_t used_ = 0;
  int32_t limit_ = 0;  // ids at and above it were never used
  uint64_t codec_ = 0;
};

inline scope& scope::put(tag t, std::string_view value) noexcept {
  segment& s = segment_[count_ - 1];
  if (value.size() + 3 > max_bytes - s.size) {
    error_ = {errc::bad_argument, "scope", static_cast<int64_t>(value.size())};
    return *this;
  }
  char* p = s.data + s.size;
  p[0] = static_cast<char>(t);
  p[1] = static_cast<char>(value.size() & 0xff);
  p[2] = static_cast<char>(value.size() >> 8);
  if (!value.empty()) std::memcpy(p + 3, value.data(), value.size());
  s.size = static_cast<uint16_t>(s.size + value.size() + 3);
  return *this;
}

inline scope& scope::from(int32_t first, const scope& narrower) noexcept {
  if (!narrower.error_) error_ = narrower.error_;
  if (first <= segment_[count_ - 1].first || count_ == max_segments || narrower.count_ != 1) {
    error_ = {errc::bad_argument, "scope.from", first};
    return *this;
  }
  segment_[count_] = narrower.segment_[0];
  segment_[count_++].first = first;
  return number(tag::border, static_cast<uint64_t>(first));  // the same picture elsewhere is another text
}

inline status scope_table::create(int32_t capacity, uint64_t codec) noexcept {
  if (capacity < 1) return {errc::bad_argument, "max_scopes", capacity};
  fixed_array<entry> fresh;
  fixed_array<uint32_t> fresh_hash;
  if (!fresh.create(static_cast<size_t>(capacity)) || !fresh_hash.create(static_cast<size_t>(capacity))) {
    return {errc::out_of_memory, "max_scopes", capacity};
  }
  entry_ = std::move(fresh);
  hash_ = std::move(fresh_hash);
  used_ = limit_ = 0;
  codec_ = codec;
  return {};
}

// Segments that begin in one unit share a node, so its key carries all of them: two pictures in one unit must
// both agree.
inline result<std::string_view> scope_table::full_key(const scope& s, int32_t i, int32_t unit,
                                                      key_buffer& out) const noexcept {
  int32_t from = i;
  while (from > 0 && s.segment_[from - 1].first / unit == s.segment_[i].first / unit) --from;
  size_t size = 0;
  for (int32_t k = from; k <= i; ++k) {
    const std::string_view key = s.key(k);
    if (key.size() > scope::max_bytes - size) {
      return {errc::bad_argument, "scope", static_cast<int64_t>(size + key.size())};
    }
    std::memcpy(out.data + size, key.data(), key.size());
    size += key.size();
  }
  char* p = out.data + size;
  p[0] = static_cast<char>(scope::tag::codec);
  p[1] = 8;
  p[2] = 0;
  for (int b = 0; b < 8; ++b) p[3 + b] = static_cast<char>(codec_ >> (8 * b));
  return std::string_view{out.data, size + codec_bytes};
}

inline uint32_t scope_table::hash_of(std::string_view key) noexcept {
  uint64_t h = key.size();
  for (const char c : key) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return static_cast<uint32_t>(mix64(h));
}

// Scopes in use are few (tenants with something cached), and this runs once per open: a scan over 4-byte
// hashes.
inline int32_t scope_table::lookup(std::string_view key, uint32_t hash) const noexcept {
  for (int32_t id = 0; id < limit_; ++id) {
    const entry& e = entry_[static_cast<size_t>(id)];
    if (hash_[static_cast<size_t>(id)] == hash && e.refs != 0 && std::string_view{e.data, e.size} == key)
      return id;
  }
  return -1;
}

inline scope_ids scope_table::find(const scope& s, int32_t unit) const noexcept {
  scope_ids ids;
  if (!s.error_) return ids;
  key_buffer buffer;
  for (int32_t i = 0; i < s.count_; ++i) {
    const result<std::string_view> key = full_key(s, i, unit, buffer);
    if (!key) return {};
    ids.first_unit[i] = s.segment_[i].first / unit;
    ids.id[i] = lookup(*key, hash_of(*key));
    ids.count = i + 1;
  }
  return ids;
}

inline result<scope_ids> scope_table::acquire(const scope& s, int32_t unit) noexcept {
  if (!s.error_) return s.error_;
  scope_ids ids;
  key_buffer buffer;
  for (int32_t i = 0; i < s.count_; ++i) {
    const result<std::string_view> key = full_key(s, i, unit, buffer);
    const int32_t id = key ? find_or_add(*key) : -1;
    if (id < 0) {
      release(ids);
      if (!key) return key.error();
      return {errc::out_of_scopes, "max_scopes", static_cast<int64_t>(entry_.size())};
    }
    ids.first_unit[i] = s.segment_[i].first / unit;
    ids.id[i] = id;
    ids.count = i + 1;
  }
  return ids;
}

inline int32_t scope_table::find_or_add(std::string_view key) noexcept {
  const uint32_t hash = hash_of(key);
  if (const int32_t id = lookup(key, hash); id >= 0) {
    hold(id);
    return id;
  }
  if (used_ == static_cast<int32_t>(entry_.size())) return -1;
  int32_t vacant = 0;
  while (vacant < limit_ && entry_[static_cast<size_t>(vacant)].refs != 0) ++vacant;
  limit_ = std::max(limit_, vacant + 1);
  entry& e = entry_[static_cast<size_t>(vacant)];
  e.refs = 1;
  e.size = static_cast<uint16_t>(key.size());
  std::memcpy(e.data, key.data(), key.size());
  hash_[static_cast<size_t>(vacant)] = hash;
  ++used_;
  return vacant;
}

}  // namespace kvcache
