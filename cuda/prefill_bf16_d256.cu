// SPDX-License-Identifier: Apache-2.0
// Prefill kernels for bf16 planes with 256 channels per head.
#include "prefill_family.cuh"

namespace kvcache::detail::gpu {
template struct prefill_family<half_kind::bf16, 256>;
}  // namespace kvcache::detail::gpu
