// SPDX-License-Identifier: Apache-2.0
// The kernels of ceiling.cu as loops, for fake_runtime.cpp.
#include <cstring>
#include <random>

#include "gpu/ceiling.hpp"
#include "kvcache/core/numeric.hpp"
#include "simt/backend.hpp"

namespace kvcache::gpu_check {
namespace {
/// A launch: run, or recorded under a capture.
template <class Run>
int launch(Run&& run) {
  if (auto* recording = simt::the_backend().recording; recording != nullptr) {
    recording->push_back([run] { return run(), 0; });
    return 0;
  }
  run();
  return 0;
}
}  // namespace

int queue_read(const void*, size_t, read_shape, int32_t, uint32_t*, kvc_stream) {
  return 0;
}
int queue_copy(void* to, const void* from, size_t bytes, int32_t, kvc_stream) {
  return launch([=] { std::memcpy(to, from, bytes); });
}
int queue_fill(void* to, size_t bytes, content what, uint32_t seed, kvc_stream) {
  return launch([=] {
    std::minstd_rand random(seed);
    auto* halves = static_cast<uint16_t*>(to);
    for (size_t i = 0; i < bytes / 2; ++i) {
      const float v = static_cast<float>(int(random() % 2048) - 1024) / 1024;
      halves[i] = what == content::codes  ? static_cast<uint16_t>(random() & 0xf7f7u)
                  : what == content::bf16 ? to_bf16(v).bits
                                          : to_f16(v).bits;
    }
  });
}
int queue_fill_cells(void* to, int64_t blocks, int64_t block_stride, int32_t heads, int64_t head_stride,
                     int32_t count, uint16_t value, kvc_stream) {
  return launch([=] {
    for (int64_t i = 0; i < blocks * heads; ++i) {
      auto* cell = static_cast<std::byte*>(to) + i / heads * block_stride + i % heads * head_stride;
      for (int32_t k = 0; k < count; ++k) std::memcpy(cell + 2 * k, &value, 2);
    }
  });
}
int queue_nothing(kvc_stream) {
  return launch([] {});
}
int queue_clock(uint64_t* to, uint32_t microseconds, kvc_stream) {
  to[0] = to[1] = uint64_t{microseconds} * 1000;
  return 0;
}

}  // namespace kvcache::gpu_check
