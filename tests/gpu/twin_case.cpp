// SPDX-License-Identifier: Apache-2.0
#include "gpu/twin_case.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>

#include "kvcache/core/numeric.hpp"

namespace kvcache::gpu_check {
namespace {

using generator = std::mt19937;

uint32_t bits_of(float v) {
  return std::bit_cast<uint32_t>(v);
}
float float_of(uint32_t u) {
  return std::bit_cast<float>(u);
}
float from_16(uint16_t v, bool bf) {
  return bf ? to_float(bf16{v}) : to_float(f16{v});
}
uint16_t to_16(float v, bool bf) {
  return bf ? to_bf16(v).bits : to_f16(v).bits;
}

/// The quiet one of a signalling NaN, which host and device treat differently, and nobody makes.
uint32_t quiet(uint32_t u) {
  return std::isnan(float_of(u)) ? u | 0x400000u : u;
}

float special(generator& random) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  constexpr float values[] = {0.0f,        -0.0f,     1.0f,        -1.0f,      inf,
                              -inf,        0x1p-149f, -0x1p-149f,  0x1p-126f,  0x1.fffffcp-127f,
                              0x1.8p-130f, 65504.0f,  65520.0f,    65519.0f,   0x1.fffffep127f,
                              0x1p-24f,    0x1p-25f,  0x1.8p-25f,  2.0f,       0.5f,
                              0x1.ffcp15f, -127.0f,   0x1.ffep15f, 0x1.8p-14f, NAN};
  return values[random() % std::size(values)];
}

/// A value of 16 bits by its number, the middle between it and the next one, and both floats beside that.
uint32_t near_16(uint32_t index, bool bf) {
  const auto number = static_cast<uint16_t>(index);
  const uint32_t variant = index >> 16 & 3u;
  const float a = from_16(number, bf), b = from_16(static_cast<uint16_t>(number + 1), bf);
  if (variant == 0 || !std::isfinite(a) || !std::isfinite(b)) return bits_of(a);
  const uint32_t middle = bits_of(static_cast<float>((double{a} + double{b}) / 2));
  return middle + variant - 2;
}

template <class Make>
uint32_t pair_of(bool bf, Make&& make) {
  const uint32_t low = to_16(make(), bf), high = to_16(make(), bf);
  return low | high << 16;
}

float usual(generator& random, bool bf) {
  if (random() % 16 == 0) return 0.0f;
  if (random() % 16 == 0) return from_16(static_cast<uint16_t>(random() % (bf ? 0x7f : 0x3ff)), bf);
  const float size = std::ldexp(1.0f + static_cast<float>(random() % 4096) / 4096, int(random() % 12) - 6);
  return random() % 2 == 0 ? size : -size;
}

float whole(generator& random) {
  return static_cast<float>(int(random() % 17) - 8);
}

uint32_t tiny_pair(generator& random, bool bf) {
  const auto one = [&] { return uint32_t(random() % (bf ? 0x80 : 0x400)) | (random() % 2 << 15); };
  const uint32_t low = one(), high = one();
  return low | high << 16;
}

uint32_t make_word(word kind, uint32_t index, generator& random) {
  std::uniform_real_distribution<float> unit(-1.0f, 1.0f), exponent(-160.0f, 140.0f);
  std::normal_distribution<float> normal;
  switch (kind) {
    case word::none:
      return 0;
    case word::any:
      return static_cast<uint32_t>(random());
    case word::counter:
      return index;
    case word::lane:
      return random() % 32;
    case word::floats:
      return quiet(random() % 4 == 0 ? bits_of(special(random)) : static_cast<uint32_t>(random()));
    case word::unit:
      return bits_of(random() % 4 == 0 ? static_cast<float>(int(random() % 17) - 8) / 8 : unit(random));
    case word::exponent:
      return bits_of(random() % 16 == 0 ? special(random) : exponent(random));
    case word::near_f16:
    case word::near_bf16:
      return near_16(index, kind == word::near_bf16);
    case word::normal:
      return bits_of(normal(random));
    case word::f16_pair:
      return pair_of(false, [&] { return usual(random, false); });
    case word::bf16_pair:
      return pair_of(true, [&] { return usual(random, true); });
    case word::f16_ints:
      return pair_of(false, [&] { return whole(random); });
    case word::bf16_ints:
      return pair_of(true, [&] { return whole(random); });
    case word::float_ints:
      return bits_of(whole(random) * 100);
    case word::f16_tiny:
      return tiny_pair(random, false);
    case word::bf16_tiny:
      return tiny_pair(random, true);
  }
  return 0;
}

/// Floats as numbers that count from one to the next; both zeros are 0.
int64_t ordered(uint32_t u) {
  const auto size = static_cast<int64_t>(u & 0x7fffffffu);
  return u >> 31 != 0 ? -size : size;
}

bool same_16(uint16_t a, uint16_t b, bool bf) {
  return a == b || (std::isnan(from_16(a, bf)) && std::isnan(from_16(b, bf)));
}
bool same_pair(uint32_t a, uint32_t b, bool bf) {
  return same_16(static_cast<uint16_t>(a), static_cast<uint16_t>(b), bf) &&
         same_16(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16), bf);
}

bool same_float(const twin_case& c, uint32_t a, uint32_t b, double& worst) {
  const float x = float_of(a), y = float_of(b);
  if (a == b || (std::isnan(x) && std::isnan(y))) return true;
  if (std::isnan(x) || std::isnan(y)) return false;
  if (c.absolute > 0 && std::fabs(double{x} - double{y}) <= c.absolute) return true;
  const auto ulps = static_cast<double>(std::abs(ordered(a) - ordered(b)));
  worst = std::max(worst, ulps);
  return c.ulps > 0 && ulps <= c.ulps;
}

bool same_scaled(const twin_case& c, uint32_t a, uint32_t b, uint32_t size) {
  const float x = float_of(a), y = float_of(b);
  if (x == y || (std::isnan(x) && std::isnan(y))) return true;
  // The smallest allowance: sums of subnormal products may lose bits below the last one.
  return std::fabs(double{x} - double{y}) <= c.relative * double{float_of(size)} + 0x1p-145;
}

}  // namespace

std::vector<uint32_t> twin_inputs(const twin_case& c, uint32_t seed) {
  generator random(seed);
  const uint32_t words = in_words_of(c), lanes = c.warps * 32;
  std::vector<uint32_t> in;
  in.reserve(size_t{lanes} * words);
  for (uint32_t i = 0; i < lanes; ++i) {
    for (uint32_t k = 0; k < words; ++k) in.push_back(make_word(c.in[k], i, random));
  }
  return in;
}

twin_result compare_twins(const twin_case& c, const std::vector<uint32_t>& in,
                          const std::vector<uint32_t>& device, const std::vector<uint32_t>& machine) {
  twin_result r;
  const size_t lanes = size_t{c.warps} * 32, words = in_words_of(c);
  if (device.size() != machine.size() || device.size() != lanes * c.out_words) {
    return {device.size(), device.size() + 1, 0, "the sides answered different numbers of words"};
  }
  const uint32_t compared = c.same == rule::scaled ? c.out_words / 2 : c.out_words;
  for (size_t l = 0; l < lanes; ++l) {
    for (uint32_t k = 0; k < compared; ++k) {
      const size_t at = l * c.out_words + k;
      const uint32_t a = device[at], b = machine[at];
      ++r.words;
      const bool same = c.same == rule::bits     ? a == b
                        : c.same == rule::f32    ? same_float(c, a, b, r.worst_ulps)
                        : c.same == rule::f16x2  ? same_pair(a, b, false)
                        : c.same == rule::bf16x2 ? same_pair(a, b, true)
                                                 : same_scaled(c, a, b, machine[at + compared]);
      if (same || r.differing++ != 0) continue;
      char text[400];
      int n = std::snprintf(text, sizeof text, "warp %zu lane %zu word %u: GPU %08x (%g), twin %08x (%g); in",
                            l / 32, l % 32, k, a, double{float_of(a)}, b, double{float_of(b)});
      for (size_t i = 0; i < words && n < int(sizeof text) - 12; ++i) {
        n += std::snprintf(text + n, sizeof text - size_t(n), " %08x", in[l * words + i]);
      }
      r.first = text;
    }
  }
  return r;
}

int run_twins(const std::vector<twin_side>& device, const std::vector<twin_side>& machine, uint32_t seed) {
  int failed = device.size() == machine.size() && !device.empty() ? 0 : 1;
  for (size_t i = 0; i < std::min(device.size(), machine.size()); ++i) {
    const twin_case& c = *machine[i].about;
    const std::vector<uint32_t> in = twin_inputs(c, seed);
    std::vector<uint32_t> a(size_t{c.warps} * 32 * c.out_words, 0xdeadbeefu), b(a.size(), 0xfeedfaceu);
    const std::string wrong_a = device[i].run(in, a), wrong_b = machine[i].run(in, b);
    if (wrong_a == not_there) {
      std::printf("%-30s %s\n", c.name, not_there);
      continue;
    }
    const twin_result r = compare_twins(c, in, a, b);
    const bool ok = wrong_a.empty() && wrong_b.empty() && r.ok();
    std::printf("%-30s %-6s %9zu words", c.name, ok ? "same" : "DIFFER", r.words);
    if (c.same == rule::f32) std::printf(", at most %g ulp apart", r.worst_ulps);
    std::printf("\n");
    if (!wrong_a.empty()) std::printf("  on the GPU: %s\n", wrong_a.c_str());
    if (!wrong_b.empty()) std::printf("  the twin: %s\n", wrong_b.c_str());
    if (r.differing != 0) std::printf("  %zu differ; %s\n", r.differing, r.first.c_str());
    std::fflush(stdout);
    failed += ok ? 0 : 1;
  }
  return failed;
}

}  // namespace kvcache::gpu_check
