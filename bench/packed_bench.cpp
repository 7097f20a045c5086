// SPDX-License-Identifier: Apache-2.0
// Attention over packed blocks against what the machine can do. Names:
//   decode/<format>/D<dim>/G<query heads per kv head>/<length>/t<threads>
//   seal/<format>/D<dim>/t1      64 tokens: sealing against their append and attention at 4,096 tokens
// An item of decode is one attend call over one sequence and layer, 8 kv heads, blocks of 64 slots, walking
// over at least 400 MB of layers whose tables are shuffled. Its limit is the longer of one sequential read of
// the stored bytes (best of five) and the multiplications at their peak plus unpacking measured alone, from
// and into caches, block by block. More counters:
//   read_ns, fma_ns, unpack_ns    these three
//   stored_ratio                  time over read_ns alone
#include <benchmark/benchmark.h>

#include <algorithm>
#include <string>

#include "kvcache/quant/format.hpp"
#include "support/attention.hpp"
#include "support/machine.hpp"
#include "support/rounds.hpp"

using namespace kvcache;
using bench::caller;
using bench::kv_heads;
using bench::memory;
using bench::shape;

namespace {

struct named_format {
  const char* name;
  kv_format format;
  double reach;  ///< times the limit
};

constexpr side_format side(code c, scale_axis axis) {
  return {.codes = c, .axis = axis, .group_size = 0, .symmetric = false, .clip = {}, .hadamard = false};
}
constexpr kv_format both(code k, code v) {
  return {.k = side(k, scale_axis::channel), .v = side(v, scale_axis::token), .residual = 0, .exempt = 0};
}

const named_format formats[] = {
    {"int8", both(code::int8, code::int8), 1.3}, {"fp8", both(code::e4m3, code::e4m3), 1.5},
    {"k8v4", both(code::int8, code::int4), 1.5}, {"int4", both(code::int4, code::int4), 1.6},
    {"int3", both(code::int3, code::int3), 1.8}, {"int2", both(code::int2, code::int2), 1.8},
};

/// Nanoseconds of unpacking as many blocks as a call reads, all threads sharing them: always the same few,
/// each head into the same place.
double unpack_ns(const shape& s, memory& m, bench::crew& threads, bool& done) {
  constexpr int32_t few[] = {0, 1, 2, 3};
  static thread_local std::vector<float> k, v;
  const int32_t rounds = s.length / s.block / 4 / threads.size();
  const double start = threads.seconds();
  threads.each(threads.size(), [&](int) {
    k.resize(size_t(s.block) * size_t(s.dim));
    v.resize(k.size());
    for (int32_t r = 0; r < rounds; ++r) {
      for (int32_t h = 0; h < kv_heads; ++h) {
        const kvc_status got =
            kvc_cpu_unpack(&m.planes.layer(0), few, 4, h, k.data(), 0, v.data(), 0, s.target, nullptr);
        if (got != KVC_OK) done = false;
      }
    }
  });
  return (threads.seconds() - start) * 1e9;
}

void decode(benchmark::State& state, const shape& s, double reach) {
  memory& m = memory::of(s);
  if (bench::failed(state, m.layers() > 0, "no memory for the planes")) return;
  caller at(s, m);
  if (bench::failed(state, at.ready(), "this machine does not have the target")) return;
  bench::rounds work, limit, read, fma, unpack;
  bool done = true;
  const auto layer_bytes =
      double(layer_block_bytes(
          *s.format,
          {.layers = 1, .kv_heads = kv_heads, .head_dim_k = s.dim, .head_dim_v = s.dim, .type = s.type},
          s.block)) *
      (s.length / s.block);
  const double flops = double(s.length) * s.q_heads() * s.dim * 4;
  for (auto _ : state) {
    const double read_ns = bench::read_ns_per_byte(at.threads, m.planes.data(), m.bytes()) * layer_bytes;
    const double fma_ns = bench::fma_ns_per_flop(at.threads) * flops;
    unpack.add(unpack_ns(s, m, at.threads, done));
    const double ns = at.each_layer([&](int32_t layer) { done = done && at.call(layer); });
    work.add(ns);
    read.add(read_ns);
    fma.add(fma_ns);
    limit.add(std::max(read_ns, fma.best() + unpack.best()));
    state.SetIterationTime(ns * 1e-9);
  }
  if (bench::failed(state, done, "attend failed")) return;
  bench::report(state, "ns/call", work, limit, bench::at_most_ratio(reach));
  state.counters["read_ns"] = read.median();
  state.counters["fma_ns"] = fma.best();
  state.counters["unpack_ns"] = unpack.best();
  state.counters["stored_ratio"] = work.median() / read.median();
}

void add(const named_format& f, const shape& s) {
  std::string name =
      std::string("decode/") + f.name + "/D" + std::to_string(s.dim) + "/G" + std::to_string(s.group);
  name.append("/").append(std::to_string(s.length / 1024)).append("k/t").append(std::to_string(s.threads));
  const double reach = f.reach;
  benchmark::RegisterBenchmark(name.c_str(), [s, reach](benchmark::State& state) { decode(state, s, reach); })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(bench::quick() ? 3 : 11);
}

const bool registered = [] {
  for (const named_format& f : formats) {
    for (const int32_t dim : {64, 128}) {
      for (const int32_t length : {4096, 32768}) {
        for (const int32_t group : {3, 4, 8}) {
          for (const int32_t threads : {1, 2}) {
            if (bench::quick() && (length > 4096 || group == 8)) continue;
            add(f, {.type = element::f16,
                    .dim = dim,
                    .group = group,
                    .length = length,
                    .threads = threads,
                    .block = 64,
                    .format = &f.format});
          }
        }
      }
    }
  }
  return true;
}();

}  // namespace
