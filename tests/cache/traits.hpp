// SPDX-License-Identifier: Apache-2.0
#pragma once
// The bundles of parts that the model tests run over.
#include "kvcache/blocks/fail_nth.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/evict/parse.hpp"

namespace kvcache::test {

using lru_cache = serving;
struct lfu_cache : serving {
  using eviction_type = lfu;
};
struct failing_lru : serving {
  using allocator_type = fail_nth<block_pool>;
};
struct failing_lfu : failing_lru {
  using eviction_type = lfu;
};

template <class Traits>
typename Traits::eviction_type make_policy(const eviction_choice&) {
  return {};
}
template <>
inline any_eviction make_policy<dynamic>(const eviction_choice& order) {
  return make_eviction(order);
}

}  // namespace kvcache::test
