// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts of the kernels that choose levels, one group at a time, so that what a search compares can be looked
// at.
#include <cstdint>

namespace kvcache::simt {

/// The sum of squared errors of values [skip, size) under stored levels, as half a warp adds it; both halves
/// do.
float group_error(int32_t type, bool symmetric, uint16_t scale, uint16_t zero, const float* values,
                  int32_t skip, int32_t size);

}  // namespace kvcache::simt
