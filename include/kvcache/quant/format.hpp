// SPDX-License-Identifier: Apache-2.0
#pragma once
// How full blocks are packed: a choice for K and one for V, and the bytes that follow. The planner, the
// allocator and the planes all use these functions, so they agree.
//
//   block of a layer   | K cell of head 0 | of head 1 | ... | V cell of head 0 | ... | filled to 64 bytes
//   packed cell        | codes | scales (f16) | minima (f16) |     one scale per `group_size` values:
//                         per channel  along the tokens of one channel, inside one block
//                         per token    along the channels of one token and head
//                         per head     the whole cell
//                         per tensor   the cells of all heads; its scale lies behind the last cell
//   codes of K         a row per channel, one code per slot
//   codes of V         a row per slot, one code per channel
//   code row           32 codes after 32 codes, the last ones filled up; 4 x bits bytes each, and in these
//                      the 4-bit parts of all 32, then the 2-bit parts, then the 1-bit parts:
//     8 bits           byte i: code i
//     4-bit parts      16 bytes; byte i: code i in the low half, code i + 16 in the high half
//     2-bit parts       8 bytes; byte i: codes i, i + 8, i + 16, i + 24, from the low bits on
//     1-bit parts       4 bytes; bit i (from the low bit of the first byte on): code i
//                      A code of 6 bits is a 4-bit part (low) and a 2-bit part (high), 5 = 4 + 1, 3 = 2 + 1.
//
// A packed value is a number, and all kernels compute with this number and no other:
//   min/max     value = fma(code, scale, minimum)                in float
//   symmetric   value = (code - (2^bits - 1) / 2) * scale        levels lie on both sides of 0 alike
//   fp8         value = code * scale
#include <cstdint>
#include <span>

#include "kvcache/core/shape.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// How a value is stored in a sealed block. The numbers of packed ones are those of KVC_E4M3 ... in
/// kvcache.h.
enum class code : uint8_t { exact = 0, e4m3 = 3, e5m2, int8, int6, int5, int4, int3, int2 };

/// Which values share a scale. The numbers are those of KVC_SCALE_*, less one.
enum class scale_axis : uint8_t { tensor, head, token, channel };

/// How the range of a group is chosen. Requires for both searches: `exempt`, or the search cuts off the
/// sinks.
enum class clip_search : uint8_t {
  none,      ///< it covers all values
  middle,    ///< the best of 7 shrinkings about the middle, by squared error
  two_sided  ///< each end the best of 4
};

/// How K, or V, is packed.
struct side_format {
  code codes = code::exact;             ///< exact: as in an open block
  scale_axis axis = scale_axis::token;  ///< which values share a scale
  int32_t group_size = 0;  ///< of these, how many: 0 = all; ignored for head and tensor; multiple of 8
  bool symmetric = false;  ///< integer codes: no minimum is stored
  clip_search clip{};      ///< integer codes
  bool hadamard = false;   ///< heads are stored rotated (Walsh matrix / sqrt(dim)), in open blocks too
  /// Equal in every number.
  constexpr bool operator==(const side_format&) const noexcept = default;
};

/// How a layer's blocks are stored. K and V are chosen independently.
struct kv_format {
  side_format k{};  ///< of K
  side_format v{};  ///< of V
  /// Newest tokens that are read exactly: a query at p reads a block packed if all its tokens are at or
  /// before p - residual.
  int32_t residual = 0;
  /// Leading tokens of a text that stay exact and out of all ranges: 0, 1, 2 or 4. Without the first token
  /// the range of every group it lies in is that of an outlier (StreamingLLM's attention sink).
  int32_t exempt = 0;
  /// K is stored before its rotation by position and rotated whenever it is read (KVQuant, 2024,
  /// section 3.2): its channels then keep their ranges over the whole text. Costs a rotation per key, head
  /// and read.
  bool k_before_rope = false;
  /// Scores against packed keys are integer dot products: of the codes, less the middle one, and of the
  /// query, multiplied by the channels' scales and rounded to 8 bits. The rounding moves a score by at most
  /// sum |code - 2^(bits - 1)| * a / 254, a being the largest of the query's products. With
  /// fewer than 8 query heads per kv head no faster than floats, with 8-bit codes slower (docs/quant.md).
  /// For integer codes of K with scales per channel (groups of multiples of 32 tokens), head or tensor, not
  /// with k_before_rope.
  bool integer_dot = false;
  /// Equal in every number.
  constexpr bool operator==(const kv_format&) const noexcept = default;
};

/// Bits of one code; 0 for exact.
constexpr int32_t code_bits(code c) noexcept {
  constexpr int32_t bits[] = {0, 0, 0, 8, 8, 8, 6, 5, 4, 3, 2};
  return bits[static_cast<uint8_t>(c)];
}
/// Whether the code is a small float.
constexpr bool is_fp8(code c) noexcept {
  return c == code::e4m3 || c == code::e5m2;
}
/// Whether a minimum is stored beside every scale.
constexpr bool has_minimum(const side_format& f) noexcept {
  return f.codes != code::exact && !is_fp8(f.codes) && !f.symmetric;
}

/// Bytes of a row of `n` codes.
constexpr int64_t code_row_bytes(code c, int32_t n) noexcept {
  return int64_t{ceil_div(n, 32)} * 4 * code_bits(c);
}

/// Values that share a scale along the axis. Requires: axis is token or channel.
constexpr int32_t group_of(const side_format& f, int32_t block_size, int32_t dim) noexcept {
  return f.group_size != 0 ? f.group_size : f.axis == scale_axis::channel ? block_size : dim;
}

/// Scales of a cell; those of a tensor count for its first cell only.
///   channel [dim][block_size / group] for K, [block_size / group][dim] for V
///   token   [groups of dim][block_size] for K, [block_size][groups of dim] for V
constexpr int32_t scales_of_cell(const side_format& f, int32_t block_size, int32_t dim) noexcept {
  if (f.codes == code::exact) return 0;
  if (f.axis == scale_axis::channel) return dim * ceil_div(block_size, group_of(f, block_size, dim));
  if (f.axis == scale_axis::token) return block_size * ceil_div(dim, group_of(f, block_size, dim));
  return 1;
}

/// Where the parts of K, or of V, lie in a block of one layer. Bytes, counted from its first cell.
struct side_layout {
  int64_t code_row = 0;      ///< codes of one channel (K), or of one slot (V)
  int64_t scale = 0;         ///< first scale
  int64_t minimum = 0;       ///< first minimum, 0 = there is none
  int64_t head_stride = 0;   ///< from cell to cell
  int64_t scale_stride = 0;  ///< from the scales of a head to those of the next; 0 = they are shared
  int64_t bytes = 0;         ///< of all cells
};

/// The layout of K (`rows` = dim, `columns` = block_size) or of V (the other way round). Requires: valid.
constexpr side_layout layout_of(const side_format& f, const group_shape& s, int32_t block_size,
                                bool keys) noexcept {
  const int32_t dim = keys ? s.head_dim_k : s.head_dim_v;
  side_layout out;
  if (f.codes == code::exact) {
    out.head_stride = int64_t{block_size} * dim * element_bytes(s.type);
    out.bytes = out.head_stride * s.kv_heads;
    return out;
  }
  const int32_t rows = keys ? dim : block_size, columns = keys ? block_size : dim;
  out.code_row = code_row_bytes(f.codes, columns);
  const int64_t codes = out.code_row * rows;
  const int64_t scales = int64_t{2} * scales_of_cell(f, block_size, dim);
  const int64_t all = scales * (has_minimum(f) ? 2 : 1);
  const bool shared = f.axis == scale_axis::tensor;
  out.head_stride = shared ? codes : codes + all;
  out.scale = shared ? codes * s.kv_heads : codes;
  out.minimum = has_minimum(f) ? out.scale + scales : 0;
  out.scale_stride = shared ? 0 : out.head_stride;
  out.bytes = out.head_stride * s.kv_heads + (shared ? all : 0);
  return out;
}

/// Bytes of a sealed block of one layer.
constexpr int64_t layer_block_bytes(const kv_format& f, const group_shape& s, int32_t block_size) noexcept {
  const int64_t all = layout_of(f.k, s, block_size, true).bytes + layout_of(f.v, s, block_size, false).bytes;
  return ceil_div(all, int64_t{64}) * 64;
}

/// Whether anything is rounded when a block is sealed.
constexpr bool lossy(const kv_format& f) noexcept {
  return f.k.codes != code::exact || f.v.codes != code::exact;
}

namespace detail {

constexpr status validate_side(const side_format& f, int32_t dim, int32_t block_size) noexcept {
  const auto number = static_cast<int64_t>(f.codes);
  if (f.codes > code::int2 || (f.codes != code::exact && f.codes < code::e4m3)) {
    return {errc::bad_argument, "codes", number};
  }
  if (f.axis > scale_axis::channel) return {errc::bad_argument, "axis", static_cast<int64_t>(f.axis)};
  if (f.clip > clip_search::two_sided) return {errc::bad_argument, "clip", static_cast<int64_t>(f.clip)};
  if (f.hadamard && !is_power_of_two(dim)) return {errc::unsupported, "hadamard", dim};
  if (f.codes == code::exact) return {};
  if (block_size < 32 || block_size > 128) return {errc::unsupported, "block_size", block_size};
  if (f.axis == scale_axis::tensor && f.clip != clip_search::none) {
    return {errc::unsupported, "clip", static_cast<int64_t>(f.clip)};
  }
  if (f.group_size < 0 || f.group_size % 8 != 0) return {errc::bad_argument, "group_size", f.group_size};
  if (f.axis == scale_axis::channel && f.group_size != 0 &&
      (f.group_size > block_size || block_size % f.group_size != 0)) {
    return {errc::bad_argument, "group_size", f.group_size};
  }
  return {};
}

/// Whether scores can be integer dot products.
constexpr bool may_dot_integers(const kv_format& f) noexcept {
  if (f.k.codes < code::int8 || f.k.axis == scale_axis::token || f.k_before_rope) return false;
  return f.k.axis != scale_axis::channel || f.k.group_size % 32 == 0;
}

constexpr uint64_t side_fingerprint(const side_format& f) noexcept {
  uint64_t h = 0;
  for (const uint64_t v : {uint64_t(f.codes), uint64_t(f.axis), uint64_t(f.group_size), uint64_t(f.symmetric),
                           uint64_t(f.clip), uint64_t(f.hadamard)}) {
    h = mix64(h ^ v) + v;
  }
  return h;
}

}  // namespace detail

/// Checks a layer's format. Fails: bad_argument or unsupported, naming the field: MLA latents, heads whose
/// dim is no multiple of 8, blocks of less than 32 or more than 128 tokens, a clip search per tensor and
/// channel groups that cross a block are not packed; integer_dot has its conditions.
constexpr status validate(const kv_format& f, const group_shape& s, int32_t block_size) noexcept {
  if (status bad = validate(s, block_size); !bad) return bad;
  if (status bad = detail::validate_side(f.k, s.head_dim_k, block_size); !bad) return bad;
  if (status bad = detail::validate_side(f.v, s.head_dim_v, block_size); !bad) return bad;
  if (f.residual < 0) return {errc::bad_argument, "residual", f.residual};
  if (f.exempt != 0 && (!is_power_of_two(f.exempt) || f.exempt > 4)) {
    return {errc::bad_argument, "exempt", f.exempt};
  }
  if (f.integer_dot && !detail::may_dot_integers(f)) return {errc::unsupported, "integer_dot", 1};
  if (!lossy(f)) return {};
  if (s.v_aliases_k) return {errc::unsupported, "v_aliases_k", 1};
  if (s.head_dim_k % 8 != 0) return {errc::unsupported, "head_dim_k", s.head_dim_k};
  if (s.head_dim_v % 8 != 0) return {errc::unsupported, "head_dim_v", s.head_dim_v};
  return {};
}

/// Identity of the codes of a list of layers; formats of equal fingerprint read each other's blocks.
constexpr uint64_t fingerprint(std::span<const kv_format> layers) noexcept {
  uint64_t h = 1;
  for (const kv_format& f : layers) {
    h = mix64(h ^ detail::side_fingerprint(f.k));
    h = mix64(h ^ detail::side_fingerprint(f.v)) + static_cast<uint64_t>(f.residual);
    h = mix64(h ^ static_cast<uint64_t>(f.exempt));
    if (f.k_before_rope) h = mix64(h + 1);
    if (f.integer_dot) h = mix64(h + 2);
  }
  return h;
}

/// What the control plane needs to know. `layers`: one format for all layers of the group, or one per layer;
/// their residual and exempt must be equal. Fails: as validate; bad_argument "layers".
constexpr result<block_format> block_format_of(std::span<const kv_format> layers, const group_shape& s,
                                               int32_t block_size) noexcept {
  if (layers.empty() || (layers.size() != 1 && layers.size() != static_cast<size_t>(s.layers))) {
    return {errc::bad_argument, "layers", static_cast<int64_t>(layers.size())};
  }
  block_format out;
  for (const kv_format& f : layers) {
    if (status bad = validate(f, s, block_size); !bad) return bad;
    if (f.residual != layers[0].residual) return {errc::bad_argument, "residual", f.residual};
    if (f.exempt != layers[0].exempt) return {errc::bad_argument, "exempt", f.exempt};
    const int64_t each = layers.size() == 1 ? s.layers : 1;
    out.block = out.block + bytes{layer_block_bytes(f, s, block_size)} * each;
    out.lossy = out.lossy || lossy(f);
  }
  if (!out.lossy) return block_format{};
  out.residual = layers[0].residual;
  out.exempt = layers[0].exempt;
  out.fingerprint = fingerprint(layers);
  return out;
}

}  // namespace kvcache
