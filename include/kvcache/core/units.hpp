// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ids and amounts as types of their own, so that a block is never passed where a node or a byte count is
// meant.
#include <compare>
#include <cstddef>
#include <cstdint>

namespace kvcache {

/// Token of the model's vocabulary. Values outside it are legal: the cache only compares them.
using token_id = int32_t;

/// Physical block of one group's pool; `no_block` where a table entry is absent.
enum class block_id : int32_t {};
/// One indexed unit of tokens in the prefix tree; `no_node` above the first one.
enum class node_id : int32_t {};

inline constexpr block_id no_block{-1};
inline constexpr node_id no_node{-1};

constexpr size_t index(block_id b) noexcept {
  return static_cast<size_t>(static_cast<int32_t>(b));
}
constexpr size_t index(node_id n) noexcept {
  return static_cast<size_t>(static_cast<int32_t>(n));
}
constexpr int32_t raw(block_id b) noexcept {
  return static_cast<int32_t>(b);
}
constexpr int32_t raw(node_id n) noexcept {
  return static_cast<int32_t>(n);
}

/// Number of bytes.
struct bytes {
  int64_t count = 0;
  constexpr auto operator<=>(const bytes&) const noexcept = default;
};
constexpr bytes operator+(bytes a, bytes b) noexcept {
  return {a.count + b.count};
}
constexpr bytes operator*(bytes a, int64_t n) noexcept {
  return {a.count * n};
}
constexpr bytes kibibytes(int64_t n) noexcept {
  return {n << 10};
}
constexpr bytes mebibytes(int64_t n) noexcept {
  return {n << 20};
}
constexpr bytes gibibytes(int64_t n) noexcept {
  return {n << 30};
}

/// Number of blocks.
struct blocks {
  int32_t count = 0;
  constexpr auto operator<=>(const blocks&) const noexcept = default;
};

constexpr int32_t ceil_div(int32_t a, int32_t b) noexcept {
  return a / b + (a % b != 0);
}
constexpr int64_t ceil_div(int64_t a, int64_t b) noexcept {
  return a / b + (a % b != 0);
}
constexpr bool is_power_of_two(int64_t n) noexcept {
  return n > 0 && (n & (n - 1)) == 0;
}

/// Bit mixer with full avalanche (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA
/// 2014, section 4, the finaliser of SplitMix64). Used for hash tables whose hits are verified, never as an
/// identity.
constexpr uint64_t mix64(uint64_t z) noexcept {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace kvcache
