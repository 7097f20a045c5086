// SPDX-License-Identifier: Apache-2.0
#include "simt/machine.hpp"

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define KVCACHE_SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVCACHE_SIMT_ASAN 1
#endif
#endif
#if defined(KVCACHE_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace kvcache::simt {
namespace {

namespace context = boost::context;

/// A stretch of stack, as AddressSanitizer wants to hear of it at every switch.
struct stretch {
  const void* low = nullptr;
  size_t bytes = 0;
};
#if defined(KVCACHE_SIMT_ASAN)
void leave_for(void** fake, const stretch& to) {
  __sanitizer_start_switch_fiber(fake, to.low, to.bytes);
}
void arrive(void* fake, stretch* from) {
  __sanitizer_finish_switch_fiber(fake, from != nullptr ? &from->low : nullptr,
                                  from != nullptr ? &from->bytes : nullptr);
}
void forget(const stretch& s) {
  __asan_unpoison_memory_region(s.low, s.bytes);
}
#else
void leave_for(void**, const stretch&) {}
void arrive(void*, stretch*) {}
void forget(const stretch&) {}
#endif

/// Stacks with a guard page. Whoever gets the memory next must not find AddressSanitizer's marks.
struct fiber_stack {
  context::protected_fixedsize_stack memory;
  stretch* place;
  fiber_stack(size_t bytes, stretch* told) : memory(bytes), place(told) {}
  context::stack_context allocate() {
    context::stack_context stack = memory.allocate();
    *place = {static_cast<std::byte*>(stack.sp) - stack.size, stack.size};
    return stack;
  }
  void deallocate(context::stack_context& stack) {
    forget({static_cast<std::byte*>(stack.sp) - stack.size, stack.size});
    memory.deallocate(stack);
  }
};

/// Thrown through a kernel that will not be continued.
struct stopped {};

constexpr size_t stack_bytes = 128 << 10;
constexpr uint32_t change_warp = 64;  ///< of so many turns of a warp one ends early

enum class state { ready, at_barrier, in_collective, done };

struct copy {
  uint32_t to = 0;
  const void* from = nullptr;
  uint32_t bytes = 0;
};

struct access {
  uint32_t address = 0;
  uint32_t bytes = 0;
};

struct fiber_thread {
  state at = state::done;
  uint32_t index = 0;
  uint32_t mask = 0;
  collective_op op = nullptr;
  void* arg = nullptr;
  context::fiber self, scheduler;
  stretch stack;
  void* fake = nullptr;
  std::vector<std::vector<copy>> groups;
  std::vector<copy> open;
  std::vector<access> accesses;
};

struct machine {
  launch_config config;
  thread_body body = nullptr;
  void* argument = nullptr;
  uint32_t block = 0;
  std::vector<fiber_thread> threads;
  std::unique_ptr<std::byte, decltype(&std::free)> arena{nullptr, &std::free};
  launch_stats stats;
  std::optional<fault> error;
  std::minstd_rand landing;
  bool stopping = false;
  stretch scheduler_stack;
};

machine* current = nullptr;
fiber_thread* running = nullptr;

uint32_t warps() {
  return (current->config.threads + 31) / 32;
}

/// From a thread back to the scheduler.
void switch_back(fiber_thread& me) {
  leave_for(&me.fake, current->scheduler_stack);
  me.scheduler = std::move(me.scheduler).resume();
  arrive(me.fake, nullptr);
}
/// From the scheduler to a thread, until that switches back or ends.
void switch_to(fiber_thread& t) {
  running = &t;
  ++current->stats.switches;
  void* fake = nullptr;
  leave_for(&fake, t.stack);
  t.self = std::move(t.self).resume();
  arrive(fake, nullptr);
}

void yield() {
  switch_back(*running);
  if (current->stopping) throw stopped{};
}

/// Wavefronts of lanes that touch 4-byte words: the most different words that lie in one bank.
uint32_t wavefronts_of(const access* lanes, uint32_t n) {
  std::vector<uint32_t> in_bank[32];
  for (uint32_t l = 0; l < n; ++l) {
    for (uint32_t b = 0; b < lanes[l].bytes; b += 4) {
      const uint32_t word = (lanes[l].address + b) / 4;
      auto& seen = in_bank[word % 32];
      if (std::find(seen.begin(), seen.end(), word) == seen.end()) seen.push_back(word);
    }
  }
  size_t most = 0;
  for (const auto& b : in_bank) most = std::max(most, b.size());
  return static_cast<uint32_t>(most);
}

/// The k-th accesses of a warp's lanes belong together as long as its lanes take the same path.
void count_warp(const fiber_thread* lanes, uint32_t n) {
  size_t least = SIZE_MAX;
  for (uint32_t l = 0; l < n; ++l) least = std::min(least, lanes[l].accesses.size());
  for (size_t k = 0; k < least; ++k) {
    std::vector<access> all;
    for (uint32_t l = 0; l < n; ++l) all.push_back(lanes[l].accesses[k]);
    const uint32_t together = all[0].bytes >= 16 ? 8 : all[0].bytes == 8 ? 16 : 32;
    for (uint32_t first = 0; first < n; first += together) {
      current->stats.wavefronts += wavefronts_of(all.data() + first, std::min(together, n - first));
      ++current->stats.least;
    }
  }
}

/// One launch's work of a thread: a kernel per block, until the launch ends.
void enter(fiber_thread& t) {
  arrive(nullptr, &current->scheduler_stack);
  while (!current->stopping) {
    try {
      current->body(current->argument);
    } catch (const fault& f) {
      if (!current->error) current->error = f;
    } catch (const stopped&) {
      break;
    }
    t.at = state::done;
    switch_back(t);
  }
  leave_for(nullptr, current->scheduler_stack);
}

bool any_ready(uint32_t warp) {
  const uint32_t last = std::min(warp * 32 + 32, current->config.threads);
  for (uint32_t i = warp * 32; i < last; ++i) {
    if (current->threads[i].at == state::ready) return true;
  }
  return false;
}

/// No thread can go on: the block is finished, or all wait at the barrier, or it hangs.
bool release_barrier() {
  size_t waiting = 0, done = 0;
  for (const auto& t : current->threads) {
    waiting += t.at == state::at_barrier;
    done += t.at == state::done;
  }
  running = nullptr;
  if (done == current->threads.size()) return false;
  if (waiting + done != current->threads.size()) fail("deadlock: lanes wait at different warp instructions");
  // Hardware would go on. A kernel that relies on it is written otherwise than it looks.
  if (done != 0) fail("some threads left the kernel without reaching the barrier");
  for (auto& t : current->threads) t.at = state::ready;
  return true;
}

void run_block(std::mt19937& random) {
  const bool in_order = current->config.seed == 0;
  std::vector<uint32_t> order(32);
  std::iota(order.begin(), order.end(), 0u);
  uint32_t warp = 0;
  for (;;) {
    if (!any_ready(warp) || (!in_order && random() % change_warp == 0)) {
      const uint32_t first = in_order ? 0 : static_cast<uint32_t>(random() % warps());
      uint32_t k = 0;
      while (k < warps() && !any_ready((first + k) % warps())) ++k;
      if (k == warps()) {
        if (!release_barrier()) return;
        continue;
      }
      warp = (first + k) % warps();
    }
    if (!in_order) std::shuffle(order.begin(), order.end(), random);
    for (const uint32_t l : order) {
      const uint32_t i = warp * 32 + l;
      if (i >= current->config.threads || current->threads[i].at != state::ready) continue;
      switch_to(current->threads[i]);
      if (current->error) throw fault(*current->error);
    }
  }
}

void start_block() {
  machine& m = *current;
  std::memset(m.arena.get(), 0xff, m.config.shared_bytes);
  for (auto& t : m.threads) {
    t.at = state::ready;
    t.groups.clear();
    t.open.clear();
    t.accesses.clear();
  }
}

void end_block() {
  machine& m = *current;
  for (auto& t : m.threads) {
    running = &t;
    // Copies still under way would land in the next block's memory.
    if (!t.open.empty() || !t.groups.empty())
      fail("the thread ended before its asynchronous copies were waited for");
  }
  if (!m.config.count_banks) return;
  for (uint32_t w = 0; w < warps(); ++w) {
    count_warp(&m.threads[w * 32], std::min(32u, m.config.threads - w * 32));
  }
}

/// Restores the previous machine however the launch ends, so that one failed launch does not spoil the next.
struct scope {
  machine* before = current;
  explicit scope(machine& m) { current = &m; }
  ~scope() {
    current->stopping = true;
    for (auto& t : current->threads) {
      if (t.self) switch_to(t);
    }
    running = nullptr;
    current = before;
  }
};

}  // namespace

launch_stats& launch_stats::operator+=(const launch_stats& b) {
  switches += b.switches;
  collectives += b.collectives;
  async_copies += b.async_copies;
  wavefronts += b.wavefronts;
  least += b.least;
  return *this;
}

launch_stats run(const launch_config& config, thread_body body, void* self) {
  machine m;
  m.config = config;
  m.body = body;
  m.argument = self;
  m.landing.seed(config.seed + 1);
  m.arena.reset(static_cast<std::byte*>(std::aligned_alloc(1024, config.shared_bytes / 1024 * 1024 + 1024)));
  m.threads.resize(config.threads);
  const scope active(m);
  for (uint32_t i = 0; i < config.threads; ++i) {
    fiber_thread& t = m.threads[i];
    t.index = i;
    t.self =
        context::fiber(std::allocator_arg, fiber_stack(stack_bytes, &t.stack), [&t](context::fiber&& back) {
          t.scheduler = std::move(back);
          enter(t);
          return std::move(t.scheduler);
        });
  }
  std::mt19937 random(config.seed);
  std::vector<uint32_t> blocks(config.blocks);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (config.seed != 0) std::shuffle(blocks.begin(), blocks.end(), random);
  for (const uint32_t b : blocks) {
    m.block = b;
    start_block();
    run_block(random);
    end_block();
  }
  return m.stats;
}

uint32_t thread_index() {
  return running->index;
}
uint32_t block_index() {
  return current->block;
}
uint32_t block_threads() {
  return current->config.threads;
}
uint32_t grid_blocks() {
  return current->config.blocks;
}

void block_barrier() {
  running->at = state::at_barrier;
  yield();
}

void collective(uint32_t mask, collective_op op, void* arg) {
  fiber_thread& me = *running;
  if ((mask >> (me.index & 31u) & 1u) == 0) fail("a lane runs a warp instruction whose mask leaves it out");
  me.at = state::in_collective;
  me.mask = mask;
  me.op = op;
  me.arg = arg;
  const uint32_t first = me.index / 32 * 32;
  void* args[32] = {};
  for (uint32_t l = 0; l < 32; ++l) {
    if ((mask >> l & 1u) == 0) continue;
    if (first + l >= current->config.threads || current->threads[first + l].at == state::done) {
      fail("a warp instruction names a lane that is not there");
    }
    const fiber_thread& t = current->threads[first + l];
    if (t.at != state::in_collective || t.mask != mask || t.op != op) return yield();
    args[l] = t.arg;
  }
  ++current->stats.collectives;
  op(args, mask);
  for (uint32_t l = 0; l < 32; ++l) {
    if ((mask >> l & 1u) != 0) current->threads[first + l].at = state::ready;
  }
}

std::byte* shared(uint32_t address, uint32_t bytes, uint32_t align) {
  if (uint64_t{address} + bytes > current->config.shared_bytes) fail("shared memory: past the end");
  if (address % align != 0) fail("shared memory: not aligned");
  return current->arena.get() + address;
}

std::byte* shared_access(uint32_t address, uint32_t bytes) {
  if (current->config.count_banks) running->accesses.push_back({address, bytes});
  return shared(address, bytes, bytes);
}

void count_rows(const uint32_t* rows) {
  access lanes[8];
  for (int i = 0; i < 8; ++i) lanes[i] = {rows[i], 16};
  current->stats.wavefronts += wavefronts_of(lanes, 8);
  ++current->stats.least;
}

void async_copy(uint32_t to, const void* from, uint32_t bytes) {
  std::memset(shared_access(to, 16), 0xff, 16);
  if (bytes > 16) fail("cp.async: more than 16 bytes");
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("cp.async: source not aligned");
  running->open.push_back({to, from, bytes});
  ++current->stats.async_copies;
}

namespace {
void land(const std::vector<copy>& group) {
  for (const copy& c : group) {
    std::byte* to = shared(c.to, 16, 16);
    std::memset(to, 0, 16);
    if (c.bytes != 0) std::memcpy(to, c.from, c.bytes);
  }
}
}  // namespace

void async_commit() {
  auto& groups = running->groups;
  groups.push_back(std::move(running->open));
  running->open.clear();
  // Data may also arrive at once: under odd seeds every other group does.
  if (current->config.seed % 2 == 0 || current->landing() % 2 == 0) return;
  land(groups.back());
  groups.back().clear();
}

void async_wait(uint32_t pending) {
  auto& groups = running->groups;
  while (groups.size() > pending) {
    land(groups.front());
    groups.erase(groups.begin());
  }
}

void fail(const char* what) {
  std::string text = "block " + std::to_string(current != nullptr ? current->block : 0);
  if (running != nullptr) text += " thread " + std::to_string(running->index);
  throw fault(text + ": " + what);
}

}  // namespace kvcache::simt
