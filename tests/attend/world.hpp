// SPDX-License-Identifier: Apache-2.0
#pragma once
// A small paged cache filled with random keys and values, and attention over it in double from the plain
// rows: the oracle shares no code with the data plane. Every slot that was not written holds NaN, block ids
// are permuted, and table entries past a sequence's end are wild.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/attend/rope.hpp"
#include "kvcache/core/numeric.hpp"
#include "support/environment.hpp"

namespace kvcache::test {

/// Executor that starts `width` real threads for every call.
class thread_executor {
 public:
  explicit thread_executor(int32_t width) : executor_{this, width, &run} {}
  const kvc_executor* get() const { return &executor_; }

 private:
  static void run(void*, void (*task)(void*, int32_t), void* arg, int32_t n) {
    std::vector<std::thread> threads;
    for (int32_t i = 1; i < n; ++i) threads.emplace_back(task, arg, i);
    task(arg, 0);
    for (auto& t : threads) t.join();
  }
  kvc_executor executor_;
};

/// Targets this machine can run, the scalar twin first.
inline std::vector<int32_t> targets() {
  std::vector<int32_t> found;
  for (const int32_t t : {KVC_TARGET_SCALAR, KVC_TARGET_AVX2, KVC_TARGET_AVX512, KVC_TARGET_NEON}) {
    kvc_plan_in in{};
    kvc_kv kv{};
    in.struct_size = sizeof in;
    kv.struct_size = sizeof kv;
    kv.kv_heads = kv.blocks = 1;
    kv.dim_k = kv.dim_v = 64;
    kv.block = 16;
    kv.k.block_stride = kv.k.head_stride = 4096;
    kv.k.token_stride = 4;
    kv.k.dim_stride = 64;
    kv.v = kv.k;
    in.kv = &kv;
    in.q_heads = in.n = in.max_q = 1;
    in.target = t;
    kvc_plan plan{};
    plan.struct_size = sizeof plan;
    if (kvc_cpu_plan(&in, &plan, nullptr) == KVC_OK) found.push_back(t);
  }
  return found;
}

inline float rounded(float v, element type) {
  if (type == element::f16) return to_float(to_f16(v));
  return type == element::bf16 ? to_float(to_bf16(v)) : v;
}

struct geometry {
  int32_t heads = 1, group = 1, dim_k = 64, dim_v = 64, block = 16;
  element type = element::f32;
  k_order order = k_order::transposed;
  bool alias = false;
  int32_t q_heads() const { return heads * group; }
};

/// Values of type float or double per row and head.
struct answer {
  std::vector<float> o, lse;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
inline bool same_bits(const answer& a, const answer& b) {
  return same_bits(a.o, b.o) && same_bits(a.lse, b.lse);
}

inline std::vector<float> normal(std::mt19937& random, size_t n) {
  std::normal_distribution<float> d;
  std::vector<float> v(n);
  for (float& x : v) x = d(random);
  return v;
}

/// Which query rows of which sequence one call attends with.
struct query {
  int32_t sequence = 0;
  std::vector<int32_t> positions;
  std::vector<float> values;  // [rows][q_heads][dim_k]
};

struct call {
  int32_t target = KVC_TARGET_BEST;
  int32_t width = 1;
  const kvc_executor* executor = nullptr;
  element q_type = element::f32, out_type = element::f32;
  bool want_lse = true;
  int32_t max_q = 0, max_kv = 0;  // 0 = what the call needs
};

class world {
 public:
  world(geometry g, const std::vector<int32_t>& lengths, uint32_t seed, int32_t spare_blocks = 3)
      : geo(g), random(seed), lengths_(lengths) {
    int32_t longest = 0, total = spare_blocks;
    for (const int32_t n : lengths) {  // drawn first: the same whatever the block size
      const auto slots = static_cast<size_t>(n);
      keys.push_back(normal(random, slots * static_cast<size_t>(g.heads * g.dim_k)));
      values.push_back(normal(random, slots * static_cast<size_t>(g.heads * g.dim_v)));
      longest = std::max(longest, n);
      total += ceil_div(n, g.block);
    }
    columns = std::max(ceil_div(longest, g.block), 1) + 2;
    host_planes_config c;
    c.shape = {.layers = 1,
               .kv_heads = g.heads,
               .head_dim_k = g.dim_k,
               .head_dim_v = g.dim_v,
               .type = g.type,
               .v_aliases_k = g.alias,
               .window = 0};
    c.block_size = g.block;
    c.blocks = std::max(total, 1);
    c.order = g.order;
    auto made = host_planes::create(c);
    REQUIRE(made);
    planes = std::move(*made);
    std::memset(planes.data(), 0xff, static_cast<size_t>(planes.size().count));  // NaN in every type
    std::vector<int32_t> ids(static_cast<size_t>(c.blocks));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::shuffle(ids.begin(), ids.end(), random);
    table.assign(lengths.size() * static_cast<size_t>(columns), std::numeric_limits<int32_t>::min());
    size_t next = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (int32_t b = 0; b < columns; ++b) {
        const bool used = b < ceil_div(lengths[s], g.block);
        table[s * static_cast<size_t>(columns) + static_cast<size_t>(b)] =
            used ? ids[next++] : (b % 2 != 0 ? std::numeric_limits<int32_t>::max() : -77);
      }
    }
  }

  const kvc_kv& kv() const { return planes.layer(0); }
  int32_t length(size_t s) const { return lengths_[s]; }
  int32_t* row_of_table(size_t s) { return table.data() + s * static_cast<size_t>(columns); }
  int64_t slot(size_t s, int32_t at) const {
    return int64_t{table[s * static_cast<size_t>(columns) + static_cast<size_t>(at / geo.block)]} *
               geo.block +
           at % geo.block;
  }

  /// Appends slots [first, last) of a sequence.
  void append_range(size_t s, int32_t first, int32_t last, const kvc_executor* executor = nullptr) {
    if (first == last) return;
    std::vector<int64_t> slots;
    for (int32_t i = first; i < last; ++i) slots.push_back(slot(s, i));
    const auto k = dense_rows(keys[s].data() + size_t(first) * size_t(geo.heads * geo.dim_k), element::f32,
                              geo.heads, geo.dim_k);
    const auto v = dense_rows(values[s].data() + size_t(first) * size_t(geo.heads * geo.dim_v), element::f32,
                              geo.heads, geo.dim_v);
    const status done = append(kv(), k, geo.alias ? kvc_rows{} : v, slots, {.executor = executor});
    if (!done) FAIL("append: " << to_text(done.code) << " " << done.field << " " << done.value);
  }
  void append_all() {
    for (size_t s = 0; s < lengths_.size(); ++s) append_range(s, 0, lengths_[s]);
  }

  query ask(int32_t sequence, std::vector<int32_t> positions) {
    query q{sequence, std::move(positions), {}};
    q.values = normal(random, q.positions.size() * static_cast<size_t>(geo.q_heads() * geo.dim_k));
    return q;
  }

  /// A batch over the given queries; `lens` are the kv lengths of the queries' sequences. `edit` may change
  /// the batch before it is used.
  template <class Edit>
  answer attend(const std::vector<query>& queries, const std::vector<int32_t>& lens,
                const kvc_softmax& softmax, const call& c, Edit&& edit) {
    std::vector<int32_t> batch_table, start{0}, positions;
    std::vector<float> q;
    int32_t longest = 0, most = 1;
    for (size_t i = 0; i < queries.size(); ++i) {
      const auto* row = row_of_table(static_cast<size_t>(queries[i].sequence));
      batch_table.insert(batch_table.end(), row, row + columns);
      positions.insert(positions.end(), queries[i].positions.begin(), queries[i].positions.end());
      q.insert(q.end(), queries[i].values.begin(), queries[i].values.end());
      start.push_back(static_cast<int32_t>(positions.size()));
      longest = std::max(longest, lens[i]);
      most = std::max(most, static_cast<int32_t>(queries[i].positions.size()));
    }
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = static_cast<int32_t>(queries.size());
    b.table = batch_table.data();
    b.table_columns = columns;
    b.kv_len = lens.data();
    b.q_start = start.data();
    b.q_pos = positions.data();
    edit(b);
    return run(b, q, positions.size(), softmax, c, most, longest);
  }
  answer attend(const std::vector<query>& queries, const std::vector<int32_t>& lens,
                const kvc_softmax& softmax, const call& c = {}) {
    return attend(queries, lens, softmax, c, [](kvc_batch&) {});
  }

  /// Double-precision attention of one query; `visible(row, slot)` decides about masks beyond the length.
  /// `rounding`: what float arithmetic may move each lse by, see lse_rounding.
  template <class Visible>
  void oracle(const query& q, int32_t len, const kvc_softmax& s, element q_type, Visible&& visible,
              std::vector<double>& o, std::vector<double>& lse,
              std::vector<double>* rounding = nullptr) const {
    const size_t seq = static_cast<size_t>(q.sequence);
    for (size_t r = 0; r < q.positions.size(); ++r) {
      for (int32_t h = 0; h < geo.q_heads(); ++h) {
        std::vector<double> score(static_cast<size_t>(len), -INFINITY);
        double top = s.sink_logit != nullptr ? s.sink_logit[h] : -INFINITY;
        double reach = 0;  // of a partial sum of a score
        for (int32_t j = 0; j < len; ++j) {
          if (!visible(static_cast<int32_t>(r), j)) continue;
          double sum = 0;
          for (int32_t d = 0; d < geo.dim_k; ++d) {
            sum += double{rounded(
                       q.values[(r * size_t(geo.q_heads()) + size_t(h)) * size_t(geo.dim_k) + size_t(d)],
                       q_type)} *
                   key(seq, j, h / geo.group, d);
            reach = std::max(reach, std::fabs(sum * s.scale));
          }
          sum *= s.scale;
          if (s.soft_cap > 0) sum = s.soft_cap * std::tanh(sum / s.soft_cap);
          score[static_cast<size_t>(j)] = sum;
          top = std::max(top, sum);
        }
        double total = s.sink_logit != nullptr ? std::exp(s.sink_logit[h] - top) : 0;
        std::vector<double> row(static_cast<size_t>(geo.dim_v), 0.0);
        for (int32_t j = 0; j < len; ++j) {
          if (score[static_cast<size_t>(j)] == -INFINITY) continue;
          const double w = std::exp(score[static_cast<size_t>(j)] - top);
          total += w;
          for (int32_t d = 0; d < geo.dim_v; ++d)
            row[static_cast<size_t>(d)] += w * val(seq, j, h / geo.group, d);
        }
        for (const double x : row) o.push_back(total == 0 ? 0.0 : x / total);
        lse.push_back(total == 0 ? -INFINITY : (top + std::log(total)) / std::log(2.0));
        if (rounding != nullptr) rounding->push_back(lse_rounding(len, reach, s.soft_cap, lse.back()));
      }
    }
  }

  /// How far a lse in base 2 may be off after float arithmetic. A score is a chain of dim_k fused
  /// multiply-adds: each rounds a partial sum, so errors add up like a random walk of dim_k steps of at most
  /// 2^-24 of the largest of them (Higham, Mary: A New Approach to Probabilistic Rounding Error Analysis,
  /// 2019, theorem 2.4, with a factor of 2). A lse moves by no more than the score that moves most. The sum
  /// of `len` weights rounds likewise, the cap by two units of itself, the result by one of its own.
  double lse_rounding(int32_t len, double reach, double soft_cap, double lse) const {
    const double unit = 0x1p-24, log2_e = 1 / std::log(2.0);
    const double score = 2 * std::sqrt(double(geo.dim_k)) * reach * log2_e;
    const double sum = 2 * std::sqrt(double(std::max(len, 1))) * log2_e;
    return unit * (score + sum + 2 * soft_cap * log2_e + (std::isfinite(lse) ? std::fabs(lse) : 0));
  }

  float key(size_t s, int32_t j, int32_t head, int32_t d) const {
    return rounded(keys[s][(size_t(j) * size_t(geo.heads) + size_t(head)) * size_t(geo.dim_k) + size_t(d)],
                   geo.type);
  }
  float val(size_t s, int32_t j, int32_t head, int32_t d) const {
    if (geo.alias) return key(s, j, head, d);
    return rounded(values[s][(size_t(j) * size_t(geo.heads) + size_t(head)) * size_t(geo.dim_v) + size_t(d)],
                   geo.type);
  }

  geometry geo;
  std::mt19937 random;
  host_planes planes;
  int32_t columns = 0;
  std::vector<int32_t> table;
  std::vector<std::vector<float>> keys, values;

 private:
  answer run(const kvc_batch& b, const std::vector<float>& q, size_t rows, const kvc_softmax& softmax,
             const call& c, int32_t most, int32_t longest) {
    auto at = attention::create(kv(), {.q_heads = geo.q_heads(),
                                       .sequences = std::max(b.n, 1),
                                       .rows = c.max_q != 0 ? c.max_q : most,
                                       .slots = c.max_kv != 0 ? c.max_kv : longest,
                                       .width = c.width,
                                       .q_type = c.q_type,
                                       .out_type = c.out_type,
                                       .target = c.target});
    if (!at) FAIL("plan: " << to_text(at.error().code) << " " << at.error().field);
    const size_t out_values = rows * static_cast<size_t>(geo.q_heads() * geo.dim_v);
    std::vector<uint16_t> q_small(c.q_type != element::f32 ? q.size() : 0), o_small(out_values);
    for (size_t i = 0; i < q_small.size(); ++i) {
      q_small[i] = c.q_type == element::f16 ? to_f16(q[i]).bits : to_bf16(q[i]).bits;
    }
    answer a;
    a.o.assign(out_values, -12345.0f);
    a.lse.assign(c.want_lse ? rows * static_cast<size_t>(geo.q_heads()) : 0, -12345.0f);
    const void* q_data = q_small.empty() ? static_cast<const void*>(q.data()) : q_small.data();
    void* o_data = c.out_type == element::f32 ? static_cast<void*>(a.o.data()) : o_small.data();
    const kvc_rows q_rows = dense_rows(q_data, c.q_type, geo.q_heads(), geo.dim_k);
    const kvc_out out =
        dense_out(o_data, c.out_type, geo.q_heads(), geo.dim_v, c.want_lse ? a.lse.data() : nullptr);
    // What the workspace held before must not matter: every float in it is NaN.
    std::vector<std::byte> workspace(at->plan().workspace_bytes, std::byte{0xff});
    kvc_error e{};
    const kvc_status done = kvc_cpu_attend(&at->plan(), &kv(), &b, &q_rows, &softmax, &out,
                                           {workspace.data(), workspace.size()}, c.executor, &e);
    if (done != KVC_OK) {
      FAIL("attend: " << kvc_status_text(done) << " " << kvc_field_text(e.field) << " " << e.value);
    }
    for (size_t i = 0; i < out_values && c.out_type != element::f32; ++i) {
      a.o[i] = c.out_type == element::f16 ? to_float(f16{o_small[i]}) : to_float(bf16{o_small[i]});
    }
    return a;
  }

  std::vector<int32_t> lengths_;
};

/// first, first + 1 ... last - 1.
inline std::vector<int32_t> range(int32_t first, int32_t last) {
  std::vector<int32_t> v(static_cast<size_t>(last - first));
  std::iota(v.begin(), v.end(), first);
  return v;
}

/// One of `from`.
template <class T>
T pick(std::mt19937& random, std::initializer_list<T> from) {
  return from.begin()[random() % from.size()];
}

/// Largest deviation from the oracle; infinite if either has an infinity the other has not.
inline double deviation(const std::vector<float>& a, const std::vector<double>& b) {
  double worst = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double x = a[i];
    if (std::isinf(x) && std::isinf(b[i]) && (x < 0) == (b[i] < 0)) continue;
    const double e = std::abs(x - b[i]);
    worst = std::isfinite(e) ? std::max(worst, e) : INFINITY;
  }
  return worst;
}

}  // namespace kvcache::test
