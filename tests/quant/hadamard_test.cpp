// SPDX-License-Identifier: Apache-2.0
// The Walsh-Hadamard rotation: its matrix, its order of operations, and what it is for.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "kvcache/quant/hadamard.hpp"
#include "quant/reference.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

std::vector<float> random_row(size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> row(n);
  for (float& v : row) v = normal(random);
  return row;
}
std::vector<float> rotated_row(std::vector<float> row) {
  hadamard(row.data(), static_cast<int32_t>(row.size()));
  return row;
}
/// The unnormalised transform by halves: the same operations on each value, found the other way round.
std::vector<float> by_halves(const std::vector<float>& row) {
  if (row.size() == 1) return row;
  const auto middle = row.begin() + static_cast<int64_t>(row.size() / 2);
  const auto a = by_halves({row.begin(), middle}), b = by_halves({middle, row.end()});
  std::vector<float> out(row.size());
  for (size_t i = 0; i < a.size(); ++i) {
    out[i] = a[i] + b[i];
    out[i + a.size()] = a[i] - b[i];
  }
  return out;
}
double product(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
  return sum;
}

}  // namespace

TEST_CASE("the rotation is the Walsh matrix over the root of its size") {
  for (size_t n = 1; n <= 512; n *= 2) {
    for (size_t column = 0; column < n; ++column) {
      std::vector<float> unit(n);
      unit[column] = 1;
      const auto out = rotated_row(unit);
      for (size_t row = 0; row < n; ++row) {
        const double sign = std::popcount(row & column) % 2 == 0 ? 1 : -1;
        if (out[row] != static_cast<float>(sign / std::sqrt(static_cast<double>(n)))) FAIL(n << " " << row);
      }
    }
  }
}

TEST_CASE("the order of its operations is fixed, to the bit") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("hadamard", 41)));
  for (size_t n = 1; n <= 256; n *= 2) {
    const auto row = random_row(n, random);
    auto want = by_halves(row);
    const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(n)));
    for (float& v : want) v = v * factor;
    CHECK(rotated_row(row) == want);
  }
  CHECK(rotated_row({3, 1}) == std::vector<float>{4 * 0.70710678f, 2 * 0.70710678f});
  CHECK(rotated_row({1, 2, 3, 4}) == std::vector<float>{5, -1, -2, 0});
}

TEST_CASE("lengths and products stay, and rotating twice gives the row again, to rounding") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("hadamard products", 43)));
  for (const size_t n : {8, 64, 128, 256}) {
    for (int round = 0; round < 50; ++round) {
      const auto q = random_row(n, random), k = random_row(n, random);
      const double size = std::sqrt(product(q, q) * product(k, k));
      CHECK(std::abs(product(rotated_row(q), rotated_row(k)) - product(q, k)) < 1e-6 * size);
      const auto again = rotated_row(rotated_row(k));
      double worst = 0;
      for (size_t i = 0; i < n; ++i) worst = std::max(worst, std::abs(double{again[i]} - k[i]));
      CHECK(worst < 1e-6 * std::sqrt(product(k, k)));
    }
  }
}

TEST_CASE("packing rotated rows: the inner codec sees the rotation, and unpacking takes it back") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("rotated", 47)));
  const side_format f{.codes = code::int8, .axis = scale_axis::token};
  const cell_shape s{false, 32, 64, 1};
  auto values = make_values(kind::normal, s, random);
  values[5] = NAN;  // of the exempt token: not looked at, not rotated
  std::vector<float> scratch(values.size()), inner = values, read(values.size());
  for (int t = 1; t < 32; ++t) hadamard(inner.data() + t * 64, 64);
  cell plain{f, s}, turned{f, s};
  REQUIRE(plain.pack(inner));
  const rotated<affine> codec{{f}, scratch.data()};
  REQUIRE(codec.pack(s, values.data(), turned.codes.data(), turned.scale.data(), turned.zero.data()));
  CHECK(plain.same_bytes(turned));
  codec.unpack(s, turned.codes.data(), turned.scale.data(), turned.zero.data(), read.data());
  for (size_t i = 64; i < values.size(); ++i) REQUIRE(std::abs(read[i] - values[i]) < 0.1f);
  const status refused = codec.pack({false, 32, 80, 0}, values.data(), turned.codes.data(), nullptr, nullptr);
  CHECK(refused.code == errc::unsupported);
  CHECK(refused.value == 80);
}

TEST_CASE("a rotation makes an outlier channel cheap for a scale per token") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("outlier channel", 53)));
  const cell_shape s{true, 32, 64, 0};
  auto values = make_values(kind::normal, s, random);
  for (int t = 0; t < 32; ++t) values[static_cast<size_t>(t * 64 + 11)] += 20.0f;
  const auto error = [&](const std::vector<float>& read) {
    double sum = 0;
    for (size_t i = 0; i < read.size(); ++i) sum += (read[i] - values[i]) * (read[i] - values[i]);
    return sum;
  };
  const side_format per_token{.codes = code::int4, .axis = scale_axis::token};
  cell plain{per_token, s}, turned{per_token, s};
  cell per_channel{{.codes = code::int4, .axis = scale_axis::channel}, s};
  REQUIRE(plain.pack(values));
  REQUIRE(per_channel.pack(values));
  std::vector<float> scratch(values.size()), read(values.size());
  const rotated<affine> codec{{per_token}, scratch.data()};
  REQUIRE(codec.pack(s, values.data(), turned.codes.data(), turned.scale.data(), turned.zero.data()));
  codec.unpack(s, turned.codes.data(), turned.scale.data(), turned.zero.data(), read.data());
  INFO(error(plain.unpack()) << " per token, rotated " << error(read) << ", per channel "
                             << error(per_channel.unpack()));
  CHECK(error(read) < 0.5 * error(plain.unpack()));
  CHECK(error(per_channel.unpack()) < 0.5 * error(read));
}
