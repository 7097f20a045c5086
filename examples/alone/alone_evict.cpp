// SPDX-License-Identifier: Apache-2.0
// The part evict by itself, and a policy of one's own. Regions are shown in docs/evict.md.
#include <vector>

#include "expect.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/evict/parse.hpp"

namespace kvc = kvcache;

namespace {

kvc::status show_alone() {
  // [alone]
  kvc::lru order;
  if (auto s = order.create(100, 1); !s) return s;  // ids below 100, one lane
  for (const int32_t r : {4, 2, 7}) order.enter(kvc::node_id{r}, 0, {});
  order.leave(kvc::node_id{4}, 0);            // somebody uses it again
  const kvc::node_id goes = order.victim(0);  // node 2
  // [alone]
  expect(goes == kvc::node_id{2}, "what was released longest ago goes first");
  return {};
}

// [own]
struct newest_first {  // keeps what is old: for a fixed set of long system prompts
  static uint64_t key(const kvc::node_meta& m) noexcept { return UINT64_MAX - m.born; }
};
struct prompts_stay : kvc::serving {
  using eviction_type = kvc::ranked<newest_first>;
};
// [own]

// Fills a cache of four blocks with two prompts of two blocks each, asks for one more, and says which prompt
// is still whole.
template <class Traits>
int whole_prompt(kvc::basic_cache<Traits>& cache) {
  const std::vector<kvc::token_id> prompt[] = {std::vector<kvc::token_id>(33, 1),
                                               std::vector<kvc::token_id>(33, 2)};
  for (const auto& p : prompt) {
    auto seq = cache.open(p, kvc::scope::shared());
    if (!seq || !seq->extend(32) || !seq->commit(p)) return -1;
  }
  auto third = cache.open({}, kvc::scope::shared());
  if (!third || !third->extend(16)) return -1;
  std::vector<kvc::node_id> scratch(8);
  for (int i = 0; i < 2; ++i) {
    if (cache.peek(prompt[i], kvc::scope::shared(), scratch) == 32) return i;
  }
  return 2;
}

const kvc::group_config four_blocks{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                                    .total = kvc::blocks{4}};

kvc::status show_own() {
  auto usual = kvc::cache::create({.groups = {&four_blocks, 1}});
  auto mine = kvc::basic_cache<prompts_stay>::create({.groups = {&four_blocks, 1}});
  if (!usual || !mine) return kvc::errc::out_of_memory;
  expect(whole_prompt(*usual) == 1, "with lru the older prompt loses a block");
  expect(whole_prompt(*mine) == 0, "with the policy of one's own the newer one does");
  return {};
}

kvc::status show_choice() {
  const char* text = "slru";
  // [choice]
  const kvc::parsed_eviction read =
      kvc::parse_eviction(text);  // "slru", "ttl:300", "s3_fifo:small=10,uses=2"
  if (!read.ok()) return {kvc::errc::bad_argument, "eviction"};  // read.key, .text, .allowed: what is wrong
  kvc::any_eviction policy = kvc::make_eviction(read.value);
  if (!policy.holds()) return kvc::errc::out_of_memory;
  auto cache = kvc::basic_cache<kvc::dynamic>::create({.groups = {&four_blocks, 1}}, std::move(policy));
  // [choice]
  if (!cache) return cache.error();
  expect(whole_prompt(*cache) == 1, "a policy chosen at run time");
  return {};
}

}  // namespace

int main() {
  for (const auto show : {show_alone, show_own, show_choice}) expect(bool(show()), "done");
  return wrong;
}
