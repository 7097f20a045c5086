// SPDX-License-Identifier: Apache-2.0
// The planner by itself. Regions are shown in docs/plan.md.
#include "expect.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/plan.hpp"

namespace kvc = kvcache;

int main() {
  // [plan]
  const kvc::cache_config config{
      .shape = {.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128},  // f16, Llama 3 8B
      .capacity = kvc::gibibytes(8)};
  const auto geo = kvc::resolve(config);
  if (!geo) return 1;
  const kvc::bytes token = kvc::bytes_per_token(*geo);  // 128 KiB
  const int32_t blocks = geo->group[0].total;           // 4,096 of 16 tokens
  const int32_t batch = kvc::max_batch(*geo, 4096);     // 16 sequences of 4,096 tokens
  const int32_t context = kvc::max_context(*geo, 64);   // 64 sequences can grow to 1,024 tokens each
  const kvc::bytes weights = kvc::weight_bytes(8'030'000'000, 16);
  const auto step = kvc::decode_step(geo->group[0].shape, weights, batch, 4096);
  const double at_best = step.seconds(900e9);  // at 900 GB/s: 0.0274 s
  // [plan]
  expect(token == kvc::kibibytes(128), "a token takes 128 KiB");
  expect(blocks == 4096 && batch == 16 && context == 1024,
         "8 GiB are 4,096 blocks: 16 x 4,096 or 64 x 1,024 tokens");
  expect(step.dominated_by() == kvc::regime::weight_dominated,
         "16 sequences still read more weights than cache");
  expect(at_best > 0.0273 && at_best < 0.0275, "a step takes 27.4 ms at 900 GB/s");

  // The planner's answer is what the cache hands out.
  const auto cache = kvc::cache::create(config);
  if (!cache) return 1;
  expect(cache->pool().total_blocks() == blocks, "the cache has as many blocks as planned");
  expect(cache->shape().memory() == geo->memory() && geo->memory() == kvc::gibibytes(8), "and as many bytes");
  return wrong;
}
