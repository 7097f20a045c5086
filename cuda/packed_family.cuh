// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the kernels of a family are started; included by the decode_<format>_*.cu only.
#include "decode_packed.cuh"
#include "packed_family.hpp"
#include "start.cuh"

namespace kvcache::detail::gpu {

template <packed_code K, packed_code V, int Dim>
int32_t packed_family<K, V, Dim>::launch(bool wide, bool extras, const packed_params& p,
                                         const launch_shape& shape, kvc_stream stream) noexcept {
  if constexpr (has_wide(Dim)) {
    if (wide)
      return extras ? start(&decode_packed<K, V, Dim, true, true>, p, shape, stream)
                    : start(&decode_packed<K, V, Dim, true, false>, p, shape, stream);
  }
  return extras ? start(&decode_packed<K, V, Dim, false, true>, p, shape, stream)
                : start(&decode_packed<K, V, Dim, false, false>, p, shape, stream);
}

}  // namespace kvcache::detail::gpu
