// SPDX-License-Identifier: Apache-2.0
// Small floats: all 256 patterns of both, every midpoint between neighbours and what lies beside it, against
// an exhaustive search over their definition in double; and all 65,536 halves.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "kvcache/core/numeric.hpp"
#include "quant/reference.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

constexpr code floats[] = {code::e4m3, code::e5m2};

uint8_t encoded(code c, float v) {
  return c == code::e4m3 ? to_f8_e4m3(v).bits : to_f8_e5m2(v).bits;
}

/// The finite magnitudes of a format, in the order of their codes.
std::vector<double> magnitudes(code c) {
  std::vector<double> out;
  for (int u = 0; u < 128; ++u) {
    const double v = f8_reference(c, static_cast<uint8_t>(u));
    if (std::isfinite(v)) out.push_back(v);
  }
  return out;
}

/// Nearest finite code by looking at all of them; of two equally near ones the even one.
uint8_t nearest(const std::vector<double>& all, float v) {
  const double magnitude = std::min(std::abs(double{v}), 1e6);  // so that a distance is exact
  int best = 0;
  for (int u = 1; u < static_cast<int>(all.size()); ++u) {
    const double mine = std::abs(all[u] - magnitude);
    const double held = std::abs(all[best] - magnitude);
    if (mine < held || (mine == held && u % 2 == 0)) best = u;
  }
  return static_cast<uint8_t>(best | (std::signbit(v) ? 0x80 : 0));
}

void check(code c, const std::vector<double>& all, float v) {
  if (encoded(c, v) != nearest(all, v) || encoded(c, -v) != nearest(all, -v)) {
    FAIL("code " << int(c) << " of " << v << ": " << int(encoded(c, v)) << ", nearest "
                 << int(nearest(all, v)));
  }
}

}  // namespace

TEST_CASE("all 256 patterns of both small floats are what their fields say, and come back from a float") {
  for (const code c : floats) {
    for (int u = 0; u < 256; ++u) {
      const auto bits = static_cast<uint8_t>(u);
      const double want = f8_reference(c, bits);
      const float have = f8_value(c, bits);
      INFO("code " << int(c) << " pattern " << u);
      if (std::isnan(want)) {
        REQUIRE(std::isnan(have));
        REQUIRE(encoded(c, have) == ((bits & 0x80) | 0x7f));
      } else {
        REQUIRE((double{have} == want && std::signbit(have) == std::signbit(want)));
        if (std::isfinite(want)) REQUIRE(encoded(c, have) == bits);
      }
    }
  }
  CHECK(magnitudes(code::e4m3).size() == 127);
  CHECK(magnitudes(code::e4m3).back() == 448);
  CHECK(magnitudes(code::e5m2).back() == 57344);
}

TEST_CASE("narrowing to 8 bits finds the nearest at and beside every value and every midpoint") {
  for (const code c : floats) {
    const auto all = magnitudes(c);
    for (size_t i = 0; i + 1 < all.size(); ++i) {
      for (const double at : {all[i], 0.5 * (all[i] + all[i + 1]), 0.75 * all[i] + 0.25 * all[i + 1]}) {
        const auto v = static_cast<float>(at);
        REQUIRE(double{v} == at);  // exact, so a tie is a tie
        check(c, all, v);
        check(c, all, std::nextafter(v, 0.0f));
        check(c, all, std::nextafter(v, 1e30f));
      }
    }
  }
}

TEST_CASE("narrowing every half and random floats to 8 bits finds the nearest") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("f8", 11)));
  for (const code c : floats) {
    const auto all = magnitudes(c);
    for (uint32_t u = 0; u < 0x7c00; ++u) check(c, all, to_float(f16{static_cast<uint16_t>(u)}));
    for (int64_t i = 0; i < effort(100'000); ++i) {
      const float v = std::bit_cast<float>(static_cast<uint32_t>(random()) & 0x7fffffffu);
      if (std::isfinite(v)) check(c, all, v);
    }
  }
}

TEST_CASE("past the largest value small floats saturate, an infinity too, and a NaN stays one (trap 19)") {
  CHECK(encoded(code::e4m3, 464.0f) == 0x7e);
  CHECK(encoded(code::e4m3, 465.0f) == 0x7e);
  CHECK(encoded(code::e4m3, 1000.0f) == 0x7e);
  CHECK(encoded(code::e4m3, -1000.0f) == 0xfe);
  CHECK(encoded(code::e4m3, std::numeric_limits<float>::max()) == 0x7e);
  CHECK(encoded(code::e4m3, INFINITY) == 0x7e);
  CHECK(encoded(code::e5m2, INFINITY) == 0x7b);
  CHECK(encoded(code::e5m2, -65504.0f) == 0xfb);
  for (const code c : floats) {
    CHECK(encoded(c, NAN) == 0x7f);
    CHECK(encoded(c, std::copysign(NAN, -1.0f)) == 0xff);
    CHECK(encoded(c, 0.0f) == 0);
    CHECK(encoded(c, -0.0f) == 0x80);
    CHECK(encoded(c, 1e-40f) == 0);
  }
  CHECK(narrow<f8_e4m3>(1.0f) == f8_e4m3{0x38});
  CHECK(narrow<f8_e5m2>(1.0f) == f8_e5m2{0x3c});
}

TEST_CASE("the top binade of e4m3, 256 to 448, is whole and rounds half to even (trap 20)") {
  CHECK(encoded(code::e4m3, 256.0f) == 0x78);
  CHECK(encoded(code::e4m3, 272.0f) == 0x78);  // tie, even below
  CHECK(encoded(code::e4m3, 288.0f) == 0x79);
  CHECK(encoded(code::e4m3, 304.0f) == 0x7a);  // tie, even above
  CHECK(encoded(code::e4m3, 416.0f) == 0x7d);
  CHECK(encoded(code::e4m3, 432.0f) == 0x7e);
  CHECK(to_float(f8_e4m3{0x7d}) == 416.0f);
  CHECK(std::bit_cast<uint32_t>(to_float(f8_e4m3{0x80})) == 0x80000000u);  // -0, not a NaN
}

TEST_CASE("all 65,536 halves come out of the exact codec as they went in, but NaN and infinity are refused") {
  const cell_shape s{true, 32, 2048, 0};  // 65,536 values
  std::vector<float> values(65536), out(values.size());
  std::vector<std::byte> codes(2 * values.size(), std::byte{0x5a});
  for (uint32_t u = 0; u < 65536; ++u) {
    const bool finite = (u & 0x7c00) != 0x7c00;
    values[u] = finite ? to_float(f16{static_cast<uint16_t>(u)}) : 0.0f;
    if (finite) REQUIRE(double{values[u]} == f16_value(static_cast<uint16_t>(u)));
  }
  REQUIRE(exact<>{}.pack(s, values.data(), codes.data(), nullptr, nullptr));
  exact<>{}.unpack(s, codes.data(), nullptr, nullptr, out.data());
  CHECK(std::memcmp(values.data(), out.data(), 4 * values.size()) == 0);
  uint16_t stored[3];
  std::memcpy(stored, codes.data() + 2 * 0x3c00, sizeof stored);
  CHECK(stored[0] == 0x3c00);
  CHECK(stored[2] == 0x3c02);
  const auto before = codes;
  for (const float bad : {NAN, INFINITY, -INFINITY, 65505.0f}) {
    auto worse = values;
    worse[777] = bad;
    const status refused = exact<>{}.pack(s, worse.data(), codes.data(), nullptr, nullptr);
    CHECK(refused.code == errc::bad_argument);
    CHECK(refused.value == 777);
    CHECK(codes == before);
  }
}

TEST_CASE("a float's neighbours among all halves are the largest below and the smallest above") {
  const auto& all = f16_values();
  const auto check_both = [&](float v) {
    const f16 low = detail::f16_below(v), high = detail::f16_above(v);
    if (double{to_float(low)} != f16_floor(v) || double{to_float(high)} != f16_ceil(v)) FAIL("at " << v);
    if (low.bits == 0x8000 || high.bits == 0x8000) FAIL("a negative zero at " << v);
  };
  for (size_t i = 0; i < all.size(); ++i) {
    const auto v = static_cast<float>(all[i]);
    check_both(v);
    if (i > 0) check_both(std::nextafter(v, -1e9f));
    if (i + 1 < all.size()) check_both(std::nextafter(v, 1e9f));
    if (i + 1 < all.size()) check_both(static_cast<float>(0.5 * (all[i] + all[i + 1])));
  }
  check_both(-0.0f);
  check_both(1e-42f);
  check_both(-1e-42f);
}
