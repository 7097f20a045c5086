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

/// Absent entry of a table.
inline constexpr block_id no_block{-1};
/// Parent of the first unit of a text, and the answer of a search that found none.
inline constexpr node_id no_node{-1};

/// Position of a block's entry in an array over all blocks; a huge number for `no_block`.
constexpr size_t index(block_id b) noexcept {
  return static_cast<size_t>(static_cast<int32_t>(b));
}
/// Position of a node's entry in an array over all nodes; a huge number for `no_node`.
constexpr size_t index(node_id n) noexcept {
  return static_cast<size_t>(static_cast<int32_t>(n));
}
/// The id as kernels and files hold it; `no_block` is −1.
constexpr int32_t raw(block_id b) noexcept {
  return static_cast<int32_t>(b);
}
/// The id as events and files hold it; `no_node` is −1.
constexpr int32_t raw(node_id n) noexcept {
  return static_cast<int32_t>(n);
}

/// Number of bytes.
struct bytes {
  int64_t count = 0;  ///< the number itself
  /// Compares the numbers.
  constexpr auto operator<=>(const bytes&) const noexcept = default;
};
/// Sum. Requires: it fits 64 bits; `resolve` refuses configurations for which it would not.
constexpr bytes operator+(bytes a, bytes b) noexcept {
  return {a.count + b.count};
}
/// `n` times as many. Requires: the product fits 64 bits.
constexpr bytes operator*(bytes a, int64_t n) noexcept {
  return {a.count * n};
}
/// `n` times 1,024 bytes.
constexpr bytes kibibytes(int64_t n) noexcept {
  return {n << 10};
}
/// `n` times 1,024² bytes.
constexpr bytes mebibytes(int64_t n) noexcept {
  return {n << 20};
}
/// `n` times 1,024³ bytes.
constexpr bytes gibibytes(int64_t n) noexcept {
  return {n << 30};
}

/// Number of blocks.
struct blocks {
  int32_t count = 0;  ///< the number itself
  /// Compares the numbers.
  constexpr auto operator<=>(const blocks&) const noexcept = default;
};

/// a / b rounded up: how many blocks of `b` tokens hold `a` tokens. Requires: a ≥ 0, b > 0.
constexpr int32_t ceil_div(int32_t a, int32_t b) noexcept {
  return a / b + (a % b != 0);
}
/// The same in 64 bits, for bytes.
constexpr int64_t ceil_div(int64_t a, int64_t b) noexcept {
  return a / b + (a % b != 0);
}
/// Whether `n` may be a block size.
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
