// SPDX-License-Identifier: Apache-2.0
// What it costs to know what keys got, each in turn with the attention it is added to. Names:
//   column_sums/<type>/D<dim>/G<query heads per kv head>[/per_head]
//                 a decode attention over 4,096 tokens whose scores are stored and added up, one sum per slot
//                 and kv head or query head; the limit is the same attention alone. 8 kv heads, 400 MB of
//                 layers
//   votes/<type>/D<dim>/G<...>
//                 prefill attention of a prompt of 4,096 tokens in chunks of 512, and what its keys got of
//                 the last 32 queries; the limit is that prefill alone
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "support/attention.hpp"
#include "support/machine.hpp"
#include "support/rounds.hpp"

using namespace kvcache;
using bench::caller;
using bench::kv_heads;
using bench::memory;
using bench::shape;

namespace {

/// Sums of every layer, and the scores of one call.
struct sums {
  sums(const shape& s, int32_t layers, bool per_head)
      : heads(per_head ? s.q_heads() : kv_heads),
        of_layers(size_t(layers), std::vector<float>(size_t(heads) * size_t(s.length))),
        scores(size_t(s.q_heads()) * size_t(s.length)) {}

  double total(int32_t layer) const {
    double t = 0;
    for (const float x : of_layers[size_t(layer)]) t += x;
    return t;
  }

  int32_t heads;
  std::vector<std::vector<float>> of_layers;  ///< [heads][slots]
  std::vector<float> scores;                  ///< [query heads][slots]
};

/// Attention that stores its scores, then what every key got.
bool attend_and_add(caller& at, const shape& s, int32_t layer, sums& to) {
  kvc_out out = at.out();
  out.key_score = to.scores.data();
  out.key_score_head_stride = s.length;
  kvc_score what = dense_score(KVC_SCORE_WEIGHT, to.of_layers[size_t(layer)].data(), s.length, at.lse2.data(),
                               to.heads == kv_heads);
  what.key_score = to.scores.data();
  what.key_score_head_stride = s.length;
  return at.run(layer, out) && at.score(layer, what);
}

void column_sums(benchmark::State& state, const shape& s, bool per_head) {
  memory& m = memory::of(s);
  if (bench::failed(state, m.layers() > 0, "no memory for the planes")) return;
  caller at(s, m);
  if (bench::failed(state, at.ready(), "no plan")) return;
  sums to(s, m.layers(), per_head);
  bench::rounds work, limit;
  bool done = true;
  for (auto _ : state) {
    const double plain = at.each_layer([&](int32_t layer) { done = done && at.call(layer); });
    const double ns = at.each_layer([&](int32_t layer) { done = done && attend_and_add(at, s, layer, to); });
    work.add(ns);
    limit.add(plain);
    state.SetIterationTime(ns * 1e-9);
  }
  // Every query head gives away 1 a call.
  const double right = double(state.iterations()) * s.q_heads();
  for (int32_t layer = 0; layer < m.layers(); ++layer) {
    done = done && std::abs(to.total(layer) - right) < 1e-3 * right;
  }
  if (bench::failed(state, done, "attention or sums failed")) return;
  bench::report(state, "ns/call", work, limit, bench::at_most_ratio(1.15));
  state.counters["best_ratio"] = work.best() / limit.best();
}

void votes(benchmark::State& state, const shape& prompt) {
  constexpr int32_t chunk = 512, window = 32;
  const int32_t length = bench::quick() ? 1024 : prompt.length;
  shape s = prompt;
  s.length = length;
  s.rows = chunk;
  memory& m = memory::of(s);
  if (bench::failed(state, m.layers() > 0, "no memory for the planes")) return;
  std::vector<std::unique_ptr<caller>> chunks;
  bool done = true;
  for (int32_t end = chunk; end <= length; end += chunk) {
    s.length = end;
    chunks.push_back(std::make_unique<caller>(s, m));
    done = done && chunks.back()->ready();
  }
  s.rows = window;
  caller last(s, m);
  if (bench::failed(state, done && last.ready() && last.call(0), "no plan")) return;
  std::vector<float> sum(size_t(s.q_heads()) * size_t(length));
  const kvc_score what = dense_score(KVC_SCORE_WEIGHT, sum.data(), length, last.lse2.data());
  bench::rounds work, limit;
  for (auto _ : state) {
    const double start = last.threads.seconds();
    for (const auto& one : chunks) done = done && one->call(0);
    const double middle = last.threads.seconds();
    done = done && last.score(0, what);
    const double end = last.threads.seconds();
    work.add((end - start) * 1e9);
    limit.add((middle - start) * 1e9);
    state.SetIterationTime(end - start);
  }
  double total = 0;
  for (const float x : sum) total += x;
  const double right = double(state.iterations()) * window * s.q_heads();
  done = done && std::abs(total - right) < 1e-3 * right;
  if (bench::failed(state, done, "attention or votes failed")) return;
  bench::report(state, "ns/prompt", work, limit, bench::at_most_ratio(1.05));
}

template <class Row, class... More>
void add(std::string name, Row&& row, int64_t iterations, const More&... more) {
  benchmark::RegisterBenchmark(name.c_str(), row, more...)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(bench::quick() ? 3 : iterations);
}

const bool registered = [] {
  for (const element type : {element::f32, element::f16}) {
    for (const auto& [dim, group] : {std::pair{64, 3}, {128, 4}}) {
      const shape s{.type = type, .dim = dim, .group = group};
      add("column_sums/" + bench::text_of(s), column_sums, 21, s, false);
      add("column_sums/" + bench::text_of(s) + "/per_head", column_sums, 21, s, true);
    }
  }
  for (const element type : {element::f32, element::f16}) {
    const shape s{.type = type, .dim = 64, .group = 3};
    add("votes/" + bench::text_of(s), votes, 5, s);
  }
  return true;
}();

}  // namespace
