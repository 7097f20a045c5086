// SPDX-License-Identifier: Apache-2.0
// Prefill kernels for f16 planes with 64 channels per head.
#include "prefill_family.cuh"

namespace kvcache::detail::gpu {
template struct prefill_family<half_kind::f16, 64>;
}  // namespace kvcache::detail::gpu
