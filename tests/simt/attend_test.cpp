// SPDX-License-Identifier: Apache-2.0
// Attention of the CUDA kernels, run on the CPU, against double and against the CPU's own data plane.
#include "kvcache/attend/data_plane.hpp"
#include "simt/gpu_world.hpp"

namespace kvcache::test {
namespace {

const std::vector<int32_t> edges{0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 333};

/// Runs a call under several schedules; all must give the same bits.
gpu_answer attend_all_ways(gpu_world& w, const gpu_ask& a, const kvc_batch& b,
                           const std::vector<uint32_t>& seeds = {0, 1, 2, 3}) {
  gpu_answer first;
  for (const uint32_t seed : seeds) {
    simt::the_backend().seed = seed;
    CAPTURE(seed);
    gpu_answer now = w.attend(a, b);
    if (seed == seeds.front()) {
      first = std::move(now);
      continue;
    }
    REQUIRE(now.o == first.o);
    REQUIRE(now.lse == first.lse);
  }
  return first;
}

void check_against_double(gpu_world& w, const gpu_ask& a, const std::vector<uint32_t>& seeds = {0, 1}) {
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  const auto want = w.oracle(a, b);
  gpu_world::check(attend_all_ways(w, a, b, seeds), want, w.geo.type, a.out_type);
}

}  // namespace

TEST_CASE("decode is right at every edge of a block and a tile, for every head dim, type and group") {
  struct shape {
    int32_t dim, group, heads;
  };
  for (const shape s : {shape{128, 1, 2},
                        {128, 4, 2},
                        {128, 8, 1},
                        {128, 16, 1},
                        {64, 3, 2},
                        {64, 12, 1},
                        {80, 5, 1},
                        {96, 9, 1},
                        {256, 2, 1},
                        {256, 16, 1}}) {
    for (const int32_t type : {KVC_F16, KVC_BF16}) {
      CAPTURE(s.dim, s.group, type);
      gpu_world w({s.heads, s.group, s.dim, 16, type, layout::heads_first}, edges, 7);
      gpu_ask a;
      a.softmax = softmax_of(1 / std::sqrt(float(s.dim)));
      a.q_type = type;
      a.out_type = type;
      check_against_double(w, a);
    }
  }
}

TEST_CASE("the same numbers come out under every schedule") {
  gpu_world w({2, 4, 128, 16, KVC_F16, layout::heads_first}, {0, 1, 33, 300, 1024}, 3);
  gpu_ask a;
  a.softmax = softmax_of(0.09f);
  a.width = 16;
  a.max_kv = 2048;
  check_against_double(w, a, {0, 1, 2, 3, 4, 5, 6, 7});
}

TEST_CASE("every block size and every layout is read by its strides") {
  for (const int32_t block : {1, 2, 4, 8, 16, 32, 64, 256}) {
    for (const layout order : {layout::heads_first, layout::tokens_first, layout::interleaved}) {
      for (const int32_t dim : {64, 80, 128, 256}) {
        CAPTURE(block, int(order), dim);
        gpu_world w({2, 2, dim, block, KVC_F16, order}, {0, 5, 63, 64, 65, 70}, 11);
        gpu_ask a;
        a.softmax = softmax_of(0.1f);
        check_against_double(w, a, {0});
      }
    }
  }
}

TEST_CASE("splits change nothing but rounding, however many there are") {
  for (const int32_t group : {2, 16}) {
    for (const int32_t width : {1, 3, 8, 40}) {
      gpu_world w({1, group, 64, 16, KVC_F16, layout::heads_first}, {0, 1, 255, 256, 257, 700}, 5);
      gpu_ask a;
      a.softmax = softmax_of(0.125f);
      a.width = width;
      a.max_kv = 4096;
      const kvc_plan plan = w.plan_of(a);
      CAPTURE(group, width, plan.splits);
      REQUIRE((plan.splits > 1) == (width > 1));
      check_against_double(w, a);
    }
  }
}

TEST_CASE("fixed splits give a sequence the same bits in any batch and under any bounds") {
  const std::vector<int32_t> lengths{2500, 40, 0, 4100};
  gpu_geometry g{1, 4, 64, 16, KVC_F16, layout::heads_first};
  gpu_world all(g, lengths, 9);
  gpu_ask a;
  a.softmax = softmax_of(0.125f);
  a.features = KVC_USE_FIXED_SPLITS;
  all.ask_queries(a);
  const gpu_answer together = all.attend(a);
  REQUIRE(together.plan.splits == 3);
  gpu_world::check(together, all.oracle(a, all.batch_of(a)), KVC_F16, KVC_F32);
  for (size_t s = 0; s < lengths.size(); ++s) {
    kvc_batch b = all.batch_of(a);
    b.n = 1;
    b.table += s * size_t(all.columns);
    b.kv_len += s;
    b.q_pos += s;
    gpu_ask alone = a;
    alone.max_kv = std::max(lengths[s], 1) + 3000;
    alone.width = 7;
    const std::vector<float> queries = all.q_values;
    const auto per_row = size_t(g.q_heads() * g.dim);
    all.q_values.assign(queries.begin() + int64_t(s * per_row), queries.begin() + int64_t((s + 1) * per_row));
    all.q_values.resize(per_row * lengths.size());
    const gpu_answer one = all.attend(alone, b);
    all.q_values = queries;
    for (size_t i = 0; i < per_row; ++i) REQUIRE(one.o[i] == together.o[s * per_row + i]);
    for (size_t i = 0; i < size_t(g.q_heads()); ++i) {
      REQUIRE(one.lse[i] == together.lse[s * size_t(g.q_heads()) + i]);
    }
  }
}

TEST_CASE("several query rows see what their positions let them see") {
  for (const int32_t group : {1, 3, 8}) {
    for (const int32_t width : {1, 12}) {
      CAPTURE(group, width);
      gpu_world w({2, group, 64, 16, KVC_BF16, layout::tokens_first}, {0, 3, 40, 300, 17, 64}, 21);
      gpu_ask a;
      a.softmax = softmax_of(0.125f);
      a.rows = {0, 3, 16, 5, 1, 2};
      a.q_type = KVC_F32;
      a.width = width;
      a.max_kv = 1024;
      check_against_double(w, a);
    }
  }
}

TEST_CASE("a chunk of a prompt gives what its rows give one by one") {
  gpu_world w({1, 4, 128, 16, KVC_F16, layout::heads_first}, {150}, 2);
  gpu_ask a;
  a.softmax = softmax_of(0.09f);
  a.rows = {70};
  check_against_double(w, a);
}

TEST_CASE("a window counts the query's own token") {
  for (const int32_t window : {1, 2, 31, 32, 33, 127, 128, 129, 1000}) {
    for (const int32_t width : {1, 9}) {
      CAPTURE(window, width);
      gpu_world w({1, 2, 64, 16, KVC_F16, layout::heads_first}, {1, 127, 128, 129, 600}, 31);
      gpu_ask a;
      a.softmax = softmax_of(0.125f);
      a.softmax.window = window;
      a.rows = {1, 2, 1, 4, 3};
      a.width = width;
      a.max_kv = 1024;
      check_against_double(w, a);
    }
  }
}

TEST_CASE("without causal and window every key in use is seen, wherever the rows are") {
  gpu_world w({1, 4, 64, 16, KVC_F16, layout::heads_first}, edges, 8);
  gpu_ask a;
  a.softmax = softmax_of(0.125f, false);
  w.ask_queries(a);
  kvc_batch b = w.batch_of(a);
  const auto want = w.oracle(a, b);
  b.q_pos = nullptr;
  gpu_world::check(attend_all_ways(w, a, b), want, KVC_F16, KVC_F32);
}

TEST_CASE("a soft cap bends scores, with and without a window") {
  for (const int32_t window : {0, 40}) {
    for (const float cap : {1.0f, 30.0f}) {
      gpu_world w({1, 8, 128, 16, KVC_F16, layout::heads_first}, {0, 1, 100, 333}, 12);
      gpu_ask a;
      a.softmax = softmax_of(0.5f);
      a.softmax.soft_cap = cap;
      a.softmax.window = window;
      check_against_double(w, a);
    }
  }
}

TEST_CASE("a sink joins the denominator once, however many splits there are") {
  for (const int32_t width : {1, 8}) {
    gpu_world w({2, 2, 64, 16, KVC_F16, layout::heads_first}, {0, 1, 300, 700}, 13);
    const guarded<float> sinks(std::vector<float>{0.5f, -3.0f, 4.0f, 0.0f});
    gpu_ask a;
    a.softmax = softmax_of(0.125f);
    a.softmax.sink_logit = sinks.data();
    a.width = width;
    a.max_kv = 2048;
    check_against_double(w, a);
  }
}

TEST_CASE("scores of the size that overflows exp stay exact relative to the largest") {
  for (const float scale : {40.0f, 1e-6f, 0.0f, -0.3f}) {
    CAPTURE(scale);
    gpu_world w({1, 4, 64, 16, KVC_F16, layout::heads_first}, {1, 40, 200}, 14);
    gpu_ask a;
    a.softmax = softmax_of(scale);
    w.ask_queries(a);
    const kvc_batch b = w.batch_of(a);
    const auto want = w.oracle(a, b);
    gpu_answer got = attend_all_ways(w, a, b, {0, 1});
    // A lse of thousands is good to its last bits, no more; weights then move by as much.
    if (scale == 40.0f) {
      for (size_t i = 0; i < want.lse.size(); ++i) {
        REQUIRE(std::fabs(got.lse[i] - want.lse[i]) < 1e-6 * std::fabs(want.lse[i]) + 1e-4);
        got.lse[i] = float(want.lse[i]);
      }
      for (size_t i = 0; i < want.o.size(); ++i) REQUIRE(std::fabs(got.o[i] - want.o[i]) < 2e-2);
      continue;
    }
    gpu_world::check(got, want, KVC_F16, KVC_F32);
  }
}

TEST_CASE("positions of keys are data") {
  gpu_world w({2, 2, 64, 16, KVC_F16, layout::heads_first}, {0, 5, 90, 333}, 15);
  guarded<int32_t> positions(w.length.size() * 2 * 333);
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = int32_t((i * 7919) % 400);
  gpu_ask a;
  a.softmax = softmax_of(0.125f);
  a.softmax.window = 120;
  a.positions = {0, 300, 200, 390};
  w.ask_queries(a);
  kvc_batch b = w.batch_of(a);
  b.k_pos = positions.data();
  b.k_pos_stride = 2 * 333;
  b.k_pos_head_stride = 333;
  const auto want = w.oracle(a, b, [&](size_t s, int32_t h, int32_t slot) {
    return positions[s * 666 + size_t(h) * 333 + size_t(slot)];
  });
  gpu_world::check(attend_all_ways(w, a, b), want, KVC_F16, KVC_F32);
}

TEST_CASE("heads of a sequence may have different lengths") {
  gpu_geometry g{3, 2, 64, 16, KVC_F16, layout::heads_first};
  gpu_world w(g, {100, 333}, 16);
  const guarded<int32_t> lengths(std::vector<int32_t>{100, 0, 17, 1, 333, 64});
  gpu_ask a;
  a.softmax = softmax_of(0.125f, false);
  w.ask_queries(a);
  kvc_batch b = w.batch_of(a);
  const gpu_answer got = [&] {
    kvc_batch heads = b;
    heads.kv_len = lengths.data();
    heads.kv_len_head_stride = 1;
    return attend_all_ways(w, a, heads);
  }();
  for (int32_t h = 0; h < 3; ++h) {
    for (size_t s = 0; s < 2; ++s) w.kv_len[s] = lengths[s * 3 + size_t(h)];
    const auto want = w.oracle(a, b);
    gpu_answer part;
    gpu_world::reference part_want;
    for (size_t s = 0; s < 2; ++s) {
      for (int32_t q = 2 * h; q < 2 * h + 2; ++q) {
        const size_t row = s * 6 + size_t(q);
        part.lse.push_back(got.lse[row]);
        part_want.lse.push_back(want.lse[row]);
        for (size_t d = 0; d < 64; ++d) {
          part.o.push_back(got.o[row * 64 + d]);
          part_want.o.push_back(want.o[row * 64 + d]);
          part_want.spread.push_back(want.spread[row * 64 + d]);
        }
      }
    }
    gpu_world::check(part, part_want, KVC_F16, KVC_F32);
  }
}

TEST_CASE("absent blocks are not attended, and ids outside the pool count as absent") {
  for (const int32_t block : {4, 16, 64}) {
    for (int32_t wild : {-1, INT32_MIN, 1 << 20, INT32_MAX, 0}) {
      gpu_world w({1, 4, 64, block, KVC_F16, layout::heads_first}, {10, 64, 200, 257}, 17);
      if (wild == 0) wild = w.kv.blocks;  // the first that is not there
      CAPTURE(block, wild);
      w.table[0] = wild;  // all that the first sequence has, with blocks of 16 and more
      w.table[size_t(w.columns) * 2 + 1] = wild;
      w.table[size_t(w.columns) * 3 + size_t(256 / block)] = wild;  // the last, partly filled one
      gpu_ask a;
      a.softmax = softmax_of(0.125f);
      check_against_double(w, a);
    }
  }
}

TEST_CASE("padding rows of a captured batch are neither read nor written") {
  gpu_world w({1, 2, 64, 16, KVC_F16, layout::heads_first}, {50, 0, 20, 0}, 18);
  for (int32_t c = 0; c < w.columns; ++c) {
    w.table[size_t(w.columns + c)] = w.table[size_t(3 * w.columns + c)] = -1;
  }
  gpu_ask a;
  a.softmax = softmax_of(0.125f);
  a.rows = {1, 0, 2, 0};
  a.width = 8;
  a.max_kv = 2048;
  check_against_double(w, a);
}

TEST_CASE("a length past the table or the plan's bound is cut, and nothing outside is read") {
  gpu_world w({1, 2, 64, 16, KVC_F16, layout::heads_first}, {48, 64}, 19);
  gpu_ask a;
  a.softmax = softmax_of(0.125f, false);
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  const auto want = w.oracle(a, b);
  w.kv_len[1] = INT32_MAX;  // four columns: 64
  gpu_ask wide = a;
  wide.max_kv = 1 << 20;
  gpu_world::check(attend_all_ways(w, wide, b), want, KVC_F16, KVC_F32);
  w.kv_len[0] = -5;
  w.kv_len[1] = 64;
  const gpu_answer none = w.attend(a, b);
  REQUIRE(none.lse[0] == -INFINITY);
  for (int32_t d = 0; d < 64; ++d) REQUIRE(none.o[size_t(d)] == 0.0f);
  w.kv_len[0] = 20;
  w.kv_len[1] = 20;
  gpu_ask bounded = a;
  bounded.max_kv = 20;
  const auto short_want = w.oracle(a, b);
  w.kv_len[1] = 60;
  gpu_world::check(attend_all_ways(w, bounded, b), short_want, KVC_F16, KVC_F32);
}

TEST_CASE("key scores are what weights are made of") {
  for (const float cap : {0.0f, 20.0f}) {
    for (const int32_t group : {2, 12}) {
      gpu_world w({2, group, 64, 16, KVC_F16, layout::heads_first}, {60, 60}, 20);
      gpu_ask a;
      a.softmax = softmax_of(0.125f);
      a.softmax.soft_cap = cap;
      a.softmax.window = 50;
      a.want_scores = true;
      w.ask_queries(a);
      const kvc_batch b = w.batch_of(a);
      const auto want = w.oracle(a, b);
      const gpu_answer got = attend_all_ways(w, a, b);
      gpu_world::check(got, want, KVC_F16, KVC_F32);
      REQUIRE(want.score.size() == got.scores.size());
      for (size_t i = 0; i < want.score.size(); ++i) {
        const double log2_units = want.score[i] / std::log(2.0);
        if (std::isinf(log2_units)) {
          // -infinity, or left as it was where no tile was read.
          REQUIRE((got.scores[i] == -INFINITY || std::isnan(got.scores[i])));
        } else {
          REQUIRE(std::fabs(got.scores[i] - log2_units) < 2e-5);
        }
      }
    }
  }
}

TEST_CASE("offsets of blocks beyond 2^31 and 2^32 bytes are computed in 64 bits", "[machine]") {
  gpu_world w({2, 4, 64, 16, KVC_F16, layout::heads_first}, {40, 100}, 22);
  gpu_ask a;
  a.softmax = softmax_of(0.125f);
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

TEST_CASE("CPU and CUDA agree through the same structs") {
  for (const int32_t type : {KVC_F16, KVC_BF16}) {
    gpu_world w({2, 4, 128, 16, type, layout::tokens_first}, {1, 33, 200, 300}, 23);
    gpu_ask a;
    a.softmax = softmax_of(0.09f);
    a.softmax.window = 150;
    a.rows = {1, 2, 3, 4};
    a.q_type = type;
    a.width = 4;
    a.max_kv = 1024;
    w.ask_queries(a);
    const kvc_batch b = w.batch_of(a);
    const gpu_answer got = w.attend(a, b);
    std::vector<uint16_t> q16;
    for (const float x : w.q_values) q16.push_back(narrow16(x, type));
    auto on_cpu = attention::create(
        w.kv, {.q_heads = 8, .sequences = 4, .rows = 4, .slots = 300, .q_type = static_cast<element>(type)});
    REQUIRE(on_cpu);
    std::vector<float> o(got.o.size()), lse(got.lse.size());
    REQUIRE(on_cpu->run(w.kv, b, dense_rows(q16.data(), static_cast<element>(type), 8, 128), a.softmax,
                        dense_out(o.data(), element::f32, 8, 128, lse.data())));
    const double unit = type == KVC_F16 ? 0x1p-10 : 0x1p-7;
    for (size_t i = 0; i < o.size(); ++i) REQUIRE(std::fabs(o[i] - got.o[i]) < 3 * unit);
    for (size_t i = 0; i < lse.size(); ++i) REQUIRE(std::fabs(lse[i] - got.lse[i]) < 1e-4);
  }
}

TEST_CASE("a staged tile is written and read without bank conflicts", "[machine]") {
  for (const int32_t dim : {64, 80, 96, 128, 256}) {
    for (const int32_t group : {8, 16}) {
      gpu_world w({1, group, dim, 16, KVC_F16, layout::heads_first}, {512}, 24);
      gpu_ask a;
      a.softmax = softmax_of(0.1f);
      w.ask_queries(a);
      simt::backend& backend = simt::the_backend();
      backend.seed = 0;
      backend.stats = {};
      (void)w.attend(a);
      CAPTURE(dim, group, backend.stats.least);
      REQUIRE(backend.stats.least > 0);
      REQUIRE(backend.stats.conflicts() == 0);
    }
  }
}

TEST_CASE("an empty batch launches nothing", "[machine]") {
  gpu_world w({1, 2, 64, 16, KVC_F16, layout::heads_first}, {}, 25);
  gpu_ask a;
  a.softmax = softmax_of(0.125f);
  w.ask_queries(a);
  const int before = simt::the_backend().launches;
  const gpu_answer none = w.attend(a);
  REQUIRE(none.o.empty());
  REQUIRE(simt::the_backend().launches == before);
}

}  // namespace kvcache::test
