// SPDX-License-Identifier: Apache-2.0
#include "simt/packed_on_machine.hpp"

namespace kvcache::detail::gpu {
template struct packed_family<packed_code::u8, packed_code::u4, 64>;
template struct packed_family<packed_code::u8, packed_code::u4, 80>;
template struct packed_family<packed_code::u8, packed_code::u4, 96>;
template struct packed_family<packed_code::u8, packed_code::u4, 128>;
template struct packed_family<packed_code::u8, packed_code::u4, 256>;
}  // namespace kvcache::detail::gpu
