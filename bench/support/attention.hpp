// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention calls as benchmarks make them: layers of one long sequence each, more than caches hold.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/core/numeric.hpp"
#include "support/machine.hpp"
#include "support/mixed.hpp"
#include "support/rounds.hpp"

namespace bench {

inline constexpr int32_t kv_heads = 8;

struct shape {
  kvcache::element type = kvcache::element::f32;
  int32_t dim = 128, group = 4, length = 4096, threads = 1, rows = 1, block = 16;
  kvcache::k_order order = kvcache::k_order::transposed;
  int32_t target = KVC_TARGET_BEST;
  bool aimed = true;                           ///< has a target
  const kvcache::kv_format* format = nullptr;  ///< of sealed blocks, null = as written; lives for ever

  bool decode() const { return rows == 1; }
  int32_t q_heads() const { return kv_heads * group; }
};

/// Planes of many layers with one long sequence each, filled with small random values.
class memory {
 public:
  explicit memory(const shape& s) : shape_(s) {
    kvcache::host_planes_config c;
    c.shape = {.layers = 1, .kv_heads = kv_heads, .head_dim_k = s.dim, .head_dim_v = s.dim, .type = s.type};
    c.order = s.order;
    c.block_size = s.block;
    c.blocks = s.length / s.block;
    if (s.format != nullptr) {
      c.formats = {s.format, 1};
      c.open_blocks = 1;
    }
    const int64_t layer = kvcache::host_planes::size_of(c).count;
    const int64_t least = !s.decode() ? 1 : quick() ? int64_t{64} << 20 : int64_t{400} << 20;
    c.shape.layers = int32_t(std::max<int64_t>(1, (least + layer - 1) / layer));
    auto made = kvcache::host_planes::create(c);
    if (!made) return;
    planes = std::move(*made);
    fill();
    if (s.format != nullptr) fill_scales();
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

  kvcache::host_planes planes;
  std::vector<int32_t> table;

 private:
  bool fits(const shape& s) const {
    return s.type == shape_.type && s.dim == shape_.dim && s.length == shape_.length &&
           s.block == shape_.block && s.order == shape_.order && s.decode() == shape_.decode() &&
           s.format == shape_.format;
  }
  void fill() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::byte> some(1 << 20);
    const size_t element = size_t(kvcache::element_bytes(shape_.type));
    for (size_t i = 0; i < some.size(); i += element) {
      const float x = normal(random);
      const uint16_t h =
          shape_.type == kvcache::element::f16 ? kvcache::to_f16(x).bits : kvcache::to_bf16(x).bits;
      element == 4 ? std::memcpy(&some[i], &x, 4) : std::memcpy(&some[i], &h, 2);
    }
    auto* to = static_cast<std::byte*>(planes.data());
    for (size_t i = 0; i < bytes(); i += some.size()) {
      std::memcpy(to + i, some.data(), std::min(some.size(), bytes() - i));
    }
  }
  /// Steps of some hundredths and minima around -1, as ordinary keys and values have.
  void fill_scales() {
    for (const kvc_kv& kv : planes.layers()) {
      for (const kvc_plane* p : {&kv.k, &kv.v}) {
        const bool keys = p == &kv.k;
        const kvcache::side_format& side = keys ? shape_.format->k : shape_.format->v;
        const int32_t count = kvcache::scales_of_cell(side, kv.block, shape_.dim);
        for (int64_t cell = 0; cell < int64_t{kv.blocks} * kv_heads; ++cell) {
          const int64_t at = cell / kv_heads * p->scale_block_stride + cell % kv_heads * p->scale_head_stride;
          for (int32_t i = 0; i < count; ++i) {
            const float step = 2.0f / float(1 << kvcache::code_bits(side.codes));
            put_f16(p->scale, at + 2 * i, step * (1 + float(i % 7) / 16));
            if (p->zero != nullptr) put_f16(p->zero, at + 2 * i, -1 - float(i % 5) / 16);
          }
        }
      }
    }
  }
  static void put_f16(void* to, int64_t at, float x) {
    const uint16_t h = kvcache::to_f16(x).bits;
    std::memcpy(static_cast<std::byte*>(to) + at, &h, 2);
  }
  shape shape_;
};

/// One attend call over a layer of a memory.
class caller {
 public:
  caller(const shape& s, memory& m) : threads(s.threads), shape_(s), memory_(m), starts_{0, s.rows} {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    q_.resize(size_t(s.rows) * size_t(s.q_heads()) * size_t(s.dim));
    for (float& x : q_) x = normal(random);
    out_.resize(q_.size());
    lse2.resize(size_t(s.rows) * size_t(s.q_heads()));
    one_block_.resize(m.table.size());
    for (int32_t i = 0; i < s.rows; ++i) positions_.push_back(s.length - s.rows + i);
    auto made = kvcache::attention::create(
        m.planes.layer(0),
        {.q_heads = s.q_heads(), .rows = s.rows, .slots = s.length, .width = s.threads, .target = s.target});
    ready_ = bool(made);
    if (made) attend_ = std::move(*made);
  }

  bool ready() const { return ready_; }

  /// Attention over a layer.
  bool call(int32_t layer) { return run(layer, out()); }
  /// The same with other results.
  bool run(int32_t layer, const kvc_out& to) {
    return bool(attend_.run(memory_.planes.layer(layer), batch(), rows(), softmax(), to, threads.executor()));
  }
  /// Attention over a table that names one block again and again: all arithmetic, nothing from memory.
  bool call_in_cache() {
    kvc_batch b = batch();
    b.table = one_block_.data();
    return bool(attend_.run(memory_.planes.layer(0), b, rows(), softmax(), out(), threads.executor()));
  }
  /// Adds what keys got of the last rows, or of a row whose scores attention stored.
  bool score(int32_t layer, const kvc_score& what) {
    return bool(
        attend_.score(memory_.planes.layer(layer), batch(), rows(), softmax(), what, threads.executor()));
  }
  kvc_out out() {
    return kvcache::dense_out(out_.data(), kvcache::element::f32, shape_.q_heads(), shape_.dim, lse2.data());
  }

  /// Reads the blocks of a layer in the table's order; with `ahead` asking for the blocks that come next.
  void read_blocks(int32_t layer, bool ahead) {
    each_block(layer, [&](const void* at, const void* next, size_t bytes) {
      read_bytes(at, bytes, ahead ? next : nullptr);
    });
  }

  /// Reads them so and multiplies every value with each query head of its group, asking `ahead` bytes ahead.
  bool multiply_blocks(int32_t layer, size_t ahead) {
    std::atomic<bool> done{true};
    each_block(layer, [&](const void* at, const void* next, size_t bytes) {
      const bool half = shape_.type == kvcache::element::f16;
      if (!read_and_multiply({at, next, bytes, ahead}, shape_.group, half)) done = false;
    });
    return done;
  }

  /// Nanoseconds of one run of `work` for each layer, per layer.
  template <class Work>
  double each_layer(Work&& work) {
    const double start = threads.seconds();
    for (int32_t layer = 0; layer < memory_.layers(); ++layer) work(layer);
    return (threads.seconds() - start) * 1e9 / memory_.layers();
  }

  crew threads;
  std::vector<float> lse2;  ///< [rows][query heads]

 private:
  /// Calls f(block, the block after, bytes) for the blocks of a layer in the table's order, on all threads.
  template <class F>
  void each_block(int32_t layer, F f) {
    const kvc_plane& k = memory_.planes.layer(layer).k;
    const std::vector<int32_t>& table = memory_.table;
    const auto block = [&](int64_t i) {
      return static_cast<const std::byte*>(k.data) +
             table[std::min(size_t(i), table.size() - 1)] * k.block_stride;
    };
    const int64_t each = int64_t(table.size()) / threads.size();
    threads.each(threads.size(), [&](int t) {
      for (int64_t i = t * each; i < (t + 1) * each; ++i) f(block(i), block(i + 1), size_t(k.block_stride));
    });
  }
  kvc_batch batch() const {
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = 1;
    b.table = memory_.table.data();
    b.table_columns = int32_t(memory_.table.size());
    b.kv_len = &shape_.length;
    b.q_start = starts_;
    b.q_pos = positions_.data();
    return b;
  }
  kvc_rows rows() const {
    return kvcache::dense_rows(q_.data(), kvcache::element::f32, shape_.q_heads(), shape_.dim);
  }
  static kvc_softmax softmax() { return kvcache::causal_softmax(0.1f); }

  shape shape_;
  memory& memory_;
  int32_t starts_[2];
  std::vector<int32_t> positions_, one_block_;
  std::vector<float> q_, out_;
  kvcache::attention attend_;
  bool ready_ = false;
};

/// "f32/D64/G3", for packed blocks without the type.
inline std::string text_of(const shape& s) {
  const char* types[] = {"f32", "f16", "bf16"};
  std::string text = types[int(s.type)];
  text.append("/D").append(std::to_string(s.dim));
  return text.append("/G").append(std::to_string(s.group));
}

}  // namespace bench
