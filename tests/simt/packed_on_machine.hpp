// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sources of the decode kernels over codes, compiled for the machine.
#include "decode_packed.cuh"
#include "packed_family.hpp"
#include "simt/family.hpp"

namespace kvcache::detail::gpu {

template <packed_code K, packed_code V, int Dim>
int32_t packed_family<K, V, Dim>::launch(bool wide, bool extras, const packed_params& p,
                                         const launch_shape& shape, kvc_stream) noexcept {
  if constexpr (has_wide(Dim)) {
    if (wide)
      return extras ? start(&decode_packed<K, V, Dim, true, true>, p, shape)
                    : start(&decode_packed<K, V, Dim, true, false>, p, shape);
  }
  return extras ? start(&decode_packed<K, V, Dim, false, true>, p, shape)
                : start(&decode_packed<K, V, Dim, false, false>, p, shape);
}

}  // namespace kvcache::detail::gpu
