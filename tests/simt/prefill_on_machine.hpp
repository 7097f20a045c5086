// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prefill kernels' sources, compiled for the machine.
#include "prefill.cuh"
#include "prefill_family.hpp"
#include "simt/family.hpp"

namespace kvcache::detail::gpu {

template <half_kind Kind, int Dim>
int32_t prefill_family<Kind, Dim>::launch(bool extras, const decode_params& p, const launch_shape& shape,
                                          kvc_stream) noexcept {
  return extras ? start(&prefill<Kind, Dim, true>, p, shape) : start(&prefill<Kind, Dim, false>, p, shape);
}

}  // namespace kvcache::detail::gpu
