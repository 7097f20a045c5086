// SPDX-License-Identifier: Apache-2.0
// Attention of chunks of prompts by the CUDA kernels, run on the CPU, against double and against the CPU's
// own data plane.
#include "kvcache/attend/data_plane.hpp"
#include "simt/gpu_world.hpp"

namespace kvcache::test {
namespace {}
}  // namespace kvcache::test
