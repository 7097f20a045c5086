// SPDX-License-Identifier: Apache-2.0
// Decode kernels for f16 planes with 256 channels per head.
#include "decode_family.cuh"

namespace kvcache::detail::gpu {
template struct decode_family<half_kind::f16, 256>;
}  // namespace kvcache::detail::gpu
