// SPDX-License-Identifier: Apache-2.0
// Each twin of cuda/ptx.cuh against a plain statement of what PTX says the instruction does (PTX ISA,
// sections on ldmatrix, mma.m16n8k16, movmatrix, shfl, vote, cp.async, cvt). Statements are written
// matrix-first, twins lane-first, so that they do not share a mistake about fragments.
#include "ptx.cuh"

#include <array>
#include <catch2/catch.hpp>
#include <random>
#include <vector>

namespace kvcache::detail::gpu {
namespace {

template <class Kernel>
void on_a_warp(Kernel kernel, uint32_t shared_bytes = 0) {
  for (const uint32_t seed : {0u, 1u, 2u, 3u}) simt::launch({1, 32, shared_bytes, seed, false}, kernel);
}

/// PTX's figure for the A operand of m16n8k16: register i / 2, half i % 2 of lane (group, thread) is this
/// element.
std::pair<int, int> place_in_a(int lane, int i) {
  const int group = lane >> 2, thread = lane % 4;
  const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
  const int column = thread * 2 + (i & 1) + (i >= 4 ? 8 : 0);
  return {row, column};
}
/// The same for B: rows are the inner dimension.
std::pair<int, int> place_in_b(int lane, int i) {
  const int group = lane >> 2, thread = lane % 4;
  return {thread * 2 + (i & 1) + (i >= 2 ? 8 : 0), group};
}
std::pair<int, int> place_in_c(int lane, int i) {
  const int group = lane >> 2, thread = lane % 4;
  return {i < 2 ? group : group + 8, thread * 2 + (i & 1)};
}

template <half_kind Kind>
void check_mma() {
  std::mt19937 random(1);
  float a[16][16], b[16][8], c[16][8];
  for (auto& row : a) {
    for (float& x : row) x = float(int(random() % 17) - 8);
  }
  for (auto& row : b) {
    for (float& x : row) x = float(int(random() % 17) - 8) / 4;
  }
  for (auto& row : c) {
    for (float& x : row) x = float(int(random() % 17) - 8) * 100;
  }
  float got[16][8];
  on_a_warp([&] {
    const auto lane = int(thread_index());
    uint32_t af[4] = {}, bf[2] = {};
    float d[4];
    for (int i = 0; i < 8; ++i) {
      const auto [row, column] = place_in_a(lane, i);
      af[i / 2] |= uint32_t{narrow1<Kind>(a[row][column])} << (16 * (i % 2));
    }
    for (int i = 0; i < 4; ++i) {
      const auto [row, column] = place_in_b(lane, i);
      bf[i / 2] |= uint32_t{narrow1<Kind>(b[row][column])} << (16 * (i % 2));
    }
    for (int i = 0; i < 4; ++i) d[i] = c[place_in_c(lane, i).first][place_in_c(lane, i).second];
    mma<Kind>(d, af, bf[0], bf[1]);
    for (int i = 0; i < 4; ++i) got[place_in_c(lane, i).first][place_in_c(lane, i).second] = d[i];
  });
  for (int r = 0; r < 16; ++r) {
    for (int n = 0; n < 8; ++n) {
      float want = c[r][n];
      for (int k = 0; k < 16; ++k) want += a[r][k] * b[k][n];
      REQUIRE(got[r][n] == want);  // small integers: exact in any order
    }
  }
}

}  // namespace

TEST_CASE("mma multiplies a 16 x 16 matrix with a 16 x 8 one and adds") {
  check_mma<half_kind::f16>();
  check_mma<half_kind::bf16>();
}

TEST_CASE("ldmatrix.x4 gives lane 4 g + t the values 2t and 2t + 1 of row g of each matrix") {
  // Rows of four matrices, scattered over shared memory.
  on_a_warp(
      [] {
        const uint32_t lane = thread_index();
        const uint32_t where = (lane * 7 % 32) * 16;
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t low = lane * 8 + 2 * i, high = low + 1;
          st_shared(where + 4 * i, low | high << 16);  // value = 8 * (8 * matrix + row) + column
        }
        warp_barrier();
        uint32_t plain[4], turned[4];
        ldmatrix4(plain, where);
        ldmatrix4_transposed(turned, where);
        const uint32_t g = lane / 4, t = lane % 4;
        for (uint32_t m = 0; m < 4; ++m) {
          const auto value = [&](uint32_t row, uint32_t column) { return 8 * (8 * m + row) + column; };
          REQUIRE(plain[m] == (value(g, 2 * t) | value(g, 2 * t + 1) << 16));
          REQUIRE(turned[m] == (value(2 * t, g) | value(2 * t + 1, g) << 16));
        }
      },
      512);
}

TEST_CASE("ldmatrix wants rows on 16 bytes") {
  const auto kernel = [] {
    uint32_t r[4];
    ldmatrix4(r, thread_index() * 8);
  };
  REQUIRE_THROWS_AS(simt::launch({1, 32, 512, 0, false}, kernel), simt::fault);
}

TEST_CASE("movmatrix transposes an 8 x 8 matrix") {
  on_a_warp([] {
    const uint32_t g = thread_index() / 4, t = thread_index() % 4;
    const uint32_t got = movmatrix((10 * g + 2 * t) | (10 * g + 2 * t + 1) << 16);
    REQUIRE((got & 0xffffu) == 10 * (2 * t) + g);
    REQUIRE(got >> 16 == 10 * (2 * t + 1) + g);
  });
}

TEST_CASE("shuffles read the named lane, votes see all lanes") {
  on_a_warp([] {
    const uint32_t lane = thread_index();
    for (const uint32_t x : {1u, 2u, 4u, 8u, 16u, 31u})
      REQUIRE(shuffle_xor(float(lane), x) == float(lane ^ x));
    REQUIRE(shuffle(lane * 3, 31 - lane) == (31 - lane) * 3);
    REQUIRE(shuffle(lane, 5) == 5);
    REQUIRE(warp_ballot(lane % 3 == 0) == 0x49249249u);
    REQUIRE(warp_any(lane == 17));
    REQUIRE_FALSE(warp_any(lane > 31));
  });
}

TEST_CASE("cp.async moves 16 bytes, or zeros without reading") {
  alignas(16) static const uint32_t source[4] = {1, 2, 3, 4};
  on_a_warp(
      [] {
        const uint32_t at = thread_index() * 32;
        cp_async16(at, source, true);
        cp_async16(at + 16, nullptr, false);
        cp_async_commit();
        cp_async16(at, source);
        cp_async_commit();
        cp_async_wait<1>();
        REQUIRE(std::bit_cast<uint32_t>(ld_shared(at + 16)) == 0);
        cp_async_wait<0>();
        REQUIRE(std::bit_cast<uint32_t>(ld_shared(at + 12)) == 4);
      },
      32 * 32);
}

TEST_CASE("conversions round to nearest even and keep every 16-bit value") {
  for (uint32_t u = 0; u < 0x10000; ++u) {
    const auto bits = static_cast<uint16_t>(u);
    const float h = widen<half_kind::f16>(bits), b = widen<half_kind::bf16>(bits);
    if (h == h) REQUIRE(narrow1<half_kind::f16>(h) == bits);
    if (b == b) REQUIRE(narrow1<half_kind::bf16>(b) == bits);
  }
  REQUIRE(pack2<half_kind::f16>(1.0f, -2.0f) == 0xc0003c00u);
  REQUIRE(pack2<half_kind::bf16>(1.0f, -2.0f) == 0xc0003f80u);
  REQUIRE(narrow1<half_kind::f16>(1.0f + 0x1p-11f) == 0x3c00);
  REQUIRE(narrow1<half_kind::f16>(1.0f + 0x3p-11f) == 0x3c02);
}

TEST_CASE("exponentials, logarithms and angles are what their names say") {
  REQUIRE(fast_exp2(-INFINITY) == 0.0f);
  REQUIRE(fast_exp2(-127.0f) == 0.0f);
  REQUIRE(fast_exp2(-126.0f) == 0x1p-126f);
  REQUIRE(fast_exp2(0.0f) == 1.0f);
  REQUIRE(fast_exp2(7.0f) == 128.0f);
  REQUIRE(fast_log2(8.0f) == 3.0f);
  float s, c;
  sin_cos_pi(0.5f, s, c);
  REQUIRE(s == 1.0f);
  REQUIRE(std::fabs(c) < 1e-16f);
  sin_cos_pi(-1.0f, s, c);
  REQUIRE(c == -1.0f);
}

}  // namespace kvcache::detail::gpu
