// SPDX-License-Identifier: Apache-2.0
// The part quant by itself: a format from text, what it costs, one cell packed and unpacked, a codec of one's
// own. Regions are shown in docs/quant.md.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include "expect.hpp"
#include "kvcache/quant/concept.hpp"
#include "kvcache/quant/hadamard.hpp"
#include "kvcache/quant/pack.hpp"
#include "kvcache/quant/parse.hpp"
#include "kvcache/quant/sizes.hpp"

namespace kvc = kvcache;

namespace {

void show_text() {
  // [text]
  constexpr kvc::group_shape llama{
      .layers = 32, .kv_heads = 8, .head_dim_k = 128, .head_dim_v = 128, .type = kvc::element::f16};
  const kvc::parsed_format read = kvc::parse_format("kv4:residual=32");
  if (!read.ok()) std::printf("%.*s: %s\n", int(read.key.size()), read.key.data(), read.allowed);
  const kvc::status fits = kvc::validate(read.value, llama, 64);  // blocks of 64 tokens
  const double bits = kvc::bits_per_value(read.value, llama, 64, 8192);
  // [text]
  expect(read.ok() && fits, "a preset may be followed by settings of one's own");
  expect(bits > 4.5 && bits < 4.51, "4-bit codes cost 4.5 bits a value, scales and the first token included");

  const kvc::parsed_format wrong_text = kvc::parse_format("int4:group=12");
  expect(!wrong_text.ok() && wrong_text.key == "group" && wrong_text.text == "12",
         "wrong text names the key and what was found");
  const kvc::status odd = kvc::validate(read.value, kvc::group_shape{1, 8, 80, 80}, 64);
  expect(odd.code == kvc::errc::unsupported && odd.value == 80, "a head of 80 has no Walsh matrix");
}

void show_cell() {
  std::vector<float> keys(64 * 128);  // one head of one block: 64 tokens
  for (size_t i = 0; i < keys.size(); ++i)
    keys[i] = std::sin(0.37f * float(i)) + (i % 128 == 5 ? 9.0f : 0.0f);
  // [cell]
  const kvc::side_format k{.codes = kvc::code::int4, .axis = kvc::scale_axis::channel};
  std::vector<std::byte> codes(size_t(kvc::code_row_bytes(k.codes, 64)) * 128);  // a row per channel
  std::vector<kvc::f16> scale(size_t(kvc::scales_of_cell(k, 64, 128))),
      zero(scale);  // one of each per channel
  kvc::status packed =
      kvc::pack_cell(k, true, 64, 128, 0, keys.data(), codes.data(), scale.data(), zero.data());
  std::vector<float> again(keys.size());
  kvc::unpack_cell(k, true, 64, 128, codes.data(), scale.data(), zero.data(), again.data());
  // [cell]
  float worst = 0, step = 0;
  for (size_t i = 0; i < keys.size(); ++i) worst = std::max(worst, std::abs(again[i] - keys[i]));
  for (const kvc::f16 s : scale) step = std::max(step, kvc::to_float(s));
  expect(bool(packed) && worst > 0 && worst <= 0.5001f * step, "no value is further away than half a step");
  expect(step < 0.14f, "a channel far from 0 has steps as small as the others");

  keys[300] = NAN;
  packed = kvc::pack_cell(k, true, 64, 128, 0, keys.data(), codes.data(), scale.data(), zero.data());
  expect(!packed && packed.value == 300, "a NaN is refused by its place");
}

void show_rotation() {
  std::array<float, 4> row = {0, 0, 8, 0};
  kvc::hadamard(row.data(), 4);
  expect(row == std::array<float, 4>{4, 4, -4, -4}, "a rotation spreads an outlier evenly");
  kvc::hadamard(row.data(), 4);
  expect(row == std::array<float, 4>{0, 0, 8, 0}, "and done twice gives the row again");
}

// [own_codec]
/// One bit a value and one scale a token: the sign, and the mean magnitude.
struct signs {
  kvc::status pack(const kvc::cell_shape& s, const float* values, std::byte* codes, kvc::f16* scale,
                   kvc::f16*) const noexcept {
    if (kvc::status bad = kvc::check_values(s, values); !bad) return bad;
    for (int32_t t = s.exempt; t < s.tokens; ++t) {
      float sum = 0;
      for (int32_t i = 0; i < s.dim; ++i) {
        const float v = values[t * s.dim + i];
        std::byte& eight = codes[(t * s.dim + i) / 8];
        eight = (eight & ~(std::byte{1} << i % 8)) | (std::byte{v < 0} << i % 8);
        sum += std::abs(v);
      }
      scale[t] = kvc::to_f16(sum / float(s.dim));
    }
    return {};
  }
  void unpack(const kvc::cell_shape& s, const std::byte* codes, const kvc::f16* scale, const kvc::f16*,
              float* values) const noexcept {
    for (int32_t i = 0; i < s.tokens * s.dim; ++i) {
      const bool negative = (codes[i / 8] >> i % 8 & std::byte{1}) != std::byte{0};
      values[i] = (negative ? -1.0f : 1.0f) * kvc::to_float(scale[i / s.dim]);
    }
  }
};
static_assert(kvc::cell_codec<signs>);
// [own_codec]

void show_own_codec() {
  const kvc::cell_shape s{.keys = false, .tokens = 2, .dim = 8};
  const std::array<float, 16> values = {1, -1, 1, 1, -1, 1, 1, -1, 2, 4, 2, 4, -2, -4, -2, -4};
  std::array<std::byte, 2> codes{};
  std::array<kvc::f16, 2> scale{};
  std::array<float, 16> again{}, turned{};
  const signs own;
  expect(bool(own.pack(s, values.data(), codes.data(), scale.data(), nullptr)), "a codec of one's own packs");
  own.unpack(s, codes.data(), scale.data(), nullptr, again.data());
  expect(again[0] == 1 && again[1] == -1 && again[8] == 3 && again[15] == -3, "and reads signs and a mean");
  const kvc::rotated<signs> rotated{own, turned.data()};
  std::array<float, 16> around{};
  expect(bool(rotated.pack(s, values.data(), codes.data(), scale.data(), nullptr)), "it can be rotated");
  rotated.unpack(s, codes.data(), scale.data(), nullptr, around.data());
  expect(around[0] > 0 && around[15] < 0, "and reads back in the original directions");
}

}  // namespace

int main() {
  show_text();
  show_cell();
  show_rotation();
  show_own_codec();
  return wrong;
}
