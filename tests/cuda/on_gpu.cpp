// SPDX-License-Identifier: Apache-2.0
// The cases of tests/simt on a GPU: main, and what stands in for the machine. Seeds of schedules mean nothing
// here; the cases that look into the machine are tagged [machine] and left out. Not run on a GPU yet.
//
//   gpu_check                       all cases; 1 without a GPU
//   compute-sanitizer gpu_check     the same under memcheck; --tool racecheck
#define CATCH_CONFIG_RUNNER
#include <cuda_runtime_api.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <new>
#include <vector>

#include "kvcache/kvcache.h"
#include "simt/backend.hpp"

namespace kvcache::simt {

backend& the_backend() {
  static backend b;
  return b;
}

void* managed_memory(size_t bytes);
void* managed_memory(size_t bytes) {
  void* memory = nullptr;
  if (cudaMallocManaged(&memory, bytes, cudaMemAttachGlobal) != cudaSuccess) throw std::bad_alloc();
  return memory;
}
void release_managed(void* memory);
void release_managed(void* memory) {
  if (memory != nullptr) cudaFree(memory);
}

kvc_status waited(kvc_status status);
kvc_status waited(kvc_status status) {
  const cudaError_t code = cudaDeviceSynchronize();
  if (code == cudaSuccess) return status;
  the_backend().fault = cudaGetErrorString(code);
  return KVC_DEVICE;
}

}  // namespace kvcache::simt

int main(int argc, char** argv) {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    std::printf("no GPU: %s\n", code != cudaSuccess ? cudaGetErrorString(code) : "no device");
    return 1;
  }
  std::vector<const char*> args(argv, argv + argc);
  if (argc == 1) args.push_back("~[machine]");
  return Catch::Session().run(static_cast<int>(args.size()), args.data());
}
