// SPDX-License-Identifier: Apache-2.0
// Decode kernels for int4 blocks with 256 channels per head.
#include "packed_family.cuh"

namespace kvcache::detail::gpu {
template struct packed_family<packed_code::u4, packed_code::u4, 256>;
}  // namespace kvcache::detail::gpu
