// SPDX-License-Identifier: Apache-2.0
// Linked into a test, lets it run as on a processor of another maker (src/simd_inner.hpp: the order in which
// decode asks for memory).
#include "../../src/kernel.hpp"

[[maybe_unused]] static const bool as_elsewhere = [] {
  kvcache::detail::be_intel(!kvcache::detail::is_intel());
  return true;
}();
