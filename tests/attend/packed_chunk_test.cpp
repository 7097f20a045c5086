// SPDX-License-Identifier: Apache-2.0
// A text computed in one piece, in chunks of any size, token by token, alone and beside others: the same
// bits, because which slots a query reads packed follows from its place in the text alone. What was not
// written yet, and what has been sealed and left, is NaN.
#include <catch2/catch.hpp>
#include <numeric>

#include "packed_world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// What a text's rows gave, and what its keys got of them.
struct outcome {
  std::vector<float> o, lse;
  std::vector<float> sums[6];  // weight, square, hit; of query heads, then of kv heads
};

bool same(const outcome& a, const outcome& b) {
  bool same = same_bits(a.o, b.o) && same_bits(a.lse, b.lse);
  for (size_t i = 0; i < 6; ++i) same = same && same_bits(a.sums[i], b.sums[i]);
  return same;
}

/// Computes the text of sequence `s` in pieces of `chunk` rows. `queries`: all of its rows.
outcome compute(packed_world& w, int32_t s, const packed_rows& queries, int32_t chunk, packed_call c,
                bool scores, bool stored) {
  const packed_shape& g = w.geo;
  const int32_t length = w.length(size_t(s));
  outcome out;
  for (size_t i = 0; i < 6; ++i) out.sums[i].assign(size_t((i < 3 ? g.q_heads() : g.heads) * length), 0.0f);
  for (int32_t first = 0; first < length; first += chunk) {
    const int32_t last = std::min(first + chunk, length);
    w.append(size_t(s), first, last);
    const int32_t border = w.border(last - 1);
    w.seal(size_t(s), border);
    packed_rows q;
    q.sequence = s;
    q.positions = range(first, last);
    q.borders.assign(queries.borders.begin() + first, queries.borders.begin() + last);
    const int64_t row = int64_t{g.q_heads()} * g.dim_k;
    q.values.assign(queries.values.begin() + first * row, queries.values.begin() + last * row);
    q.kv_len = last;
    packed_batch b;
    w.make(std::span(&q, 1), false, b);
    c.scores = stored;
    const packed_answer a = w.attend(false, b, c);
    out.o.insert(out.o.end(), a.o.begin(), a.o.end());
    out.lse.insert(out.lse.end(), a.lse.begin(), a.lse.end());
    const std::vector<float> least(size_t((last - first) * g.heads), 0.01f);
    for (size_t i = 0; i < 6 && scores; ++i) {
      kvc_score what = dense_score(int32_t(i % 3), out.sums[i].data(), length, nullptr, i >= 3);
      w.add_scores(b, c, what, a, stored, [&](kvc_score& k) {
        if (k.kind == KVC_SCORE_HIT) k.least = least.data();
      });
    }
    w.forget_open(size_t(s), border);
  }
  return out;
}

packed_shape small_shape(std::mt19937& random) {
  packed_shape g = random_packed_shape(random);
  g.dim_k = g.dim_v = pick(random, {64, 32, 8});
  g.heads = 2;
  g.group = pick(random, {1, 2, 3});
  g.f.k = random_side(random, g.dim_k, g.block, true);
  g.f.v = random_side(random, g.dim_v, g.block, false);
  return g;
}

packed_rows all_rows(packed_world& w, int32_t s) {
  return w.ask(s, range(0, w.length(size_t(s))));
}

}  // namespace

TEST_CASE("a text packed on the way gives the same bits in any chunks", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed chunks", 67)));
  for (const int32_t block : {32, 64, 128}) {
    for (const int32_t residual : {0, 1, block / 2, block, block + 3}) {
      if (effort(100) < 100 && residual != 1 && residual != block + 3) continue;
      packed_shape g = small_shape(random);
      g.block = block;
      g.f.k = random_side(random, g.dim_k, block, true);
      g.f.v = random_side(random, g.dim_v, block, false);
      g.f.residual = residual;
      const auto seed = static_cast<uint32_t>(random());
      const std::vector<int32_t> length{3 * block + 40};
      packed_call c;
      packed_world whole(g, length, seed);
      const packed_rows queries = all_rows(whole, 0);
      const outcome want = compute(whole, 0, queries, length[0], c, true, true);
      INFO(text_of(g));
      for (const int32_t t : targets()) {
        c.target = t;
        for (const int32_t chunk : {1, 7, block, 64, 100, length[0]}) {
          if (t == KVC_TARGET_SCALAR && chunk != 100) continue;
          if (chunk == 1 && effort(100) < 100 && block != 32) continue;
          for (const bool stored : {false, true}) {
            packed_world w(g, length, seed);
            INFO(kvc_target_text(t) << " chunk " << chunk << (stored ? " stored" : ""));
            REQUIRE(same(compute(w, 0, queries, chunk, c, true, stored), want));
          }
        }
      }
    }
  }
}

TEST_CASE("a long text packed on the way gives the same bits in chunks and on threads", "[packed][threads]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed long", 71)));
  for (int64_t round = 0; round < effort(3); ++round) {
    packed_shape g = small_shape(random);
    g.f.residual = pick(random, {0, 5, g.block});
    const auto seed = static_cast<uint32_t>(random());
    const std::vector<int32_t> length{1300};
    packed_call c;
    packed_world whole(g, length, seed);
    const packed_rows queries = all_rows(whole, 0);
    const outcome want = compute(whole, 0, queries, length[0], c, true, true);
    INFO(text_of(g));
    for (const int32_t width : {1, 2}) {
      const thread_executor threads(width);
      c.width = width;
      c.executor = threads.get();
      for (const int32_t chunk : {50, 333}) {
        packed_world w(g, length, seed);
        REQUIRE(same(compute(w, 0, queries, chunk, c, true, width == 1), want));
      }
    }
  }
}

TEST_CASE("eight packed texts in one call give what each gives alone", "[packed][threads]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed batch", 73)));
  for (int64_t round = 0; round < effort(6); ++round) {
    const packed_shape g = small_shape(random);
    std::vector<int32_t> lengths;
    for (int i = 0; i < 8; ++i) lengths.push_back(1 + int32_t(random() % 200));
    packed_world w(g, lengths, static_cast<uint32_t>(random()));
    w.fill();
    std::vector<packed_rows> asked;
    packed_answer alone;
    packed_call c;
    for (int32_t s = 0; s < 8; ++s) {
      asked.push_back(s % 2 == 0 ? all_rows(w, s) : w.ask(s, {lengths[size_t(s)] - 1}));
      const packed_answer one = w.attend(false, std::span(&asked.back(), 1), c);
      alone.o.insert(alone.o.end(), one.o.begin(), one.o.end());
      alone.lse.insert(alone.lse.end(), one.lse.begin(), one.lse.end());
    }
    for (const int32_t width : {1, 2}) {
      const thread_executor threads(width);
      c.width = width;
      c.executor = threads.get();
      INFO(text_of(g) << " width " << width);
      REQUIRE(w.attend(false, asked, c) == alone);
    }
  }
}

TEST_CASE("a layer of a packed group that packs nothing gives the same bits in any chunks", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed mixed", 79)));
  for (int64_t round = 0; round < effort(6); ++round) {
    packed_shape g = small_shape(random);
    g.f.k = g.f.v = side_format{};
    const auto seed = static_cast<uint32_t>(random());
    const std::vector<int32_t> length{2 * g.block + 50};
    packed_call c;
    packed_world whole(g, length, seed);
    const packed_rows queries = all_rows(whole, 0);
    const outcome want = compute(whole, 0, queries, length[0], c, true, true);
    INFO(text_of(g));
    for (const int32_t t : targets()) {
      c.target = t;
      for (const int32_t chunk : {1, 20, g.block}) {
        packed_world w(g, length, seed);
        INFO(kvc_target_text(t) << " chunk " << chunk);
        REQUIRE(same(compute(w, 0, queries, chunk, c, true, chunk == 20), want));
      }
    }
  }
}

TEST_CASE("what packed keys got is the sum of their weights in double", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed scores", 83)));
  for (int64_t round = 0; round < effort(10); ++round) {
    packed_shape g = small_shape(random);
    packed_world w(g, {150}, static_cast<uint32_t>(random()));
    w.fill();
    const std::vector<packed_rows> asked{w.ask(0, range(100, 150))};
    for (const int32_t t : targets()) {
      packed_call c;
      c.target = t;
      c.scores = true;
      packed_batch b;
      w.make(asked, false, b);
      const packed_answer a = w.attend(false, b, c);
      std::vector<float> sum(size_t(g.q_heads() * 150), 0.0f);
      w.add_scores(b, c, dense_score(KVC_SCORE_WEIGHT, sum.data(), 150, nullptr), a, false,
                   [](kvc_score&) {});
      // Attention has been compared with double: its scores and lse2 are the weights.
      for (int32_t h = 0; h < g.q_heads(); ++h) {
        double all = 0;
        for (size_t j = 0; j < 150; ++j) {
          double right = 0;
          for (size_t r = 0; r < 50; ++r) {
            const size_t at = r * size_t(g.q_heads()) + size_t(h);
            right += std::exp2(double{a.scores[at * 150 + j]} - a.lse[at]);
          }
          all += sum[size_t(h) * 150 + j];
          CHECK(std::fabs(sum[size_t(h) * 150 + j] - right) < 1e-5 * (1 + right));
        }
        CHECK(std::fabs(all - 50) < 1e-3);  // every row gives 1
      }
    }
  }
}

TEST_CASE("a key that is away in the form a row reads gets nothing of that row", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed away", 87)));
  for (const int32_t residual : {0, 16, 96}) {  // with 96, tiles below the first row have keys of both forms
    packed_shape g = small_shape(random);
    g.block = 32;
    g.f.k = random_side(random, g.dim_k, 32, true);
    g.f.v = random_side(random, g.dim_v, 32, false);
    g.f.residual = residual;
    packed_world w(g, {8 * g.block}, static_cast<uint32_t>(random()));
    w.fill();
    const std::vector<packed_rows> asked{w.ask(0, range(5 * g.block, 8 * g.block))};
    const int32_t length = asked[0].kv_len;
    for (int32_t i = 0; i < 12; ++i) {
      const int32_t away = 1 + i / 2;
      const bool open = i % 2 == 0;
      INFO(text_of(g) << " block " << away << (open ? " open" : " packed"));
      for (const int32_t t : targets()) {
        if (t == KVC_TARGET_SCALAR && i % 4 != 0) continue;
        packed_call c;
        c.target = t;
        c.scores = true;
        packed_batch b;
        w.make(asked, false, b);
        int32_t& id = (open ? b.open : b.table)[size_t(away)];
        if (id < 0 || id >= w.kv.blocks) continue;  // nobody reads this form
        id = -1;
        packed_answer a = w.attend(false, b, c);
        // What a row does not see is left as it was, or -infinity: as a score, 777 would be a weight of 1.
        for (float& x : a.scores) x = x == -INFINITY ? 777.0f : x;
        std::vector<float> sum[2];
        for (const bool stored : {false, true}) {
          sum[stored].assign(size_t(g.q_heads() * length), 0.0f);
          w.add_scores(b, c, dense_score(KVC_SCORE_WEIGHT, sum[stored].data(), length, nullptr), a, stored,
                       [](kvc_score&) {});
        }
        INFO(kvc_target_text(t));
        REQUIRE(same_bits(sum[0], sum[1]));
      }
    }
  }
}

TEST_CASE("rows of a draft tree add to packed keys in their order", "[packed]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("packed tree", 89)));
  for (int64_t round = 0; round < effort(20); ++round) {
    packed_shape g = small_shape(random);
    g.f.residual = 0;
    packed_world w(g, {4 * g.block}, static_cast<uint32_t>(random()));
    w.fill();
    // Places in the text go up and down, and with them the borders.
    std::vector<int32_t> positions;
    for (int i = 0; i < 40; ++i)
      positions.push_back(g.block - 1 + int32_t(random() % uint32_t(3 * g.block + 1)));
    packed_rows q = w.ask(0, positions);
    q.kv_len = 4 * g.block;
    packed_call c;
    c.scores = true;
    INFO(text_of(g));
    for (const int32_t t : targets()) {
      c.target = t;
      packed_batch b;
      w.make(std::span(&q, 1), false, b);
      const packed_answer a = w.attend(false, b, c);
      std::vector<float> together[2], one_by_one;
      for (const bool stored : {false, true}) {
        together[stored].assign(size_t(g.q_heads() * q.kv_len), 0.0f);
        w.add_scores(b, c, dense_score(KVC_SCORE_WEIGHT, together[stored].data(), q.kv_len, nullptr), a,
                     stored, [](kvc_score&) {});
      }
      one_by_one.assign(together[0].size(), 0.0f);
      for (size_t r = 0; r < positions.size(); ++r) {
        packed_rows row;
        row.positions = {q.positions[r]};
        row.borders = {q.borders[r]};
        row.kv_len = q.kv_len;
        const size_t n = size_t(g.q_heads() * g.dim_k);
        row.values.assign(q.values.begin() + int64_t(r * n), q.values.begin() + int64_t((r + 1) * n));
        packed_batch single;
        w.make(std::span(&row, 1), false, single);
        const packed_answer own = w.attend(false, single, c);
        w.add_scores(single, c, dense_score(KVC_SCORE_WEIGHT, one_by_one.data(), q.kv_len, nullptr), own,
                     false, [](kvc_score&) {});
      }
      REQUIRE(same_bits(together[1], one_by_one));
      REQUIRE(same_bits(together[0], one_by_one));
    }
  }
}
