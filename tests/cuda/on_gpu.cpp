// SPDX-License-Identifier: Apache-2.0
// The cases of tests/simt on a GPU: main, and what stands in for the machine. Seeds of schedules mean nothing
// here; the cases that look into the machine are tagged [machine] and left out. Not run on a GPU yet.
//
//   gpu_check                       all cases; 1 without a GPU
//   compute-sanitizer gpu_check     the same under memcheck; --tool racecheck
//
// Arrays are pinned host memory, which both sides reach at the same address, cut from one piece: pinning
// takes about a millisecond each time. With KVCACHE_GPU_APART set each is pinned on its own, so that
// compute-sanitizer knows its end. Behind and before each lie bytes that nobody may write.
#define CATCH_CONFIG_RUNNER
#include <cuda_runtime_api.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <vector>

#include "kvcache/kvcache.h"
#include "simt/backend.hpp"

namespace kvcache::simt {

namespace {

constexpr size_t margin = 256;  ///< on both sides of an array, bytes 0xff
constexpr size_t arena_bytes = size_t{512} << 20;

/// First fit in one pinned piece; neighbours that are free are one.
class pinned_arena {
 public:
  void* take(size_t bytes) {
    const size_t all = (bytes + 2 * margin + margin - 1) / margin * margin;
    std::byte* base = apart_ ? pinned(all) : cut(all);
    std::memset(base, 0xff, all);
    used_[base + margin] = {bytes, all};
    return base + margin;
  }
  void give_back(void* memory) {
    const auto at = used_.find(static_cast<std::byte*>(memory));
    if (at == used_.end()) return;
    const auto [bytes, all] = at->second;
    std::byte* base = at->first - margin;
    const auto untouched = [](std::byte b) { return b == std::byte{0xff}; };
    const bool whole =
        std::all_of(base, base + margin, untouched) && std::all_of(at->first + bytes, base + all, untouched);
    overwritten_ += whole ? 0 : 1;
    used_.erase(at);
    if (apart_) {
      (void)cudaFreeHost(base);
    } else {
      free_[base] = all;
      join(free_.find(base));
    }
  }
  /// Arrays beside which something was written.
  int overwritten() const { return overwritten_; }

 private:
  struct piece {
    size_t bytes, all;
  };
  using pieces = std::map<std::byte*, size_t>;

  static std::byte* pinned(size_t bytes) {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
      throw std::bad_alloc();
    }
    return static_cast<std::byte*>(memory);
  }
  std::byte* cut(size_t bytes) {
    if (free_.empty() && used_.empty()) free_[pinned(arena_bytes)] = arena_bytes;
    const auto fits = std::find_if(free_.begin(), free_.end(), [&](auto& f) { return f.second >= bytes; });
    if (fits == free_.end()) throw std::bad_alloc();
    std::byte* base = fits->first;
    const size_t rest = fits->second - bytes;
    free_.erase(fits);
    if (rest != 0) free_[base + bytes] = rest;
    return base;
  }
  void join(pieces::iterator at) {
    if (const auto next = std::next(at); next != free_.end() && at->first + at->second == next->first) {
      at->second += next->second;
      free_.erase(next);
    }
    if (at == free_.begin()) return;
    const auto before = std::prev(at);
    if (before->first + before->second != at->first) return;
    before->second += at->second;
    free_.erase(at);
  }

  bool apart_ = std::getenv("KVCACHE_GPU_APART") != nullptr;
  pieces free_;
  std::map<std::byte*, piece> used_;
  int overwritten_ = 0;
};

pinned_arena& the_arena() {
  static pinned_arena a;
  return a;
}

}  // namespace

void* reachable_memory(size_t bytes);
void* reachable_memory(size_t bytes) {
  return the_arena().take(bytes);
}
void release_reachable(void* memory);
void release_reachable(void* memory) {
  if (memory != nullptr) the_arena().give_back(memory);
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
  const int failed = Catch::Session().run(static_cast<int>(args.size()), args.data());
  const int overwritten = kvcache::simt::the_arena().overwritten();
  if (overwritten != 0) std::printf("beside %d arrays something was written\n", overwritten);
  return failed != 0 ? failed : overwritten != 0 ? 1 : 0;
}
