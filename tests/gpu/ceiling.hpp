// SPDX-License-Identifier: Apache-2.0
#pragma once
// Plain kernels beside which the library's are set: reading and copying as fast as the card can, filling
// memory with numbers of usual size, the clock. Every function queues one kernel and answers a cudaError_t.
#include <cstddef>
#include <cstdint>

#include "kvcache/c/cuda_plane.h"

namespace kvcache::gpu_check {

/// Grid of a reading kernel.
struct read_shape {
  int32_t blocks_each;  ///< of 256 threads, per multiprocessor
  int32_t loads;        ///< of 16 bytes that a thread has under way: 1, 4, 8
};
inline constexpr read_shape read_shapes[] = {{8, 1}, {2, 4}, {4, 4}, {8, 4}, {2, 8}, {4, 8}, {8, 8}};

/// Reads `bytes` (a multiple of 16) once. `never` is written only if the sum of all is a number that does not
/// occur.
int queue_read(const void* from, size_t bytes, read_shape shape, int32_t multiprocessors, uint32_t* never,
               kvc_stream stream);
/// Copies `bytes` (a multiple of 16).
int queue_copy(void* to, const void* from, size_t bytes, int32_t multiprocessors, kvc_stream stream);

/// What memory is filled with: numbers in [-1, 1], or codes of 8 bits none of which is the NaN of e4m3.
enum class content { f16, bf16, codes };
int queue_fill(void* to, size_t bytes, content what, uint32_t seed, kvc_stream stream);
/// `count` halves at to + i * block_stride + h * head_stride.
int queue_fill_cells(void* to, int64_t blocks, int64_t block_stride, int32_t heads, int64_t head_stride,
                     int32_t count, uint16_t value, kvc_stream stream);
/// Does nothing.
int queue_nothing(kvc_stream stream);
/// Spins for about `microseconds`; to[0] clocks of one multiprocessor passed in to[1] nanoseconds.
int queue_clock(uint64_t* to, uint32_t microseconds, kvc_stream stream);

}  // namespace kvcache::gpu_check
