// SPDX-License-Identifier: Apache-2.0
#pragma once
// A machine that runs CUDA kernels on the CPU, one block at a time, so that their barriers, waits and
// addresses can be judged without a GPU. Every thread is a fiber; a fiber runs until it meets a barrier or a
// warp-wide instruction that other lanes have not reached. What real hardware leaves undefined is made
// visible:
//
//   shared memory   starts as NaN in every block; every access is checked for bounds and alignment
//   cp.async        its destination is NaN from the instruction on, and holds the data only after the
//                   thread's own wait_group has asked for it; under odd seeds some groups arrive at once
//   warp-wide       a lane that is missing, exited, or at another instruction is a fault
//   schedules       seed 0 is in order; others stay on a warp until it blocks, then take a random one, in a
//                   random order of lanes and of blocks (keeping warps in step would hide missing barriers)
//
// Not modelled: memory order between blocks, registers, time.
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

namespace kvcache::simt {

/// What a kernel did that hardware would not forgive, or would forgive only by luck.
struct fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct launch_config {
  uint32_t blocks = 1;
  uint32_t threads = 32;
  uint32_t shared_bytes = 0;
  uint32_t seed = 0;         ///< of the schedule; 0 = in order
  bool count_banks = false;  ///< also look at loads, stores and copies, not only at ldmatrix
};

/// Counters of one launch. A wavefront moves 128 bytes to or from shared memory; `least` are those that the
/// instructions need if no two lanes meet in a bank.
struct launch_stats {
  uint64_t switches = 0;
  uint64_t collectives = 0;
  uint64_t async_copies = 0;
  uint64_t wavefronts = 0;
  uint64_t least = 0;
  uint64_t conflicts() const { return wavefronts - least; }
  launch_stats& operator+=(const launch_stats& b);
};

using thread_body = void (*)(void* self);

/// Runs `body(self)` in every thread. Throws fault.
launch_stats run(const launch_config& config, thread_body body, void* self);

/// Runs kernel(args...) in every thread.
template <class Kernel, class... Args>
launch_stats launch(const launch_config& config, Kernel kernel, const Args&... args) {
  auto call = [&] { kernel(args...); };
  return run(
      config, [](void* self) { (*static_cast<decltype(call)*>(self))(); }, &call);
}

// ---- what the instructions of a running thread are made of ----

uint32_t thread_index();
uint32_t block_index();
uint32_t block_threads();
uint32_t grid_blocks();
inline uint32_t lane() {
  return thread_index() & 31u;
}

/// Waits for all threads of the block.
void block_barrier();

/// An instruction that the lanes of `mask` execute together: `op(args, mask)` is called once, by the lane
/// that comes last; args[l] is what lane l handed over.
using collective_op = void (*)(void** args, uint32_t mask);
void collective(uint32_t mask, collective_op op, void* arg);

/// Bytes of shared memory at an address. A fault if they are not all inside, or not aligned to `align`.
std::byte* shared(uint32_t address, uint32_t bytes, uint32_t align);
/// The same, noted for counting bank conflicts.
std::byte* shared_access(uint32_t address, uint32_t bytes);
/// Counts 8 rows of 16 bytes, one phase of ldmatrix.
void count_rows(const uint32_t* rows);

/// 16 bytes to shared memory, of which `bytes` are read and the rest is zero.
void async_copy(uint32_t to, const void* from, uint32_t bytes);
void async_commit();
/// Until at most `pending` groups of this thread are not complete.
void async_wait(uint32_t pending);

/// Ends the launch with a fault that names block and thread.
[[noreturn]] void fail(const char* what);

}  // namespace kvcache::simt
