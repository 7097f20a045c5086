// SPDX-License-Identifier: Apache-2.0
#pragma once
// How kernels are started on the machine: the counterpart of cuda/start.cuh and cuda/decode_family.cuh.
#include <algorithm>

#include "decode_family.hpp"
#include "simt/backend.hpp"

namespace kvcache::detail::gpu {

template <class Params>
int32_t start(void (*kernel)(const Params), const Params& p, const launch_shape& shape) noexcept {
  simt::backend& b = simt::the_backend();
  if (b.recording != nullptr) {
    b.recording->push_back([kernel, p, shape] { return start(kernel, p, shape); });
    return 0;
  }
  ++b.launches;
  const uint32_t bytes = shape.shared_bytes - std::min(shape.shared_bytes, b.shared_taken);
  try {
    b.stats += simt::launch({shape.blocks, shape.threads, bytes, b.seed, b.count_banks}, kernel, p);
  } catch (const simt::fault& f) {
    b.fault = f.what();
    return simt::launch_failed;
  }
  return 0;
}

}  // namespace kvcache::detail::gpu
