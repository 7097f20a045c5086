// SPDX-License-Identifier: Apache-2.0
#pragma once
// The decode kernels of one storage type and head dim. Each decode_*.cu holds one family, so that a build
// compiles what it needs and a change recompiles little.
#include "launch.hpp"
#include "ptx.cuh"

namespace kvcache::detail::gpu {

template <half_kind Kind, int Dim>
struct decode_family {
  static int32_t launch(bool wide, bool extras, const decode_params& p, const launch_shape& shape,
                        kvc_stream stream) noexcept;
};

}  // namespace kvcache::detail::gpu
