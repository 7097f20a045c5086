// SPDX-License-Identifier: Apache-2.0
#include "simt/decode_on_machine.hpp"

namespace kvcache::detail::gpu {
template struct decode_family<half_kind::f16, 64>;
template struct decode_family<half_kind::f16, 80>;
template struct decode_family<half_kind::f16, 96>;
template struct decode_family<half_kind::f16, 128>;
template struct decode_family<half_kind::f16, 256>;
}  // namespace kvcache::detail::gpu
