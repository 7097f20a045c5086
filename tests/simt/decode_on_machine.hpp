// SPDX-License-Identifier: Apache-2.0
#pragma once
// The decode kernels' sources, compiled for the machine.
#include "decode.cuh"
#include "simt/family.hpp"

namespace kvcache::detail::gpu {

template <half_kind Kind, int Dim>
int32_t decode_family<Kind, Dim>::launch(bool wide, bool extras, const decode_params& p,
                                         const launch_shape& shape, kvc_stream) noexcept {
  if constexpr (has_wide(Dim)) {
    if (wide)
      return extras ? start(&decode<Kind, Dim, true, true>, p, shape)
                    : start(&decode<Kind, Dim, true, false>, p, shape);
  }
  return extras ? start(&decode<Kind, Dim, false, true>, p, shape)
                : start(&decode<Kind, Dim, false, false>, p, shape);
}

}  // namespace kvcache::detail::gpu
