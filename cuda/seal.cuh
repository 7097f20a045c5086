// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sealing: open cells become codes, scales and minima; and codes copied from block to block. A block of
// threads does one cell, K or V of one head:
//
//   open cell -> shared memory, 16 bytes at a time
//   levels       scale per token, channel: half a warp per group
//                scale per head, tensor: all warps, their limits joined; a tensor's in every head's block
//                again
//   levels -> the plane's scales and minima
//   codes        a thread per 4-byte word of the rows, written next to its neighbours'
//
// A side that is no code is copied, converted if the open block has another type.
#include "fit.cuh"

namespace kvcache::detail::gpu {

/// Which cell a block of threads works on.
struct cell_task {
  int32_t head;
  bool values;
  uint32_t layer, command;
};
KVCACHE_DEVICE cell_task task_of(const code_params& p) {
  uint32_t b = block_index();
  const auto heads = static_cast<uint32_t>(p.kv_heads), layers = static_cast<uint32_t>(p.n_layers);
  cell_task t;
  t.head = static_cast<int32_t>(b % heads);
  b /= heads;
  t.values = b % 2 != 0;
  b /= 2;
  t.layer = b % layers;
  t.command = b / layers;
  return t;
}

/// An open cell in shared memory, and where its levels go there.
struct staged_cell {
  code_form form;
  int32_t open_type, exempt, clip;
  uint32_t values, levels, scratch;  ///< shared addresses

  KVCACHE_DEVICE float value(int32_t token, int32_t channel) const {
    const uint32_t at = values + static_cast<uint32_t>(token * sealed_row(form.dim) + channel * 2);
    const uint32_t word = ld_shared_word(at & ~3u);
    const auto half = static_cast<uint16_t>((at & 2u) != 0 ? word >> 16 : word);
    return packable(open_type == KVC_F16 ? widen<half_kind::f16>(half) : widen<half_kind::bf16>(half));
  }
  KVCACHE_DEVICE void set_levels(int32_t index, code_levels l) const {
    st_shared(levels + static_cast<uint32_t>(index) * 4,
              static_cast<uint32_t>(l.scale) | static_cast<uint32_t>(l.zero) << 16);
  }
  KVCACHE_DEVICE code_levels levels_at(int32_t index) const {
    const uint32_t word = ld_shared_word(levels + static_cast<uint32_t>(index) * 4);
    return {static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 16)};
  }
};

KVCACHE_DEVICE void stage(const staged_cell& s, const char* from, int64_t token_stride) {
  const int32_t chunks = s.form.dim / 8, all = s.form.tokens * chunks;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < all; i += threads_of_block) {
    const int32_t token = i / chunks, chunk = i % chunks;
    cp_async16(s.values + static_cast<uint32_t>(token * sealed_row(s.form.dim) + chunk * 16),
               from + token * token_stride + chunk * 16);
  }
  cp_async_commit();
  cp_async_wait<0>();
  block_barrier();
}

/// A scale per token or channel.
KVCACHE_DEVICE void fit_groups(const staged_cell& s) {
  const code_form& f = s.form;
  const auto thread = static_cast<int32_t>(thread_index());
  const int32_t lane = thread % group_lanes, half = thread / group_lanes % 2, n = f.scales();
  const int32_t groups = f.groups();
  const bool channels = f.kind == KVC_SCALE_CHANNEL;
  for (int32_t pair = thread / 32; 2 * pair < n; pair += warps_of_block) {
    const int32_t index = 2 * pair + half < n ? 2 * pair + half : n - 1;
    // Groups of one channel's slots, or of one slot's channels: which, and the number among its groups.
    const int32_t across = channels ? f.dim : f.tokens;
    const bool group_inner = channels == f.keys;
    const int32_t line = group_inner ? index / groups : index % across;
    const int32_t first = (group_inner ? index % groups : index / across) * f.group;
    const int32_t size = least(f.group, (channels ? f.tokens : f.dim) - first);
    const int32_t skip = channels ? least(most(s.exempt - first, 0), size) : line < s.exempt ? size : 0;
    const auto value = [&](int32_t i) {
      return channels ? s.value(first + i, line) : s.value(line, first + i);
    };
    const code_levels levels = fitted(f, s.clip, value, skip, size, lane);
    if (lane == 0 && 2 * pair + half < n) s.set_levels(index, levels);
  }
}

/// Limits of the values of some heads of a block that are not exempt, known to all threads.
KVCACHE_DEVICE value_limits limits_of_heads(const staged_cell& s, const plane_view& open, int64_t block,
                                            int32_t first, int32_t end) {
  const auto thread = static_cast<int32_t>(thread_index());
  value_limits r = no_limits();
  for (int32_t head = first; head < end; ++head) {
    const char* cell = open.data + block * open.block_stride + head * open.head_stride;
    const int32_t all = s.form.tokens * s.form.dim;
    for (int32_t i = s.exempt * s.form.dim + thread; i < all; i += threads_of_block) {
      const char* row = cell + i / s.form.dim * open.token_stride;
      const float x = packable(load_value(row, s.open_type, i % s.form.dim));
      r = joined_limits(r, {x, x});
    }
  }
  r = folded_limits(r);
  const auto half = static_cast<uint32_t>(thread / group_lanes);
  if (thread % group_lanes == 0) {
    st_shared(s.scratch + half * 8, r.least);
    st_shared(s.scratch + half * 8 + 4, r.largest);
  }
  block_barrier();
  for (uint32_t h = 0; h < threads_of_block / group_lanes; ++h) {
    r = joined_limits(r, {ld_shared(s.scratch + h * 8), ld_shared(s.scratch + h * 8 + 4)});
  }
  if (r.least > r.largest) r = {0.0f, 0.0f};
  return r;
}

/// One scale for the whole cell; each half of a warp measures every eighth candidate of a search.
KVCACHE_DEVICE void fit_cell(const staged_cell& s, value_limits r) {
  const code_form& f = s.form;
  constexpr int32_t halves = threads_of_block / group_lanes;
  const auto thread = static_cast<int32_t>(thread_index());
  const int32_t lane = thread % group_lanes, n = candidates_of(f, s.clip);
  const uint32_t errors = s.scratch + 64;
  code_levels best = candidate(f, s.clip, r, 0);
  if (n > 1 && best.scale != 0) {
    const auto value = [&](int32_t i) { return s.value(i / f.dim, i % f.dim); };
    for (int32_t round = 0; round * halves < n; ++round) {
      const int32_t k = round * halves + thread / group_lanes;
      const code_levels levels = candidate(f, s.clip, r, least(k, n - 1));
      const float e = squared_error(f, levels, value, s.exempt * f.dim, f.tokens * f.dim, lane);
      if (lane == 0 && k < n) st_shared(errors + static_cast<uint32_t>(k) * 4, e);
    }
    block_barrier();
    int32_t chosen = 0;
    for (int32_t k = 1; k < n; ++k) {
      const float e = ld_shared(errors + static_cast<uint32_t>(k) * 4);
      if (e < ld_shared(errors + static_cast<uint32_t>(chosen) * 4)) chosen = k;
    }
    best = candidate(f, s.clip, r, chosen);
  }
  if (thread == 0) s.set_levels(0, best);
}

KVCACHE_DEVICE void write_levels(const staged_cell& s, const coded_plane& to, int64_t block, int32_t head) {
  if (s.form.kind == KVC_SCALE_TENSOR && head != 0) return;
  const int64_t at = scale_offset(to, block, head);
  for (int32_t i = static_cast<int32_t>(thread_index()); i < s.form.scales(); i += threads_of_block) {
    const code_levels l = s.levels_at(i);
    *reinterpret_cast<uint16_t*>(to.scale + at + i * 2) = l.scale;
    if (to.zero != nullptr) *reinterpret_cast<uint16_t*>(to.zero + at + i * 2) = l.zero;
  }
}

KVCACHE_DEVICE void write_codes(const staged_cell& s, char* to, int64_t row_stride) {
  const code_form& f = s.form;
  const int32_t words = f.words(), all = f.rows() * words;
  int32_t held = -1;  // levels change seldom, and cost a division
  code_grid g{};
  for (int32_t n = static_cast<int32_t>(thread_index()); n < all; n += threads_of_block) {
    const int32_t row = n / words, w = n % words;
    const auto code = [&](int32_t i) {
      const int32_t token = f.keys ? i : row, channel = f.keys ? row : i;
      if (token < s.exempt) return 0u;
      if (const int32_t index = f.scale_index(token, channel); index != held) {
        g = grid_of(f, s.levels_at(index));
        held = index;
      }
      return encoded(f, g, s.value(token, channel));
    };
    store_word(to + row * row_stride + w * 4, code_word(f, w, code));
  }
}

// ---- rows as they are ----

/// `bytes` bytes each of `rows` rows; what all addresses are multiples of decides how wide.
template <class Word>
KVCACHE_DEVICE void copy_rows_as(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                                 int32_t rows, int32_t bytes) {
  const int32_t size = static_cast<int32_t>(sizeof(Word)), words = bytes / size;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < rows * words; i += threads_of_block) {
    const int32_t row = i / words, at = i % words * size;
    *reinterpret_cast<Word*>(to + row * to_stride + at) = load<Word>(from + row * from_stride + at);
  }
}
KVCACHE_DEVICE void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                              int32_t rows, int32_t bytes) {
  const uint64_t all = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                       static_cast<uint64_t>(from_stride | to_stride | bytes);
  if (all % 16 == 0) return copy_rows_as<words4>(from, from_stride, to, to_stride, rows, bytes);
  if (all % 4 == 0) return copy_rows_as<uint32_t>(from, from_stride, to, to_stride, rows, bytes);
  copy_rows_as<uint16_t>(from, from_stride, to, to_stride, rows, bytes);
}
/// A side that is no code.
KVCACHE_DEVICE void store_exact(const char* from, int32_t from_type, int64_t from_stride, char* to,
                                int32_t to_type, int64_t to_stride, int32_t tokens, int32_t dim) {
  if (from_type == to_type) return copy_rows(from, from_stride, to, to_stride, tokens, dim * 2);
  for (int32_t i = static_cast<int32_t>(thread_index()); i < tokens * dim; i += threads_of_block) {
    const int32_t token = i / dim, channel = i % dim;
    store_value(to + token * to_stride, to_type, channel,
                load_value(from + token * from_stride, from_type, channel));
  }
}

KVCACHE_KERNEL(threads_of_block)
seal_cells(KVCACHE_CONSTANT code_params p) {
  const cell_task t = task_of(p);
  const coded_layer& layer = p.layer[t.layer];
  const moved_block& c = p.command[t.command];
  const plane_view& open = t.values ? layer.open_v : layer.open_k;
  const coded_plane& to = t.values ? layer.v : layer.k;
  const int32_t dim = t.values ? p.dim_v : p.dim_k;
  const char* from = open.data + c.src * open.block_stride + t.head * open.head_stride;
  char* target = code_cell_of(to, c.dst, t.head);
  staged_cell s;
  s.open_type = t.values ? layer.open_v_type : layer.open_k_type;
  if (!is_code_type(to.type)) {
    return store_exact(from, s.open_type, open.token_stride, target, to.type, to.row_stride, c.tokens, dim);
  }
  s.form = form_of(to, !t.values, p.block, dim);
  s.exempt = c.arg;
  s.clip = to.kind == KVC_SCALE_TENSOR ? int32_t{KVC_CLIP_NONE} : int32_t{to.clip};
  s.values = shared_base();
  s.levels = s.values + static_cast<uint32_t>(p.block * sealed_row(dim));
  s.scratch = s.levels + static_cast<uint32_t>(s.form.scales()) * 4;
  stage(s, from, open.token_stride);
  if (to.kind == KVC_SCALE_TOKEN || to.kind == KVC_SCALE_CHANNEL) {
    fit_groups(s);
  } else {
    const bool tensor = to.kind == KVC_SCALE_TENSOR;
    fit_cell(s, limits_of_heads(s, open, c.src, tensor ? 0 : t.head, tensor ? p.kv_heads : t.head + 1));
  }
  block_barrier();
  write_levels(s, to, c.dst, t.head);
  write_codes(s, target, to.row_stride);
}

KVCACHE_KERNEL(threads_of_block)
copy_codes(KVCACHE_CONSTANT code_params p) {
  const cell_task t = task_of(p);
  const moved_block& c = p.command[t.command];
  const coded_layer& layer = p.layer[t.layer];
  const coded_plane& plane = t.values ? layer.v : layer.k;
  const int32_t dim = t.values ? p.dim_v : p.dim_k;
  const char* from = code_cell_of(plane, c.src, t.head);
  char* to = code_cell_of(plane, c.dst, t.head);
  if (!is_code_type(plane.type))
    return copy_rows(from, plane.row_stride, to, plane.row_stride, c.tokens, dim * 2);
  const code_form f = form_of(plane, !t.values, p.block, dim);
  copy_rows(from, plane.row_stride, to, plane.row_stride, f.rows(), f.words() * 4);
  if (plane.kind == KVC_SCALE_TENSOR && t.head != 0) return;
  const int64_t source = scale_offset(plane, c.src, t.head), target = scale_offset(plane, c.dst, t.head);
  copy_rows(plane.scale + source, 0, plane.scale + target, 0, 1, f.scales() * 2);
  if (plane.zero == nullptr) return;
  copy_rows(plane.zero + source, 0, plane.zero + target, 0, 1, f.scales() * 2);
}

}  // namespace kvcache::detail::gpu
