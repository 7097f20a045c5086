// SPDX-License-Identifier: Apache-2.0
// Every codec against a reference in double that knows the formats only from their description: the range of
// each group, the stored scale and minimum, the nearest level of every value, and what is read back.
#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "quant/reference.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// The next larger half.
double after(double half) {
  return f16_ceil(std::nextafter(half, 1e9));
}

/// A stored scale is the smallest half that reaches `span` in `steps` steps. It was found by a division in
/// float, so where that half fits to 22 bits, the next one is right as well.
void check_scale(double stored, double span, double steps, double least) {
  if (span == 0) {
    REQUIRE(stored == 0);
    return;
  }
  double want = f16_ceil(std::max(span / steps, least));
  while (want * steps < span) want = after(want);
  if (stored == want) return;
  if (stored == after(want) && want * steps - span <= std::ldexp(span, -22)) return;
  FAIL("scale " << stored << ", the smallest is " << want << " for a span of " << span);
}

struct group_facts {
  double least = 0, largest = 0, scale = 0, zero = 0;
};

group_facts check_group(const cell& c, const std::vector<float>& values, const std::vector<int>& members,
                        int n) {
  std::vector<double> seen;
  for (const int i : members) {
    if (i / c.s.dim >= c.s.exempt) seen.push_back(values[static_cast<size_t>(i)]);
  }
  group_facts g;
  g.scale = f16_value(c.scale[static_cast<size_t>(n)].bits);
  if (has_minimum(c.f)) g.zero = f16_value(c.zero[static_cast<size_t>(n)].bits);
  if (seen.empty()) {
    REQUIRE((g.scale == 0 && g.zero == 0));
    return g;
  }
  g.least = *std::min_element(seen.begin(), seen.end());
  g.largest = *std::max_element(seen.begin(), seen.end());
  const double magnitude = std::max(std::abs(g.least), std::abs(g.largest));
  if (is_fp8(c.f.codes)) {
    const double largest = c.f.codes == code::e4m3 ? 448 : 57344;
    check_scale(g.scale, magnitude, largest, std::ldexp(1, -14));
    return g;
  }
  const double most = std::exp2(code_bits(c.f.codes)) - 1;
  if (c.f.symmetric) {
    check_scale(g.scale, 2 * magnitude, most, 0);
    g.zero = -most / 2 * g.scale;
    return g;
  }
  REQUIRE(g.zero == f16_floor(g.least));
  check_scale(g.scale, g.largest - g.zero, most, 0);
  return g;
}

/// An integer code is the nearest level but for the rounding of the encoder's operations, and its error half
/// a step; the value read is the level, rounded once.
void check_affine(const cell& c, const group_facts& g, double x, uint32_t code, float read) {
  const int most = (1 << code_bits(c.f.codes)) - 1;
  const auto level = [&](int k) { return g.zero + k * g.scale; };
  const double slack = 3 * most * 0x1p-24 * g.scale, error = std::abs(x - level(static_cast<int>(code)));
  double least = error;
  if (code > 0) least = std::min(least, std::abs(x - level(static_cast<int>(code) - 1)));
  if (static_cast<int>(code) < most) least = std::min(least, std::abs(x - level(static_cast<int>(code) + 1)));
  if (static_cast<int>(code) > most) FAIL("code " << code << " of " << most);
  if (g.scale == 0 && code != 0) FAIL("a group without a scale has code " << code);
  if (error > least + slack) FAIL("code " << code << " of " << x << " is not the nearest level");
  if (error > 0.5 * g.scale + slack)
    FAIL("error " << error << " of " << x << ", half a step " << 0.5 * g.scale);
  if (read != static_cast<float>(level(static_cast<int>(code)))) FAIL("read " << read);
  const double rounding = std::abs(double{read}) * 0x1p-24 + 0x1p-149;
  if (std::abs(x - double{read}) > 0.5 * g.scale + slack + rounding) FAIL("read " << read << " for " << x);
}

void check_f8(const cell& c, const group_facts& g, double x, uint32_t code, float read) {
  const double level = f8_reference(c.f.codes, static_cast<uint8_t>(code)) * g.scale;
  const int digits = c.f.codes == code::e4m3 ? 3 : 2, bias = c.f.codes == code::e4m3 ? 7 : 15;
  const double subnormal = std::ldexp(g.scale, 1 - bias - digits);
  const double bound = std::max(std::ldexp(std::abs(x), -digits - 1), subnormal / 2);
  if (!std::isfinite(level)) FAIL("code " << code << " is no number");
  if (double{read} != level) FAIL("read " << read << ", stored " << level);
  if (g.scale == 0 && code != 0) FAIL("a group without a scale has code " << code);
  if (std::abs(x - level) > bound * (1 + 0x1p-20))
    FAIL("error " << x - level << " of " << x << ", bound " << bound);
}

void check_cell(const side_format& f, const cell_shape& s, kind data, std::mt19937& random) {
  INFO(told(f, s) << " data " << static_cast<int>(data));
  const auto values = make_values(data, s, random);
  cell c{f, s};
  REQUIRE(c.pack(values));
  const auto read = c.unpack();
  static std::map<code, std::vector<std::vector<bit_place>>> all_places;
  auto& places = all_places[f.codes];
  if (places.empty()) places = bit_places(f.codes);
  size_t seen = 0;
  for (const auto& [n, members] : groups_of(f, s)) {
    const group_facts g = check_group(c, values, members, n);
    seen += members.size();
    for (const int i : members) {
      const uint32_t code = code_at(places, f.codes, c.row_of(i), c.column_of(i));
      if (i / s.dim < s.exempt) {
        if (code != 0) FAIL("exempt token " << i / s.dim << " has code " << code);
      } else {
        is_fp8(f.codes)
            ? check_f8(c, g, values[static_cast<size_t>(i)], code, read[static_cast<size_t>(i)])
            : check_affine(c, g, values[static_cast<size_t>(i)], code, read[static_cast<size_t>(i)]);
      }
    }
  }
  REQUIRE(seen == values.size());
  const int columns = s.keys ? s.tokens : s.dim, rows = s.keys ? s.dim : s.tokens;
  for (int r = 0; r < rows; ++r) {
    for (int i = columns; i < (columns + 31) / 32 * 32; ++i) {
      if (code_at(places, f.codes, c.codes.data() + r * code_row_bytes(f.codes, columns), i) != 0)
        FAIL("filling");
    }
  }
}

}  // namespace

TEST_CASE("every codec, axis, group size, block size and head dim meets the reference in double") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("codec", 17)));
  int64_t left = 0, n = 0;
  for (const code c : packed_codes) {
    for (const scale_axis axis : all_axes) {
      for (const int32_t group : {0, 8, 16, 24, 32, 64, 128}) {
        const bool grouped = axis == scale_axis::token || axis == scale_axis::channel;
        if (!grouped && group != 0) continue;
        for (const int32_t tokens : {32, 64, 128}) {
          for (const int32_t dim : {8, 64, 80, 96, 128}) {
            for (const bool keys : {false, true}) {
              const side_format f{.codes = c, .axis = axis, .group_size = group, .symmetric = n++ % 3 == 0};
              const group_shape shape{1, 1, dim, dim};
              if (!validate(kv_format{.k = f, .v = f}, shape, tokens)) continue;
              // A sanitizer build takes a part of them, spread evenly.
              if ((left += effort(1000)) < 1000) continue;
              left -= 1000;
              const int32_t exempt[] = {0, 1, 2, 4};
              const cell_shape s{keys, tokens, dim, exempt[random() % 4]};
              check_cell(f, s, all_kinds[random() % std::size(all_kinds)], random);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("every codec meets the reference on each kind of data, symmetric or not") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("codec data", 18)));
  for (const code c : packed_codes) {
    for (const kind data : all_kinds) {
      for (const bool symmetric : {false, true}) {
        for (const scale_axis axis : all_axes) {
          check_cell({.codes = c, .axis = axis, .symmetric = symmetric}, {true, 32, 40, 1}, data, random);
          check_cell({.codes = c, .axis = axis, .symmetric = symmetric}, {false, 32, 40, 0}, data, random);
        }
      }
    }
  }
}

TEST_CASE("a value that cannot be packed is refused with its index, and nothing is written") {
  for (const code c : packed_codes) {
    for (const bool keys : {false, true}) {
      for (const float bad : {NAN, -NAN, INFINITY, -INFINITY, 65504.004f, -65504.004f, 3e38f}) {
        const side_format f{.codes = c, .axis = keys ? scale_axis::channel : scale_axis::token};
        cell packed{f, {keys, 32, 16, 2}};
        const cell before = packed;
        std::vector<float> values(32 * 16, 1.5f);
        values[100] = bad;
        values[400] = bad;
        const status refused = packed.pack(values);
        CHECK(refused.code == errc::bad_argument);
        CHECK(std::string(refused.field) == "value");
        CHECK(refused.value == 100);
        CHECK(packed.same_bytes(before));
        values[100] = values[400] = std::copysign(65504.0f, bad);
        values[31] = bad;  // of an exempt token: not looked at
        CHECK(packed.pack(values));
        values[32] = bad;  // the first that is not
        CHECK(packed.pack(values).value == 32);
      }
    }
  }
  cell none{{.codes = code::int8}, {false, 32, 8, 0}};
  none.f.codes = code::exact;
  CHECK(std::string(none.pack(std::vector<float>(256)).field) == "codes");
}

TEST_CASE("the whole range of an f16 is packed: its ends, its smallest steps, and both zeros alike") {
  for (const code c : packed_codes) {
    for (const bool symmetric : {false, true}) {
      const side_format f{.codes = c, .axis = scale_axis::head, .symmetric = symmetric};
      cell wide{f, {false, 32, 8, 0}}, fine{f, {false, 32, 8, 0}}, zeros{f, {false, 32, 8, 0}};
      std::vector<float> values(256, 65504.0f);
      values[7] = -65504.0f;
      REQUIRE(wide.pack(values));
      for (const float v : wide.unpack()) CHECK(std::isfinite(v));
      std::fill(values.begin(), values.end(), 0x1p-24f);
      values[3] = -0x1p-149f;
      REQUIRE(fine.pack(values));
      for (const float v : fine.unpack()) CHECK(std::abs(v) <= 0x1p-14f);
      for (size_t i = 0; i < values.size(); ++i) values[i] = i % 2 == 0 ? 0.0f : -0.0f;
      REQUIRE(zeros.pack(values));
      CHECK(zeros.codes == std::vector<std::byte>(zeros.codes.size()));
      CHECK(zeros.scale[0] == f16{});
      if (has_minimum(f)) CHECK(zeros.zero[0] == f16{});
      for (const float v : zeros.unpack()) CHECK(v == 0.0f);
    }
  }
}

TEST_CASE("a value halfway between two levels takes the even code") {
  cell whole{{.codes = code::int4, .axis = scale_axis::head}, {false, 32, 8, 0}}, symmetric = whole;
  symmetric.f.symmetric = true;
  std::vector<float> values(256, 15.0f);
  for (int i = 0; i < 15; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i) + 0.5f;
  values[100] = 0.0f;
  REQUIRE(whole.pack(values));
  REQUIRE(whole.scale[0].bits == 0x3c00);
  for (int i = 0; i < 15; ++i) {
    CHECK(read_code(code::int4, whole.row_of(i), whole.column_of(i)) == static_cast<uint32_t>(i + i % 2));
  }
  std::fill(values.begin(), values.end(), 7.5f);  // levels at -7.5, -6.5 ... 7.5
  for (int i = 0; i < 15; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i - 7);
  REQUIRE(symmetric.pack(values));
  REQUIRE(symmetric.scale[0].bits == 0x3c00);
  for (int i = 0; i < 15; ++i) {
    CHECK(read_code(code::int4, symmetric.row_of(i), symmetric.column_of(i)) ==
          static_cast<uint32_t>(i + i % 2));
  }
}

TEST_CASE("a scale is raised where float arithmetic rounded it below what covers the range") {
  const float above = std::nextafter(1.0f, 2.0f);
  REQUIRE(above + 2039.0f == 2040.0f);
  CHECK(fit_min_max(-2039.0f, 1.0f, 255).scale.bits == 0x4800);   // 8
  CHECK(fit_min_max(-2039.0f, above, 255).scale.bits == 0x4801);  // the next half
  REQUIRE(0x1p-148f / 255.0f == 0.0f);
  CHECK(fit_min_max(0.0f, 0x1p-149f, 255).scale.bits == 1);
  CHECK(fit_symmetric(0x1p-149f, 255).scale.bits == 1);
  CHECK(fit_symmetric(127.5f, 255).scale.bits == 0x3c00);
  CHECK(fit_symmetric(std::nextafter(127.5f, 128.0f), 255).scale.bits == 0x3c01);
  CHECK(fit_fp8(448.0f, code::e4m3).scale.bits == 0x3c00);
  CHECK(fit_fp8(std::nextafter(448.0f, 449.0f), code::e4m3).scale.bits == 0x3c01);
  CHECK(fit_fp8(1e-30f, code::e5m2).scale.bits == 0x0400);  // 2^-14
  CHECK(fit_fp8(65504.0f, code::e5m2).scale == detail::f16_above(65504.0f / 57344.0f));
}

TEST_CASE("bytes do not depend on which of two equal zeros is the least value") {
  const side_format f{.codes = code::int4, .axis = scale_axis::head};
  std::vector<float> values(256, 3.0f);
  values[9] = 0.0f;
  values[200] = -0.0f;
  cell a{f, {false, 32, 8, 0}}, b{f, {false, 32, 8, 0}};
  REQUIRE(a.pack(values));
  std::swap(values[9], values[200]);
  REQUIRE(b.pack(values));
  CHECK(a.same_bytes(b));
  CHECK(a.zero[0].bits == 0);
}

TEST_CASE("all heads at once give the bytes of each head alone, and a scale per tensor covers them all") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("cells", 5)));
  const group_shape shape{1, 3, 64, 40};
  for (const code c : packed_codes) {
    for (const scale_axis axis : all_axes) {
      for (const bool keys : {false, true}) {
        const side_format f{.codes = c, .axis = axis, .symmetric = random() % 2 == 0};
        INFO(told(f, {keys, 32, keys ? 64 : 40, 1}));
        const int32_t dim = keys ? 64 : 40, each = 32 * dim;
        std::vector<float> values;
        for (int h = 0; h < 3; ++h) {
          auto head = make_values(kind::normal, {keys, 32, dim, 1}, random);
          for (float& v : head) v *= static_cast<float>(1 + h);
          values.insert(values.end(), head.begin(), head.end());
        }
        const side_layout l = layout_of(f, shape, 32, keys);
        std::vector<std::byte> side(static_cast<size_t>(l.bytes), std::byte{0x77});
        REQUIRE(pack_cells(f, shape, 32, keys, 1, values.data(), side.data()));
        std::vector<float> read(values.size());
        unpack_cells(f, shape, 32, keys, side.data(), read.data());
        cell whole{f, {keys, 96, dim, 0}};  // the range of all heads, exempt tokens set to 0
        for (int h = 0; h < 3; ++h) {
          cell alone{f, {keys, 32, dim, 1}};
          REQUIRE(alone.pack({values.begin() + h * each, values.begin() + (h + 1) * each}));
          const cell_scales scales = scales_of(l, side.data(), h);
          if (axis == scale_axis::tensor) {
            alone.scale[0] = *scales.scale;
            if (has_minimum(f)) alone.zero[0] = *scales.zero;
            encode_cell(f, alone.s, values.data() + h * each, alone.codes.data(), alone.scale.data(),
                        alone.zero.data());
          }
          CHECK(std::equal(alone.codes.begin(), alone.codes.end(), side.begin() + h * l.head_stride));
          CHECK(std::equal(alone.scale.begin(), alone.scale.end(), scales.scale));
          if (has_minimum(f)) CHECK(std::equal(alone.zero.begin(), alone.zero.end(), scales.zero));
          CHECK(std::equal(read.begin() + h * each, read.begin() + (h + 1) * each, alone.unpack().begin()));
          for (int d = 0; d < dim; ++d) values[static_cast<size_t>(h * each + d)] = 0;
        }
        if (axis != scale_axis::tensor) continue;
        REQUIRE(whole.pack(values));
        CHECK(whole.scale[0] == *scales_of(l, side.data(), 2).scale);
        if (has_minimum(f)) CHECK(whole.zero[0] == *scales_of(l, side.data(), 1).zero);
      }
    }
  }
}

TEST_CASE("a bad value of a later head is refused by its index over all heads, and nothing is written") {
  const group_shape shape{1, 2, 16, 16};
  const side_format f{.codes = code::int8, .axis = scale_axis::tensor};
  std::vector<float> values(2 * 32 * 16, 0.25f);
  std::vector<std::byte> side(static_cast<size_t>(layout_of(f, shape, 32, false).bytes), std::byte{0x13});
  const auto before = side;
  values[512 + 20] = NAN;
  CHECK(pack_cells(f, shape, 32, false, 1, values.data(), side.data()).value == 532);
  CHECK(side == before);
  values[532] = 0;
  values[512 + 15] = NAN;  // exempt in every head
  CHECK(pack_cells(f, shape, 32, false, 1, values.data(), side.data()));
  side_format exact_side = f;
  exact_side.codes = code::exact;
  CHECK(std::string(pack_cells(exact_side, shape, 32, false, 1, values.data(), side.data()).field) ==
        "codes");
}

TEST_CASE("the same values give the same bytes on every build: they are pinned") {
  // Values from integers alone, so that they are the same everywhere; the numbers are FNV-1a of codes, scales
  // and minima. A faster packer, or a device's, must reach them too.
  std::vector<float> values(64 * 80);
  uint32_t state = 12345;
  for (float& v : values) {
    state = state * 1664525u + 1013904223u;
    const auto a = static_cast<float>(static_cast<int32_t>(state >> 8) - (1 << 23));
    v = a * 0x1p-22f * (state % 37 == 0 ? 5.0f : 1.0f);
  }
  const auto hash = [&](const side_format& f, bool keys) {
    cell c{f, {keys, 64, 80, 1}};
    REQUIRE(c.pack(values));
    uint64_t h = 0xcbf29ce484222325ull;
    const auto mix = [&](uint32_t byte) { h = (h ^ byte) * 0x100000001b3ull; };
    for (const std::byte b : c.codes) mix(std::to_integer<uint32_t>(b));
    for (const auto* list : {&c.scale, &c.zero}) {
      for (const f16 s : *list) {
        mix(s.bits & 0xffu);
        mix(s.bits >> 8);
      }
    }
    return h;
  };
  struct row {
    code codes;
    uint64_t k_channel, v_token, v_symmetric, k_clip, v_clip_ends;
  };
  const row pinned[] = {
      {code::e4m3, 0xa819062b29e1d9a6, 0x6a35fde3c9b49266, 0x6a35fde3c9b49266, 0xa819062b29e1d9a6,
       0x6a35fde3c9b49266},
      {code::e5m2, 0x946507ebc8ed873b, 0x8de4b55c3e5c50e1, 0x8de4b55c3e5c50e1, 0x946507ebc8ed873b,
       0x8de4b55c3e5c50e1},
      {code::int8, 0xdf4da041ddcf7f7b, 0xfa33791b5b29d2e5, 0xf1fb77f6c78b189b, 0xdf4da041ddcf7f7b,
       0xfa33791b5b29d2e5},
      {code::int6, 0xb37f9c724626e2b8, 0x41eecbf3fcbd6666, 0x6847623df6b95b05, 0xb37f9c724626e2b8,
       0x41eecbf3fcbd6666},
      {code::int5, 0x9261a245e856beb0, 0x80ce540de32cdeca, 0xf2d71a4edbff73f0, 0x9261a245e856beb0,
       0x80ce540de32cdeca},
      {code::int4, 0x1a1ff7c61c63f360, 0x9f4d9937f65b8141, 0x259d340ff3f51d03, 0xc88f0fe6c80e7e7d,
       0x1291531b26c4432e},
      {code::int3, 0x24d72c06d1529fc2, 0x48f6656cd587237c, 0x0799cc483ae58358, 0x27f1adc2c859035f,
       0x453bb8b7b597584b},
      {code::int2, 0x155783c2bc71e0ba, 0x39441db87db11d74, 0xd6e97eeb687b5bbf, 0x426ed5256e40054e,
       0x6992e2e87b513d3c},
  };
  for (const row& r : pinned) {
    INFO("code " << static_cast<int>(r.codes));
    side_format f{.codes = r.codes, .axis = scale_axis::channel, .group_size = 32};
    CHECK(hash(f, true) == r.k_channel);
    f.clip = clip_search::middle;
    CHECK(hash(f, true) == r.k_clip);
    f = {.codes = r.codes, .axis = scale_axis::token, .group_size = 32};
    CHECK(hash(f, false) == r.v_token);
    f.clip = clip_search::two_sided;
    CHECK(hash(f, false) == r.v_clip_ends);
    f.symmetric = true;
    CHECK(hash(f, false) == r.v_symmetric);
  }
}
