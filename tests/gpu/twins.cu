// SPDX-License-Identifier: Apache-2.0
// The GPU's side: every case as a kernel of one warp per block.
#include <cuda_runtime.h>

#define KVCACHE_TWIN_SIDE on_device
#include "gpu/twin_cases.cuh"

namespace kvcache::gpu_check {

namespace on_device {
namespace {

/// Device memory that a case reads or writes.
class words {
 public:
  explicit words(size_t n) { code_ = cudaMalloc(&data_, n * 4 + 16); }  // 16: never of no bytes
  words(const words&) = delete;
  words& operator=(const words&) = delete;
  ~words() { (void)cudaFree(data_); }
  uint32_t* data() const { return static_cast<uint32_t*>(data_); }
  cudaError_t code() const { return code_; }

 private:
  void* data_ = nullptr;
  cudaError_t code_;
};

template <class Case>
std::string run(const std::vector<uint32_t>& in, std::vector<uint32_t>& out) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess &&
      10 * major + minor < Case::about.from_arch) {
    return not_there;
  }
  const words from(in.size()), to(out.size());
  cudaError_t code = from.code() != cudaSuccess ? from.code() : to.code();
  const auto then = [&](auto&& call) {
    if (code == cudaSuccess) code = call();
  };
  then([&] { return cudaMemcpy(from.data(), in.data(), in.size() * 4, cudaMemcpyHostToDevice); });
  then([&] { return cudaMemcpy(to.data(), out.data(), out.size() * 4, cudaMemcpyHostToDevice); });
  then([&] {
    run_case<Case><<<Case::about.warps, 32, Case::about.shared_bytes>>>(from.data(), to.data());
    return cudaGetLastError();
  });
  then([&] { return cudaDeviceSynchronize(); });
  then([&] { return cudaMemcpy(out.data(), to.data(), out.size() * 4, cudaMemcpyDeviceToHost); });
  return code == cudaSuccess ? std::string() : std::string(cudaGetErrorString(code));
}

}  // namespace
}  // namespace on_device

std::vector<twin_side> twins_on_device() {
  std::vector<twin_side> all;
  on_device::run_all([&]<class Case>() { all.push_back({&Case::about, &on_device::run<Case>}); });
  return all;
}

}  // namespace kvcache::gpu_check
