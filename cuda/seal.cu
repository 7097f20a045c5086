// SPDX-License-Identifier: Apache-2.0
// Starts the kernels that write, copy and read codes.
#include "seal.cuh"
#include "start.cuh"
#include "unpack.cuh"

namespace kvcache::detail::gpu {

int32_t launch_seal(const code_params& p, const launch_shape& shape, kvc_stream stream) noexcept {
  return start(&seal_cells, p, shape, stream);
}
int32_t launch_copy_codes(const code_params& p, const launch_shape& shape, kvc_stream stream) noexcept {
  return start(&copy_codes, p, shape, stream);
}
int32_t launch_unpack(const unpack_params& p, const launch_shape& shape, kvc_stream stream) noexcept {
  return start(&unpack_cells, p, shape, stream);
}

}  // namespace kvcache::detail::gpu
