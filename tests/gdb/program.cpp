// SPDX-License-Identifier: Apache-2.0
// A cache in a state where every printer has something to show; gdb stops in `here` and prints.
#include <utility>
#include <vector>

#include "kvcache/cache.hpp"

namespace kvc = kvcache;

namespace {

[[gnu::noinline]] void here(const kvc::cache& cache, const kvc::sequence& seq) {
  asm volatile("" ::"r"(&cache), "r"(&seq) : "memory");
}

}  // namespace

int main() {
  auto made = kvc::cache::create({.shape = {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 8},
                                  .block_size = 4,
                                  .capacity = kvc::kibibytes(8),
                                  .max_sequences = 4,
                                  .max_scopes = 8});
  if (!made) return 1;
  kvc::cache& cache = *made;
  auto scope = kvc::scope::tenant("acme").adapter("lora", 3);
  scope.from(8, kvc::scope::tenant("user 7"));
  const std::vector<kvc::token_id> text{10, 11, 12, 13, 14, 15, 16, 17, 18, 19};

  auto first = cache.open(text, scope);
  if (!first || !first->extend(10) || !first->commit(text)) return 1;
  auto other = cache.open(std::vector<kvc::token_id>{10, 11, 12, 13, 90, 91, 92, 93, 94}, scope);
  if (!other || !other->extend(5) ||
      !other->commit(std::vector<kvc::token_id>{10, 11, 12, 13, 90, 91, 92, 93, 94}))
    return 1;
  if (!other->close()) return 1;
  auto branch = first->fork();
  if (!branch || !branch->extend(1) || !branch->extend(2, true))
    return 1;  // copies the last block, then drafts

  kvc::sequence seq = std::move(*branch);
  kvc::sequence closed;
  const kvc::status refused = seq.extend(1000, true).error();
  const kvc::result<int32_t> failed = refused;
  const kvc::result<int32_t> fine = 7;
  const kvc::block_id absent = kvc::no_block;
  const auto node = kvc::node_id{2};
  const auto table = seq.table();
  const kvc::bytes size = cache.shape().memory();
  const kvc::blocks some{3};
  const auto broken = kvc::scope::tenant("x").from(0, kvc::scope::shared());
  here(cache, *first);
  return closed.live() || failed || !fine || absent == kvc::block_id{1} || node == kvc::no_node ||
         table.empty() || size.count == 0 || some.count == 0 || bool(broken.check());
}
