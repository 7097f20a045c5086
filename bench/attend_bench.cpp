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
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/core/numeric.hpp"
#include "support/machine.hpp"
#include "support/rounds.hpp"

using namespace kvcache;

namespace {

constexpr int32_t kv_heads = 8;

struct shape {
  element type = element::f32;
  int32_t dim = 128, group = 4, length = 4096, threads = 1, rows = 1, block = 16;
  k_order order = k_order::transposed;
  int32_t target = KVC_TARGET_BEST;
  bool aimed = true;  ///< has a target

  bool decode() const { return rows == 1; }
  int32_t q_heads() const { return kv_heads * group; }
};

/// Planes of many layers with one long sequence each, filled with small random values.
class memory {
 public:
  explicit memory(const shape& s) : shape_(s) {
    host_planes_config c;
    c.shape = {.layers = 1, .kv_heads = kv_heads, .head_dim_k = s.dim, .head_dim_v = s.dim, .type = s.type};
    c.order = s.order;
    c.block_size = s.block;
    c.blocks = s.length / s.block;
    const int64_t layer = host_planes::size_of(c).count;
    const int64_t least = !s.decode() ? 1 : bench::quick() ? int64_t{64} << 20 : int64_t{400} << 20;
    c.shape.layers = int32_t(std::max<int64_t>(1, (least + layer - 1) / layer));
    auto made = host_planes::create(c);
    if (!made) return;
    planes = std::move(*made);
    fill();
    table.resize(size_t(c.blocks));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
  }

  /// The memory of this shape: the last one made, if it fits.
  static memory& of(const shape& s) {
    static std::unique_ptr<memory> last;
    if (last == nullptr || !last->fits(s)) {
      last.reset();
      last = std::make_unique<memory>(s);
    }
    return *last;
  }

  int32_t layers() const { return int32_t(planes.layers().size()); }
  size_t bytes() const { return size_t(planes.size().count); }

  host_planes planes;
  std::vector<int32_t> table;

 private:
  bool fits(const shape& s) const {
    return s.type == shape_.type && s.dim == shape_.dim && s.length == shape_.length &&
           s.block == shape_.block && s.order == shape_.order && s.decode() == shape_.decode();
  }
  void fill() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::byte> some(1 << 20);
    const size_t element = size_t(element_bytes(shape_.type));
    for (size_t i = 0; i < some.size(); i += element) {
      const float x = normal(random);
      const uint16_t h = shape_.type == element::f16 ? to_f16(x).bits : to_bf16(x).bits;
      element == 4 ? std::memcpy(&some[i], &x, 4) : std::memcpy(&some[i], &h, 2);
    }
    auto* to = static_cast<std::byte*>(planes.data());
    for (size_t i = 0; i < bytes(); i += some.size()) {
      std::memcpy(to + i, some.data(), std::min(some.size(), bytes() - i));
    }
  }
  shape shape_;
};

/// One attend call over a layer of a memory.
class caller {
 public:
  caller(const shape& s, memory& m) : threads(s.threads), shape_(s), memory_(m) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    q_.resize(size_t(s.rows) * size_t(s.q_heads()) * size_t(s.dim));
    for (float& x : q_) x = normal(random);
    out_.resize(q_.size());
    for (int32_t i = 0; i < s.rows; ++i) positions_.push_back(s.length - s.rows + i);
    auto made = attention::create(
        m.planes.layer(0),
        {.q_heads = s.q_heads(), .rows = s.rows, .slots = s.length, .width = s.threads, .target = s.target});
    ready_ = bool(made);
    if (made) attend_ = std::move(*made);
  }

  bool ready() const { return ready_; }

  bool call(int32_t layer) {
    const int32_t starts[] = {0, shape_.rows};
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = 1;
    b.table = memory_.table.data();
    b.table_columns = int32_t(memory_.table.size());
    b.kv_len = &shape_.length;
    b.q_start = starts;
    b.q_pos = positions_.data();
    const kvc_rows q = dense_rows(q_.data(), element::f32, shape_.q_heads(), shape_.dim);
    const kvc_out out = dense_out(out_.data(), element::f32, shape_.q_heads(), shape_.dim);
    return bool(
        attend_.run(memory_.planes.layer(layer), b, q, causal_softmax(0.1f), out, threads.executor()));
  }

  /// Reads the blocks of a layer in the table's order.
  void read_blocks(int32_t layer) {
    const kvc_plane& k = memory_.planes.layer(layer).k;
    const int64_t blocks = int64_t(memory_.table.size()), each = blocks / threads.size();
    threads.each(threads.size(), [&](int t) {
      for (int64_t i = t * each; i < (t + 1) * each; ++i) {
        const auto* at = static_cast<const std::byte*>(k.data) + memory_.table[size_t(i)] * k.block_stride;
        bench::read_bytes(at, size_t(k.block_stride));
      }
    });
  }

  /// Nanoseconds of one run of `work` for each layer, per layer.
  template <class Work>
  double each_layer(Work&& work) {
    const double start = threads.seconds();
    for (int32_t layer = 0; layer < memory_.layers(); ++layer) work(layer);
    return (threads.seconds() - start) * 1e9 / memory_.layers();
  }

  bench::crew threads;

 private:
  shape shape_;
  memory& memory_;
  std::vector<int32_t> positions_;
  std::vector<float> q_, out_;
  attention attend_;
  bool ready_ = false;
};

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
  bench::rounds work, limit, read, fma, shuffled;
  bool done = true;
  const double layer_bytes = double(m.bytes()) / m.layers();
  for (auto _ : state) {
    const double read_ns =
        s.decode() ? bench::read_ns_per_byte(at.threads, m.planes.data(), m.bytes()) * layer_bytes : 0;
    const double fma_ns = bench::fma_ns_per_flop(at.threads) * flops(s);
    const double ns = at.each_layer([&](int32_t layer) { done = done && at.call(layer); });
    if (s.decode()) shuffled.add(at.each_layer([&](int32_t layer) { at.read_blocks(layer); }));
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
}

std::string name_of(const shape& s, const char* variant) {
  const char* types[] = {"f32", "f16", "bf16"};
  std::string name = s.decode() ? "decode/" : "prefill/";
  name.append(types[int(s.type)]);
  name.append("/D").append(std::to_string(s.dim));
  name.append("/G").append(std::to_string(s.group));
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
