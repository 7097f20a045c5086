// SPDX-License-Identifier: Apache-2.0
// The command list's kernels, compiled for the machine.
#include "run.cuh"
#include "simt/family.hpp"

namespace kvcache::detail::gpu {

int32_t launch_move(const run_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(&move_blocks, p, shape);
}
int32_t launch_turn(const run_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(&turn_blocks, p, shape);
}
int32_t launch_gather(const gather_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(&gather_slots, p, shape);
}

}  // namespace kvcache::detail::gpu
