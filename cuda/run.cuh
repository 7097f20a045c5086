// SPDX-License-Identifier: Apache-2.0
#pragma once
// The command list: whole or partial blocks copied or cleared, keys turned in place, slots gathered by a
// keep-list. One launch serves all commands of a stage and kind over all layers of a group.
#include "rope.cuh"
#include "run_params.hpp"

namespace kvcache::detail::gpu {

/// The cell (block, head) of a plane.
KVCACHE_DEVICE char* cell_of(const plane_view& p, int64_t block, int32_t head) {
  return p.data + block * p.block_stride + head * p.head_stride;
}

KVCACHE_KERNEL(threads_of_block)
move_blocks(KVCACHE_CONSTANT run_params p) {
  uint32_t b = block_index();
  const int32_t head = static_cast<int32_t>(b % static_cast<uint32_t>(p.kv_heads));
  b /= static_cast<uint32_t>(p.kv_heads);
  const bool values = b % 2 != 0;
  b /= 2;
  const moved_layer& layer = p.layer[b % static_cast<uint32_t>(p.n_layers)];
  const moved_block& c = p.command[b / static_cast<uint32_t>(p.n_layers)];
  const plane_view& from = values ? layer.from_v : layer.from_k;
  const plane_view& to = values ? layer.to_v : layer.to_k;
  const char* source = cell_of(from, c.src, head);
  char* target = cell_of(to, c.dst, head);
  const int32_t chunks = (values ? p.bytes_v : p.bytes_k) / 16;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < c.tokens * chunks; i += threads_of_block) {
    const int32_t token = i / chunks, chunk = i % chunks;
    words4 w{};
    if (p.zero == 0) w = load<words4>(source + token * from.token_stride + chunk * 16);
    *reinterpret_cast<words4*>(target + token * to.token_stride + chunk * 16) = w;
  }
}

/// Keys of the first `tokens` slots, turned by `arg` positions; a thread takes a pair.
KVCACHE_KERNEL(threads_of_block)
turn_blocks(KVCACHE_CONSTANT run_params p) {
  uint32_t b = block_index();
  const int32_t head = static_cast<int32_t>(b % static_cast<uint32_t>(p.kv_heads));
  b /= static_cast<uint32_t>(p.kv_heads);
  const plane_view& to = p.layer[b % static_cast<uint32_t>(p.n_layers)].to_k;
  const moved_block& c = p.command[b / static_cast<uint32_t>(p.n_layers)];
  char* cell = cell_of(to, c.dst, head);
  const int32_t pairs = p.rope.pairs;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < c.tokens * pairs; i += threads_of_block) {
    char* row = cell + i / pairs * to.token_stride;
    const int32_t pair = i % pairs;
    const int32_t first = p.rope.half_split != 0 ? pair : 2 * pair;
    const int32_t second = p.rope.half_split != 0 ? pair + pairs : 2 * pair + 1;
    const float x = rotated_value(p.rope, row, p.type_k, first, c.arg);
    const float y = rotated_value(p.rope, row, p.type_k, second, c.arg);
    store_value(row, p.type_k, first, x);
    store_value(row, p.type_k, second, y);
  }
}

/// Slot kept[t] of the source run becomes slot t of the target run. Kept slots ascend, so none lies before
/// the place it goes to and a run may be gathered into itself: a group of slots is read, then written, and
/// what later groups read lies behind.
KVCACHE_KERNEL(threads_of_block)
gather_slots(KVCACHE_CONSTANT gather_params p) {
  constexpr int32_t at_once = 4;  // 16-byte chunks of a thread
  uint32_t b = block_index();
  const int32_t head = static_cast<int32_t>(b % static_cast<uint32_t>(p.kv_heads));
  b /= static_cast<uint32_t>(p.kv_heads);
  const bool values = b % 2 != 0;
  const int32_t number = static_cast<int32_t>(b / 2);
  const moved_layer& layer = p.layer[number];
  const plane_view& from = values ? layer.from_v : layer.from_k;
  const plane_view& to = values ? layer.to_v : layer.to_k;
  const int32_t* kept = p.kept + number * p.kept_layer_stride + head * p.kept_head_stride;
  const int32_t chunks = (values ? p.bytes_v : p.bytes_k) / 16;
  const int32_t all = p.tokens * chunks, inside = (1 << p.block_shift) - 1;
  for (int32_t first = 0; first < all; first += at_once * threads_of_block) {
    words4 w[at_once];
    bool there[at_once];
    KVCACHE_UNROLL
    for (int32_t k = 0; k < at_once; ++k) {
      const int32_t i = first + k * threads_of_block + static_cast<int32_t>(thread_index());
      const int32_t slot = i < all ? kept[i / chunks] : -1;
      // What is no slot of the source run leaves its place as it was.
      there[k] = slot >= 0 && slot >> p.block_shift < p.n_src;
      if (!there[k]) continue;
      const char* cell = cell_of(from, p.id[slot >> p.block_shift], head);
      w[k] = load<words4>(cell + (slot & inside) * from.token_stride + i % chunks * 16);
    }
    block_barrier();
    KVCACHE_UNROLL
    for (int32_t k = 0; k < at_once; ++k) {
      const int32_t i = first + k * threads_of_block + static_cast<int32_t>(thread_index());
      if (!there[k]) continue;
      const int32_t t = i / chunks;
      char* cell = cell_of(to, p.id[p.n_src + (t >> p.block_shift)], head);
      *reinterpret_cast<words4*>(cell + (t & inside) * to.token_stride + i % chunks * 16) = w[k];
    }
    block_barrier();
  }
}

}  // namespace kvcache::detail::gpu
