// SPDX-License-Identifier: Apache-2.0
// Attention that reads codes, against attention over f32 planes with the numbers they stand for, bit by bit,
// and against double.
#include <catch2/catch.hpp>
#include <numeric>

#include "packed_world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// All ways to pack a side, in an order in which neighbours differ.
std::vector<side_format> all_sides(bool keys, int32_t block, int32_t dim) {
  std::vector<side_format> all;
  for (int32_t c = int32_t(code::e4m3); c <= int32_t(code::int2); ++c) {
    for (int32_t a = 0; a < 4; ++a) {
      for (const bool symmetric : {false, true}) {
        for (const int32_t group : {0, 8, 16, 24, 32, 64}) {
          side_format f{.codes = code(c), .axis = scale_axis(a), .group_size = group, .symmetric = symmetric};
          if (is_fp8(f.codes) && symmetric) continue;
          if (a < 2 && group != 0) continue;
          if (detail::validate_side(f, dim, block)) all.push_back(f);
        }
      }
    }
  }
  std::mt19937 random(keys ? 1 : 2);
  std::shuffle(all.begin(), all.end(), random);
  return all;
}

bool sees(const kvc_softmax& s, int64_t q, int64_t k) {
  return (s.causal == 0 || k <= q) && (s.window == 0 || q - k < s.window);
}

/// On every target the bits of the plain planes; the scalar twin's are within 1e-5 of double.
void check_everywhere(const packed_world& w, const std::vector<packed_rows>& asked, packed_call c,
                      bool in_double = true) {
  INFO(text_of(w.geo));
  packed_answer first;
  for (const int32_t t : targets()) {
    c.target = t;
    const packed_answer got = w.attend(false, asked, c), plain = w.attend(true, asked, c);
    INFO(kvc_target_text(t));
    REQUIRE(got == plain);
    if (first.o.empty()) first = got;
    REQUIRE(got == first);
  }
  size_t row = 0;
  for (size_t i = 0; i < asked.size() && in_double; ++i) {
    const size_t at = row * size_t(w.geo.q_heads());
    row += asked[i].positions.size();
    const double e = w.error(
        asked[i], c, std::span(first.o).subspan(at * size_t(w.geo.dim_v)), std::span(first.lse).subspan(at),
        [&](int32_t r, int32_t j) { return sees(c.softmax, asked[i].positions[size_t(r)], j); });
    CHECK(e < 1);
  }
}

}  // namespace

TEST_CASE("every format is read as the numbers its codes stand for", "[packed]") {
  const int32_t block = 64;
  const std::vector<side_format> keys = all_sides(true, block, 80), values = all_sides(false, block, 80);
  const auto n = static_cast<size_t>(effort(static_cast<int64_t>(keys.size())));
  for (size_t i = 0; i < n; ++i) {
    packed_shape g;
    g.f.k = keys[i];
    g.f.v = values[i % values.size()];
    g.f.exempt = int32_t(i % 3);
    g.heads = 2;
    g.group = 3;
    g.dim_k = g.dim_v = 80;
    g.block = block;
    packed_world w(g, {150}, static_cast<uint32_t>(i));
    w.fill();
    packed_call c;
    c.scores = true;
    check_everywhere(w, {w.ask(0, {149}), w.ask(0, {63, 64, 127})}, c);
  }
}

TEST_CASE("packed planes of any geometry are read as their numbers", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed attend", 41)));
  for (int64_t round = 0; round < effort(150); ++round) {
    const packed_shape g = random_packed_shape(random);
    const std::vector<int32_t> lengths{1 + int32_t(random() % 330), int32_t(random() % 100) + 1};
    packed_world w(g, lengths, static_cast<uint32_t>(random()));
    w.fill();
    std::vector<float> sinks(size_t(g.q_heads()), 0.5f);
    packed_call c;
    c.softmax = causal_softmax(static_cast<float>(1 / std::sqrt(double(g.dim_k))));
    c.softmax.window = random() % 3 == 0 ? 1 + int32_t(random() % 100) : 0;
    c.softmax.soft_cap = random() % 4 == 0 ? 5.0f : 0;
    c.softmax.sink_logit = random() % 4 == 0 ? sinks.data() : nullptr;
    c.q_type = pick(random, {element::f32, element::f16, element::bf16});
    c.scores = random() % 2 == 0;
    std::vector<packed_rows> asked;
    for (int32_t s = 0; s < 2; ++s) {
      const int32_t len = lengths[size_t(s)], rows = 1 + int32_t(random() % 5);
      asked.push_back(w.ask(s, range(std::max(0, len - rows), len)));
    }
    asked.push_back(w.ask(0, {int32_t(random() % uint32_t(lengths[0]))}));
    check_everywhere(w, asked, c);
  }
}

TEST_CASE("lengths around every block, tile, run and split border are read right", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed lengths", 43)));
  for (const int32_t block : {32, 64, 128}) {
    for (int64_t turn = 0; turn < effort(4); ++turn) {
      packed_shape g = random_packed_shape(random);
      g.block = block;
      g.dim_k = g.dim_v = 64;
      g.heads = 1 + int32_t(turn % 2);
      g.group = pick(random, {1, 3});
      g.f.k = random_side(random, 64, block, turn == 3);
      g.f.v = random_side(random, 64, block, false);
      g.f.residual = std::array{0, 1, block / 2, block + 3}[size_t(turn)];
      packed_world w(g, {1280}, static_cast<uint32_t>(random()));
      w.fill();
      std::vector<packed_rows> asked;
      for (const int32_t edge : {0, 32, 64, 96, 128, 192, 256, 960, 1024, 1056, 1088, 1152}) {
        for (const int32_t by : {-1, 0, 1}) {
          if (edge + by < 1) continue;
          asked.push_back(w.ask(0, {edge + by - 1}));
          // All of it packed: the length ends inside a sealed block.
          if (by == 0 || edge % block != 0) continue;
          asked.push_back(w.ask(0, {edge + by - 1}));
          asked.back().borders[0] = edge + by;
        }
      }
      packed_call c;
      check_everywhere(w, asked, c, turn == 0);
    }
  }
}

TEST_CASE("threads, and how work is dealt out, do not change what packed planes give", "[packed][threads]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed threads", 47)));
  for (int64_t round = 0; round < effort(10); ++round) {
    packed_shape g = random_packed_shape(random);
    g.heads = 4;
    g.dim_k = g.dim_v = 64;
    g.f.k = random_side(random, 64, g.block, true);
    g.f.v = random_side(random, 64, g.block, false);
    packed_world w(g, {1500, 70}, static_cast<uint32_t>(random()));
    w.fill();
    const std::vector<packed_rows> asked{w.ask(0, {1499}), w.ask(1, {69})};
    const std::vector<packed_rows> chunk{w.ask(0, range(1000, 1050))};
    for (const std::vector<packed_rows>& rows : {asked, chunk}) {
      packed_call c;
      const packed_answer want = w.attend(true, rows, c);
      for (const int32_t width : {1, 2, 7}) {
        const thread_executor threads(width);
        c.width = width;
        c.executor = width == 1 ? nullptr : threads.get();
        INFO(text_of(g) << " width " << width);
        REQUIRE(w.attend(false, rows, c) == want);
      }
    }
  }
}

TEST_CASE("absent blocks, empty sequences and rows that see nothing", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed absent", 53)));
  for (int64_t round = 0; round < effort(40); ++round) {
    packed_shape g = random_packed_shape(random);
    g.dim_k = g.dim_v = 64;
    g.f.k = random_side(random, 64, g.block, true);
    g.f.v = random_side(random, 64, g.block, false);
    packed_world w(g, {400}, static_cast<uint32_t>(random()));
    w.fill();
    std::vector<packed_rows> asked{w.ask(0, {0}), w.ask(0, {10, 200, 399}), w.ask(0, {399}), w.ask(0, {399})};
    asked[0].kv_len = 0;
    asked[0].borders[0] = 0;
    std::vector<bool> absent(size_t(w.columns));
    for (size_t c = 0; c < absent.size(); ++c) absent[c] = random() % 2 == 0;
    packed_call call;
    call.scores = true;
    call.softmax.window = random() % 2 == 0 ? 70 : 0;
    packed_answer first;
    for (const int32_t t : targets()) {
      call.target = t;
      packed_answer both[2];
      for (const bool plain : {false, true}) {
        packed_batch b;
        w.make(asked, plain, b);
        for (size_t c = 0; c < absent.size(); ++c) {
          const bool used = int32_t(c) * g.block < 400;
          // Of sequence 1 some blocks are away, of sequence 2 all.
          if (absent[c] && used) b.table[absent.size() + c] = b.open[absent.size() + c] = -1;
          if (used) b.table[2 * absent.size() + c] = b.open[2 * absent.size() + c] = -1;
        }
        both[plain] = w.attend(plain, b, call);
      }
      INFO(text_of(g) << " " << kvc_target_text(t));
      REQUIRE(both[0] == both[1]);
      if (first.o.empty()) first = both[0];
      REQUIRE(both[0] == first);
    }
    const size_t heads = size_t(g.q_heads());
    const auto rows = [&](size_t at, size_t n) {
      return std::pair(std::span(first.o).subspan(at * heads * 64, n * heads * 64),
                       std::span(first.lse).subspan(at * heads, n * heads));
    };
    const auto seen = [&](size_t i, int32_t r, int32_t j) {
      return sees(call.softmax, asked[i].positions[size_t(r)], j);
    };
    const auto none = rows(0, 1), some = rows(1, 3), nothing = rows(4, 1);
    CHECK(w.error(asked[0], call, none.first, none.second, [](int32_t, int32_t) { return false; }) < 1);
    CHECK(w.error(asked[1], call, some.first, some.second,
                  [&](int32_t r, int32_t j) { return seen(1, r, j) && !absent[size_t(j / g.block)]; }) < 1);
    CHECK(w.error(asked[2], call, nothing.first, nothing.second, [](int32_t, int32_t) { return false; }) < 1);
  }
}

TEST_CASE("a block dropped from the table equals a block that is masked", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed drop", 59)));
  for (int64_t round = 0; round < effort(30); ++round) {
    packed_shape g = random_packed_shape(random);
    g.dim_k = g.dim_v = 64;
    g.block = 64;  // tiles keep their keys when a whole tile goes
    g.f.k = random_side(random, 64, g.block, true);
    g.f.v = random_side(random, 64, g.block, false);
    packed_world w(g, {500}, static_cast<uint32_t>(random()));
    w.fill();
    const std::vector<packed_rows> asked{w.ask(0, {499})};
    const int32_t sealed = asked[0].borders[0];
    std::vector<bool> gone(size_t(w.columns));
    for (int32_t c = 1; c < sealed / 64; ++c) gone[size_t(c)] = random() % 2 == 0;
    packed_batch masked, dropped;
    w.make(asked, false, masked);
    w.make(asked, false, dropped);
    std::vector<int32_t> table, open;
    for (int32_t c = 0; c < w.columns; ++c) {
      if (gone[size_t(c)]) {
        masked.table[size_t(c)] = -1;
        continue;
      }
      table.push_back(dropped.table[size_t(c)]);
      open.push_back(dropped.open[size_t(c)]);
      for (int32_t t = 0; t < 64; ++t) dropped.k_pos.push_back(c * 64 + t);
    }
    const auto less = int32_t(std::count(gone.begin(), gone.end(), true)) * 64;
    dropped.table = table;
    dropped.open = open;
    dropped.b.table_columns = int32_t(table.size());
    dropped.b.k_pos_stride = int32_t(dropped.k_pos.size());
    dropped.lens[0] -= less;
    dropped.sealed[0] -= less;
    dropped.borders[0] -= less;
    for (const int32_t t : targets()) {
      packed_call c;
      c.target = t;
      INFO(text_of(g) << " " << kvc_target_text(t));
      REQUIRE(w.attend(false, dropped, c) == w.attend(false, masked, c));
    }
  }
}

TEST_CASE("each head may have a length of its own over packed planes", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed heads", 61)));
  for (int64_t round = 0; round < effort(20); ++round) {
    packed_shape g = random_packed_shape(random);
    g.heads = 3;
    g.dim_k = g.dim_v = 64;
    g.f.k = random_side(random, 64, g.block, true);
    g.f.v = random_side(random, 64, g.block, false);
    packed_world w(g, {300}, static_cast<uint32_t>(random()));
    w.fill();
    const std::vector<packed_rows> asked{w.ask(0, {280, 290, 299})};
    const std::vector<int32_t> lens{1 + int32_t(random() % 300), 300, int32_t(random() % 300)};
    packed_call c;
    for (const int32_t t : targets()) {
      c.target = t;
      packed_answer both[2];
      for (const bool plain : {false, true}) {
        packed_batch b;
        w.make(asked, plain, b);
        b.lens = lens;
        b.b.kv_len_head_stride = 1;
        both[plain] = w.attend(plain, b, c);
      }
      INFO(text_of(g) << " " << kvc_target_text(t));
      REQUIRE(both[0] == both[1]);
      for (size_t at = 0; at < both[0].lse.size(); ++at) {
        const size_t head = at % size_t(g.q_heads()) / size_t(g.group);
        CHECK((lens[head] == 0) == (both[0].lse[at] == -INFINITY));
      }
    }
  }
}

TEST_CASE("a packed block is unpacked to the numbers attention reads", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed unpack", 127)));
  for (int64_t round = 0; round < effort(100); ++round) {
    packed_shape g = random_packed_shape(random);
    packed_world w(g, {2 * g.block}, static_cast<uint32_t>(random()));
    w.fill();
    w.exempt_table[0] = -1;  // exempt slots come out as their codes
    const std::vector<int32_t> ids{w.id(0, 1), w.id(0, 0)};
    const size_t k_size = size_t(g.block * g.dim_k), v_size = size_t(g.block * g.dim_v);
    INFO(text_of(g));
    for (const int32_t t : targets()) {
      const auto head = int32_t(random() % uint32_t(g.heads));
      std::vector<float> k(2 * k_size + 3, 77.0f), v(2 * v_size + 5, 77.0f), k_right = k, v_right = v;
      for (int32_t i = 0; i < 2; ++i) {
        const std::vector<float> keys = w.sealed_values(true, 0, 1 - i);
        const std::vector<float> values = w.sealed_values(false, 0, 1 - i);
        for (int32_t s = 0; s < g.block; ++s) {
          for (int32_t d = 0; d < g.dim_k; ++d) {
            k_right[size_t(i) * (k_size + 3) + size_t(d * g.block + s)] =
                keys[size_t((head * g.block + s) * g.dim_k + d)];
          }
        }
        std::copy_n(values.begin() + int64_t(size_t(head) * v_size), v_size,
                    v_right.begin() + int64_t(size_t(i) * (v_size + 5)));
      }
      REQUIRE(kvc_cpu_unpack(&w.kv, ids.data(), 2, head, k.data(), int64_t(k_size + 3), v.data(),
                             int64_t(v_size + 5), t, nullptr) == KVC_OK);
      INFO(kvc_target_text(t));
      REQUIRE(same_bits(k, k_right));
      REQUIRE(same_bits(v, v_right));
    }
    std::vector<float> k(k_size, 77.0f);
    const auto fails = [&](int32_t id, int32_t n, int32_t head, int32_t target, int32_t field) {
      kvc_error e{};
      CHECK(kvc_cpu_unpack(&w.kv, &id, n, head, k.data(), 0, nullptr, 0, target, &e) != KVC_OK);
      CHECK(e.field == field);
      CHECK(k[0] == 77.0f);
    };
    fails(ids[0], -1, 0, KVC_TARGET_BEST, KVC_FIELD_N);
    fails(ids[0], 1, g.heads, KVC_TARGET_BEST, KVC_FIELD_KV_HEADS);
    fails(ids[0], 1, -1, KVC_TARGET_BEST, KVC_FIELD_KV_HEADS);
    fails(w.kv.blocks, 1, 0, KVC_TARGET_BEST, KVC_FIELD_BLOCKS);
    fails(-1, 1, 0, KVC_TARGET_BEST, KVC_FIELD_BLOCKS);
    fails(ids[0], 1, 0, 99, KVC_FIELD_TARGET);
  }
}
