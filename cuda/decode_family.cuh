// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the kernels of a family are started; included by the decode_*.cu only.
#include "decode.cuh"
#include "decode_family.hpp"
#include "start.cuh"

namespace kvcache::detail::gpu {

template <half_kind Kind, int Dim>
int32_t decode_family<Kind, Dim>::launch(bool wide, bool extras, const decode_params& p,
                                         const launch_shape& shape, kvc_stream stream) noexcept {
  if constexpr (has_wide(Dim)) {
    if (wide)
      return extras ? start(&decode<Kind, Dim, true, true>, p, shape, stream)
                    : start(&decode<Kind, Dim, true, false>, p, shape, stream);
  }
  return extras ? start(&decode<Kind, Dim, false, true>, p, shape, stream)
                : start(&decode<Kind, Dim, false, false>, p, shape, stream);
}

}  // namespace kvcache::detail::gpu
