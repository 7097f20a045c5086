// SPDX-License-Identifier: Apache-2.0
#pragma once
// A batch over packed blocks in memory that notices wrong accesses. Blocks are sealed by the CPU; slots of a
// sealed block past a sequence's end, open blocks that are sealed already, and everything unwritten are NaN;
// ids are permuted and unused table entries wild. The numbers that attention should compute with come from
// kvc_cpu_unpack, and what comes out is computed in double from them.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvcache/core/numeric.hpp"
#include "kvcache/kvcache.h"
#include "kvcache/quant/format.hpp"
#include "kvcache/quant/hadamard.hpp"
#include "simt/backend.hpp"
#include "simt/guarded.hpp"

namespace kvcache::test {

struct packed_geometry {
  const char* format = "int8";
  int32_t heads = 1, group = 1, dim = 64, block = 32;
  int32_t open_type = KVC_F16;
  int32_t exempt = 0;  ///< as the format says
  int32_t spike = -1;  ///< the only slot whose key is not 0; its first channel is 112
  int32_t q_heads() const { return heads * group; }
};

/// A sequence: slots in use, and how many of them are sealed.
struct packed_text {
  int32_t length = 0, sealed = 0;
};

struct packed_ask {
  kvc_softmax softmax{};
  std::vector<int32_t> rows;     ///< of each sequence; empty: one each
  std::vector<int32_t> borders;  ///< of all rows: row_sealed; empty: NULL
  int32_t q_type = KVC_F16, width = 1, max_kv = 0;
  uint32_t features = 0;
  bool want_scores = false, name_sealed = true;
};

class packed_world {
 public:
  packed_world(const packed_geometry& g, const std::vector<packed_text>& texts, uint32_t seed)
      : geo(g), random(seed), text(texts) {
    int32_t sealed_blocks = 2, open_blocks = 2;
    for (const packed_text& t : texts) {
      const int32_t all = (t.length + g.block - 1) / g.block;
      columns = std::max(columns, all);
      sealed_blocks += all;
      open_blocks += all;
    }
    describe(sealed_blocks, open_blocks, int32_t(texts.size()) + 1);
    table = wild_table(sealed_blocks);
    open_table = wild_table(open_blocks);
    exempt_table = guarded<int32_t>(texts.size());
    std::vector<int32_t> lengths, sealed_slots;
    for (size_t s = 0; s < texts.size(); ++s) {
      exempt_table[s] = kv.exempt > 0 ? int32_t(texts.size() - s) : -1;
      lengths.push_back(texts[s].length);
      sealed_slots.push_back(texts[s].sealed);
    }
    kv_len = guarded<int32_t>(lengths);
    sealed = guarded<int32_t>(sealed_slots);
    for (size_t s = 0; s < texts.size(); ++s) fill(s);
  }

  int32_t rows_of(const packed_ask& a, size_t s) const { return a.rows.empty() ? 1 : a.rows[s]; }
  int32_t total_rows(const packed_ask& a) const {
    return a.rows.empty() ? int32_t(text.size()) : std::accumulate(a.rows.begin(), a.rows.end(), 0);
  }

  kvc_batch batch_of(const packed_ask& a) {
    std::vector<int32_t> start{0}, positions;
    for (size_t s = 0; s < text.size(); ++s) {
      start.push_back(start.back() + rows_of(a, s));
      for (int32_t r = 0; r < rows_of(a, s); ++r) positions.push_back(text[s].length - rows_of(a, s) + r);
    }
    q_start = guarded<int32_t>(start);
    q_pos = guarded<int32_t>(positions);
    row_sealed = guarded<int32_t>(a.borders);
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = int32_t(text.size());
    b.table = table.data();
    b.table_columns = columns;
    b.open_table = open_table.data();
    b.kv_len = kv_len.data();
    b.sealed = a.name_sealed ? sealed.data() : nullptr;
    b.row_sealed = a.borders.empty() ? nullptr : row_sealed.data();
    b.exempt_table = kv.exempt > 0 ? exempt_table.data() : nullptr;
    b.q_start = a.rows.empty() ? nullptr : q_start.data();
    b.q_pos = q_pos.data();
    return b;
  }

  /// Queries that every type holds exactly.
  void ask_queries(const packed_ask& a) {
    std::normal_distribution<float> normal;
    q_values.assign(size_t(total_rows(a)) * size_t(geo.q_heads() * geo.dim), 0.0f);
    for (float& x : q_values) x = to_float(to_bf16(normal(random)));
  }

  kvc_plan plan_of(const packed_ask& a) {
    kvc_plan_in in{};
    in.struct_size = sizeof in;
    in.q_heads = geo.q_heads();
    in.q_type = a.q_type;
    in.out_type = KVC_F32;
    in.n = int32_t(text.size());
    in.max_q = a.rows.empty() ? 1 : std::max(1, *std::max_element(a.rows.begin(), a.rows.end()));
    for (const packed_text& t : text) in.max_kv = std::max(in.max_kv, t.length);
    if (a.max_kv != 0) in.max_kv = a.max_kv;
    in.width = a.width;
    in.features = a.features;
    in.kv = &kv;
    kvc_plan plan{};
    plan.struct_size = sizeof plan;
    kvc_error e{};
    const kvc_status s = kvc_cuda_plan(&in, &plan, &e);
    INFO("plan: " << s << " field " << kvc_field_text(e.field) << " value " << e.value);
    REQUIRE(s == KVC_OK);
    return plan;
  }

  struct answer {
    std::vector<float> o, lse;
    guarded<float> scores;
    int64_t score_pitch = 0;
    kvc_plan plan{};
  };

  answer attend(const packed_ask& a, const kvc_batch& b) {
    answer out;
    out.plan = plan_of(a);
    const auto rows = size_t(total_rows(a));
    const int32_t heads = geo.q_heads(), dim = geo.dim;
    guarded<float> q32(a.q_type == KVC_F32 ? q_values.size() : 0);
    guarded<uint16_t> q16(a.q_type == KVC_F32 ? 0 : q_values.size());
    for (size_t i = 0; i < q32.size(); ++i) q32[i] = q_values[i];
    for (size_t i = 0; i < q16.size(); ++i) {
      q16[i] = a.q_type == KVC_F16 ? to_f16(q_values[i]).bits : to_bf16(q_values[i]).bits;
    }
    const int64_t element = a.q_type == KVC_F32 ? 4 : 2;
    const void* data = a.q_type == KVC_F32 ? static_cast<void*>(q32.data()) : q16.data();
    const kvc_rows q{data, a.q_type, heads, dim, 0, element * dim * heads, element * dim};
    guarded<float> o(rows * size_t(heads) * size_t(dim)), lse(rows * size_t(heads));
    kvc_out to{};
    to.struct_size = sizeof to;
    to.type = KVC_F32;
    to.heads = heads;
    to.dim = dim;
    to.o = o.data();
    to.row_stride = int64_t{4} * dim * heads;
    to.head_stride = int64_t{4} * dim;
    to.lse2 = lse.data();
    if (a.want_scores) {
      for (const packed_text& t : text) out.score_pitch = std::max<int64_t>(out.score_pitch, t.length);
      out.scores = guarded<float>(rows * size_t(heads) * size_t(out.score_pitch));
      to.key_score = out.scores.data();
      to.key_score_head_stride = out.score_pitch;
      to.key_score_stride = out.score_pitch * heads;
    }
    guarded<std::byte> workspace((out.plan.workspace_bytes + 15) / 16 * 16);
    kvc_error e{};
    const kvc_status s = kvc_cuda_attend(&out.plan, &kv, &b, &q, &a.softmax, &to,
                                         {workspace.data(), workspace.size()}, nullptr, &e);
    INFO("attend: " << s << " field " << kvc_field_text(e.field) << " value " << e.value << " "
                    << simt::the_backend().fault);
    REQUIRE(s == KVC_OK);
    out.o.assign(o.data(), o.data() + o.size());
    out.lse.assign(lse.data(), lse.data() + lse.size());
    return out;
  }

  /// What a slot is as a row with this border reads it.
  float value(bool v, size_t s, int32_t slot, int32_t head, int32_t d, int32_t border) {
    const text_values& t = values_[s];
    const size_t at = (size_t(slot) * size_t(geo.heads) + size_t(head)) * size_t(geo.dim) + size_t(d);
    const bool exempt = slot < kv.exempt && std::find(unnamed.begin(), unnamed.end(), s) == unnamed.end();
    const bool exact = exempt || slot >= border;
    return exact ? (v ? t.open_v : t.open_k)[at] : (v ? t.v : t.k)[at];
  }

  /// Checks results against double, and says how far they are off in units of what is allowed.
  double check(const packed_ask& a, const kvc_batch& b, const answer& got) {
    double worst = 0;
    size_t row = 0;
    for (size_t s = 0; s < text.size(); ++s) {
      for (int32_t r = 0; r < rows_of(a, s); ++r, ++row) {
        const int32_t border =
            std::min(a.borders.empty() ? own_border(a, s) : a.borders[row], own_border(a, s));
        for (int32_t h = 0; h < geo.q_heads(); ++h) {
          worst = std::max(worst, check_row(a, b, got, s, row, h, border));
        }
      }
    }
    return worst;
  }

  packed_geometry geo;
  std::mt19937 random;
  std::vector<packed_text> text;
  kvc_kv kv{};
  int32_t columns = 1;
  guarded<int32_t> table, open_table, exempt_table, kv_len, sealed, q_start, q_pos, row_sealed;
  std::vector<float> q_values;

 private:
  struct text_values {
    std::vector<float> k, v, open_k, open_v;
  };

  bool is_absent(size_t s, int32_t slot) const {
    const std::pair<size_t, int32_t> block{s, slot / geo.block};
    return std::find(absent.begin(), absent.end(), block) != absent.end();
  }
  int32_t own_border(const packed_ask& a, size_t s) const {
    return a.name_sealed ? std::min(text[s].sealed, text[s].length) : text[s].length;
  }

  guarded<int32_t> wild_table(int32_t blocks) {
    std::vector<int32_t> ids(static_cast<size_t>(blocks));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    guarded<int32_t> out(text.size() * size_t(columns));
    size_t next = 0;
    for (size_t s = 0; s < text.size(); ++s) {
      for (int32_t c = 0; c < columns; ++c) {
        const bool used = c * geo.block < text[s].length;
        out[s * size_t(columns) + size_t(c)] = used ? ids[next++] : c % 2 != 0 ? INT32_MAX : INT32_MIN;
      }
    }
    return out;
  }

  void describe(int32_t blocks, int32_t open, int32_t exempt) {
    const char* formats[] = {geo.format};
    kvc_planes p{};
    p.struct_size = sizeof p;
    p.layers = 1;
    p.kv_heads = geo.heads;
    p.dim_k = p.dim_v = geo.dim;
    p.type = geo.open_type;
    p.block = geo.block;
    p.blocks = blocks;
    p.order = KVC_K_ROW_MAJOR;
    p.formats = formats;
    p.n_formats = 1;
    p.open_blocks = open;
    p.exempt_blocks = geo.exempt > 0 ? exempt : 0;
    int64_t bytes = 0;
    kvc_error e{};
    kvc_status s = kvc_cpu_planes(&p, nullptr, &bytes, &e);
    INFO(geo.format << ": " << s << " field " << kvc_field_text(e.field) << " value " << e.value);
    REQUIRE(s == KVC_OK);
    memory_ = guarded<std::byte>(size_t((bytes + 63) / 64 * 64));
    std::memset(memory_.data(), 0xff, memory_.size());
    p.memory = {memory_.data(), memory_.size()};
    kvc_kv layers[2]{};
    s = kvc_cpu_planes(&p, layers, &bytes, &e);
    REQUIRE(s == KVC_OK);
    kv = layers[0];
    REQUIRE(kv.exempt == geo.exempt);
  }

  static std::byte* at(const kvc_plane& p, int64_t id, int32_t head, int64_t token) {
    return static_cast<std::byte*>(p.data) + id * p.block_stride + head * p.head_stride +
           token * p.token_stride;
  }
  void store(const kvc_plane& p, int64_t id, int32_t head, int64_t token, const float* row) {
    std::byte* to = at(p, id, head, token);
    for (int32_t d = 0; d < geo.dim; ++d) {
      const uint16_t bits = p.type == KVC_F16 ? to_f16(row[d]).bits : to_bf16(row[d]).bits;
      std::memcpy(to + d * p.dim_stride, &bits, 2);
    }
  }
  float rounded(float x) const {
    return geo.open_type == KVC_F16 ? to_float(to_f16(x)) : to_float(to_bf16(x));
  }

  /// Values of a text: K has channels that are far from 0, V tokens of different size.
  void fill(size_t s) {
    const int32_t slots = (text[s].length + geo.block - 1) / geo.block * geo.block;
    text_values t;
    std::normal_distribution<float> normal;
    const size_t all = size_t(slots) * size_t(geo.heads * geo.dim);
    t.k.assign(all, 0.0f);
    t.v = t.k;
    for (size_t i = 0; i < all; ++i) {
      const size_t d = i % size_t(geo.dim), token = i / size_t(geo.heads * geo.dim);
      const float k = normal(random) + (d % 13 == 5 ? 6.0f : 0.0f);
      const bool peak = int64_t(token) == geo.spike && d == 0;
      t.open_k.push_back(rounded(geo.spike < 0 ? k : peak ? 112.0f : 0.0f));
      t.open_v.push_back(rounded(normal(random) * (token % 7 == 2 ? 3.0f : 1.0f) + 0.2f));
    }
    for (int32_t c = 0; c * geo.block < slots; ++c) put_block(s, c, t);
    values_.push_back(std::move(t));
  }
  const float* row_of(const std::vector<float>& from, int32_t slot, int32_t head) const {
    return from.data() + (size_t(slot) * size_t(geo.heads) + size_t(head)) * size_t(geo.dim);
  }

  void put_block(size_t s, int32_t c, text_values& t) {
    const int64_t open = open_table[s * size_t(columns) + size_t(c)];
    const int32_t id = table[s * size_t(columns) + size_t(c)];
    for (int32_t h = 0; h < geo.heads; ++h) {
      for (int32_t i = 0; i < geo.block; ++i) {
        store(kv.open_k, open, h, i, row_of(t.open_k, c * geo.block + i, h));
        store(kv.open_v, open, h, i, row_of(t.open_v, c * geo.block + i, h));
        if (c > 0 || i >= kv.exempt) continue;
        store(kv.exempt_k, exempt_table[s], h, i, row_of(t.open_k, i, h));
        store(kv.exempt_v, exempt_table[s], h, i, row_of(t.open_v, i, h));
      }
    }
    const kvc_command seal{KVC_OP_SEAL, 0, 0, geo.block, int32_t(open), id, c == 0 ? kv.exempt : 0};
    kvc_run run{};
    run.struct_size = sizeof run;
    run.layers = &kv;
    run.n_layers = 1;
    run.commands = &seal;
    run.n_commands = 1;
    kvc_error e{};
    REQUIRE(kvc_cpu_run(&run, nullptr, &e) == KVC_OK);
    std::vector<float> k(size_t(geo.dim * geo.block)), v(k.size());
    for (int32_t h = 0; h < geo.heads; ++h) {
      REQUIRE(kvc_cpu_unpack(&kv, &id, 1, h, k.data(), 0, v.data(), 0, KVC_TARGET_SCALAR, &e) == KVC_OK);
      for (int32_t i = 0; i < geo.block; ++i) {
        for (int32_t d = 0; d < geo.dim; ++d) {
          const size_t to =
              (size_t(c * geo.block + i) * size_t(geo.heads) + size_t(h)) * size_t(geo.dim) + size_t(d);
          t.k[to] = k[size_t(d * geo.block + i)];
          t.v[to] = v[size_t(i * geo.dim + d)];
        }
      }
    }
    spoil(s, c, id, open);
  }

  /// What attention must not read becomes NaN.
  void spoil(size_t s, int32_t c, int32_t id, int64_t open) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> nothing(size_t(geo.dim), nan);
    const int32_t groups = (geo.dim + kv.v.scale_group - 1) / kv.v.scale_group;
    for (int32_t h = 0; h < geo.heads; ++h) {
      for (int32_t i = 0; i < geo.block; ++i) {
        const int32_t slot = c * geo.block + i;
        if (slot >= text[s].length) {
          store(kv.open_k, open, h, i, nothing.data());
          store(kv.open_v, open, h, i, nothing.data());
        }
        if (slot < text[s].length) continue;
        std::memset(at(kv.v, id, h, i), 0xff, size_t(code_row_bytes(static_cast<code>(kv.v.type), geo.dim)));
        const int64_t scale =
            id * kv.v.scale_block_stride + h * kv.v.scale_head_stride + int64_t{2} * i * groups;
        for (void* array : {kv.v.scale, kv.v.zero}) {
          if (array != nullptr) std::memset(static_cast<std::byte*>(array) + scale, 0xff, size_t(2 * groups));
        }
        if (kv.k.scale_kind != KVC_SCALE_TOKEN) continue;
        const int64_t key = id * kv.k.scale_block_stride + h * kv.k.scale_head_stride + int64_t{2} * i;
        std::memset(static_cast<std::byte*>(kv.k.scale) + key, 0xff, 2);
      }
    }
  }

  /// One query head of one row. Rounded are the query times scales, and weights times scales, to f16: errors
  /// of a score add up like a random walk over its channels, those of a result over its keys.
  double check_row(const packed_ask& a, const kvc_batch& b, const answer& got, size_t s, size_t row,
                   int32_t h, int32_t border) {
    const kvc_softmax& x = a.softmax;
    const int32_t head = h / geo.group, len = text[s].length;
    std::vector<float> q(q_values.begin() + int64_t(row * size_t(geo.q_heads()) + size_t(h)) * geo.dim,
                         q_values.begin() + int64_t(row * size_t(geo.q_heads()) + size_t(h) + 1) * geo.dim);
    if ((kv.hadamard & KVC_HADAMARD_K) != 0) hadamard(q.data(), geo.dim);
    std::vector<double> score(size_t(len), -INFINITY);
    double top = x.sink_logit != nullptr ? double{x.sink_logit[h]} : -INFINITY, walk = 0;
    for (int32_t j = 0; j < len; ++j) {
      const int64_t behind = int64_t{b.q_pos[row]} - j;
      if (is_absent(s, j)) continue;
      if ((x.causal != 0 && behind < 0) || (x.window > 0 && behind >= x.window)) continue;
      double sum = 0, square = 0;
      for (int32_t d = 0; d < geo.dim; ++d) {
        const double product = double{q[size_t(d)]} * value(false, s, j, head, d, border);
        sum += product;
        square += product * product;
      }
      walk = std::max(walk, std::sqrt(square));
      sum *= x.scale;
      if (x.soft_cap > 0) sum = x.soft_cap * std::tanh(sum / x.soft_cap);
      score[size_t(j)] = sum;
      top = std::max(top, sum);
    }
    const double off = std::fabs(double{x.scale}) * walk * 2 * 0x1p-11;  // of a score
    double total = x.sink_logit != nullptr ? std::exp(x.sink_logit[h] - top) : 0;
    std::vector<double> acc(size_t(geo.dim)), spread(size_t(geo.dim));
    for (int32_t j = 0; j < len; ++j) {
      if (score[size_t(j)] == -INFINITY) continue;
      const double w = std::exp(score[size_t(j)] - top);
      total += w;
      for (int32_t d = 0; d < geo.dim; ++d) {
        const double v = value(true, s, j, head, d, border);
        acc[size_t(d)] += w * v;
        spread[size_t(d)] += w * (std::fabs(v) + 1);
      }
    }
    std::vector<float> o(size_t(geo.dim));
    double widest = 0;
    for (int32_t d = 0; d < geo.dim; ++d) {
      o[size_t(d)] = float(total > 0 ? acc[size_t(d)] / total : 0);
      widest = std::max(widest, total > 0 ? spread[size_t(d)] / total : 0);
    }
    if ((kv.hadamard & KVC_HADAMARD_V) != 0) hadamard(o.data(), geo.dim);
    const size_t at = row * size_t(geo.q_heads()) + size_t(h);
    double worst = 0;
    for (int32_t d = 0; d < geo.dim; ++d) {
      const double error = std::fabs(double{got.o[at * size_t(geo.dim) + size_t(d)]} - o[size_t(d)]);
      const double ratio = error / ((off + 1.5 * 0x1p-11) * widest + 1e-5);
      worst = ratio <= worst ? worst : ratio;
      CAPTURE(s, row, h, d, border, got.o[at * size_t(geo.dim) + size_t(d)], o[size_t(d)]);
      REQUIRE(ratio <= 1);
    }
    const double lse = total > 0 ? (top + std::log(total)) / std::log(2.0) : -INFINITY;
    CAPTURE(s, row, h, got.lse[at], lse, off);
    if (std::isinf(lse)) {
      REQUIRE(got.lse[at] == -INFINITY);
    } else {
      REQUIRE(std::fabs(got.lse[at] - lse) <= 1e-4 + off * 1.4427);
    }
    for (int32_t j = 0; a.want_scores && j < len; ++j) {
      const float g = got.scores[at * size_t(got.score_pitch) + size_t(j)];
      CAPTURE(j, g, score[size_t(j)]);
      if (std::isinf(score[size_t(j)])) {
        REQUIRE((g == -INFINITY || std::isnan(g)));  // or left as it was
      } else {
        REQUIRE(std::fabs(g - score[size_t(j)] * 1.44269504) <= 1e-4 + 1.5 * off * 1.4427);
      }
    }
    return worst;
  }

 public:
  /// Texts whose exempt slots are read as the others, since no block of the exempt space is named.
  std::vector<size_t> unnamed;
  /// Blocks (text, column) that tables do not name any more.
  std::vector<std::pair<size_t, int32_t>> absent;

  /// Values that attention does not need, but that the CPU's checks look at, become numbers.
  void make_safe() {
    for (size_t i = 0; i < text.size(); ++i) {
      for (int32_t c = 0; c < columns; ++c) {
        const size_t at = i * size_t(columns) + size_t(c);
        if (c * geo.block >= text[i].length) table[at] = open_table[at] = -1;
      }
    }
  }

  /// Moves codes and scales to `to`: blocks `far` bytes apart, K, then V; rows of codes with gaps.
  void spread_codes(std::byte* to, int64_t far) {
    for (const bool keys : {true, false}) {
      kvc_plane& p = keys ? kv.k : kv.v;
      const kvc_plane old = p;
      const int32_t rows = keys ? geo.dim : geo.block;
      const int64_t bytes = code_row_bytes(static_cast<code>(p.type), keys ? geo.block : geo.dim),
                    row = bytes + 48;
      side_format f;
      f.codes = static_cast<code>(p.type);
      f.axis = static_cast<scale_axis>(p.scale_kind - KVC_SCALE_TENSOR);
      f.group_size = p.scale_group;
      const int64_t scales = int64_t{2} * scales_of_cell(f, geo.block, geo.dim),
                    cell = row * rows + 2 * scales;
      p.data = to + (keys ? 0 : far * kv.blocks);
      p.block_stride = p.scale_block_stride = far;
      p.head_stride = p.scale_head_stride = cell;
      (keys ? p.dim_stride : p.token_stride) = row;
      p.scale = static_cast<std::byte*>(p.data) + row * rows;
      if (p.zero != nullptr) p.zero = static_cast<std::byte*>(p.scale) + scales;
      for (int64_t id = 0; id < kv.blocks; ++id) {
        for (int32_t h = 0; h < geo.heads; ++h) {
          for (int32_t r = 0; r < rows; ++r) {
            std::memcpy(static_cast<std::byte*>(p.data) + id * far + h * cell + r * row,
                        static_cast<const std::byte*>(old.data) + id * old.block_stride +
                            h * old.head_stride + r * (keys ? old.dim_stride : old.token_stride),
                        size_t(bytes));
          }
          const int64_t from = id * old.scale_block_stride + h * old.scale_head_stride;
          std::memcpy(static_cast<std::byte*>(p.scale) + id * far + h * cell,
                      static_cast<const std::byte*>(old.scale) + from, size_t(scales));
          if (p.zero == nullptr) continue;
          std::memcpy(static_cast<std::byte*>(p.zero) + id * far + h * cell,
                      static_cast<const std::byte*>(old.zero) + from, size_t(scales));
        }
      }
    }
  }

 private:
  std::vector<text_values> values_;
  guarded<std::byte> memory_;
};

}  // namespace kvcache::test
