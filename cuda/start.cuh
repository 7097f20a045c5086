// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starts a kernel on the device of its stream. Answers a cudaError_t, and leaves none behind for others to
// find.
#include <cuda_runtime.h>

#include "launch.hpp"

namespace kvcache::detail::gpu {

/// Makes the stream's device current for a moment. A launch into a stream of another device is refused.
class device_scope {
 public:
  explicit device_scope(kvc_stream stream) noexcept {
    if (stream == nullptr) return;
    int wanted = 0;
    code_ = cudaStreamGetDevice(stream, &wanted);
    if (code_ == cudaSuccess) code_ = cudaGetDevice(&before_);
    if (code_ != cudaSuccess || wanted == before_) return;
    code_ = cudaSetDevice(wanted);
    changed_ = code_ == cudaSuccess;
  }
  device_scope(const device_scope&) = delete;
  device_scope& operator=(const device_scope&) = delete;
  ~device_scope() {
    if (changed_) cudaSetDevice(before_);
  }
  cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_ = cudaSuccess;
  int before_ = 0;
  bool changed_ = false;
};

template <class Params>
int32_t start(void (*kernel)(const Params), const Params& p, const launch_shape& shape,
              kvc_stream stream) noexcept {
  constexpr uint32_t without_asking = 48 << 10;
  const device_scope on(stream);
  cudaError_t code = on.code();
  const auto* function = reinterpret_cast<const void*>(kernel);
  if (code == cudaSuccess && shape.shared_bytes > without_asking) {
    code = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(shape.shared_bytes));
  }
  if (code == cudaSuccess) {
    void* args[] = {const_cast<Params*>(&p)};
    code =
        cudaLaunchKernel(function, dim3(shape.blocks), dim3(shape.threads), args, shape.shared_bytes, stream);
  }
  if (code != cudaSuccess) (void)cudaGetLastError();
  return static_cast<int32_t>(code);
}

}  // namespace kvcache::detail::gpu
