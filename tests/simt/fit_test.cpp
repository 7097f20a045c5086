// SPDX-License-Identifier: Apache-2.0
// What a clip search of the CUDA kernels compares, bit for bit against quant/affine.hpp: a near tie would be
// decided by the order in which errors are added, and tests of whole cells seldom meet one.
#include "simt/fit_on_machine.hpp"

#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "kvcache/kvcache.h"
#include "kvcache/quant/affine.hpp"
#include "simt/backend.hpp"

namespace kvcache::test {

TEST_CASE("the errors that a search compares are added in the order of affine.hpp") {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (int32_t type = KVC_U8; type <= KVC_U2; ++type) {
    for (const bool symmetric : {false, true}) {
      for (int32_t size = 8; size <= 264; size += 8) {
        std::vector<float> values(static_cast<size_t>(size));
        for (float& x : values) x = to_float(to_f16(normal(random)));
        const int32_t skip = size % 24 == 0 ? 4 : 0;
        affine model;
        model.format.codes = static_cast<code>(type);
        model.format.symmetric = symmetric;
        const value_group group{values.data(), size, 1, skip};
        const stored_grid levels = model.fit(group);
        CAPTURE(type, symmetric, size);
        REQUIRE(simt::group_error(type, symmetric, levels.scale.bits, levels.zero.bits, values.data(), skip,
                                  size) == model.squared_error(group, levels));
      }
    }
  }
}

}  // namespace kvcache::test
