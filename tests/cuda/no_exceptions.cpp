// SPDX-License-Identifier: Apache-2.0
#include "no_exceptions.hpp"

#include <unistd.h>

#include "kvcache/cuda/data_plane.hpp"

#if defined(__cpp_exceptions) || defined(__cpp_rtti)
#error "this file is meant to be built without exceptions and RTTI"
#endif

namespace kvcache::test {

kvc_status plan_without_exceptions() {
  kvc_kv kv{};
  kv.struct_size = sizeof kv;
  kv.kv_heads = 1;
  kv.dim_k = kv.dim_v = 128;
  kv.block = kv.blocks = 1;
  kv.k.type = KVC_F16;
  kv.k.dim_stride = 2;
  kv.k.token_stride = kv.k.head_stride = kv.k.block_stride = 256;
  kv.v = kv.k;
  return gpu_attention::create(kv, {.q_heads = 4, .slots = 1}) ? KVC_OK : KVC_UNSUPPORTED;
}

bool has_no_driver() {
  return access("/dev/nvidiactl", F_OK) != 0 && access("/dev/nvidia-uvm", F_OK) != 0;
}

}  // namespace kvcache::test
