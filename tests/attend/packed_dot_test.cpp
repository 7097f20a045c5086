// SPDX-License-Identifier: Apache-2.0
// Scores of packed keys as integer dot products: the rule of the kernels stated once more, bit by bit, and
// what rounding the query costs against scores in floats.
#include <catch2/catch.hpp>

#include "kvcache/quant/hadamard.hpp"
#include "kvcache/quant/parse.hpp"
#include "packed_world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

side_format integers(code c, scale_axis axis, int32_t group, bool symmetric) {
  return {.codes = c, .axis = axis, .group_size = group, .symmetric = symmetric, .clip = {}, .hadamard = {}};
}
side_format plain_values() {
  return integers(code::int8, scale_axis::token, 0, false);
}

packed_shape dot_shape(const side_format& k, int32_t dim, int32_t block) {
  packed_shape g;
  g.f.k = k;
  g.f.v = plain_values();
  g.f.integer_dot = true;
  g.dim_k = dim;
  g.dim_v = 64;
  g.block = block;
  g.heads = 2;
  g.group = 3;
  return g;
}

packed_shape random_dot_shape(std::mt19937& random) {
  for (;;) {
    packed_shape g = random_packed_shape(random);
    g.f.integer_dot = true;
    if (validate(g.f, g.stored(), g.block)) return g;
  }
}

/// A filled world whose scores are integer dot products.
std::unique_ptr<packed_world> dot_world(const packed_shape& g, const std::vector<int32_t>& lengths,
                                        uint32_t seed) {
  auto w = std::make_unique<packed_world>(g, lengths, seed);
  w->kv.integer_dot = 1;
  w->fill();
  return w;
}

/// One packed cell, read code by code.
struct cell_reader {
  const packed_world& w;
  std::vector<std::byte> side;
  side_layout layout;
  int32_t head;

  cell_reader(const packed_world& world, int32_t s, int32_t column, int32_t h)
      : w(world),
        side(world.packed_side(true, world.id(size_t(s), column))),
        layout(layout_of(world.geo.f.k, world.geo.stored(), world.geo.block, true)),
        head(h) {}
  int32_t code(int32_t slot, int32_t d) const {
    const std::byte* row = side.data() + head * layout.head_stride + d * layout.code_row;
    return static_cast<int32_t>(read_code(w.geo.f.k.codes, row, slot));
  }
  float half(int64_t part, int32_t slot, int32_t d) const {
    const int32_t group = group_of(w.geo.f.k, w.geo.block, w.geo.dim_k);
    const int64_t i =
        w.geo.f.k.axis == scale_axis::channel ? d * (w.geo.block / group) + slot / group : int64_t{0};
    f16 x;
    std::memcpy(&x, side.data() + head * layout.scale_stride + part + 2 * i, 2);
    return to_float(x);
  }
  float scale(int32_t slot, int32_t d) const { return half(layout.scale, slot, d); }
  float minimum(int32_t slot, int32_t d) const {
    if (layout.minimum != 0) return half(layout.minimum, slot, d);
    return -0.5f * float(largest_code(w.geo.f.k.codes)) * scale(slot, d);
  }
};

struct stated {
  float score = 0;
  double bound = 0;  ///< of the error that rounding the query makes
};

/// The rule, for one query (as it meets the keys) and slot.
stated state_score(const cell_reader& c, int32_t slot, const std::vector<float>& q) {
  const int32_t h = 1 << (code_bits(c.w.geo.f.k.codes) - 1);
  std::vector<float> p;
  float a = 0;
  float lane[16] = {};
  for (size_t d = 0; d < q.size(); ++d) {
    const float s = c.scale(slot, int32_t(d));
    p.push_back(q[d] * s);
    a = std::max(a, std::fabs(p[d]));
    lane[d % 16] = std::fma(q[d], std::fma(float(h), s, c.minimum(slot, int32_t(d))), lane[d % 16]);
  }
  for (size_t n = 8; n > 0; n /= 2) {
    for (size_t i = 0; i < n; ++i) lane[i] += lane[i + n];
  }
  int64_t sum = 0;
  double sizes = 0;
  for (size_t d = 0; d < q.size(); ++d) {
    const double i = a == 0 ? 0 : std::nearbyint(double{p[d] * (127 / a)});
    REQUIRE(std::fabs(i) <= 127);
    sum += int64_t(i) * (c.code(slot, int32_t(d)) - h);
    sizes += std::abs(c.code(slot, int32_t(d)) - h);
  }
  return {std::fma(float(sum), a / 127, lane[0]), sizes * double{a} / 254};
}

/// Queries of row r and query head h as the kernels use them.
std::vector<float> query_of(const packed_world& w, const packed_rows& q, size_t r, int32_t h,
                            const packed_call& c) {
  const auto dim = size_t(w.geo.dim_k);
  const auto* from = q.values.data() + (r * size_t(w.geo.q_heads()) + size_t(h)) * dim;
  std::vector<float> x;
  for (size_t d = 0; d < dim; ++d) x.push_back(static_cast<float>(rounded(from[d], c.q_type)));
  if (w.geo.f.k.hadamard) hadamard(x.data(), w.geo.dim_k);
  for (float& v : x) v *= static_cast<float>(double{c.softmax.scale} * 1.44269504088896340736);
  return x;
}

/// Calls f(row, query head, slot, its score as stated) for every packed key that is read as codes.
template <class F>
void each_dot(const packed_world& w, const packed_rows& q, const packed_call& c, F&& f) {
  for (size_t r = 0; r < q.positions.size(); ++r) {
    for (int32_t h = 0; h < w.geo.q_heads(); ++h) {
      const std::vector<float> x = query_of(w, q, r, h, c);
      const int32_t last = std::min({q.borders[r], q.positions[r] + 1, q.kv_len});
      for (int32_t j = w.geo.f.exempt; j < last; ++j) {
        const cell_reader cell(w, q.sequence, j / w.geo.block, h / w.geo.group);
        const int32_t end = std::min(last, (j / w.geo.block + 1) * w.geo.block);
        for (; j < end; ++j) f(r, h, j, state_score(cell, j % w.geo.block, x));
        --j;
      }
    }
  }
}

/// All targets agree, their scores are those of the rule, and lse2 is that of the scores.
void check_rule(packed_world& w, const packed_rows& q, packed_call c) {
  INFO(text_of(w.geo));
  c.scores = true;
  const std::span<const packed_rows> asked(&q, 1);
  packed_answer first;
  for (const int32_t t : targets()) {
    c.target = t;
    const packed_answer got = w.attend(false, asked, c);
    INFO(kvc_target_text(t));
    if (first.o.empty()) first = got;
    REQUIRE(got == first);
  }
  const auto longest = size_t(std::max(q.kv_len, 1));
  const auto at = [&](size_t r, int32_t h) { return r * size_t(w.geo.q_heads()) + size_t(h); };
  int64_t seen = 0, wrong = 0;
  each_dot(w, q, c, [&](size_t r, int32_t h, int32_t j, const stated& s) {
    ++seen;
    wrong += first.scores[at(r, h) * longest + size_t(j)] != s.score ? 1 : 0;
  });
  CHECK(wrong == 0);
  w.kv.integer_dot = 0;
  const packed_answer floats = w.attend(false, asked, c);
  w.kv.integer_dot = 1;
  for (size_t r = 0; r < q.positions.size(); ++r) {
    for (int32_t h = 0; h < w.geo.q_heads(); ++h) {
      double sum = 0;
      for (int32_t j = 0; j <= q.positions[r]; ++j) {
        const size_t i = at(r, h) * longest + size_t(j);
        sum += std::exp2(double{first.scores[i]});
        // Exempt and open keys are as always.
        const bool same = j >= q.borders[r] || j < w.geo.f.exempt;
        if (same) wrong += first.scores[i] != floats.scores[i] ? 1 : 0;
      }
      CHECK(first.lse[at(r, h)] == Approx(std::log2(sum)).margin(1e-4));
    }
  }
  CHECK(wrong == 0);
  CHECK((seen == 0 || first.scores != floats.scores));
}

double norm(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - (b.empty() ? 0 : double{b[i]}), 2);
  return std::sqrt(sum);
}

}  // namespace

TEST_CASE("scores of integer codes are those of the rule, on all targets", "[packed]") {
  uint32_t seed = 0;
  for (const code c : {code::int8, code::int6, code::int5, code::int4, code::int3, code::int2}) {
    for (const int32_t block : {32, 64, 128}) {
      for (const int32_t group : {0, 32, 64}) {
        if (group > block) continue;
        ++seed;
        const int32_t dim = std::array{64, 72, 80, 128, 256, 8, 96}[seed % 7];
        packed_shape g = dot_shape(integers(c, scale_axis::channel, group, seed % 2 == 0), dim, block);
        g.f.k.hadamard = is_power_of_two(dim) && seed % 3 != 0;
        g.f.exempt = std::array{0, 1, 2, 4}[seed % 4];
        g.f.residual = seed % 2 == 0 ? 0 : 20;
        const auto w = dot_world(g, {300}, seed);
        check_rule(*w, w->ask(0, {0, 31, 97, 150, 298}), {});
        check_rule(*w, w->ask(0, {299}), {});
      }
    }
  }
}

TEST_CASE("one scale per head or per tensor follows the same rule", "[packed]") {
  for (const code c : {code::int8, code::int5, code::int4, code::int3}) {
    for (const scale_axis axis : {scale_axis::head, scale_axis::tensor}) {
      const auto w = dot_world(dot_shape(integers(c, axis, 0, c == code::int5), 80, 32), {200}, 5);
      check_rule(*w, w->ask(0, {60, 199}), {});
    }
  }
}

TEST_CASE("integer dot products of any geometry, and of many rows, follow the rule", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed dots", 131)));
  for (int64_t round = 0; round < effort(60); ++round) {
    const packed_shape g = random_dot_shape(random);
    const int32_t length = 1 + int32_t(random() % 260), rows = 1 + int32_t(random() % 12);
    const auto w = dot_world(g, {length}, static_cast<uint32_t>(random()));
    packed_call c;
    c.q_type = pick(random, {element::f32, element::f16, element::bf16});
    check_rule(*w, w->ask(0, range(std::max(0, length - rows), length)), c);
  }
}

TEST_CASE("windows, soft caps and absent blocks leave integer scores alike on all targets", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed dots absent", 137)));
  for (int64_t round = 0; round < effort(40); ++round) {
    packed_shape g = random_dot_shape(random);
    const auto w = dot_world(g, {400}, static_cast<uint32_t>(random()));
    const std::vector<packed_rows> asked{w->ask(0, {10, 200, 399}), w->ask(0, {399})};
    packed_call c;
    c.scores = true;
    c.softmax.window = random() % 2 == 0 ? 70 : 0;
    c.softmax.soft_cap = random() % 2 == 0 ? 5.0f : 0;
    packed_batch b;
    w->make(asked, false, b);
    for (int32_t column = 0; column * g.block < 400; ++column) {
      if (random() % 3 == 0) b.table[size_t(column)] = b.open[size_t(column)] = -1;
    }
    packed_answer first;
    for (const int32_t t : targets()) {
      c.target = t;
      const packed_answer got = w->attend(false, b, c);
      INFO(text_of(g) << " " << kvc_target_text(t));
      if (first.o.empty()) first = got;
      REQUIRE(got == first);
    }
  }
}

TEST_CASE("chunks and threads do not change what integer dot products give", "[packed][threads]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed dots threads", 139)));
  for (int64_t round = 0; round < effort(8); ++round) {
    packed_shape g = random_dot_shape(random);
    g.heads = 4;
    const auto w = dot_world(g, {1300}, static_cast<uint32_t>(random()));
    const packed_rows whole = w->ask(0, range(1150, 1300));
    packed_call c;
    const packed_answer want = w->attend(false, std::span(&whole, 1), c);
    INFO(text_of(g));
    const size_t q_row = size_t(g.q_heads() * g.dim_k), o_row = size_t(g.q_heads() * g.dim_v);
    for (const int32_t chunk : {1, 7, 64}) {
      packed_answer got;
      for (size_t first = 0; first < whole.positions.size(); first += size_t(chunk)) {
        const size_t last = std::min(first + size_t(chunk), whole.positions.size());
        packed_rows part;
        const auto cut = [&](const auto& v, size_t each) {
          return std::vector(v.begin() + int64_t(first * each), v.begin() + int64_t(last * each));
        };
        part.positions = cut(whole.positions, 1);
        part.borders = cut(whole.borders, 1);
        part.values = cut(whole.values, q_row);
        part.kv_len = part.positions.back() + 1;
        const packed_answer a = w->attend(false, std::span(&part, 1), c);
        got.o.insert(got.o.end(), a.o.begin(), a.o.end());
        got.lse.insert(got.lse.end(), a.lse.begin(), a.lse.end());
      }
      REQUIRE(got.o.size() == whole.positions.size() * o_row);
      REQUIRE(got == want);
    }
    for (const int32_t width : {2, 7}) {
      const thread_executor threads(width);
      c.width = width;
      c.executor = threads.get();
      REQUIRE(w->attend(false, std::span(&whole, 1), c) == want);
      const packed_rows one = w->ask(0, {1299});
      const packed_answer single = w->attend(false, std::span(&one, 1), {});
      REQUIRE(w->attend(false, std::span(&one, 1), c) == single);
    }
  }
}

TEST_CASE("what keys got is the same from stored integer scores and from new ones", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed dots score", 149)));
  for (int64_t round = 0; round < effort(15); ++round) {
    packed_shape g = random_dot_shape(random);
    const auto w = dot_world(g, {200}, static_cast<uint32_t>(random()));
    const std::vector<packed_rows> asked{w->ask(0, range(120, 200))};
    std::vector<float> first;
    for (const int32_t t : targets()) {
      packed_call c;
      c.target = t;
      c.scores = true;
      packed_batch b;
      w->make(asked, false, b);
      const packed_answer a = w->attend(false, b, c);
      for (const bool stored : {false, true}) {
        std::vector<float> sum(size_t(g.q_heads() * 200), 0.0f);
        w->add_scores(b, c, dense_score(KVC_SCORE_WEIGHT, sum.data(), 200, nullptr), a, stored,
                      [](kvc_score&) {});
        INFO(text_of(g) << " " << kvc_target_text(t));
        if (first.empty()) first = sum;
        REQUIRE(same_bits(sum, first));
      }
    }
  }
}

TEST_CASE("rounding the query moves scores within the bound, and outputs by little", "[packed]") {
  for (const code codes : {code::int8, code::int6, code::int4, code::int2}) {
    // Normal keys; a channel that lies far off, as models have them; and one that spreads ten times as far,
    // so that its products alone set the step.
    for (const auto& [spread, offset, reach] :
         {std::tuple(1.0f, 0.0f, 5e-3), std::tuple(2.0f, 20.0f, 5e-3), std::tuple(10.0f, 0.0f, 3e-2)}) {
      for (const int32_t dim : {64, 128}) {
        for (const bool rotated : {false, true}) {
          packed_shape g = dot_shape(integers(codes, scale_axis::channel, 0, false), dim, 64);
          g.f.exempt = 1;
          g.f.k.hadamard = rotated;
          packed_world w(g, {512}, uint32_t(dim));
          w.kv.integer_dot = 1;
          for (size_t i = 7; i < w.keys[0].size(); i += size_t(dim))
            w.keys[0][i] = w.keys[0][i] * spread + offset;
          w.fill();
          const packed_rows q = w.ask(0, {511, 511, 511, 511});
          packed_call c;
          c.scores = true;
          c.softmax = causal_softmax(float(1 / std::sqrt(double(dim))));
          const packed_answer got = w.attend(false, std::span(&q, 1), c);
          w.kv.integer_dot = 0;
          const packed_answer floats = w.attend(false, std::span(&q, 1), c);
          double worst = 0;
          each_dot(w, q, c, [&](size_t r, int32_t h, int32_t j, const stated& s) {
            const size_t i = (r * size_t(g.q_heads()) + size_t(h)) * 512 + size_t(j);
            const double off = std::fabs(double{got.scores[i]} - floats.scores[i]);
            worst = std::max(worst, off / (s.bound + 1e-5 * (1 + std::fabs(s.score))));
          });
          CHECK(worst <= 1);
          const double error = norm(got.o, floats.o) / norm(floats.o, {});
          INFO("int" << code_bits(codes) << " D" << dim << " spread " << spread << " offset " << offset
                     << " rotated " << rotated << ": scores " << worst << " of the bound, outputs " << error);
          CHECK(error <= reach);
          CHECK(error > 0);
        }
      }
    }
  }
}

TEST_CASE("queries that are zero, tiny or huge are rounded alike on all targets", "[packed]") {
  const auto w = dot_world(dot_shape(integers(code::int4, scale_axis::channel, 32, false), 72, 64), {128}, 9);
  for (const float size : {0.0f, 1e-38f, 1e-30f, 1e30f}) {
    packed_rows q = w->ask(0, {127});
    for (float& x : q.values) x *= size;
    packed_answer first;
    for (const int32_t t : targets()) {
      packed_call c;
      c.target = t;
      c.scores = true;
      const packed_answer got = w->attend(false, std::span(&q, 1), c);
      INFO(size << " " << kvc_target_text(t));
      if (first.o.empty()) first = got;
      REQUIRE(got == first);
      for (const float x : got.o) REQUIRE(std::isfinite(x));
    }
  }
}

TEST_CASE("integer dot products are part of a format, and refused where they cannot be", "[packed]") {
  const group_shape s{.layers = 1, .kv_heads = 2, .head_dim_k = 64, .head_dim_v = 64, .type = element::f16};
  kv_format f = parse_format("kv8:dot=integer").value;
  REQUIRE(f.integer_dot);
  CHECK(validate(f, s, 64));
  kv_format other = f;
  other.integer_dot = false;
  CHECK(fingerprint(std::span(&f, 1)) != fingerprint(std::span(&other, 1)));
  const auto refused = [&](const kv_format& bad) {
    const status got = validate(bad, s, 64);
    CHECK(got.code == errc::unsupported);
    CHECK(got.field == std::string_view("integer_dot"));
    CHECK(got.value == 1);
  };
  const auto with_k = [&](side_format k) {
    kv_format out = f;
    out.k = k;
    return out;
  };
  refused(with_k({.codes = code::e4m3}));
  refused(with_k({}));
  refused(with_k(integers(code::int8, scale_axis::token, 0, false)));
  refused(with_k(integers(code::int8, scale_axis::channel, 16, false)));
  CHECK(validate(with_k(integers(code::int2, scale_axis::head, 16, true)), s, 64));
  CHECK(validate(with_k(integers(code::int4, scale_axis::channel, 32, true)), s, 64));
  other = f;
  other.k_before_rope = true;
  refused(other);

  const auto made = host_planes::create(
      {.shape = s, .block_size = 64, .blocks = 2, .formats = std::span(&f, 1), .open_blocks = 1});
  REQUIRE(made);
  kvc_kv kv = made->layer(0);
  CHECK(kv.integer_dot == 1);
  kv.integer_dot = 0;
  CHECK(kvc_layout(&kv) != made->layer(0).layout);
  const auto checked = [&](auto edit) {
    kvc_kv bad = made->layer(0);
    edit(bad);
    kvc_plan_in in{};
    in.struct_size = sizeof in;
    in.kv = &bad;
    in.q_heads = 2;
    in.max_q = 1;
    kvc_plan plan{};
    plan.struct_size = sizeof plan;
    kvc_error e{};
    const kvc_status got = kvc_cpu_plan(&in, &plan, &e);
    return std::pair(got, e.field);
  };
  using answer = std::pair<kvc_status, int32_t>;
  const kvc_rope rope{};
  CHECK(checked([](kvc_kv&) {}).first == KVC_OK);
  CHECK(checked([](kvc_kv& k) { k.integer_dot = 2; }) == answer(KVC_BAD_ARGUMENT, KVC_FIELD_INTEGER_DOT));
  CHECK(checked([](kvc_kv& k) { k.reserved = 1; }) == answer(KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED));
  CHECK(checked([](kvc_kv& k) { k.k.scale_group = 16; }) == answer(KVC_UNSUPPORTED, KVC_FIELD_INTEGER_DOT));
  CHECK(checked([](kvc_kv& k) { k.k.scale_kind = KVC_SCALE_TOKEN, k.k.scale_group = 64; }) ==
        answer(KVC_UNSUPPORTED, KVC_FIELD_INTEGER_DOT));
  CHECK(checked([&](kvc_kv& k) { k.k_rope = &rope; }) == answer(KVC_UNSUPPORTED, KVC_FIELD_INTEGER_DOT));
  CHECK(checked([](kvc_kv& k) { k.k.type = KVC_E5M2, k.k.zero = nullptr; }) ==
        answer(KVC_UNSUPPORTED, KVC_FIELD_INTEGER_DOT));
}
