// SPDX-License-Identifier: Apache-2.0
// Storing, rotating and joining rows with the CUDA kernels, run on the CPU: bit by bit against the CPU's own
// data plane where both compute the same numbers, else against double.
#include <cstring>

#include "kvcache/attend/data_plane.hpp"
#include "simt/gpu_world.hpp"

namespace kvcache::test {
namespace {

int64_t bytes_of_type(int32_t type) {
  return type == KVC_F32 ? 4 : 2;
}

/// Rows with random contents and gaps between heads.
struct some_rows {
  some_rows(std::mt19937& random, int32_t n, int32_t heads, int32_t dim, int32_t type)
      : data(size_t(n * heads * (dim + 8)) * size_t(bytes_of_type(type))) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < data.size() / size_t(bytes_of_type(type)); ++i) {
      const float x = normal(random);
      if (type == KVC_F32) {
        std::memcpy(data.data() + 4 * i, &x, 4);
      } else {
        const uint16_t h = narrow16(x, type);
        std::memcpy(data.data() + 2 * i, &h, 2);
      }
    }
    rows = {data.data(),
            type,
            heads,
            dim,
            0,
            bytes_of_type(type) * (dim + 8) * heads,
            bytes_of_type(type) * (dim + 8)};
  }
  guarded<std::byte> data;
  kvc_rows rows{};
};

kvc_rope rope_of(int32_t style, int32_t dims) {
  kvc_rope r{};
  r.struct_size = sizeof r;
  r.style = style;
  r.dims = dims;
  r.theta = 10000.0;
  return r;
}

/// All bytes of a layer's planes, gaps included.
std::vector<std::byte> bytes_of(const kvc_kv& kv) {
  std::vector<std::byte> all;
  for (const kvc_plane* p : {&kv.k, &kv.v}) {
    const auto* from = static_cast<const std::byte*>(p->data);
    all.insert(all.end(), from, from + p->block_stride * kv.blocks);
  }
  return all;
}

}  // namespace

TEST_CASE("append stores the bits that the CPU stores, with and without rotation, from every type") {
  std::mt19937 random(4);
  for (const int32_t type : {KVC_F16, KVC_BF16}) {
    for (const int32_t from : {KVC_F32, KVC_F16, KVC_BF16}) {
      for (const int32_t rotated : {-1, int32_t{KVC_ROPE_INTERLEAVED}, int32_t{KVC_ROPE_HALF_SPLIT}}) {
        for (const int32_t dims : {64, 32}) {
          CAPTURE(type, from, rotated, dims);
          gpu_world on_cpu({2, 1, 64, 16, type, layout::tokens_first}, {0, 50}, 1);
          gpu_world on_gpu({2, 1, 64, 16, type, layout::tokens_first}, {0, 50}, 1);
          const int32_t n = 9;
          some_rows k(random, n, 2, 64, from), v(random, n, 2, 64, from);
          guarded<int64_t> slot(std::vector<int64_t>{3, -1, 16, 95, 17, 40, 31, 0, 64});
          guarded<int32_t> pos(std::vector<int32_t>{0, 1, 2, 77, 999, 5, 6, 100, 1023});
          kvc_rope rope = rope_of(rotated < 0 ? 0 : rotated, dims);
          guarded<float> table(size_t(1024) * size_t(dims));
          REQUIRE(kvc_cpu_rope_table(&rope, 1024, table.data(), nullptr) == KVC_OK);
          rope.table = table.data();
          rope.table_positions = 1024;
          kvc_append a{};
          a.struct_size = sizeof a;
          a.rows = n;
          a.k = k.rows;
          a.v = v.rows;
          a.slot = slot.data();
          a.pos = pos.data();
          if (rotated >= 0) a.rope = &rope;
          REQUIRE(kvc_cpu_append(&on_cpu.kv, &a, nullptr, nullptr) == KVC_OK);
          for (const uint32_t seed : {0u, 1u, 2u, 3u}) {
            simt::the_backend().seed = seed;
            REQUIRE(kvc_cuda_append(&on_gpu.kv, &a, nullptr, nullptr) == KVC_OK);
          }
          REQUIRE(bytes_of(on_cpu.kv) == bytes_of(on_gpu.kv));
        }
      }
    }
  }
}

TEST_CASE("heads may go to slots of their own, and slots outside the pool are skipped") {
  std::mt19937 random(5);
  gpu_world on_cpu({2, 1, 64, 8, KVC_F16, layout::interleaved}, {30}, 1);
  gpu_world on_gpu({2, 1, 64, 8, KVC_F16, layout::interleaved}, {30}, 1);
  some_rows k(random, 3, 2, 64, KVC_F32), v(random, 3, 2, 64, KVC_F32);
  guarded<int64_t> good(std::vector<int64_t>{1, 2, -1, 47, 5, -1});
  guarded<int64_t> wild(std::vector<int64_t>{1, 2, 48, 47, 5, INT64_MAX});
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = 3;
  a.k = k.rows;
  a.v = v.rows;
  a.slot = good.data();
  a.slot_head_stride = 1;
  REQUIRE(on_cpu.kv.blocks == 6);
  const auto same = [&] {  // without the gap behind the last block, which is not there
    const auto x = static_cast<const std::byte*>(on_cpu.kv.k.data),
               y = static_cast<const std::byte*>(on_gpu.kv.k.data);
    return std::memcmp(x, y, size_t(on_cpu.kv.k.block_stride * 6 - 64)) == 0;
  };
  REQUIRE(kvc_cpu_append(&on_cpu.kv, &a, nullptr, nullptr) == KVC_OK);
  REQUIRE_FALSE(same());
  a.slot = wild.data();
  REQUIRE(kvc_cuda_append(&on_gpu.kv, &a, nullptr, nullptr) == KVC_OK);
  REQUIRE(same());
}

TEST_CASE("slots beyond 2^31 elements are found", "[machine]") {
  std::mt19937 random(6);
  const int64_t far = (int64_t{1} << 31) + 4096;
  sparse_arena arena(size_t(far) * 8);
  kvc_kv kv{};
  kv.struct_size = sizeof kv;
  kv.kv_heads = 1;
  kv.dim_k = kv.dim_v = 64;
  kv.block = 16;
  kv.blocks = 4;
  kv.k.type = KVC_F16;
  kv.k.dim_stride = 2;
  kv.k.token_stride = 128;
  kv.k.head_stride = 2048;
  kv.k.block_stride = far;
  kv.v = kv.k;
  kv.k.data = arena.data();
  kv.v.data = arena.data() + 4 * far;
  some_rows k(random, 1, 1, 64, KVC_F16), v(random, 1, 1, 64, KVC_F16);
  const guarded<int64_t> slot(std::vector<int64_t>{3 * 16 + 5});
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = 1;
  a.k = k.rows;
  a.v = v.rows;
  a.slot = slot.data();
  REQUIRE(kvc_cuda_append(&kv, &a, nullptr, nullptr) == KVC_OK);
  REQUIRE(std::memcmp(arena.data() + 3 * far + 5 * 128, k.rows.data, 128) == 0);
  REQUIRE(std::memcmp(arena.data() + 7 * far + 5 * 128, v.rows.data, 128) == 0);
}

TEST_CASE("slots are counted in 64 bits", "[machine]") {
  std::mt19937 random(6);
  constexpr int64_t block = 1 << 16, blocks = 32770, stride = block * 16;
  sparse_arena arena(size_t(2 * blocks * stride));
  kvc_kv kv{};
  kv.struct_size = sizeof kv;
  kv.kv_heads = 1;
  kv.dim_k = kv.dim_v = 8;
  kv.block = block;
  kv.blocks = blocks;
  kv.k.type = KVC_F16;
  kv.k.dim_stride = 2;
  kv.k.token_stride = 16;
  kv.k.head_stride = kv.k.block_stride = stride;
  kv.v = kv.k;
  kv.k.data = arena.data();
  kv.v.data = arena.data() + blocks * stride;
  some_rows k(random, 1, 1, 8, KVC_F16), v(random, 1, 1, 8, KVC_F16);
  const guarded<int64_t> slot(std::vector<int64_t>{32769 * block + 7});
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = 1;
  a.k = k.rows;
  a.v = v.rows;
  a.slot = slot.data();
  REQUIRE(kvc_cuda_append(&kv, &a, nullptr, nullptr) == KVC_OK);
  REQUIRE(std::memcmp(arena.data() + 32769 * stride + 7 * 16, k.rows.data, 16) == 0);
  REQUIRE(std::memcmp(arena.data() + (blocks + 32769) * stride + 7 * 16, v.rows.data, 16) == 0);
}

TEST_CASE("rows are rotated as the CPU rotates them, in place too") {
  std::mt19937 random(7);
  for (const int32_t type : {KVC_F32, KVC_F16, KVC_BF16}) {
    for (const int32_t style : {KVC_ROPE_INTERLEAVED, KVC_ROPE_HALF_SPLIT}) {
      for (const int32_t dims : {80, 24}) {
        CAPTURE(type, style, dims);
        some_rows x(random, 5, 3, 80, type);
        const guarded<int32_t> pos(std::vector<int32_t>{0, 1, 63, 2, 40});
        kvc_rope rope = rope_of(style, dims);
        guarded<float> table(size_t(64) * size_t(dims));
        REQUIRE(kvc_cpu_rope_table(&rope, 64, table.data(), nullptr) == KVC_OK);
        rope.table = table.data();
        rope.table_positions = 64;
        guarded<std::byte> want(x.data.size());
        std::memcpy(want.data(), x.data.data(), want.size());
        REQUIRE(kvc_cpu_rope(&rope, &x.rows, 5, pos.data(), want.data(), nullptr, nullptr) == KVC_OK);
        for (const uint32_t seed : {0u, 1u, 2u, 3u}) {
          simt::the_backend().seed = seed;
          guarded<std::byte> got(x.data.size());
          std::memcpy(got.data(), x.data.data(), got.size());
          kvc_rows in_place = x.rows;
          in_place.data = got.data();
          REQUIRE(kvc_cuda_rope(&rope, &in_place, 5, pos.data(), got.data(), nullptr, nullptr) == KVC_OK);
          REQUIRE(std::memcmp(got.data(), want.data(), got.size()) == 0);
          // Elsewhere: every channel is written, and nothing between the heads.
          std::memset(got.data(), 0xff, got.size());
          REQUIRE(kvc_cuda_rope(&rope, &x.rows, 5, pos.data(), got.data(), nullptr, nullptr) == KVC_OK);
          const auto row = size_t(bytes_of_type(type) * 80), gap = size_t(bytes_of_type(type) * 8);
          for (size_t i = 0; i < 15; ++i) {
            const size_t at = i * (row + gap);
            REQUIRE(std::memcmp(got.data() + at, want.data() + at, row) == 0);
            for (size_t b = 0; b < gap; ++b) REQUIRE(got[at + row + b] == std::byte{0xff});
          }
        }
      }
    }
  }
}

TEST_CASE("without a table angles are exact at any position") {
  const int32_t dims = 128;
  std::vector<double> scaled(dims / 2);
  for (size_t i = 0; i < scaled.size(); ++i)
    scaled[i] = std::pow(5e5, -2.0 * double(i) / dims) / (1 + double(i % 3));
  for (const bool with_frequency : {false, true}) {
    kvc_rope rope = rope_of(KVC_ROPE_HALF_SPLIT, dims);
    if (with_frequency) rope.frequency = scaled.data();
    guarded<float> x(std::vector<float>(size_t(dims) * 6, 1.0f)), got(size_t(dims) * 6);
    const guarded<int32_t> pos(std::vector<int32_t>{0, 1, 4097, 200000, 1 << 30, -12345});
    const kvc_rows rows{x.data(), KVC_F32, 1, dims, 0, 4 * dims, 4 * dims};
    REQUIRE(kvc_cuda_rope(&rope, &rows, 6, pos.data(), got.data(), nullptr, nullptr) == KVC_OK);
    for (size_t r = 0; r < 6; ++r) {
      for (size_t i = 0; i < size_t(dims / 2); ++i) {
        const long double f = with_frequency ? scaled[i] : std::pow(10000.0L, -2.0L * i / dims);
        const long double angle = f * pos[r];
        // The frequency is a double: at position 2^30 its last bit is 1e-7 of a radian.
        const double slack = 4e-7 + std::fabs(double(pos[r])) * 3e-16;
        REQUIRE(std::fabs(got[r * size_t(dims) + i] - double(cosl(angle) - sinl(angle))) < slack);
        REQUIRE(std::fabs(got[r * size_t(dims) + size_t(dims / 2) + i] - double(sinl(angle) + cosl(angle))) <
                slack);
      }
    }
  }
}

TEST_CASE("merge joins what attends over parts of the keys gave, as the CPU does") {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  constexpr int32_t rows = 6, heads = 3, dim = 80;
  for (const int32_t n : {1, 2, 5, 16}) {
    for (const bool with_sink : {false, true}) {
      for (const int32_t out_type : {KVC_F32, KVC_F16, KVC_BF16}) {
        CAPTURE(n, with_sink, out_type);
        std::vector<some_rows> data;
        std::vector<guarded<float>> lse;
        std::vector<kvc_out> parts;
        for (int32_t i = 0; i < n; ++i) {
          const int32_t type = i % 3 == 0 ? KVC_F32 : i % 3 == 1 ? KVC_F16 : KVC_BF16;
          data.emplace_back(random, rows, heads, dim, type);
          lse.emplace_back(size_t(rows * heads));
          for (size_t j = 0; j < lse.back().size(); ++j) lse.back()[j] = 3 * normal(random) + 400;
          // Row 0: no part saw anything. Row 1: only part 0 did. An empty part's values may be anything.
          for (int32_t h = 0; h < heads; ++h) {
            lse.back()[size_t(h)] = -INFINITY;
            if (i != 0) lse.back()[size_t(heads + h)] = -INFINITY;
          }
          const kvc_rows& r = data.back().rows;
          std::memset(const_cast<void*>(r.data), 0xff, size_t(r.row_stride));
          kvc_out p{};
          p.struct_size = sizeof p;
          p.type = type;
          p.heads = heads;
          p.dim = dim;
          p.o = const_cast<void*>(r.data);
          p.row_stride = r.row_stride;
          p.head_stride = r.head_stride;
          p.lse2 = lse.back().data();
          parts.push_back(p);
        }
        const guarded<float> sinks(std::vector<float>{270.0f, 280.0f, -5.0f});
        const float* sink = with_sink ? sinks.data() : nullptr;
        guarded<std::byte> o[2] = {guarded<std::byte>(rows * heads * dim * size_t(bytes_of_type(out_type))),
                                   guarded<std::byte>(rows * heads * dim * size_t(bytes_of_type(out_type)))};
        guarded<float> l[2] = {guarded<float>(rows * heads), guarded<float>(rows * heads)};
        for (int side = 0; side < 2; ++side) {
          kvc_out out = dense_out(o[side].data(), static_cast<element>(out_type), heads, dim, l[side].data());
          const kvc_status s = side == 0
                                   ? kvc_cpu_merge(parts.data(), n, rows, sink, &out, nullptr)
                                   : kvc_cuda_merge(parts.data(), n, rows, sink, &out, nullptr, nullptr);
          REQUIRE(s == KVC_OK);
        }
        for (size_t i = 0; i < size_t(rows * heads); ++i) {
          if (std::isinf(l[0][i])) {
            REQUIRE(l[1][i] == l[0][i]);
          } else {
            REQUIRE(std::fabs(l[1][i] - l[0][i]) < 1e-4);
          }
        }
        for (size_t i = 0; i < size_t(rows * heads * dim); ++i) {
          float x[2];
          for (int side = 0; side < 2; ++side) {
            x[side] = out_type == KVC_F32
                          ? reinterpret_cast<const float*>(o[side].data())[i]
                          : widen16(reinterpret_cast<const uint16_t*>(o[side].data())[i], out_type);
          }
          const float unit = out_type == KVC_F32 ? 1e-5f : out_type == KVC_F16 ? 0x1p-10f : 0x1p-7f;
          REQUIRE(std::fabs(x[0] - x[1]) <= unit * (1 + std::fabs(x[0])));
        }
        // Into a part: the same bits.
        if (out_type != KVC_F32 || n == 1) continue;
        kvc_out into = parts[0];
        REQUIRE(kvc_cuda_merge(parts.data(), n, rows, sink, &into, nullptr, nullptr) == KVC_OK);
        for (size_t i = 0; i < size_t(rows * heads); ++i) REQUIRE(lse[0][i] == l[1][i]);
        for (size_t i = 0; i < size_t(rows * heads * dim); ++i) {
          const auto* to =
              static_cast<const float*>(into.o) + int64_t(i / dim) * into.head_stride / 4 + i % dim;
          REQUIRE(*to == reinterpret_cast<const float*>(o[1].data())[i]);
        }
      }
    }
  }
}

TEST_CASE("what was appended is attended to") {
  gpu_world w({2, 4, 64, 16, KVC_F16, layout::heads_first}, {37}, 9);
  gpu_ask a;
  a.softmax = softmax_of(0.125f);
  w.ask_queries(a);
  const gpu_answer before = w.attend(a);
  std::mt19937 random(10);
  some_rows k(random, 1, 2, 64, KVC_F16), v(random, 1, 2, 64, KVC_F16);
  const guarded<int64_t> slot(std::vector<int64_t>{int64_t{w.table[2]} * 16 + 36 % 16});
  kvc_append row{};
  row.struct_size = sizeof row;
  row.rows = 1;
  row.k = k.rows;
  row.v = v.rows;
  row.slot = slot.data();
  REQUIRE(kvc_cuda_append(&w.kv, &row, nullptr, nullptr) == KVC_OK);
  const gpu_answer after = w.attend(a);
  REQUIRE(after.o != before.o);
  gpu_world::check(after, w.oracle(a, w.batch_of(a)), KVC_F16, KVC_F32);
}

}  // namespace kvcache::test
