// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sealed blocks turned back into the floats that kernels compute with: K as [channel][slot], V as
// [slot][channel]. A block of threads takes K or V of one block.
#include "codes.cuh"

namespace kvcache::detail::gpu {

KVCACHE_KERNEL(threads_of_block)
unpack_cells(KVCACHE_CONSTANT unpack_params p) {
  const bool values = block_index() % 2 != 0;
  const int64_t n = block_index() / 2;
  const coded_plane& plane = values ? p.v : p.k;
  float* to = values ? p.to_v : p.to_k;
  const int32_t id = p.id[n];
  if (to == nullptr || id < 0 || id >= p.blocks) return;
  to += n * (values ? p.to_v_stride : p.to_k_stride);
  const code_form f = form_of(plane, !values, p.block, values ? p.dim_v : p.dim_k);
  const char* cell = code_cell_of(plane, id, p.head);
  const int64_t scales = scale_offset(plane, id, p.head);
  const int32_t columns = f.columns(), all = f.rows() * columns;
  for (int32_t i = static_cast<int32_t>(thread_index()); i < all; i += threads_of_block) {
    const int32_t row = i / columns, column = i % columns;
    const int32_t token = f.keys ? column : row, channel = f.keys ? row : column;
    if (!is_code_type(f.type)) {
      to[i] = load_value(cell + token * plane.row_stride, f.type, channel);
      continue;
    }
    const int64_t at = scales + f.scale_index(token, channel) * 2;
    const code_levels levels{load<uint16_t>(plane.scale + at),
                             plane.zero != nullptr ? load<uint16_t>(plane.zero + at) : uint16_t{0}};
    to[i] = decoded(f, grid_of(f, levels), code_at(f.type, cell + row * plane.row_stride, column));
  }
}

}  // namespace kvcache::detail::gpu
