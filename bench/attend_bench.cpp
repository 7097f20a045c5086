// SPDX-License-Identifier: Apache-2.0
// Attention against what the machine can do, limit and work in turn on the same memory. Names:
//   decode/<type>/D<dim>/G<query heads per kv head>/<length>/t<threads>[/<variant>]
//   prefill/<type>/D<dim>/G<query heads per kv head>/t<threads>[/<variant>]     512 rows at 4,096 tokens
// An item is one attend call: one sequence, one layer, 8 kv heads, blocks of 16 slots unless the variant says
// otherwise. Decode walks over at least 400 MB of layers whose tables are shuffled. Its limit is one
// sequential read of the same bytes (best of five) or, where that is longer, the multiplications at the peak
// of fused multiply-add; prefill's is the multiplications that no mask hides. More counters:
//   read_ns      the read, whichever the limit is       fma_ns   the multiplications at their peak
//   best_ratio   fastest round over fastest limit, for two threads on a machine that others use too
//   shuffled_ns  the same blocks read in the table's order, nothing computed
//   ahead_ns     the same, asking for what is read 8 KiB later
//   mixed_ns     the same with every value widened and multiplied G times (support/mixed.hpp), asking 4, 8 or
//                12 KiB ahead, whichever is fastest: what one core, or two, could do at best
//   cached_ns    the call itself over one block again and again, which stays in caches
#include <benchmark/benchmark.h>

#include <algorithm>
#include <string>

#include "support/attention.hpp"
#include "support/machine.hpp"
#include "support/rounds.hpp"

using namespace kvcache;
using bench::caller;
using bench::kv_heads;
using bench::memory;
using bench::shape;

namespace {

/// Multiplications and additions of a call that no mask hides.
double flops(const shape& s) {
  const double keys = double(s.rows) * (s.length - s.rows) + double(s.rows) * (s.rows + 1) / 2;
  return keys * s.q_heads() * s.dim * 4;
}

void attend(benchmark::State& state, const shape& s) {
  memory& m = memory::of(s);
  if (bench::failed(state, m.layers() > 0, "no memory for the planes")) return;
  caller at(s, m);
  if (bench::failed(state, at.ready(), "this machine does not have the target")) return;
  bench::rounds work, limit, read, fma, shuffled, ahead, cached, mixed[3];
  bool done = true, mixes = s.decode();
  int turn = 0;
  const double layer_bytes = double(m.bytes()) / m.layers();
  for (auto _ : state) {
    const double read_ns =
        s.decode() ? bench::read_ns_per_byte(at.threads, m.planes.data(), m.bytes()) * layer_bytes : 0;
    const double fma_ns = bench::fma_ns_per_flop(at.threads) * flops(s);
    const double ns = at.each_layer([&](int32_t layer) { done = done && at.call(layer); });
    if (s.decode()) shuffled.add(at.each_layer([&](int32_t layer) { at.read_blocks(layer, false); }));
    if (s.decode()) ahead.add(at.each_layer([&](int32_t layer) { at.read_blocks(layer, true); }));
    if (s.decode()) cached.add(at.each_layer([&](int32_t) { done = done && at.call_in_cache(); }));
    if (mixes) {
      bench::rounds& r = mixed[turn % 3];
      const size_t bytes = size_t{4096} * size_t(turn++ % 3 + 1);
      r.add(at.each_layer([&](int32_t layer) { mixes = mixes && at.multiply_blocks(layer, bytes); }));
    }
    work.add(ns);
    read.add(read_ns);
    fma.add(fma_ns);  // neighbours on the same cores spoil it, nothing else does: the best counts
    limit.add(std::max(read_ns, fma.best()));
    state.SetIterationTime(ns * 1e-9);
  }
  if (bench::failed(state, done, "attend failed")) return;
  const bool by_memory = read.median() >= fma.best();
  const double share = !s.decode() ? 0.5 : !by_memory ? 0.7 : s.type == element::f32 ? 0.85 : 0.75;
  bench::report(state, "ns/call", work, limit,
                s.aimed ? bench::at_most_ratio(1 / share) : bench::no_target());
  if (!s.decode()) return;
  state.counters["best_ratio"] = work.best() / limit.best();
  state.counters["read_ns"] = read.median();
  state.counters["fma_ns"] = fma.best();
  state.counters["shuffled_ns"] = shuffled.median();
  state.counters["ahead_ns"] = ahead.median();
  state.counters["cached_ns"] = cached.median();
  if (!mixes) return;
  state.counters["mixed_ns"] = std::min({mixed[0].median(), mixed[1].median(), mixed[2].median()});
}

std::string name_of(const shape& s, const char* variant) {
  std::string name = s.decode() ? "decode/" : "prefill/";
  name.append(bench::text_of(s));
  if (s.decode()) name.append("/").append(std::to_string(s.length / 1024)).append("k");
  return name.append("/t").append(std::to_string(s.threads)).append(variant);
}

void add(const shape& s, const char* variant = "") {
  benchmark::RegisterBenchmark(name_of(s, variant).c_str(), attend, s)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(bench::quick() ? 3 : 11);
}

void add_decode(const shape& memory) {
  for (const int32_t group : {1, 3, 4, 8}) {
    for (const int32_t threads : {1, 2}) {
      shape s = memory;
      s.group = group;
      s.threads = threads;
      if (!bench::quick() || group >= 4) add(s);
    }
  }
}

/// What is supported but has no target: other layouts, other instruction sets.
void add_variants(element type) {
  add({.type = type, .block = 8, .aimed = false}, "/block8");
  add({.type = type, .block = 32, .aimed = false}, "/block32");
  add({.type = type, .block = 64, .aimed = false}, "/block64");
  add({.type = type, .order = k_order::row_major, .aimed = false}, "/row_major");
  add({.type = type, .target = KVC_TARGET_AVX2, .aimed = false}, "/avx2");
}

const bool registered = [] {
  for (const element type : {element::f32, element::f16}) {
    for (const int32_t dim : {64, 128}) {
      for (const int32_t length : {4096, 32768}) {
        if (!bench::quick() || length == 4096) add_decode({.type = type, .dim = dim, .length = length});
      }
    }
    if (!bench::quick()) add_variants(type);
    for (const int32_t dim : {64, 128}) {
      for (const int32_t threads : {1, 2}) add({.type = type, .dim = dim, .threads = threads, .rows = 512});
    }
  }
  if (!bench::quick()) add({.type = element::bf16, .aimed = false});
  return true;
}();

}  // namespace
