// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <numeric>

#include "world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

bool sees(const kvc_softmax& s, int64_t q, int64_t k) {
  return (s.causal == 0 || k <= q) && (s.window == 0 || q - k < s.window);
}

/// Compares with the oracle. Outputs are means of values of about 1, so one tolerance serves all of them; a
/// lse is as large as the scores, and its tolerance follows from them.
void check_against_oracle(const world& w, const std::vector<query>& qs, const std::vector<int32_t>& lens,
                          const kvc_softmax& s, const call& c, const answer& a) {
  std::vector<double> o, lse, rounding;
  for (size_t i = 0; i < qs.size(); ++i) {
    w.oracle(
        qs[i], lens[i], s, c.q_type,
        [&](int32_t r, int32_t j) { return sees(s, qs[i].positions[static_cast<size_t>(r)], j); }, o, lse,
        &rounding);
  }
  const double grain = c.out_type == element::f16 ? 2e-3 : c.out_type == element::bf16 ? 2e-2 : 0;
  CHECK(deviation(a.o, o) < 2e-5 + grain);
  if (c.want_lse) {
    // In units of what rounding explains.
    std::vector<float> off;
    for (size_t i = 0; i < lse.size(); ++i) {
      const double by = std::fabs(a.lse[i] - lse[i]);
      off.push_back(a.lse[i] == lse[i] ? 0.0f : static_cast<float>(by / rounding[i]));
    }
    CHECK(deviation(off, std::vector<double>(off.size())) < 1);
  }
}

geometry random_geometry(std::mt19937& random) {
  geometry g;
  g.heads = pick(random, {1, 2, 3, 8});
  g.group = pick(random, {1, 1, 2, 3, 4, 5, 7, 8});
  g.dim_k = pick(random, {64, 64, 80, 96, 128, 192, 256, 8, 24});
  g.dim_v = random() % 2 == 0 ? g.dim_k : pick(random, {64, 72, 80, 128, 256, 8});
  g.block = pick(random, {8, 16, 16, 32, 64, 128, 1, 2, 4, 256});
  g.type = pick(random, {element::f32, element::f16, element::bf16});
  g.order = pick(random, {k_order::transposed, k_order::row_major});
  g.alias = g.dim_v <= g.dim_k && random() % 6 == 0;
  return g;
}

}  // namespace

TEST_CASE("every target gives the scalar twin's bits and double's values on random shapes", "[attend]") {
  const auto seed = static_cast<uint32_t>(test_seed("attend", 11));
  const auto all = targets();
  std::mt19937 random(seed);
  for (int64_t round = 0; round < effort(500); ++round) {
    const geometry g = random_geometry(random);
    std::vector<int32_t> lengths(1 + random() % 3);
    for (auto& n : lengths) n = pick(random, {0, 1, 7, 8, 9, 31, 63, 64, 65, 100, 127, 128, 129, 200, 300});
    if (random() % 12 == 0) lengths[0] = pick(random, {1023, 1024, 1025, 1100, 2049});
    world w(g, lengths, static_cast<uint32_t>(random()));
    w.append_all();
    kvc_softmax s = causal_softmax(pick(random, {0.125f, 0.3f, 1.0f / 16}));
    s.causal = random() % 4 != 0;
    if (random() % 3 == 0) s.window = pick(random, {1, 2, 16, 63, 64, 65, 200});
    if (random() % 3 == 0) s.soft_cap = pick(random, {0.5f, 5.0f, 50.0f});
    const auto sinks = normal(random, static_cast<size_t>(g.q_heads()));
    if (random() % 3 == 0) s.sink_logit = sinks.data();
    std::vector<query> qs;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const int32_t rows = std::min(lengths[i], pick(random, {1, 1, 2, 5, 20}));
      qs.push_back(w.ask(static_cast<int32_t>(i), range(lengths[i] - rows, lengths[i])));
    }
    call c;
    c.width = pick(random, {1, 1, 2, 7});  // plans of other widths cut the work elsewhere
    c.q_type = pick(random, {element::f32, element::f32, element::f16, element::bf16});
    c.out_type = pick(random, {element::f32, element::f32, element::f16, element::bf16});
    c.target = KVC_TARGET_SCALAR;
    INFO("seed " << seed << " round " << round << " dims " << g.dim_k << "/" << g.dim_v << " heads "
                 << g.heads << "x" << g.group << " block " << g.block << " type " << int(g.type)
                 << " row-major " << int(g.order) << " alias " << g.alias << " window " << s.window << " cap "
                 << s.soft_cap << " first length " << lengths[0]);
    const answer twin = w.attend(qs, lengths, s, c);
    check_against_oracle(w, qs, lengths, s, c, twin);
    for (const int32_t t : all) {
      INFO(kvc_target_text(t));
      c.target = t;
      c.width = pick(random, {1, 2, 7});
      REQUIRE(same_bits(w.attend(qs, lengths, s, c), twin));
    }
  }
}

TEST_CASE("block size and order of K change no bit at any length around an edge", "[attend]") {
  const auto all = targets();
  for (const element type : {element::f32, element::f16, element::bf16}) {
    for (const int32_t len :
         {0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 1023, 1024, 1025, 2048, 2049}) {
      if (len > 1000 && effort(100) < 100 && type != element::f16) continue;
      answer first;
      for (const int32_t block : {8, 16, 32, 64, 128}) {
        for (const k_order order : {k_order::transposed, k_order::row_major}) {
          world w({.group = 3, .block = block, .type = type, .order = order}, {len}, 5);
          w.append_all();
          w.random.seed(99);  // the same queries whatever the block size drew before
          const std::vector<query> qs{w.ask(0, {len - 1})};
          for (const int32_t t : all) {
            if (t == KVC_TARGET_SCALAR && (block != 16 || order != k_order::transposed)) continue;
            call c;
            c.target = t;
            const answer a = w.attend(qs, {len}, causal_softmax(0.125f), c);
            if (first.o.empty()) first = a;
            INFO("type " << int(type) << " length " << len << " block " << block << " "
                         << kvc_target_text(t));
            REQUIRE(same_bits(a, first));
            if (len == 0) {
              CHECK(std::all_of(a.o.begin(), a.o.end(), [](float x) { return x == 0 && !std::signbit(x); }));
              CHECK(std::all_of(a.lse.begin(), a.lse.end(), [](float x) { return x == -INFINITY; }));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a prompt gives the same bits token by token, in any chunks and in one shot", "[attend]") {
  const int32_t len = 150;
  for (const int32_t group : {1, 4}) {
    for (const element type : {element::f32, element::f16}) {
      for (const int32_t window : {0, 40}) {
        const geometry g{.heads = 2, .group = group, .dim_k = 64, .dim_v = 64, .block = 16, .type = type};
        kvc_softmax s = causal_softmax(0.125f);
        s.window = window;
        s.soft_cap = window != 0 ? 8.0f : 0.0f;
        answer whole;
        for (const int32_t chunk : {len, 1, 3, 7, 64, 100}) {
          world w(g, {len}, 21);
          w.random.seed(4);
          const query all = w.ask(0, range(0, len));
          const size_t per_row = static_cast<size_t>(g.q_heads() * g.dim_k);
          answer joined;
          for (int32_t at = 0; at < len; at += chunk) {
            const int32_t end = std::min(at + chunk, len);
            w.append_range(0, at, end);
            query part{0,
                       range(at, end),
                       {all.values.begin() + static_cast<ptrdiff_t>(size_t(at) * per_row),
                        all.values.begin() + static_cast<ptrdiff_t>(size_t(end) * per_row)}};
            const answer a = w.attend({part}, {end}, s);
            joined.o.insert(joined.o.end(), a.o.begin(), a.o.end());
            joined.lse.insert(joined.lse.end(), a.lse.begin(), a.lse.end());
          }
          if (chunk == len) whole = joined;
          INFO("group " << group << " type " << int(type) << " window " << window << " chunk " << chunk);
          REQUIRE(same_bits(joined, whole));
        }
      }
    }
  }
}

TEST_CASE("threads, the width planned for and dealt-out splits change no bit", "[attend][threads]") {
  for (const int32_t rows : {1, 2, 40}) {
    // Rows in the middle of a text see nothing of the last two of three splits, a window nothing of the
    // first.
    for (const auto& [upto, window] : {std::pair{2500, 0}, {2500, 100}, {500, 0}}) {
      world w({.heads = 2, .group = 2, .type = element::f16}, {2500, 70}, 31);
      w.append_all();
      const std::vector<int32_t> lens{2500, 70};
      const std::vector<query> qs{w.ask(0, range(upto - rows, upto)), w.ask(1, range(70 - rows, 70))};
      kvc_softmax s = causal_softmax(0.125f);
      s.window = window;
      const float sinks[] = {0.5f, -1.0f, 2.0f, 0.0f};
      s.sink_logit = sinks;
      const answer alone = w.attend(qs, lens, s);
      for (const int32_t width : {1, 2, 3}) {
        for (const int32_t planned : {1, 2, 3, 64}) {
          const thread_executor executor(width);
          call c;
          c.width = planned;
          c.executor = executor.get();
          INFO("rows " << rows << " upto " << upto << " window " << window << " width " << width
                       << " planned " << planned);
          REQUIRE(same_bits(w.attend(qs, lens, s, c), alone));
        }
      }
    }
  }
}

TEST_CASE("append by several threads stores the same bytes as by one", "[attend][threads]") {
  for (const element type : {element::f32, element::f16}) {
    const geometry g{.heads = 3, .type = type};
    world one(g, {200}, 8), many(g, {200}, 8);
    const thread_executor executor(3);
    one.append_range(0, 0, 200);
    many.append_range(0, 0, 200, executor.get());
    REQUIRE(std::memcmp(one.planes.data(), many.planes.data(),
                        static_cast<size_t>(one.planes.size().count)) == 0);
  }
}

TEST_CASE("a sequence gives the same bits alone and among neighbours", "[attend]") {
  world w({.heads = 2, .group = 3, .type = element::bf16}, {300, 17, 0, 64, 1030}, 41);
  w.append_all();
  std::vector<query> qs;
  std::vector<int32_t> lens;
  for (int32_t s = 0; s < 5; ++s) {
    const int32_t len = w.length(static_cast<size_t>(s));
    lens.push_back(len);
    qs.push_back(w.ask(s, range(len - std::min(len, 1 + s), len)));
  }
  const answer all = w.attend(qs, lens, causal_softmax(0.125f));
  const size_t per_row = static_cast<size_t>(w.geo.q_heads() * w.geo.dim_v);
  size_t row = 0;
  for (size_t s = 0; s < qs.size(); ++s) {
    const answer alone = w.attend({qs[s]}, {lens[s]}, causal_softmax(0.125f), {.max_q = 9, .max_kv = 5000});
    const auto from = all.o.begin() + static_cast<ptrdiff_t>(row * per_row);
    INFO("sequence " << s);
    REQUIRE(same_bits(alone.o, {from, from + static_cast<ptrdiff_t>(alone.o.size())}));
    row += qs[s].positions.size();
  }
}

TEST_CASE("a key outside a row's limits is not touched, whatever it holds", "[attend]") {
  for (const int32_t t : targets()) {
    for (const int32_t group : {1, 2, 6}) {
      world w({.group = group}, {130}, 51);
      w.append_all();
      const std::vector<query> qs{w.ask(0, range(0, 130))};
      kvc_softmax s = causal_softmax(0.125f);
      s.window = 50;
      call c;
      c.target = t;
      const answer before = w.attend(qs, {130}, s, c);
      std::fill(w.keys[0].begin() + 70 * 64, w.keys[0].begin() + 71 * 64, NAN);
      std::fill(w.values[0].begin() + 70 * 64, w.values[0].begin() + 71 * 64, INFINITY);
      w.append_range(0, 70, 71);
      const answer after = w.attend(qs, {130}, s, c);
      const size_t per_row = static_cast<size_t>(w.geo.q_heads()) * 64;
      for (size_t row = 0; row < 130; ++row) {
        const bool sees_it = row >= 70 && row < 120;
        for (size_t i = row * per_row; i < (row + 1) * per_row; ++i) {
          INFO(kvc_target_text(t) << " group " << group << " row " << row);
          if (sees_it) {
            REQUIRE(std::isnan(after.o[i]));  // a poisoned key that is seen is not hidden either
          } else {
            REQUIRE(std::bit_cast<uint32_t>(after.o[i]) == std::bit_cast<uint32_t>(before.o[i]));
          }
        }
      }
    }
  }
}

TEST_CASE("absent blocks are masked keys", "[attend]") {
  for (const int32_t t : targets()) {
    for (const int32_t block : {8, 32, 128}) {
      world w({.group = 2, .block = block}, {400}, 61);
      w.append_all();
      const std::vector<query> qs{w.ask(0, {399, 10})};
      for (int32_t b = 0; b < ceil_div(400, block); b += 2) w.row_of_table(0)[b] = -1;
      kvc_softmax s = causal_softmax(0.125f);
      call c;
      c.target = t;
      const answer a = w.attend(qs, {400}, s, c);
      std::vector<double> o, lse;
      w.oracle(
          qs[0], 400, s, c.q_type,
          [&](int32_t r, int32_t j) { return j <= qs[0].positions[size_t(r)] && (j / block) % 2 != 0; }, o,
          lse);
      INFO(kvc_target_text(t) << " block " << block);
      CHECK(deviation(a.o, o) < 1e-5);
      CHECK(deviation(a.lse, lse) < 1e-5);
    }
  }
}

TEST_CASE("lengths and key positions may differ from head to head", "[attend]") {
  for (const int32_t t : targets()) {
    world w({.heads = 2, .group = 2}, {90, 200}, 71);
    w.append_all();
    const std::vector<query> qs{w.ask(0, {500}), w.ask(1, {600, 601})};
    const std::vector<int32_t> lens{90, 40, 3, 200};  // [sequence][head]
    std::vector<int32_t> k_pos(2 * 2 * 256);          // [sequence][head][slot], dropped tokens leave gaps
    for (size_t i = 0; i < k_pos.size(); ++i) k_pos[i] = static_cast<int32_t>(400 + 2 * (i % 256) + i / 256);
    kvc_softmax s = causal_softmax(0.125f);
    s.window = 90;
    call c;
    c.target = t;
    c.max_kv = 256;
    const answer a = w.attend(qs, lens, s, c, [&](kvc_batch& b) {
      b.kv_len_head_stride = 1;
      b.k_pos = k_pos.data();
      b.k_pos_stride = 512;
      b.k_pos_head_stride = 256;
    });
    size_t at = 0, at_lse = 0;
    for (size_t i = 0; i < 2; ++i) {
      for (int32_t head = 0; head < 2; ++head) {
        std::vector<double> o, lse;
        w.oracle(
            qs[i], lens[i * 2 + size_t(head)], s, c.q_type,
            [&](int32_t r, int32_t j) {
              return sees(s, qs[i].positions[size_t(r)], k_pos[i * 512 + size_t(head) * 256 + size_t(j)]);
            },
            o, lse);
        for (size_t row = 0; row < qs[i].positions.size(); ++row) {
          const size_t first = (row * 4 + size_t(head) * 2) * 64;
          const std::vector<float> mine(a.o.begin() + ptrdiff_t(at + first),
                                        a.o.begin() + ptrdiff_t(at + first + 128));
          const std::vector<double> want(o.begin() + ptrdiff_t(first), o.begin() + ptrdiff_t(first + 128));
          INFO(kvc_target_text(t) << " sequence " << i << " head " << head << " row " << row);
          CHECK(deviation(mine, want) < 1e-5);
        }
      }
      at += qs[i].positions.size() * 4 * 64;
      at_lse += qs[i].positions.size() * 4;
    }
    CHECK(at_lse == a.lse.size());
  }
}

TEST_CASE("each optional input changes the answer", "[attend]") {
  world w({.group = 2}, {200}, 81);
  w.append_all();
  const std::vector<query> qs{w.ask(0, {150})};
  kvc_softmax plain = causal_softmax(0.125f);
  const answer a = w.attend(qs, {200}, plain);
  const float sinks[] = {1.0f, 1.0f};
  const auto differs = [&](kvc_softmax s) { return !same_bits(w.attend(qs, {200}, s).o, a.o); };
  kvc_softmax s = plain;
  CHECK_FALSE(differs(s));
  s.scale = 0.25f;
  CHECK(differs(s));
  s = plain, s.soft_cap = 2;
  CHECK(differs(s));
  s = plain, s.window = 100;
  CHECK(differs(s));
  s = plain, s.causal = 0;
  CHECK(differs(s));
  s = plain, s.sink_logit = sinks;
  CHECK(differs(s));
  CHECK(w.attend(qs, {200}, plain, {.want_lse = false}).lse.empty());
}

TEST_CASE("parts over disjoint keys merge to the whole, the sink counted once", "[attend][merge]") {
  const float sinks[] = {0.3f, 4.0f};
  for (const float* sink : {static_cast<const float*>(nullptr), sinks}) {
    world w({.group = 2, .dim_v = 80}, {700}, 91);
    w.append_all();
    const std::vector<query> qs{w.ask(0, range(690, 700))};
    kvc_softmax s = causal_softmax(0.125f);
    std::vector<answer> parts;
    const std::vector<int32_t> table = w.table;
    for (const auto& [first, last] :
         {std::pair{0, 13}, std::pair{13, 14}, std::pair{14, 44}, std::pair{44, 44}}) {
      w.table = table;
      for (int32_t b = 0; b < 44; ++b) {
        if (b < first || b >= last) w.row_of_table(0)[b] = -1;
      }
      parts.push_back(w.attend(qs, {700}, s));
    }
    w.table = table;
    s.sink_logit = sink;
    const answer whole = w.attend(qs, {700}, s);
    std::vector<kvc_out> outs;
    for (auto& p : parts) outs.push_back(dense_out(p.o.data(), element::f32, 2, 80, p.lse.data()));
    answer merged{std::vector<float>(whole.o.size()), std::vector<float>(whole.lse.size())};
    REQUIRE(merge(outs, 10, dense_out(merged.o.data(), element::f32, 2, 80, merged.lse.data()), sink));
    CHECK(deviation(merged.o, {whole.o.begin(), whole.o.end()}) < 2e-6);
    CHECK(deviation(merged.lse, {whole.lse.begin(), whole.lse.end()}) < 2e-6);
    // In place: the first part is the output.
    REQUIRE(merge(outs, 10, outs[0], sink));
    CHECK(same_bits(parts[0], merged));
  }
}

TEST_CASE("merging empty states gives the empty state or the other part", "[attend][merge]") {
  std::vector<float> nothing(64, NAN), some(64, 2.5f), result(64, -1.0f);
  float none_lse = -INFINITY, some_lse = 3.0f, lse = 0;
  const kvc_out none = dense_out(nothing.data(), element::f32, 1, 64, &none_lse);
  const kvc_out one = dense_out(some.data(), element::f32, 1, 64, &some_lse);
  const kvc_out out = dense_out(result.data(), element::f32, 1, 64, &lse);
  const kvc_out empties[] = {none, none, none};
  REQUIRE(merge(empties, 1, out));
  CHECK(std::all_of(result.begin(), result.end(), [](float x) { return x == 0; }));
  CHECK(lse == -INFINITY);
  const kvc_out mixed[] = {none, one, none};
  REQUIRE(merge(mixed, 1, out));
  CHECK(result == some);
  CHECK(lse == 3.0f);
  const float sink = 1.5f;
  REQUIRE(merge(empties, 1, out, &sink));
  CHECK(std::all_of(result.begin(), result.end(), [](float x) { return x == 0; }));
  CHECK(lse == Approx(1.5 / std::log(2.0)));
}

TEST_CASE("sealed and open blocks are read as one sequence", "[attend]") {
  for (const int32_t t : targets()) {
    for (const int32_t block : {4, 16}) {
      const geometry g{.group = 3, .block = block, .type = element::f16};
      world w(g, {150}, 101);
      geometry full = g;
      full.type = element::f32;
      full.order = k_order::row_major;
      world open(full, {150}, 101);
      w.append_all();
      open.append_all();
      const int32_t sealed = 100 / block * block;
      kvc_kv kv = w.kv();
      kv.open_k = open.kv().k;
      kv.open_v = open.kv().v;
      kv.open_blocks = open.kv().blocks;
      const std::vector<int32_t> table = w.table;
      std::fill(w.table.begin() + sealed / block, w.table.end(), 123456);  // never looked at
      const query q = w.ask(0, {149});
      auto at = attention::create(kv, {.q_heads = 3, .slots = 150, .target = t, .features = KVC_USE_OPEN});
      REQUIRE(at);
      const int32_t len = 150, pos = 149;
      kvc_batch b{};
      b.struct_size = sizeof b;
      b.n = 1;
      b.table = w.table.data();
      b.open_table = open.table.data();
      b.table_columns = w.columns;
      b.kv_len = &len;
      b.sealed = &sealed;
      b.q_pos = &pos;
      std::vector<float> o(3 * 64);
      REQUIRE(at->run(kv, b, dense_rows(q.values.data(), element::f32, 3, 64), causal_softmax(0.125f),
                      dense_out(o.data(), element::f32, 3, 64)));
      // The oracle: one world in f32 whose leading rows were rounded to f16 beforehand.
      for (size_t i = 0; i < size_t(sealed) * 64; ++i) {
        open.keys[0][i] = rounded(open.keys[0][i], element::f16);
        open.values[0][i] = rounded(open.values[0][i], element::f16);
      }
      open.append_all();
      call c;
      c.target = t;
      const answer want = open.attend({q}, {150}, causal_softmax(0.125f), c);
      INFO(kvc_target_text(t) << " block " << block);
      CHECK(same_bits(o, want.o));
    }
  }
}
