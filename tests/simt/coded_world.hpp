// SPDX-License-Identifier: Apache-2.0
#pragma once
// Layers whose sealed planes hold codes, in memory that notices wrong accesses: two worlds of one seed hold
// the same bytes, so that what the CPU and the machine made of them can be compared as a whole. Open blocks
// hold values of several kinds; what was not filled is NaN.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kvcache/core/numeric.hpp"
#include "kvcache/kvcache.h"
#include "kvcache/quant/format.hpp"
#include "simt/backend.hpp"
#include "simt/guarded.hpp"

namespace kvcache::test {

/// How K, or V, of a layer is stored.
struct coded_side {
  int32_t type = KVC_U8;
  bool symmetric = false;
  int32_t kind = KVC_SCALE_TOKEN;
  int32_t group = 0;  ///< 0 = all
  int32_t clip = KVC_CLIP_NONE;
};
inline bool holds_codes(const coded_side& s) {
  return s.type >= KVC_E4M3;
}

struct coded_shape {
  coded_side k, v;
  int32_t heads = 2, dim_k = 64, dim_v = 64, block = 32, blocks = 5, open_blocks = 3;
  int32_t open_k = KVC_F16, open_v = KVC_F16;
  int32_t exempt = 0, exempt_blocks = 0, hadamard = 0, group = 0;
  /// true: a block of a layer is one run of bytes, as format.hpp draws it; false: codes, scales and minima
  /// apart, gaps between rows, slots before heads in the open planes.
  bool one_run = true;
};

class coded_layer_memory {
 public:
  explicit coded_layer_memory(const coded_shape& s) : shape(s) {
    kv.struct_size = sizeof kv;
    kv.group = s.group;
    kv.kv_heads = s.heads;
    kv.dim_k = s.dim_k;
    kv.dim_v = s.dim_v;
    kv.block = s.block;
    kv.blocks = s.blocks;
    kv.open_blocks = s.open_blocks;
    kv.exempt = s.exempt;
    kv.exempt_blocks = s.exempt_blocks;
    kv.hadamard = s.hadamard;
    s.one_run ? lay_out_in_one_run() : lay_out_apart();
    rows(kv.open_k, s.open_k, s.dim_k, s.block, s.open_blocks);
    rows(kv.open_v, s.open_v, s.dim_v, s.block, s.open_blocks);
    if (s.exempt_blocks == 0) return;
    rows(kv.exempt_k, s.open_k, s.dim_k, s.exempt, s.exempt_blocks);
    rows(kv.exempt_v, s.open_v, s.dim_v, s.exempt, s.exempt_blocks);
  }

  bool operator==(const coded_layer_memory& b) const {
    for (size_t i = 0; i < memory.size(); ++i) {
      if (std::memcmp(memory[i].data(), b.memory[i].data(), memory[i].size()) != 0) return false;
    }
    return true;
  }

  /// Fills an open block with numbers of some kind.
  void fill(int32_t id, std::mt19937& random) {
    for (const bool keys : {true, false}) {
      const kvc_plane& p = keys ? kv.open_k : kv.open_v;
      const int32_t dim = keys ? kv.dim_k : kv.dim_v;
      for (int32_t h = 0; h < kv.kv_heads; ++h) {
        const uint32_t mode = random() % 8;
        std::normal_distribution<float> normal(0.0f, mode == 6 ? 1e-6f : mode == 7 ? 9000.0f : 1.0f);
        const float constant = normal(random);
        for (int32_t t = 0; t < kv.block; ++t) {
          for (int32_t d = 0; d < dim; ++d) {
            float x = normal(random) * (d % 17 == 3 ? 9.0f : 1.0f);
            if (mode == 3 && d % 3 == 0) x = 0.0f;
            if (mode == 4 && d % 8 < 4) x = std::fabs(x) + 2.0f;
            if (mode == 5) x = t % 2 == 0 ? constant : -0.0f;
            if (mode == 2 && t == 0) x *= 80.0f;
            x = std::min(std::max(x, -65504.0f), 65504.0f);
            put(p, id, h, t, d, p.type == KVC_F16 ? to_f16(x).bits : to_bf16(x * 0.99f).bits);
          }
        }
      }
    }
  }
  static void put(const kvc_plane& p, int64_t id, int64_t head, int64_t t, int64_t d, uint16_t bits) {
    auto* at = static_cast<std::byte*>(p.data) + id * p.block_stride + head * p.head_stride +
               t * p.token_stride + d * 2;
    std::memcpy(at, &bits, 2);
  }

  coded_shape shape;
  kvc_kv kv{};
  std::vector<guarded<std::byte>> memory;

 private:
  static side_format format_of(const coded_side& s) {
    side_format f;
    f.codes = holds_codes(s) ? static_cast<code>(s.type) : code::exact;
    f.axis = static_cast<scale_axis>(s.kind - KVC_SCALE_TENSOR);
    f.group_size = s.group;
    f.symmetric = s.symmetric;
    return f;
  }
  std::byte* take(int64_t bytes, uint8_t with = 0xa5) {
    memory.emplace_back(size_t(bytes));
    std::memset(memory.back().data(), with, size_t(bytes));
    return memory.back().data();
  }
  void describe(kvc_plane& p, const coded_side& s, bool keys) const {
    p.type = int16_t(s.type);
    if (!holds_codes(s)) return;
    const int32_t dim = keys ? shape.dim_k : shape.dim_v;
    p.scale_kind = int16_t(s.kind);
    const bool groups = s.kind == KVC_SCALE_TOKEN || s.kind == KVC_SCALE_CHANNEL;
    if (groups) p.scale_group = int16_t(group_of(format_of(s), shape.block, dim));
    p.clip = int16_t(s.clip);
  }
  void rows(kvc_plane& p, int32_t type, int32_t dim, int32_t block, int32_t blocks) {
    const int64_t gap = shape.one_run ? 0 : 16, row = 2 * int64_t{dim} + gap;
    p.type = int16_t(type);
    p.dim_stride = 2;
    p.token_stride = shape.one_run ? row : row * shape.heads;
    p.head_stride = shape.one_run ? row * block : row;
    p.block_stride = row * block * shape.heads;
    p.data = take(p.block_stride * blocks - gap, 0xff);
  }
  void lay_out_in_one_run() {
    const group_shape g{1, shape.heads, shape.dim_k, shape.dim_v};
    const side_format f[2] = {format_of(shape.k), format_of(shape.v)};
    const side_layout l[2] = {layout_of(f[0], g, shape.block, true), layout_of(f[1], g, shape.block, false)};
    const int64_t block = (l[0].bytes + l[1].bytes + 63) / 64 * 64;
    std::byte* base = take(block * shape.blocks);
    for (const bool keys : {true, false}) {
      const coded_side& s = keys ? shape.k : shape.v;
      const side_layout& at = l[keys ? 0 : 1];
      kvc_plane& p = keys ? kv.k : kv.v;
      std::byte* first = keys ? base : base + l[0].bytes;
      describe(p, s, keys);
      p.data = first;
      p.block_stride = block;
      p.head_stride = at.head_stride;
      if (!holds_codes(s)) {
        p.dim_stride = 2;
        p.token_stride = 2 * int64_t{keys ? shape.dim_k : shape.dim_v};
        continue;
      }
      (keys ? p.dim_stride : p.token_stride) = at.code_row;
      p.scale = first + at.scale;
      if (at.minimum != 0) p.zero = first + at.minimum;
      p.scale_block_stride = block;
      p.scale_head_stride = at.scale_stride;
    }
  }
  void lay_out_apart() {
    for (const bool keys : {true, false}) {
      const coded_side& s = keys ? shape.k : shape.v;
      kvc_plane& p = keys ? kv.k : kv.v;
      const int32_t dim = keys ? shape.dim_k : shape.dim_v;
      describe(p, s, keys);
      if (!holds_codes(s)) {
        rows(p, s.type, dim, shape.block, shape.blocks);
        continue;
      }
      const int32_t n = keys ? dim : shape.block, columns = keys ? shape.block : dim;
      const int64_t row = code_row_bytes(format_of(s).codes, columns) + 6;
      (keys ? p.dim_stride : p.token_stride) = row;
      p.head_stride = row * n + 2;
      p.block_stride = p.head_stride * shape.heads;
      p.data = take(p.block_stride * shape.blocks - 8);
      const int64_t scales = 2 * int64_t{scales_of_cell(format_of(s), shape.block, dim)};
      const bool tensor = s.kind == KVC_SCALE_TENSOR;
      p.scale_head_stride = tensor ? 0 : scales + 2;
      p.scale_block_stride = (scales + 2) * shape.heads;
      const int64_t all =
          p.scale_block_stride * (shape.blocks - 1) + p.scale_head_stride * (shape.heads - 1) + scales;
      p.scale = take(all);
      if (has_minimum(format_of(s))) p.zero = take(all);
    }
  }
};

/// Several layers; their descriptions lie behind each other, as calls want them.
class coded_world {
 public:
  coded_world(const std::vector<coded_shape>& shapes, uint32_t seed, int32_t filled = 1) {
    std::mt19937 random(seed);
    for (const coded_shape& s : shapes) {
      memory.push_back(std::make_unique<coded_layer_memory>(s));
      for (int32_t id = 0; id < std::min(filled, s.open_blocks); ++id) memory.back()->fill(id, random);
      layers.push_back(memory.back()->kv);
    }
  }
  bool operator==(const coded_world& b) const {
    for (size_t i = 0; i < memory.size(); ++i) {
      if (!(*memory[i] == *b.memory[i])) return false;
    }
    return true;
  }
  kvc_run run_of(const std::vector<kvc_command>& c) const {
    kvc_run r{};
    r.struct_size = sizeof r;
    r.layers = layers.data();
    r.n_layers = int32_t(layers.size());
    r.commands = c.data();
    r.n_commands = int32_t(c.size());
    return r;
  }
  std::vector<std::unique_ptr<coded_layer_memory>> memory;
  std::vector<kvc_kv> layers;
};

inline kvc_command command_of(int32_t op, int32_t tokens, int32_t src, int32_t dst, int32_t arg = 0,
                              int32_t stage = 0, int32_t group = 0) {
  return {uint8_t(op), uint8_t(group), uint16_t(stage), tokens, src, dst, arg};
}

/// Every type of code with a minimum, where there is one, and without.
inline std::vector<coded_side> all_codes() {
  std::vector<coded_side> out;
  for (int32_t type = KVC_E4M3; type <= KVC_U2; ++type) {
    for (const bool symmetric : {false, true}) {
      if (symmetric && type < KVC_U8) continue;
      coded_side s;
      s.type = type;
      s.symmetric = symmetric;
      out.push_back(s);
    }
  }
  return out;
}
/// Every kind of scale, groups that are whole and that are not.
inline std::vector<std::pair<int32_t, int32_t>> all_scales() {
  return {{KVC_SCALE_TENSOR, 0}, {KVC_SCALE_HEAD, 0},    {KVC_SCALE_TOKEN, 0},   {KVC_SCALE_TOKEN, 24},
          {KVC_SCALE_TOKEN, 32}, {KVC_SCALE_CHANNEL, 0}, {KVC_SCALE_CHANNEL, 8}, {KVC_SCALE_CHANNEL, 32}};
}

}  // namespace kvcache::test
