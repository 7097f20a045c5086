// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stores new keys and values at their slots, keys rotated before if asked, and rotates rows of queries. One
// block per row; its threads share the heads' channels.
#include "rope.cuh"

namespace kvcache::detail::gpu {

/// Channel d of head h of a row goes to its slot.
KVCACHE_DEVICE void put(const plane_view& to, int32_t type, int64_t slot, int32_t shift, int32_t head,
                        int32_t d, float v) {
  const int64_t block = slot >> shift, inside = slot & ((int64_t{1} << shift) - 1);
  char* row = to.data + block * to.block_stride + head * to.head_stride + inside * to.token_stride;
  store_value(row, type, d, v);
}

KVCACHE_KERNEL(threads_of_block) append_rows(const append_params p) {
  const int64_t row = block_index();
  const int32_t position = p.pos != nullptr ? p.pos[row] : 0;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < p.kv_heads * p.dim_k; i += threads_of_block) {
    const int32_t head = i / p.dim_k, d = i % p.dim_k;
    const int64_t slot = p.slot[row * p.slot_stride + head * p.slot_head_stride];
    if (slot < 0 || slot >= p.slots) continue;
    const float v = rotated_value(p.rope, row_of(p.k, row, head), p.k.type, d, position);
    put(p.to_k, p.to_k_type, slot, p.block_shift, head, d, v);
  }
  for (int32_t i = static_cast<int32_t>(thread_index()); i < p.kv_heads * p.dim_v; i += threads_of_block) {
    const int32_t head = i / p.dim_v, d = i % p.dim_v;
    const int64_t slot = p.slot[row * p.slot_stride + head * p.slot_head_stride];
    if (slot < 0 || slot >= p.slots) continue;
    const float v = load_value(row_of(p.v, row, head), p.v.type, d);
    put(p.to_v, p.to_v_type, slot, p.block_shift, head, d, v);
  }
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
