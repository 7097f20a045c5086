// SPDX-License-Identifier: Apache-2.0
// The range search against one written from its description: other loops, other rounding tricks, same bits.
#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "quant/reference.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

struct levels {
  float scale = 0, zero = 0;
};

float raised(float span, int most, double start) {
  double scale = f16_ceil(static_cast<double>(span));
  while (start + scale * most < 0) scale = f16_ceil(std::nextafter(scale, 1e9));
  return static_cast<float>(scale);
}

levels fitted(float least, float largest, int most) {
  levels out;
  out.zero = static_cast<float>(f16_floor(least));
  if (least == largest && out.zero == least) return out;
  out.scale =
      raised((largest - out.zero) / static_cast<float>(most), most, double{out.zero} - double{largest});
  return out;
}
levels fitted_symmetric(float magnitude, int most) {
  levels out;
  if (magnitude == 0) return out;
  out.scale = raised(magnitude * 2 / static_cast<float>(most), most, -2.0 * double{magnitude});
  return out;
}

float error_of(const levels& l, bool symmetric, int most, const std::vector<float>& group, size_t skip) {
  float lane[16] = {};
  for (size_t i = skip; i < group.size(); ++i) {
    const float zero = symmetric ? -static_cast<float>(most) / 2 * l.scale : l.zero;
    float code = 0;
    if (l.scale > 0) {
      const float inverse = 1.0f / l.scale;
      code =
          symmetric ? std::fma(group[i], inverse, static_cast<float>(most) / 2) : (group[i] - zero) * inverse;
    }
    code = std::min(std::max(std::nearbyint(code), 0.0f), static_cast<float>(most));
    const float e = group[i] - std::fma(code, l.scale, zero);
    lane[i % 16] = std::fma(e, e, lane[i % 16]);
  }
  float eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = lane[i] + lane[i + 8];
  for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

levels searched(const side_format& f, const std::vector<float>& group, size_t skip) {
  const int most = (1 << code_bits(f.codes)) - 1;
  const float least = *std::min_element(group.begin() + static_cast<int64_t>(skip), group.end());
  const float largest = *std::max_element(group.begin() + static_cast<int64_t>(skip), group.end());
  const float middle = (least + largest) / 2, half = (largest - least) / 2;
  const auto share = [](int percent) { return std::stof("0." + std::to_string(percent)); };
  std::vector<levels> tried;
  if (f.symmetric) {
    const float magnitude = std::max(std::abs(least), std::abs(largest));
    tried.push_back(fitted_symmetric(magnitude, most));
    for (const int p : {93, 86, 79, 72, 64, 56})
      tried.push_back(fitted_symmetric(share(p) * magnitude, most));
  } else {
    std::vector<std::pair<int, int>> ends = {{100, 100}};
    if (f.clip == clip_search::middle) {
      for (const int p : {93, 86, 79, 72, 64, 56}) ends.push_back({p, p});
    } else {
      ends.clear();
      for (const int low : {100, 86, 72, 58}) {
        for (const int high : {100, 86, 72, 58}) ends.push_back({low, high});
      }
      std::stable_sort(ends.begin(), ends.end(),
                       [](auto a, auto b) { return a.first + a.second > b.first + b.second; });
    }
    for (const auto& [low, high] : ends) {
      const float from = low == 100 ? least : std::max(least, std::fma(-share(low), half, middle));
      const float to = high == 100 ? largest : std::min(largest, std::fma(share(high), half, middle));
      tried.push_back(fitted(from, to, most));
    }
  }
  size_t best = 0;
  for (size_t i = 1; i < tried.size(); ++i) {
    if (error_of(tried[i], f.symmetric, most, group, skip) <
        error_of(tried[best], f.symmetric, most, group, skip)) {
      best = i;
    }
  }
  return tried[best];
}

double squared_error(const std::vector<float>& a, const std::vector<float>& b, size_t from) {
  double sum = 0;
  for (size_t i = from; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return sum;
}

}  // namespace

TEST_CASE("the search finds the range of least squared error, the widest of equals, to the bit") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("clip", 23)));
  const code integers[] = {code::int8, code::int6, code::int5, code::int4, code::int3, code::int2};
  int64_t narrower = 0, all = 0;
  for (int64_t round = 0; round < effort(1200); ++round) {
    const int32_t sizes[] = {0, 8, 16, 32};
    side_format f{.codes = integers[random() % 6],
                  .axis = all_axes[random() % 4],
                  .group_size = sizes[random() % 4],
                  .symmetric = random() % 2 == 0,
                  .clip = random() % 2 == 0 ? clip_search::middle : clip_search::two_sided};
    const int32_t dims[] = {8, 24, 64, 80}, exempt[] = {0, 1, 2, 4};
    const cell_shape s{random() % 2 == 0, random() % 2 == 0 ? 32 : 64, dims[random() % 4],
                       exempt[random() % 4]};
    const kind data = all_kinds[random() % std::size(all_kinds)];
    INFO(told(f, s) << " data " << static_cast<int>(data));
    const auto values = make_values(data, s, random);
    cell c{f, s};
    REQUIRE(c.pack(values));
    for (const auto& [n, members] : groups_of(f, s)) {
      std::vector<float> group;
      size_t skip = 0;
      for (const int i : members) {
        group.push_back(values[static_cast<size_t>(i)]);
        skip += i / s.dim < s.exempt;
      }
      if (skip == group.size()) continue;
      const stored_grid chosen{c.scale[static_cast<size_t>(n)],
                               has_minimum(f) ? c.zero[static_cast<size_t>(n)] : f16{}};
      const levels stored{to_float(chosen.scale), to_float(chosen.zero)};
      const int most = (1 << code_bits(f.codes)) - 1;
      if (affine{f}.squared_error(group_at(f, s, values.data(), n), chosen) !=
          error_of(stored, f.symmetric, most, group, skip)) {
        FAIL("group " << n << ": the sum of errors is added up in another order");
      }
      const levels want = searched(f, group, skip);
      const float scale = to_float(c.scale[static_cast<size_t>(n)]);
      if (scale != want.scale) FAIL("group " << n << ": scale " << scale << ", searched " << want.scale);
      if (has_minimum(f) && to_float(c.zero[static_cast<size_t>(n)]) != want.zero)
        FAIL("group " << n << " minimum");
      ++all;
      f.clip = clip_search::none;
      const stored_grid whole = fit_group(f, group_at(f, s, values.data(), n));
      f.clip = c.f.clip;
      narrower += whole.scale != c.scale[static_cast<size_t>(n)];
    }
  }
  CHECK(narrower > all / 20);  // the search is not idle ...
  CHECK(narrower < all);       // ... and does not always cut
}

TEST_CASE("a search never makes the squared error larger, and an outlier's group smaller by far") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("clip gain", 29)));
  for (const code c : {code::int4, code::int3, code::int2}) {
    for (const bool symmetric : {false, true}) {
      double gain[3] = {};
      for (int round = 0; round < 20; ++round) {
        const cell_shape s{false, 32, 64, 0};
        auto values = make_values(kind::normal, s, random);
        for (int t = 0; t < 32; ++t) values[static_cast<size_t>(t * 64 + t)] *= 3.0f;
        for (int search = 0; search < 3; ++search) {
          cell packed{{.codes = c, .symmetric = symmetric, .clip = static_cast<clip_search>(search)}, s};
          REQUIRE(packed.pack(values));
          gain[search] += squared_error(values, packed.unpack(), 0);
        }
      }
      INFO("code " << static_cast<int>(c) << " symmetric " << symmetric << ": " << gain[0] << " " << gain[1]
                   << " " << gain[2]);
      CHECK(gain[1] <= gain[0] * 1.000001);
      CHECK(gain[2] <= gain[0] * 1.000001);
      if (c == code::int2) CHECK(gain[2] < 0.7 * gain[0]);
      if (!symmetric) CHECK(gain[2] < 1.05 * gain[1]);
    }
  }
}

TEST_CASE("a search leaves the range of small floats and of equal values alone") {
  std::mt19937 random(31);
  for (const code c : {code::e4m3, code::e5m2, code::int4}) {
    const cell_shape s{true, 32, 16, 0};
    const auto values = make_values(c == code::int4 ? kind::constant : kind::normal, s, random);
    std::vector<float> halves;
    for (const float v : values) halves.push_back(to_float(to_f16(v)));
    cell plain{{.codes = c, .axis = scale_axis::channel}, s};
    cell searched{{.codes = c, .axis = scale_axis::channel, .clip = clip_search::two_sided}, s};
    REQUIRE(plain.pack(halves));
    REQUIRE(searched.pack(halves));
    CHECK(plain.same_bytes(searched));
  }
}
