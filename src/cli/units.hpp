// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers with units as they stand on the command line: bytes (`80GiB`, `24GB`), bytes per second
// (`3.35TB/s`), tokens (`4096`, `8k`, `4M`), capacities (`2048b`, `4M`, `80GiB`, `inf`). What cannot be read
// is a usage error that names the option, the value and what would be right.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvcache::cli {

/// A whole number from `least` to `most`, digits only.
std::int64_t parse_count(std::string_view option, std::string_view text, std::int64_t least,
                         std::int64_t most);

/// Bytes: a number and B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024), or nothing.
/// Letters may be all small. `24G` is refused, as it says neither, and `24Gb`, as that means bits to many.
std::int64_t parse_bytes(std::string_view option, std::string_view text);

/// Bytes per second: as parse_bytes, with /s behind it.
double parse_bandwidth(std::string_view option, std::string_view text);

/// Tokens: a whole number, or a number and k (2^10) or M (2^20). At least 1.
std::int64_t parse_tokens(std::string_view option, std::string_view text);

/// Things counted in thousands, such as parameters: a whole number, or a number and k, M, B, T (powers of
/// 1000), or a number with an exponent (`70e9`). At least 1.
std::int64_t parse_amount(std::string_view option, std::string_view text);

/// How much a cache holds, in the unit in which it was said.
struct capacity {
  enum class unit { blocks, tokens, bytes, unbounded };
  unit in = unit::unbounded;
  std::int64_t amount = 0;  ///< 0 if unbounded
};

/// A capacity: `2048b` or `2048blocks`, tokens as parse_tokens, bytes as parse_bytes with a unit of more than
/// one letter, `inf`.
capacity parse_capacity(std::string_view option, std::string_view text);

/// The parts of "a,b,c". Empty parts are a usage error.
std::vector<std::string> split_list(std::string_view option, std::string_view text);

}  // namespace kvcache::cli
