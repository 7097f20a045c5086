// SPDX-License-Identifier: Apache-2.0
// Attention of the CUDA kernels over packed blocks, run on the CPU, against double.
#include "kvcache/attend/data_plane.hpp"
#include "simt/gpu_world.hpp"
#include "simt/packed_world.hpp"

namespace kvcache::test {
namespace {

/// Runs a call under several schedules; all must give the same bits.
double check_packed(packed_world& w, const packed_ask& a, const std::vector<uint32_t>& seeds = {0, 1}) {
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  packed_world::answer first;
  for (const uint32_t seed : seeds) {
    simt::the_backend().seed = seed;
    CAPTURE(seed);
    packed_world::answer now = w.attend(a, b);
    if (seed == seeds.front()) {
      first = std::move(now);
    } else {
      REQUIRE(now.o == first.o);
      REQUIRE(now.lse == first.lse);
    }
  }
  return w.check(a, b, first);
}

packed_ask usual(int32_t dim) {
  packed_ask a;
  a.softmax = softmax_of(1 / std::sqrt(float(dim)));
  return a;
}

}  // namespace

TEST_CASE(
    "packed decode is right at every edge of a block and a tile, for every format, head dim and group") {
  struct shape {
    int32_t dim, group, heads;
  };
  for (const char* format : {"int8", "k=fp8,v=fp8", "int4", "k8v4"}) {
    for (const shape s : {shape{128, 1, 2},
                          {128, 4, 1},
                          {128, 16, 1},
                          {64, 3, 2},
                          {64, 12, 1},
                          {80, 5, 1},
                          {96, 9, 1},
                          {256, 2, 1},
                          {256, 16, 1}}) {
      for (const int32_t block : {32, 64, 128}) {
        CAPTURE(format, s.dim, s.group, block);
        packed_world w(
            {format, s.heads, s.group, s.dim, block},
            {{0, 0}, {1, 0}, {31, 0}, {32, 32}, {block + 1, block}, {200, 128}, {131, 128}, {96, 0}}, 7);
        check_packed(w, usual(s.dim));
      }
    }
  }
}

TEST_CASE("presets with rotated heads and exact first tokens are read as the CPU packs them") {
  for (const char* format : {"kv8", "kv6", "kv4", "fp8"}) {
    for (const int32_t dim : {64, 128, 256}) {
      for (const int32_t group : {1, 4, 12}) {
        CAPTURE(format, dim, group);
        packed_world w({format, 2, group, dim, 64, KVC_F16, 1},
                       {{0, 0}, {1, 0}, {63, 0}, {64, 64}, {65, 64}, {200, 128}, {200, 192}}, 8);
        check_packed(w, usual(dim));
      }
    }
  }
  for (const int32_t exempt : {2, 4}) {
    const std::string format = "int4:exempt=" + std::to_string(exempt);
    packed_world w({format.c_str(), 1, 4, 80, 32, KVC_F16, exempt},
                   {{0, 0}, {1, 0}, {3, 0}, {40, 32}, {33, 0}}, 9);
    check_packed(w, usual(80));
  }
}

TEST_CASE("values may have a scale for every 32, 64 or more channels, with minima or about 0") {
  for (const char* format : {"int8:group=0/32", "int4:group=0/64", "k8v4:group=0/32", "int8:symmetric=v",
                             "int4:symmetric=v,group=0/32", "k=fp8,v=fp8,group=0/32"}) {
    for (const int32_t dim : {64, 80, 128, 256}) {
      for (const int32_t group : {4, 16}) {
        CAPTURE(format, dim, group);
        packed_world w({format, 1, group, dim, 64}, {{70, 64}, {200, 128}, {130, 128}}, 10);
        check_packed(w, usual(dim), {0});
      }
    }
  }
}

TEST_CASE("splits of packed blocks change nothing but rounding, and fixed ones nothing at all") {
  for (const char* format : {"int8", "int4", "k=fp8,v=fp8"}) {
    for (const int32_t group : {2, 16}) {
      for (const int32_t width : {1, 3, 40}) {
        packed_world w({format, 1, group, 64, 32}, {{0, 0}, {1, 0}, {255, 224}, {256, 256}, {700, 640}}, 11);
        packed_ask a = usual(64);
        a.width = width;
        a.max_kv = 4096;
        REQUIRE((w.plan_of(a).splits > 1) == (width > 1));
        check_packed(w, a);
      }
    }
  }
  packed_world w({"int8", 1, 4, 64, 64}, {{2500, 2432}, {40, 0}, {4100, 4096}}, 12);
  packed_ask a = usual(64);
  a.features = KVC_USE_FIXED_SPLITS;
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  const auto together = w.attend(a, b);
  w.check(a, b, together);
  packed_ask wide = a;
  wide.max_kv = 9000;
  wide.width = 7;
  const auto other = w.attend(wide, b);
  REQUIRE(other.o == together.o);
  REQUIRE(other.lse == together.lse);
}

TEST_CASE("rows read a block packed or open by their own border") {
  for (const char* format : {"int8", "int4", "fp8"}) {
    const int32_t exempt = std::strcmp(format, "fp8") == 0 ? 1 : 0;
    for (const int32_t group : {1, 3, 8}) {
      CAPTURE(format, group);
      packed_world w({format, 2, group, 64, 32, KVC_F16, exempt}, {{100, 96}, {64, 64}, {70, 32}, {200, 160}},
                     13);
      packed_ask a = usual(64);
      a.rows = {5, 3, 0, 7};
      a.borders = {32, 64, 64, 96, 96, 0, 32, 64, 96, 96, 128, 128, 128, 160, 160};
      check_packed(w, a);
      a.width = 8;
      a.max_kv = 2048;
      check_packed(w, a);
    }
  }
}

TEST_CASE("a row's border matters, and so does the number of sealed slots") {
  packed_world w({"int4", 1, 2, 64, 32}, {{100, 96}}, 14);
  packed_ask a = usual(64);
  w.ask_queries(a);
  const auto sealed = w.attend(a, w.batch_of(a));
  a.borders = {64};
  const auto less = w.attend(a, w.batch_of(a));
  REQUIRE(sealed.o != less.o);
  a.borders = {};
  w.sealed[0] = 64;
  const auto fewer = w.attend(a, w.batch_of(a));
  REQUIRE(fewer.o == less.o);
}

TEST_CASE("all slots are sealed where no number is given") {
  for (const char* format : {"int8", "int4", "k8v4", "k=fp8,v=fp8"}) {
    packed_world w({format, 1, 4, 128, 32}, {{1, 0}, {31, 0}, {33, 32}, {64, 64}, {95, 64}, {607, 0}}, 15);
    packed_ask a = usual(128);
    a.name_sealed = false;
    w.ask_queries(a);
    kvc_batch b = w.batch_of(a);
    b.open_table = nullptr;
    w.check(a, b, w.attend(a, b));
  }
}

TEST_CASE("where no row reads open slots, what an open table names does not matter") {
  for (const char* format : {"int8", "k=fp8,v=fp8"}) {
    for (const int32_t group : {4, 16}) {
      CAPTURE(format, group);
      packed_world w({format, 1, group, 64, 32}, {{1, 1}, {40, 40}, {64, 64}, {95, 96}}, 24);
      packed_ask a = usual(64);
      w.ask_queries(a);
      const auto before = w.attend(a, w.batch_of(a));
      const int32_t* ids = w.open_table.data();
      int32_t spare = 0;  // its numbers are NaN
      while (std::find(ids, ids + w.open_table.size(), spare) != ids + w.open_table.size()) ++spare;
      REQUIRE(spare < w.kv.open_blocks);
      for (size_t i = 0; i < w.open_table.size(); ++i) w.open_table[i] = spare;
      for (const bool named : {true, false}) {
        a.name_sealed = named;
        const kvc_batch b = w.batch_of(a);
        const auto got = w.attend(a, b);
        w.check(a, b, got);
        REQUIRE(got.o == before.o);
      }
    }
  }
}

TEST_CASE("open blocks need not hold the slots that are read from the exempt space") {
  for (const int32_t exempt : {1, 4}) {
    const std::string format = "int8:exempt=" + std::to_string(exempt);
    for (const int32_t group : {4, 16}) {
      for (const int32_t dim : {64, 80, 256}) {
        CAPTURE(exempt, group, dim);
        packed_world w({format.c_str(), 1, group, dim, 32, KVC_F16, exempt}, {{2, 0}, {30, 0}, {70, 32}}, 25);
        for (size_t s = 0; s < 3; ++s) {
          for (const kvc_plane* p : {&w.kv.open_k, &w.kv.open_v}) {
            auto* block =
                static_cast<std::byte*>(p->data) + w.open_table[s * size_t(w.columns)] * p->block_stride;
            for (int32_t i = 0; i < exempt; ++i) {
              std::memset(block + i * p->token_stride, 0xff, size_t(2 * dim));  // NaN
            }
          }
        }
        packed_ask a = usual(dim);
        if (exempt == 1) {
          a.rows = {1, 3, 2};
          a.borders = {0, 0, 0, 0, 0, 32};
        }
        check_packed(w, a, {0});
      }
    }
  }
}

TEST_CASE("open blocks may be bf16, and queries of any type") {
  for (const int32_t open : {KVC_F16, KVC_BF16}) {
    for (const int32_t q : {KVC_F32, KVC_F16, KVC_BF16}) {
      for (const int32_t group : {4, 16}) {
        CAPTURE(open, q, group);
        packed_world w({"int8", 1, group, 64, 32, open}, {{100, 64}, {20, 0}}, 16);
        packed_ask a = usual(64);
        a.q_type = q;
        check_packed(w, a, {0});
      }
    }
  }
}

TEST_CASE("window, soft cap, sinks and scores work over packed blocks") {
  const guarded<float> sinks(std::vector<float>{0.5f, -1.0f, 3.0f, 0.0f});
  for (const char* format : {"int8", "kv4", "k=fp8,v=fp8"}) {
    const int32_t exempt = std::strcmp(format, "kv4") == 0 ? 1 : 0;
    for (const int32_t window : {0, 1, 5, 33, 64, 100}) {
      for (const float cap : {0.0f, 15.0f}) {
        for (const bool sink : {false, true}) {
          CAPTURE(format, window, cap, sink);
          packed_world w({format, 1, 4, 64, 32, KVC_F16, exempt}, {{130, 96}, {60, 32}, {3, 0}}, 17);
          packed_ask a = usual(64);
          a.softmax.window = window;
          a.softmax.soft_cap = cap;
          a.softmax.sink_logit = sink ? sinks.data() : nullptr;
          a.want_scores = cap > 0 || window == 33;
          a.rows = {2, 1, 1};
          check_packed(w, a, {0});
          a.width = 8;
          a.max_kv = 1024;
          check_packed(w, a, {0});
        }
      }
    }
  }
}

TEST_CASE("absent packed and open blocks are not attended, and wild contents are harmless") {
  for (const char* format : {"int8", "int4", "k=fp8,v=fp8"}) {
    for (const int32_t wild : {-1, INT32_MIN, 1 << 20, INT32_MAX}) {
      CAPTURE(format, wild);
      packed_world w({format, 1, 4, 64, 32}, {{31, 0}, {200, 128}, {150, 128}, {900, 832}}, 18);
      packed_ask a = usual(64);
      w.ask_queries(a);
      const kvc_batch b = w.batch_of(a);
      const auto before = w.attend(a, b);
      // Of the first text all, of the second a sealed and an open block, of the third the last sealed one.
      w.open_table[0] = wild;
      w.table[size_t(w.columns) + 1] = w.open_table[size_t(w.columns) + 5] = wild;
      w.table[size_t(w.columns) * 2 + 3] = wild;
      // Of the fourth one that a warp comes to later.
      w.table[size_t(w.columns) * 3 + 21] = wild;
      w.absent = {{0, 0}, {1, 1}, {1, 5}, {2, 3}, {3, 21}};
      const auto after = w.attend(a, b);
      REQUIRE(after.lse[0] == -INFINITY);
      REQUIRE(after.o != before.o);
      w.check(a, b, after);
    }
  }
  packed_world w({"int8", 1, 2, 64, 32}, {{96, 64}, {64, 64}}, 19);
  packed_ask a = usual(64);
  a.softmax.causal = 0;
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  const auto plain = w.attend(a, b);
  w.sealed[1] = INT32_MAX;
  w.kv_len[0] = INT32_MAX;  // three columns: 96
  packed_ask far = a;
  far.max_kv = 1 << 20;
  const auto cut = w.attend(far, b);
  w.check(a, b, cut);
  w.kv_len[0] = 96;
  w.sealed[0] = -7;
  w.sealed[1] = -7;
  (void)w.attend(a, b);  // reads open blocks that are NaN by now, and nothing outside
  w.sealed[0] = 64;
  w.sealed[1] = 64;
  const auto again = w.attend(a, b);
  REQUIRE(again.o == plain.o);
}

TEST_CASE("without a block of the exempt space first slots are read as the others") {
  for (const char* format : {"kv4", "fp8"}) {
    for (const int32_t id : {-1, INT32_MIN, 1000, INT32_MAX}) {
      CAPTURE(format, id);
      packed_world w({format, 1, 4, 64, 32, KVC_F16, 1}, {{70, 64}, {100, 64}, {20, 0}}, 24);
      w.exempt_table[0] = w.exempt_table[2] = id;
      w.unnamed = {0, 2};
      check_packed(w, usual(64), {0});
    }
  }
}

TEST_CASE("many keys of little weight count beside one of much") {
  for (const char* format : {"int8", "k=fp8,v=fp8", "int4"}) {
    packed_world w({format, 1, 1, 64, 64, KVC_F16, 0, 5}, {{12800, 12800}}, 25);
    packed_ask a = usual(64);
    w.ask_queries(a);
    for (size_t i = 0; i < w.q_values.size(); ++i) w.q_values[i] = i % 64 == 0 ? 1.0f : 0.0f;
    simt::the_backend().seed = 0;
    const kvc_batch b = w.batch_of(a);
    CAPTURE(format);
    const double off = w.check(a, b, w.attend(a, b));
    REQUIRE(off < 0.002);  // far below what rounding such a score may do
  }
}

TEST_CASE("CPU and CUDA agree over packed blocks through the same structs") {
  for (const char* format : {"kv8", "kv4", "fp8", "int8", "k8v4"}) {
    const int32_t exempt = format[0] == 'i' || std::strcmp(format, "k8v4") == 0 ? 0 : 1;
    packed_world w({format, 2, 4, 128, 64, KVC_F16, exempt}, {{1, 0}, {100, 64}, {200, 128}, {300, 256}}, 20);
    packed_ask a = usual(128);
    a.rows = {1, 2, 3, 4};
    a.borders = {0, 0, 64, 64, 128, 128, 192, 256, 256, 256};
    a.softmax.window = 150;
    w.ask_queries(a);
    kvc_batch b = w.batch_of(a);
    const auto got = w.attend(a, b);
    w.make_safe();
    auto on_cpu = attention::create(w.kv, {.q_heads = 8, .sequences = 4, .rows = 4, .slots = 300});
    REQUIRE(on_cpu);
    std::vector<float> o(got.o.size()), lse(got.lse.size());
    const status ran = on_cpu->run(w.kv, b, dense_rows(w.q_values.data(), element::f32, 8, 128), a.softmax,
                                   dense_out(o.data(), element::f32, 8, 128, lse.data()));
    CAPTURE(format, ran.field);
    REQUIRE(ran);
    for (size_t i = 0; i < o.size(); ++i) REQUIRE(std::fabs(o[i] - got.o[i]) < 6e-3);
    for (size_t i = 0; i < lse.size(); ++i) REQUIRE(std::fabs(lse[i] - got.lse[i]) < 6e-3);
  }
}

TEST_CASE("rows of codes with gaps, and blocks far apart, are read by their strides", "[machine]") {
  for (const char* format : {"int8", "int4", "k8v4", "k=fp8,v=fp8"}) {
    for (const int64_t far : {int64_t{1} << 16, (int64_t{1} << 31) + 4096}) {
      CAPTURE(format, far);
      packed_world w({format, 2, 4, 64, 32}, {{70, 64}, {33, 32}}, 21);
      packed_ask a = usual(64);
      w.ask_queries(a);
      const kvc_batch b = w.batch_of(a);
      const auto near = w.attend(a, b);
      sparse_arena arena(size_t(far) * size_t(w.kv.blocks) * 2);
      w.spread_codes(arena.data(), far);
      const auto apart = w.attend(a, b);
      REQUIRE(apart.o == near.o);
      REQUIRE(apart.lse == near.lse);
    }
  }
}

TEST_CASE("packed tiles are read without bank conflicts", "[machine]") {
  for (const char* format : {"int8", "int4", "k8v4", "k=fp8,v=fp8"}) {
    for (const int32_t dim : {64, 80, 96, 128, 256}) {
      for (const int32_t group : {8, 16}) {
        packed_world w({format, 1, group, dim, 64}, {{512, 512}}, 22);
        packed_ask a = usual(dim);
        w.ask_queries(a);
        simt::backend& backend = simt::the_backend();
        backend.seed = 0;
        backend.stats = {};
        (void)w.attend(a, w.batch_of(a));
        CAPTURE(format, dim, group, backend.stats.least);
        REQUIRE(backend.stats.least > 0);
        REQUIRE(backend.stats.conflicts() == 0);
      }
    }
  }
}

TEST_CASE("what the kernels over codes cannot read is refused with its field") {
  struct wrong {
    const char* format;
    int32_t field, exempt;
  };
  for (const wrong& x : {wrong{"int6", KVC_FIELD_K, 0},
                         {"int3", KVC_FIELD_K, 0},
                         {"k=int4,v=int8", KVC_FIELD_V, 0},
                         {"k=e5m2,v=e5m2", KVC_FIELD_K, 0},
                         {"int8:group=32", KVC_FIELD_GROUP, 0},
                         {"int8:group=0/8", KVC_FIELD_GROUP, 0},
                         {"k=int8/token,v=int8", KVC_FIELD_SCALE, 0},
                         {"k=int8,v=int8/channel", KVC_FIELD_SCALE, 0},
                         {"int8:dot=integer", KVC_FIELD_INTEGER_DOT, 0},
                         {"k=int8", KVC_FIELD_V, 0}}) {
    CAPTURE(x.format);
    packed_world w({x.format, 1, 4, 64, 64, KVC_F16, x.exempt}, {}, 23);
    kvc_plan_in in{};
    in.struct_size = sizeof in;
    in.q_heads = 4;
    in.q_type = KVC_F16;
    in.n = in.max_q = 1;
    in.max_kv = 64;
    in.kv = &w.kv;
    kvc_plan plan{};
    plan.struct_size = sizeof plan;
    kvc_error e{};
    REQUIRE(kvc_cuda_plan(&in, &plan, &e) == KVC_UNSUPPORTED);
    CAPTURE(kvc_field_text(e.field));
    REQUIRE(e.field == x.field);
  }
}

}  // namespace kvcache::test
