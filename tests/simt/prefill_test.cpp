// SPDX-License-Identifier: Apache-2.0
// Attention of chunks of prompts by the CUDA kernels, run on the CPU, against double and against the CPU's
// own data plane.
#include "kvcache/attend/data_plane.hpp"
#include "simt/gpu_world.hpp"

namespace kvcache::test {
namespace {

int32_t tile_rows(int32_t dim) {
  return dim > 128 ? 64 : 128;
}

/// Runs a call under several schedules; all must give the same bits.
gpu_answer attend_all_ways(gpu_world& w, const gpu_ask& a, const kvc_batch& b,
                           const std::vector<uint32_t>& seeds) {
  gpu_answer first;
  for (const uint32_t seed : seeds) {
    simt::the_backend().seed = seed;
    CAPTURE(seed);
    gpu_answer now = w.attend(a, b);
    REQUIRE(now.plan.row_block == tile_rows(w.geo.dim));
    if (seed == seeds.front()) {
      first = std::move(now);
      continue;
    }
    REQUIRE(now.o == first.o);
    REQUIRE(now.lse == first.lse);
  }
  return first;
}

gpu_answer check_against_double(gpu_world& w, const gpu_ask& a, const std::vector<uint32_t>& seeds = {1}) {
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  const auto want = w.oracle(a, b);
  gpu_answer got = attend_all_ways(w, a, b, seeds);
  gpu_world::check(got, want, w.geo.type, a.out_type);
  return got;
}

/// The same queries again, asked otherwise.
bool differs(gpu_world& w, const gpu_ask& a, const gpu_answer& from) {
  const gpu_answer now = w.attend(a);
  bool other = false;
  for (size_t i = 0; i < now.o.size(); ++i) other = other || std::fabs(now.o[i] - from.o[i]) > 0.05f;
  return other;
}

gpu_ask ask_of(const gpu_geometry& g, std::vector<int32_t> rows, bool causal = true) {
  gpu_ask a;
  a.softmax = softmax_of(1 / std::sqrt(float(g.dim)), causal);
  a.rows = std::move(rows);
  a.q_type = g.type;
  return a;
}

}  // namespace

TEST_CASE("chunks are right at every edge of a tile, for every head dim, type and group") {
  const std::vector<int32_t> rows{0, 1, 15, 16, 17, 63, 64, 65, 130};
  const std::vector<int32_t> lengths{0, 1, 63, 64, 65, 127, 128, 129, 140};
  struct share {
    int32_t group;
    size_t first, step;  // of rows and lengths: not all with every group
  };
  for (const int32_t dim : {64, 80, 96, 128, 256}) {
    for (const int32_t type : {KVC_F16, KVC_BF16}) {
      for (const share s : {share{1, 0, 1}, {3, 1, 3}, {4, 0, 4}, {8, 2, 3}, {16, 0, 3}}) {
        CAPTURE(dim, type, s.group);
        gpu_geometry g{1, s.group, dim, 16, type, layout::heads_first};
        std::vector<int32_t> some_rows, some_lengths;
        for (size_t i = s.first; i < rows.size(); i += s.step) {
          some_rows.push_back(s.group > 1 && rows[i] > 65 ? 40 : rows[i]);
          some_lengths.push_back(lengths[(i + size_t(s.group)) % lengths.size()]);
        }
        some_rows.push_back(33);  // at least one is prefill's with every group
        some_lengths.push_back(100);
        gpu_world w(g, some_lengths, 7);
        gpu_ask a = ask_of(g, some_rows, s.group != 3);
        a.out_type = type;
        check_against_double(w, a, {uint32_t(s.group % 2)});
      }
    }
  }
}

TEST_CASE("every pair of row count and length at the edges of a tile is right") {
  for (const int32_t rows : {17, 31, 32, 33, 127, 128, 129, 130}) {
    gpu_geometry g{1, 1, 64, 16, KVC_F16, layout::heads_first};
    const std::vector<int32_t> lengths{0, 1, 16, 63, 64, 65, 127, 128, 129, 191, 192, 193};
    gpu_world w(g, lengths, 8);
    CAPTURE(rows);
    check_against_double(w, ask_of(g, std::vector<int32_t>(lengths.size(), rows)), {1});
  }
}

TEST_CASE("a chunk gives the same bits under every schedule") {
  for (const int32_t dim : {64, 128, 256}) {
    gpu_geometry g{2, 4, dim, 16, KVC_F16, layout::heads_first};
    gpu_world w(g, {0, 33, 150, 260}, 3);
    check_against_double(w, ask_of(g, {5, 20, 40, 7}), {0, 1, 2, 3, 4, 5, 6, 7});
  }
}

TEST_CASE("chunks see the keys of chunks before them by position") {
  gpu_geometry g{1, 2, 64, 16, KVC_BF16, layout::tokens_first};
  const int32_t prompt = 210;
  for (const int32_t from : {0, 1, 63, 64, 65, 127, 128, 129, 190}) {
    CAPTURE(from);
    gpu_world w(g, {prompt}, 4);
    gpu_ask a = ask_of(g, {std::min(prompt - from, 20)});
    for (int32_t r = 0; r < a.rows[0]; ++r) a.positions.push_back(from + r);
    check_against_double(w, a);
  }
}

TEST_CASE("positions of a chunk's rows may come in any order and repeat") {
  gpu_geometry g{2, 3, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {200, 300}, 5);
  gpu_ask a = ask_of(g, {50, 60});
  for (int32_t r = 0; r < 110; ++r) a.positions.push_back((r * 7919) % 320 - 10);
  a.positions[3] = INT32_MAX;
  a.positions[4] = INT32_MIN;
  check_against_double(w, a, {0, 1});
  a.softmax.window = 70;
  check_against_double(w, a, {0, 1});
  a.softmax.causal = 0;
  a.softmax.window = INT32_MAX;
  check_against_double(w, a, {0, 1});
  // The lowest and the highest come after a block's first 32 rows.
  gpu_world one({1, 1, 64, 16, KVC_F16, layout::heads_first}, {300}, 5);
  gpu_ask b = ask_of(one.geo, {100});
  for (int32_t r = 0; r < 100; ++r) b.positions.push_back(r < 32 ? 150 : r % 2 != 0 ? r : 299 - r);
  b.softmax.window = 20;
  check_against_double(one, b, {0, 1});
}

TEST_CASE("every block size and every layout of the planes is read by its strides in chunks") {
  for (const int32_t block : {1, 2, 8, 16, 32, 64, 256}) {
    for (const layout order : {layout::heads_first, layout::tokens_first, layout::interleaved}) {
      const int32_t dim = block == 8 ? 256 : block == 32 ? 96 : block == 2 ? 128 : 64;
      CAPTURE(block, int(order), dim);
      gpu_geometry g{2, 2, dim, block, KVC_F16, order};
      gpu_world w(g, {5, 65, 70, 130}, 11);
      check_against_double(w, ask_of(g, {9, 20, 11, 10}), {0});
    }
  }
}

TEST_CASE("a window of a chunk counts the query's own token") {
  for (const int32_t window : {1, 2, 63, 64, 65, 128, 1000}) {
    CAPTURE(window);
    gpu_geometry g{1, 2, 64, 16, KVC_F16, layout::heads_first};
    gpu_world w(g, {1, 128, 129, 300}, 31);
    gpu_ask a = ask_of(g, {9, 64, 33, 65});
    a.softmax.window = window;
    const gpu_answer cut = check_against_double(w, a);
    a.softmax.window = 0;
    REQUIRE(differs(w, a, cut) == (window < 300));
  }
}

TEST_CASE("soft cap, sinks and output types matter in chunks and are right") {
  for (const int32_t dim : {64, 128, 256}) {
    CAPTURE(dim);
    gpu_geometry g{2, 2, dim, 16, KVC_F16, layout::heads_first};
    gpu_world w(g, {0, 1, 66, 150}, 12);
    const guarded<float> sinks(std::vector<float>{0.5f, -3.0f, 4.0f, 0.0f});
    gpu_ask a = ask_of(g, {9, 10, 40, 33});
    a.softmax.scale = 0.5f;
    const gpu_answer plain = check_against_double(w, a);
    gpu_ask capped = a;
    capped.softmax.soft_cap = 2.0f;
    REQUIRE(differs(w, capped, plain));
    check_against_double(w, capped);
    gpu_ask sunk = a;
    sunk.softmax.sink_logit = sinks.data();
    const gpu_answer with_sink = check_against_double(w, sunk);
    REQUIRE(differs(w, a, with_sink));
    for (const int32_t out : {KVC_F16, KVC_BF16}) {
      sunk.out_type = out;
      check_against_double(w, sunk);
    }
  }
}

TEST_CASE("chunks of f32 queries, and scales of any size and sign, are right") {
  for (const int32_t dim : {80, 128}) {
    for (const float scale : {1e-6f, 0.0f, -0.3f, 0.125f}) {
      CAPTURE(dim, scale);
      gpu_geometry g{1, 4, dim, 16, KVC_BF16, layout::heads_first};
      gpu_world w(g, {10, 140}, 14);
      gpu_ask a = ask_of(g, {7, 40});
      a.softmax.scale = scale;
      a.q_type = KVC_F32;
      check_against_double(w, a);
    }
  }
}

TEST_CASE("a chunk's scores that grow from tile to tile stay exact relative to the largest") {
  gpu_geometry g{1, 2, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {400}, 15);
  for (int32_t slot = 0; slot < 400; ++slot) {  // the reference must be lifted again and again
    for (int32_t d = 0; d < 64; ++d) {
      uint16_t* k = w.cell(false, 0, slot, 0, d);
      *k = narrow16(widen16(*k, KVC_F16) * (0.1f + 0.02f * float(slot)), KVC_F16);
    }
  }
  gpu_ask a = ask_of(g, {40}, false);
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  const auto want = w.oracle(a, b);
  const gpu_answer got = attend_all_ways(w, a, b, {0, 1});
  for (size_t i = 0; i < want.lse.size(); ++i) {
    REQUIRE(std::fabs(got.lse[i] - want.lse[i]) < 1e-6 * std::fabs(want.lse[i]) + 1e-4);
  }
  gpu_world::reference same = want;
  same.lse.assign(got.lse.begin(), got.lse.end());
  gpu_world::check(got, same, KVC_F16, KVC_F32);
}

TEST_CASE("positions of keys are data in chunks, per head") {
  gpu_geometry g{2, 2, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {5, 90, 333}, 15);
  guarded<int32_t> positions(w.length.size() * 2 * 333);
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = int32_t((i * 7919) % 400) - 3;
  for (const int32_t window : {0, 120}) {
    for (const bool causal : {true, false}) {
      gpu_ask a = ask_of(g, {9, 20, 40}, causal);
      a.softmax.window = window;
      for (int32_t r = 0; r < 69; ++r) a.positions.push_back((r * 131) % 400);
      w.ask_queries(a);
      kvc_batch b = w.batch_of(a);
      b.k_pos = positions.data();
      b.k_pos_stride = 2 * 333;
      b.k_pos_head_stride = 333;
      const auto want = w.oracle(a, b, [&](size_t s, int32_t h, int32_t slot) {
        return positions[s * 666 + size_t(h) * 333 + size_t(slot)];
      });
      const gpu_answer got = attend_all_ways(w, a, b, {0, 1});
      gpu_world::check(got, want, KVC_F16, KVC_F32);
      if (window > 0 || causal) REQUIRE(differs(w, a, got));
    }
  }
}

TEST_CASE("a chunk's key scores are what weights are made of") {
  for (const float cap : {0.0f, 20.0f}) {
    for (const int32_t dim : {64, 256}) {
      gpu_geometry g{2, 3, dim, 16, KVC_F16, layout::heads_first};
      gpu_world w(g, {20, 100}, 20);
      gpu_ask a = ask_of(g, {20, 30});
      a.softmax.soft_cap = cap;
      a.softmax.window = 50;
      a.want_scores = true;
      w.ask_queries(a);
      const kvc_batch b = w.batch_of(a);
      const auto want = w.oracle(a, b);
      const gpu_answer got = attend_all_ways(w, a, b, {0, 1});
      gpu_world::check(got, want, KVC_F16, KVC_F32);
      size_t at = 0, seen = 0;
      for (size_t row = 0; row < 50; ++row) {
        const size_t length = row < 20 ? 20 : 100;
        for (size_t h = 0; h < 6; ++h) {
          for (size_t slot = 0; slot < size_t(got.score_pitch); ++slot) {
            const float score = got.scores[(row * 6 + h) * size_t(got.score_pitch) + slot];
            const double expected = slot < length ? want.score[at++] / std::log(2.0) : -INFINITY;
            if (std::isinf(expected)) {
              REQUIRE((score == -INFINITY || std::isnan(score)));
              if (slot >= length) REQUIRE(std::isnan(score));
            } else {
              REQUIRE(std::fabs(score - expected) < 2e-5);
              ++seen;
            }
          }
        }
      }
      REQUIRE(seen > 0);
      REQUIRE(at == want.score.size());
    }
  }
}

TEST_CASE("heads of a sequence may have different lengths in a chunk") {
  gpu_geometry g{3, 2, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {140, 200}, 16);
  const guarded<int32_t> lengths(std::vector<int32_t>{100, 0, 17, 1, 200, 64});
  gpu_ask a = ask_of(g, {20, 70}, false);
  w.ask_queries(a);
  kvc_batch b = w.batch_of(a);
  b.kv_len = lengths.data();
  b.kv_len_head_stride = 1;
  const gpu_answer got = attend_all_ways(w, a, b, {0, 1});
  b.kv_len = w.kv_len.data();
  b.kv_len_head_stride = 0;
  for (int32_t h = 0; h < 3; ++h) {
    for (size_t s = 0; s < 2; ++s) w.kv_len[s] = lengths[s * 3 + size_t(h)];
    const auto want = w.oracle(a, b);
    gpu_answer part;
    gpu_world::reference part_want;
    for (size_t row = 0; row < 90; ++row) {
      for (size_t q = row * 6 + size_t(2 * h); q < row * 6 + size_t(2 * h) + 2; ++q) {
        part.lse.push_back(got.lse[q]);
        part_want.lse.push_back(want.lse[q]);
        for (size_t d = 0; d < 64; ++d) {
          part.o.push_back(got.o[q * 64 + d]);
          part_want.o.push_back(want.o[q * 64 + d]);
          part_want.spread.push_back(want.spread[q * 64 + d]);
        }
      }
    }
    gpu_world::check(part, part_want, KVC_F16, KVC_F32);
  }
}

TEST_CASE("absent blocks and ids outside the pool are not attended by chunks") {
  for (const int32_t block : {4, 16, 64}) {
    for (int32_t wild : {-1, INT32_MIN, INT32_MAX, 0}) {
      gpu_geometry g{1, 4, 64, block, KVC_F16, layout::heads_first};
      gpu_world w(g, {10, 64, 200, 257}, 17);
      if (wild == 0) wild = w.kv.blocks;  // the first that is not there
      CAPTURE(block, wild);
      w.table[0] = wild;  // all that the first sequence has, with blocks of 16 and more
      w.table[size_t(w.columns) * 2 + 1] = wild;
      w.table[size_t(w.columns) * 3 + size_t(256 / block)] = wild;  // the last, partly filled one
      check_against_double(w, ask_of(g, {5, 20, 6, 7}));
    }
  }
}

TEST_CASE("a row that sees no key is exactly (0, -infinity), wherever it is in a chunk") {
  gpu_geometry g{1, 2, 128, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {0, 40, 130}, 18);
  gpu_ask a = ask_of(g, {30, 50, 70});
  for (int32_t r = 0; r < 150; ++r) a.positions.push_back(r % 5 == 0 ? 35 : -1 - r);
  const gpu_answer got = check_against_double(w, a);
  for (size_t row = 0; row < 150; ++row) {
    for (size_t q = row * 2; q < row * 2 + 2; ++q) {
      const bool sees = row >= 30 && row % 5 == 0;
      REQUIRE((got.lse[q] == -INFINITY) == !sees);
      for (size_t d = 0; d < 128 && !sees; ++d) REQUIRE(got.o[q * 128 + d] == 0.0f);
    }
  }
}

TEST_CASE("more rows of a chunk than the plan's bound are neither read nor written, and lengths are cut") {
  gpu_geometry g{1, 2, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {48, 64}, 19);
  gpu_ask a = ask_of(g, {70, 40}, false);
  w.ask_queries(a);
  kvc_batch b = w.batch_of(a);
  const auto want = w.oracle(a, b);
  w.kv_len[1] = INT32_MAX;  // four columns: 64
  gpu_ask wide = a;
  wide.max_kv = 1 << 20;
  gpu_world::check(attend_all_ways(w, wide, b, {0, 1}), want, KVC_F16, KVC_F32);
  w.q_start[1] = w.q_start[2] = 110;  // the first sequence has more rows than it may
  const gpu_answer more = w.attend(a, b);
  for (size_t q = 0; q < 220; ++q) {
    if (q < 140) REQUIRE(std::fabs(more.lse[q] - want.lse[q]) < 1e-4);
    if (q >= 140) REQUIRE(std::isnan(more.lse[q]));
  }
  for (size_t i = 140 * 64; i < more.o.size(); ++i) REQUIRE(std::isnan(more.o[i]));
  w.q_start[1] = -5;  // and now less than none
  w.q_start[2] = INT32_MIN;
  const gpu_answer none = w.attend(a, b);
  for (const float x : none.lse) REQUIRE(std::isnan(x));
}

TEST_CASE("a batch of chunks and single tokens gives each sequence to its kernel, each row once") {
  const guarded<float> sinks(std::vector<float>{0.5f, -3.0f, 4.0f, 0.0f});
  for (const int32_t dim : {64, 256}) {
    gpu_geometry g{1, 4, dim, 16, KVC_F16, layout::heads_first};
    gpu_world w(g, {700, 90, 0, 600, 100, 3}, 24);
    gpu_ask a = ask_of(g, {1, 70, 4, 4, 5, 0});
    a.softmax.sink_logit = sinks.data();
    a.width = 20;
    const gpu_answer got = check_against_double(w, a, {0, 1, 2, 3});
    REQUIRE(got.plan.splits > 1);
    REQUIRE(got.plan.workspace_bytes == size_t(6 * 4 * 4) * size_t(got.plan.splits) * size_t(dim + 1) * 4);
  }
}

TEST_CASE("a batch that may hold chunks takes one launch of each kernel, single tokens none of prefill",
          "[machine]") {
  gpu_geometry g{1, 4, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {700, 90}, 24);
  gpu_ask a = ask_of(g, {1, 70});
  a.width = 8;
  w.ask_queries(a);
  kvc_batch b = w.batch_of(a);
  int before = simt::the_backend().launches;
  REQUIRE(w.attend(a, b).plan.splits > 1);
  REQUIRE(simt::the_backend().launches == before + 3);  // prefill, decode, merge
  b.q_start = nullptr;
  before = simt::the_backend().launches;
  (void)w.attend(a, b);
  REQUIRE(simt::the_backend().launches == before + 2);
}

TEST_CASE("few blocks of chunks are left to decode, which cuts them along the keys") {
  gpu_geometry g{2, 4, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {600}, 25);
  gpu_ask a = ask_of(g, {33});  // 2 heads x 2 tiles
  const auto row_block = [&](int32_t width) {
    a.width = width;
    return w.plan_of(a).row_block;
  };
  REQUIRE(row_block(8) == 128);
  REQUIRE(row_block(9) == 16);
  a.rows = {4};
  REQUIRE(row_block(1) == 16);
  a.rows = {5};
  REQUIRE(row_block(1) == 128);
  a.rows = {33};
  a.width = 40;
  w.ask_queries(a);
  const gpu_answer got = w.attend(a);
  REQUIRE(got.plan.splits > 1);
  gpu_world::check(got, w.oracle(a, w.batch_of(a)), KVC_F16, KVC_F32);
}

TEST_CASE("with fixed splits a sequence's bits depend on neither the rest of the batch nor any bound") {
  const std::vector<int32_t> lengths{2100, 300, 40}, rows{2, 70, 4};
  const guarded<float> sinks(std::vector<float>{0.5f, -3.0f, 4.0f, 0.0f});
  for (const int32_t dim : {64, 256}) {
    gpu_geometry g{1, 4, dim, 16, KVC_F16, layout::heads_first};
    gpu_world all(g, lengths, 9);
    gpu_ask a = ask_of(g, rows);
    a.softmax.sink_logit = sinks.data();
    a.features = KVC_USE_FIXED_SPLITS;
    a.width = 1000;
    const gpu_answer together = check_against_double(all, a);
    const std::vector<float> queries = all.q_values;
    const auto per_row = size_t(g.q_heads() * dim);
    size_t first = 0;
    for (size_t s = 0; s < lengths.size(); first += size_t(rows[s]), ++s) {
      CAPTURE(dim, s);
      gpu_world one(g, lengths, 9);  // the same content
      one.table = guarded<int32_t>(std::vector<int32_t>(one.table.data() + s * size_t(one.columns),
                                                        one.table.data() + (s + 1) * size_t(one.columns)));
      one.kv_len = guarded<int32_t>(std::vector<int32_t>{lengths[s]});
      one.length = {lengths[s]};
      gpu_ask alone = a;
      alone.rows = {rows[s]};  // also another max_q: none that prefill could serve, with few rows
      alone.width = 3;
      alone.max_kv = s == 0 ? 5100 : lengths[s];  // also none to merge
      one.q_values.assign(queries.begin() + int64_t(first * per_row),
                          queries.begin() + int64_t((first + size_t(rows[s])) * per_row));
      const gpu_answer got = one.attend(alone);
      REQUIRE(got.o.size() == size_t(rows[s]) * per_row);
      for (size_t i = 0; i < got.o.size(); ++i) REQUIRE(got.o[i] == together.o[first * per_row + i]);
      for (size_t i = 0; i < got.lse.size(); ++i) {
        REQUIRE(got.lse[i] == together.lse[first * size_t(g.q_heads()) + i]);
      }
    }
  }
}

TEST_CASE("chunks on the CPU and on CUDA agree through the same structs") {
  for (const int32_t type : {KVC_F16, KVC_BF16}) {
    for (const int32_t dim : {80, 128, 256}) {
      gpu_geometry g{2, 4, dim, 16, type, layout::tokens_first};
      gpu_world w(g, {40, 70, 200}, 23);
      gpu_ask a = ask_of(g, {9, 33, 40});
      a.softmax.window = 100;
      w.ask_queries(a);
      const kvc_batch b = w.batch_of(a);
      const gpu_answer got = attend_all_ways(w, a, b, {1});
      std::vector<uint16_t> q16;
      for (const float x : w.q_values) q16.push_back(narrow16(x, type));
      auto on_cpu = attention::create(
          w.kv,
          {.q_heads = 8, .sequences = 3, .rows = 40, .slots = 200, .q_type = static_cast<element>(type)});
      REQUIRE(on_cpu);
      std::vector<float> o(got.o.size()), lse(got.lse.size());
      REQUIRE(on_cpu->run(w.kv, b, dense_rows(q16.data(), static_cast<element>(type), 8, dim), a.softmax,
                          dense_out(o.data(), element::f32, 8, dim, lse.data())));
      const double unit = type == KVC_F16 ? 0x1p-10 : 0x1p-7;
      for (size_t i = 0; i < o.size(); ++i) REQUIRE(std::fabs(o[i] - got.o[i]) < 3 * unit);
      for (size_t i = 0; i < lse.size(); ++i) REQUIRE(std::fabs(lse[i] - got.lse[i]) < 1e-4);
    }
  }
}

TEST_CASE("rows of a chunk's queries and results may lie at any address of their type") {
  gpu_geometry g{1, 2, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {100}, 26);
  gpu_ask a = ask_of(g, {40});
  const gpu_answer want = check_against_double(w, a);
  const kvc_batch b = w.batch_of(a);
  for (const int64_t gap : {2, 6, 16}) {
    CAPTURE(gap);
    const int64_t head = 128 + gap, row = 2 * head + 2;
    guarded<std::byte> q(size_t(40 * row)), o(size_t(40 * row));
    for (size_t r = 0; r < 40; ++r) {
      for (size_t i = 0; i < 128; ++i) {
        const uint16_t bits = narrow16(w.q_values[r * 128 + i], KVC_F16);
        std::memcpy(q.data() + int64_t(r) * row + int64_t(i / 64) * head + int64_t(i % 64) * 2, &bits, 2);
      }
    }
    const kvc_rows rows{q.data(), KVC_F16, 2, 64, 0, row, head};
    kvc_out out{};
    out.struct_size = sizeof out;
    out.type = KVC_F16;
    out.heads = 2;
    out.dim = 64;
    out.o = o.data();
    out.row_stride = row;
    out.head_stride = head;
    REQUIRE(kvc_cuda_attend(&want.plan, &w.kv, &b, &rows, &a.softmax, &out, {}, nullptr, nullptr) == KVC_OK);
    for (size_t r = 0; r < 40; ++r) {
      for (size_t i = 0; i < 128; ++i) {
        uint16_t bits;
        std::memcpy(&bits, o.data() + int64_t(r) * row + int64_t(i / 64) * head + int64_t(i % 64) * 2, 2);
        REQUIRE(std::fabs(widen16(bits, KVC_F16) - want.o[r * 128 + i]) < 2e-3);
      }
      REQUIRE(o[size_t(int64_t(r) * row + 128)] == std::byte{0xff});  // gaps are left alone
    }
  }
}

TEST_CASE("block offsets beyond 2^31 and 2^32 bytes are right in chunks", "[machine]") {
  gpu_geometry g{2, 4, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {40, 100}, 22);
  gpu_ask a = ask_of(g, {9, 20});
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  const auto want = w.oracle(a, b);
  const kvc_kv near = w.kv;
  for (const int64_t far : {(int64_t{1} << 31) + 4096, (int64_t{1} << 32) + 4096}) {
    w.kv = near;
    sparse_arena arena(size_t(far) * size_t(near.blocks) * 2);
    for (const bool v : {false, true}) {
      kvc_plane& p = v ? w.kv.v : w.kv.k;
      const auto* from = static_cast<const std::byte*>(p.data);
      const int64_t old_stride = p.block_stride;
      p.data = arena.data() + (v ? far * near.blocks : 0);
      p.block_stride = far;
      for (int64_t id = 0; id < near.blocks; ++id) {
        std::memcpy(static_cast<std::byte*>(p.data) + id * far, from + id * old_stride, size_t(old_stride));
      }
    }
    gpu_world::check(attend_all_ways(w, a, b, {0}), want, KVC_F16, KVC_F32);
  }
}

TEST_CASE("tiles of keys that no row of a block sees are not read", "[machine]") {
  gpu_geometry g{1, 1, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {640}, 27);
  simt::backend& backend = simt::the_backend();
  backend.seed = 0;
  const auto tiles_read = [&](int32_t from, int32_t rows, int32_t window) {
    gpu_ask a = ask_of(g, {rows});
    a.softmax.window = window;
    for (int32_t r = 0; r < rows; ++r) a.positions.push_back(from + r);
    w.ask_queries(a);
    backend.stats = {};
    (void)w.attend(a);
    const uint64_t query_copies = uint64_t((rows + 127) / 128) * 128 * 8;
    return int((backend.stats.async_copies - query_copies) / (2 * 64 * 8));
  };
  REQUIRE(tiles_read(0, 64, 0) == 1);
  REQUIRE(tiles_read(0, 65, 0) == 2);
  REQUIRE(tiles_read(0, 128, 0) == 2);
  REQUIRE(tiles_read(0, 129, 0) == 2 + 3);
  REQUIRE(tiles_read(384, 128, 0) == 8);
  REQUIRE(tiles_read(384, 128, 1) == 2);
  REQUIRE(tiles_read(384, 128, 2) == 3);
  REQUIRE(tiles_read(384, 128, 65) == 3);
  REQUIRE(tiles_read(384, 128, 66) == 4);
}

TEST_CASE("a chunk's staged tiles are written and read without bank conflicts", "[machine]") {
  for (const int32_t dim : {64, 80, 96, 128, 256}) {
    gpu_geometry g{1, 2, dim, 16, KVC_F16, layout::heads_first};
    gpu_world w(g, {512}, 24);
    gpu_ask a = ask_of(g, {64}, false);
    w.ask_queries(a);
    simt::backend& backend = simt::the_backend();
    backend.seed = 0;
    backend.stats = {};
    backend.count_banks = dim % 64 == 0;  // others are copied chunk by chunk, past the ends of rows
    (void)w.attend(a);
    backend.count_banks = false;
    CAPTURE(dim, backend.stats.least);
    REQUIRE(backend.stats.least > 0);
    REQUIRE(backend.stats.conflicts() == 0);
  }
}

}  // namespace kvcache::test
