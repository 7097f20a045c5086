// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the entry points hand over to whoever runs kernels: CUDA (launch.cu and the decode_*.cu), or in tests
// the machine of tests/simt. Every function returns a cudaError_t, 0 for success.
#include <cstdint>

#include "kvcache/kvcache.h"
#include "packed_params.hpp"
#include "params.hpp"

namespace kvcache::detail::gpu {

/// Which decode kernel.
struct decode_choice {
  int32_t type;  ///< of the planes: KVC_F16, KVC_BF16
  int32_t dim;
  bool wide;    ///< query rows on M
  bool extras;  ///< soft cap, positions of keys, score output, scales that are not above 0
};

/// Which decode kernel over codes: their formats as KVC_E4M3, KVC_U8, KVC_U4.
struct packed_choice {
  int32_t k, v;
  int32_t dim;
  bool wide, extras;
};

/// Whether this build has decode kernels for a head dim.
bool has_dim(int32_t dim) noexcept;

int32_t launch_decode(const decode_choice& choice, const decode_params& p, const launch_shape& shape,
                      kvc_stream stream) noexcept;
/// The sequences of more than p.few_rows rows; `wide` says nothing.
int32_t launch_prefill(const decode_choice& choice, const decode_params& p, const launch_shape& shape,
                       kvc_stream stream) noexcept;
int32_t launch_packed(const packed_choice& choice, const packed_params& p, const launch_shape& shape,
                      kvc_stream stream) noexcept;
int32_t launch_merge(const merge_params& p, const launch_shape& shape, kvc_stream stream) noexcept;
int32_t launch_append(const append_params& p, const launch_shape& shape, kvc_stream stream) noexcept;
int32_t launch_rotate(const rope_rows_params& p, const launch_shape& shape, kvc_stream stream) noexcept;

}  // namespace kvcache::detail::gpu
