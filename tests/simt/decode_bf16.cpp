// SPDX-License-Identifier: Apache-2.0
#include "simt/decode_on_machine.hpp"

namespace kvcache::detail::gpu {
template struct decode_family<half_kind::bf16, 64>;
template struct decode_family<half_kind::bf16, 80>;
template struct decode_family<half_kind::bf16, 96>;
template struct decode_family<half_kind::bf16, 128>;
template struct decode_family<half_kind::bf16, 256>;
}  // namespace kvcache::detail::gpu
