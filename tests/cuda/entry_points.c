/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA entry points called from C99. */
#include <string.h>

#include "kvcache/kvcache.h"

int kvc_test_entry_points_in_c(kvc_status* statuses, int most) {
  kvc_plan_in in;
  kvc_plan plan;
  kvc_kv kv;
  kvc_error error;
  kvc_stream stream = NULL;
  int n = 0;
  memset(&in, 0, sizeof in);
  memset(&plan, 0, sizeof plan);
  memset(&kv, 0, sizeof kv);
  if (most < 4) return 0;
  statuses[n++] = kvc_cuda_plan(&in, &plan, &error); /* no struct_size */
  kv.struct_size = (uint32_t)sizeof kv;
  kv.kv_heads = 1;
  kv.dim_k = kv.dim_v = 64;
  kv.block = 16;
  kv.blocks = 4;
  kv.k.type = KVC_BF16;
  kv.k.dim_stride = 2;
  kv.k.token_stride = 128;
  kv.k.head_stride = kv.k.block_stride = 2048;
  kv.v = kv.k;
  in.struct_size = (uint32_t)sizeof in;
  in.kv = &kv;
  in.q_heads = in.n = in.max_q = 1;
  in.q_type = in.out_type = KVC_BF16;
  plan.struct_size = (uint32_t)sizeof plan;
  statuses[n++] = kvc_cuda_plan(&in, &plan, &error);
  statuses[n++] = kvc_cuda_append(&kv, NULL, stream, &error); /* no memory behind the planes */
  statuses[n++] = kvc_cuda_unpack(&kv, NULL, 0, 0, NULL, 0, NULL, 0, stream, &error); /* nor here */
  return n;
}
