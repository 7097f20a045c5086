// SPDX-License-Identifier: Apache-2.0
#include "all_headers.hpp"

#if defined(__cpp_exceptions) || defined(__cpp_rtti)
#error "this consumer is meant to be built without exceptions and RTTI"
#endif

int main() {
  const kvcache::model_shape shape{.layers = 2, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
  const bool headers_work = kvcache::bytes_per_token(kvcache::group_of(shape)).count == 512;
  const bool library_works = kvc_status_text(KVC_OK)[0] != 0;
  return headers_work && library_works ? 0 : 1;
}
