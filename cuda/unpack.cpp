// SPDX-License-Identifier: Apache-2.0
// kvc_cuda_unpack: what the host decides and checks.
#include "host.hpp"

using namespace kvcache::detail;
using namespace kvcache::detail::gpu;

kvc_status kvc_cuda_unpack(const kvc_kv* kv, const int32_t* ids, int32_t n, int32_t head, float* k,
                           int64_t k_stride, float* v, int64_t v_stride, kvc_stream stream,
                           kvc_error* error) {
  constexpr int32_t most_ids = 1 << 30;
  KVC_TRY(check_packed_layer(kv, true, error));
  if (n < 0 || (ids == nullptr && n > 0)) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_N, n);
  if (n >= most_ids) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_N, n);
  if (head < 0 || head >= kv->kv_heads) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, head);
  if (n == 0 || (k == nullptr && v == nullptr)) return KVC_OK;
  unpack_params p{};
  p.k = coded_of(kv->k, true);
  p.v = coded_of(kv->v, false);
  p.id = ids;
  p.n = n;
  p.head = head;
  p.blocks = kv->blocks;
  p.dim_k = kv->dim_k;
  p.dim_v = kv->dim_v;
  p.block = kv->block;
  p.to_k = k;
  p.to_v = v;
  p.to_k_stride = k_stride;
  p.to_v_stride = v_stride;
  return launched(launch_unpack(p, {2 * static_cast<uint32_t>(n), threads_of_block, 0}, stream), error);
}
