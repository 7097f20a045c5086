// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which head dims this build has decode kernels for: the build defines KVCACHE_CUDA_DIM_<n> for each.
#include "params.hpp"

#ifndef KVCACHE_CUDA_DIM_64
#define KVCACHE_CUDA_DIM_64 false
#endif
#ifndef KVCACHE_CUDA_DIM_80
#define KVCACHE_CUDA_DIM_80 false
#endif
#ifndef KVCACHE_CUDA_DIM_96
#define KVCACHE_CUDA_DIM_96 false
#endif
#ifndef KVCACHE_CUDA_DIM_128
#define KVCACHE_CUDA_DIM_128 false
#endif
#ifndef KVCACHE_CUDA_DIM_256
#define KVCACHE_CUDA_DIM_256 false
#endif

namespace kvcache::detail::gpu {

constexpr bool built(int32_t dim) {
  return (dim == 64 && KVCACHE_CUDA_DIM_64) || (dim == 80 && KVCACHE_CUDA_DIM_80) ||
         (dim == 96 && KVCACHE_CUDA_DIM_96) || (dim == 128 && KVCACHE_CUDA_DIM_128) ||
         (dim == 256 && KVCACHE_CUDA_DIM_256);
}

/// Calls f.template operator()<Dim>() for a head dim that is built, else answers `none`.
template <class Result, class F>
Result with_dim(int32_t dim, Result none, F&& f) {
  if constexpr (built(64)) {
    if (dim == 64) return f.template operator()<64>();
  }
  if constexpr (built(80)) {
    if (dim == 80) return f.template operator()<80>();
  }
  if constexpr (built(96)) {
    if (dim == 96) return f.template operator()<96>();
  }
  if constexpr (built(128)) {
    if (dim == 128) return f.template operator()<128>();
  }
  if constexpr (built(256)) {
    if (dim == 256) return f.template operator()<256>();
  }
  return none;
}

}  // namespace kvcache::detail::gpu
