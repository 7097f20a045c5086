// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the kernels of a family are started; included by the prefill_*.cu only.
#include "prefill.cuh"
#include "prefill_family.hpp"
#include "start.cuh"

namespace kvcache::detail::gpu {

template <half_kind Kind, int Dim>
int32_t prefill_family<Kind, Dim>::launch(bool extras, const decode_params& p, const launch_shape& shape,
                                          kvc_stream stream) noexcept {
  return extras ? start(&prefill<Kind, Dim, true>, p, shape, stream)
                : start(&prefill<Kind, Dim, false>, p, shape, stream);
}

}  // namespace kvcache::detail::gpu
