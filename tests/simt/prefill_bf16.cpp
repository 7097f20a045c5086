// SPDX-License-Identifier: Apache-2.0
#include "simt/prefill_on_machine.hpp"

namespace kvcache::detail::gpu {
template struct prefill_family<half_kind::bf16, 64>;
template struct prefill_family<half_kind::bf16, 80>;
template struct prefill_family<half_kind::bf16, 96>;
template struct prefill_family<half_kind::bf16, 128>;
template struct prefill_family<half_kind::bf16, 256>;
}  // namespace kvcache::detail::gpu
