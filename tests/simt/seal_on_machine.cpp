// SPDX-License-Identifier: Apache-2.0
// The kernels that write, copy and read codes, compiled for the machine.
#include "seal.cuh"
#include "simt/family.hpp"
#include "simt/fit_on_machine.hpp"
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

namespace kvcache::simt {

float group_error(int32_t type, bool symmetric, uint16_t scale, uint16_t zero, const float* values,
                  int32_t skip, int32_t size) {
  using namespace detail::gpu;
  code_form f{};
  f.type = type;
  f.symmetric = symmetric;
  float sum[32] = {};
  const auto kernel = [&] {
    const auto lane = static_cast<int32_t>(thread_index());
    const auto value = [&](int32_t i) { return values[i]; };
    sum[lane] = squared_error(f, {scale, zero}, value, skip, size, lane % group_lanes);
  };
  launch({1, 32, 0, the_backend().seed, false}, kernel);
  for (const float s : sum) {
    if (!(s == sum[0])) return -1.0f;  // lanes that disagree would choose differently
  }
  return sum[0];
}

}  // namespace kvcache::simt
