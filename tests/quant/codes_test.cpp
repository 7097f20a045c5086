// SPDX-License-Identifier: Apache-2.0
// Where the bits lie: bytes written by hand, not by a round trip, which any two equal mistakes would pass.
#include <catch2/catch.hpp>
#include <cstring>
#include <random>

#include "quant/reference.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

std::vector<int> row_of(code c, const std::vector<uint32_t>& codes) {
  std::vector<std::byte> row(static_cast<size_t>(code_row_bytes(c, static_cast<int32_t>(codes.size()))));
  for (size_t i = 0; i < codes.size(); ++i) write_code(c, row.data(), static_cast<int32_t>(i), codes[i]);
  std::vector<int> out;
  for (const std::byte b : row) out.push_back(std::to_integer<int>(b));
  return out;
}
/// 0, 1, 2, ... 31 reduced to the code's width.
std::vector<uint32_t> counting(code c) {
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < 32; ++i) out.push_back(i & ((1u << code_bits(c)) - 1));
  return out;
}
std::vector<int> joined(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Written by hand from the drawing, for the codes i mod 2^bits of i = 0 ... 31.
// 4-bit part of i: byte i has i in its low half and i + 16 (equal to i in 4 bits) in its high half.
const std::vector<int> four_bits = {0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                                    0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff};
// 2-bit part of i: i, i + 8, i + 16, i + 24 are equal in their lowest 2 bits: 00, 01, 10, 11 four times each.
const std::vector<int> two_bits = {0x00, 0x55, 0xaa, 0xff, 0x00, 0x55, 0xaa, 0xff};

}  // namespace

TEST_CASE("code rows are the bytes that the drawing says (trap 17)") {
  std::vector<int> eight;
  for (int i = 0; i < 32; ++i) eight.push_back(i);
  CHECK(row_of(code::int8, counting(code::int8)) == eight);
  CHECK(row_of(code::e4m3, counting(code::e4m3)) == eight);
  CHECK(row_of(code::e5m2, counting(code::e5m2)) == eight);
  CHECK(row_of(code::int4, counting(code::int4)) == four_bits);
  CHECK(row_of(code::int2, counting(code::int2)) == two_bits);
  // 5 = 4 + 1: the fifth bit of i is set from 16 on.
  CHECK(row_of(code::int5, counting(code::int5)) == joined(four_bits, {0x00, 0x00, 0xff, 0xff}));
  // 3 = 2 + 1: the third bit of i is set in 4-7, 12-15, 20-23, 28-31.
  CHECK(row_of(code::int3, counting(code::int3)) == joined(two_bits, {0xf0, 0xf0, 0xf0, 0xf0}));
  // 6 = 4 + 2: bits 4 and 5 of i are 0 below 16 and 1 from there; byte j holds j, j + 8, j + 16, j + 24.
  CHECK(row_of(code::int6, counting(code::int6)) ==
        joined(four_bits, {0x50, 0x50, 0x50, 0x50, 0x50, 0x50, 0x50, 0x50}));
}

TEST_CASE("single codes lie where the drawing says") {
  const auto lone = [](code c, int32_t i, uint32_t value) {
    std::vector<uint32_t> codes(32);
    codes[static_cast<size_t>(i)] = value;
    std::vector<std::pair<int, int>> set;
    const auto row = row_of(c, codes);
    for (size_t b = 0; b < row.size(); ++b) {
      if (row[b] != 0) set.push_back({static_cast<int>(b), row[b]});
    }
    return set;
  };
  using set = std::vector<std::pair<int, int>>;
  CHECK(lone(code::int4, 0, 0xf) == set{{0, 0x0f}});
  CHECK(lone(code::int4, 16, 0xf) == set{{0, 0xf0}});
  CHECK(lone(code::int4, 1, 0x1) == set{{1, 0x01}});
  CHECK(lone(code::int4, 31, 0x8) == set{{15, 0x80}});
  CHECK(lone(code::int2, 8, 0x3) == set{{0, 0x0c}});
  CHECK(lone(code::int2, 31, 0x2) == set{{7, 0x80}});
  CHECK(lone(code::int3, 9, 0x7) == set{{1, 0x0c}, {9, 0x02}});
  CHECK(lone(code::int3, 31, 0x4) == set{{11, 0x80}});
  CHECK(lone(code::int5, 0, 0x10) == set{{16, 0x01}});
  CHECK(lone(code::int5, 20, 0x1f) == set{{4, 0xf0}, {18, 0x10}});
  CHECK(lone(code::int6, 17, 0x3f) == set{{1, 0xf0}, {17, 0x30}});
  CHECK(lone(code::int6, 25, 0x20) == set{{17, 0x80}});
  CHECK(lone(code::int8, 31, 0xff) == set{{31, 0xff}});
}

TEST_CASE("every bit of a row belongs to one bit of one code, and reading finds what writing put there") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("codes", 3)));
  for (const code c : packed_codes) {
    const auto places = bit_places(c);
    std::vector<int> owners(static_cast<size_t>(32 * code_bits(c)));
    for (const auto& of : places) {
      CHECK(static_cast<int>(of.size()) == code_bits(c));
      for (const auto& p : of) ++owners[static_cast<size_t>(p.byte * 8 + p.bit)];
    }
    CHECK(owners == std::vector<int>(owners.size(), 1));
    for (const int32_t n : {8, 32, 40, 80, 96, 128}) {
      std::vector<std::byte> row(static_cast<size_t>(code_row_bytes(c, n)));
      std::vector<uint32_t> held(static_cast<size_t>(n));
      for (auto& b : row) b = static_cast<std::byte>(random());
      for (int32_t i = 0; i < n; ++i) held[static_cast<size_t>(i)] = read_code(c, row.data(), i);
      for (int k = 0; k < 400; ++k) {  // overwriting one code leaves its neighbours
        const auto i = static_cast<int32_t>(random() % static_cast<uint32_t>(n));
        held[static_cast<size_t>(i)] = random() & ((1u << code_bits(c)) - 1u);
        write_code(c, row.data(), i, held[static_cast<size_t>(i)]);
      }
      for (int32_t i = 0; i < n; ++i) {
        REQUIRE(read_code(c, row.data(), i) == held[static_cast<size_t>(i)]);
        REQUIRE(code_at(places, c, row.data(), i) == held[static_cast<size_t>(i)]);
      }
    }
  }
}

TEST_CASE("a packed cell of K has a row per channel, one of V a row per slot (trap 17)") {
  // 4-bit codes equal to the value: least 0, largest 15, scale 1 in every group.
  const side_format f{.codes = code::int4, .axis = scale_axis::head};
  std::vector<float> values(32 * 8);
  for (int t = 0; t < 32; ++t) {
    for (int d = 0; d < 8; ++d) values[static_cast<size_t>(t * 8 + d)] = static_cast<float>((t + 3 * d) % 16);
  }
  cell k{f, {true, 32, 8, 0}}, v{f, {false, 32, 8, 0}};
  REQUIRE(k.pack(values));
  REQUIRE(v.pack(values));
  CHECK(k.scale[0].bits == 0x3c00);
  CHECK(k.zero[0].bits == 0);
  REQUIRE(k.codes.size() == 8 * 16);
  REQUIRE(v.codes.size() == 32 * 16);
  // K, channel 1: token t has code (t + 3) mod 16, tokens t and t + 16 share a byte.
  const int channel_1[] = {0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa,
                           0xbb, 0xcc, 0xdd, 0xee, 0xff, 0x00, 0x11, 0x22};
  for (size_t i = 0; i < 16; ++i) CHECK(std::to_integer<int>(k.codes[16 + i]) == channel_1[i]);
  // V, slot 2: channel d has code (2 + 3 d) mod 16; channels from 8 on do not exist and are 0.
  const int slot_2[] = {2, 5, 8, 11, 14, 1, 4, 7, 0, 0, 0, 0, 0, 0, 0, 0};
  for (size_t i = 0; i < 16; ++i) CHECK(std::to_integer<int>(v.codes[32 + i]) == slot_2[i]);
}

TEST_CASE("scales lie in the order that format.hpp says") {
  // Values 0 and L times something that names the group, so that a scale names it too.
  const auto scales = [](bool keys, scale_axis axis, int32_t group) {
    cell c{{.codes = code::int4, .axis = axis, .group_size = group}, {keys, 32, 16, 0}};
    std::vector<float> values(32 * 16);
    for (int t = 0; t < 32; ++t) {
      for (int d = 0; d < 16; ++d) {
        const int name = axis == scale_axis::channel ? d + 100 * (t / group) : t + 100 * (d / group);
        values[static_cast<size_t>(t * 16 + d)] =
            (t + d) % 2 == 0 ? 0.0f : 15.0f * static_cast<float>(1 + name);
      }
    }
    REQUIRE(c.pack(values));
    std::vector<int> out;
    for (const f16 s : c.scale) out.push_back(static_cast<int>(to_float(s)) - 1);
    return out;
  };
  const auto k_channel = scales(true, scale_axis::channel, 16);  // [16 channels][2 groups]
  CHECK(std::vector<int>(k_channel.begin(), k_channel.begin() + 5) == std::vector<int>{0, 100, 1, 101, 2});
  const auto v_channel = scales(false, scale_axis::channel, 16);  // [2 groups][16 channels]
  CHECK(std::vector<int>(v_channel.begin() + 14, v_channel.begin() + 18) ==
        std::vector<int>{14, 15, 100, 101});
  const auto k_token = scales(true, scale_axis::token, 8);  // [2 groups][32 tokens]
  CHECK(std::vector<int>(k_token.begin() + 30, k_token.begin() + 34) == std::vector<int>{30, 31, 100, 101});
  const auto v_token = scales(false, scale_axis::token, 8);  // [32 tokens][2 groups]
  CHECK(std::vector<int>(v_token.begin(), v_token.begin() + 5) == std::vector<int>{0, 100, 1, 101, 2});
}
