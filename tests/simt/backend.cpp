// SPDX-License-Identifier: Apache-2.0
#include "simt/backend.hpp"

#include "append.cuh"
#include "dims.hpp"
#include "formats.hpp"
#include "launch.hpp"
#include "merge.cuh"
#include "packed_family.hpp"
#include "prefill_family.hpp"
#include "simt/family.hpp"

namespace kvcache::simt {
backend& the_backend() {
  static backend b;
  return b;
}
}  // namespace kvcache::simt

namespace kvcache::detail::gpu {

bool has_dim(int32_t dim) noexcept {
  return built(dim);
}
int32_t launch_decode(const decode_choice& c, const decode_params& p, const launch_shape& shape,
                      kvc_stream stream) noexcept {
  return with_dim(c.dim, 98, [&]<int Dim>() {
    return c.type == KVC_F16
               ? decode_family<half_kind::f16, Dim>::launch(c.wide, c.extras, p, shape, stream)
               : decode_family<half_kind::bf16, Dim>::launch(c.wide, c.extras, p, shape, stream);
  });
}
int32_t launch_prefill(const decode_choice& c, const decode_params& p, const launch_shape& shape,
                       kvc_stream stream) noexcept {
  return with_dim(c.dim, 98, [&]<int Dim>() {
    return c.type == KVC_F16 ? prefill_family<half_kind::f16, Dim>::launch(c.extras, p, shape, stream)
                             : prefill_family<half_kind::bf16, Dim>::launch(c.extras, p, shape, stream);
  });
}
int32_t launch_packed(const packed_choice& c, const packed_params& p, const launch_shape& shape,
                      kvc_stream stream) noexcept {
  return with_dim(c.dim, 98, [&]<int Dim>() {
    return with_format(c.k, c.v, 98, [&]<packed_code K, packed_code V>() {
      return packed_family<K, V, Dim>::launch(c.wide, c.extras, p, shape, stream);
    });
  });
}
int32_t launch_merge(const merge_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(&merge, p, shape);
}
int32_t launch_append(const append_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(stores_codes(p) ? &append_codes : &append_rows, p, shape);
}
int32_t launch_rotate(const rope_rows_params& p, const launch_shape& shape, kvc_stream) noexcept {
  return start(&rotate_rows, p, shape);
}

}  // namespace kvcache::detail::gpu
