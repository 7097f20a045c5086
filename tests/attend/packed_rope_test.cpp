// SPDX-License-Identifier: Apache-2.0
// Keys that are stored before their rotation by position: reading them must give what planes of turned keys
// give, to the bit, and what double gives, to rounding.
#include <catch2/catch.hpp>

#include "kvcache/quant/hadamard.hpp"
#include "world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

constexpr int32_t block = 32, heads = 2, group = 3;

struct rope_case {
  kv_format f{};
  int32_t dim = 64, length = 0;
  rope_style style = rope_style::half_split;
  element type = element::f16;
  k_order order = k_order::transposed;
};

/// A text in packed planes, and the same keys, turned, in f32 planes of the same ids.
struct rope_world {
  rope_case c;
  rope turn;
  host_planes packed, plain;
  std::vector<float> keys, values;  // [length][heads][dim]
  std::vector<int32_t> table, positions;
  int32_t sealed;

  rope_world(const rope_case& from, std::mt19937& random) : c(from), sealed(from.length / block * block) {
    auto made = rope::create(
        {.style = c.style, .dims = c.dim / 2 * 2, .theta = 1e4, .frequency = {}, .table_positions = 100});
    REQUIRE(made);
    turn = std::move(*made);
    const auto size = static_cast<size_t>(c.length * heads * c.dim);
    keys = normal(random, size);
    values = normal(random, size);
    const int32_t blocks = ceil_div(c.length, block);
    host_planes_config p;
    p.shape = {.layers = 1, .kv_heads = heads, .head_dim_k = c.dim, .head_dim_v = c.dim, .type = c.type};
    p.block_size = block;
    p.blocks = p.open_blocks = blocks;
    p.order = c.order;
    p.formats = {&c.f, 1};
    CHECK(host_planes::create(p).error().code == errc::bad_argument);  // no rotation to read with
    p.k_rope = &turn.view();
    auto first = host_planes::create(p);
    REQUIRE(first);
    packed = std::move(*first);
    p.shape.type = element::f32;
    p.formats = {};
    p.open_blocks = 0;
    auto second = host_planes::create(p);
    REQUIRE(second);
    plain = std::move(*second);
    for (int32_t b = 0; b < blocks; ++b) table.push_back(blocks - 1 - b);
    for (int32_t i = 0; i < c.length; ++i) positions.push_back(i + i / 7);  // a text with gaps
    fill();
  }

  std::vector<int64_t> slots() const {
    std::vector<int64_t> out;
    for (int32_t i = 0; i < c.length; ++i)
      out.push_back(int64_t{table[static_cast<size_t>(i / block)]} * block + i % block);
    return out;
  }
  kvc_rows rows(const std::vector<float>& x) const {
    return dense_rows(x.data(), element::f32, heads, c.dim);
  }

  void fill() {
    const kvc_kv& kv = packed.layer(0);
    const std::vector<int64_t> at = slots();
    kvc_append refused{};
    refused.struct_size = sizeof refused;
    refused.rows = c.length;
    refused.k = refused.v = rows(keys);
    refused.open_slot = at.data();
    refused.pos = positions.data();
    refused.rope = &turn.view();
    kvc_error e{};
    CHECK(kvc_cpu_append(&kv, &refused, nullptr, &e) == KVC_BAD_ARGUMENT);
    CHECK(e.field == KVC_FIELD_ROPE);
    REQUIRE(append(kv, rows(keys), rows(values), {}, {.open_slots = at}));
    for (int32_t b = 0; b < sealed / block; ++b) {
      const int32_t id = table[static_cast<size_t>(b)];
      const kvc_command seal{KVC_OP_SEAL, 0, 0, block, id, id, 0};
      REQUIRE(run({&kv, 1}, {&seal, 1}));
    }
    std::vector<float> k(keys.size()), v(values.size());
    for (int32_t i = 0; i < c.length; ++i) {
      for (int32_t h = 0; h < heads; ++h)
        read(i, h, k.data() + (i * heads + h) * c.dim, v.data() + (i * heads + h) * c.dim);
    }
    REQUIRE(turn.turn(rows(k), positions, k.data()));
    REQUIRE(append(plain.layer(0), rows(k), rows(v), at));
  }

  /// Key and value of a slot as stored; the key without its Hadamard rotation.
  void read(int32_t slot, int32_t head, float* k, float* v) const {
    const kvc_kv& kv = packed.layer(0);
    const int32_t id = table[static_cast<size_t>(slot / block)], at = slot % block;
    if (slot < sealed) {
      std::vector<float> ks(static_cast<size_t>(block * c.dim)), vs(ks.size());
      REQUIRE(kvc_cpu_unpack(&kv, &id, 1, head, ks.data(), 0, vs.data(), 0, KVC_TARGET_SCALAR, nullptr) ==
              KVC_OK);
      for (int32_t d = 0; d < c.dim; ++d) {
        k[d] = ks[static_cast<size_t>(d * block + at)];
        v[d] = vs[static_cast<size_t>(at * c.dim + d)];
      }
    } else {
      for (int32_t d = 0; d < c.dim; ++d) {
        std::vector<float> own(static_cast<size_t>(c.dim));
        own.assign(keys.begin() + (slot * heads + head) * c.dim,
                   keys.begin() + (slot * heads + head + 1) * c.dim);
        if (c.f.k.hadamard) hadamard(own.data(), c.dim);
        k[d] = rounded(own[static_cast<size_t>(d)], c.type);
        own.assign(values.begin() + (slot * heads + head) * c.dim,
                   values.begin() + (slot * heads + head + 1) * c.dim);
        if (c.f.v.hadamard) hadamard(own.data(), c.dim);
        v[d] = rounded(own[static_cast<size_t>(d)], c.type);
      }
    }
    if (c.f.k.hadamard) hadamard(k, c.dim);
  }

  answer attend(const kvc_kv& kv, const std::vector<float>& q, int32_t n_rows,
                const std::vector<int32_t>& borders, int32_t target) const {
    auto with = attention::create(
        kv, {.q_heads = heads * group, .rows = n_rows, .slots = c.length, .target = target});
    REQUIRE(with);
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = 1;
    b.table = b.open_table = table.data();
    b.table_columns = static_cast<int32_t>(table.size());
    b.kv_len = &c.length;
    // The plain planes have everything in one space; borders there only ask for the same passes.
    const int32_t all = c.length;
    b.sealed = kv.open_blocks != 0 ? &sealed : &all;
    b.row_sealed = borders.data();
    const int32_t starts[] = {0, n_rows};
    b.q_start = starts;
    const std::vector<int32_t> q_pos(positions.end() - n_rows, positions.end());
    b.q_pos = q_pos.data();
    b.k_pos = positions.data();
    answer a;
    a.o.resize(static_cast<size_t>(n_rows * heads * group * c.dim));
    a.lse.resize(static_cast<size_t>(n_rows * heads * group));
    kvc_kv own = kv;
    if (kv.open_blocks == 0) {  // both forms of the plain planes are the same memory
      own.open_k = own.k;
      own.open_v = own.v;
      own.open_blocks = own.blocks;
      own.hadamard = c.f.v.hadamard ? KVC_HADAMARD_V : 0;
    }
    REQUIRE(with->run(own, b, dense_rows(q.data(), element::f32, heads * group, c.dim),
                      causal_softmax(0.125f),
                      dense_out(a.o.data(), element::f32, heads * group, c.dim, a.lse.data())));
    return a;
  }
};

}  // namespace

TEST_CASE("keys stored before their rotation are turned when they are read", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed rope", 131)));
  for (int64_t round = 0; round < effort(60); ++round) {
    rope_case c;
    c.dim = pick(random, {64, 128});
    c.length = pick(random, {1, 31, 32, 33, 63, 64, 65, 96, 130, 200});
    c.style = pick(random, {rope_style::half_split, rope_style::interleaved});
    c.type = pick(random, {element::f16, element::f32});
    c.order = pick(random, {k_order::transposed, k_order::row_major});
    c.f.k = {.codes = pick(random, {code::int8, code::int4, code::int3, code::exact}),
             .axis = scale_axis::channel};
    if (c.f.k.codes == code::exact) c.f.k.axis = scale_axis::token;
    c.f.v = {.codes = pick(random, {code::int8, code::int4}), .axis = scale_axis::token};
    c.f.k.hadamard = random() % 2 == 0;
    c.f.v.hadamard = random() % 2 == 0;
    c.f.k_before_rope = true;
    const rope_world w(c, random);
    const int32_t n_rows = std::min(c.length, pick(random, {1, 2, 40}));
    const auto q = normal(random, static_cast<size_t>(n_rows * heads * group * c.dim));
    std::vector<int32_t> borders;
    for (int32_t r = 0; r < n_rows; ++r) borders.push_back((c.length - n_rows + r + 1) / block * block);
    INFO("dim " << c.dim << " length " << c.length << " rows " << n_rows << " codes " << int(c.f.k.codes));
    for (const int32_t t : targets()) {
      // Rows before a border read what follows it from open blocks, which the plain planes do not tell apart.
      const std::vector<int32_t> same(static_cast<size_t>(n_rows), w.sealed);
      const answer a = w.attend(w.packed.layer(0), q, n_rows, same, t);
      const answer b = w.attend(w.plain.layer(0), q, n_rows, same, t);
      INFO(kvc_target_text(t));
      CHECK(same_bits(a, b));
      const answer scalar = w.attend(w.packed.layer(0), q, n_rows, borders, KVC_TARGET_SCALAR);
      CHECK(same_bits(scalar, w.attend(w.packed.layer(0), q, n_rows, borders, t)));
    }
  }
}
