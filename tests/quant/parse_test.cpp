// SPDX-License-Identifier: Apache-2.0
// Formats as text: what is read, what is refused and how, and that printing and reading are inverse.
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <set>
#include <string>

#include "kvcache/quant/parse.hpp"
#include "kvcache/retain/parse.hpp"  // both may be included together
#include "quant/reference.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

std::string printed(const kv_format& f) {
  char out[256];
  const int32_t length = to_text(f, out);
  REQUIRE(length == static_cast<int32_t>(std::strlen(out)));
  return out;
}
kv_format read(const std::string& text) {
  const parsed_format p = parse_format(text);
  INFO(text << ": " << p.key << " = " << p.text << ", allowed: " << p.allowed);
  REQUIRE(p.ok());
  return p.value;
}
std::string again(const char* text) {
  return printed(read(text));
}

struct refusal {
  std::string key, text, allowed;
};
refusal refused(const char* text) {
  const parsed_format p = parse_format(text);
  INFO(text);
  REQUIRE_FALSE(p.ok());
  CHECK(std::strlen(p.allowed) < sizeof p.allowed - 1);  // not cut
  return {std::string(p.key), std::string(p.text), p.allowed};
}

side_format random_side(std::mt19937& random, bool exact_too) {
  side_format f{.hadamard = random() % 2 == 0};
  if (exact_too && random() % 8 == 0) return f;
  f.codes = packed_codes[random() % 8];
  f.axis = all_axes[random() % 4];
  f.group_size = static_cast<int32_t>(random() % 9) * 8;
  if (is_fp8(f.codes)) return f;
  f.symmetric = random() % 2 == 0;
  f.clip = static_cast<clip_search>(random() % 3);
  return f;
}

}  // namespace

TEST_CASE("a format's text gives its settings, and printing them gives text that reads as the same") {
  CHECK(read("f16") == kv_format{});
  CHECK(again("f16") == "f16");
  CHECK(again("int4") == "int4:k=channel,v=token");
  CHECK(again("int4:") == "int4:k=channel,v=token");
  CHECK(again("e5m2") == "e5m2:k=token,v=token");
  CHECK(again("int4:k=channel,v=token,group=32,residual=32,exempt=sinks") ==
        "int4:k=channel,v=token,group=32,residual=32,exempt=4");
  CHECK(again("k=int8,v=int4") == "k=int8/channel,v=int4/token");
  CHECK(read("k=int8,v=int4") == read("k8v4"));
  CHECK(read("v=int4,k=int8") == read("k8v4"));
  CHECK(again("k16v4") == "k=f16,v=int4/token");
  CHECK(read("v=int4") == read("k16v4"));
  CHECK(again("k=fp8/head,v=int2/channel,group=0/16,symmetric=v,clip=none/middle") ==
        "k=e4m3/head,v=int2/channel,group=0/16,symmetric=v,clip=none/middle");
  CHECK(again("f16:hadamard=both") == "f16:hadamard=both");
  CHECK(again("int8:k=tensor,v=head,symmetric=both,exempt=none") == "int8:k=tensor,v=head,symmetric=both");
  CHECK(again("kv4:rope=before") == again("kv4") + ",rope=before");
  CHECK(again("f16:rope=before,hadamard=k") == "f16:hadamard=k,rope=before");
  CHECK(again("kv4:dot=integer") == again("kv4") + ",dot=integer");
  CHECK(read("kv4:dot=float") == read("kv4"));
  CHECK(read("kv4:rope=after") == read("kv4"));
  CHECK(read("k5v6").k.codes == code::int5);
  CHECK(read("k5v6").v.codes == code::int6);
  CHECK(read("k3v2").k.axis == scale_axis::channel);
}

TEST_CASE("every format that a text can name comes back from its own text") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("formats", 107)));
  const int32_t exempt[] = {0, 1, 2, 4};
  std::set<std::string> texts;
  for (int i = 0; i < 3000; ++i) {
    const kv_format f{.k = random_side(random, true),
                      .v = random_side(random, true),
                      .residual = random() % 2 == 0 ? 0 : static_cast<int32_t>(random() % 300),
                      .exempt = exempt[random() % 4],
                      .k_before_rope = random() % 4 == 0,
                      .integer_dot = random() % 4 == 0};
    const std::string text = printed(f);
    INFO(text);
    REQUIRE(read(text) == f);
    texts.insert(text);
  }
  CHECK(texts.size() > 2500);
}

TEST_CASE("presets are read by name, and what follows overrides them") {
  for (const format_preset& p : format_presets) {
    CHECK(read(p.name) == p.format);
    CHECK(read(printed(p.format)) == p.format);
    const auto late = read(std::string(p.name) + ":residual=32");
    CHECK(late.residual == 32);
    CHECK(late.k == p.format.k);
    CHECK(validate(p.format, group_shape{1, 1, 128, 128}, 32));
    CHECK(validate(p.format, group_shape{1, 1, 64, 64}, 128));
    CHECK(p.format.exempt == 1);
  }
  CHECK(again("kv4") == "int4:k=channel,v=token,group=0/64,hadamard=both,exempt=1");
  CHECK(again("kv8") == "int8:k=channel,v=token,group=0/64,symmetric=v,hadamard=both,exempt=1");
  CHECK(again("kv6") == "k=int8/channel,v=int4/token,group=0/64,hadamard=both,exempt=1");
  CHECK(again("kv3:hadamard=none,exempt=none") == "int3:k=channel,v=token,group=0/64,clip=none/middle");
  CHECK(again("fp8") == "e4m3:k=token,v=token,exempt=1");
  CHECK(again("kv3:v=fp8") == "k=int3/channel,v=e4m3/token,group=0/64,hadamard=both,exempt=1");
  CHECK(again("kv2:k=f16") == "k=f16,v=int2/token,group=0/64,clip=none/two_sided,hadamard=both,exempt=1");
  CHECK(read("kv6").k.codes == code::int8);
  CHECK(find_preset("kv7") == nullptr);
}

TEST_CASE("wrong text names the key, what was found and what is allowed") {
  CHECK(refused("").key == "format");
  CHECK(refused("int7").text == "int7");
  CHECK(refused("int4 ").key == "format");
  CHECK(refused("kv").key == "format");
  CHECK(refused("k8v").key == "format");
  CHECK(refused("k8v7").key == "format");
  CHECK(refused("k8v4v2").key == "format");
  CHECK(refused("int4,k=channel").text == "int4,k=channel");
  const refusal unknown = refused("int4:size=32");
  CHECK(unknown.key == "size");
  CHECK(unknown.text == "32");
  CHECK(unknown.allowed == "k, v, group, symmetric, clip, hadamard, residual, exempt, rope, dot");
  CHECK(refused("int4:k=row").allowed.find("tensor|head|token|channel") != std::string::npos);
  CHECK(refused("int4:k=").key == "k");
  CHECK(refused("int4:v=int4/").key == "v");
  CHECK(refused("int4:v=/token").text == "/token");
  CHECK(refused("int4:v=token/int4").key == "v");
  CHECK(refused("int4:k=int8/channel/token").key == "k");
  CHECK(refused("int4:group=12").allowed == "a multiple of 8, 0 = all; or K's/V's");
  CHECK(refused("int4:group=-8").key == "group");
  CHECK(refused("int4:group=32/").text == "32/");
  CHECK(refused("int4:group=32/32/32").key == "group");
  CHECK(refused("int4:group=99999999999").key == "group");
  CHECK(refused("int4:symmetric=yes").allowed == "none|k|v|both");
  CHECK(refused("int4:hadamard=").key == "hadamard");
  CHECK(refused("int4:clip=both").allowed == "none|middle|two_sided; or K's/V's");
  CHECK(refused("int4:residual=-1").allowed == "a whole number from 0 on");
  CHECK(refused("int4:residual=1.5").text == "1.5");
  CHECK(refused("int4:exempt=3").allowed == "none, sinks (4 tokens), 0, 1, 2 or 4");
  CHECK(refused("int4:rope=no").allowed == "before|after");
  CHECK(refused("int4:exempt=sink").key == "exempt");
  CHECK(refused("int4:residual=3,residual=4").allowed == "once");
  CHECK(refused("k=int8,k=channel").allowed == "once");
  CHECK(refused("int4:residual=3,").key == "");
  CHECK(refused("int4:,residual=3").key == "");
  CHECK(refused("int4:k").text == "");
  CHECK(refused("fp8:symmetric=v").text == "e4m3");
  CHECK(refused("k=e5m2,v=int4,clip=middle").key == "clip");
  CHECK(refused("k=channel").key == "k");
  CHECK(refused("int4:v=f16/channel").allowed == "codes with a scale, as in int4/channel; f16 has none");
}

TEST_CASE("no text, however damaged, is read past its end or accepted by chance") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("hostile formats", 109)));
  const std::string good[] = {
      "k=int8/channel,v=e4m3/token,group=0/64,symmetric=k,clip=none,hadamard=both,residual=32,exempt=sinks",
      "kv4:residual=32,exempt=2,group=32,clip=middle/two_sided", "k8v4:hadamard=v"};
  const std::string letters = "abcdefghijklmnopqrstuvwxyz0123456789:=,/-_ |\n";
  int accepted = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string text = good[random() % 3];
    for (size_t k = random() % 4; k-- > 0;) text[random() % text.size()] = letters[random() % letters.size()];
    text.resize(random() % (text.size() + 1));
    const std::vector<char> alone(text.begin(), text.end());  // nothing behind it
    const parsed_format p = parse_format({alone.data(), alone.size()});
    if (!p.ok()) {
      REQUIRE(std::strlen(p.allowed) < sizeof p.allowed);
      continue;
    }
    ++accepted;
    INFO(text);
    REQUIRE(read(printed(p.value)) == p.value);
    for (const side_format& side : {p.value.k, p.value.v}) {
      REQUIRE((side.codes == code::exact || side.codes >= code::e4m3));
      REQUIRE(side.group_size % 8 == 0);
    }
  }
  CHECK(accepted > 100);
  CHECK_FALSE(parse_format(std::string(100000, 'k')).ok());
  CHECK_FALSE(parse_format(std::string(100000, '/')).ok());
  CHECK_FALSE(parse_format(std::string("int4\0", 5)).ok());
}

TEST_CASE("a format's text that does not fit is cut, ends with 0, and its length is told") {
  char small[8];
  CHECK(to_text(read("int4"), small) == 22);
  CHECK(std::string(small) == "int4:k=");
  CHECK(to_text(read("int4"), {}) == 22);
}
