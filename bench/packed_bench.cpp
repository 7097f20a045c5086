// SPDX-License-Identifier: Apache-2.0
// Attention over packed blocks against what the machine can do. Names:
//   decode/<format>/D<dim>/G<query heads per kv head>/<length>/t<threads>
//     int8dot, k8v4dot, int4dot: the same with integer_dot; without a target
//   seal/<format>/D<dim>/<length>   64 tokens of a prefill: packing them against their append and attention
//   faster/<format>/than/<format>   decode at D64, G3, 4k: both in turn; the ratio of their times
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

constexpr kv_format dots(kv_format f) {
  f.integer_dot = true;
  return f;
}
/// Measured beside the others, without a target.
const named_format dot_formats[] = {
    {"int8dot", dots(both(code::int8, code::int8)), 0},
    {"k8v4dot", dots(both(code::int8, code::int4)), 0},
    {"int4dot", dots(both(code::int4, code::int4)), 0},
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
  bench::report(state, "ns/call", work, limit, reach != 0 ? bench::at_most_ratio(reach) : bench::no_target());
  state.counters["read_ns"] = read.median();
  state.counters["fma_ns"] = fma.best();
  state.counters["unpack_ns"] = unpack.best();
  state.counters["stored_ratio"] = work.median() / read.median();
}

/// Sealing a block of one layer, and for comparison the append and the attention of its 64 tokens, which read
/// what came before them from packed blocks.
void seal(benchmark::State& state, shape s) {
  s.rows = s.block;
  memory& m = memory::of(s);
  if (bench::failed(state, m.layers() > 0, "no memory for the planes")) return;
  caller at(s, m);
  if (bench::failed(state, at.ready(), "this machine does not have the target")) return;
  std::vector<float> rows(size_t(s.block) * kv_heads * size_t(s.dim));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = float(i % 17) / 16 - 0.5f;
  const kvc_rows values = dense_rows(rows.data(), element::f32, kv_heads, s.dim);
  std::vector<int64_t> slots(size_t(s.block));
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = int64_t(i);
  const kvc_command command{KVC_OP_SEAL, 0, 0, s.block, 0, 0, 0};
  bench::rounds work, limit;
  bool done = true;
  for (auto _ : state) {
    const double start = at.threads.seconds();
    done = done && append(m.planes.layer(0), values, values, {}, {.open_slots = slots}) && at.call(0);
    const double middle = at.threads.seconds();
    done = done && run({&m.planes.layer(0), 1}, {&command, 1});
    const double end = at.threads.seconds();
    limit.add((middle - start) * 1e9);
    work.add((end - middle) * 1e9);
    state.SetIterationTime(end - start);
  }
  if (bench::failed(state, done, "sealing failed")) return;
  bench::report(state, "ns/block", work, limit, bench::at_most_ratio(0.25));
}

/// One format, and what it is to be faster than, in turn.
void compare(benchmark::State& state, const shape& s, const shape& other) {
  memory one(s), two(other);
  if (bench::failed(state, one.layers() > 0 && two.layers() > 0, "no memory for the planes")) return;
  caller at(s, one), beside(other, two);
  bench::rounds work, limit;
  bool done = at.ready() && beside.ready();
  for (auto _ : state) {
    limit.add(beside.each_layer([&](int32_t layer) { done = done && beside.call(layer); }));
    work.add(at.each_layer([&](int32_t layer) { done = done && at.call(layer); }));
    state.SetIterationTime(work.best() * 1e-9);
  }
  if (bench::failed(state, done, "attend failed")) return;
  bench::report(state, "ns/call", work, limit, bench::at_most_ratio(1));
}

template <class Work>
void add_row(const std::string& name, Work work) {
  benchmark::RegisterBenchmark(name.c_str(), work)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(bench::quick() ? 3 : 11);
}

void add_decode(const named_format& f, const shape& s) {
  std::string name =
      std::string("decode/") + f.name + "/D" + std::to_string(s.dim) + "/G" + std::to_string(s.group);
  name.append("/").append(std::to_string(s.length / 1024)).append("k/t").append(std::to_string(s.threads));
  const double reach = f.reach;
  add_row(name, [s, reach](benchmark::State& state) { decode(state, s, reach); });
}

shape shape_of(const kv_format* f, int32_t dim, int32_t group, int32_t length, int32_t threads = 1) {
  return {.type = element::f16,
          .dim = dim,
          .group = group,
          .length = length,
          .threads = threads,
          .block = f != nullptr ? 64 : 16,
          .format = f};
}

void add_seals() {
  for (const named_format& f : formats) {
    for (const int32_t dim : {64, 128}) {
      for (const int32_t length : {512, 4096}) {
        const shape s = shape_of(&f.format, dim, 4, length);
        const std::string name =
            std::string("seal/") + f.name + "/D" + std::to_string(dim) + "/" + std::to_string(length);
        if (!bench::quick() || length == 512) add_row(name, [s](benchmark::State& state) { seal(state, s); });
      }
    }
  }
}

void add_comparisons() {
  const kv_format *int8 = &formats[0].format, *int4 = &formats[3].format;
  const shape whole = shape_of(nullptr, 64, 3, 4096), k8 = shape_of(int8, 64, 3, 4096),
              k4 = shape_of(int4, 64, 3, 4096);
  add_row("faster/int8/than/f16", [=](benchmark::State& state) { compare(state, k8, whole); });
  add_row("faster/int4/than/int8", [=](benchmark::State& state) { compare(state, k4, k8); });
}

const bool registered = [] {
  for (const named_format& f : formats) {
    for (const int32_t dim : {64, 128}) {
      for (const int32_t length : {4096, 32768}) {
        for (const int32_t group : {3, 4, 8}) {
          for (const int32_t threads : {1, 2}) {
            if (bench::quick() && (length > 4096 || group == 8)) continue;
            add_decode(f, shape_of(&f.format, dim, group, length, threads));
          }
        }
      }
    }
  }
  for (const named_format& f : dot_formats) {
    for (const int32_t dim : {64, 128}) {
      for (const int32_t group : {3, 4, 8}) {
        if (!bench::quick() || group != 8) add_decode(f, shape_of(&f.format, dim, group, 4096));
      }
    }
  }
  add_seals();
  add_comparisons();
  return true;
}();

}  // namespace
