// SPDX-License-Identifier: Apache-2.0
// The kernels that write, copy and read codes, compiled for the machine.
#include "seal.cuh"
#include "simt/family.hpp"
#include "unpack.cuh"

namespace kvcache::detail::gpu {

int32_t launch_seal(const code_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(&seal_cells, p, shape);
}
int32_t launch_copy_codes(const code_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(&copy_codes, p, shape);
}
int32_t launch_unpack(const unpack_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(&unpack_cells, p, shape);
}

}  // namespace kvcache::detail::gpu
