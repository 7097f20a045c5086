// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prefill kernels of one storage type and head dim; each prefill_*.cu holds one family.
#include "launch.hpp"
#include "ptx.cuh"

namespace kvcache::detail::gpu {

template <half_kind Kind, int Dim>
struct prefill_family {
  static int32_t launch(bool extras, const decode_params& p, const launch_shape& shape,
                        kvc_stream stream) noexcept;
};

}  // namespace kvcache::detail::gpu
