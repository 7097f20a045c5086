// SPDX-License-Identifier: Apache-2.0
// Scores of packed keys as integer dot products, by the rule at dot_query. Per tile and head: codes become
// bytes, four channels of a key side by side; each query is rounded against the scales of each half of the
// tile; then every four bytes are multiplied and added up at once. Sums of integers are exact, so their order
// is free, and the order of keys is put back where a sum becomes a score. Included once per instruction set,
// after simd_packed.hpp.
//
//   vector of codes b   channel c:       slots 0 1 2 ... of a run of 16 | of the next | ...
//   after unpacking     vector 4 b + v:  slots 4 v .. 4 v + 3 of each run, of each the channels c .. c + 3
#include <cstring>

#include "codes.hpp"
#include "lookahead.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

constexpr int32_t byte_keys = 4 * lanes, byte_vectors = tile_keys / byte_keys;
constexpr int32_t quad_bytes = 4 * tile_keys;  ///< four channels of a tile
using tag_bytes = hn::FixedTag<uint8_t, byte_keys>;
using tag_words = hn::FixedTag<int16_t, 2 * lanes>;
using tag_sums = hn::FixedTag<int32_t, lanes>;
using vec_bytes = hn::Vec<tag_bytes>;
using vec_words = hn::Vec<tag_words>;
using vec_sums = hn::Vec<tag_sums>;

// ---- codes to bytes ----

#if HWY_TARGET == HWY_AVX3

/// Runs of 16 slots in the order in which the fewest shuffles leave them.
template <int Type>
constexpr int32_t run_of(int32_t quarter) {
  constexpr int32_t swapped[] = {0, 2, 1, 3};
  return Type == KVC_U8 ? quarter : swapped[quarter];
}

/// A part of `Bits` bits of 32 codes at `a` and at `b`; lanes of the result: first 16 of a, of b, last 16 of
/// a, of b.
template <int Bits>
HWY_INLINE vec_bytes part_of_both(const std::byte* a, const std::byte* b) {
  const tag_codes d;
  const hn::FixedTag<uint8_t, 32> wide;
  const tag_bytes all;
  const auto *p = reinterpret_cast<const uint8_t*>(a), *q = reinterpret_cast<const uint8_t*>(b);
  if constexpr (Bits == 4) {
    const auto both = hn::Combine(wide, hn::LoadU(d, q), hn::LoadU(d, p));
    return hn::And(hn::Combine(all, hn::ShiftRight<4>(both), both), hn::Set(all, 15));
  } else if constexpr (Bits == 2) {
    const hn::FixedTag<uint8_t, 8> half;
    const auto x = hn::LoadU(half, p), y = hn::LoadU(half, q);
    const auto both =
        hn::Combine(wide, hn::Combine(d, hn::ShiftRight<2>(y), y), hn::Combine(d, hn::ShiftRight<2>(x), x));
    return hn::And(hn::Combine(all, hn::ShiftRight<4>(both), both), hn::Set(all, 3));
  } else {
    uint32_t x = 0, y = 0;
    std::memcpy(&x, p, 4);
    std::memcpy(&y, q, 4);
    const uint64_t bits = uint64_t{(x >> 16) | (y & 0xffff0000u)} << 32 | (x & 0xffffu) | y << 16;
    uint8_t raw[8];
    std::memcpy(raw, &bits, sizeof raw);
    return hn::IfThenElseZero(hn::LoadMaskBits(all, raw), hn::Set(all, 1));
  }
}

/// A channel's codes of a tile: 32 at `a` and 32 at `b`.
template <int Type>
HWY_INLINE void load_channel(const std::byte* a, const std::byte* b, vec_bytes (&x)[byte_vectors]) {
  if constexpr (Type == KVC_U8) {
    const hn::FixedTag<uint8_t, 32> half;
    x[0] = hn::Combine(tag_bytes(), hn::LoadU(half, reinterpret_cast<const uint8_t*>(b)),
                       hn::LoadU(half, reinterpret_cast<const uint8_t*>(a)));
  } else if constexpr (Type == KVC_U6) {
    x[0] = hn::Or(part_of_both<4>(a, b), hn::ShiftLeft<4>(part_of_both<2>(a + 16, b + 16)));
  } else if constexpr (Type == KVC_U5) {
    x[0] = hn::Or(part_of_both<4>(a, b), hn::ShiftLeft<4>(part_of_both<1>(a + 16, b + 16)));
  } else if constexpr (Type == KVC_U4) {
    x[0] = part_of_both<4>(a, b);
  } else if constexpr (Type == KVC_U3) {
    x[0] = hn::Or(part_of_both<2>(a, b), hn::ShiftLeft<2>(part_of_both<1>(a + 8, b + 8)));
  } else {
    x[0] = part_of_both<2>(a, b);
  }
}

#else

template <int Type>
constexpr int32_t run_of(int32_t quarter) {
  return quarter;
}

template <int Type>
HWY_INLINE void load_channel(const std::byte* a, const std::byte* b, vec_bytes (&x)[byte_vectors]) {
  vec_codes codes[2];
  for (int i = 0; i < 2; ++i) {
    load_codes<Type>(i == 0 ? a : b, codes);
#if HWY_TARGET == HWY_AVX2
    x[i] = hn::Combine(tag_bytes(), codes[1], codes[0]);
#else
    x[2 * i] = codes[0];
    x[2 * i + 1] = codes[1];
#endif
  }
}

#endif

/// Bytes [dim / 4][tile_keys][4] of a tile and head, slots as drawn above.
template <int Type>
HWY_NOINLINE void spread_codes(const packed_view& k, int32_t dim, uint8_t* HWY_RESTRICT to) {
  const tag_bytes d;
  const hn::Repartition<uint16_t, tag_bytes> d16;
  const std::byte *a = k.row[0], *b = k.row[1];
  for (int32_t quad = 0; quad < dim / 4;) {
    lookahead::share next{a, 0, dim / 4 - quad};
    if (k.far != nullptr) next = k.far->take(4, next.count);
    for (const int32_t end = quad + next.count; quad < end; ++quad, next.at += next.step, to += quad_bytes) {
      vec_bytes x[4][byte_vectors];
      for (int c = 0; c < 4; ++c, a += k.stride, b += k.stride) {
        load_channel<Type>(a, b, x[c]);
        if (k.far != nullptr) fetch(next.at + c * line_bytes);
      }
      for (int i = 0; i < byte_vectors; ++i) {
        const auto low = hn::BitCast(d16, hn::InterleaveLower(d, x[0][i], x[1][i]));
        const auto high = hn::BitCast(d16, hn::InterleaveUpper(d, x[0][i], x[1][i]));
        const auto low2 = hn::BitCast(d16, hn::InterleaveLower(d, x[2][i], x[3][i]));
        const auto high2 = hn::BitCast(d16, hn::InterleaveUpper(d, x[2][i], x[3][i]));
        uint8_t* at = to + i * 4 * byte_keys;
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d16, low, low2)), d, at);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d16, low, low2)), d, at + byte_keys);
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d16, high, high2)), d, at + 2 * byte_keys);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d16, high, high2)), d, at + 3 * byte_keys);
      }
    }
  }
}

// ---- queries ----

/// Queries as rows, each filled with zeros.
void copy_query_rows(const attend_item& item, const attend_scratch& s) {
  const row_blocks blocks(item);
  const int32_t dim = item.kv->dim_k, row = round_up_lanes(dim);
  float* to = s.q_rows;
  for (int64_t b = 0; b < blocks.count * item.heads; ++b) {
    const int64_t in_head = blocks.begin(b % blocks.count);
    const int64_t n = blocks.begin(b % blocks.count + 1) - in_head;
    const float* from = s.q + (b / blocks.count * blocks.rows + in_head) * dim;
    for (int64_t i = 0; i < n; ++i, to += row) {
      for (int32_t c = 0; c < row; ++c) to[c] = c < dim ? from[c * n + i] : 0.0f;
    }
  }
}

/// Scales of a group and the values of the middle code, per channel, filled with zeros.
struct dot_scales {
  float scale[max_dim], middle[max_dim];
};

void find_dot_scales(const code_cell& c, int32_t slot, dot_scales& out) {
  constexpr int32_t most = max_dim * 4;  // groups of 32 in a block of 128
  const tag_f d;
  const auto h = hn::Set(d, static_cast<float>(middle_code(c.type)));
  if (c.kind == KVC_SCALE_HEAD || c.kind == KVC_SCALE_TENSOR) {
    widen_scales(c, 0, 1, out.scale, out.middle);
    std::fill_n(out.scale, c.dim, out.scale[0]);
    std::fill_n(out.middle, c.dim, out.middle[0]);
  } else if (c.groups == 1) {
    widen_scales(c, 0, c.dim, out.scale, out.middle);
  } else {
    float scale[most], zero[most];
    widen_scales(c, 0, c.dim * c.groups, scale, zero);
    for (int32_t i = 0, at = slot / c.group; i < c.dim; ++i, at += c.groups) {
      out.scale[i] = scale[at];
      out.middle[i] = zero[at];
    }
  }
  for (int32_t i = c.dim; i < round_up_lanes(c.dim); ++i) out.scale[i] = out.middle[i] = 0;
  for (int32_t i = 0; i < round_up_lanes(c.dim); i += lanes) {
    const auto zero = hn::LoadU(d, out.middle + i);
    hn::StoreU(hn::MulAdd(h, hn::LoadU(d, out.scale + i), zero), d, out.middle + i);
  }
}

/// The sum of 16 lanes as fold_lanes does it.
HWY_INLINE float fold_bias(const vec_f (&b)[bias_lanes / lanes]) {
  float all[bias_lanes];
  for (int i = 0; i < bias_lanes / lanes; ++i) hn::StoreU(b[i], tag_f(), all + i * lanes);
  const tag_8 d8;
  const hn::FixedTag<float, 4> d4;
  const auto eight = hn::Add(hn::LoadU(d8, all), hn::LoadU(d8, all + 8));
  hn::StoreU(eight, d8, all);
  const auto four = hn::Add(hn::LoadU(d4, all), hn::LoadU(d4, all + 4));
  hn::StoreU(four, d4, all);
  return (all[0] + all[2]) + (all[1] + all[3]);
}

/// Rounds a query for the keys of one group.
HWY_INLINE dot_query round_query(const float* HWY_RESTRICT q, const dot_scales& s, int32_t dim, int32_t h,
                                 int8_t* HWY_RESTRICT to) {
  const tag_f d;
  constexpr int parts = bias_lanes / lanes;
  vec_f largest = hn::Zero(d), bias[parts];
  for (int i = 0; i < parts; ++i) bias[i] = hn::Zero(d);
  for (int32_t c = 0; c < dim; c += bias_lanes) {
    for (int i = 0; i < parts; ++i) {
      const int32_t at = c + i * lanes;
      const auto x = hn::LoadU(d, q + at);
      largest = hn::Max(largest, hn::Abs(hn::Mul(x, hn::LoadU(d, s.scale + at))));
      bias[i] = hn::MulAdd(x, hn::LoadU(d, s.middle + at), bias[i]);
    }
  }
  const float a = hn::GetLane(hn::MaxOfLanes(d, largest));
  const auto up = hn::Set(d, a >= least_product ? 127 / a : 0.0f);
  auto sum = hn::Zero(tag_sums());
  for (int32_t c = 0; c < dim; c += lanes) {
    const auto i = hn::NearestInt(hn::Mul(hn::Mul(hn::LoadU(d, q + c), hn::LoadU(d, s.scale + c)), up));
    sum = hn::Add(sum, i);
    const hn::Rebind<int8_t, tag_sums> d8;
    const int32_t left = dim - c;
    if (left >= lanes) {
      hn::StoreU(hn::DemoteTo(d8, i), d8, to + c);
    } else {
      int8_t some[lanes];
      hn::StoreU(hn::DemoteTo(d8, i), d8, some);
      std::memcpy(to + c, some, static_cast<size_t>(left));
    }
  }
  return {a / 127, fold_bias(bias), -h * hn::GetLane(hn::SumOfLanes(tag_sums(), sum))};
}

// ---- dot products ----

/// Codes as multiply_quads wants them.
template <bool Vnni>
struct quad_codes {
  vec_bytes all;
  HWY_INLINE void load(const uint8_t* from) {
    all = hn::LoadU(tag_bytes(), from);
#if HWY_TARGET == HWY_AVX3
    asm("" : "+v"(all.raw));  // else it is loaded once more for every row
#endif
  }
};
template <>
struct quad_codes<false> {
  vec_words even, odd;
  HWY_INLINE void load(const uint8_t* from) {
    const auto x = hn::BitCast(tag_words(), hn::LoadU(tag_bytes(), from));
    even = hn::And(x, hn::Set(tag_words(), 255));
    odd = hn::BitCast(tag_words(), hn::ShiftRight<8>(hn::BitCast(hn::RebindToUnsigned<tag_words>(), x)));
  }
};

/// Products of neighbours, added in pairs.
HWY_INLINE vec_sums pair_sums(vec_words a, vec_words b) {
#if HWY_TARGET == HWY_NEON
  return vec_sums(
      vpaddq_s32(vmull_s16(vget_low_s16(a.raw), vget_low_s16(b.raw)), vmull_high_s16(a.raw, b.raw)));
#else
  auto unused = hn::Zero(tag_sums());
  return hn::ReorderWidenMulAccumulate(tag_sums(), a, b, hn::Zero(tag_sums()), unused);
#endif
}

/// sum += the four products of each lane: codes without sign, i with. Exact.
template <bool Vnni>
HWY_INLINE void multiply_quads(const quad_codes<Vnni>& codes, vec_sums i, vec_sums& sum) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (Vnni) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(codes.all.raw), "v"(i.raw));
    return;
  }
#endif
  if constexpr (!Vnni) {
    const auto words = hn::BitCast(tag_words(), i);
    sum = hn::Add(sum, pair_sums(codes.even, hn::ShiftRight<8>(hn::ShiftLeft<8>(words))));
    sum = hn::Add(sum, pair_sums(codes.odd, hn::ShiftRight<8>(words)));
  }
}

/// What the rows of a pass are multiplied with.
struct dot_pass {
  const uint8_t* codes;    ///< [dim / 4][tile_keys][4]
  const int8_t* q;         ///< [rows][2][dim]
  const dot_query* terms;  ///< [rows][2]
  int32_t dim;
  bool halves;  ///< of the tile have scales of their own; else only the first counts
  float* w;     ///< [rows][tile_keys]
};

/// `first` where vector number `b` of codes holds slots below 32, `second` elsewhere; all `first` if both are
/// the same.
template <int Type, bool Halves, class D>
HWY_INLINE hn::Vec<D> by_half([[maybe_unused]] D d, [[maybe_unused]] int32_t b, hn::Vec<D> first,
                              [[maybe_unused]] hn::Vec<D> second) {
  if constexpr (!Halves) return first;
#if HWY_TARGET == HWY_AVX3
  const uint8_t swapped[8] = {0xf0, 0xf0}, plain[8] = {0x00, 0xff};
  return hn::IfThenElse(hn::LoadMaskBits(d, run_of<Type>(1) == 1 ? plain : swapped), second, first);
#else
  return b < byte_vectors / 2 ? first : second;
#endif
}

/// Scores of the vectors 4 b + v on, in the order of keys.
template <int Type, int NV>
HWY_INLINE void put_back(const vec_f (&x)[NV], int32_t b, int32_t v, float* HWY_RESTRICT w) {
  const tag_f d;
  float* to = w + b * byte_keys + 4 * v;
#if HWY_TARGET == HWY_AVX3
  static_cast<void>(v);
  const auto low = _mm512_shuffle_f32x4(x[0].raw, x[1].raw, 0x88);
  const auto low2 = _mm512_shuffle_f32x4(x[2].raw, x[3].raw, 0x88);
  const auto high = _mm512_shuffle_f32x4(x[0].raw, x[1].raw, 0xdd);
  const auto high2 = _mm512_shuffle_f32x4(x[2].raw, x[3].raw, 0xdd);
  hn::StoreU(vec_f{_mm512_shuffle_f32x4(low, low2, 0x88)}, d, to + 16 * run_of<Type>(0));
  hn::StoreU(vec_f{_mm512_shuffle_f32x4(high, high2, 0x88)}, d, to + 16 * run_of<Type>(1));
  hn::StoreU(vec_f{_mm512_shuffle_f32x4(low, low2, 0xdd)}, d, to + 16 * run_of<Type>(2));
  hn::StoreU(vec_f{_mm512_shuffle_f32x4(high, high2, 0xdd)}, d, to + 16 * run_of<Type>(3));
#elif HWY_TARGET == HWY_AVX2
  hn::StoreU(hn::ConcatLowerLower(d, x[1], x[0]), d, to);
  hn::StoreU(hn::ConcatUpperUpper(d, x[1], x[0]), d, to + 16);
#else
  for (int i = 0; i < NV; ++i) hn::StoreU(x[i], d, to + i * lanes);
#endif
}

/// Scores of R rows against NV vectors from number `first` on.
template <int Type, bool Vnni, bool Halves, int R, int NV>
HWY_INLINE void dot_some(const dot_pass& p, int32_t first) {
  const tag_sums d;
  const tag_f df;
  const int32_t b = first / 4;
  const uint8_t* codes = p.codes + first * byte_keys;
  const auto each = [&](int r, auto tag, auto member) HWY_ATTR {
    return by_half<Type, Halves>(tag, b, hn::Set(tag, p.terms[2 * r].*member),
                                 hn::Set(tag, p.terms[2 * r + 1].*member));
  };
  vec_sums sum[R][NV];
  for (int r = 0; r < R; ++r) {
    const auto base = each(r, d, &dot_query::base);
    for (int v = 0; v < NV; ++v) sum[r][v] = base;
  }
  for (int32_t c = 0; c < p.dim; c += 4, codes += quad_bytes) {
    quad_codes<Vnni> x[NV];
    for (int v = 0; v < NV; ++v) x[v].load(codes + v * byte_keys);
    for (int r = 0; r < R; ++r) {
      int32_t quad[2];
      const int8_t* q = p.q + 2 * r * p.dim + c;
      std::memcpy(&quad[0], q, 4);
      std::memcpy(&quad[1], q + (Halves ? p.dim : 0), 4);
      const auto i = by_half<Type, Halves>(d, b, hn::Set(d, quad[0]), hn::Set(d, quad[1]));
      for (int v = 0; v < NV; ++v) multiply_quads<Vnni>(x[v], i, sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    const auto step = each(r, df, &dot_query::step), bias = each(r, df, &dot_query::bias);
    vec_f x[NV];
    for (int v = 0; v < NV; ++v) x[v] = hn::MulAdd(hn::ConvertTo(df, sum[r][v]), step, bias);
    put_back<Type, NV>(x, b, first % 4, p.w + r * tile_keys);
  }
}

/// Rows of the widest pass, and vectors of keys that a pass holds sums of.
constexpr int32_t most_dot_rows(bool vnni) {
  return vnni ? 6 : 4;
}
constexpr int32_t dot_vectors = lanes == 8 ? 2 : 4;

template <int Type, bool Vnni, bool Halves, int R>
HWY_NOINLINE void dot_rows(const dot_pass& p) {
  for (int32_t v = 0; v < key_vectors; v += dot_vectors) {
    dot_some<Type, Vnni, Halves, R, dot_vectors>(p, v);
  }
}
template <int Type, bool Vnni, bool Halves, int R = 1>
void dot_block(int64_t rows, const dot_pass& p) {
  if constexpr (R < most_dot_rows(Vnni)) {
    if (rows > R) return dot_block<Type, Vnni, Halves, R + 1>(rows, p);
  }
  dot_rows<Type, Vnni, Halves, R>(p);
}

/// Any number of rows, in passes as even as possible.
template <int Type, bool Vnni>
void dot_passes(int64_t rows, dot_pass p) {
  const int64_t passes = (rows + most_dot_rows(Vnni) - 1) / most_dot_rows(Vnni);
  for (int64_t i = 0; i < passes; ++i) {
    const int64_t n = rows / passes + (i < rows % passes ? 1 : 0);
    p.halves ? dot_block<Type, Vnni, true>(n, p) : dot_block<Type, Vnni, false>(n, p);
    p.q += n * 2 * p.dim;
    p.terms += n * 2;
    p.w += n * tile_keys;
  }
}

// ---- a tile ----

/// Scores of the exempt keys at the front of the tile, by the rule of open ones.
void score_exempt(const kvc_kv& kv, const std::byte* keys, int64_t rows, const float* q, float* w) {
  const int32_t dim = kv.dim_k;
  float k[4][max_dim];
  for (int32_t j = 0; j < kv.exempt; ++j) {
    const std::byte* from = keys + j * kv.exempt_k.token_stride;
    for (int32_t d = 0; d < dim; ++d) k[j][d] = load(from + d * kv.exempt_k.dim_stride, kv.exempt_k.type);
  }
  for (int64_t r = 0; r < rows; ++r, q += round_up_lanes(dim), w += tile_keys) {
    float sum[4] = {};
    for (int32_t d = 0; d < dim; ++d) {
      for (int32_t j = 0; j < kv.exempt; ++j) sum[j] = std::fma(q[d], k[j][d], sum[j]);
    }
    std::copy_n(sum, kv.exempt, w);
  }
}

/// Rounds the queries of a head for the halves of the tile; returns whether these differ.
bool round_queries(const attend_item& item, const tile& t, int32_t head, const float* q, int8_t* bytes,
                   dot_query* terms) {
  const kvc_kv& kv = *item.kv;
  const int32_t dim = kv.dim_k;
  const bool halves =
      t.run_keys < tile_keys || (kv.k.scale_kind == KVC_SCALE_CHANNEL && kv.k.scale_group < tile_keys);
  for (int32_t half = 0; half < (halves ? 2 : 1); ++half) {
    const int32_t run = half * (tile_keys / 2) / t.run_keys;
    if (run >= t.runs || t.k[run] == nullptr) continue;  // nobody sees these scores
    const auto slot = static_cast<int32_t>((t.first + half * (tile_keys / 2)) & (kv.block - 1));
    const code_cell c(kv, true, t.id[run], head);
    dot_scales s;
    find_dot_scales(c, slot, s);
    for (int64_t r = 0; r < item.per_head(); ++r) {
      terms[2 * r + half] =
          round_query(q + r * round_up_lanes(dim), s, dim, middle_code(c.type), bytes + (2 * r + half) * dim);
    }
  }
  return halves;
}

/// Where the codes of the tile's halves begin. What is absent repeats what is there; its scores are masked.
void point_at_halves(const attend_item& item, const tile& t, int32_t head, packed_view& k) {
  const kvc_kv& kv = *item.kv;
  int32_t some = 0;
  while (t.k[some] == nullptr) ++some;
  for (int32_t half = 0; half < 2; ++half) {
    const int32_t wanted = half * row_codes / t.run_keys;
    const int32_t run = wanted < t.runs && t.k[wanted] != nullptr ? wanted : some;
    const code_cell c(kv, true, t.id[run], head);
    const auto slot = static_cast<int32_t>((t.first + half * row_codes) & (kv.block - 1));
    k.row[half] = c.codes + slot / row_codes * 4 * code_bits(static_cast<code>(c.type));
    k.stride = c.row;
  }
}

/// Scores of all heads of the item against the packed keys of a tile. `far`: lines to ask for, null = none.
void score_dots(const attend_item& item, const attend_scratch& s, const tile& t, lookahead* far) {
  const kvc_kv& kv = *item.kv;
  const int32_t dim = kv.dim_k;
  const bool vnni = HWY_TARGET == HWY_AVX3 && may_use_vnni();
  const std::byte* exempt = exempt_cell(item, t, true);
  auto* codes = reinterpret_cast<uint8_t*>(s.k_tile);
  packed_view k;
  k.far = far;
  for (int32_t h = 0; h < item.heads; ++h) {
    const int64_t first = h * item.per_head();
    const float* q = s.q_rows + first * round_up_lanes(dim);
    float* w = s.weights + first * tile_keys;
    const bool halves = round_queries(item, t, item.head + h, q, s.q_bytes, s.q_dots);
    const dot_pass pass{codes, s.q_bytes, s.q_dots, dim, halves, w};
    point_at_halves(item, t, item.head + h, k);
    with_code<false>(kv.k.type, [&](auto type) {
      constexpr int Type = decltype(type)::value;
      spread_codes<Type>(k, dim, codes);
      if (HWY_TARGET == HWY_AVX3 && vnni)
        return dot_passes<Type, HWY_TARGET == HWY_AVX3>(item.per_head(), pass);
      dot_passes<Type, false>(item.per_head(), pass);
    });
    if (exempt != nullptr) {
      score_exempt(kv, exempt + h * kv.exempt_k.head_stride, item.per_head(), q, w);
    }
  }
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
