// SPDX-License-Identifier: Apache-2.0
// The machine itself: what it runs, and that it notices what a GPU would not forgive.
#include "simt/machine.hpp"

#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

namespace kvcache::simt {
namespace {

constexpr uint32_t seeds[] = {0, 1, 2, 3, 4, 5, 6, 7};

void nothing(void**, uint32_t) {}
void other_nothing(void** args, uint32_t) {
  args[0] = nullptr;
}

uint32_t load(uint32_t address) {
  uint32_t v;
  std::memcpy(&v, shared(address, 4, 4), 4);
  return v;
}
void store(uint32_t address, uint32_t v) {
  std::memcpy(shared(address, 4, 4), &v, 4);
}

/// The fault of a launch, empty if there is none.
template <class Kernel>
std::string fault_of(launch_config config, Kernel kernel) {
  try {
    launch(config, kernel);
  } catch (const fault& f) {
    return f.what();
  }
  return {};
}

bool says(const std::string& text, const char* what) {
  return text.find(what) != std::string::npos;
}

}  // namespace

TEST_CASE("every thread of every block runs once") {
  for (const uint32_t seed : seeds) {
    std::vector<int> count(5 * 96);
    launch({5, 96, 0, seed, false}, [&] {
      REQUIRE(block_threads() == 96);
      REQUIRE(grid_blocks() == 5);
      ++count[block_index() * 96 + thread_index()];
    });
    for (const int n : count) REQUIRE(n == 1);
  }
}

TEST_CASE("nobody passes a barrier before the last has come") {
  for (const uint32_t seed : seeds) {
    int arrived = 0;
    launch({1, 128, 0, seed, false}, [&] {
      ++arrived;
      block_barrier();
      REQUIRE(arrived >= 128);
      block_barrier();
      ++arrived;
      block_barrier();
      REQUIRE(arrived == 256);
    });
  }
}

TEST_CASE("a value read without a barrier is wrong under some schedule") {
  int wrong = 0;
  for (const uint32_t seed : seeds) {
    launch({1, 128, 512, seed, false}, [&] {
      store(thread_index() * 4, thread_index());
      wrong += load((thread_index() ^ 64u) * 4) != (thread_index() ^ 64u);
    });
  }
  REQUIRE(wrong > 0);
}

TEST_CASE("different seeds run lanes, warps and blocks in different orders, equal seeds in the same") {
  std::set<std::vector<uint32_t>> orders;
  for (const uint32_t seed : seeds) {
    std::vector<uint32_t> order[2];
    for (auto& o : order) {
      launch({3, 64, 0, seed, false}, [&] { o.push_back(block_index() * 64 + thread_index()); });
    }
    REQUIRE(order[0] == order[1]);
    orders.insert(order[0]);
  }
  REQUIRE(orders.size() == std::size(seeds));
}

TEST_CASE("shared memory is undefined at the start of every block") {
  launch({3, 32, 256, 1, false}, [] {
    REQUIRE(load(thread_index() * 4) == 0xffffffffu);
    store(thread_index() * 4, 5);
  });
}

TEST_CASE("shared memory ends where the launch says, and wants alignment") {
  REQUIRE(says(fault_of({1, 32, 64, 0, false}, [] { store(64, 1); }), "past the end"));
  REQUIRE(says(fault_of({1, 32, 64, 0, false}, [] { store(0xfffffffcu, 1); }), "past the end"));
  REQUIRE(says(fault_of({1, 32, 64, 0, false}, [] { store(2, 1); }), "not aligned"));
  REQUIRE(fault_of({1, 32, 64, 0, false}, [] { store(60, 1); }).empty());
}

TEST_CASE("a collective runs once, when its last lane has come, with what every lane handed over") {
  for (const uint32_t seed : seeds) {
    uint32_t calls = 0;
    static uint32_t sum;
    sum = 0;
    launch({1, 64, 0, seed, false}, [&] {
      uint32_t mine = thread_index();
      collective(
          ~0u,
          [](void** args, uint32_t) {
            for (int l = 0; l < 32; ++l) sum += *static_cast<uint32_t*>(args[l]);
          },
          &mine);
      ++calls;
    });
    REQUIRE(calls == 64);
    REQUIRE(sum == 63 * 64 / 2);
  }
}

TEST_CASE("lanes that wait for each other at different instructions are a deadlock") {
  for (const uint32_t seed : seeds) {
    REQUIRE(says(fault_of({1, 32, 0, seed, false},
                          [] { collective(~0u, thread_index() < 16 ? nothing : other_nothing, nullptr); }),
                 "deadlock"));
    REQUIRE(says(fault_of({1, 64, 0, seed, false},
                          [] {
                            if (thread_index() == 40) {
                              collective(~0u, nothing, nullptr);
                            } else {
                              block_barrier();
                            }
                          }),
                 "deadlock"));
  }
}

TEST_CASE("a lane outside the mask, or gone, is a fault") {
  REQUIRE(
      says(fault_of({1, 32, 0, 0, false}, [] { collective(0xffffu, nothing, nullptr); }), "leaves it out"));
  const auto half_gone = [] {
    if (thread_index() >= 16) return;
    collective(~0u, nothing, nullptr);
  };
  int noticed = 0;
  for (const uint32_t seed : seeds) {
    const std::string text = fault_of({1, 32, 0, seed, false}, half_gone);
    noticed += says(text, "not there") || says(text, "deadlock");
  }
  REQUIRE(noticed == int(std::size(seeds)));
}

TEST_CASE("a barrier that some threads never reach is a fault") {
  for (const uint32_t seed : seeds) {
    REQUIRE(says(fault_of({1, 64, 0, seed, false},
                          [] {
                            if (thread_index() < 32) block_barrier();
                          }),
                 "without reaching the barrier"));
  }
}

TEST_CASE("an asynchronous copy is there after the wait and not before") {
  alignas(16) static const uint32_t source[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  launch({1, 32, 32 * 32, 2, false}, [] {
    const uint32_t at = thread_index() * 32;
    store(at, 77);
    async_copy(at, source, 16);
    async_commit();
    async_copy(at + 16, source + 4, 8);
    async_commit();
    REQUIRE(load(at) == 0xffffffffu);
    async_wait(2);
    REQUIRE(load(at) == 0xffffffffu);
    async_wait(1);
    REQUIRE(load(at) == 1);
    REQUIRE(load(at + 12) == 4);
    REQUIRE(load(at + 16) == 0xffffffffu);
    async_wait(0);
    REQUIRE(load(at + 20) == 6);
    REQUIRE(load(at + 24) == 0);  // zero-filled
    REQUIRE(load(at + 28) == 0);
  });
}

TEST_CASE("under odd seeds some copies arrive at once, and then overwrite what lies there") {
  alignas(16) static const uint32_t source[4] = {1, 2, 3, 4};
  for (const uint32_t seed : {1u, 2u, 3u, 4u}) {
    int early = 0;
    launch({1, 32, 32 * 16, seed, false}, [&] {
      const uint32_t at = thread_index() * 16;
      async_copy(at, source, 16);
      async_commit();
      early += load(at) == 1;
      async_wait(0);
      REQUIRE(load(at) == 1);
    });
    REQUIRE((early > 0) == (seed % 2 == 1));
    REQUIRE(early < 32);
  }
}

TEST_CASE("what was not committed is not waited for") {
  alignas(16) static const uint32_t source[4] = {1, 2, 3, 4};
  REQUIRE(says(fault_of({1, 32, 16, 0, false},
                        [] {
                          if (thread_index() != 0) return;
                          async_copy(0, source, 16);
                          async_wait(0);
                          REQUIRE(load(0) == 0xffffffffu);
                        }),
               "before its asynchronous copies were waited for"));
}

TEST_CASE("a copy of no bytes reads nothing, and a misplaced one is a fault") {
  alignas(16) static const uint32_t source[8] = {};
  REQUIRE(fault_of({1, 1, 16, 0, false}, [] {
            async_copy(0, reinterpret_cast<const void*>(uintptr_t{16}), 0);
            async_commit();
            async_wait(0);
          }).empty());
  REQUIRE(says(fault_of({1, 1, 32, 0, false}, [] { async_copy(8, source, 16); }), "not aligned"));
  REQUIRE(says(fault_of({1, 1, 32, 0, false}, [] { async_copy(0, source + 1, 16); }), "source not aligned"));
  REQUIRE(says(fault_of({1, 1, 32, 0, false}, [] { async_copy(32, source, 16); }), "past the end"));
}

TEST_CASE("bank conflicts are counted") {
  const auto stride = [](uint32_t words) {
    return launch({1, 32, 32 * 4 * 32, 0, true}, [=] {
      const uint32_t zero = 0;
      std::memcpy(shared_access(thread_index() * words * 4, 4), &zero, 4);
    });
  };
  REQUIRE(stride(1).least == 1);
  REQUIRE(stride(1).conflicts() == 0);
  REQUIRE(stride(2).conflicts() == 1);
  REQUIRE(stride(32).conflicts() == 31);
  REQUIRE(stride(31).conflicts() == 0);
  // The same word for all lanes is one access.
  REQUIRE(launch({1, 32, 128, 0, true}, [] { (void)shared_access(64, 4); }).conflicts() == 0);
  // 16 bytes per lane go in four phases.
  const launch_stats wide =
      launch({1, 32, 1024, 0, true}, [] { (void)shared_access(thread_index() * 16, 16); });
  REQUIRE(wide.least == 4);
  REQUIRE(wide.conflicts() == 0);
}

TEST_CASE("a failed launch leaves the next one alone") {
  for (int i = 0; i < 3; ++i) {
    REQUIRE(!fault_of({2, 64, 16, 1, false}, [] { fail("on purpose"); }).empty());
    int ran = 0;
    launch({2, 64, 16, 1, false}, [&] { ++ran; });
    REQUIRE(ran == 128);
  }
}

}  // namespace kvcache::simt
