// SPDX-License-Identifier: Apache-2.0
// Prefill kernels for bf16 planes with 64 channels per head.
#include "prefill_family.cuh"

namespace kvcache::detail::gpu {
template struct prefill_family<half_kind::bf16, 64>;
}  // namespace kvcache::detail::gpu
