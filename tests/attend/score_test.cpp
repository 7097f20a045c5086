// SPDX-License-Identifier: Apache-2.0
// What keys got of query rows, against weights in double from the plain rows, and bit by bit between all ways
// to come by it: other chunks, threads, block sizes, instruction sets, and the scores attention hands out.
#include <catch2/catch.hpp>
#include <functional>
#include <numeric>

#include "world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

constexpr float untouched = 777.0f;  // as a score it would count as a weight of 1

/// Rows of several sequences as one call takes them.
struct ragged {
  ragged(world& w, const std::vector<query>& queries, const std::vector<int32_t>& lengths) : lens(lengths) {
    for (const query& one : queries) {
      const int32_t* row = w.row_of_table(static_cast<size_t>(one.sequence));
      table.insert(table.end(), row, row + w.columns);
      positions.insert(positions.end(), one.positions.begin(), one.positions.end());
      values.insert(values.end(), one.values.begin(), one.values.end());
      starts.push_back(static_cast<int32_t>(positions.size()));
      longest = std::max(longest, lens[starts.size() - 2]);
    }
    batch.struct_size = sizeof batch;
    batch.n = static_cast<int32_t>(queries.size());
    batch.table = table.data();
    batch.table_columns = w.columns;
    batch.kv_len = lens.data();
    batch.q_start = starts.data();
    batch.q_pos = positions.data();
  }
  ragged(const ragged&) = delete;
  int32_t rows() const { return static_cast<int32_t>(positions.size()); }

  std::vector<int32_t> lens, table, positions, starts{0};
  std::vector<float> values;
  int32_t longest = 0;
  kvc_batch batch{};
};

/// What a call adds up beyond its kind.
struct wish {
  int32_t kind = KVC_SCORE_WEIGHT;
  bool grouped = false;
  bool stored = false;  // scores as attention handed them out, instead of computing them again
  std::vector<int32_t> upto;
  std::vector<float> least;
  int32_t target = KVC_TARGET_BEST, width = 1;
  const kvc_executor* executor = nullptr;
};

/// Planes to read instead of the world's own, null = these.
const kvc_kv* used = nullptr;
const kvc_kv& planes_of(const world& w) {
  return used != nullptr ? *used : w.kv();
}

struct attended {
  std::vector<float> o, lse, scores;
};

attention plan_for(const world& w, const ragged& r, const wish& k) {
  int32_t most = 1;
  for (size_t i = 1; i < r.starts.size(); ++i) most = std::max(most, r.starts[i] - r.starts[i - 1]);
  auto made = attention::create(planes_of(w), {.q_heads = w.geo.q_heads(),
                                               .sequences = std::max(r.batch.n, 1),
                                               .rows = most,
                                               .slots = r.longest,
                                               .width = k.width,
                                               .target = k.target,
                                               .features = KVC_USE_KEY_SCORE});
  REQUIRE(made);
  return std::move(*made);
}

kvc_rows rows_of(const world& w, const std::vector<float>& values) {
  return dense_rows(values.data(), element::f32, w.geo.q_heads(), w.geo.dim_k);
}

/// Attention with its scores: [rows][q_heads][longest].
attended attend(const world& w, const ragged& r, const kvc_softmax& s, const wish& k, bool scores = true,
                bool values = true) {
  attention at = plan_for(w, r, k);
  const auto states = static_cast<size_t>(r.rows() * w.geo.q_heads());
  attended a;
  a.o.assign(states * static_cast<size_t>(w.geo.dim_v), untouched);
  a.lse.assign(states, untouched);
  a.scores.assign(states * static_cast<size_t>(r.longest) + 1, untouched);
  kvc_out out = dense_out(a.o.data(), element::f32, w.geo.q_heads(), w.geo.dim_v, a.lse.data());
  if (!values) out.o = nullptr;
  if (scores) {
    out.key_score = a.scores.data();
    out.key_score_head_stride = r.longest;
    out.key_score_stride = int64_t{r.longest} * w.geo.q_heads();
  }
  const status done = at.run(planes_of(w), r.batch, rows_of(w, r.values), s, out, k.executor);
  if (!done) FAIL("attend: " << to_text(done.code) << " " << done.field << " " << done.value);
  return a;
}

/// Adds to `sum`: [sequences][heads][longest + 3], the last three of which nobody may touch.
void add(const world& w, const ragged& r, const kvc_softmax& s, const wish& k, const attended& a,
         std::vector<float>& sum) {
  attention at = plan_for(w, r, k);
  const int32_t heads = k.grouped ? w.geo.heads : w.geo.q_heads();
  kvc_score what = dense_score(k.kind, sum.data(), r.longest + 3, a.lse.data(), k.grouped);
  what.sum_stride = int64_t{heads} * (r.longest + 3);
  if (!k.upto.empty()) what.upto = k.upto.data();
  if (k.kind == KVC_SCORE_HIT) what.least = k.least.data();
  if (k.stored) {
    what.key_score = a.scores.data();
    what.key_score_head_stride = r.longest;
    what.key_score_stride = int64_t{r.longest} * w.geo.q_heads();
  }
  const kvc_rows q = k.stored ? kvc_rows{} : rows_of(w, r.values);
  const status done = at.score(planes_of(w), r.batch, q, s, what, k.executor);
  if (!done) FAIL("score: " << to_text(done.code) << " " << done.field << " " << done.value);
}

std::vector<float> fresh_sums(const world& w, const ragged& r, const wish& k) {
  const int32_t heads = k.grouped ? w.geo.heads : w.geo.q_heads();
  std::vector<float> sum(static_cast<size_t>(r.batch.n * heads * (r.longest + 3)), untouched);
  for (int32_t i = 0; i < r.batch.n * heads; ++i) {
    std::fill_n(sum.begin() + i * (r.longest + 3), r.lens[static_cast<size_t>(i / heads)], 0.0f);
  }
  return sum;
}

std::vector<float> sums(const world& w, const ragged& r, const kvc_softmax& s, const wish& k,
                        const attended& a) {
  std::vector<float> sum = fresh_sums(w, r, k);
  add(w, r, s, k, a, sum);
  return sum;
}

/// Whether a slot of a sequence has a block.
bool resident(world& w, int32_t sequence, int32_t slot) {
  return w.row_of_table(static_cast<size_t>(sequence))[slot / w.geo.block] != -1;
}

bool sees(const kvc_softmax& s, int64_t q, int64_t k) {
  return (s.causal == 0 || k <= q) && (s.window == 0 || q - k < s.window);
}

/// log2-scores in double of row `r` of a query and query head `h`.
std::vector<double> scores_in_double(const world& w, const query& q, size_t r, int32_t h, int32_t len,
                                     const kvc_softmax& s) {
  std::vector<double> out;
  for (int32_t j = 0; j < len; ++j) {
    double sum = 0;
    for (int32_t d = 0; d < w.geo.dim_k; ++d) {
      const size_t at = (r * size_t(w.geo.q_heads()) + size_t(h)) * size_t(w.geo.dim_k) + size_t(d);
      sum += double{q.values[at]} * w.key(size_t(q.sequence), j, h / w.geo.group, d);
    }
    sum *= s.scale;
    if (s.soft_cap > 0) sum = s.soft_cap * std::tanh(sum / s.soft_cap);
    out.push_back(sum / std::log(2.0));
  }
  return out;
}

bool all_untouched(const std::vector<float>& v) {
  return std::all_of(v.begin(), v.end(), [](float x) { return x == untouched; });
}

/// Largest error of the scores of one sequence's rows, relative to those above 1; infinite if one was written
/// where the row sees no key.
double scores_deviate(const world& w, const ragged& r, const query& q, const kvc_softmax& s,
                      const std::vector<float>& scores) {
  double worst = 0;
  for (size_t row = 0; row < q.positions.size(); ++row) {
    for (int32_t h = 0; h < w.geo.q_heads(); ++h) {
      const auto right = scores_in_double(w, q, row, h, r.lens[0], s);
      const float* got = scores.data() + (row * size_t(w.geo.q_heads()) + size_t(h)) * right.size();
      for (size_t j = 0; j < right.size(); ++j) {
        const bool seen = static_cast<int32_t>(j) <= q.positions[row];
        if (!seen && got[j] != untouched && got[j] != -INFINITY) return INFINITY;
        const double error = seen ? std::abs(got[j] - right[j]) / (1 + std::abs(right[j])) : 0;
        if (!(error <= worst)) worst = error;  // NaN too
      }
    }
  }
  return worst;
}

/// The sums in double, in the layout of `fresh_sums`; infinite where a hit is a matter of rounding.
std::vector<double> oracle(world& w, const std::vector<query>& qs, const ragged& r, const kvc_softmax& s,
                           const wish& k) {
  const int32_t heads = k.grouped ? w.geo.heads : w.geo.q_heads();
  const std::vector<float> start = fresh_sums(w, r, k);
  std::vector<double> sum(start.begin(), start.end());
  for (size_t i = 0; i < qs.size(); ++i) {
    for (size_t row = 0; row < qs[i].positions.size(); ++row) {
      const size_t at = static_cast<size_t>(r.starts[i]) + row;
      for (int32_t h = 0; h < w.geo.q_heads(); ++h) {
        const auto score = scores_in_double(w, qs[i], row, h, r.lens[i], s);
        double total = s.sink_logit != nullptr ? std::exp(double{s.sink_logit[h]}) : 0;
        for (int32_t j = 0; j < r.lens[i]; ++j) {
          if (sees(s, qs[i].positions[row], j) && resident(w, qs[i].sequence, j))
            total += std::exp2(score[static_cast<size_t>(j)]);
        }
        const size_t kv = at * static_cast<size_t>(w.geo.heads) + static_cast<size_t>(h / w.geo.group);
        const int32_t upto = k.upto.empty() ? r.lens[i] : k.upto[kv];
        const int32_t to = static_cast<int32_t>(i) * heads + (k.grouped ? h / w.geo.group : h);
        for (int32_t j = 0; j < upto; ++j) {
          if (!sees(s, qs[i].positions[row], j) || !resident(w, qs[i].sequence, j)) continue;
          const double weight = std::exp2(score[static_cast<size_t>(j)]) / total;
          double& here = sum[static_cast<size_t>(to * (r.longest + 3) + j)];
          if (k.kind == KVC_SCORE_WEIGHT) here += weight;
          if (k.kind == KVC_SCORE_SQUARE) here += weight * weight;
          if (k.kind == KVC_SCORE_HIT) here += weight >= k.least[kv] ? 1 : 0;
          if (k.kind == KVC_SCORE_HIT && std::abs(weight - k.least[kv]) < 1e-5) here = INFINITY;
        }
      }
    }
  }
  return sum;
}

void check_against_oracle(const std::vector<float>& got, const std::vector<double>& right) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::isinf(right[i]) ? 0 : std::abs(got[i] - right[i]);
    if (!(error <= worst)) worst = error;  // NaN too
  }
  CHECK(worst < 3e-5);
}

geometry random_geometry(std::mt19937& random) {
  geometry g;
  g.heads = pick(random, {1, 2, 3, 8});
  g.group = pick(random, {1, 2, 3, 4, 7});
  g.dim_k = pick(random, {64, 64, 80, 128, 8, 24, 256});
  g.dim_v = pick(random, {64, 8});
  g.block = pick(random, {8, 16, 16, 32, 64, 128, 1, 2});
  g.type = pick(random, {element::f32, element::f16, element::bf16});
  g.order = pick(random, {k_order::transposed, k_order::row_major});
  return g;
}

wish random_wish(std::mt19937& random, const world& w, const ragged& r) {
  wish k;
  k.kind = pick(random, {KVC_SCORE_WEIGHT, KVC_SCORE_SQUARE, KVC_SCORE_HIT});
  k.grouped = random() % 2 == 0;
  const auto kv_heads = static_cast<uint32_t>(w.geo.heads);
  const bool bounded = random() % 2 == 0;
  for (size_t i = 0; i + 1 < r.starts.size(); ++i) {
    for (int32_t row = r.starts[i]; row < r.starts[i + 1]; ++row) {
      for (uint32_t h = 0; h < kv_heads; ++h) {
        if (bounded) k.upto.push_back(static_cast<int32_t>(random() % uint32_t(r.lens[i] + 1)));
        k.least.push_back(pick(random, {0.0f, 0.01f, 0.2f}));
      }
    }
  }
  return k;
}

}  // namespace

TEST_CASE("sums over rows are double's on random shapes, with the scalar twin's bits on every target",
          "[score]") {
  const auto seed = static_cast<uint32_t>(test_seed("score", 3));
  std::mt19937 random(seed);
  for (int64_t round = 0; round < effort(200); ++round) {
    const geometry g = random_geometry(random);
    std::vector<int32_t> lengths(1 + random() % 3);
    for (auto& n : lengths) n = pick(random, {0, 1, 8, 9, 63, 64, 65, 100, 128, 130, 300});
    if (random() % 10 == 0) lengths[0] = pick(random, {1023, 1025, 2049});
    world w(g, lengths, static_cast<uint32_t>(random()));
    w.append_all();
    for (size_t i = 0; i < lengths.size(); ++i) {
      const int32_t columns = ceil_div(lengths[i], g.block);
      if (columns > 1 && random() % 3 == 0) w.row_of_table(i)[random() % uint32_t(columns - 1)] = -1;
    }
    kvc_softmax s = causal_softmax(pick(random, {0.125f, 0.3f}));
    s.causal = random() % 4 != 0;
    if (random() % 4 == 0) s.window = pick(random, {1, 16, 65});
    if (random() % 4 == 0) s.soft_cap = pick(random, {0.5f, 5.0f});
    const auto sinks = normal(random, static_cast<size_t>(g.q_heads()));
    if (random() % 4 == 0) s.sink_logit = sinks.data();
    std::vector<query> qs;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const int32_t rows = std::min(lengths[i], pick(random, {1, 1, 2, 5, 40}));
      qs.push_back(w.ask(static_cast<int32_t>(i), range(lengths[i] - rows, lengths[i])));
    }
    const ragged r(w, qs, lengths);
    wish k = random_wish(random, w, r);
    k.target = KVC_TARGET_SCALAR;
    INFO("seed " << seed << " round " << round << " dim " << g.dim_k << " heads " << g.heads << "x" << g.group
                 << " block " << g.block << " type " << int(g.type) << " kind " << k.kind << " grouped "
                 << k.grouped << " bounded " << !k.upto.empty() << " window " << s.window << " cap "
                 << s.soft_cap << " first length " << lengths[0]);
    const attended a = attend(w, r, s, k);
    const std::vector<float> twin = sums(w, r, s, k, a);
    check_against_oracle(twin, oracle(w, qs, r, s, k));
    for (const int32_t t : targets()) {
      INFO(kvc_target_text(t));
      k.target = t;
      k.width = pick(random, {1, 2, 7});
      const attended here = attend(w, r, s, k);
      REQUIRE(same_bits(here.lse, a.lse));
      for (const bool stored : {false, true}) {
        k.stored = stored;
        REQUIRE(same_bits(sums(w, r, s, k, here), twin));
      }
    }
  }
}

TEST_CASE("attention hands out the scores it computed and its results keep their bits", "[score]") {
  std::mt19937 random(7);
  for (const element type : {element::f32, element::f16, element::bf16}) {
    for (const int32_t len : {1, 63, 64, 100, 1100}) {
      world w({.heads = 2, .group = 3, .dim_k = 64, .dim_v = 72, .type = type}, {len}, 5);
      w.append_all();
      kvc_softmax s = causal_softmax(0.2f);
      s.soft_cap = len == 100 ? 3.0f : 0.0f;
      const std::vector<query> qs{w.ask(0, range(std::max(len - 9, 0), len))};
      const ragged r(w, qs, {len});
      const attended plain = attend(w, r, s, {}, false);
      CHECK(all_untouched(plain.scores));
      for (const int32_t t : targets()) {
        wish k;
        k.target = t;
        const attended a = attend(w, r, s, k);
        REQUIRE(same_bits(a.o, plain.o));
        REQUIRE(same_bits(a.lse, plain.lse));
        const attended no_values = attend(w, r, s, k, true, false);
        REQUIRE(same_bits(no_values.lse, plain.lse));
        CHECK(all_untouched(no_values.o));
        CHECK(scores_deviate(w, r, qs[0], s, a.scores) < 2e-5);
      }
    }
  }
}

TEST_CASE("sums have the same bits in any chunks, on any number of threads and in any blocks",
          "[score][threads]") {
  const int32_t len = 1300;
  for (const element type : {element::f32, element::f16}) {
    for (const bool grouped : {false, true}) {
      std::vector<float> first;
      for (const int32_t block : {8, 16, 64}) {
        world w({.heads = 2, .group = 3, .block = block, .type = type}, {len}, 5);
        w.append_all();
        w.random.seed(99);
        const query all = w.ask(0, range(0, len));
        const size_t width = size_t(w.geo.q_heads()) * 64;
        for (const int32_t chunk : {len, 1, 7, 128}) {
          const bool brief = effort(100) < 100;
          if (chunk == 1 && (brief || block != 16)) continue;
          if (chunk == 7 && brief && block != 16) continue;
          for (const int32_t threads : {1, 2, 5}) {
            if (threads > 1 && chunk == 1) continue;
            wish k;
            k.grouped = grouped;
            k.width = threads;
            const thread_executor executor(threads);
            k.executor = threads > 1 ? executor.get() : nullptr;
            std::vector<float> sum;
            for (int32_t at = 0; at < len; at += chunk) {
              const int32_t end = std::min(at + chunk, len);
              const auto begin = all.values.begin() + int64_t(size_t(at) * width);
              const query part{0, range(at, end), {begin, begin + int64_t(size_t(end - at) * width)}};
              const ragged r(w, {part}, {len});  // the later slots are stored already, and not seen yet
              if (at == 0) sum = fresh_sums(w, r, k);
              const attended a = attend(w, r, causal_softmax(0.125f), k);
              k.stored = at / chunk % 2 == 1;
              add(w, r, causal_softmax(0.125f), k, a, sum);
            }
            if (first.empty()) first = sum;
            INFO("type " << int(type) << " grouped " << grouped << " block " << block << " chunk " << chunk
                         << " threads " << threads);
            REQUIRE(same_bits(sum, first));
          }
        }
      }
    }
  }
}

TEST_CASE("a key in an absent block gets nothing, lengths and positions of heads are their own", "[score]") {
  world w({.heads = 2, .group = 2, .block = 16}, {200}, 3);
  w.append_all();
  w.row_of_table(0)[2] = -1;
  const std::vector<query> qs{w.ask(0, {150, 199})};
  ragged r(w, qs, {200});
  const std::vector<int32_t> lengths{200, 90};
  std::vector<int32_t> positions(400);
  for (size_t i = 0; i < 200; ++i) {
    positions[i] = static_cast<int32_t>(i);
    positions[200 + i] = static_cast<int32_t>(2 * i);  // the second head holds every other token
  }
  r.batch.kv_len = lengths.data();
  r.batch.kv_len_head_stride = 1;
  r.batch.k_pos = positions.data();
  r.batch.k_pos_head_stride = 200;
  r.lens = {200};
  for (const int32_t t : targets()) {
    for (const bool stored : {false, true}) {
      wish k;
      k.target = t;
      k.stored = stored;
      const kvc_softmax s = causal_softmax(0.125f);
      const attended a = attend(w, r, s, k);
      const std::vector<float> sum = sums(w, r, s, k, a);
      for (int32_t h = 0; h < 4; ++h) {
        double total = 0;
        for (int32_t j = 0; j < 200; ++j) {
          const float x = sum[static_cast<size_t>(h * 203 + j)];
          const int32_t position = h < 2 ? j : 2 * j;
          const bool reached = j / 16 != 2 && j < lengths[static_cast<size_t>(h / 2)] && position <= 199;
          CHECK((x > 0) == reached);
          total += x;
        }
        CHECK(std::abs(total - 2) < 1e-5);  // two rows
      }
    }
  }
}

TEST_CASE("keys of the open space count like those of sealed blocks", "[score]") {
  world w({.heads = 2, .group = 2, .block = 16}, {300}, 3);
  w.append_all();
  const std::vector<query> qs{w.ask(0, {290, 299})};
  ragged r(w, qs, {300});
  for (const int32_t t : targets()) {
    for (const bool stored : {false, true}) {
      wish k;
      k.target = t;
      k.stored = stored;
      kvc_kv kv = w.kv();
      const std::vector<float> closed =
          sums(w, r, causal_softmax(0.125f), k, attend(w, r, causal_softmax(0.125f), k));
      const int32_t sealed = 128;
      kv.open_k = kv.k;
      kv.open_v = kv.v;
      kv.open_blocks = kv.blocks;
      ragged open(w, qs, {300});
      open.batch.sealed = &sealed;
      open.batch.open_table = r.table.data();
      std::fill_n(open.table.begin() + sealed / 16, 11, 0);  // some other block: not to be read
      used = &kv;
      const attended a = attend(w, open, causal_softmax(0.125f), k);
      CHECK(same_bits(sums(w, open, causal_softmax(0.125f), k, a), closed));
      std::vector<int32_t> gap = r.table;
      std::fill_n(gap.begin() + 8, 4, -1);  // a tile
      open.batch.open_table = gap.data();
      const std::vector<float> less =
          sums(w, open, causal_softmax(0.125f), k, attend(w, open, causal_softmax(0.125f), k));
      for (int32_t j = 0; j < 300; ++j) CHECK((less[static_cast<size_t>(j)] == 0) == (j / 64 == 2));
      used = nullptr;
    }
  }
}

TEST_CASE("a weight is at most 1 whatever lse2 says", "[score]") {
  world w({.heads = 1, .group = 2, .block = 16}, {70}, 3);
  w.append_all();
  const std::vector<query> qs{w.ask(0, {69})};
  const ragged r(w, qs, {70});
  for (const int32_t t : targets()) {
    wish k;
    k.target = t;
    attended a = attend(w, r, causal_softmax(0.125f), k);
    a.lse.assign(a.lse.size(), -200.0f);
    const std::vector<float> sum = sums(w, r, causal_softmax(0.125f), k, a);
    for (int32_t j = 0; j < 70; ++j) CHECK(sum[static_cast<size_t>(j)] == 1);
  }
}

TEST_CASE("the documented decode step gives every key its share", "[score]") {
  world w({.heads = 2, .group = 3, .block = 16}, {100}, 3);
  w.append_all();
  const std::vector<query> qs{w.ask(0, {99})};
  const ragged r(w, qs, {100});
  attention attend = plan_for(w, r, {});
  const kvc_kv& kv = w.kv();
  const kvc_batch& batch = r.batch;
  const kvc_softmax softmax = causal_softmax(0.125f);
  const kvc_rows q = rows_of(w, r.values);
  const int32_t q_heads = 6, dim = 64, slots = 100;
  std::vector<float> o(6 * 64), lse2(6), scores(600), sums(200);
  // [decode]
  kvc_out out = dense_out(o.data(), element::f32, q_heads, dim, lse2.data());
  out.key_score = scores.data();  // [q_heads][slots], scratch
  out.key_score_head_stride = slots;
  status done = attend.run(kv, batch, q, softmax, out);
  // Column sums of every kv head, [kv_heads][slots]: sums += weights of the query heads of its group.
  kvc_score what = dense_score(KVC_SCORE_WEIGHT, sums.data(), slots, lse2.data(), true);
  what.key_score = scores.data();
  what.key_score_head_stride = slots;
  if (done) done = attend.score(kv, batch, {}, softmax, what);
  // [decode]
  REQUIRE(done);
  for (int32_t h = 0; h < 2; ++h) {
    const float all = std::accumulate(sums.begin() + h * slots, sums.begin() + (h + 1) * slots, 0.0f);
    CHECK(std::abs(all - 3) < 1e-5);
  }
}
