// SPDX-License-Identifier: Apache-2.0
#include "kvcache/core/numeric.hpp"

#include <Eigen/Core>
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <random>

#include "support/environment.hpp"

using namespace kvcache;

namespace {

uint32_t bits(float v) {
  return std::bit_cast<uint32_t>(v);
}
float value(uint32_t u) {
  return std::bit_cast<float>(u);
}

Eigen::half eigen_half(uint16_t u) {
  return Eigen::numext::bit_cast<Eigen::half>(u);
}
Eigen::bfloat16 eigen_bfloat(uint16_t u) {
  return Eigen::numext::bit_cast<Eigen::bfloat16>(u);
}

/// Narrowing agrees with Eigen, except that a NaN only has to stay a NaN of the same sign.
void check_narrow(float v) {
  const f16 half = to_f16(v);
  const bf16 brain = to_bf16(v);
  if (std::isnan(v)) {
    REQUIRE((std::isnan(to_float(half)) && std::isnan(to_float(brain))));
    REQUIRE((half.bits >> 15 == bits(v) >> 31 && brain.bits >> 15 == bits(v) >> 31));
    return;
  }
  if (half.bits != Eigen::numext::bit_cast<uint16_t>(Eigen::half(v))) FAIL("f16 of " << std::hex << bits(v));
  if (brain.bits != Eigen::numext::bit_cast<uint16_t>(Eigen::bfloat16(v))) {
    FAIL("bf16 of " << std::hex << bits(v));
  }
}

}  // namespace

TEST_CASE("widening all 65,536 patterns of f16 and bf16 gives Eigen's floats", "[numeric]") {
  for (uint32_t u = 0; u < 65536; ++u) {
    const auto pattern = static_cast<uint16_t>(u);
    const float half = to_float(f16{pattern}), brain = to_float(bf16{pattern});
    const float eigen = static_cast<float>(eigen_half(pattern));
    const float eigen_b = static_cast<float>(eigen_bfloat(pattern));
    if (std::isnan(eigen) ? !std::isnan(half) : bits(half) != bits(eigen)) FAIL("f16 " << std::hex << u);
    if (std::isnan(eigen_b) ? !std::isnan(brain) : bits(brain) != bits(eigen_b))
      FAIL("bf16 " << std::hex << u);
  }
}

TEST_CASE("every 16-bit value survives widening and narrowing, a NaN comes back quiet", "[numeric]") {
  for (uint32_t u = 0; u < 65536; ++u) {
    const auto pattern = static_cast<uint16_t>(u);
    const bool half_nan = (u & 0x7fff) > 0x7c00, brain_nan = (u & 0x7fff) > 0x7f80;
    if (to_f16(to_float(f16{pattern})).bits != (half_nan ? pattern | 0x0200 : pattern)) {
      FAIL("f16 " << std::hex << u);
    }
    if (to_bf16(to_float(bf16{pattern})).bits != (brain_nan ? pattern | 0x0040 : pattern)) {
      FAIL("bf16 " << std::hex << u);
    }
  }
}

TEST_CASE("narrowing rounds to nearest even at and beside every midpoint", "[numeric]") {
  for (uint32_t u = 0; u < 65536; ++u) {
    const auto pattern = static_cast<uint16_t>(u);
    const uint32_t half = bits(to_float(f16{pattern})), brain = bits(to_float(bf16{pattern}));
    for (const uint32_t offset : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu})
      check_narrow(value(half + offset));
    for (const uint32_t offset : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      check_narrow(value(brain + offset));
  }
}

TEST_CASE("narrowing random floats and all small magnitudes agrees with Eigen", "[numeric]") {
  std::mt19937 random(static_cast<uint32_t>(test::test_seed("numeric", 7)));
  for (int64_t i = 0; i < test::effort(4'000'000); ++i) check_narrow(value(static_cast<uint32_t>(random())));
  for (uint32_t exponent = 96; exponent < 114; ++exponent) {  // around f16's subnormals
    for (uint32_t mantissa = 0; mantissa < (1u << 23); mantissa += 97) {
      check_narrow(value(exponent << 23 | mantissa));
      check_narrow(value(0x80000000u | exponent << 23 | mantissa));
    }
  }
}

TEST_CASE("overflow gives infinity and signed zeros keep their sign", "[numeric]") {
  CHECK(to_f16(65519.996f).bits == 0x7bff);
  CHECK(to_f16(65520.0f).bits == 0x7c00);
  CHECK(to_f16(-1e30f).bits == 0xfc00);
  CHECK(to_bf16(3.4e38f).bits == 0x7f80);
  CHECK(to_f16(-0.0f).bits == 0x8000);
  CHECK(to_bf16(-0.0f).bits == 0x8000);
  CHECK(to_f16(0x1p-25f).bits == 0);            // half the smallest subnormal ties to even
  CHECK(to_f16(value(0x33000001u)).bits == 1);  // anything above it does not
  CHECK(narrow<float>(1.5f) == 1.5f);
  CHECK(narrow<f16>(1.5f).bits == to_f16(1.5f).bits);
}
