// SPDX-License-Identifier: Apache-2.0
#include "simt/packed_on_machine.hpp"

namespace kvcache::detail::gpu {
template struct packed_family<packed_code::e4m3, packed_code::e4m3, 64>;
template struct packed_family<packed_code::e4m3, packed_code::e4m3, 80>;
template struct packed_family<packed_code::e4m3, packed_code::e4m3, 96>;
template struct packed_family<packed_code::e4m3, packed_code::e4m3, 128>;
template struct packed_family<packed_code::e4m3, packed_code::e4m3, 256>;
}  // namespace kvcache::detail::gpu
