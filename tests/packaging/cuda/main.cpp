// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "kvcache/cuda/data_plane.hpp"

int main() {
  kvc_kv kv{};
  kv.struct_size = sizeof kv;
  kv.kv_heads = 2;
  kv.dim_k = kv.dim_v = 64;
  kv.block = 16;
  kv.blocks = 8;
  kv.k.type = KVC_F16;
  kv.k.dim_stride = 2;
  kv.k.token_stride = 128;
  kv.k.head_stride = 2048;
  kv.k.block_stride = 4096;
  kv.v = kv.k;
  const auto at = kvcache::gpu_attention::create(kv, {.q_heads = 8, .sequences = 4, .slots = 128});
  if (!at) return 1;
  // No device memory: refused before a device is asked for.
  const kvcache::status done = kvcache::gpu_append(kv, {}, {}, {}, nullptr);
  std::printf("%s\n", done.field);
  return done ? 1 : 0;
}
