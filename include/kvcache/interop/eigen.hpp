// SPDX-License-Identifier: Apache-2.0
#pragma once
// Eigen's view of keys and values where they lie: no copy, whatever the layout. Optional: the only header
// that needs Eigen, which the user finds himself (Eigen3::Eigen).
//
//   cell of (block, head)   rows = slots, columns = channels; K transposed inside its block is the same view
//                           with other strides (rows 1 apart, columns a block apart)
//   channel of (head, dim)  rows = blocks, columns = slots
#include <Eigen/Core>
#include <cstdint>
#include <span>
#include <type_traits>

#include "kvcache/core/config.hpp"
#include "kvcache/core/units.hpp"
#include "kvcache/kvcache.h"

namespace kvcache {

/// Strides in elements between rows and between columns.
using eigen_strides = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;

/// Matrix in a plane's own memory. Scalar: float, Eigen::half, Eigen::bfloat16, or one of them const for
/// reading only.
template <class Scalar>
using eigen_map = Eigen::Map<
    std::conditional_t<
        std::is_const_v<Scalar>,
        const Eigen::Matrix<std::remove_const_t<Scalar>, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>,
        Eigen::Matrix<std::remove_const_t<Scalar>, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>,
    Eigen::Unaligned, eigen_strides>;

namespace detail {

template <class Scalar>
constexpr int32_t eigen_type() noexcept {
  using T = std::remove_const_t<Scalar>;
  static_assert(
      std::is_same_v<T, float> || std::is_same_v<T, Eigen::half> || std::is_same_v<T, Eigen::bfloat16>,
      "planes hold float, Eigen::half or Eigen::bfloat16");
  if (std::is_same_v<T, float>) return KVC_F32;
  return std::is_same_v<T, Eigen::half> ? KVC_F16 : KVC_BF16;
}

// `rows` x `columns` values from `offset` bytes on; empty if the plane holds another type.
template <class Scalar>
eigen_map<Scalar> eigen_view(const kvc_plane& p, int64_t offset, int64_t rows, int64_t row_stride,
                             int64_t columns, int64_t column_stride, bool inside) noexcept {
  constexpr auto size = static_cast<int64_t>(sizeof(Scalar));
  if (!KVCACHE_CONTRACT(inside) || !KVCACHE_CONTRACT(p.type == eigen_type<Scalar>())) {
    return eigen_map<Scalar>(nullptr, 0, 0, eigen_strides(0, 0));
  }
  auto* data = reinterpret_cast<Scalar*>(static_cast<char*>(p.data) + offset);
  return eigen_map<Scalar>(data, rows, columns, eigen_strides(row_stride / size, column_stride / size));
}

template <class Scalar>
eigen_map<Scalar> eigen_cell(const kvc_kv& kv, const kvc_plane& p, block_id b, int32_t head,
                             int32_t dims) noexcept {
  const bool inside = raw(b) >= 0 && raw(b) < kv.blocks && head >= 0 && head < kv.kv_heads;
  return eigen_view<Scalar>(p, raw(b) * p.block_stride + head * p.head_stride, kv.block, p.token_stride, dims,
                            p.dim_stride, inside);
}

template <class Scalar>
eigen_map<Scalar> eigen_channel(const kvc_kv& kv, const kvc_plane& p, int32_t head, int32_t dim,
                                int32_t dims) noexcept {
  const bool inside = head >= 0 && head < kv.kv_heads && dim >= 0 && dim < dims;
  return eigen_view<Scalar>(p, head * p.head_stride + dim * p.dim_stride, kv.blocks, p.block_stride, kv.block,
                            p.token_stride, inside);
}

// V that aliases K is its first channels.
inline const kvc_plane& values_of(const kvc_kv& kv) noexcept {
  return kv.v.data != nullptr ? kv.v : kv.k;
}

}  // namespace detail

/// Keys of one head in one block: [slot][channel]. Requires: an id of the layer and the plane's own type;
/// else a contract violation and an empty matrix. Owns: nothing.
template <class Scalar>
eigen_map<Scalar> key_cell(const kvc_kv& kv, block_id b, int32_t head) noexcept {
  return detail::eigen_cell<Scalar>(kv, kv.k, b, head, kv.dim_k);
}

/// Values of one head in one block: [slot][channel]; of the keys' first channels where V aliases K. Requires:
/// as key_cell.
template <class Scalar>
eigen_map<Scalar> value_cell(const kvc_kv& kv, block_id b, int32_t head) noexcept {
  return detail::eigen_cell<Scalar>(kv, detail::values_of(kv), b, head, kv.dim_v);
}

/// One channel of a head's keys over the whole plane: [block][slot]. Requires: as key_cell.
template <class Scalar>
eigen_map<Scalar> key_channel(const kvc_kv& kv, int32_t head, int32_t dim) noexcept {
  return detail::eigen_channel<Scalar>(kv, kv.k, head, dim, kv.dim_k);
}

/// One channel of a head's values over the whole plane: [block][slot]. Requires: as key_cell.
template <class Scalar>
eigen_map<Scalar> value_channel(const kvc_kv& kv, int32_t head, int32_t dim) noexcept {
  return detail::eigen_channel<Scalar>(kv, detail::values_of(kv), head, dim, kv.dim_v);
}

/// Matrix of the first out.rows() tokens of a table, copied and widened to float: [token][channel], for
/// reference computations. `cell` is key_cell<Scalar> or value_cell<Scalar>. Requires: the table holds that
/// many tokens, no block of them is absent, and `out` has the channels of a cell.
template <class Scalar, class Out>
void read_tokens(eigen_map<Scalar> (*cell)(const kvc_kv&, block_id, int32_t) noexcept, const kvc_kv& kv,
                 std::span<const block_id> table, int32_t head, Eigen::MatrixBase<Out>& out) noexcept {
  for (Eigen::Index t = 0; t < out.rows(); t += kv.block) {
    const auto column = static_cast<size_t>(t / kv.block);
    if (!KVCACHE_CONTRACT(column < table.size())) return;
    const eigen_map<Scalar> from = cell(kv, table[column], head);
    const Eigen::Index n = out.rows() - t < kv.block ? out.rows() - t : kv.block;
    if (!KVCACHE_CONTRACT(from.rows() >= n && from.cols() == out.cols())) return;
    out.middleRows(t, n) = from.topRows(n).template cast<float>();
  }
}

}  // namespace kvcache
