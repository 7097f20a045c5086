// SPDX-License-Identifier: Apache-2.0
// Faults of quantised caches that others have published, each as a test that would have found it.
#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "kvcache/quant/sizes.hpp"
#include "quant/reference.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

double mean_square(const std::vector<float>& a, const std::vector<float>& b, size_t from = 0) {
  double sum = 0;
  for (size_t i = from; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return sum / static_cast<double>(a.size() - from);
}
double packed_error(const side_format& f, const cell_shape& s, const std::vector<float>& values) {
  cell c{f, s};
  REQUIRE(c.pack(values));
  return mean_square(values, c.unpack(), static_cast<size_t>(s.exempt) * s.dim);
}

}  // namespace

TEST_CASE("K per channel really rounds, and costs what it says: a group is never a single token (trap 10)") {
  std::mt19937 random(61);
  const cell_shape s{true, 32, 64, 0};
  const auto values = make_values(kind::normal, s, random);
  for (const int32_t group : {0, 8, 16, 32}) {
    CHECK(packed_error({.codes = code::int4, .axis = scale_axis::channel, .group_size = group}, s, values) >
          1e-4);
  }
  const kv_format one{.k = {.codes = code::int4, .axis = scale_axis::channel, .group_size = 1}};
  CHECK(std::string(validate(one, group_shape{1, 1, 64, 64}, 32).field) == "group_size");
}

TEST_CASE(
    "what is read exactly depends on the length alone and never grows past residual and a block (trap 11)") {
  for (const int32_t residual : {0, 1, 31, 32, 128}) {
    kv_format f{.k = {.codes = code::int4}, .v = {.codes = code::int4}, .residual = residual};
    int64_t sealed = 0;
    for (int64_t tokens = 1; tokens <= 1000; ++tokens) {  // one at a time
      const int64_t now = sealed_blocks(f, 32, tokens);
      CHECK(now - sealed >= 0);
      CHECK(now - sealed <= 1);
      sealed = now;
      const int64_t left = tokens - sealed * 32;
      if (left > residual + 31) FAIL(left << " tokens are exact at " << tokens);
      if (sealed > 0 && left < residual) FAIL("only " << left << " tokens are exact at " << tokens);
    }
  }
  CHECK(sealed_blocks(kv_format{}, 32, 1000) == 0);
}

TEST_CASE("a cell's bytes do not depend on what lies beside it (trap 13)") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("neighbours", 67)));
  const group_shape shape{1, 4, 64, 64};
  for (const code c : packed_codes) {
    for (const scale_axis axis : {scale_axis::head, scale_axis::token, scale_axis::channel}) {
      const side_format f{.codes = c, .axis = axis};
      const auto mine = make_values(kind::normal, {true, 32, 64, 0}, random);
      std::vector<std::byte> first;
      for (int round = 0; round < 3; ++round) {
        std::vector<float> values;
        for (int h = 0; h < 4; ++h) {
          const auto other = make_values(round == 0 ? kind::huge : kind::constant, {true, 32, 64, 0}, random);
          values.insert(values.end(), h == 2 ? mine.begin() : other.begin(),
                        h == 2 ? mine.end() : other.end());
        }
        const side_layout l = layout_of(f, shape, 32, true);
        std::vector<std::byte> side(static_cast<size_t>(l.bytes));
        REQUIRE(pack_cells(f, shape, 32, true, 0, values.data(), side.data()));
        const std::vector<std::byte> cell(side.begin() + 2 * l.head_stride, side.begin() + 3 * l.head_stride);
        if (round == 0) first = cell;
        CHECK(cell == first);
      }
    }
  }
}

TEST_CASE("an exempt first token leaves the ranges of all others as if it were not there (trap 14)") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("sink", 71)));
  const cell_shape with{true, 64, 64, 0}, without{true, 64, 64, 1};
  auto values = make_values(kind::normal, with, random);
  for (size_t i = 0; i < 64; ++i) values[i] *= 50.0f;  // the sink
  for (const code c : {code::int8, code::int4, code::int2}) {
    const side_format f{.codes = c, .axis = scale_axis::channel};
    cell in{f, with}, out{f, without};
    REQUIRE(in.pack(values));
    REQUIRE(out.pack(values));
    CHECK(mean_square(values, out.unpack(), 64) < 0.05 * mean_square(values, in.unpack(), 64));
    auto other = values;
    for (size_t i = 0; i < 64; ++i) other[i] = -1e4f;
    cell same{f, without};
    REQUIRE(same.pack(other));
    CHECK(same.same_bytes(out));
  }
}

TEST_CASE("a range is that of the values, not stretched to hold 0 or what fills up a row (trap 16)") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("five to six", 73)));
  for (const scale_axis axis : all_axes) {
    for (const bool keys : {false, true}) {
      const cell_shape s{keys, 32, 96, 0};
      std::vector<float> values(32 * 96);
      std::uniform_real_distribution<float> uniform(5.0f, 6.0f);
      for (float& v : values) v = uniform(random);
      cell c{{.codes = code::int4, .axis = axis}, s};
      REQUIRE(c.pack(values));
      for (const f16 scale : c.scale) CHECK(to_float(scale) <= 1.0f / 15 + 0.001f);
      for (const f16 zero : c.zero) CHECK(to_float(zero) >= 5.0f - 0.01f);
      const auto read = c.unpack();
      for (size_t i = 0; i < read.size(); ++i) REQUIRE(std::abs(read[i] - values[i]) <= 0.5f / 15 + 0.001f);
    }
  }
}

TEST_CASE("a constant channel has scale 0 and code 0, is read exactly, and leaves its neighbours alone") {
  const cell_shape s{true, 32, 8, 0};
  for (const code c : packed_codes) {
    for (const bool symmetric : {false, true}) {
      const side_format f{.codes = c, .axis = scale_axis::channel, .symmetric = symmetric};
      std::vector<float> values(32 * 8);
      for (size_t i = 0; i < values.size(); ++i) values[i] = i % 8 == 3 ? -7.25f : static_cast<float>(i / 8);
      cell packed{f, s};
      REQUIRE(packed.pack(values));
      const auto read = packed.unpack();
      for (size_t t = 0; t < 32; ++t) {
        REQUIRE(std::isfinite(read[t * 8 + 3]));
        if (has_minimum(f)) {
          CHECK(read[t * 8 + 3] == -7.25f);
          CHECK(read_code(c, packed.row_of(3), static_cast<int32_t>(t)) == 0);
        }
        if (code_bits(c) >= 5) CHECK(std::abs(read[t * 8 + 4] - static_cast<float>(t)) <= 31.0f / 8);
      }
      if (has_minimum(f)) CHECK(packed.scale[3] == f16{});
    }
  }
}

TEST_CASE("levels number 2^bits, also for 3, 5 and 6 bits, where bits^2 would be another number") {
  for (const code c : {code::int8, code::int6, code::int5, code::int4, code::int3, code::int2}) {
    const auto levels = static_cast<size_t>(1) << code_bits(c);
    std::vector<float> values(32 * 64);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % levels);
    cell packed{{.codes = c, .axis = scale_axis::head}, {false, 32, 64, 0}};
    REQUIRE(packed.pack(values));
    CHECK(packed.scale[0].bits == 0x3c00);
    CHECK(packed.unpack() == values);
    CHECK(static_cast<size_t>(largest_code(c)) == levels - 1);
  }
}

TEST_CASE(
    "a scale is that of the block's own values: four times the values, four times the scale (trap 22)") {
  std::mt19937 random(79);
  for (const code c : packed_codes) {
    const cell_shape s{false, 32, 64, 0};
    auto values = make_values(kind::normal, s, random);
    for (float& v : values) v *= 1000.0f;  // so that e5m2's least scale plays no part
    cell before{{.codes = c}, s}, after{{.codes = c}, s};
    REQUIRE(before.pack(values));
    for (float& v : values) v *= 4.0f;
    REQUIRE(after.pack(values));
    CHECK(after.codes == before.codes);
    for (size_t i = 0; i < before.scale.size(); ++i) {
      CHECK(to_float(after.scale[i]) == 4.0f * to_float(before.scale[i]));
    }
  }
}

TEST_CASE("more bits lose less, on every axis, with a minimum or without, searched or not") {
  // Of data that fills its range: one outlier alone, or levels of which half lie where no value is, leave it
  // to chance how near the few levels that are left come to the values.
  std::mt19937 random(static_cast<uint32_t>(test_seed("monotone", 83)));
  for (const kind data : {kind::normal, kind::shifted, kind::huge, kind::halves}) {
    for (const scale_axis axis : all_axes) {
      for (const bool symmetric : {false, true}) {
        if (symmetric && data == kind::shifted) continue;
        for (const clip_search clip : {clip_search::none, clip_search::middle, clip_search::two_sided}) {
          const cell_shape s{true, 64, 64, 0};
          const auto values = make_values(data, s, random);
          double last = 0;
          for (const code c : {code::int8, code::int6, code::int5, code::int4, code::int3, code::int2}) {
            const side_format f{.codes = c, .axis = axis, .symmetric = symmetric, .clip = clip};
            const double error = packed_error(f, s, values);
            INFO(told(f, s) << " data " << static_cast<int>(data) << " " << error << " after " << last);
            CHECK(error > last);
            last = error;
          }
          CHECK(packed_error({.codes = code::e4m3, .axis = axis}, s, values) <
                packed_error({.codes = code::e5m2, .axis = axis}, s, values));
        }
      }
    }
  }
}

TEST_CASE("the squared error follows the step squared: 289 from 8 to 4 bits, 25 from 4 to 2") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("step squared", 89)));
  double error[3] = {};
  for (int round = 0; round < 10; ++round) {
    const cell_shape s{true, 64, 64, 0};
    const auto values = make_values(kind::normal, s, random);
    int i = 0;
    for (const code c : {code::int8, code::int4, code::int2}) {
      error[i++] += packed_error({.codes = c, .axis = scale_axis::channel, .group_size = 32}, s, values);
    }
  }
  INFO(error[1] / error[0] << " " << error[2] / error[1]);
  CHECK(std::abs(error[1] / error[0] - 289) < 0.05 * 289);
  CHECK(std::abs(error[2] / error[1] - 25) < 0.15 * 25);
}

TEST_CASE(
    "on keys with outlier channels a scale per channel beats one per token, that one per head or tensor") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("outlier channels", 97)));
  const group_shape shape{1, 2, 64, 64};
  std::vector<float> values;
  for (int h = 0; h < 2; ++h) {
    auto head = make_values(kind::normal, {true, 64, 64, 0}, random);
    for (int t = 0; t < 64; ++t) {
      head[static_cast<size_t>(t * 64 + 7)] += 12.0f;
      head[static_cast<size_t>(t * 64 + 40)] -= h == 0 ? 9.0f : 40.0f;
      for (int d = 0; d < 64; ++d) head[static_cast<size_t>(t * 64 + d)] *= 0.5f + static_cast<float>(t) / 64;
    }
    values.insert(values.end(), head.begin(), head.end());
  }
  double last = 0;
  for (const scale_axis axis :
       {scale_axis::channel, scale_axis::token, scale_axis::head, scale_axis::tensor}) {
    const side_format f{.codes = code::int8, .axis = axis};
    std::vector<std::byte> side(static_cast<size_t>(layout_of(f, shape, 64, true).bytes));
    std::vector<float> read(values.size());
    REQUIRE(pack_cells(f, shape, 64, true, 0, values.data(), side.data()));
    unpack_cells(f, shape, 64, true, side.data(), read.data());
    const double error = mean_square(values, read);
    INFO("axis " << static_cast<int>(axis) << ": " << error << " after " << last);
    CHECK(error > 1.2 * last);
    last = error;
  }
}
