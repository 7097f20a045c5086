// SPDX-License-Identifier: Apache-2.0
#pragma once
// Block tables in the forms that kernels take. One internal table, four outputs, all into memory of the
// caller:
//
//   padded   [n][width] int32, absent = fill            FlashAttention, vLLM, TensorRT-LLM, kvc_batch
//   CSR      indptr [n+1], indices, last_page_len [n]   FlashInfer
//   slots    int64 per token: block * block_size + offset, −1 = skip     append kernels
//   pointers base + id * stride                         TurboMind
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// Writes one row of a padded table; absent blocks and the rest of the row become `fill`.
/// Fails: bad_argument when the table is longer than the row; the row is then unchanged.
inline status write_row(std::span<const block_id> table, int32_t fill, std::span<int32_t> row) noexcept {
  if (table.size() > row.size()) return {errc::bad_argument, "row", static_cast<int64_t>(row.size())};
  size_t i = 0;
  for (; i < table.size(); ++i) row[i] = table[i] == no_block ? fill : raw(table[i]);
  std::fill(row.begin() + static_cast<std::ptrdiff_t>(i), row.end(), fill);
  return {};
}

/// Number of blocks that `tokens` fill, and how many slots of the last one (0 if none): the CSR form of one
/// sequence.
struct page_lengths {
  int32_t pages;          ///< blocks, the last one perhaps not full
  int32_t last_page_len;  ///< tokens in the last one, 1 to block_size; 0 if there is none
};
/// The CSR form of a sequence of `tokens` tokens. Requires: tokens ≥ 0, block_size > 0.
constexpr page_lengths pages_of(int32_t tokens, int32_t block_size) noexcept {
  const int32_t pages = ceil_div(tokens, block_size);
  return {pages, pages == 0 ? 0 : tokens - (pages - 1) * block_size};
}

/// Appends one sequence to a CSR table: `indptr[row + 1]` and its ids behind `indptr[row]`.
/// Fails: bad_argument when the ids do not fit; nothing is then written.
inline status write_csr(std::span<const block_id> table, int32_t tokens, int32_t block_size, size_t row,
                        std::span<int32_t> indptr, std::span<int32_t> indices,
                        std::span<int32_t> last_page_len) noexcept {
  if (row + 1 >= indptr.size()) return {errc::bad_argument, "indptr", static_cast<int64_t>(indptr.size())};
  if (row >= last_page_len.size()) {
    return {errc::bad_argument, "last_page_len", static_cast<int64_t>(last_page_len.size())};
  }
  if (tokens < 0) return {errc::bad_argument, "tokens", tokens};
  if (indptr[row] < 0) return {errc::bad_argument, "indptr", indptr[row]};
  const page_lengths p = pages_of(tokens, block_size);
  const auto begin = static_cast<size_t>(indptr[row]);
  const auto pages = static_cast<size_t>(p.pages);
  if (pages > table.size()) return {errc::bad_argument, "tokens", tokens};
  if (begin + pages > indices.size()) {
    return {errc::bad_argument, "indices", static_cast<int64_t>(indices.size())};
  }
  for (size_t i = 0; i < pages; ++i) indices[begin + i] = raw(table[i]);
  indptr[row + 1] = static_cast<int32_t>(begin + pages);
  last_page_len[row] = p.last_page_len;
  return {};
}

/// Slots of tokens [first, first + out.size()): where an append kernel writes them; −1 where the block is
/// absent. Fails: bad_argument when the table is too short.
inline status write_slots(std::span<const block_id> table, int32_t block_size, int32_t first,
                          std::span<int64_t> out) noexcept {
  const int64_t end = int64_t{first} + static_cast<int64_t>(out.size());
  if (first < 0 || end > static_cast<int64_t>(table.size()) * block_size) {
    return {errc::bad_argument, "first", first};
  }
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t t = first + static_cast<int64_t>(i);
    const block_id b = table[static_cast<size_t>(t / block_size)];
    out[i] = b == no_block ? -1 : int64_t{raw(b)} * block_size + t % block_size;
  }
  return {};
}

/// Address of every block of a table: `base + id * stride` (bytes); null where absent. `out` has the table's
/// length.
inline status write_pointers(std::span<const block_id> table, std::byte* base, int64_t stride,
                             std::span<std::byte*> out) noexcept {
  if (out.size() < table.size()) return {errc::bad_argument, "out", static_cast<int64_t>(out.size())};
  for (size_t i = 0; i < table.size(); ++i) {
    // In integers: a device address is no object of this program, so pointer arithmetic does not apply to it.
    const uintptr_t address =
        reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(int64_t{raw(table[i])} * stride);
    out[i] = table[i] == no_block ? nullptr : reinterpret_cast<std::byte*>(address);
  }
  return {};
}

}  // namespace kvcache
