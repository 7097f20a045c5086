// SPDX-License-Identifier: Apache-2.0
#pragma once
// The formats of codes that decode kernels exist for.
#include "kvcache/c/wire.h"
#include "packed_params.hpp"

namespace kvcache::detail::gpu {

/// Calls f.template operator()<K, V>() for a pair of formats that has kernels, else answers `none`.
template <class Result, class F>
Result with_format(int32_t k, int32_t v, Result none, F&& f) {
  if (k == KVC_E4M3 && v == KVC_E4M3) return f.template operator()<packed_code::e4m3, packed_code::e4m3>();
  if (k == KVC_U8 && v == KVC_U8) return f.template operator()<packed_code::u8, packed_code::u8>();
  if (k == KVC_U8 && v == KVC_U4) return f.template operator()<packed_code::u8, packed_code::u4>();
  if (k == KVC_U4 && v == KVC_U4) return f.template operator()<packed_code::u4, packed_code::u4>();
  return none;
}

}  // namespace kvcache::detail::gpu
