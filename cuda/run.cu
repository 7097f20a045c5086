// SPDX-License-Identifier: Apache-2.0
// Starts the kernels of the command list.
#include "run.cuh"
#include "start.cuh"

namespace kvcache::detail::gpu {

int32_t launch_move(const run_params& p, const launch_shape& shape, kvc_stream stream) noexcept {
  return start(&move_blocks, p, shape, stream);
}
int32_t launch_turn(const run_params& p, const launch_shape& shape, kvc_stream stream) noexcept {
  return start(&turn_blocks, p, shape, stream);
}
int32_t launch_gather(const gather_params& p, const launch_shape& shape, kvc_stream stream) noexcept {
  return start(&gather_slots, p, shape, stream);
}

}  // namespace kvcache::detail::gpu
