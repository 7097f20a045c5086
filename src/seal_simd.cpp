// SPDX-License-Identifier: Apache-2.0
// Packing of cells, written once with Highway as kernel_simd.cpp is: the arithmetic of quant/affine.hpp and
// quant/fp8.hpp, operation for operation, on many values at a time. Rows of a cell are read where they lie in
// the open block.
#include "kernel.hpp"
#include "simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "seal_simd.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "element.hpp"
#include "kvcache/quant/affine.hpp"
#include "kvcache/quant/fp8.hpp"
#include "simd.hpp"
#include "simd_inner.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

bool packable(const cell_rows&);
bool pack(const side_format&, bool keys, const cell_rows&, const packed_rows&);

constexpr int32_t most_columns = 256, code_group = 32, fold_lanes_of_error = 16;
using tag_u = hn::RebindToUnsigned<tag_f>;

/// A row as floats.
void load_row(const cell_rows& c, int32_t row, float* HWY_RESTRICT to) {
  const tag_f d;
  const std::byte* from = c.at + row * c.stride;
  with_type(c.type, [&](auto* tag) HWY_ATTR {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    int32_t i = 0;
    for (; i + lanes <= c.columns; i += lanes) {
      hn::StoreU(load_as(d, reinterpret_cast<const T*>(from) + i), d, to + i);
    }
    for (; i < c.columns; ++i) to[i] = to_float(read<T>(from + i * int64_t{sizeof(T)}));
  });
}

bool packable(const cell_rows& c) {
  const tag_f d;
  alignas(64) float x[most_columns];
  if (c.columns > most_columns || c.columns % lanes != 0) return false;
  auto all = hn::Set(d, 0.0f);  // a NaN, once in, stays
  const auto most = hn::Set(d, largest_packed);
  auto good = hn::Eq(all, all);
  for (int32_t r = 0; r < c.rows; ++r) {
    load_row(c, r, x);
    for (int32_t i = 0; i < c.columns; i += lanes) {
      good = hn::And(good, hn::Le(hn::Abs(hn::LoadU(d, x + i)), most));
    }
  }
  return hn::AllTrue(d, good);
}

// ---- codes ----

/// What turns values into codes.
struct encoder {
  vec_f zero, inverse, scale;
  float most;      ///< largest integer code
  bool symmetric;  ///< `zero` is then half of `most`, in codes
};

encoder encoder_of(const side_format& f, stored_grid g) {
  const tag_f d;
  const affine_grid grid = affine{f}.grid(g);
  const auto most = static_cast<float>(largest_code(f.codes));
  return {hn::Set(d, grid.zero), hn::Set(d, grid.inverse), hn::Set(d, grid.scale), most, f.symmetric};
}

/// The nearest codes as whole floats.
HWY_INLINE vec_f nearest(const encoder& e, vec_f x) {
  const tag_f d;
  const auto most = hn::Set(d, e.most), magic = hn::Set(d, 0x1p23f);
  const auto v = e.symmetric ? hn::MulAdd(x, e.inverse, hn::Set(d, 0.5f * e.most))
                             : hn::Mul(hn::Sub(x, e.zero), e.inverse);
  const auto inside = hn::Max(hn::Min(v, most), hn::Zero(d));
  const auto whole = hn::Sub(hn::Add(inside, magic), magic);
  // Without a step every code is 0; min/max has that from its inverse of 0.
  return e.symmetric ? hn::IfThenElseZero(hn::Gt(e.inverse, hn::Zero(d)), whole) : whole;
}

HWY_INLINE void store_bytes(vec_f codes, uint8_t* to) {
  const hn::Rebind<int32_t, tag_f> di;
  const hn::Rebind<uint8_t, tag_f> d8;
  hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(di, codes)), d8, to);
}

/// The nearest small floats of v, |v| at most a little above the largest, as narrow8 of core/numeric.hpp.
template <int Mantissa, int Bias>
HWY_INLINE void store_small_floats(vec_f v, uint32_t largest, uint8_t* to) {
  const tag_f d;
  const tag_u du;
  constexpr int shift = 23 - Mantissa;
  const auto bits = hn::BitCast(du, v);
  const auto sign = hn::ShiftLeft<7>(hn::ShiftRight<31>(bits));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto odd = hn::And(hn::ShiftRight<shift>(magnitude), hn::Set(du, 1));
  const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(du, (1u << (shift - 1)) - 1)));
  const auto normal = hn::Sub(hn::ShiftRight<shift>(rounded), hn::Set(du, uint32_t{127 - Bias} << Mantissa));
  // Below the smallest normal: whole units of the smallest subnormal.
  const auto units =
      hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, float(uint64_t{1} << (Bias - 1 + Mantissa))));
  const auto tiny = hn::BitCast(du, hn::Add(units, hn::Set(d, 0x1p23f)));
  const auto subnormal = hn::And(tiny, hn::Set(du, 0xff));
  const auto least = hn::Set(du, uint32_t{128 - Bias} << 23);
  auto code = hn::IfThenElse(hn::Lt(magnitude, least), subnormal, normal);
  code = hn::Or(hn::Min(code, hn::Set(du, largest)), sign);
  const hn::Rebind<uint8_t, tag_f> d8;
  hn::StoreU(hn::DemoteTo(d8, hn::BitCast(hn::Rebind<int32_t, tag_f>(), code)), d8, to);
}

/// 32 bytes to a part of `Bits` bits each, from bit `Shift` on.
template <int Bits, int Shift>
HWY_INLINE void store_part(const uint8_t* HWY_RESTRICT codes, std::byte*& to) {
  constexpr int bytes = 4 * Bits, per = 8 / Bits;
  constexpr uint32_t mask = (1u << Bits) - 1;
  for (int i = 0; i < bytes; ++i) {
    uint32_t all = 0;
    for (int f = 0; f < per; ++f) {
      const int at = Bits == 1 ? 8 * i + f : i + f * bytes;
      all |= (codes[at] >> Shift & mask) << (f * Bits);
    }
    to[i] = static_cast<std::byte>(all);
  }
  to += bytes;
}

/// A row of bytes to a row of codes; `codes` is filled up to whole groups of 32.
void store_row(code c, const uint8_t* codes, int32_t n, std::byte* to) {
  for (int32_t i = 0; i < n; i += code_group, codes += code_group) {
    switch (c) {
      case code::int6:
        store_part<4, 0>(codes, to);
        store_part<2, 4>(codes, to);
        break;
      case code::int5:
        store_part<4, 0>(codes, to);
        store_part<1, 4>(codes, to);
        break;
      case code::int4:
        store_part<4, 0>(codes, to);
        break;
      case code::int3:
        store_part<2, 0>(codes, to);
        store_part<1, 2>(codes, to);
        break;
      case code::int2:
        store_part<2, 0>(codes, to);
        break;
      default:
        std::memcpy(to, codes, code_group);
        to += code_group;
    }
  }
}

// ---- scales ----

value_range range_of(const float* x, int32_t n) {
  const tag_f d;
  auto low = hn::LoadU(d, x), high = low;
  for (int32_t i = lanes; i < n; i += lanes) {
    low = hn::Min(low, hn::LoadU(d, x + i));
    high = hn::Max(high, hn::LoadU(d, x + i));
  }
  // A zero's sign is of no account: scales and codes do not depend on it.
  return {hn::GetLane(hn::MinOfLanes(d, low)), hn::GetLane(hn::MaxOfLanes(d, high))};
}

/// affine::squared_error of a group of `n` values.
float squared_error(const side_format& f, stored_grid g, const float* x, int32_t n) {
  const tag_f d;
  const encoder e = encoder_of(f, g);
  constexpr int32_t parts = fold_lanes_of_error / lanes;
  vec_f sum[parts];
  for (int p = 0; p < parts; ++p) sum[p] = hn::Zero(d);
  for (int32_t i = 0; i < n; i += fold_lanes_of_error) {
    for (int p = 0; p < parts; ++p) {
      const auto v = hn::LoadU(d, x + i + p * lanes);
      const auto off = hn::Sub(v, hn::MulAdd(nearest(e, v), e.scale, e.zero));
      sum[p] = hn::MulAdd(off, off, sum[p]);
    }
  }
  float lane[fold_lanes_of_error];
  for (int p = 0; p < parts; ++p) hn::StoreU(sum[p], d, lane + p * lanes);
  for (int half = fold_lanes_of_error / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

stored_grid fit(const side_format& f, const float* x, int32_t n) {
  const value_range r = range_of(x, n);
  if (is_fp8(f.codes)) return fit_fp8(std::max({-r.least, r.largest, 0.0f}), f.codes);
  return affine{f}.fit_range(r, [&](stored_grid g) { return squared_error(f, g, x, n); });
}

void encode(const side_format& f, stored_grid g, const float* HWY_RESTRICT x, int32_t n,
            uint8_t* HWY_RESTRICT to) {
  const tag_f d;
  if (is_fp8(f.codes)) {
    const fp8_grid grid = fp8{f}.grid(g);
    if (grid.inverse == 0) {
      std::fill_n(to, n, uint8_t{0});
      return;
    }
    const auto inverse = hn::Set(d, grid.inverse);
    for (int32_t i = 0; i < n; i += lanes) {
      const auto v = hn::Mul(hn::LoadU(d, x + i), inverse);
      f.codes == code::e4m3 ? store_small_floats<3, 7>(v, 0x7e, to + i)
                            : store_small_floats<2, 15>(v, 0x7b, to + i);
    }
    return;
  }
  const encoder e = encoder_of(f, g);
  for (int32_t i = 0; i < n; i += lanes) store_bytes(nearest(e, hn::LoadU(d, x + i)), to + i);
}

// ---- cells ----

/// A scale per group of columns of a row, or one that is there already.
void pack_along(const side_format& f, const cell_rows& c, const packed_rows& to, int32_t group) {
  alignas(64) float x[most_columns];
  alignas(64) uint8_t codes[most_columns + code_group] = {};
  const int64_t row_bytes = code_row_bytes(f.codes, c.columns);
  int32_t next = 0;
  for (int32_t r = 0; r < c.rows; ++r) {
    load_row(c, r, x);
    for (int32_t i = 0; i < c.columns; i += group) {
      const int32_t n = std::min(group, c.columns - i);
      stored_grid g{*to.scale, to.zero != nullptr ? *to.zero : f16{}};
      if (!to.fitted) {
        g = fit(f, x + i, n);
        to.scale[next] = g.scale;
        if (to.zero != nullptr) to.zero[next] = g.zero;
        ++next;
      }
      encode(f, g, x + i, n, codes + i);
    }
    store_row(f.codes, codes, c.columns, to.codes + r * row_bytes);
  }
}

/// One scale for the whole cell.
void fit_whole(const side_format& f, const cell_rows& c, const packed_rows& to) {
  alignas(64) float x[most_columns];
  value_range all;
  for (int32_t r = 0; r < c.rows; ++r) {
    load_row(c, r, x);
    const value_range own = range_of(x, c.columns);
    all.least = r == 0 ? own.least : std::min(all.least, own.least);
    all.largest = r == 0 ? own.largest : std::max(all.largest, own.largest);
  }
  const stored_grid g = is_fp8(f.codes) ? fit_fp8(std::max({-all.least, all.largest, 0.0f}), f.codes)
                                        : affine{f}.fit_range(all, [](stored_grid) { return 0.0f; });
  *to.scale = g.scale;
  if (to.zero != nullptr) *to.zero = g.zero;
}

bool pack(const side_format& f, bool keys, const cell_rows& c, const packed_rows& to) {
  if (c.columns > most_columns || c.columns % lanes != 0) return false;
  const bool whole = to.fitted || f.axis == scale_axis::head;
  const bool along = f.axis == (keys ? scale_axis::channel : scale_axis::token);
  // The search sums errors in sixteen lanes, in the order of the group's values.
  const int32_t unit = f.clip != clip_search::none ? fold_lanes_of_error : lanes;
  if (whole ? f.clip != clip_search::none : !along) return false;
  const int32_t group = whole || f.group_size == 0 ? c.columns : f.group_size;
  if (group % unit != 0 || c.columns % unit != 0) return false;
  if (whole && !to.fitted) fit_whole(f, c, to);
  packed_rows fitted = to;
  fitted.fitted = whole;
  pack_along(f, c, fitted, group);
  return true;
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
