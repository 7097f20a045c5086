// SPDX-License-Identifier: Apache-2.0
// What a user of an installed kvcache writes first: how large is the cache of this model?
#include <cstdio>

#include "kvcache/core/shape.hpp"

int main() {
  // [example]
  const kvcache::model_shape llama{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  const kvcache::bytes per_token = kvcache::bytes_per_token(kvcache::group_of(llama));
  // [example]
  std::printf("%lld bytes per token\n", static_cast<long long>(per_token.count));
  return per_token.count == 131072 ? 0 : 1;
}
