// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <numeric>

#include "world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// Rotation of one row in double.
std::vector<double> turned(const float* x, int32_t dim, const kvc_rope& r, double position) {
  std::vector<double> y(x, x + dim);
  for (int32_t i = 0; i < r.dims / 2; ++i) {
    const double f = r.frequency != nullptr ? r.frequency[i] : std::pow(r.theta, -2.0 * i / r.dims);
    const double c = std::cos(position * f), s = std::sin(position * f);
    const int32_t a = r.style == KVC_ROPE_INTERLEAVED ? 2 * i : i;
    const int32_t b = r.style == KVC_ROPE_INTERLEAVED ? 2 * i + 1 : i + r.dims / 2;
    y[size_t(a)] = x[a] * c - x[b] * s;
    y[size_t(b)] = x[a] * s + x[b] * c;
  }
  return y;
}

float read_plane(const kvc_plane& p, int64_t block, int64_t head, int64_t slot, int64_t d) {
  const auto* at = static_cast<const std::byte*>(p.data) + block * p.block_stride + head * p.head_stride +
                   slot * p.token_stride + d * p.dim_stride;
  float x = 0;
  uint16_t h = 0;
  if (p.type == KVC_F32) return std::memcpy(&x, at, 4), x;
  std::memcpy(&h, at, 2);
  return p.type == KVC_F16 ? to_float(f16{h}) : to_float(bf16{h});
}

std::vector<double> llama_like_frequencies(int32_t dims) {
  std::vector<double> f;
  for (int32_t i = 0; i < dims / 2; ++i) {
    const double plain = std::pow(5e5, -2.0 * i / dims);
    f.push_back(i > dims / 4 ? plain / 8 : plain);
  }
  return f;
}

}  // namespace

TEST_CASE("append stores rounded rows where the slots say and nothing else", "[append]") {
  for (const element type : {element::f32, element::f16, element::bf16}) {
    for (const k_order order : {k_order::transposed, k_order::row_major}) {
      world w({.heads = 2, .dim_k = 64, .dim_v = 72, .block = 8, .type = type, .order = order}, {20}, 3);
      w.append_range(0, 3, 11);
      for (int32_t j = 0; j < 20; ++j) {
        for (int32_t h = 0; h < 2; ++h) {
          const int64_t s = w.slot(0, j);
          const bool written = j >= 3 && j < 11;
          for (int32_t d = 0; d < 64; ++d) {
            const float x = read_plane(w.kv().k, s / 8, h, s % 8, d);
            REQUIRE((written ? x == w.key(0, j, h, d) : std::isnan(x)));
          }
          for (int32_t d = 0; d < 72; ++d) {
            const float x = read_plane(w.kv().v, s / 8, h, s % 8, d);
            REQUIRE((written ? x == w.val(0, j, h, d) : std::isnan(x)));
          }
        }
      }
    }
  }
}

TEST_CASE("a slot of -1 skips the row, and heads may go to slots of their own", "[append]") {
  world w({.heads = 2, .block = 8}, {16}, 5);
  const int64_t first = w.slot(0, 0), second = w.slot(0, 9);
  const int64_t slots[] = {first, second, -1, first + 1};  // [row][head]
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = 2;
  a.k = dense_rows(w.keys[0].data(), element::f32, 2, 64);
  a.v = dense_rows(w.values[0].data(), element::f32, 2, 64);
  a.slot = slots;
  a.slot_head_stride = 1;
  kvc_error e{};
  REQUIRE(kvc_cpu_append(&w.kv(), &a, nullptr, &e) == KVC_OK);
  CHECK(read_plane(w.kv().k, first / 8, 0, first % 8, 5) == w.key(0, 0, 0, 5));
  CHECK(std::isnan(read_plane(w.kv().k, first / 8, 1, first % 8, 5)));
  CHECK(read_plane(w.kv().v, second / 8, 1, second % 8, 7) == w.val(0, 0, 1, 7));
  CHECK(read_plane(w.kv().v, first / 8, 1, first % 8 + 1, 7) == w.val(0, 1, 1, 7));
  CHECK(std::isnan(read_plane(w.kv().v, first / 8, 0, first % 8 + 1, 7)));
}

TEST_CASE("rotated rows agree with double at any position, with and without a table", "[rope]") {
  std::mt19937 random(9);
  const auto scaled = llama_like_frequencies(64);
  for (const rope_style style : {rope_style::interleaved, rope_style::half_split}) {
    for (const int32_t dims : {64, 32}) {
      for (const bool own : {false, true}) {
        const rope_config config{
            .style = style,
            .dims = dims,
            .theta = 1e5,
            .frequency = own ? std::span(scaled).first(size_t(dims) / 2) : std::span<const double>{}};
        auto plain = rope::create(config);
        rope_config with = config;
        with.table_positions = 1000;
        auto tabled = rope::create(with);
        REQUIRE((plain && tabled));
        const std::vector<int32_t> at{0, 1, 999, 1000, 200000, -3};
        const auto x = normal(random, at.size() * 3 * 64);
        std::vector<float> y(x.size()), z = x;
        const kvc_rows rows = dense_rows(x.data(), element::f32, 3, 64);
        REQUIRE(plain->turn(rows, at, y.data()));
        REQUIRE(tabled->turn(dense_rows(z.data(), element::f32, 3, 64), at, z.data()));
        CHECK(same_bits(y, z));
        for (size_t r = 0; r < at.size() * 3; ++r) {
          const auto want = turned(x.data() + r * 64, 64, plain->view(), at[r / 3]);
          CHECK(deviation({y.begin() + ptrdiff_t(r * 64), y.begin() + ptrdiff_t(r * 64 + 64)}, want) < 1e-6);
        }
      }
    }
  }
}

TEST_CASE("append with rope stores what rotating first would have stored", "[append][rope]") {
  for (const element type : {element::f32, element::f16}) {
    world fused({.heads = 2, .type = type}, {40}, 11), apart({.heads = 2, .type = type}, {40}, 11);
    auto r = rope::create({.dims = 64, .table_positions = 16});
    REQUIRE(r);
    std::vector<int64_t> slots;
    std::vector<int32_t> positions;
    for (int32_t j = 0; j < 40; ++j) {
      slots.push_back(fused.slot(0, j));
      positions.push_back(3 * j);
    }
    const auto v = dense_rows(fused.values[0].data(), element::f32, 2, 64);
    REQUIRE(append(fused.kv(), dense_rows(fused.keys[0].data(), element::f32, 2, 64), v, slots,
                   {.rope = &r->view(), .positions = positions}));
    REQUIRE(r->turn(dense_rows(apart.keys[0].data(), element::f32, 2, 64), positions, apart.keys[0].data()));
    apart.append_all();
    CHECK(std::memcmp(fused.planes.data(), apart.planes.data(), size_t(fused.planes.size().count)) == 0);
  }
}

TEST_CASE("rotating by a and then b equals rotating by a + b, plain and scaled, within float rounding",
          "[rope]") {
  const auto scaled = llama_like_frequencies(64);
  for (const bool own : {false, true}) {
    for (const element type : {element::f32, element::f16}) {
      auto r = rope::create(
          {.dims = 64, .theta = 1e5, .frequency = own ? std::span(scaled) : std::span<const double>{}});
      REQUIRE(r);
      world twice({.heads = 2, .type = type}, {16}, 13), once({.heads = 2, .type = type}, {16}, 13);
      twice.append_all();
      once.append_all();
      const auto turn = [&](world& w, int32_t by) {
        const kvc_command c{KVC_OP_ROTATE, 0, 0, 16, -1, w.row_of_table(0)[0], by};
        REQUIRE(run(w.planes.layers(), std::span(&c, 1), {.rope = &r->view()}));
      };
      turn(twice, 1234), turn(twice, -200);
      turn(once, 1034);
      // Each turn rounds once to the stored type: half a unit in the last place of values up to about 5.
      const double unit = type == element::f32 ? 5e-7 : 4e-3;
      double worst = 0;
      for (int32_t h = 0; h < 2; ++h) {
        for (int32_t t = 0; t < 16; ++t) {
          std::vector<float> x;
          for (int32_t d = 0; d < 64; ++d) x.push_back(once.key(0, t, h, d));
          const auto exact = turned(x.data(), 64, r->view(), 1034);
          for (int32_t d = 0; d < 64; ++d) {
            const int32_t id = once.row_of_table(0)[0];
            CHECK(std::abs(read_plane(once.kv().k, id, h, t, d) - exact[size_t(d)]) < 2 * unit);
            const double apart = read_plane(once.kv().k, once.row_of_table(0)[0], h, t, d) -
                                 double{read_plane(twice.kv().k, twice.row_of_table(0)[0], h, t, d)};
            worst = std::max(worst, std::abs(apart));
          }
        }
      }
      CHECK(worst < 4 * unit);
    }
  }
}

TEST_CASE("a thousand small rotations drift no further than a thousand roundings", "[rope]") {
  auto r = rope::create({.dims = 64, .theta = 1e5});
  REQUIRE(r);
  world w({}, {16}, 15);
  w.append_all();
  std::vector<kvc_command> list;
  for (int i = 0; i < 1000; ++i) {
    list.push_back({KVC_OP_ROTATE, 0, static_cast<uint16_t>(i), 16, -1, w.row_of_table(0)[0], 16});
  }
  REQUIRE(run(w.planes.layers(), list, {.rope = &r->view()}));
  double worst = 0;
  for (int32_t t = 0; t < 16; ++t) {
    std::vector<float> x;
    for (int32_t d = 0; d < 64; ++d) x.push_back(w.key(0, t, 0, d));
    const auto want = turned(x.data(), 64, r->view(), 16000);
    for (int32_t d = 0; d < 64; ++d) {
      worst =
          std::max(worst, std::abs(read_plane(w.kv().k, w.row_of_table(0)[0], 0, t, d) - want[size_t(d)]));
    }
  }
  INFO("drift " << worst);
  CHECK(worst < 1000 * 2.4e-7 * 4);  // linear bound; the usual value is far below
  CHECK(worst > 0);
}

TEST_CASE("host planes take exactly the planner's bytes and know their layout", "[planes]") {
  for (const bool alias : {false, true}) {
    host_planes_config c;
    c.shape = {.layers = 5,
               .kv_heads = 3,
               .head_dim_k = 96,
               .head_dim_v = 64,
               .type = element::f16,
               .v_aliases_k = alias,
               .window = 0};
    c.block_size = 32;
    c.blocks = 7;
    auto p = host_planes::create(c);
    REQUIRE(p);
    CHECK(p->size().count == 5 * 3 * (96 + (alias ? 0 : 64)) * 2 * 32 * 7);
    CHECK(p->size() == block_bytes(c.shape, 32) * 7);
    CHECK(p->layer(0).layout == p->layer(4).layout);
    CHECK(p->layer(0).layout >> 56 == 1);
    const kvc_kv& last = p->layer(4);
    CHECK(static_cast<std::byte*>(last.k.data) + last.k.block_stride * 7 ==
          static_cast<std::byte*>(p->data()) + p->size().count);
    CHECK((alias ? last.v.data == nullptr : last.v.block_stride == last.k.block_stride));
    auto other = c;
    other.order = k_order::row_major;
    CHECK(host_planes::create(other)->layer(0).layout != p->layer(0).layout);
    const host_planes moved = std::move(*p);
    CHECK(moved.layers().size() == 5);
    std::vector<std::byte> lent(size_t(moved.size().count) + 64);
    other.memory = lent.data() + (64 - reinterpret_cast<uintptr_t>(lent.data()) % 64) % 64;
    auto borrowed = host_planes::create(other);
    REQUIRE(borrowed);
    CHECK(borrowed->data() == other.memory);
    other.memory = static_cast<std::byte*>(other.memory) + 4;
    CHECK(std::string(host_planes::create(other).error().field) == "memory");
  }
}

TEST_CASE("host planes refuse a wrong configuration by field", "[planes]") {
  host_planes_config good;
  good.shape = {.layers = 2, .kv_heads = 1, .head_dim_k = 64, .head_dim_v = 64, .type = element::f32};
  good.blocks = 1;
  REQUIRE(host_planes::create(good));
  const auto field = [](const host_planes_config& c) {
    auto p = host_planes::create(c);
    return std::string(p ? "accepted" : p.error().field);
  };
  auto c = good;
  c.blocks = 0;
  CHECK(field(c) == "blocks");
  c = good, c.block_size = 12;
  CHECK(field(c) == "block_size");
  c = good, c.group = 256;
  CHECK(field(c) == "group");
  c = good, c.shape.kv_heads = 0;
  CHECK(field(c) == "kv_heads");
  const int32_t wrong[] = {0, 1, 1}, backwards[] = {1, 1};
  c = good, c.layer_owner = wrong;
  CHECK(field(c) == "accepted");
  c.shape.layers = 3;
  CHECK(field(c) == "layer_owner");
  c = good, c.layer_owner = backwards;
  CHECK(field(c) == "layer_owner");
}
