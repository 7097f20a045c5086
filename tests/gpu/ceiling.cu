// SPDX-License-Identifier: Apache-2.0
#include "gpu/ceiling.hpp"

#include <cuda_runtime.h>

namespace kvcache::gpu_check {
namespace {

constexpr uint32_t threads = 256;

/// Reads all of it, one 16-byte load after `Loads` - 1 others.
template <int Loads>
__global__ void __launch_bounds__(threads) read_all(const uint4* from, size_t n, uint32_t* never) {
  const size_t step = size_t{gridDim.x} * threads;
  size_t i = size_t{blockIdx.x} * threads + threadIdx.x;
  uint32_t sum = 0;
  for (; i + (Loads - 1) * step < n; i += Loads * step) {
    uint4 v[Loads];
#pragma unroll
    for (int k = 0; k < Loads; ++k) v[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < Loads; ++k) sum += (v[k].x ^ v[k].y) + (v[k].z ^ v[k].w);
  }
  for (; i < n; i += step) {
    const uint4 v = from[i];
    sum += (v.x ^ v.y) + (v.z ^ v.w);
  }
  // Different in every thread, so that no compiler can leave the loads out.
  if (sum == 0x9e3779b9u * (threadIdx.x + 1) && n == 1) *never = sum;
}

__global__ void __launch_bounds__(threads) copy_all(uint4* to, const uint4* from, size_t n) {
  constexpr int loads = 4;
  const size_t step = size_t{gridDim.x} * threads;
  size_t i = size_t{blockIdx.x} * threads + threadIdx.x;
  for (; i + (loads - 1) * step < n; i += loads * step) {
    uint4 v[loads];
#pragma unroll
    for (int k = 0; k < loads; ++k) v[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < loads; ++k) to[i + k * step] = v[k];
  }
  for (; i < n; i += step) to[i] = from[i];
}

__device__ uint32_t hash(uint64_t v) {
  v = (v ^ (v >> 31)) * 0x7fb5d329728ea185ull;
  v = (v ^ (v >> 27)) * 0x81dadef4bc2dd44dull;
  return static_cast<uint32_t>(v >> 32);
}
/// A sign and a size in [2^-7, 1) at random, as f16 (5 bits of exponent, 10 of fraction) or as bf16 (8, 7).
__device__ uint32_t half_of(uint32_t h, bool bf) {
  const uint32_t fraction = bf ? h & 0x7fu : h & 0x3ffu;
  const uint32_t exponent = (bf ? 127u : 15u) - 1 - (h >> 10 & 3u) - (h >> 12 & 3u);
  return (h & 0x8000u) | exponent << (bf ? 7 : 10) | fraction;
}

__global__ void __launch_bounds__(threads) fill_all(uint32_t* to, size_t n, content what, uint32_t seed) {
  for (size_t i = size_t{blockIdx.x} * threads + threadIdx.x; i < n; i += size_t{gridDim.x} * threads) {
    const uint32_t h = hash(i * 2 + 1 + (uint64_t{seed} << 40));
    if (what == content::codes) {
      to[i] = h & 0xf7f7f7f7u;  // no code of 7 ones
    } else {
      const bool bf = what == content::bf16;
      to[i] = half_of(h, bf) | half_of(h >> 16, bf) << 16;
    }
  }
}

__global__ void __launch_bounds__(threads) fill_cells(char* to, int64_t block_stride, int32_t heads,
                                                      int64_t head_stride, int32_t count, uint16_t value) {
  char* cell = to + blockIdx.x / static_cast<uint32_t>(heads) * block_stride +
               blockIdx.x % static_cast<uint32_t>(heads) * head_stride;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += static_cast<int32_t>(threads)) {
    reinterpret_cast<uint16_t*>(cell)[i] = value;
  }
}

__global__ void nothing() {}

__global__ void spin(uint64_t* to, uint64_t nanoseconds) {
  uint64_t start = 0, now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  const auto first = static_cast<uint64_t>(clock64());
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
  to[0] = static_cast<uint64_t>(clock64()) - first;
  to[1] = now - start;
}

uint32_t grid_of(int32_t each, int32_t multiprocessors) {
  return static_cast<uint32_t>(each) * static_cast<uint32_t>(multiprocessors);
}

}  // namespace

int queue_read(const void* from, size_t bytes, read_shape shape, int32_t multiprocessors, uint32_t* never,
               kvc_stream stream) {
  const uint32_t grid = grid_of(shape.blocks_each, multiprocessors);
  const auto* p = static_cast<const uint4*>(from);
  if (shape.loads == 8) {
    read_all<8><<<grid, threads, 0, stream>>>(p, bytes / 16, never);
  } else if (shape.loads == 4) {
    read_all<4><<<grid, threads, 0, stream>>>(p, bytes / 16, never);
  } else {
    read_all<1><<<grid, threads, 0, stream>>>(p, bytes / 16, never);
  }
  return cudaGetLastError();
}

int queue_copy(void* to, const void* from, size_t bytes, int32_t multiprocessors, kvc_stream stream) {
  copy_all<<<grid_of(8, multiprocessors), threads, 0, stream>>>(static_cast<uint4*>(to),
                                                                static_cast<const uint4*>(from), bytes / 16);
  return cudaGetLastError();
}

int queue_fill(void* to, size_t bytes, content what, uint32_t seed, kvc_stream stream) {
  fill_all<<<4096, threads, 0, stream>>>(static_cast<uint32_t*>(to), bytes / 4, what, seed);
  return cudaGetLastError();
}

int queue_fill_cells(void* to, int64_t blocks, int64_t block_stride, int32_t heads, int64_t head_stride,
                     int32_t count, uint16_t value, kvc_stream stream) {
  if (blocks * heads == 0 || count == 0) return cudaSuccess;
  fill_cells<<<static_cast<uint32_t>(blocks * heads), threads, 0, stream>>>(
      static_cast<char*>(to), block_stride, heads, head_stride, count, value);
  return cudaGetLastError();
}

int queue_nothing(kvc_stream stream) {
  nothing<<<1, 32, 0, stream>>>();
  return cudaGetLastError();
}

int queue_clock(uint64_t* to, uint32_t microseconds, kvc_stream stream) {
  spin<<<1, 1, 0, stream>>>(to, uint64_t{microseconds} * 1000);
  return cudaGetLastError();
}

}  // namespace kvcache::gpu_check
