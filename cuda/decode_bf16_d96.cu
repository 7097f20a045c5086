// SPDX-License-Identifier: Apache-2.0
// Decode kernels for bf16 planes with 96 channels per head.
#include "decode_family.cuh"

namespace kvcache::detail::gpu {
template struct decode_family<half_kind::bf16, 96>;
}  // namespace kvcache::detail::gpu
