// SPDX-License-Identifier: Apache-2.0
#pragma once
// Packed cells as the data plane sees them: where codes and scales of one block and kv head lie, and single
// values, for the scalar kernel and for what SIMD code leaves over. The layout: quant/format.hpp.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "element.hpp"
#include "kernel.hpp"
#include "kvcache/quant/codes.hpp"
#include "kvcache/quant/format.hpp"

namespace kvcache::detail {

/// The codec of a plane.
inline side_format format_of(const kvc_plane& p) noexcept {
  side_format f;
  f.codes = static_cast<code>(p.type);
  f.axis = static_cast<scale_axis>(p.scale_kind - KVC_SCALE_TENSOR);
  f.group_size = p.scale_group;
  f.symmetric = p.zero == nullptr;
  f.clip = static_cast<clip_search>(p.clip);
  return f;
}

/// Codes and scales of one block and kv head.
struct code_cell {
  const std::byte* codes = nullptr;  ///< row 0
  int64_t row = 0;                   ///< bytes from row to row: channels of K, slots of V
  const std::byte* scale = nullptr;  ///< f16
  const std::byte* zero = nullptr;   ///< f16, null: the codes lie evenly about 0
  int32_t tokens = 0, dim = 0;       ///< of the cell
  int32_t type = 0, kind = 0;        ///< KVC_U4 ..., KVC_SCALE_*
  int32_t group = 1, groups = 1;     ///< values that share a scale along their axis, and how many such groups
  bool keys = false;

  code_cell(const kvc_kv& kv, bool of_keys, int64_t id, int64_t head) noexcept
      : tokens(kv.block), dim(of_keys ? kv.dim_k : kv.dim_v), keys(of_keys) {
    const kvc_plane& p = of_keys ? kv.k : kv.v;
    codes = bytes_of(p.data) + id * p.block_stride + head * p.head_stride;
    row = of_keys ? p.dim_stride : p.token_stride;
    const int64_t at = id * p.scale_block_stride + head * p.scale_head_stride;
    scale = bytes_of(p.scale) + at;
    zero = p.zero != nullptr ? bytes_of(p.zero) + at : nullptr;
    type = p.type;
    kind = p.scale_kind;
    if (kind != KVC_SCALE_TOKEN && kind != KVC_SCALE_CHANNEL) return;
    group = p.scale_group;
    groups = ((kind == KVC_SCALE_TOKEN ? dim : tokens) + group - 1) / group;
  }

  /// Place of a value's scale among those of the cell.
  int64_t scale_index(int32_t slot, int32_t channel) const noexcept {
    if (kind == KVC_SCALE_TOKEN) {
      return keys ? int64_t{channel / group} * tokens + slot : int64_t{slot} * groups + channel / group;
    }
    if (kind == KVC_SCALE_CHANNEL) {
      return keys ? int64_t{channel} * groups + slot / group : int64_t{slot / group} * dim + channel;
    }
    return 0;
  }
  /// What stands for the minimum where none is stored: exact, a scale has 11 bits. Of small floats -0, which
  /// added leaves every product as it is, its sign included.
  float even_zero(float s) const noexcept {
    return is_fp8(static_cast<code>(type)) ? -0.0f : symmetric_zero(static_cast<code>(type), s);
  }
  float scale_at(int64_t index) const noexcept { return to_float(read<f16>(scale + 2 * index)); }
  float zero_at(int64_t index) const noexcept {
    return zero != nullptr ? to_float(read<f16>(zero + 2 * index)) : even_zero(scale_at(index));
  }
  uint32_t code_at(int32_t slot, int32_t channel) const noexcept {
    return read_code(static_cast<code>(type), codes + row * (keys ? channel : slot), keys ? slot : channel);
  }
  float value(int32_t slot, int32_t channel) const noexcept {
    const std::byte* r = codes + row * (keys ? channel : slot);
    const uint32_t c = read_code(static_cast<code>(type), r, keys ? slot : channel);
    const int64_t at = 2 * scale_index(slot, channel);
    const float s = to_float(read<f16>(scale + at));
    if (is_fp8(static_cast<code>(type))) return f8_value(static_cast<code>(type), c) * s;
    return value_of(c, s, zero != nullptr ? to_float(read<f16>(zero + at)) : even_zero(s));
  }
};

/// 2^(bits - 1), the middle of integer codes.
constexpr int32_t middle_code(int32_t type) noexcept {
  return 1 << (code_bits(static_cast<code>(type)) - 1);
}

/// Keys or values of one tile's run that are read exactly although their block is packed: the first slots of
/// a text. Null: none, or the sequence has none.
inline const std::byte* exempt_cell(const attend_item& item, const tile& t, bool keys) noexcept {
  const kvc_kv& kv = *item.kv;
  if (kv.exempt == 0 || t.first != 0 || t.form != tile_form::sealed || item.batch->exempt_table == nullptr) {
    return nullptr;
  }
  const int32_t id = item.batch->exempt_table[item.sequence];
  return id < 0 ? nullptr : cell(keys ? kv.exempt_k : kv.exempt_v, id, t.head, 0);
}

}  // namespace kvcache::detail
