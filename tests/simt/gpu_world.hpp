// SPDX-License-Identifier: Apache-2.0
#pragma once
// A batch over a paged cache in memory that notices wrong accesses, and attention over it in double from the
// plain numbers. Unwritten slots are NaN, block ids are permuted, entries of tables past a sequence's end are
// wild, and every array ends where an inaccessible page begins.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kvcache/core/numeric.hpp"
#include "kvcache/kvcache.h"
#include "simt/backend.hpp"
#include "simt/guarded.hpp"

namespace kvcache::test {

/// How a layer's cells lie in memory.
enum class layout {
  heads_first,   ///< [block][head][token][dim], K and V apart
  tokens_first,  ///< [block][token][head][dim], K and V apart
  interleaved    ///< [block][K, V][head][token][dim + 8], with a gap after each block
};

struct gpu_geometry {
  int32_t heads = 1, group = 1, dim = 64, block = 16;
  int32_t type = KVC_F16;
  layout order = layout::heads_first;
  int32_t q_heads() const { return heads * group; }
};

inline uint16_t narrow16(float v, int32_t type) {
  return type == KVC_F16 ? to_f16(v).bits : to_bf16(v).bits;
}
inline float widen16(uint16_t v, int32_t type) {
  return type == KVC_F16 ? to_float(f16{v}) : to_float(bf16{v});
}

/// What one attend call is asked.
struct gpu_ask {
  kvc_softmax softmax{};
  std::vector<int32_t> rows;       ///< of each sequence; empty: one each, q_start is NULL
  std::vector<int32_t> positions;  ///< of all rows; empty: the last ones of each sequence
  int32_t q_type = KVC_F16, out_type = KVC_F32;
  int32_t width = 1, max_kv = 0;
  uint32_t features = 0;
  bool want_scores = false;
};

struct gpu_answer {
  std::vector<float> o, lse;
  guarded<float> scores;
  kvc_plan plan{};
  int64_t score_pitch = 0;
};

/// Same geometry, lengths and seed: same content.
class gpu_world {
 public:
  gpu_world(const gpu_geometry& g, const std::vector<int32_t>& lengths, uint32_t seed)
      : geo(g), random(seed), length(lengths) {
    columns = 1;
    int32_t used = 2;
    for (const int32_t n : lengths) {
      columns = std::max(columns, (n + g.block - 1) / g.block);
      used += (n + g.block - 1) / g.block;
    }
    describe(used);
    std::vector<int32_t> ids(static_cast<size_t>(used));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    table = guarded<int32_t>(lengths.size() * static_cast<size_t>(columns));
    size_t next = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (int32_t c = 0; c < columns; ++c) {
        const bool used_here = c * g.block < lengths[s];
        table[s * size_t(columns) + size_t(c)] = used_here ? ids[next++] : c % 2 != 0 ? INT32_MAX : INT32_MIN;
      }
    }
    kv_len = guarded<int32_t>(lengths);
    for (size_t s = 0; s < lengths.size(); ++s) fill(s);
  }

  /// Where a value of K or V lies.
  uint16_t* cell(bool v, size_t s, int32_t slot, int32_t head, int32_t d) {
    const kvc_plane& p = v ? kv.v : kv.k;
    const int64_t id = table[s * size_t(columns) + size_t(slot / geo.block)];
    auto* at = static_cast<std::byte*>(p.data) + id * p.block_stride + head * p.head_stride +
               slot % geo.block * p.token_stride + d * 2;
    return reinterpret_cast<uint16_t*>(at);
  }
  float value(bool v, size_t s, int32_t slot, int32_t head, int32_t d) {
    return widen16(*cell(v, s, slot, head, d), geo.type);
  }

  /// Rows of a sequence, and the first of them.
  int32_t rows_of(const gpu_ask& a, size_t s) const { return a.rows.empty() ? 1 : a.rows[s]; }
  int32_t total_rows(const gpu_ask& a) const {
    return a.rows.empty() ? int32_t(length.size()) : std::accumulate(a.rows.begin(), a.rows.end(), 0);
  }

  /// Makes the arrays of a call; they live until the next one.
  kvc_batch batch_of(const gpu_ask& a) {
    std::vector<int32_t> start{0}, positions = a.positions;
    for (size_t s = 0; s < length.size(); ++s) {
      start.push_back(start.back() + rows_of(a, s));
      for (int32_t r = 0; a.positions.empty() && r < rows_of(a, s); ++r) {
        positions.push_back(length[s] - rows_of(a, s) + r);
      }
    }
    q_start = guarded<int32_t>(start);
    q_pos = guarded<int32_t>(positions);
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = int32_t(length.size());
    b.table = table.data();
    b.table_columns = columns;
    b.kv_len = kv_len.data();
    b.q_start = a.rows.empty() ? nullptr : q_start.data();
    b.q_pos = q_pos.data();
    return b;
  }

  /// Random queries, rounded to the planes' type so that every q_type holds them exactly.
  void ask_queries(const gpu_ask& a) {
    std::normal_distribution<float> normal;
    q_values.assign(size_t(total_rows(a)) * size_t(geo.q_heads() * geo.dim), 0.0f);
    for (float& x : q_values) x = widen16(narrow16(normal(random), geo.type), geo.type);
  }

  kvc_plan plan_of(const gpu_ask& a) {
    kvc_plan_in in{};
    in.struct_size = sizeof in;
    in.q_heads = geo.q_heads();
    in.q_type = a.q_type;
    in.out_type = a.out_type;
    in.n = std::max<int32_t>(int32_t(length.size()), 1);
    in.max_q = a.rows.empty() ? 1 : std::max(1, *std::max_element(a.rows.begin(), a.rows.end()));
    const int32_t longest = length.empty() ? 0 : *std::max_element(length.begin(), length.end());
    in.max_kv = a.max_kv != 0 ? a.max_kv : longest;
    in.width = a.width;
    in.features = a.features;
    in.kv = &kv;
    kvc_plan plan{};
    plan.struct_size = sizeof plan;
    kvc_error e{};
    const kvc_status s = kvc_cuda_plan(&in, &plan, &e);
    INFO("plan: " << s << " field " << e.field << " value " << e.value);
    REQUIRE(s == KVC_OK);
    return plan;
  }

  gpu_answer attend(const gpu_ask& a) {
    const kvc_batch b = batch_of(a);
    return attend(a, b);
  }
  gpu_answer attend(const gpu_ask& a, const kvc_batch& b) {
    gpu_answer answer;
    answer.plan = plan_of(a);
    const auto rows = size_t(total_rows(a));
    const int32_t heads = geo.q_heads();
    guarded<float> q32(a.q_type == KVC_F32 ? q_values.size() : 0);
    guarded<uint16_t> q16(a.q_type == KVC_F32 ? 0 : q_values.size());
    for (size_t i = 0; i < q32.size(); ++i) q32[i] = q_values[i];
    for (size_t i = 0; i < q16.size(); ++i) q16[i] = narrow16(q_values[i], a.q_type);
    const int64_t q_element = a.q_type == KVC_F32 ? 4 : 2, o_element = a.out_type == KVC_F32 ? 4 : 2;
    const void* q_data = a.q_type == KVC_F32 ? static_cast<void*>(q32.data()) : q16.data();
    const kvc_rows q{q_data, a.q_type, heads, geo.dim, 0, q_element * geo.dim * heads, q_element * geo.dim};
    // Results with a gap after each head: strides are not taken from shapes.
    const int64_t o_head = o_element * (geo.dim + 8);
    guarded<std::byte> o(rows * size_t(heads) * size_t(o_head) - (rows != 0 ? size_t(o_element * 8) : 0));
    guarded<float> lse(rows * size_t(heads));
    kvc_out out{};
    out.struct_size = sizeof out;
    out.type = a.out_type;
    out.heads = heads;
    out.dim = geo.dim;
    out.o = o.data();
    out.row_stride = o_head * heads;
    out.head_stride = o_head;
    out.lse2 = lse.data();
    if (a.want_scores) {
      answer.score_pitch = std::max(1, *std::max_element(length.begin(), length.end()));
      answer.scores = guarded<float>(rows * size_t(heads) * size_t(answer.score_pitch));
      out.key_score = answer.scores.data();
      out.key_score_head_stride = answer.score_pitch;
      out.key_score_stride = answer.score_pitch * heads;
    }
    guarded<std::byte> workspace((answer.plan.workspace_bytes + 15) / 16 * 16);
    kvc_error e{};
    const kvc_status s = kvc_cuda_attend(&answer.plan, &kv, &b, &q, &a.softmax, &out,
                                         {workspace.data(), workspace.size()}, nullptr, &e);
    INFO("attend: " << s << " field " << e.field << " value " << e.value << " " << simt::the_backend().fault);
    REQUIRE(s == KVC_OK);
    for (size_t r = 0; r < rows * size_t(heads); ++r) {
      answer.lse.push_back(lse[r]);
      for (int32_t d = 0; d < geo.dim; ++d) {
        const std::byte* at = o.data() + int64_t(r) * o_head + d * o_element;
        if (o_element == 4) {
          answer.o.push_back(*reinterpret_cast<const float*>(at));
        } else {
          answer.o.push_back(widen16(*reinterpret_cast<const uint16_t*>(at), a.out_type));
        }
      }
    }
    return answer;
  }

  /// In double. `spread`: what the weighted sum of magnitudes is, in which rounded weights err.
  struct reference {
    std::vector<double> o, spread, lse, score;
  };
  template <class Position>
  reference oracle(const gpu_ask& a, const kvc_batch& b, Position&& key_position) {
    reference out;
    size_t row = 0;
    for (size_t s = 0; s < length.size(); ++s) {
      for (int32_t r = 0; r < rows_of(a, s); ++r, ++row) {
        for (int32_t h = 0; h < geo.q_heads(); ++h) one(a, s, row, h, b.q_pos[row], key_position, out);
      }
    }
    return out;
  }
  reference oracle(const gpu_ask& a, const kvc_batch& b) {
    return oracle(a, b, [](size_t, int32_t, int32_t slot) { return slot; });
  }

  /// Checks every value: weights are rounded to the planes' type, results to the output's.
  static void check(const gpu_answer& got, const reference& want, int32_t type, int32_t out_type) {
    REQUIRE(got.lse.size() == want.lse.size());
    REQUIRE(got.o.size() == want.o.size());
    const double unit = type == KVC_F16 ? 0x1p-11 : 0x1p-8;
    const double last = out_type == KVC_F32 ? 0 : out_type == KVC_F16 ? 0x1p-11 : 0x1p-8;
    double worst = 0;
    for (size_t i = 0; i < want.o.size(); ++i) {
      const double allowed = 1.25 * unit * want.spread[i] + last * std::fabs(want.o[i]) + 1e-5;
      const double error = std::fabs(got.o[i] - want.o[i]) / allowed;
      worst = error <= worst ? worst : error;  // a NaN stays
      if (!(error <= 1)) {
        CAPTURE(i, got.o[i], want.o[i], allowed);
        REQUIRE(error <= 1);
      }
    }
    for (size_t i = 0; i < want.lse.size(); ++i) {
      CAPTURE(i, got.lse[i], want.lse[i]);
      if (std::isinf(want.lse[i])) {
        REQUIRE(got.lse[i] == -INFINITY);
      } else {
        REQUIRE(std::fabs(got.lse[i] - want.lse[i]) < 1e-4);
      }
    }
  }

  gpu_geometry geo;
  std::mt19937 random;
  std::vector<int32_t> length;
  kvc_kv kv{};
  int32_t columns = 0;
  guarded<int32_t> table, kv_len, q_start, q_pos;
  std::vector<float> q_values;

 private:
  void describe(int32_t blocks) {
    kv.struct_size = sizeof kv;
    kv.kv_heads = geo.heads;
    kv.dim_k = kv.dim_v = geo.dim;
    kv.block = geo.block;
    kv.blocks = blocks;
    kvc_plane p{};
    p.type = int16_t(geo.type);
    p.dim_stride = 2;
    const int64_t row = 2 * int64_t{geo.dim};
    if (geo.order == layout::interleaved) {
      p.token_stride = row + 16;
      p.head_stride = p.token_stride * geo.block;
      const int64_t half = p.head_stride * geo.heads;
      p.block_stride = 2 * half + 48;
      memory_k_ = guarded<std::byte>(size_t(p.block_stride * blocks - 48 - 16));
      p.data = memory_k_.data();
      kv.k = p;
      p.data = memory_k_.data() + half;
      kv.v = p;
      return;
    }
    const bool heads_first = geo.order == layout::heads_first;
    p.token_stride = heads_first ? row : row * geo.heads;
    p.head_stride = heads_first ? row * geo.block : row;
    p.block_stride = row * geo.block * geo.heads;
    memory_k_ = guarded<std::byte>(size_t(p.block_stride * blocks));
    memory_v_ = guarded<std::byte>(size_t(p.block_stride * blocks));
    p.data = memory_k_.data();
    kv.k = p;
    p.data = memory_v_.data();
    kv.v = p;
  }

  void fill(size_t s) {
    std::normal_distribution<float> normal;
    for (int32_t slot = 0; slot < length[s]; ++slot) {
      for (int32_t h = 0; h < geo.heads; ++h) {
        for (int32_t d = 0; d < geo.dim; ++d) {
          *cell(false, s, slot, h, d) = narrow16(normal(random), geo.type);
          *cell(true, s, slot, h, d) = narrow16(normal(random), geo.type);
        }
      }
    }
  }

  template <class Position>
  void one(const gpu_ask& a, size_t s, size_t row, int32_t h, int32_t q_position, Position&& key_position,
           reference& out) {
    const kvc_softmax& x = a.softmax;
    const int32_t head = h / geo.group, len = kv_len[s];
    const float* q = q_values.data() + (row * size_t(geo.q_heads()) + size_t(h)) * size_t(geo.dim);
    std::vector<double> score(size_t(len), -INFINITY);
    double top = x.sink_logit != nullptr ? double{x.sink_logit[h]} : -INFINITY;
    for (int32_t j = 0; j < len; ++j) {
      const int32_t id = table[s * size_t(columns) + size_t(j / geo.block)];
      const int64_t behind = int64_t{q_position} - key_position(s, head, j);
      if (id < 0 || id >= kv.blocks || (x.causal != 0 && behind < 0) ||
          (x.window > 0 && behind >= x.window)) {
        continue;
      }
      double sum = 0;
      for (int32_t d = 0; d < geo.dim; ++d) sum += double{q[d]} * value(false, s, j, head, d);
      sum *= x.scale;
      if (x.soft_cap > 0) sum = x.soft_cap * std::tanh(sum / x.soft_cap);
      score[size_t(j)] = sum;
      top = std::max(top, sum);
    }
    double total = x.sink_logit != nullptr ? std::exp(x.sink_logit[h] - top) : 0;
    std::vector<double> acc(size_t(geo.dim)), spread(size_t(geo.dim));
    for (int32_t j = 0; j < len; ++j) {
      if (score[size_t(j)] == -INFINITY) continue;
      const double w = std::exp(score[size_t(j)] - top);
      total += w;
      for (int32_t d = 0; d < geo.dim; ++d) {
        const double v = value(true, s, j, head, d);
        acc[size_t(d)] += w * v;
        spread[size_t(d)] += w * std::fabs(v);
      }
    }
    for (int32_t d = 0; d < geo.dim; ++d) {
      out.o.push_back(total > 0 ? acc[size_t(d)] / total : 0);
      out.spread.push_back(total > 0 ? spread[size_t(d)] / total : 0);
    }
    out.lse.push_back(total > 0 ? (top + std::log(total)) / std::log(2.0) : -INFINITY);
    if (a.want_scores) out.score.insert(out.score.end(), score.begin(), score.end());
  }

  guarded<std::byte> memory_k_, memory_v_;
};

inline kvc_softmax softmax_of(float scale, bool causal = true) {
  kvc_softmax s{};
  s.struct_size = sizeof s;
  s.scale = scale;
  s.causal = causal ? 1 : 0;
  return s;
}

}  // namespace kvcache::test
