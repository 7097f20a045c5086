// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stores new keys and values at their slots, keys rotated before if asked, and rotates rows of queries. One
// block per row; a warp takes K or V of a head: the row goes to shared memory as floats, through the
// Hadamard rotation if the layer has one, and from there to each space that has a slot for it. A sealed
// plane of codes with a scale per token takes it as codes: the bits that sealing an open block would give.
#include "append_params.hpp"
#include "fit.cuh"
#include "rope.cuh"

namespace kvcache::detail::gpu {

/// One row of one head in the shared memory of a warp.
struct appended_row {
  int32_t dim, head, lane;
  uint32_t at, levels;  ///< shared addresses
  int64_t slot[append_targets];

  KVCACHE_DEVICE float value(int32_t d) const { return ld_shared(at + static_cast<uint32_t>(d) * 4); }
  KVCACHE_DEVICE void set(int32_t d, float v) const { st_shared(at + static_cast<uint32_t>(d) * 4, v); }
};

/// Where a row of a head goes in one of the spaces, -1: nowhere.
KVCACHE_DEVICE int64_t slot_of(const append_params& p, const append_target& to, int64_t row, int32_t head) {
  if (to.slot == nullptr) return -1;
  const int64_t slot = to.slot[row * p.slot_stride + head * p.slot_head_stride];
  return slot >= 0 && slot < to.slots ? slot : -1;
}

/// The normalised Walsh-Hadamard rotation, in the order of quant/hadamard.hpp.
KVCACHE_DEVICE void walsh(const appended_row& x, float factor) {
  for (int32_t h = 1; h < x.dim; h *= 2) {
    warp_barrier();
    for (int32_t pair = x.lane; pair < x.dim / 2; pair += 32) {
      const int32_t i = pair / h * 2 * h + pair % h;
      const float a = x.value(i), b = x.value(i + h);
      x.set(i, add_rn(a, b));
      x.set(i + h, add_rn(a, -b));
    }
  }
  warp_barrier();
  for (int32_t d = x.lane; d < x.dim; d += 32) x.set(d, mul_rn(x.value(d), factor));
}

KVCACHE_DEVICE void put(const appended_row& x, const plane_view& to, int32_t type, int64_t slot,
                        int32_t shift) {
  if (slot < 0 || to.data == nullptr) return;
  const int64_t block = slot >> shift, inside = slot & ((int64_t{1} << shift) - 1);
  char* row = to.data + block * to.block_stride + x.head * to.head_stride + inside * to.token_stride;
  for (int32_t d = x.lane; d < x.dim; d += 32) store_value(row, type, d, x.value(d));
}

/// What codes are made from: a row's value as an open block of this type would have it.
KVCACHE_DEVICE float open_value(const appended_row& x, int32_t type, int32_t d) {
  const float v = x.value(d);
  return packable(type == KVC_F16 ? widen<half_kind::f16>(narrow1<half_kind::f16>(v))
                                  : widen<half_kind::bf16>(narrow1<half_kind::bf16>(v)));
}

/// Scale and minimum of each group of a row's channels, to shared memory and to the plane. Called by the
/// whole warp.
KVCACHE_DEVICE void fit_row(const appended_row& x, const coded_plane& to, const code_form& f, int32_t type,
                            int64_t block, int32_t inside) {
  const int64_t scales = scale_offset(to, block, x.head);
  const int32_t lane = x.lane % group_lanes, groups = f.groups();
  for (int32_t pair = 0; 2 * pair < groups; ++pair) {
    const int32_t wanted = 2 * pair + x.lane / group_lanes, g = least(wanted, groups - 1);
    const int32_t first = g * f.group;
    const auto member = [&](int32_t i) { return open_value(x, type, first + i); };
    const code_levels l = fitted(f, to.clip, member, 0, least(f.group, f.dim - first), lane);
    if (lane != 0 || wanted >= groups) continue;
    st_shared(x.levels + static_cast<uint32_t>(g) * 4,
              static_cast<uint32_t>(l.scale) | static_cast<uint32_t>(l.zero) << 16);
    const int64_t at = scales + f.scale_index(inside, first) * 2;
    *reinterpret_cast<uint16_t*>(to.scale + at) = l.scale;
    if (to.zero != nullptr) *reinterpret_cast<uint16_t*>(to.zero + at) = l.zero;
  }
  warp_barrier();
}

/// The row as codes of a slot. Called by the whole warp.
KVCACHE_DEVICE void put_codes(const appended_row& x, const coded_plane& to, const code_form& f, int32_t type,
                              int64_t slot, int32_t shift) {
  const int64_t block = slot >> shift;
  const auto inside = static_cast<int32_t>(slot & ((int64_t{1} << shift) - 1));
  fit_row(x, to, f, type, block, inside);
  const auto code = [&](int32_t d) {
    const uint32_t word = ld_shared_word(x.levels + static_cast<uint32_t>(d / f.group) * 4);
    const code_levels l{static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 16)};
    return encoded(f, grid_of(f, l), open_value(x, type, d));
  };
  char* cell = code_cell_of(to, block, x.head);
  if (f.keys) {  // a byte in the row of each channel: codes have 8 bits
    for (int32_t d = x.lane; d < f.dim; d += 32) {
      *reinterpret_cast<uint8_t*>(cell + d * to.row_stride + inside) = static_cast<uint8_t>(code(d));
    }
    return;
  }
  char* row = cell + inside * to.row_stride;
  for (int32_t w = x.lane; w < f.words(); w += 32) store_word(row + w * 4, code_word(f, w, code));
}

/// K or V of a head of a row to shared memory, rotated. Called by the whole warp.
KVCACHE_DEVICE void take_row(const append_params& p, const appended_row& x, int64_t row, bool values) {
  const row_array& rows = values ? p.v : p.k;
  const char* from = row_of(rows, row, x.head);
  const int32_t position = !values && p.pos != nullptr ? p.pos[row] : 0;
  for (int32_t d = x.lane; d < x.dim; d += 32) {
    x.set(d, values ? load_value(from, rows.type, d) : rotated_value(p.rope, from, rows.type, d, position));
  }
  const float factor = values ? p.hadamard_v : p.hadamard_k;
  if (factor != 0.0f) walsh(x, factor);
  warp_barrier();
}

/// All heads of one row.
template <bool Codes>
KVCACHE_DEVICE void append_row(const append_params& p) {
  const int64_t row = block_index();
  const auto warp = static_cast<int32_t>(thread_index() / 32);
  appended_row x;
  x.lane = static_cast<int32_t>(thread_index() % 32);
  x.at = shared_base() + static_cast<uint32_t>(warp * append_warp_bytes);
  x.levels = x.at + widest_head * 4;
  for (int32_t task = warp; task < 2 * p.kv_heads; task += warps_of_block) {
    const bool values = task % 2 != 0;
    x.head = task / 2;
    x.dim = values ? p.dim_v : p.dim_k;
    bool any = false;
    KVCACHE_UNROLL
    for (int32_t t = 0; t < append_targets; ++t) {
      x.slot[t] = slot_of(p, p.to[t], row, x.head);
      any = any || x.slot[t] >= 0;
    }
    if (!any) continue;
    take_row(p, x, row, values);
    KVCACHE_UNROLL
    for (int32_t t = 0; t < append_targets; ++t) {
      const append_target& to = p.to[t];
      put(x, values ? to.v : to.k, values ? to.v_type : to.k_type, x.slot[t], to.shift);
    }
    const coded_plane& to = values ? p.codes_v : p.codes_k;
    if (Codes && to.data != nullptr && x.slot[0] >= 0) {
      put_codes(x, to, form_of(to, !values, p.block, x.dim), values ? p.open_v_type : p.open_k_type,
                x.slot[0], p.to[0].shift);
    }
    warp_barrier();  // the row is free
  }
}

KVCACHE_KERNEL(threads_of_block) append_rows(KVCACHE_CONSTANT append_params p) {
  append_row<false>(p);
}
/// The same where K or V of sealed blocks are codes that take rows.
KVCACHE_KERNEL(threads_of_block) append_codes(KVCACHE_CONSTANT append_params p) {
  append_row<true>(p);
}

KVCACHE_KERNEL(threads_of_block) rotate_rows(const rope_rows_params p) {
  const int64_t row = block_index();
  const int32_t position = p.pos[row];
  const int32_t pairs = p.rope.pairs;
  // A thread takes a whole pair, so that rows can be rotated in place.
  for (int32_t i = static_cast<int32_t>(thread_index()); i < p.heads * pairs; i += threads_of_block) {
    const int32_t head = i / pairs, pair = i % pairs;
    const int32_t a = p.rope.half_split != 0 ? pair : 2 * pair;
    const int32_t b = p.rope.half_split != 0 ? pair + pairs : 2 * pair + 1;
    const char* from = row_of(p.in, row, head);
    char* to = row_of(p.out, row, head);
    const float first = rotated_value(p.rope, from, p.in.type, a, position);
    const float second = rotated_value(p.rope, from, p.in.type, b, position);
    store_value(to, p.out.type, a, first);
    store_value(to, p.out.type, b, second);
  }
  const int32_t rest = p.dim - 2 * pairs;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < p.heads * rest; i += threads_of_block) {
    const int32_t head = i / rest, d = 2 * pairs + i % rest;
    store_value(row_of(p.out, row, head), p.out.type, d, load_value(row_of(p.in, row, head), p.in.type, d));
  }
}

}  // namespace kvcache::detail::gpu
