// SPDX-License-Identifier: Apache-2.0
// Decode kernels for int8 blocks with 128 channels per head.
#include "packed_family.cuh"

namespace kvcache::detail::gpu {
template struct packed_family<packed_code::u8, packed_code::u8, 128>;
}  // namespace kvcache::detail::gpu
