// SPDX-License-Identifier: Apache-2.0
#pragma once
// Comparing the instructions of cuda/ptx.cuh with their twins: what a case is, the inputs it is run on, and
// when two answers count as the same. Plain C++; the answers come from twins.cu (nvcc, on the GPU) and from
// twins_on_machine.cpp (g++, on tests/simt/machine.hpp), which compile the same cases (twin_cases.cuh).
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvcache::gpu_check {

/// What an input word of a lane holds.
enum class word : uint8_t {
  none,
  any,       ///< 32 random bits
  counter,   ///< number of the lane, over all warps
  lane,      ///< random, below 32
  floats,    ///< special values, and random bits taken as a float
  unit,      ///< [-1, 1], every fourth a multiple of 1/8
  exponent,  ///< [-160, 140], and special values
  near_f16,  ///< every value of 16 bits, the middle to the next one, and the floats beside that
  near_bf16,
  normal,      ///< a float of usual size
  f16_pair,    ///< two values of usual size, some of them zero or subnormal
  bf16_pair,   ///< the same
  f16_ints,    ///< two whole numbers below 9: products and sums are exact
  bf16_ints,   ///< the same
  float_ints,  ///< hundreds
  f16_tiny,    ///< two subnormal values
  bf16_tiny    ///< the same
};

/// How output words are compared.
enum class rule : uint8_t {
  bits,    ///< equal
  f32,     ///< floats: equal, both NaN, or within `ulps` or `absolute` of each other
  f16x2,   ///< pairs of f16: each half equal, or both NaN
  bf16x2,  ///< pairs of bf16
  scaled   ///< the first half of the words: floats within `relative` of the matching word of the other half
};

struct twin_case {
  const char* name;
  std::array<word, 12> in{};
  uint32_t out_words = 1;
  rule same = rule::bits;
  double ulps = 0;
  double absolute = 0;
  double relative = 0;
  uint32_t warps = 64;
  uint32_t shared_bytes = 0;
  int32_t from_arch = 0;  ///< devices below this have no such instruction: 89 is compute capability 8.9
};

/// What a side answers that has no such instruction.
inline constexpr const char* not_there = "not on this device";

constexpr uint32_t in_words_of(const twin_case& c) {
  uint32_t n = 0;
  while (n < c.in.size() && c.in[n] != word::none) ++n;
  return n;
}

/// Warps that see every value of 16 bits once.
inline constexpr uint32_t warps_of_16_bits = 65536 / 32;

/// A case as one side runs it: lane l of warp w reads in[(32 w + l) * in words] and writes the same of out.
/// Answers "" or what went wrong.
struct twin_side {
  const twin_case* about;
  std::string (*run)(const std::vector<uint32_t>& in, std::vector<uint32_t>& out);
};

/// All cases, in the order of twin_cases.cuh.
std::vector<twin_side> twins_on_device();
std::vector<twin_side> twins_on_machine();

/// Inputs of a case, the same for the same seed.
std::vector<uint32_t> twin_inputs(const twin_case& c, uint32_t seed);

struct twin_result {
  size_t words = 0;
  size_t differing = 0;
  double worst_ulps = 0;  ///< of rule::f32
  std::string first;      ///< the first difference, in words
  bool ok() const { return differing == 0 && words > 0; }
};
twin_result compare_twins(const twin_case& c, const std::vector<uint32_t>& in,
                          const std::vector<uint32_t>& device, const std::vector<uint32_t>& machine);

/// Runs every case on both sides; prints a line each, and what differs. Answers how many cases failed.
int run_twins(const std::vector<twin_side>& device, const std::vector<twin_side>& machine, uint32_t seed);

}  // namespace kvcache::gpu_check
