// SPDX-License-Identifier: Apache-2.0
#include "kvcache/core/shape.hpp"

#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <vector>

using namespace kvcache;

namespace {

group_shape gqa() {
  return {.layers = 32, .kv_heads = 8, .head_dim_k = 128, .head_dim_v = 128};
}

int32_t stored(std::vector<int32_t> owners, int32_t layers) {
  return stored_layers({.layers = layers, .kv_heads = 1, .head_dim = 1, .layer_owner = owners});
}

void refuses(const group_shape& s, int32_t block_size, const char* field, int64_t value) {
  const status e = validate(s, block_size);
  INFO("expected field " << field << " = " << value << ", got " << e.field << " = " << e.value);
  CHECK(e.code == errc::bad_argument);
  CHECK(std::string(e.field) == field);
  CHECK(e.value == value);
}

}  // namespace

TEST_CASE("bytes per token follow from the heads: MHA, GQA, MQA, and an MLA latent that V aliases") {
  CHECK(bytes_per_token({.layers = 32, .kv_heads = 32, .head_dim_k = 128, .head_dim_v = 128}).count ==
        524288);
  CHECK(bytes_per_token(gqa()).count == 131072);
  CHECK(bytes_per_token({.layers = 32, .kv_heads = 1, .head_dim_k = 128, .head_dim_v = 128}).count == 16384);
  // 61 layers, latent 512 + 64 rope values, stored once.
  const group_shape mla{
      .layers = 61, .kv_heads = 1, .head_dim_k = 576, .head_dim_v = 512, .v_aliases_k = true};
  CHECK(bytes_per_token(mla).count == 61 * 576 * 2);
  CHECK(block_bytes(mla, 64).count == 61 * 576 * 2 * 64);
}

TEST_CASE("bytes per token scale with the element and take K and V heads of different length") {
  group_shape s = gqa();
  s.head_dim_v = 64;
  CHECK(bytes_per_token(s).count == 32 * 8 * (128 + 64) * 2);
  s.type = element::f32;
  CHECK(bytes_per_token(s).count == 32 * 8 * (128 + 64) * 4);
  s.type = element::bf16;
  CHECK(bytes_per_token(s).count == 32 * 8 * (128 + 64) * 2);
}

TEST_CASE(
    "a codec's own block size replaces the full precision one, and only lossy formats have open blocks") {
  const group_shape s = gqa();
  CHECK(block_bytes(s, 16).count == 131072 * 16);
  CHECK(block_bytes(s, 16, {.block = {1000}}).count == 1000);
  CHECK(open_block_bytes(s, 16, {.block = {1000}}).count == 0);
  CHECK(open_block_bytes(s, 16, {.block = {1000}, .lossy = true}).count == 131072 * 16);
  CHECK(open_block_bytes(s, 16, {.open_block = {70}, .lossy = true}).count == 70);
}

TEST_CASE("the map of layer owners says how many layers store") {
  CHECK(stored_layers({.layers = 12}) == 12);
  CHECK(stored({0, 1, 2, 3}, 4) == 4);
  CHECK(stored({0, 0, 2, 2}, 4) == 2);
  CHECK(stored({0, 0, 0, 0}, 4) == 1);
  CHECK(stored({0, 1, 0, 1, 1}, 5) == 2);
}

TEST_CASE("a malformed map of layer owners is refused") {
  CHECK(stored({0, 1, 2}, 4) == -1);     // too short
  CHECK(stored({0, 1, 2, 3}, 3) == -1);  // too long
  CHECK(stored({1, 1}, 2) == -1);        // the owner comes later
  CHECK(stored({0, 0, 1}, 3) == -1);     // borrows from a borrower
  CHECK(stored({-1}, 1) == -1);
  CHECK(stored({0, 7}, 2) == -1);
  CHECK(stored({0, INT32_MIN}, 2) == -1);
}

TEST_CASE("the group of a uniform model counts stored layers and fills in the V dimension") {
  const std::vector<int32_t> owners{0, 0, 2, 2};
  model_shape m{.layers = 4, .q_heads = 16, .kv_heads = 4, .head_dim = 80, .layer_owner = owners};
  CHECK(group_of(m) == group_shape{.layers = 2, .kv_heads = 4, .head_dim_k = 80, .head_dim_v = 80});
  m.head_dim_v = 48;
  m.type = element::f32;
  m.v_aliases_k = true;
  CHECK(group_of(m) == group_shape{.layers = 2,
                                   .kv_heads = 4,
                                   .head_dim_k = 80,
                                   .head_dim_v = 48,
                                   .type = element::f32,
                                   .v_aliases_k = true});
}

TEST_CASE("every bad number of a shape is refused by its own name") {
  const group_shape good = gqa();
  CHECK(validate(good, 16));
  CHECK(validate(good, 1));
  group_shape s = good;
  for (const int32_t n : {0, -1, INT32_MIN, (1 << 20) + 1, INT32_MAX}) {
    refuses((s = good, s.layers = n, s), 16, "layers", n);
    refuses((s = good, s.kv_heads = n, s), 16, "kv_heads", n);
    refuses((s = good, s.head_dim_k = n, s), 16, "head_dim_k", n);
    refuses((s = good, s.head_dim_v = n, s), 16, "head_dim_v", n);
  }
  for (const int32_t n : {0, -16, 3, 24, INT32_MIN, INT32_MAX, 1 << 17}) refuses(good, n, "block_size", n);
  refuses((s = good, s.window = -1, s), 16, "window", -1);
  refuses((s = good, s.type = static_cast<element>(3), s), 16, "type", 3);
  refuses((s = good, s.v_aliases_k = true, s.head_dim_v = 129, s), 16, "head_dim_v", 129);
}

TEST_CASE("a block whose values a 32-bit stride cannot span is refused (C11)") {
  group_shape s = gqa();
  s.kv_heads = 1 << 10;
  s.head_dim_k = s.head_dim_v = 1 << 10;  // 2^21 values a token
  CHECK(validate(s, 512));                // 2^30
  refuses(s, 1024, "kv_heads", 1 << 10);  // 2^31
  s.kv_heads = s.head_dim_k = s.head_dim_v = 1 << 20;
  CHECK_FALSE(validate(s, 1 << 16));
  s.layers = 1 << 20;
  CHECK_FALSE(validate(s, 1 << 16));
}

TEST_CASE("the layout fingerprint differs for every field that changes what a block holds") {
  const group_shape base = gqa();
  const block_format plain{};
  std::set<uint64_t> seen{layout_fingerprint(base, 16, plain)};
  group_shape s = base;
  block_format f = plain;
  const auto differs = [&](const group_shape& shape, int32_t block_size, const block_format& format) {
    CHECK(seen.insert(layout_fingerprint(shape, block_size, format)).second);
  };
  differs((s = base, s.layers = 31, s), 16, plain);
  differs((s = base, s.kv_heads = 4, s), 16, plain);
  differs((s = base, s.head_dim_k = 64, s), 16, plain);
  differs((s = base, s.head_dim_v = 64, s), 16, plain);
  differs((s = base, s.type = element::bf16, s), 16, plain);
  differs((s = base, s.type = element::f32, s), 16, plain);
  differs((s = base, s.v_aliases_k = true, s), 16, plain);
  differs((s = base, s.window = 4096, s), 16, plain);
  differs(base, 32, plain);
  differs(base, 16, (f = plain, f.block = {4096}, f));
  differs(base, 16, (f = plain, f.residual = 32, f));
  differs(base, 16, (f = plain, f.lossy = true, f));
  differs(base, 16, (f = plain, f.lossy = true, f.deferred = true, f));
  differs(base, 16, (f = plain, f.lossy = true, f.exempt = 1, f));
  differs(base, 16, (f = plain, f.fingerprint = 1, f));
  differs(base, 16, (f = plain, f.fingerprint = uint64_t{1} << 32, f));
  CHECK(layout_fingerprint(base, 16, plain) == layout_fingerprint(gqa(), 16, {}));
}
