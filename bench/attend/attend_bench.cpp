// SPDX-License-Identifier: Apache-2.0
// Attention against what the machine can do, measured in the same run on the same memory: decode against a
// plain read of the planes, prefill against the fused multiply-add peak. One thread. Names:
//   decode/<type>/<K order>/D<dim>/L<length>/G<query heads per kv head>     counters GB/s, of_read (one
//     sequential read of the same bytes) and of_block_read (the same blocks read in the table's order)
//   prefill/<type>/<K order>/D<dim>/L<length>/chunk<rows>                   counters GFLOP/s and of_peak
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/core/numeric.hpp"

using namespace kvcache;

namespace {

/// Seconds this thread has computed: other work on the machine does not count.
double now() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}
double seconds_since(double start) {
  return now() - start;
}

#if defined(__x86_64__)
bool wide() {
  return __builtin_cpu_supports("avx512f");
}

__attribute__((target("avx512f"))) float read_512(const float* p, size_t n) {
  __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
  for (size_t i = 0; i + 64 <= n; i += 64) {
    a = _mm512_add_ps(a, _mm512_loadu_ps(p + i));
    b = _mm512_add_ps(b, _mm512_loadu_ps(p + i + 16));
    c = _mm512_add_ps(c, _mm512_loadu_ps(p + i + 32));
    d = _mm512_add_ps(d, _mm512_loadu_ps(p + i + 48));
  }
  float sum[16];
  _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
  return std::accumulate(sum, sum + 16, 0.0f);
}

__attribute__((target("avx512f"))) float fma_512(int64_t rounds) {
  const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
  __m512 a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;
  for (int64_t r = 0; r < rounds; ++r) {
    asm("vfmadd213ps %[y], %[x], %[a]\n\tvfmadd213ps %[y], %[x], %[b]\n\tvfmadd213ps %[y], %[x], %[c]\n\t"
        "vfmadd213ps %[y], %[x], %[d]\n\tvfmadd213ps %[y], %[x], %[e]\n\tvfmadd213ps %[y], %[x], %[f]\n\t"
        "vfmadd213ps %[y], %[x], %[g]\n\tvfmadd213ps %[y], %[x], %[h]\n\tvfmadd213ps %[y], %[x], %[i]\n\t"
        "vfmadd213ps %[y], %[x], %[j]\n\tvfmadd213ps %[y], %[x], %[k]\n\tvfmadd213ps %[y], %[x], %[l]"
        : [a] "+v"(a), [b] "+v"(b), [c] "+v"(c), [d] "+v"(d), [e] "+v"(e), [f] "+v"(f), [g] "+v"(g),
          [h] "+v"(h), [i] "+v"(i), [j] "+v"(j), [k] "+v"(k), [l] "+v"(l)
        : [x] "v"(x), [y] "v"(y));
  }
  a = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)),
                    _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(e, f), _mm512_add_ps(g, h)),
                                  _mm512_add_ps(_mm512_add_ps(i, j), _mm512_add_ps(k, l))));
  float sum[16];
  _mm512_storeu_ps(sum, a);
  return sum[0];
}
#else
bool wide() {
  return false;
}
float read_512(const float*, size_t) {
  return 0;
}
float fma_512(int64_t) {
  return 0;
}
#endif

float read_plain(const float* p, size_t n) {
  float a[32] = {};
  for (size_t i = 0; i + 32 <= n; i += 32) {
    for (size_t k = 0; k < 32; ++k) a[k] += p[i + k];
  }
  return std::accumulate(a, a + 32, 0.0f);
}

/// Bytes per second of reading `runs` runs of `bytes` each in the given order, best of five.
double read_rate(const void* data, int64_t bytes, const std::vector<int32_t>& runs) {
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const double start = now();
    float sum = 0;
    for (const int32_t run : runs) {
      const auto* p = reinterpret_cast<const float*>(static_cast<const std::byte*>(data) + run * bytes);
      sum += wide() ? read_512(p, size_t(bytes) / 4) : read_plain(p, size_t(bytes) / 4);
    }
    benchmark::DoNotOptimize(sum);
    best = std::max(best, double(bytes) * double(runs.size()) / seconds_since(start));
  }
  return best;
}

/// Floating-point operations per second of independent fused multiply-adds, best of five.
double fma_rate() {
  double best = 0;
  for (int i = 0; i < 5 && wide(); ++i) {
    constexpr int64_t rounds = 4'000'000;
    const double start = now();
    benchmark::DoNotOptimize(fma_512(rounds));
    best = std::max(best, double(rounds) * 12 * 32 / seconds_since(start));
  }
  return best;
}

struct shape {
  element type = element::f32;
  k_order order = k_order::transposed;
  int32_t dim = 128, length = 4096, group = 4, rows = 1, block = 16;
  bool huge = false;
};

std::string name_of(const shape& s) {
  const char* types[] = {"f32", "f16", "bf16"};
  return std::string(types[int(s.type)]) + (s.order == k_order::transposed ? "/transposed" : "/row-major") +
         (s.block != 16 ? "/block" + std::to_string(s.block) : "") + (s.huge ? "/huge" : "") + "/D" +
         std::to_string(s.dim) + "/L" + std::to_string(s.length);
}

constexpr int32_t kv_heads = 8;

/// Layers of one long sequence each, tables shuffled, filled with small random values.
class setting {
 public:
  explicit setting(const shape& s, int64_t least_bytes) : shape_(s) {
    host_planes_config c;
    c.shape = {.layers = 1, .kv_heads = kv_heads, .head_dim_k = s.dim, .head_dim_v = s.dim, .type = s.type};
    c.order = s.order;
    c.block_size = s.block;
    c.blocks = s.length / s.block;
    const int64_t layer = host_planes::size_of(c).count;
    c.shape.layers = int32_t(std::max<int64_t>(1, (least_bytes + layer - 1) / layer));
    const size_t page = size_t{2} << 20;
    const size_t size = (size_t(host_planes::size_of(c).count) + page - 1) / page * page;
    memory_.reset(std::aligned_alloc(page, size));
    if (memory_ == nullptr) std::abort();
    madvise(memory_.get(), size, s.huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    c.memory = memory_.get();
    auto made = host_planes::create(c);
    if (!made) std::abort();
    planes = std::move(*made);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> some(4096);
    for (float& x : some) x = normal(random);
    auto* bytes = static_cast<std::byte*>(planes.data());
    for (int64_t i = 0; i < planes.size().count / element_bytes(s.type); ++i) {
      const float x = some[size_t((i * 7 + i / 4096) % 4096)];
      const uint16_t h = s.type == element::f16 ? to_f16(x).bits : to_bf16(x).bits;
      if (s.type == element::f32) std::memcpy(bytes + 4 * i, &x, 4);
      if (s.type != element::f32) std::memcpy(bytes + 2 * i, &h, 2);
    }
    table.resize(size_t(c.blocks));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    q.resize(size_t(s.rows * q_heads() * s.dim));
    for (float& x : q) x = normal(random);
    out.resize(q.size());
    for (int32_t i = 0; i < s.rows; ++i) positions.push_back(s.length - s.rows + i);
    auto a = attention::create(planes.layer(0), {.q_heads = q_heads(), .rows = s.rows, .slots = s.length});
    if (!a) std::abort();
    attend = std::move(*a);
  }

  int32_t q_heads() const { return kv_heads * shape_.group; }

  /// Every block of every layer in the order in which the table names them.
  std::vector<int32_t> shuffled_blocks() const {
    std::vector<int32_t> runs;
    for (size_t layer = 0; layer < planes.layers().size(); ++layer) {
      for (const int32_t id : table) runs.push_back(int32_t(layer * table.size()) + id);
    }
    return runs;
  }

  bool step(int32_t layer) {
    const int32_t starts[] = {0, shape_.rows};
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = 1;
    b.table = table.data();
    b.table_columns = int32_t(table.size());
    b.kv_len = &shape_.length;
    b.q_start = starts;
    b.q_pos = positions.data();
    return bool(attend.run(planes.layer(layer), b, dense_rows(q.data(), element::f32, q_heads(), shape_.dim),
                           causal_softmax(0.1f), dense_out(out.data(), element::f32, q_heads(), shape_.dim)));
  }

  host_planes planes;

 private:
  struct release {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, release> memory_;
  shape shape_;
  std::vector<int32_t> table, positions;
  std::vector<float> q, out;
  attention attend;
};

void decode(benchmark::State& state, const shape& s) {
  setting at(s, int64_t{400} << 20);
  const double limit = read_rate(at.planes.data(), at.planes.size().count, {0});
  const double by_block =
      read_rate(at.planes.data(), at.planes.layer(0).k.block_stride, at.shuffled_blocks());
  double best = 0;
  for (auto _ : state) {
    const double start = now();
    for (int32_t layer = 0; layer < int32_t(at.planes.layers().size()); ++layer) {
      if (!at.step(layer)) return state.SkipWithError("attend failed");
    }
    best = std::max(best, double(at.planes.size().count) / seconds_since(start));
  }
  state.counters["GB/s"] = best / 1e9;
  state.counters["read_GB/s"] = limit / 1e9;
  state.counters["of_read"] = best / limit;
  state.counters["of_block_read"] = best / by_block;
}

void prefill(benchmark::State& state, const shape& s) {
  setting at(s, 1);
  const double limit = fma_rate();
  const double seen = double(s.rows) * (s.length - s.rows) + double(s.rows) * (s.rows + 1) / 2;
  const double work = seen * at.q_heads() * s.dim * 4;
  double best = 0;
  for (auto _ : state) {
    const double start = now();
    if (!at.step(0)) return state.SkipWithError("attend failed");
    best = std::max(best, work / seconds_since(start));
  }
  state.counters["GFLOP/s"] = best / 1e9;
  state.counters["peak_GFLOP/s"] = limit / 1e9;
  if (limit > 0) state.counters["of_peak"] = best / limit;
}

void add(const shape& s) {
  const std::string base = name_of(s);
  if (s.rows == 1) {
    benchmark::RegisterBenchmark(("decode/" + base + "/G" + std::to_string(s.group)).c_str(), decode, s)
        ->Unit(benchmark::kMillisecond);
  } else {
    benchmark::RegisterBenchmark(("prefill/" + base + "/chunk" + std::to_string(s.rows)).c_str(), prefill, s)
        ->Unit(benchmark::kMillisecond);
  }
}

const bool registered = [] {
  for (const int32_t rows : {1, 512}) {
    for (const element type : {element::f32, element::f16, element::bf16}) {
      for (const k_order order : {k_order::transposed, k_order::row_major}) {
        for (const int32_t dim : {64, 128}) {
          add({.type = type, .order = order, .dim = dim, .rows = rows});
          if (order == k_order::transposed && rows == 1 && type != element::bf16) {
            for (const int32_t group : {1, 3, 8}) add({.type = type, .dim = dim, .group = group});
            for (const int32_t block : {8, 64}) add({.type = type, .dim = dim, .block = block});
            add({.type = type, .dim = dim, .length = 32768});
            add({.type = type, .dim = dim, .huge = true});
          }
        }
      }
    }
  }
  return true;
}();

}  // namespace
