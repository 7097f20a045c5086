// SPDX-License-Identifier: Apache-2.0
// The twins' side: the cases run on the machine of tests/simt.
#define KVCACHE_TWIN_SIDE on_machine
#include "gpu/twin_cases.cuh"

namespace kvcache::gpu_check {

namespace on_machine {
namespace {
template <class Case>
std::string run(const std::vector<uint32_t>& in, std::vector<uint32_t>& out) {
  try {
    simt::launch({Case::about.warps, 32, Case::about.shared_bytes, 0, false}, &run_case<Case>, in.data(),
                 out.data());
  } catch (const simt::fault& f) {
    return f.what();
  }
  return {};
}
}  // namespace
}  // namespace on_machine

std::vector<twin_side> twins_on_machine() {
  std::vector<twin_side> all;
  on_machine::run_all([&]<class Case>() { all.push_back({&Case::about, &on_machine::run<Case>}); });
  return all;
}

}  // namespace kvcache::gpu_check
