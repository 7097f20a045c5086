// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a fuzz target claims of the code it runs.
#include <cstdio>
#include <cstdlib>

/// Ends the process where a claim does not hold, so that the fuzzer keeps the input.
#define KVCACHE_FUZZ_EXPECT(claim)                                                    \
  do {                                                                                \
    if (!(claim)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #claim); \
      std::abort();                                                                   \
    }                                                                                 \
  } while (false)
