// SPDX-License-Identifier: Apache-2.0
// What the programs for a GPU compute on the host: cases, bytes, operations, medians, tables; and that the
// comparison of twins notices differences.
#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <set>

#include "gpu/cases.hpp"
#include "gpu/report.hpp"
#include "gpu/statistics.hpp"
#include "gpu/twin_case.hpp"

namespace kvcache::gpu_check {
namespace {

const storage& named(const std::string& name) {
  for (const storage& s : storages()) {
    if (name == s.name) return s;
  }
  FAIL("no storage " << name);
  return storages()[0];
}

std::string key_of(const attend_case& c) {
  return std::string(c.stored.name) + " " + std::to_string(c.batch) + " " + std::to_string(c.tokens) + " " +
         std::to_string(c.group) + " " + std::to_string(c.block) + " " + std::to_string(c.dim);
}

}  // namespace

TEST_CASE("bytes of keys and values are counted exactly, scales included") {
  // 4 sequences of 64 tokens, 8 heads of 128 channels, K and V of 2 bytes.
  REQUIRE(kv_bytes({named("f16"), 4, 64, 1, 16, 128, 1}) == 4 * 64 * 8 * 128 * 2 * 2);
  REQUIRE(kv_bytes({named("bf16"), 1, 1024, 8, 64, 64, 1}) == 1024 * 8 * 64 * 2 * 2);
  // A scale of 2 bytes per token and head, for K and for V.
  REQUIRE(kv_bytes({named("e4m3"), 1, 64, 1, 32, 128, 1}) == 64 * 8 * 2 * (128 + 2));
  // K: scale and minimum per channel and block; V: per token and head.
  REQUIRE(kv_bytes({named("int8"), 1, 64, 1, 32, 128, 1}) ==
          2 * 8 * (32 * 128 + 128 * 4) + 64 * 8 * (128 + 4));
  REQUIRE(kv_bytes({named("int4"), 1, 64, 1, 32, 128, 1}) == 2 * 8 * (32 * 64 + 128 * 4) + 64 * 8 * (64 + 4));
  REQUIRE(kv_bytes({named("K8V4"), 1, 64, 1, 32, 128, 1}) ==
          2 * 8 * (32 * 128 + 128 * 4) + 64 * 8 * (64 + 4));
}

TEST_CASE("bytes of a case lie inside the layer that is described for it") {
  for (const attend_case& c : decode_cases(false)) {
    CAPTURE(key_of(c));
    const layer_or_reason d = describe_layer(c, 5, nullptr);
    if (!d.reason.empty()) {
      REQUIRE(c.block < 32);  // packed blocks are larger
      REQUIRE(c.stored.format != nullptr);
      continue;
    }
    REQUIRE(d.layer.block == c.block);
    REQUIRE(d.layer.blocks == 5);
    attend_case five = c;
    five.batch = 1;
    five.tokens = 5 * c.block;
    REQUIRE(kv_bytes(five) <= d.bytes);
    // What is more is the open block of packed formats and filling up to 64 bytes.
    REQUIRE(d.bytes - kv_bytes(five) <= 5 * 64 + int64_t{4} * c.block * c.dim * measured_kv_heads);
  }
}

TEST_CASE("operations are those of pairs that the mask leaves") {
  // 2 rows at the end of 3 tokens see 2 and 3 keys.
  REQUIRE(attend_flops({named("f16"), 1, 3, 1, 16, 64, 2}) == 4.0 * 64 * 5 * measured_kv_heads);
  REQUIRE(attend_flops({named("f16"), 2, 512, 4, 16, 128, 512}) ==
          4.0 * 128 * (512.0 * 513 / 2) * measured_kv_heads * 4 * 2);
}

TEST_CASE("the short list has every value of every axis, no case twice, the points first") {
  const std::vector<attend_case> all = decode_cases(false);
  std::set<std::string> keys, formats;
  std::set<int32_t> batch, tokens, group, block, dim;
  for (const attend_case& c : all) {
    REQUIRE(keys.insert(key_of(c)).second);
    formats.insert(c.stored.name);
    batch.insert(c.batch);
    tokens.insert(c.tokens);
    group.insert(c.group);
    block.insert(c.block);
    dim.insert(c.dim);
  }
  REQUIRE(formats == std::set<std::string>{"f16", "bf16", "e4m3", "int8", "int4", "K8V4"});
  REQUIRE(batch == std::set<int32_t>{1, 4, 16, 64, 256});
  REQUIRE(tokens == std::set<int32_t>{1024, 4096, 16384, 65536, 131072});
  REQUIRE(group == std::set<int32_t>{1, 4, 8});
  REQUIRE(block == std::set<int32_t>{16, 32, 64});
  REQUIRE(dim == std::set<int32_t>{64, 128});
  REQUIRE(all.front().batch == 64);
  REQUIRE(all.front().tokens == 16384);
  std::set<std::string> full;
  for (const attend_case& c : decode_cases(true)) REQUIRE(full.insert(key_of(c)).second);
  REQUIRE(full.size() == 6 * 5 * 5 * 3 * 3 * 2);
  for (const std::string& k : keys) REQUIRE(full.count(k) == 1);
}

TEST_CASE("f16 and bf16 have a plan in every case") {
  std::vector<attend_case> all = decode_cases(true);
  for (const attend_case& c : prefill_cases()) all.push_back(c);
  for (const attend_case& c : all) {
    if (c.stored.format != nullptr) continue;
    CAPTURE(key_of(c), c.rows);
    const layer_or_reason d = describe_layer(c, static_cast<int32_t>(blocks_of(c)), nullptr);
    REQUIRE(d.reason.empty());
    REQUIRE(plan_case(c, d.layer, 132).reason.empty());
  }
}

TEST_CASE("a refused plan comes with the field") {
  attend_case c{named("f16"), 1, 64, 4, 16, 128, 1};
  kvc_kv layer = describe_layer(c, 4, nullptr).layer;
  layer.hadamard = KVC_HADAMARD_K;
  REQUIRE_THAT(plan_case(c, layer, 132).reason, Catch::Contains("hadamard"));
  c.stored.format = "int4";
  REQUIRE_THAT(describe_layer(c, 4, nullptr).reason, Catch::Contains("block_size"));
}

TEST_CASE("medians, lowest and highest") {
  REQUIRE(spread_of({}).median == 0);
  REQUIRE(spread_of({3, 1, 2}).median == 2);
  REQUIRE(spread_of({4, 1, 2, 3}).median == 2.5);
  REQUIRE(spread_of({3, 1, 2}).low == 1);
  REQUIRE(spread_of({3, 1, 2}).high == 3);
  REQUIRE(gb_per_second(4e9, 1e6) == 4);
  REQUIRE(gb_per_second(4e9, 0) == 0);
}

TEST_CASE("numbers are written short and never with an exponent where they are large") {
  REQUIRE(number_text(0, 4) == "0");
  REQUIRE(number_text(131072, 4) == "131072");
  REQUIRE(number_text(1234.567, 4) == "1235");
  REQUIRE(number_text(12.34567, 4) == "12.35");
  REQUIRE(number_text(0.912345, 4) == "0.9123");
  REQUIRE(number_text(-0.5, 4) == "-0.5");
  REQUIRE(number_text(NAN, 4) == "nan");
  REQUIRE(number_text(HUGE_VAL, 4) == "inf");
}

TEST_CASE("a row without figures is in both reports with its reason") {
  const std::vector<row> rows{{"Decode", {{"format", "f16"}, {"us", 1.5}}, {}},
                              {"Decode", {{"format", "int4"}, {"batch", 1}}, "refused by plan (k, 8)"},
                              {"Decode", {{"format", "int4"}, {"batch", 2}}, "refused by plan (k, 8)"},
                              {"Moves", {{"what", "a|b"}, {"GB/s", NAN}}, {}}};
  const std::vector<field> common{{"card", "a \"card\"\n"}, {"date", "2026-01-02"}};
  REQUIRE(
      json_of(common, rows) ==
      "[\n {\"table\": \"Decode\", \"format\": \"f16\", \"us\": 1.50000, "
      "\"card\": \"a \\\"card\\\"\\u000a\", \"date\": \"2026-01-02\"},\n"
      " {\"table\": \"Decode\", \"format\": \"int4\", \"batch\": 1, \"refused\": \"refused by plan (k, 8)\", "
      "\"card\": \"a \\\"card\\\"\\u000a\", \"date\": \"2026-01-02\"},\n"
      " {\"table\": \"Decode\", \"format\": \"int4\", \"batch\": 2, \"refused\": \"refused by plan (k, 8)\", "
      "\"card\": \"a \\\"card\\\"\\u000a\", \"date\": \"2026-01-02\"},\n"
      " {\"table\": \"Moves\", \"what\": \"a|b\", \"GB/s\": null, "
      "\"card\": \"a \\\"card\\\"\\u000a\", \"date\": \"2026-01-02\"}\n]\n");
  REQUIRE(markdown_of({{"card", "X"}, {"date", "2026-01-02"}}, rows) ==
          "card X · date 2026-01-02\n"
          "\n### Decode\n\n| format | us |\n| --- | --- |\n| f16 | 1.500 |\n"
          "\nWithout figures:\n\n- int4: refused by plan (k, 8) (2 rows)\n"
          "\n### Moves\n\n| what | GB/s |\n| --- | --- |\n| a\\|b | nan |\n");
}

TEST_CASE("targets are judged by rows of 2 GB or more") {
  const auto decode = [](const char* format, double mb, double part) {
    return row{"Decode", {{"format", format}, {"KV MB", mb}, {"of ceiling", part}}, {}};
  };
  const std::vector<row> out = targets_of({decode("f16", 2000, 0.95),
                                           decode("f16", 1999, 0.1),
                                           decode("f16", 4000, 0.89),
                                           decode("f16", 5000, 0.91),
                                           decode("int8", 3000, 0.8),
                                           decode("int4", 3000, 0.6),
                                           decode("e4m3", 10, 0.6),
                                           {"Decode", {{"format", "K8V4"}}, "refused"},
                                           {"Prefill", {{"format", "bf16"}}, {}}});
  REQUIRE(markdown_of({}, out) ==
          "\n### Decode of 2 GB or more\n\n"
          "| format | rows | of ceiling, lowest | median | aim | reached |\n"
          "| --- | --- | --- | --- | --- | --- |\n"
          "| f16 | 3 | 0.89 | 0.91 | 0.9 | by half |\n"
          "| int8 | 1 | 0.8 | 0.8 | 0.8 | yes |\n"
          "| int4 | 1 | 0.6 | 0.6 | 0.7 | no |\n"
          "\nWithout figures:\n\n- e4m3: no such row (1 row)\n");
}

TEST_CASE("twins agree with themselves, and a difference in any word of any case is noticed") {
  const std::vector<twin_side> all = twins_on_machine();
  REQUIRE(all.size() > 20);
  std::set<std::string> names;
  for (const twin_side& side : all) {
    const twin_case& c = *side.about;
    CAPTURE(c.name);
    REQUIRE(names.insert(c.name).second);
    const std::vector<uint32_t> in = twin_inputs(c, 3);
    const size_t words = size_t{c.warps} * 32 * c.out_words;
    std::vector<uint32_t> out(words + 64, 0xdeadbeefu);
    REQUIRE(side.run(in, out).empty());
    // A lane writes its words and no others.
    REQUIRE(std::count(out.begin(), out.begin() + int64_t(words), 0xdeadbeefu) == 0);
    REQUIRE(std::count(out.begin() + int64_t(words), out.end(), 0xdeadbeefu) == 64);
    out.resize(words);
    const twin_result same = compare_twins(c, in, out, out);
    REQUIRE(same.ok());
    REQUIRE(same.words > 0);
    const uint32_t compared = c.same == rule::scaled ? c.out_words / 2 : c.out_words;
    for (uint32_t k = 0; k < compared; ++k) {
      // A word that is always the same says nothing, unless it is where a copy has to give zeros.
      std::set<uint32_t> values;
      for (size_t l = 0; l < size_t{c.warps} * 32; ++l) values.insert(out[l * c.out_words + k]);
      const bool zeros = std::string(c.name) == "cp.async" && k >= 4 && k < 8;
      REQUIRE((zeros ? values == std::set<uint32_t>{0} : values.size() > 1));
    }
    std::vector<uint32_t> other = out;
    const size_t at = (size_t{c.warps} * 32 - 1) * c.out_words + compared - 1;
    // A word far from the right one, in its last lane.
    other[at] = c.same == rule::bits ? other[at] ^ 1u : (other[at] & 0xffff0000u) ^ 0x40003c00u;
    const twin_result found = compare_twins(c, in, other, out);
    REQUIRE(found.differing == 1);
    REQUIRE_THAT(found.first, Catch::Contains("lane 31"));
  }
}

TEST_CASE("inputs are the same for the same seed, and special values are among them") {
  const twin_case c{.name = "x", .in = {word::near_f16, word::floats, word::lane}, .warps = 8192};
  REQUIRE(twin_inputs(c, 1) == twin_inputs(c, 1));
  REQUIRE(twin_inputs(c, 1) != twin_inputs(c, 2));
  const std::vector<uint32_t> in = twin_inputs(c, 1);
  bool nan = false, infinite = false, subnormal = false, zero = false;
  std::set<uint32_t> near;
  for (size_t i = 0; i < in.size(); i += 3) {
    near.insert(in[i]);
    const float v = std::bit_cast<float>(in[i + 1]);
    nan = nan || std::isnan(v);
    infinite = infinite || std::isinf(v);
    subnormal = subnormal || std::fpclassify(v) == FP_SUBNORMAL;
    zero = zero || v == 0;
    REQUIRE(in[i + 2] < 32);
  }
  REQUIRE((nan && infinite && subnormal && zero));
  REQUIRE(near.size() > 4 * 63000);
}

TEST_CASE("floats are compared by what their case allows") {
  twin_case c{.name = "x", .in = {word::any}, .same = rule::f32, .warps = 1};
  const std::vector<uint32_t> in(32);
  const auto differ = [&](float a, float b) {
    std::vector<uint32_t> x(32, std::bit_cast<uint32_t>(a)), y(32, std::bit_cast<uint32_t>(b));
    return compare_twins(c, in, x, y).differing;
  };
  REQUIRE(differ(NAN, -NAN) == 0);
  REQUIRE(differ(NAN, 1) == 32);
  REQUIRE(differ(1, std::nextafter(1.0f, 2.0f)) == 32);
  REQUIRE(differ(0.0f, -0.0f) == 32);
  c.ulps = 2;
  REQUIRE(differ(1, std::nextafter(1.0f, 2.0f)) == 0);
  REQUIRE(differ(1, 1 + 0x1.8p-22f) == 32);
  REQUIRE(differ(0x1p-149f, -0x1p-149f) == 0);
  REQUIRE(differ(INFINITY, -INFINITY) == 32);
  c.absolute = 0x1p-10;
  REQUIRE(differ(0, 0x1p-11f) == 0);
  REQUIRE(differ(0, 0x1p-9f) == 32);
}

}  // namespace kvcache::gpu_check
