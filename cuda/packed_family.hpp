// SPDX-License-Identifier: Apache-2.0
#pragma once
// The decode kernels over blocks of codes of one format and head dim; as decode_family.hpp.
#include "launch.hpp"
#include "packed_params.hpp"
#include "ptx.cuh"

namespace kvcache::detail::gpu {

template <packed_code K, packed_code V, int Dim>
struct packed_family {
  static int32_t launch(bool wide, bool extras, const packed_params& p, const launch_shape& shape,
                        kvc_stream stream) noexcept;
};

}  // namespace kvcache::detail::gpu
