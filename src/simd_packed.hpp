// SPDX-License-Identifier: Apache-2.0
// Attention of few rows over codes: what simd_scores.hpp and simd_values.hpp do, with codes that become
// floats in registers. The same operations in the same order as over an unpacked tile, so the same bits. For
// scales that change along a row of codes, or never; a tile that many rows share is unpacked once instead.
// Included once per instruction set, after simd_codes.hpp.
#include "codes.hpp"
#include "lookahead.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

constexpr int32_t most_scales = 512;  ///< of a tile and head
constexpr int32_t most_chunks = max_dim / row_codes;
/// Rows that the widest pass takes, and the runs of 32 codes that a pass of `rows` rows holds sums of.
constexpr int32_t wide_rows = lanes >= 16 ? 8 : 3;
constexpr int32_t chunks_of(int32_t rows) {
  return lanes >= 16 && rows <= 4 ? 2 : 1;
}

/// Codes and scales of a tile and head.
struct packed_view {
  const std::byte* row[tile_keys];  ///< V: codes of each slot; K: of the first channel, per 32 slots
  int64_t stride;                   ///< bytes from channel to channel of K
  int32_t each;                     ///< scales from row to row
  int32_t offset[most_chunks];      ///< scale of each 32 columns, counted from that of the row
  lookahead* far;                   ///< lines to ask for meanwhile, null = none
  float scales[2 * most_scales];    ///< scales, then minima
};

/// From chunk I on: 32 codes each as the numbers they stand for. Recursions, here and in multiply_rows, for
/// the reason given there.
template <int Type, int I, int C>
HWY_INLINE void load_values(const std::byte* const (&at)[C], const float* const (&scale)[C],
                            vec_f (&x)[C * code_vectors]) {
  if constexpr (I < C) {
    const tag_f d;
    vec_f own[code_vectors];
    load_code_floats<Type>(at[I], own);
    const auto s = hn::Set(d, scale[I][0]), z = hn::Set(d, scale[I][most_scales]);
    for (int i = 0; i < code_vectors; ++i) x[I * code_vectors + i] = hn::MulAdd(own[i], s, z);
    load_values<Type, I + 1>(at, scale, x);
  }
}

/// Vectors of R rows, from `from` on, or zero. Recursions again.
template <int I, int R, int NV>
HWY_INLINE void clear_sums(vec_f (&sum)[R][NV]) {
  if constexpr (I < R * NV) {
    sum[I / NV][I % NV] = hn::Zero(tag_f());
    clear_sums<I + 1>(sum);
  }
}
template <int I, int R, int NV>
HWY_INLINE void load_sums(const float* HWY_RESTRICT from, int64_t stride, vec_f (&sum)[R][NV]) {
  if constexpr (I < R * NV) {
    sum[I / NV][I % NV] = hn::LoadU(tag_f(), from + I / NV * stride + I % NV * lanes);
    load_sums<I + 1>(from, stride, sum);
  }
}
template <int I, int R, int NV>
HWY_INLINE void store_sums(const vec_f (&sum)[R][NV], float* HWY_RESTRICT to, int64_t stride) {
  if constexpr (I < R * NV) {
    hn::StoreU(sum[I / NV][I % NV], tag_f(), to + I / NV * stride + I % NV * lanes);
    store_sums<I + 1>(sum, to, stride);
  }
}

/// Scores of R rows against the slots of C chunks from `first` on; q is [dim][q_stride].
template <int Type, int R, int C>
HWY_NOINLINE void score_packed(const packed_view& k, int32_t first, const float* HWY_RESTRICT q,
                               int64_t q_stride, int32_t dim, float* HWY_RESTRICT w) {
  const tag_f d;
  constexpr int NV = C * code_vectors;
  vec_f sum[R][NV];
  clear_sums<0>(sum);
  const std::byte* at[C];
  const float* scale[C];
  for (int c = 0; c < C; ++c) {
    at[c] = k.row[first + c];
    scale[c] = k.scales + k.offset[first + c];
  }
  for (int32_t channel = 0; channel < dim;) {
    lookahead::share next{k.row[first], 0, dim - channel};
    if (k.far != nullptr) next = k.far->take(1, next.count);
    for (const int32_t end = channel + next.count; channel < end; ++channel, next.at += next.step) {
      vec_f x[NV];
      load_values<Type, 0>(at, scale, x);
      const std::byte* ask[1] = {next.at};
      multiply_rows<1, 0>(d, q, 1, x, sum, ask);
      for (int c = 0; c < C; ++c) {
        at[c] += k.stride;
        scale[c] += k.each;
      }
      q += q_stride;
    }
  }
  store_sums<0>(sum, w + first * row_codes, tile_keys);
}

/// Adds the weighted values of the slots in `seen`, ascending, to R rows, C chunks of channels at a time.
template <int Type, int R, int C>
HWY_NOINLINE void add_packed(const packed_view& v, uint64_t seen, const float* HWY_RESTRICT w,
                             float* HWY_RESTRICT acc, int32_t dim) {
  const tag_f d;
  constexpr int NV = C * code_vectors, chunk_bytes = 4 * code_bits(static_cast<code>(Type));
  for (int32_t first = 0; first < dim / row_codes; first += C) {
    vec_f sum[R][NV];
    float* to = acc + first * row_codes;
    load_sums<0>(to, dim, sum);
    for (uint64_t rest = seen; rest != 0;) {
      const int32_t begin = std::countr_zero(rest), last = begin + std::countr_one(rest >> begin);
      rest = last == tile_keys ? 0 : rest & (~uint64_t{0} << last);
      for (int32_t j = begin; j < last;) {
        lookahead::share next{v.row[begin], 0, last - j};
        if (v.far != nullptr) next = v.far->take(1, next.count);
        for (const int32_t end = j + next.count; j < end; ++j, next.at += next.step) {
          const std::byte* at[C];
          const float* scale[C];
          for (int c = 0; c < C; ++c) {
            at[c] = v.row[j] + (first + c) * chunk_bytes;
            scale[c] = v.scales + j * v.each + v.offset[first + c];
          }
          vec_f x[NV];
          load_values<Type, 0>(at, scale, x);
          const std::byte* ask[1] = {next.at};
          multiply_rows<1, 0>(d, w + j, tile_keys, x, sum, ask);
        }
      }
    }
    store_sums<0>(sum, to, dim);
  }
}

/// Calls f<R>(first row) for passes that cover `rows` rows.
template <class F>
HWY_INLINE void each_pass(int64_t rows, F f) {
  int64_t first = 0;
  if constexpr (wide_rows > 4) {
    for (; rows - first >= wide_rows; first += wide_rows) f(first, std::integral_constant<int, wide_rows>());
    for (; rows - first >= 4; first += 4) f(first, std::integral_constant<int, 4>());
  }
  for (; rows - first >= 3; first += 3) f(first, std::integral_constant<int, 3>());
  if (rows - first == 2) f(first, std::integral_constant<int, 2>());
  if (rows - first == 1) f(first, std::integral_constant<int, 1>());
}

template <int Type>
void score_codes(int64_t rows, const packed_view& k, const float* q, int32_t dim, float* w) {
  each_pass(rows, [&](int64_t row, auto r) {
    constexpr int R = decltype(r)::value, C = chunks_of(R);
    for (int32_t c = 0; c < tile_keys / row_codes; c += C) {
      score_packed<Type, R, C>(k, c, q + row, rows, dim, w + row * tile_keys);
    }
  });
}

template <int Type>
void add_codes(int64_t rows, const packed_view& v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  each_pass(rows, [&](int64_t row, auto r) {
    constexpr int R = decltype(r)::value;
    add_packed<Type, R, chunks_of(R)>(v, seen, w + row * tile_keys, acc + row * dim, dim);
  });
}

/// Calls f with the type as a constant; without Floats of integer codes only.
template <bool Floats = true, class F>
HWY_INLINE void with_code(int32_t type, F f) {
  if constexpr (Floats) {
    if (type == KVC_E4M3) return f(std::integral_constant<int, KVC_E4M3>());
    if (type == KVC_E5M2) return f(std::integral_constant<int, KVC_E5M2>());
  }
  switch (type) {
    case KVC_U8:
      return f(std::integral_constant<int, KVC_U8>());
    case KVC_U6:
      return f(std::integral_constant<int, KVC_U6>());
    case KVC_U5:
      return f(std::integral_constant<int, KVC_U5>());
    case KVC_U4:
      return f(std::integral_constant<int, KVC_U4>());
    case KVC_U3:
      return f(std::integral_constant<int, KVC_U3>());
    default:
      return f(std::integral_constant<int, KVC_U2>());
  }
}

// ---- views ----

/// Whether K, or V, of the tile can be read as it is packed, for one block of rows.
bool codes_direct(const attend_item& item, const tile& t, bool keys, int64_t blocks) {
  const kvc_plane& p = keys ? item.kv->k : v_plane(*item.kv);
  if (keys && item.turning != nullptr) return false;
  if (t.form != tile_form::sealed || !is_code(p.type) || blocks != 1 || exempt_cell(item, t, keys) != nullptr)
    return false;
  const int32_t columns = keys ? item.kv->block : item.kv->dim_v;
  if (!keys && columns % (2 * row_codes) != 0) return false;
  if (p.scale_kind == KVC_SCALE_HEAD || p.scale_kind == KVC_SCALE_TENSOR) return true;
  if (p.scale_kind != (keys ? KVC_SCALE_CHANNEL : KVC_SCALE_TOKEN)) return false;
  const int32_t groups = (columns + p.scale_group - 1) / p.scale_group;
  const int32_t cells = keys ? tile_keys / t.run_keys * item.kv->dim_k : tile_keys;
  return p.scale_group % row_codes == 0 && groups * cells <= most_scales;
}

/// Keys of one head. Runs that are absent repeat one that is there; their scores are masked.
void point_at_packed_keys(const attend_item& item, const tile& t, int32_t head, packed_view& k) {
  const kvc_kv& kv = *item.kv;
  int32_t some = 0;
  while (t.k[some] == nullptr) ++some;
  for (int32_t r = 0; r < tile_keys / t.run_keys; ++r) {
    const int32_t run = r < t.runs && t.k[r] != nullptr ? r : some;
    const code_cell c(kv, true, t.id[run], head);
    const bool one = c.kind == KVC_SCALE_HEAD || c.kind == KVC_SCALE_TENSOR;
    const int32_t count = one ? 1 : c.dim * c.groups;
    const auto slot = static_cast<int32_t>((t.first + run * t.run_keys) & (kv.block - 1));
    widen_scales(c, 0, count, k.scales + r * count, k.scales + most_scales + r * count);
    for (int32_t i = 0; i < t.run_keys / row_codes; ++i) {
      const int32_t chunk = r * t.run_keys / row_codes + i, column = slot + i * row_codes;
      k.row[chunk] = c.codes + column / row_codes * 4 * code_bits(static_cast<code>(c.type));
      k.offset[chunk] = r * count + (one ? 0 : column / c.group);
    }
    k.stride = c.row;
    k.each = one ? 0 : c.groups;
  }
}

/// Values of one head; absent slots are not visited.
void point_at_packed_values(const attend_item& item, const tile& t, int32_t head, packed_view& v) {
  const kvc_kv& kv = *item.kv;
  for (int32_t r = 0; r < t.runs; ++r) {
    if (t.v[r] == nullptr) continue;
    const code_cell c(kv, false, t.id[r], head);
    const bool one = c.kind == KVC_SCALE_HEAD || c.kind == KVC_SCALE_TENSOR;
    const auto slot = static_cast<int32_t>((t.first + r * t.run_keys) & (kv.block - 1));
    v.each = one ? 1 : c.groups;
    const int32_t first = r * t.run_keys * v.each, count = t.run_keys * v.each;
    if (one) {
      widen_scales(c, 0, 1, v.scales + first, v.scales + most_scales + first);
      std::fill_n(v.scales + first, count, v.scales[first]);
      std::fill_n(v.scales + most_scales + first, count, v.scales[most_scales + first]);
    } else {
      widen_scales(c, int64_t{slot} * c.groups, count, v.scales + first, v.scales + most_scales + first);
    }
    for (int32_t i = 0; i < t.run_keys; ++i) v.row[r * t.run_keys + i] = c.codes + (slot + i) * c.row;
    for (int32_t i = 0; i < kv.dim_v / row_codes; ++i) v.offset[i] = one ? 0 : i * row_codes / c.group;
  }
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
