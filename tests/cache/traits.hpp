// SPDX-License-Identifier: Apache-2.0
#pragma once
// The bundles of parts that the model tests run over.
#include "kvcache/blocks/fail_nth.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/evict/lfu.hpp"

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
typename Traits::eviction_type make_policy(bool) {
  return {};
}
template <>
inline any_eviction make_policy<dynamic>(bool by_frequency) {
  return by_frequency ? any_eviction(lfu{}) : any_eviction(lru{});
}

}  // namespace kvcache::test
