// SPDX-License-Identifier: Apache-2.0
// The part blocks by itself: an allocator, tables for kernels, commands in stages, and an allocator of one's
// own. Regions are shown in docs/blocks.md.
#include <algorithm>
#include <vector>

#include "expect.hpp"
#include "kvcache/blocks/batch_view.hpp"
#include "kvcache/blocks/block_pool.hpp"
#include "kvcache/blocks/command_list.hpp"
#include "kvcache/cache.hpp"

namespace kvc = kvcache;

namespace {

kvc::status show_pool() {
  // [pool]
  kvc::block_pool pool;
  if (auto s = pool.create(kvc::blocks{64}); !s) return s;
  std::vector<kvc::block_id> table(3);              // a sequence of up to 48 tokens, 16 per block
  if (auto s = pool.admit(3); !s) return s;         // would be out_of_blocks, and nothing has changed
  if (auto s = pool.allocate(table); !s) return s;  // ids 0, 1, 2
  const std::vector<kvc::block_id> fork = table;    // a branch that shares all of them
  pool.share(fork);
  const bool copy_first = pool.immutable(table.back());  // true: who writes needs a block of his own
  pool.release(table);                                   // still used: the branch holds them
  // [pool]
  expect(copy_first && pool.used_blocks() == 3, "a shared block stays when one of its holders goes");
  pool.index(fork[0]);
  pool.release(fork);
  expect(pool.cached_blocks() == 1 && pool.free_blocks() == 63,
         "an indexed block is cached when nobody holds it");
  pool.unindex(fork[0]);
  expect(pool.free_blocks() == 64, "and free when the index lets go too");
  return {};
}

kvc::status show_views() {
  // [views]
  const std::vector<kvc::block_id> table{kvc::block_id{7}, kvc::block_id{2}, kvc::block_id{9}};
  std::vector<int32_t> row(4);  // {7, 2, 9, -1}
  if (auto s = kvc::write_row(table, -1, row); !s) return s;
  std::vector<int64_t> slots(3);                                      // tokens 15, 16, 17
  if (auto s = kvc::write_slots(table, 16, 15, slots); !s) return s;  // {127, 32, 33}
  std::vector<int32_t> indptr{0, 0}, indices(3), last(1);
  if (auto s = kvc::write_csr(table, 40, 16, 0, indptr, indices, last); !s)
    return s;  // 3 blocks, the last holds 8
  // [views]
  expect(row == std::vector<int32_t>{7, 2, 9, -1}, "a padded row");
  expect(slots == std::vector<int64_t>{127, 32, 33}, "slots of tokens on both sides of a block's edge");
  expect(indptr[1] == 3 && last[0] == 8, "the same table as CSR");
  return {};
}

kvc::status show_commands() {
  // [commands]
  const int32_t ids_per_space[] = {64, 0};  // blocks of group 0; it has no open blocks
  kvc::command_list list;
  if (auto s = list.create(ids_per_space, 8); !s) return s;
  list.add(KVC_OP_COPY, 0, 0, kvc::block_id{5}, 0, kvc::block_id{6}, 10);  // stage 0
  list.add(KVC_OP_COPY, 0, 0, kvc::block_id{8}, 0, kvc::block_id{9}, 16);  // stage 0: touches neither 5 nor 6
  list.add(KVC_OP_COPY, 0, 0, kvc::block_id{3}, 0, kvc::block_id{5},
           16);  // stage 1: writes what the first read
  // [commands]
  expect(list.stages() == 2 && list.view()[2].stage == 1, "a write waits for the read before it");
  return {};
}

// [own]
struct watched_pool : kvc::block_pool {  // remembers how far it was ever emptied
  int32_t least_free = INT32_MAX;

  kvc::status allocate(std::span<kvc::block_id> out) noexcept {
    const kvc::status s = block_pool::allocate(out);
    least_free = std::min(least_free, free_blocks());
    return s;
  }
};
static_assert(kvc::block_allocator<watched_pool>);

struct watched : kvc::serving {
  using allocator_type = watched_pool;
};
// [own]

kvc::status show_own() {
  auto cache = kvc::basic_cache<watched>::create(
      {.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 8}, .capacity = kvc::kibibytes(64)});
  if (!cache) return cache.error();
  const int32_t total = cache->pool().total_blocks();
  {
    auto seq = cache->open({}, kvc::scope::shared());
    if (!seq) return seq.error();
    if (auto got = seq->extend(33); !got) return got.error();
  }
  expect(cache->pool().free_blocks() == total && cache->pool().least_free == total - 3,
         "an allocator of one's own inside a cache");
  return {};
}

}  // namespace

int main() {
  for (const auto show : {show_pool, show_views, show_commands, show_own}) expect(bool(show()), "done");
  return wrong;
}
