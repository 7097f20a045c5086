// SPDX-License-Identifier: Apache-2.0
// Codes to floats: rows of a packed cell become rows of a tile in scratch, value for value those of
// codes.hpp. Included once per instruction set, after simd_inner.hpp.
//
// A row of K is a channel and its columns are slots; a row of V is a slot and its columns are channels. So
// scales either change along the row, one per group of columns (K per channel, V per token), or from column
// to column, the same for a group of rows (K per token, V per channel), or not at all.
#include <algorithm>
#include <cstring>

#include "codes.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

constexpr int32_t row_codes = 32;  ///< that lie together, whatever their width
constexpr int32_t code_vectors = row_codes / lanes;
using tag_codes = hn::FixedTag<uint8_t, 16>;
using vec_codes = hn::Vec<tag_codes>;

/// Adds a part of `Bits` bits of 32 codes, `Shift` bits up, and moves on behind it.
template <int Bits, int Shift>
HWY_INLINE void add_part(const std::byte*& at, vec_codes (&codes)[2]) {
  const tag_codes d;
  const hn::FixedTag<uint8_t, 8> half;
  const auto* p = reinterpret_cast<const uint8_t*>(at);
  vec_codes part[2];
  if constexpr (Bits == 4) {
    const auto both = hn::LoadU(d, p);
    part[0] = hn::And(both, hn::Set(d, 15));
    part[1] = hn::ShiftRight<4>(both);
  } else if constexpr (Bits == 2) {
    const auto four = hn::LoadU(half, p);
    const auto low = hn::Combine(d, hn::ShiftRight<2>(four), four);
    part[0] = hn::And(low, hn::Set(d, 3));
    part[1] = hn::And(hn::ShiftRight<4>(low), hn::Set(d, 3));
  } else {
    uint64_t bits = 0;  // a mask is loaded eight bytes at a time
    std::memcpy(&bits, p, 4);
    for (int i = 0; i < 2; ++i) {
      uint8_t raw[8];
      const uint64_t own = bits >> (16 * i);
      std::memcpy(raw, &own, sizeof raw);
      part[i] = hn::IfThenElseZero(hn::LoadMaskBits(d, raw), hn::Set(d, 1));
    }
  }
  at += Bits * 4;
  for (int i = 0; i < 2; ++i) {
    codes[i] = Shift == 0 ? part[i] : hn::Or(codes[i], hn::ShiftLeft<Shift>(part[i]));
  }
}

/// 32 codes as bytes.
template <int Type>
HWY_INLINE void load_codes(const std::byte* at, vec_codes (&codes)[2]) {
  const tag_codes d;
  if constexpr (Type == KVC_U6) {
    add_part<4, 0>(at, codes);
    add_part<2, 4>(at, codes);
  } else if constexpr (Type == KVC_U5) {
    add_part<4, 0>(at, codes);
    add_part<1, 4>(at, codes);
  } else if constexpr (Type == KVC_U4) {
    add_part<4, 0>(at, codes);
  } else if constexpr (Type == KVC_U3) {
    add_part<2, 0>(at, codes);
    add_part<1, 2>(at, codes);
  } else if constexpr (Type == KVC_U2) {
    add_part<2, 0>(at, codes);
  } else {
    for (int i = 0; i < 2; ++i) codes[i] = hn::LoadU(d, reinterpret_cast<const uint8_t*>(at) + 16 * i);
  }
}

/// `lanes` bytes to floats. An e4m3 comes out 256 times too small: its bits, moved, are those of an f16 whose
/// exponent is biased by 8 more.
template <int Type>
HWY_INLINE vec_f code_floats(const uint8_t* p) {
  const tag_f d;
  const hn::Rebind<uint8_t, tag_f> d8;
  if constexpr (Type == KVC_E4M3 || Type == KVC_E5M2) {
    const hn::Rebind<uint16_t, tag_f> d16;
    const hn::Rebind<hwy::float16_t, tag_f> df;
    const auto wide = hn::PromoteTo(d16, hn::LoadU(d8, p));
    if constexpr (Type == KVC_E5M2) return hn::PromoteTo(d, hn::BitCast(df, hn::ShiftLeft<8>(wide)));
    const auto sign = hn::ShiftLeft<8>(hn::And(wide, hn::Set(d16, 0x80)));
    const auto rest = hn::ShiftLeft<7>(hn::And(wide, hn::Set(d16, 0x7f)));
    return hn::PromoteTo(d, hn::BitCast(df, hn::Or(sign, rest)));
  } else {
    return hn::ConvertTo(d, hn::PromoteTo(hn::Rebind<int32_t, tag_f>(), hn::LoadU(d8, p)));
  }
}

/// 32 codes as floats.
template <int Type>
HWY_INLINE void load_code_floats(const std::byte* at, vec_f (&x)[code_vectors]) {
  if constexpr (code_bits(static_cast<code>(Type)) == 8) {
    const auto* p = reinterpret_cast<const uint8_t*>(at);
    for (int i = 0; i < code_vectors; ++i) x[i] = code_floats<Type>(p + i * lanes);
  } else {
    vec_codes codes[2];
    load_codes<Type>(at, codes);
#if HWY_TARGET == HWY_AVX3
    const hn::Rebind<int32_t, tag_f> di;
    for (int i = 0; i < 2; ++i) x[i] = hn::ConvertTo(tag_f(), hn::PromoteTo(di, codes[i]));
#elif HWY_TARGET == HWY_AVX2
    const hn::Rebind<int32_t, tag_f> di;
    const hn::FixedTag<uint8_t, 8> half;
    for (int i = 0; i < 2; ++i) {
      x[2 * i] = hn::ConvertTo(tag_f(), hn::PromoteTo(di, hn::LowerHalf(half, codes[i])));
      x[2 * i + 1] = hn::ConvertTo(tag_f(), hn::PromoteTo(di, hn::UpperHalf(half, codes[i])));
    }
#else
    uint8_t raw[row_codes];
    for (int i = 0; i < 2; ++i) hn::StoreU(codes[i], tag_codes(), raw + 16 * i);
    for (int i = 0; i < code_vectors; ++i) x[i] = code_floats<Type>(raw + i * lanes);
#endif
  }
}

/// Where unpacked rows go.
struct unpacked {
  float* rows;     ///< [row][stride]
  int64_t stride;  ///< elements
};

/// Scales and minima as floats, `count` of them from the `first` on.
HWY_INLINE void widen_scales(const code_cell& c, int64_t first, int32_t count, float* HWY_RESTRICT scale,
                             float* HWY_RESTRICT zero) {
  const tag_f d;
  const float up = c.type == KVC_E4M3 ? 256.0f : 1.0f, even = c.even_zero(1.0f);
  const auto* from = reinterpret_cast<const f16*>(c.scale) + first;
  const auto* least = reinterpret_cast<const f16*>(c.zero) + (c.zero != nullptr ? first : 0);
  int32_t i = 0;
  for (; c.zero != nullptr && i + lanes <= count; i += lanes) {
    hn::StoreU(load_as(d, from + i), d, scale + i);
    hn::StoreU(load_as(d, least + i), d, zero + i);
  }
  for (; c.zero == nullptr && i + lanes <= count; i += lanes) {
    const auto s = load_as(d, from + i);
    hn::StoreU(hn::Mul(s, hn::Set(d, up)), d, scale + i);
    hn::StoreU(hn::Mul(s, hn::Set(d, even)), d, zero + i);
  }
  for (; i < count; ++i) {
    const float s = to_float(read<f16>(c.scale + 2 * (first + i)));
    zero[i] = c.zero != nullptr ? to_float(read<f16>(c.zero + 2 * (first + i))) : even * s;
    scale[i] = s * up;
  }
}

/// Stores the first `n` of 32 values.
HWY_INLINE void store_columns(const vec_f (&x)[code_vectors], int32_t n, float* to) {
  const tag_f d;
  if (n >= row_codes) {
    for (int i = 0; i < code_vectors; ++i) hn::StoreU(x[i], d, to + i * lanes);
    return;
  }
  float all[row_codes];
  for (int i = 0; i < code_vectors; ++i) hn::StoreU(x[i], d, all + i * lanes);
  std::memcpy(to, all, static_cast<size_t>(n) * sizeof(float));
}

/// A part of a cell: rows [row, row + rows), columns [column, column + columns), column a multiple of 32.
struct cell_part {
  int32_t row, rows, column, columns;
};

/// One row whose scales change every `group` columns, all vectors of a run of 32 having the same.
template <int Type>
HWY_INLINE void unpack_row(const std::byte* codes, const float* scale, const float* zero, int32_t group,
                           int32_t n, float* to) {
  constexpr int32_t bytes = 4 * code_bits(static_cast<code>(Type));
  const tag_f d;
  for (int32_t left = n; left > 0; ++scale, ++zero) {
    const auto s = hn::Set(d, *scale), z = hn::Set(d, *zero);
    int32_t here = std::min(left, group);
    left -= here;
    for (; here >= row_codes; here -= row_codes, codes += bytes, to += row_codes) {
      vec_f x[code_vectors];
      load_code_floats<Type>(codes, x);
      for (int i = 0; i < code_vectors; ++i) hn::StoreU(hn::MulAdd(x[i], s, z), d, to + i * lanes);
    }
    if (here == 0) continue;
    vec_f x[code_vectors];
    load_code_floats<Type>(codes, x);
    for (int i = 0; i < code_vectors; ++i) x[i] = hn::MulAdd(x[i], s, z);
    store_columns(x, here, to);
  }
}

/// The same with several scales in a run of 32.
template <int Type>
HWY_INLINE void unpack_fine_row(const std::byte* codes, const float* scale, const float* zero,
                                const code_cell& c, int32_t n, float* to) {
  const tag_f d;
  for (int32_t col = 0; col < n; col += row_codes) {
    vec_f x[code_vectors];
    load_code_floats<Type>(codes + col / row_codes * 4 * code_bits(static_cast<code>(Type)), x);
    for (int i = 0; i < code_vectors; ++i) {
      const int32_t at = std::min((col + i * lanes) / c.group, c.groups - 1);
      x[i] = hn::MulAdd(x[i], hn::Set(d, scale[at]), hn::Set(d, zero[at]));
    }
    store_columns(x, n - col, to + col);
  }
}

/// Rows with one scale each, or with one for all (`each` 0), of N runs of 32 columns.
template <int Type, int N>
HWY_INLINE void unpack_plain(const std::byte* HWY_RESTRICT codes, int64_t stride,
                             const float* HWY_RESTRICT scale, const float* HWY_RESTRICT zero, int32_t each,
                             int32_t rows, float* HWY_RESTRICT to, int64_t to_stride) {
  const tag_f d;
  for (; rows > 0; --rows, codes += stride, scale += each, zero += each, to += to_stride) {
    const auto s = hn::Set(d, *scale), z = hn::Set(d, *zero);
    for (int c = 0; c < N; ++c) {
      vec_f x[code_vectors];
      load_code_floats<Type>(codes + c * 4 * code_bits(static_cast<code>(Type)), x);
      for (int i = 0; i < code_vectors; ++i) {
        hn::StoreU(hn::MulAdd(x[i], s, z), d, to + c * row_codes + i * lanes);
      }
    }
  }
}

/// Scales that change along the row, or never. Whole rows, or, of K, a tile's slots of them.
template <int Type>
HWY_INLINE void unpack_along(const code_cell& c, const cell_part& p, const unpacked& to) {
  constexpr int32_t most = 512;
  float scale[most], zero[most];
  const bool one = c.kind == KVC_SCALE_HEAD || c.kind == KVC_SCALE_TENSOR;
  if (one) widen_scales(c, 0, 1, scale, zero);
  const int32_t each = one ? 0 : c.groups, at_once = one ? p.rows : most / c.groups;
  const bool coarse = one || c.groups == 1 || c.group % row_codes == 0;
  const int32_t group = one || c.groups == 1 ? INT32_MAX : c.group;
  const int32_t skip = p.column / row_codes * 4 * code_bits(static_cast<code>(Type));
  for (int32_t first = 0; first < p.rows; first += at_once) {
    const int32_t n = std::min(at_once, p.rows - first);
    if (!one) widen_scales(c, int64_t{p.row + first} * each, n * each, scale, zero);
    if (each <= 1 && (p.columns == 2 * row_codes || p.columns == 4 * row_codes)) {
      const std::byte* codes = c.codes + (p.row + first) * c.row + skip;
      float* rows = to.rows + first * to.stride;
      if (p.columns == 2 * row_codes) {
        unpack_plain<Type, 2>(codes, c.row, scale, zero, each, n, rows, to.stride);
      } else {
        unpack_plain<Type, 4>(codes, c.row, scale, zero, each, n, rows, to.stride);
      }
      continue;
    }
    for (int32_t r = 0; r < n; ++r) {
      const std::byte* codes = c.codes + (p.row + first + r) * c.row + skip;
      const int32_t at = r * each + (each > 1 ? p.column / c.group : 0);
      float* row = to.rows + (first + r) * to.stride;
      if (coarse) {
        unpack_row<Type>(codes, scale + at, zero + at, group, p.columns, row);
      } else {
        unpack_fine_row<Type>(codes, scale + at, zero + at, c, p.columns, row);
      }
    }
  }
}

/// Scales that change from column to column.
template <int Type>
HWY_INLINE void unpack_across(const code_cell& c, const cell_part& p, const unpacked& to) {
  const tag_f d;
  const int32_t all = c.keys ? c.tokens : c.dim;
  for (int32_t col = p.column; col < p.column + p.columns; col += row_codes) {
    const int32_t n = std::min(row_codes, p.column + p.columns - col);
    for (int32_t first = p.row; first < p.row + p.rows;) {
      const int32_t last = std::min(p.row + p.rows, (first / c.group + 1) * c.group);
      float scale[row_codes], zero[row_codes];
      widen_scales(c, int64_t{first / c.group} * all + col, n, scale, zero);
      vec_f s[code_vectors], z[code_vectors];
      for (int i = 0; i < code_vectors; ++i) {
        s[i] = hn::LoadU(d, scale + i * lanes);
        z[i] = hn::LoadU(d, zero + i * lanes);
      }
      const std::byte* codes =
          c.codes + first * c.row + col / row_codes * 4 * code_bits(static_cast<code>(Type));
      for (; first < last; ++first, codes += c.row) {
        vec_f x[code_vectors];
        load_code_floats<Type>(codes, x);
        for (int i = 0; i < code_vectors; ++i) x[i] = hn::MulAdd(x[i], s[i], z[i]);
        store_columns(x, n, to.rows + (first - p.row) * to.stride + col - p.column);
      }
    }
  }
}

template <int Type>
HWY_NOINLINE void unpack_rows(const code_cell& c, const cell_part& p, const unpacked& to) {
  const bool across = c.kind == (c.keys ? KVC_SCALE_TOKEN : KVC_SCALE_CHANNEL);
  if (across) return unpack_across<Type>(c, p, to);
  unpack_along<Type>(c, p, to);
}

void unpack_any(const code_cell& c, const cell_part& p, const unpacked& to) {
  const bool along = c.kind == (c.keys ? KVC_SCALE_CHANNEL : KVC_SCALE_TOKEN);
  if (along && c.groups > 1 && (c.group % lanes != 0 || c.groups > 512)) {  // a vector of several scales
    for (int32_t r = 0; r < p.rows; ++r) {
      for (int32_t i = 0; i < p.columns; ++i) {
        const int32_t row = p.row + r, column = p.column + i;
        to.rows[r * to.stride + i] = c.keys ? c.value(column, row) : c.value(row, column);
      }
    }
    return;
  }
  switch (c.type) {
    case KVC_E4M3:
      return unpack_rows<KVC_E4M3>(c, p, to);
    case KVC_E5M2:
      return unpack_rows<KVC_E5M2>(c, p, to);
    case KVC_U8:
      return unpack_rows<KVC_U8>(c, p, to);
    case KVC_U6:
      return unpack_rows<KVC_U6>(c, p, to);
    case KVC_U5:
      return unpack_rows<KVC_U5>(c, p, to);
    case KVC_U4:
      return unpack_rows<KVC_U4>(c, p, to);
    case KVC_U3:
      return unpack_rows<KVC_U3>(c, p, to);
    default:
      return unpack_rows<KVC_U2>(c, p, to);
  }
}

/// Keys of a tile of sealed blocks, [dim][tile_keys].
void unpack_keys(const attend_item& item, const tile& t, float* scratch) {
  const kvc_kv& kv = *item.kv;
  for (int32_t r = 0; r < t.runs; ++r) {
    if (t.k[r] == nullptr) continue;
    const auto slot = static_cast<int32_t>((t.first + r * t.run_keys) & (kv.block - 1));
    unpack_any(code_cell(kv, true, t.id[r], t.head), {0, kv.dim_k, slot, t.run_keys},
               {scratch + r * t.run_keys, tile_keys});
  }
  const std::byte* exact = exempt_cell(item, t, true);
  for (int32_t j = 0; exact != nullptr && j < kv.exempt; ++j) {
    for (int32_t c = 0; c < kv.dim_k; ++c) {
      scratch[c * tile_keys + j] =
          load(exact + j * kv.exempt_k.token_stride + c * kv.exempt_k.dim_stride, kv.exempt_k.type);
    }
  }
}

/// Values of a tile of sealed blocks, [tile_keys][dim].
void unpack_values(const attend_item& item, const tile& t, float* scratch) {
  const kvc_kv& kv = *item.kv;
  for (int32_t r = 0; r < t.runs; ++r) {
    if (t.v[r] == nullptr) continue;
    const auto slot = static_cast<int32_t>((t.first + r * t.run_keys) & (kv.block - 1));
    unpack_any(code_cell(kv, false, t.id[r], t.head), {slot, t.run_keys, 0, kv.dim_v},
               {scratch + int64_t{r} * t.run_keys * kv.dim_v, kv.dim_v});
  }
  const std::byte* exact = exempt_cell(item, t, false);
  for (int32_t j = 0; exact != nullptr && j < kv.exempt; ++j) {
    for (int32_t c = 0; c < kv.dim_v; ++c) {
      scratch[j * kv.dim_v + c] =
          load(exact + j * kv.exempt_v.token_stride + c * kv.exempt_v.dim_stride, kv.exempt_v.type);
    }
  }
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
