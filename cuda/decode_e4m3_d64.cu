// SPDX-License-Identifier: Apache-2.0
// Decode kernels for e4m3 blocks with 64 channels per head.
#include "packed_family.cuh"

namespace kvcache::detail::gpu {
template struct packed_family<packed_code::e4m3, packed_code::e4m3, 64>;
}  // namespace kvcache::detail::gpu
