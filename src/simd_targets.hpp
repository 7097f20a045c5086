// SPDX-License-Identifier: Apache-2.0
#pragma once
// The instruction sets that Highway compiles for; before <hwy/foreach_target.h>. Without fused multiply-add
// the bits would differ; scalable vectors do not fit fixed register blocks.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_WASM | HWY_PPC8)
