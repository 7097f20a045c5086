// SPDX-License-Identifier: Apache-2.0
// Prefill kernels for f16 planes with 96 channels per head.
#include "prefill_family.cuh"

namespace kvcache::detail::gpu {
template struct prefill_family<half_kind::f16, 96>;
}  // namespace kvcache::detail::gpu
