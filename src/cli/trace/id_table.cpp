// SPDX-License-Identifier: Apache-2.0
#include "trace/id_table.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "error.hpp"

namespace kvcache::cli {
namespace {

constexpr std::uint64_t odd_a = 0x9e3779b97f4a7c15, odd_b = 0xd6e8feb86659fd93;

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 32)) * odd_b;
  x = (x ^ (x >> 29)) * odd_a;
  return x ^ (x >> 32);
}

std::uint64_t hash_of(std::string_view bytes, id_table::kind k) {
  std::uint64_t h = bytes.size() * odd_a + static_cast<std::uint64_t>(k);
  while (bytes.size() >= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), 8);
    h = mix(h ^ word);
    bytes.remove_prefix(8);
  }
  std::uint64_t word = 0;
  if (!bytes.empty()) std::memcpy(&word, bytes.data(), bytes.size());
  return mix(h ^ word);
}

std::uint64_t hash_of(std::uint64_t word, id_table::kind k) {
  return mix(word + odd_a * (static_cast<std::uint64_t>(k) + 1));
}

bool is_text(id_table::kind k) {
  return k >= id_table::kind::decimal;
}

constexpr std::size_t arena_chunk = std::size_t{1} << 18;

}  // namespace

std::int32_t id_table::next_number() {
  if (size_ == std::numeric_limits<std::int32_t>::max()) {
    throw error(failure::bad_input, "too_many", "distinct ids", "more than 2147483647");
  }
  return size_++;
}

std::int32_t id_table::of_new_or_far(std::int64_t id) {
  const auto i = static_cast<std::uint64_t>(id);
  if (id < 0 || (i >= direct_.size() && !grow_direct(i))) return of_word(i, kind::integer);
  // An id that was far when it came first stays in the hash table.
  if (words_.size() != 0) {
    for (std::size_t s = first_slot(hash_of(i, kind::integer)); slots_[s] != 0;
         s = s + 1 == slots_.size() ? 0 : s + 1) {
      const auto e = static_cast<std::size_t>(slots_[s] - 1);
      if (kinds_[e] == kind::integer && words_[e] == i) return direct_[i] = numbers_[e];
    }
  }
  return direct_[i] = next_number();
}

/// Makes room for `id` in the array if that stays small for the number of ids there are.
bool id_table::grow_direct(std::uint64_t id) {
  const std::uint64_t here = static_cast<std::uint64_t>(size_ - scope_start_);
  const std::uint64_t limit = 4 * here + 65536;
  if (id >= limit) return false;
  const std::uint64_t wanted = std::min(limit, std::max<std::uint64_t>(id + 1, direct_.size() * 3 / 2 + 64));
  std::vector<std::int32_t> grown;
  grown.reserve(wanted);
  grown = direct_;
  grown.resize(wanted, -1);
  direct_ = std::move(grown);
  return true;
}

std::int32_t id_table::of_unsigned(std::uint64_t id) {
  if (id <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return of(static_cast<std::int64_t>(id));
  }
  return of_word(id, kind::large);
}

/// Where the search for a hash starts: the hash scaled to the number of slots, which is no power of two.
std::size_t id_table::first_slot(std::uint64_t hash) const {
  return static_cast<std::size_t>(((hash >> 32) * slots_.size()) >> 32);
}

std::int32_t id_table::of_word(std::uint64_t word, kind k) {
  if (words_.size() * 8 >= slots_.size() * 7) grow_slots();
  std::size_t s = first_slot(hash_of(word, k));
  for (; slots_[s] != 0; s = s + 1 == slots_.size() ? 0 : s + 1) {
    const auto e = static_cast<std::size_t>(slots_[s] - 1);
    if (words_[e] == word && kinds_[e] == k) return numbers_[e];
  }
  return add(s, word, k);
}

std::int32_t id_table::of_bytes(std::string_view bytes, kind k) {
  if (words_.size() * 8 >= slots_.size() * 7) grow_slots();
  std::size_t s = first_slot(hash_of(bytes, k));
  for (; slots_[s] != 0; s = s + 1 == slots_.size() ? 0 : s + 1) {
    const auto e = static_cast<std::size_t>(slots_[s] - 1);
    if (kinds_[e] == k && kept(words_[e]) == bytes) return numbers_[e];
  }
  return add(s, keep(bytes), k);
}

std::int32_t id_table::add(std::size_t slot, std::uint64_t word, kind k) {
  const std::int32_t number = next_number();
  words_.push_back(word);
  numbers_.push_back(number);
  kinds_.push_back(k);
  slots_[slot] = static_cast<std::int32_t>(words_.size());
  return number;
}

/// The old slots go before the new ones come: every entry knows its id.
void id_table::grow_slots() {
  const std::size_t count = std::max<std::size_t>(64, slots_.size() + slots_.size() / 2);
  slots_ = {};
  slots_.assign(count, 0);
  for (std::size_t e = 0; e < words_.size(); ++e) {
    const kind k = kinds_[e];
    std::size_t s = first_slot(is_text(k) ? hash_of(kept(words_[e]), k) : hash_of(words_[e], k));
    while (slots_[s] != 0) s = s + 1 == slots_.size() ? 0 : s + 1;
    slots_[s] = static_cast<std::int32_t>(e + 1);
  }
}

/// Copies bytes, after their length, where they stay; chunk and offset are the word.
std::uint64_t id_table::keep(std::string_view bytes) {
  const auto length = static_cast<std::uint32_t>(bytes.size());
  const std::size_t need = sizeof length + bytes.size();
  if (arena_.empty() || arena_room_ - arena_used_ < need) {
    arena_room_ = std::max(need, arena_.empty() ? std::size_t{4096} : arena_chunk);
    arena_.push_back(std::make_unique<char[]>(arena_room_));
    arena_used_ = 0;
  }
  char* to = arena_.back().get() + arena_used_;
  std::memcpy(to, &length, sizeof length);
  std::copy_n(bytes.data(), bytes.size(), to + sizeof length);
  const std::uint64_t word = static_cast<std::uint64_t>(arena_.size() - 1) << 32 | arena_used_;
  arena_used_ += need;
  return word;
}

std::string_view id_table::kept(std::uint64_t word) const {
  const char* from = arena_[word >> 32].get() + (word & 0xffffffff);
  std::uint32_t length = 0;
  std::memcpy(&length, from, sizeof length);
  return {from + sizeof length, length};
}

void id_table::new_scope() {
  direct_ = {};
  slots_ = {};
  words_.clear();
  numbers_.clear();
  kinds_.clear();
  arena_.clear();
  arena_used_ = arena_room_ = 0;
  scope_start_ = size_;
}

}  // namespace kvcache::cli
