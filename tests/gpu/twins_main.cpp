// SPDX-License-Identifier: Apache-2.0
// gpu_twins: every instruction of cuda/ptx.cuh on the GPU against its twin. Not run on a GPU yet.
#include "gpu/device.hpp"
#include "gpu/twin_case.hpp"

int main() {
  using namespace kvcache::gpu_check;
  return on_a_gpu([] {
    const int failed = run_twins(twins_on_device(), twins_on_machine(), 1);
    std::printf("%d of %zu cases differ\n", failed, twins_on_machine().size());
    return failed == 0 ? 0 : 1;
  });
}
