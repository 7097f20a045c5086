// SPDX-License-Identifier: Apache-2.0
// Attention of the CUDA kernels over packed blocks, run on the CPU, against double.
#include "simt/gpu_world.hpp"
#include "simt/packed_world.hpp"

namespace kvcache::test {
namespace {

/// Runs a call under several schedules; all must give the same bits.
double check_packed(packed_world& w, const packed_ask& a, const std::vector<uint32_t>& seeds = {0, 1}) {
  w.ask_queries(a);
  const kvc_batch b = w.batch_of(a);
  packed_world::answer first;
  for (const uint32_t seed : seeds) {
    simt::the_backend().seed = seed;
    CAPTURE(seed);
    packed_world::answer now = w.attend(a, b);
    if (seed == seeds.front()) {
      first = std::move(now);
    } else {
      REQUIRE(now.o == first.o);
      REQUIRE(now.lse == first.lse);
    }
  }
  return w.check(a, b, first);
}

packed_ask usual(int32_t dim) {
  packed_ask a;
  a.softmax = softmax_of(1 / std::sqrt(float(dim)));
  return a;
}

}  // namespace

TEST_CASE(
    "packed decode is right at every edge of a block and a tile, for every format, head dim and group") {
  struct shape {
    int32_t dim, group, heads;
  };
  for (const char* format : {"int8", "k=fp8,v=fp8", "int4", "k8v4"}) {
    for (const shape s : {shape{128, 1, 2},
                          {128, 4, 1},
                          {128, 16, 1},
                          {64, 3, 2},
                          {64, 12, 1},
                          {80, 5, 1},
                          {96, 9, 1},
                          {256, 2, 1},
                          {256, 16, 1}}) {
      for (const int32_t block : {32, 64, 128}) {
        CAPTURE(format, s.dim, s.group, block);
        packed_world w(
            {format, s.heads, s.group, s.dim, block},
            {{0, 0}, {1, 0}, {31, 0}, {32, 32}, {block + 1, block}, {200, 128}, {131, 128}, {96, 0}}, 7);
        check_packed(w, usual(s.dim));
      }
    }
  }
}

}  // namespace kvcache::test
