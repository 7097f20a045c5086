// SPDX-License-Identifier: Apache-2.0
#pragma once

// Turns ids of any kind into numbers 0, 1, 2, ... in order of first appearance. Small non-negative integers,
// as most traces use them, index an array; everything else goes through a hash table that keeps the whole id
// and compares it, so two ids are one only if they are equal.
//
//   7 ──► direct_[7] ──► 0                         direct_ stays below 4 entries per id, plus 65,536
//   -3, 2^63, "a9..", block of tokens ──hash──► slots_ ──► entry {word, number, kind} ── text ──► arena_
//
// Memory: at most 20 bytes per id beside the text of ids that are text.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace kvcache::cli {

/// Array that grows without moving, so that it never needs its size twice.
template <class T>
class chunked {
 public:
  T& operator[](std::size_t i) { return chunks_[i / per_chunk][i % per_chunk]; }
  const T& operator[](std::size_t i) const { return chunks_[i / per_chunk][i % per_chunk]; }
  std::size_t size() const { return size_; }
  void push_back(T v) {
    if (size_ == chunks_.size() * per_chunk) chunks_.push_back(std::make_unique<T[]>(per_chunk));
    (*this)[size_++] = v;
  }
  void clear() {
    chunks_.clear();
    size_ = 0;
  }

 private:
  static constexpr std::size_t per_chunk = 4096;
  std::vector<std::unique_ptr<T[]>> chunks_;
  std::size_t size_ = 0;
};

/// Numbers for ids.
class id_table {
 public:
  /// What an id is; ids of two kinds are never equal.
  enum class kind : std::uint8_t { integer, large, decimal, text };

  /// The number of an integer.
  std::int32_t of(std::int64_t id) {
    const auto i = static_cast<std::uint64_t>(id);
    if (i < direct_.size() && direct_[i] >= 0) return direct_[i];
    return of_new_or_far(id);
  }

  /// The number of an integer of 64 bits without a sign.
  std::int32_t of_unsigned(std::uint64_t id);

  /// The number of digits too many for 64 bits (`decimal`), of a string, or of any bytes (`text`).
  std::int32_t of_bytes(std::string_view bytes, kind k);

  /// How many numbers were given out.
  std::int32_t size() const { return size_; }

  /// Forgets all ids; those to come get numbers of their own, also where they were seen before.
  void new_scope();

 private:
  std::int32_t of_new_or_far(std::int64_t id);
  std::int32_t of_word(std::uint64_t word, kind k);
  bool grow_direct(std::uint64_t id);
  std::size_t first_slot(std::uint64_t hash) const;
  void grow_slots();
  std::int32_t add(std::size_t slot, std::uint64_t word, kind k);
  std::uint64_t keep(std::string_view bytes);
  std::string_view kept(std::uint64_t word) const;
  std::int32_t next_number();

  std::vector<std::int32_t> direct_;
  std::vector<std::int32_t> slots_;  // entry + 1, 0 = free
  chunked<std::uint64_t> words_;
  chunked<std::int32_t> numbers_;
  chunked<kind> kinds_;
  std::vector<std::unique_ptr<char[]>> arena_;
  std::size_t arena_used_ = 0, arena_room_ = 0;
  std::int32_t size_ = 0, scope_start_ = 0;
};

}  // namespace kvcache::cli
