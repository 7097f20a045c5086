// SPDX-License-Identifier: Apache-2.0
// What is written to packed planes: every byte of memory is compared with an image that was changed by hand.
#include <catch2/catch.hpp>
#include <numeric>

#include "kvcache/quant/hadamard.hpp"
#include "packed_world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// The bytes of all planes, as they should be.
class image {
 public:
  explicit image(const packed_world& w) : world_(w) {
    for (const auto& m : w.memory()) bytes_.emplace_back(m.begin(), m.end());
  }
  /// Writes to where `at` lies in the planes.
  void put(const std::byte* at, const void* from, size_t n) {
    const auto all = world_.memory();
    for (size_t i = 0; i < all.size(); ++i) {
      const auto first = reinterpret_cast<uintptr_t>(all[i].data()), here = reinterpret_cast<uintptr_t>(at);
      if (here < first || here + n > first + all[i].size()) continue;
      std::memcpy(bytes_[i].data() + (here - first), from, n);
      return;
    }
    FAIL("outside of all planes");
  }
  bool holds() const {
    const auto all = world_.memory();
    for (size_t i = 0; i < all.size(); ++i) {
      if (std::memcmp(all[i].data(), bytes_[i].data(), bytes_[i].size()) != 0) return false;
    }
    return true;
  }

 private:
  const packed_world& world_;
  std::vector<std::vector<std::byte>> bytes_;
};

size_t element_size_of(const packed_shape& g) {
  return size_t(element_bytes(g.type));
}

/// What sealing open block `src` into `dst` should write.
void seal_by_hand(const packed_world& w, int32_t src, int32_t dst, int32_t exempt, image& to) {
  const packed_shape& g = w.geo;
  for (const bool k : {true, false}) {
    if (!g.coded(k)) {
      const kvc_plane &from = k ? w.kv.open_k : w.kv.open_v, &plane = k ? w.kv.k : w.kv.v;
      for (int32_t h = 0; h < g.heads; ++h) {
        for (int32_t t = 0; t < g.block; ++t) {
          for (int32_t d = 0; d < g.dim(k); ++d)
            to.put(value_at(plane, dst, h, t, d), value_at(from, src, h, t, d), element_size_of(g));
        }
      }
      continue;
    }
    std::vector<std::byte> side(size_t(layout_of(g.side(k), g.stored(), g.block, k).bytes));
    REQUIRE(pack_cells(g.side(k), g.stored(), g.block, k, exempt, w.open_values(k, src).data(), side.data()));
    w.each_piece(k, dst, [&](int64_t offset, std::byte* at, int64_t n) {
      to.put(at, side.data() + offset, size_t(n));
    });
  }
}

void put_value(const packed_world& w, bool k, int32_t block, int32_t head, int32_t slot, int32_t dim,
               float x) {
  const kvc_plane& p = k ? w.kv.open_k : w.kv.open_v;
  const uint16_t half = w.geo.type == element::f16 ? to_f16(x).bits : to_bf16(x).bits;
  std::memcpy(value_at(p, block, head, slot, dim),
              w.geo.type == element::f32 ? static_cast<const void*>(&x) : &half, element_size_of(w.geo));
}

kvc_status run_list(const kvc_kv& kv, std::span<const kvc_command> list, kvc_error& e) {
  kvc_run r{};
  r.struct_size = sizeof r;
  r.layers = &kv;
  r.n_layers = 1;
  r.commands = list.data();
  r.n_commands = int32_t(list.size());
  return kvc_cpu_run(&r, nullptr, &e);
}

}  // namespace

TEST_CASE("sealing writes the bytes of the reference and no others", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed seal", 97)));
  for (int64_t round = 0; round < effort(150); ++round) {
    const packed_shape g = random_packed_shape(random);
    packed_world w(g, {2 * g.block + 5}, static_cast<uint32_t>(random()));
    w.append(0, 0, w.length(0));
    INFO(text_of(g));
    const auto column = int32_t(random() % 2);
    const int32_t exempt = column == 0 ? g.f.exempt : 0, src = w.open_id(0, column), dst = w.id(0, column);
    // Exempt slots are not looked at.
    for (int32_t t = 0; t < exempt && g.coded(true); ++t) put_value(w, true, src, 0, t, 0, INFINITY);
    for (int32_t t = 0; t < exempt && g.coded(false); ++t) put_value(w, false, src, 0, t, 7, NAN);
    image right(w);
    seal_by_hand(w, src, dst, exempt, right);
    const kvc_command c = w.seal_command(0, column);
    REQUIRE(run(std::span(&w.kv, 1), std::span(&c, 1)));
    REQUIRE(right.holds());
  }
}

TEST_CASE("copying a packed block copies its codes and scales and nothing else", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed copy", 101)));
  for (int64_t round = 0; round < effort(100); ++round) {
    const packed_shape g = random_packed_shape(random);
    packed_world w(g, {2 * g.block}, static_cast<uint32_t>(random()));
    w.fill();
    const int32_t src = w.id(0, 0), dst = w.id(0, 1);
    image right(w);
    for (const bool k : {true, false}) {
      if (g.coded(k)) {
        const std::vector<std::byte> side = w.packed_side(k, src);
        w.each_piece(k, dst, [&](int64_t offset, std::byte* at, int64_t n) {
          right.put(at, side.data() + offset, size_t(n));
        });
        continue;
      }
      const kvc_plane& p = k ? w.kv.k : w.kv.v;
      for (int32_t h = 0; h < g.heads; ++h) {
        for (int32_t t = 0; t < g.block; ++t) {
          for (int32_t d = 0; d < g.dim(k); ++d)
            right.put(value_at(p, dst, h, t, d), value_at(p, src, h, t, d), element_size_of(g));
        }
      }
    }
    const kvc_command list[] = {{KVC_OP_COPY, 0, 0, g.block, src, dst, 0},
                                {KVC_OP_COPY, 0, 1, g.block, dst, dst, 0}};
    INFO(text_of(g));
    REQUIRE(run(std::span(&w.kv, 1), list));
    REQUIRE(right.holds());
  }
}

TEST_CASE("a gather of a packed layer moves slots of its open blocks", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed gather", 103)));
  for (int64_t round = 0; round < effort(30); ++round) {
    const packed_shape g = random_packed_shape(random);
    packed_world w(g, {3 * g.block}, static_cast<uint32_t>(random()));
    w.fill();
    std::vector<int32_t> kept(size_t(3 * g.block));
    std::iota(kept.begin(), kept.end(), 0);
    std::shuffle(kept.begin(), kept.end(), random);
    const auto tokens = 1 + int32_t(random() % uint32_t(2 * g.block));
    std::sort(kept.begin(), kept.begin() + tokens);
    const int32_t n_dst = ceil_div(tokens, g.block);
    std::vector<int32_t> ids{3, n_dst, 0};
    for (int32_t i = 0; i < 3; ++i) ids.push_back(w.open_id(0, i));
    for (int32_t i = 0; i < n_dst; ++i) ids.push_back(w.open_id(0, i));
    image right(w);
    for (const bool k : {true, false}) {
      for (int32_t t = 0; t < tokens; ++t) {
        const int32_t from = kept[size_t(t)];
        for (int32_t h = 0; h < g.heads; ++h) {
          for (int32_t d = 0; d < g.dim(k); ++d) {
            const kvc_plane& p = k ? w.kv.open_k : w.kv.open_v;
            // Nothing has moved yet, so that the planes still hold what is kept.
            right.put(value_at(p, w.open_id(0, t / g.block), h, t % g.block, d),
                      value_at(p, w.open_id(0, from / g.block), h, from % g.block, d), element_size_of(g));
          }
        }
      }
    }
    const kvc_keep keep{kept.data(), 0, 0};
    const kvc_command c{KVC_OP_GATHER, 0, 0, tokens, 0, 0, 0};
    INFO(text_of(g));
    REQUIRE(run(std::span(&w.kv, 1), std::span(&c, 1), {.ids = ids, .keeps = std::span(&keep, 1)}));
    REQUIRE(right.holds());
  }
}

TEST_CASE("a value that cannot be packed stops the whole list before anything is written", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed values", 107)));
  for (int64_t round = 0; round < effort(60); ++round) {
    packed_shape g = random_packed_shape(random);
    g.f.exempt = 2;
    packed_world w(g, {2 * g.block}, static_cast<uint32_t>(random()));
    w.append(0, 0, w.length(0));
    const bool k = random() % 2 == 0;
    const bool infinite = g.type == element::f16 || random() % 2 == 0;
    const float bad = random() % 3 == 0 ? NAN : infinite ? -INFINITY : 65520.0f;
    const int32_t slot = pick(random, {2, 3, g.block - 1}), dim = pick(random, {0, 5, g.dim(k) - 1});
    const auto head = int32_t(random() % uint32_t(g.heads));
    put_value(w, k, w.open_id(0, 0), head, slot, dim, bad);
    const image before(w);
    const std::vector<kvc_command> list{w.seal_command(0, 1), w.seal_command(0, 0)};
    kvc_error e{};
    const kvc_status s = run_list(w.kv, list, e);
    INFO(text_of(g) << (k ? " key " : " value ") << bad);
    if (!g.coded(k)) {
      CHECK(s == KVC_OK);  // it is kept as it is
      continue;
    }
    CHECK(s == KVC_BAD_ARGUMENT);
    CHECK(e.field == KVC_FIELD_VALUE);
    CHECK(e.index == 1);
    CHECK(e.value == slot * g.dim(k) + dim);
    CHECK(before.holds());
  }
}

TEST_CASE("what cannot be done to codes is refused by name", "[packed]") {
  packed_shape g;
  g.f.k = g.f.v = {.codes = code::int4, .axis = scale_axis::token};
  g.f.exempt = 2;
  packed_world w(g, {70}, 3);
  w.fill();
  const kvc_command fine = w.seal_command(0, 0);
  const auto with = [&](uint8_t op, auto&& edit) {
    kvc_command c = fine;
    c.op = op;
    edit(c);
    return c;
  };
  const auto as_it_is = [](kvc_command&) {};
  const struct {
    kvc_command c;
    kvc_status status;
    int32_t field;
  } faults[] = {
      {with(KVC_OP_ZERO, as_it_is), KVC_UNSUPPORTED, KVC_FIELD_OP},
      {with(KVC_OP_ROTATE, as_it_is), KVC_UNSUPPORTED, KVC_FIELD_OP},
      {with(KVC_OP_SEAL, [](kvc_command& c) { c.tokens = 31; }), KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS},
      {with(KVC_OP_COPY, [](kvc_command& c) { c.tokens = 0; }), KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS},
      {with(KVC_OP_SEAL, [](kvc_command& c) { c.arg = 3; }), KVC_BAD_ARGUMENT, KVC_FIELD_ARG},
      {with(KVC_OP_SEAL, [](kvc_command& c) { c.arg = -1; }), KVC_BAD_ARGUMENT, KVC_FIELD_ARG},
      {with(KVC_OP_SEAL, [&](kvc_command& c) { c.src = w.kv.open_blocks; }), KVC_BAD_ARGUMENT, KVC_FIELD_SRC},
      {with(KVC_OP_SEAL, [](kvc_command& c) { c.src = -1; }), KVC_BAD_ARGUMENT, KVC_FIELD_SRC},
      {with(KVC_OP_SEAL, [&](kvc_command& c) { c.dst = w.kv.blocks; }), KVC_BAD_ARGUMENT, KVC_FIELD_DST},
      {with(KVC_OP_COPY, [](kvc_command& c) { c.src = -1; }), KVC_BAD_ARGUMENT, KVC_FIELD_SRC},
  };
  const image before(w);
  for (const auto& f : faults) {
    const kvc_command list[] = {{KVC_OP_COPY_OPEN, 0, 0, 7, w.open_id(0, 0), w.open_id(0, 1), 0}, f.c};
    kvc_error e{};
    CHECK(run_list(w.kv, list, e) == f.status);
    CHECK(e.field == f.field);
    CHECK(e.index == 1);
    CHECK(before.holds());
  }
}

TEST_CASE("an open block may be filled by a copy and sealed in one list", "[packed]") {
  packed_shape g;
  g.heads = 2;
  g.f.k = {.codes = code::int4, .axis = scale_axis::channel};
  g.f.v = {.codes = code::int8, .axis = scale_axis::token};
  packed_world w(g, {64}, 5), done(g, {64}, 5);
  w.append(0, 0, 32);  // the second block holds NaN
  done.append(0, 0, 32);
  const int32_t first = w.open_id(0, 0), second = w.open_id(0, 1);
  const kvc_command list[] = {{KVC_OP_COPY_OPEN, 0, 0, 32, first, second, 0},
                              {KVC_OP_SEAL, 0, 1, 32, second, w.id(0, 1), 0}};
  kvc_error e{};
  REQUIRE(run_list(w.kv, list, e) == KVC_OK);
  image right(done);
  seal_by_hand(done, first, done.id(0, 1), 0, right);
  for (const bool k : {true, false}) {
    CHECK(w.open_values(k, second) == done.open_values(k, first));
    const std::vector<std::byte> got = w.packed_side(k, w.id(0, 1));
    std::vector<std::byte> want(got.size());
    REQUIRE(pack_cells(g.side(k), g.stored(), g.block, k, 0, done.open_values(k, first).data(), want.data()));
    CHECK(got == want);
  }
  // A copy that brings what cannot be packed is found before it is made.
  put_value(w, false, first, 1, 31, 63, INFINITY);
  const image before(w);
  CHECK(run_list(w.kv, list, e) == KVC_BAD_ARGUMENT);
  CHECK((e.field == KVC_FIELD_VALUE && e.index == 1 && e.value == 31 * 64 + 63));
  CHECK(before.holds());
}

TEST_CASE("an open block may be filled by a gather of a copy and sealed in one list", "[packed]") {
  packed_shape g;
  g.heads = 2;
  g.f.k = {.codes = code::int4, .axis = scale_axis::channel};
  g.f.v = {.codes = code::int8, .axis = scale_axis::token};
  packed_world w(g, {128}, 5);
  w.append(0, 0, 64);
  std::vector<int32_t> kept;
  for (int32_t j = 1; j < 64; j += 2) kept.push_back(j);
  const int32_t block[] = {w.open_id(0, 0), w.open_id(0, 1), w.open_id(0, 2), w.open_id(0, 3)};
  const std::vector<int32_t> ids{2, 1, 0, block[0], block[2], block[3]};
  const kvc_keep keep{kept.data(), 0, 0};
  const kvc_command list[] = {{KVC_OP_SEAL, 0, 2, 32, block[3], w.id(0, 3), 0},
                              {KVC_OP_GATHER, 0, 1, 32, 0, 0, 0},
                              {KVC_OP_COPY_OPEN, 0, 0, 32, block[1], block[2], 0}};
  const run_options options{.ids = ids, .keeps = std::span(&keep, 1)};
  put_value(w, true, block[1], 1, 4, 0, NAN);  // not kept
  REQUIRE(run(std::span(&w.kv, 1), list, options));
  for (const bool k : {true, false}) {
    std::vector<std::byte> want(w.packed_side(k, w.id(0, 3)).size());
    const std::vector<float> values = w.open_values(k, block[3]);
    REQUIRE(pack_cells(g.side(k), g.stored(), g.block, k, 0, values.data(), want.data()));
    CHECK(w.packed_side(k, w.id(0, 3)) == want);
  }
  put_value(w, true, block[1], 1, 5, 9, NAN);  // slot 37 of the run, the 18th that is kept
  const image before(w);
  const status s = run(std::span(&w.kv, 1), list, options);
  CHECK((s.code == errc::bad_argument && std::string(s.field) == "value" && s.value == 18 * 64 + 9));
  CHECK(before.holds());
}

TEST_CASE("layers of different formats are sealed by one command", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed layers", 109)));
  for (int64_t round = 0; round < effort(30); ++round) {
    packed_shape g = random_packed_shape(random);
    std::vector<kv_format> formats{g.f, {}, g.f};
    formats[2].k = random_side(random, g.dim_k, g.block, true);
    formats[2].v = random_side(random, g.dim_v, g.block, true);
    formats[1].residual = g.f.residual;
    formats[1].exempt = g.f.exempt;
    group_shape shape = g.stored();
    shape.layers = 3;
    const std::vector<int32_t> owners{0, 1, 0, 3};
    host_planes_config c{.shape = shape, .block_size = g.block, .blocks = 4, .order = g.order};
    c.layer_owner = owners;
    c.formats = formats;
    c.open_blocks = 3;
    c.exempt_blocks = 2;
    const exact_memory memory(host_planes::size_of(c).count + 63);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    c.memory = memory.data() + (64 - address % 64) % 64;
    auto planes = host_planes::create(c);
    REQUIRE(planes);
    INFO(text_of(g));
    std::vector<int64_t> slots, exempt;
    for (int64_t t = 0; t < g.block; ++t) slots.push_back(2 * g.block + t);
    for (int64_t t = 0; t < g.block; ++t) exempt.push_back(t < g.f.exempt ? g.f.exempt + t : -1);
    std::vector<std::vector<float>> k, v;
    for (const int32_t layer : {0, 1, 3}) {
      k.push_back(normal(random, size_t(g.block * g.heads * g.dim_k)));
      v.push_back(normal(random, size_t(g.block * g.heads * g.dim_v)));
      append_options o;
      o.open_slots = slots;
      if (g.f.exempt != 0) o.exempt_slots = exempt;
      REQUIRE(append(planes->layer(layer), dense_rows(k.back().data(), element::f32, g.heads, g.dim_k),
                     dense_rows(v.back().data(), element::f32, g.heads, g.dim_v), {}, o));
    }
    const kvc_command seal{KVC_OP_SEAL, 0, 0, g.block, 2, 3, g.f.exempt};
    REQUIRE(run(planes->layers(), std::span(&seal, 1)));
    for (size_t i = 0; i < 3; ++i) {
      const kvc_kv& kv = planes->layer(int32_t(i == 2 ? 3 : i));
      for (const bool keys : {true, false}) {
        const side_format& f = keys ? formats[i].k : formats[i].v;
        const kvc_plane &p = keys ? kv.k : kv.v, &open = keys ? kv.open_k : kv.open_v;
        std::vector<float> values;
        bool exact = true;
        for (int32_t h = 0; h < g.heads; ++h) {
          for (int32_t t = 0; t < g.block; ++t) {
            for (int32_t d = 0; d < g.dim(keys); ++d) {
              values.push_back(load_value(value_at(open, 2, h, t, d), open.type));
              if (f.codes != code::exact) continue;
              exact = exact && load_value(value_at(p, 3, h, t, d), p.type) == values.back();
            }
          }
        }
        CHECK(exact);
        if (f.codes == code::exact) continue;
        const side_layout l = layout_of(f, shape, g.block, keys);
        std::vector<std::byte> side(size_t(l.bytes));
        REQUIRE(pack_cells(f, shape, g.block, keys, g.f.exempt, values.data(), side.data()));
        CHECK(std::memcmp(value_at(p, 3, 0, 0, 0), side.data(), side.size()) == 0);
      }
    }
  }
}

TEST_CASE("rows are turned, then mixed, then stored open and exempt", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed append", 113)));
  for (int64_t round = 0; round < effort(60); ++round) {
    packed_shape g = random_packed_shape(random);
    g.f.k.hadamard = is_power_of_two(g.dim_k) && random() % 2 == 0;
    g.f.v.hadamard = is_power_of_two(g.dim_v) && random() % 2 == 0;
    const int32_t length = g.block + 7;
    packed_world w(g, {length}, static_cast<uint32_t>(random()));
    kvc_rope turn{};
    turn.struct_size = sizeof turn;
    turn.style = random() % 2 == 0 ? KVC_ROPE_INTERLEAVED : KVC_ROPE_HALF_SPLIT;
    turn.dims = g.dim_k;
    turn.theta = 1e4;
    const bool turned = random() % 2 == 0;
    std::vector<int32_t> positions = range(1000, 1000 + length);
    append_options o;
    if (turned) o.rope = &turn, o.positions = positions;
    w.append(0, 0, length, o);
    std::vector<float> k = w.keys[0], v = w.values[0];
    if (turned) {
      const kvc_rows rows = dense_rows(k.data(), element::f32, g.heads, g.dim_k);
      REQUIRE(kvc_cpu_rope(&turn, &rows, length, positions.data(), k.data(), nullptr, nullptr) == KVC_OK);
    }
    INFO(text_of(g));
    bool same = true;
    for (const bool keys : {true, false}) {
      std::vector<float>& x = keys ? k : v;
      const int32_t dim = g.dim(keys);
      for (int32_t j = 0; j < length; ++j) {
        for (int32_t h = 0; h < g.heads; ++h) {
          float* row = x.data() + (j * g.heads + h) * dim;
          if (g.side(keys).hadamard) {
            std::vector<double> exact(row, row + dim);
            hadamard(row, dim);
            exact = rotated_in_double(exact);
            for (int32_t d = 0; d < dim; ++d) same = same && std::fabs(row[d] - exact[size_t(d)]) < 2e-5;
          }
          for (int32_t d = 0; d < dim; ++d) {
            const float right = rounded(row[d], g.type);
            const kvc_plane& open = keys ? w.kv.open_k : w.kv.open_v;
            const auto* at = value_at(open, w.open_id(0, j / g.block), h, j % g.block, d);
            same = same && load_value(at, open.type) == right;
            if (j >= g.f.exempt) continue;
            const kvc_plane& exempt = keys ? w.kv.exempt_k : w.kv.exempt_v;
            same = same && load_value(value_at(exempt, w.exempt_table[0], h, j, d), exempt.type) == right;
          }
        }
      }
    }
    REQUIRE(same);
  }
}

TEST_CASE("rows for packed planes go to open blocks only, and to slots that exist", "[packed]") {
  packed_shape g;
  g.f.k = {.codes = code::int4};
  g.f.exempt = 2;
  packed_world w(g, {40}, 3);
  const std::vector<float> x(64, 1.0f);
  const kvc_rows row = dense_rows(x.data(), element::f32, 1, 64);
  const image before(w);
  const auto fails = [&](int64_t slot, int64_t open, int64_t exempt, kvc_status status, int32_t field) {
    kvc_append a{};
    a.struct_size = sizeof a;
    a.rows = 1;
    a.k = a.v = row;
    if (slot != -9) a.slot = &slot;
    if (open != -9) a.open_slot = &open;
    if (exempt != -9) a.exempt_slot = &exempt;
    kvc_error e{};
    CHECK(kvc_cpu_append(&w.kv, &a, nullptr, &e) == status);
    CHECK(e.field == field);
    CHECK(before.holds());
  };
  fails(0, -9, -9, KVC_UNSUPPORTED, KVC_FIELD_SLOT);
  fails(0, 0, -9, KVC_UNSUPPORTED, KVC_FIELD_SLOT);
  fails(-9, int64_t{w.kv.open_blocks} * 32, -9, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_SLOT);
  fails(-9, -2, -9, KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_SLOT);
  fails(-9, 0, int64_t{w.kv.exempt_blocks} * 2, KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT);
  fails(-9, 0, -2, KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT);
  w.kv.exempt = w.kv.exempt_blocks = 0;
  fails(-9, 0, 0, KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT);
  fails(-9, -1, -1, KVC_OK, KVC_FIELD_NONE);
}
