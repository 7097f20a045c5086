// SPDX-License-Identifier: Apache-2.0
// What the formulas of sizes say, against counting: bytes that packing writes, scales that groups need.
#include <catch2/catch.hpp>
#include <random>

#include "kvcache/quant/parse.hpp"
#include "kvcache/quant/sizes.hpp"
#include "quant/reference.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

side_format random_side(std::mt19937& random) {
  const int32_t groups[] = {0, 8, 32, 64};
  const bool packed = random() % 8 != 0;
  return {.codes = packed ? packed_codes[random() % 8] : code::exact,
          .axis = all_axes[random() % 4],
          .group_size = groups[random() % 4],
          .symmetric = random() % 2 == 0};
}

/// Bits of one side of `blocks` sealed blocks and its exempt tokens, counted value by value.
double counted_bits(const side_format& f, const group_shape& s, int32_t block, bool keys, int64_t blocks,
                    int32_t exempt) {
  const int32_t dim = keys ? s.head_dim_k : s.head_dim_v;
  if (f.codes == code::exact) return 16.0 * dim * block * s.kv_heads * static_cast<double>(blocks);
  const int32_t rows = keys ? dim : block, columns = keys ? block : dim;
  const double codes = double(rows) * ((columns + 31) / 32 * 32) * code_bits(f.codes) * s.kv_heads;
  double groups = static_cast<double>(groups_of(f, {keys, block, dim, 0}).size());
  if (f.axis != scale_axis::tensor) groups *= s.kv_heads;
  const double scales = groups * (has_minimum(f) ? 32 : 16);
  return (codes + scales) * static_cast<double>(blocks) + 16.0 * exempt * dim * s.kv_heads;
}

}  // namespace

TEST_CASE("bits per value are those of codes, scales, minima and exempt tokens, counted one by one") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("sizes", 101)));
  int done = 0;
  while (done < 300) {
    const int32_t dims[] = {8, 64, 80, 96, 128}, exempts[] = {0, 1, 2, 4}, block = 32 << random() % 3;
    const group_shape s{2, 1 + static_cast<int32_t>(random() % 4), dims[random() % 5], dims[random() % 5]};
    const kv_format f{
        .k = random_side(random), .v = random_side(random), .residual = 0, .exempt = exempts[random() % 4]};
    if (!validate(f, s, block)) continue;
    ++done;
    const int64_t tokens = 1 + random() % 2000, blocks = tokens / block;
    const double counted =
        counted_bits(f.k, s, block, true, blocks, f.k.codes == code::exact ? 0 : f.exempt) +
        counted_bits(f.v, s, block, false, blocks, f.v.codes == code::exact ? 0 : f.exempt);
    const double values = static_cast<double>(blocks) * block * s.kv_heads * (s.head_dim_k + s.head_dim_v);
    CHECK(bits_per_value(f, s, block, tokens) == Approx(blocks == 0 ? 0 : counted / values).epsilon(1e-12));
  }
}

TEST_CASE("packing writes every byte of a side but the gaps it has none of, and nothing beyond") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("written", 103)));
  for (int round = 0; round < 200; ++round) {
    const int32_t dims[] = {8, 64, 80}, block = 32 << random() % 2, dim = dims[random() % 3];
    const side_format f = random_side(random);
    const group_shape s{1, 1 + static_cast<int32_t>(random() % 3), dim, dim};
    const bool keys = random() % 2 == 0;
    if (f.codes == code::exact || !validate(kv_format{.k = f, .v = f}, s, block)) continue;
    INFO(told(f, {keys, block, dim, 0}) << " heads " << s.kv_heads);
    std::vector<float> values(static_cast<size_t>(s.kv_heads) * block * dim, 1.0f);
    for (float& v : values) v = static_cast<float>(random() % 1000) - 500.0f;
    const auto bytes = static_cast<size_t>(layout_of(f, s, block, keys).bytes);
    std::vector<std::byte> a(bytes + 64, std::byte{0x55}), b(bytes + 64, std::byte{0xaa});
    REQUIRE(pack_cells(f, s, block, keys, 0, values.data(), a.data()));
    REQUIRE(pack_cells(f, s, block, keys, 0, values.data(), b.data()));
    size_t written = 0;
    for (size_t i = 0; i < bytes; ++i) written += a[i] == b[i];
    CHECK(written == bytes);
    CHECK(std::vector<std::byte>(a.begin() + static_cast<int64_t>(bytes), a.end()) ==
          std::vector<std::byte>(64, std::byte{0x55}));
  }
}

TEST_CASE("the presets cost what their page says, at 1,024 tokens, blocks of 64 and heads of 64") {
  const group_shape s{30, 3, 64, 64};
  const auto bits = [&](const char* text) {
    const parsed_format p = parse_format(text);
    REQUIRE(p.ok());
    REQUIRE(validate(p.value, s, 64));
    return bits_per_value(p.value, s, 64, 1024);
  };
  CHECK(bits("kv8") == 8.390625);
  CHECK(bits("kv6") == 6.515625);
  CHECK(bits("kv5") == 5.015625);
  CHECK(bits("kv4") == 4.515625);
  CHECK(bits("kv3") == 3.515625);
  CHECK(bits("kv2") == 2.515625);
  CHECK(bits("fp8") == 8.265625);
  CHECK(bits("f16") == 16);
  CHECK(bits("int4:group=32") == 5);
  CHECK(bits("k4v2") == 3.5);
  CHECK(bits("int8:k=tensor,v=tensor") == Approx(8 + 32.0 / (3 * 64 * 64)).epsilon(1e-12));
}

TEST_CASE("with open blocks, a sequence holds what its blocks are allocated") {
  const group_shape s{1, 3, 64, 64};
  const kv_format f = find_preset("kv4")->format;
  const double token = 16.0 * 3 * 128;  // bits of a token at full precision
  for (int64_t tokens = 1; tokens <= 400; ++tokens) {
    const int64_t sealed = tokens / 64, open = tokens % 64 != 0 ? 1 : 0;
    const double all = static_cast<double>(sealed) * 8.0 * static_cast<double>(layer_block_bytes(f, s, 64)) +
                       static_cast<double>(open) * 64 * token + token;
    REQUIRE(open_bits_per_value(f, s, 64, tokens) * 3 * 128 * static_cast<double>(tokens) == Approx(all));
  }
  kv_format late = f;
  late.residual = 32;
  CHECK(open_bits_per_value(late, s, 64, 95) > 1.5 * open_bits_per_value(late, s, 64, 96));
  CHECK(open_bits_per_value(kv_format{}, s, 64, 64) == 16);
}
