// SPDX-License-Identifier: Apache-2.0
// The SIMD kernels, written once with Highway and compiled for every target that has fused multiply-add.
// Vectors run across keys for scores and across channels for values, so no result ever needs a horizontal
// sum and all targets perform the operations of kernel.hpp in the same order per element.
//
// Registers hold R rows x NV vectors. Rows are (query row, head of the group) pairs; how they are grouped
// changes speed, never bits.
#include "kernel.hpp"

#undef HWY_DISABLED_TARGETS
// Without fused multiply-add the bits would differ; scalable vectors do not fit fixed register blocks.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_WASM | HWY_PPC8)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernel_simd.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <bit>

#include "element.hpp"
#include "exp2.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3
constexpr int32_t this_target = KVC_TARGET_AVX512, lanes = 16, registers = 24;
#elif HWY_TARGET == HWY_AVX2
constexpr int32_t this_target = KVC_TARGET_AVX2, lanes = 8, registers = 12;
#else
constexpr int32_t this_target = KVC_TARGET_NEON, lanes = 4, registers = 24;
#endif
constexpr int32_t max_rows = 6;  ///< rows of a register block
constexpr int32_t key_vectors = tile_keys / lanes;
/// Accumulator vectors per row of a block of R rows.
template <int R>
constexpr int32_t vectors_for = R == 1               ? 8
                                : R * 4 <= registers ? 4
                                                     : 2;

using tag_f = hn::FixedTag<float, lanes>;
using vec_f = hn::Vec<tag_f>;
using tag_8 = hn::FixedTag<float, 8>;

// ---- loads that widen ----

template <class D>
HWY_INLINE hn::Vec<D> load_as(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load_as(D d, const f16* p) {
  const hn::Rebind<hwy::float16_t, D> dh;
  return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p)));
}
template <class D>
HWY_INLINE hn::Vec<D> load_as(D d, const bf16* p) {
  const hn::Rebind<uint16_t, D> dh;
  const hn::Rebind<uint32_t, D> du;
  const auto wide = hn::PromoteTo(du, hn::LoadU(dh, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(d, hn::ShiftLeft<16>(wide));
}

// ---- the functions of exp2.hpp, step by step ----

HWY_INLINE vec_f exp2_core(vec_f x) {
  const tag_f d;
  const hn::RebindToUnsigned<tag_f> du;
  const auto magic = hn::Set(d, round_magic);
  const auto shifted = hn::Add(x, magic);
  const auto f = hn::Sub(x, hn::Sub(shifted, magic));
  auto p = hn::Set(d, exp2_c[5]);
  for (int i = 4; i >= 0; --i) p = hn::MulAdd(p, f, hn::Set(d, exp2_c[i]));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto n = hn::Sub(hn::BitCast(du, shifted), hn::BitCast(du, magic));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(du, 127u)))));
}

HWY_INLINE vec_f exp2_weight(vec_f x) {
  const auto least = hn::Set(tag_f(), exp2_min);
  return hn::IfThenZeroElse(hn::Lt(x, least), exp2_core(hn::Max(least, x)));
}

HWY_INLINE vec_f tanh_fixed(vec_f y) {
  const tag_f d;
  const auto one = hn::Set(d, 1.0f);
  const auto a = hn::Abs(y);
  const auto e = exp2_core(hn::Mul(hn::Min(hn::Set(d, tanh_large), a), hn::Set(d, two_log2_e)));
  const auto big = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  const auto y2 = hn::Mul(y, y);
  auto p = hn::Set(d, tanh_c[4]);
  for (int i = 3; i >= 0; --i) p = hn::MulAdd(p, y2, hn::Set(d, tanh_c[i]));
  const auto small = hn::MulAdd(hn::Mul(y, y2), p, y);
  return hn::IfThenElse(hn::Lt(a, hn::Set(d, tanh_small)), small, hn::CopySign(big, y));
}

// ---- what a tile looks like to the inner loops ----

struct key_view {
  const std::byte* keys[key_vectors];  ///< first channel of each vector of keys
  const std::byte* next[key_vectors];  ///< the same of the tile that comes next, if `ahead`
  int64_t stride;                      ///< bytes from channel to channel
  int32_t type;
  bool ahead;
};
struct value_view {
  const std::byte* rows[tile_keys];  ///< first channel of each present key
  const std::byte* next[tile_keys];  ///< the same of the tile that comes next, if `ahead`
  int32_t type;
  bool ahead;
};

/// Decode reads every byte once, so it waits for memory unless the next tile is asked for early. The second
/// level is the target: two tiles do not fit the first beside each other.
HWY_INLINE void fetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
}

/// Rows of one head of an item in blocks of at most max_rows, as even as possible.
struct row_blocks {
  int64_t rows, count;
  explicit row_blocks(const attend_item& item)
      : rows(item.per_head()), count((rows + max_rows - 1) / max_rows) {}
  int64_t begin(int64_t i) const { return i * (rows / count) + std::min(i, rows % count); }
};

// ---- scores ----

/// Scores of R rows against NV vectors of keys; q is [dim][R]. While it reads a channel it asks memory for
/// the same channel of the tile that comes next, if there is one.
template <class T, int R, int NV, bool Ahead>
HWY_INLINE void score_vectors(const key_view& k, int32_t first, const float* HWY_RESTRICT q, int32_t dim,
                              float* HWY_RESTRICT w) {
  const tag_f d;
  vec_f sum[R][NV];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < NV; ++v) sum[r][v] = hn::Zero(d);
  }
  for (int32_t c = 0; c < dim; ++c) {
    vec_f key[NV];
    for (int v = 0; v < NV; ++v) {
      key[v] = load_as(d, reinterpret_cast<const T*>(k.keys[first + v] + c * k.stride));
      if constexpr (Ahead) fetch(k.next[first + v] + c * k.stride);
    }
    for (int r = 0; r < R; ++r) {
      const auto x = hn::Set(d, q[c * R + r]);
      for (int v = 0; v < NV; ++v) sum[r][v] = hn::MulAdd(x, key[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < NV; ++v) hn::StoreU(sum[r][v], d, w + r * tile_keys + (first + v) * lanes);
  }
}

template <class T, int R>
HWY_NOINLINE void score_rows(const key_view& k, const float* q, int32_t dim, float* w) {
  constexpr int32_t step = std::min(vectors_for<R>, key_vectors);
  for (int32_t v = 0; v < key_vectors; v += step) {
    if (k.ahead) {
      score_vectors<T, R, step, true>(k, v, q, dim, w);
    } else {
      score_vectors<T, R, step, false>(k, v, q, dim, w);
    }
  }
}

template <class T>
void score_block(int64_t rows, const key_view& k, const float* q, int32_t dim, float* w) {
  switch (rows) {
    case 1:
      return score_rows<T, 1>(k, q, dim, w);
    case 2:
      return score_rows<T, 2>(k, q, dim, w);
    case 3:
      return score_rows<T, 3>(k, q, dim, w);
    case 4:
      return score_rows<T, 4>(k, q, dim, w);
    case 5:
      return score_rows<T, 5>(k, q, dim, w);
    default:
      return score_rows<T, 6>(k, q, dim, w);
  }
}

void score_any(int64_t rows, const key_view& k, const float* q, int32_t dim, float* w) {
  if (k.type == KVC_F32) return score_block<float>(rows, k, q, dim, w);
  if (k.type == KVC_F16) return score_block<f16>(rows, k, q, dim, w);
  score_block<bf16>(rows, k, q, dim, w);
}

// ---- weights ----

/// Caps and masks a row's scores in place; returns their maximum and `top`.
HWY_INLINE float mask_scores(float* HWY_RESTRICT w, uint64_t seen, float cap_log2, float top) {
  const tag_f d;
  auto highest = hn::Set(d, top);
  const auto hidden = hn::Set(d, -HUGE_VALF);
  for (int32_t v = 0; v < key_vectors; ++v) {
    auto s = hn::LoadU(d, w + v * lanes);
    if (cap_log2 != 0) s = hn::Mul(hn::Set(d, cap_log2), tanh_fixed(s));
    if (seen != ~uint64_t{0}) {
      const uint64_t bits = seen >> (v * lanes);
      uint8_t raw[8];
      std::memcpy(raw, &bits, sizeof raw);
      s = hn::IfThenElse(hn::LoadMaskBits(d, raw), s, hidden);
    }
    hn::StoreU(s, d, w + v * lanes);
    highest = hn::Max(highest, s);
  }
  return hn::GetLane(hn::MaxOfLanes(d, highest));
}

/// Scores to weights: new maximum, weights, lane sums, rescaled accumulators.
HWY_INLINE void soften(float* HWY_RESTRICT w, uint64_t seen, float cap_log2, float& max,
                       float* HWY_RESTRICT sums, float* HWY_RESTRICT acc, int32_t dim_v) {
  const tag_f d;
  const float top = mask_scores(w, seen, cap_log2, max);
  const float shrink = top == max ? 1.0f : detail::exp2_weight(max - top);
  max = top;
  const auto base = hn::Set(d, top);
  constexpr int32_t per = sum_lanes / lanes;
  for (int32_t i = 0; i < per; ++i) {
    vec_f p[4];
    for (int32_t k = 0; k < 4; ++k) {
      float* at = w + (k * per + i) * lanes;
      p[k] = exp2_weight(hn::Sub(hn::LoadU(d, at), base));
      hn::StoreU(p[k], d, at);
    }
    const auto sum = hn::Add(hn::Add(p[0], p[1]), hn::Add(p[2], p[3]));
    const auto before = hn::LoadU(d, sums + i * lanes);
    hn::StoreU(hn::MulAdd(before, hn::Set(d, shrink), sum), d, sums + i * lanes);
  }
  if (shrink == 1.0f) return;
  const tag_8 d8;
  for (int32_t c = 0; c < dim_v; c += 8) {
    hn::StoreU(hn::Mul(hn::LoadU(d8, acc + c), hn::Set(d8, shrink)), d8, acc + c);
  }
}

// ---- values ----

/// Adds the weighted values of the keys in `seen`, ascending, to NV vectors of R accumulator rows.
template <class T, int R, int NV, bool Ahead, class D>
HWY_INLINE void add_vectors(D d, const value_view& v, int32_t channel, uint64_t seen,
                            const float* HWY_RESTRICT w, float* HWY_RESTRICT acc, int32_t dim) {
  constexpr int32_t n = static_cast<int32_t>(hn::MaxLanes(D()));
  hn::Vec<D> sum[R][NV];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < NV; ++i) sum[r][i] = hn::LoadU(d, acc + r * dim + i * n);
  }
  while (seen != 0) {
    const int32_t first = std::countr_zero(seen);
    const int32_t last = first + std::countr_one(seen >> first);
    for (int32_t j = first; j < last; ++j) {
      const T* row = reinterpret_cast<const T*>(v.rows[j]) + channel;
      hn::Vec<D> value[NV];
      for (int i = 0; i < NV; ++i) value[i] = load_as(d, row + i * n);
      if constexpr (Ahead) {
        const T* next = reinterpret_cast<const T*>(v.next[j]) + channel;
        for (int i = 0; i < NV; i += std::max(1, 64 / int(n * sizeof(T)))) fetch(next + i * n);
      }
      for (int r = 0; r < R; ++r) {
        const auto x = hn::Set(d, w[r * tile_keys + j]);
        for (int i = 0; i < NV; ++i) sum[r][i] = hn::MulAdd(x, value[i], sum[r][i]);
      }
    }
    seen = last == tile_keys ? 0 : seen & (~uint64_t{0} << last);
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < NV; ++i) hn::StoreU(sum[r][i], d, acc + r * dim + i * n);
  }
}

template <class T, int R, bool Ahead>
HWY_INLINE void add_channels(const value_view& v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  const tag_f d;
  constexpr int32_t wide = vectors_for<R>;
  int32_t c = 0;
  for (; c + wide * lanes <= dim; c += wide * lanes) {
    add_vectors<T, R, wide, Ahead>(d, v, c, seen, w, acc + c, dim);
  }
  if constexpr (wide > 4) {
    for (; c + 4 * lanes <= dim; c += 4 * lanes) add_vectors<T, R, 4, Ahead>(d, v, c, seen, w, acc + c, dim);
  }
  if constexpr (wide > 2) {
    for (; c + 2 * lanes <= dim; c += 2 * lanes) add_vectors<T, R, 2, Ahead>(d, v, c, seen, w, acc + c, dim);
  }
  for (; c + lanes <= dim; c += lanes) add_vectors<T, R, 1, Ahead>(d, v, c, seen, w, acc + c, dim);
  if constexpr (lanes > 8) {
    if (c < dim) add_vectors<T, R, 1, false>(tag_8(), v, c, seen, w, acc + c, dim);
  }
}

template <class T, int R>
HWY_NOINLINE void add_rows(const value_view& v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  if (v.ahead) return add_channels<T, R, true>(v, seen, w, acc, dim);
  add_channels<T, R, false>(v, seen, w, acc, dim);
}

template <class T>
void add_block(int64_t rows, const value_view& v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  switch (rows) {
    case 1:
      return add_rows<T, 1>(v, seen, w, acc, dim);
    case 2:
      return add_rows<T, 2>(v, seen, w, acc, dim);
    case 3:
      return add_rows<T, 3>(v, seen, w, acc, dim);
    case 4:
      return add_rows<T, 4>(v, seen, w, acc, dim);
    case 5:
      return add_rows<T, 5>(v, seen, w, acc, dim);
    default:
      return add_rows<T, 6>(v, seen, w, acc, dim);
  }
}

void add_any(int64_t rows, const value_view& v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  if (seen == 0) return;
  if (v.type == KVC_F32) return add_block<float>(rows, v, seen, w, acc, dim);
  if (v.type == KVC_F16) return add_block<f16>(rows, v, seen, w, acc, dim);
  add_block<bf16>(rows, v, seen, w, acc, dim);
}

// ---- packing: any strides to float tiles ----

/// Transposes 8 keys x 8 channels held in rows, to[c * tile_keys + key].
HWY_INLINE void transpose_8x8(const hn::Vec<tag_8> (&in)[8], float* HWY_RESTRICT to) {
#if HWY_TARGET == HWY_NEON
  float rows[8][8];
  for (int i = 0; i < 8; ++i) hn::StoreU(in[i], tag_8(), rows[i]);
  for (int c = 0; c < 8; ++c) {
    for (int i = 0; i < 8; ++i) to[c * tile_keys + i] = rows[i][c];
  }
#else
  const tag_8 d;
  const hn::RepartitionToWide<tag_8> dd;
  hn::Vec<tag_8> a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = hn::InterleaveLower(d, in[i], in[i + 1]);
    a[i + 1] = hn::InterleaveUpper(d, in[i], in[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int k = 0; k < 2; ++k) {
      const auto x = hn::BitCast(dd, a[i + k]), y = hn::BitCast(dd, a[i + k + 2]);
      b[i + 2 * k] = hn::BitCast(d, hn::InterleaveLower(dd, x, y));
      b[i + 2 * k + 1] = hn::BitCast(d, hn::InterleaveUpper(dd, x, y));
    }
  }
  for (int i = 0; i < 4; ++i) {
    hn::StoreU(hn::ConcatLowerLower(d, b[i + 4], b[i]), d, to + i * tile_keys);
    hn::StoreU(hn::ConcatUpperUpper(d, b[i + 4], b[i]), d, to + (i + 4) * tile_keys);
  }
#endif
}

/// Eight neighbouring keys of a tile: where each begins, and where those of the tile that comes next do.
struct eight_keys {
  const std::byte* at[8];
  const std::byte* next[8];  ///< null: nothing to ask for
  const kvc_plane* plane;    ///< null: none of them is present
  bool neighbours;           ///< in one run, so that transposed ones lie side by side
  bool uniform;              ///< all in the same plane
};

/// 8 keys that are rows of channels.
template <class T>
void pack_key_rows(const eight_keys& k, int32_t dim, float* HWY_RESTRICT to) {
  const tag_8 d;
  constexpr int32_t line = 64 / int32_t{sizeof(T)};
  for (int32_t c = 0; c < dim; c += 8) {
    if (k.next[0] != nullptr && c % line == 0) {
      for (int i = 0; i < 8; ++i) fetch(reinterpret_cast<const T*>(k.next[i]) + c);
    }
    hn::Vec<tag_8> rows[8];
    for (int i = 0; i < 8; ++i) rows[i] = load_as(d, reinterpret_cast<const T*>(k.at[i]) + c);
    transpose_8x8(rows, to + c * tile_keys);
  }
}

/// 8 keys side by side in every channel.
template <class T>
void pack_key_columns(const eight_keys& k, int32_t dim, float* HWY_RESTRICT to) {
  const tag_8 d;
  for (int32_t c = 0; c < dim; ++c) {
    if (k.next[0] != nullptr) fetch(k.next[0] + c * k.plane->dim_stride);
    hn::StoreU(load_as(d, reinterpret_cast<const T*>(k.at[0] + c * k.plane->dim_stride)), d,
               to + c * tile_keys);
  }
}

template <class T>
void pack_eight(const eight_keys& k, int32_t dim, float* to) {
  if (k.neighbours && k.plane->token_stride == int64_t{sizeof(T)}) return pack_key_columns<T>(k, dim, to);
  if (k.plane->dim_stride == int64_t{sizeof(T)}) return pack_key_rows<T>(k, dim, to);
  for (int32_t c = 0; c < dim; ++c) {
    for (int i = 0; i < 8; ++i) to[c * tile_keys + i] = to_float(read<T>(k.at[i] + c * k.plane->dim_stride));
  }
}

const kvc_plane& key_plane(const attend_item& item, const tile& t, int32_t run) {
  return (t.open >> run & 1) != 0 ? item.kv->open_k : item.kv->k;
}

/// Keys first .. first + 7; absent ones repeat a present one, whose scores are masked.
eight_keys find_eight(const attend_item& item, const tile& t, const tile* next, int32_t first) {
  eight_keys k{};
  k.uniform = true;
  k.neighbours = t.run_keys >= 8;
  const std::byte* some = nullptr;
  for (int32_t i = 0; i < 8; ++i) {
    const int32_t run = (first + i) / t.run_keys;
    if (run >= t.runs || t.k[run] == nullptr) continue;
    const kvc_plane& p = key_plane(item, t, run);
    k.uniform = k.uniform && (k.plane == nullptr || k.plane == &p);
    k.plane = &p;
    k.at[i] = some = t.k[run] + (first + i) % t.run_keys * p.token_stride;
  }
  for (auto& key : k.at) key = key == nullptr ? some : key;
  const int32_t last = (first + 7) / t.run_keys;
  if (next == nullptr || !k.neighbours || last >= next->runs || next->k[last] == nullptr) return k;
  const kvc_plane& p = key_plane(item, *next, last);
  for (int32_t i = 0; i < 8; ++i) k.next[i] = next->k[last] + (first + i) % t.run_keys * p.token_stride;
  return k;
}

void pack_keys(const attend_item& item, const tile& t, const tile* next, float* scratch) {
  const int32_t dim = item.kv->dim_k;
  for (int32_t first = 0; first < tile_keys; first += 8) {
    const eight_keys k = find_eight(item, t, next, first);
    float* to = scratch + first;
    if (k.plane == nullptr) continue;
    if (!k.uniform) {  // small blocks at the border between sealed and open ones
      for (uint64_t rest = t.present >> first & 0xff; rest != 0; rest &= rest - 1) {
        const int32_t i = std::countr_zero(rest);
        const kvc_plane& p = key_plane(item, t, (first + i) / t.run_keys);
        const std::byte* key = t.k[(first + i) / t.run_keys] + (first + i) % t.run_keys * p.token_stride;
        for (int32_t c = 0; c < dim; ++c) to[c * tile_keys + i] = load(key + c * p.dim_stride, p.type);
      }
    } else if (k.plane->type == KVC_F32) {
      pack_eight<float>(k, dim, to);
    } else if (k.plane->type == KVC_F16) {
      pack_eight<f16>(k, dim, to);
    } else {
      pack_eight<bf16>(k, dim, to);
    }
  }
}

template <class T>
void pack_value(const std::byte* from, int64_t stride, int32_t dim, float* HWY_RESTRICT to) {
  if (stride == int64_t{sizeof(T)}) {
    const tag_8 d;
    for (int32_t c = 0; c < dim; c += 8)
      hn::StoreU(load_as(d, reinterpret_cast<const T*>(from) + c), d, to + c);
  } else {
    for (int32_t c = 0; c < dim; ++c) to[c] = to_float(read<T>(from + c * stride));
  }
}

/// Many rows share a tile: widening it once is cheaper than in every register block.
bool widen_once(int64_t blocks, int32_t type) {
  return type != KVC_F32 && blocks > 2;
}

bool keys_direct(const attend_item& item, const tile& t, int64_t blocks) {
  const kvc_plane& p = item.kv->k;
  return t.open == 0 && p.token_stride == element_size(p.type) && t.run_keys >= lanes &&
         !widen_once(blocks, p.type);
}
bool values_direct(const attend_item& item, const tile& t, int64_t blocks) {
  const kvc_plane& p = v_plane(*item.kv);
  return t.open == 0 && p.dim_stride == element_size(p.type) && !widen_once(blocks, p.type);
}

/// Where vectors of keys lie; absent ones repeat a present one, whose scores are masked.
void point_at_keys(const attend_item& item, const tile& t, const std::byte** to) {
  const int64_t step = item.kv->k.token_stride;
  const std::byte* some = nullptr;
  for (int32_t v = 0; v < key_vectors; ++v) {
    const int32_t run = v * lanes / t.run_keys;
    const bool there = run < t.runs && t.k[run] != nullptr;
    to[v] = there ? t.k[run] + v * lanes % t.run_keys * step : nullptr;
    some = there ? to[v] : some;
  }
  for (int32_t v = 0; v < key_vectors; ++v) to[v] = to[v] == nullptr ? some : to[v];
}

/// Where values lie; absent runs repeat a present one, whose keys are not visited.
void point_at_values(const attend_item& item, const tile& t, const std::byte** to) {
  const int64_t step = v_plane(*item.kv).token_stride;
  const std::byte* some = nullptr;
  for (int32_t r = 0; r < t.runs; ++r) some = t.v[r] != nullptr ? t.v[r] : some;
  for (int32_t j = 0; j < tile_keys; j += t.run_keys) {
    const int32_t run = j / t.run_keys;
    const std::byte* at = run < t.runs && t.v[run] != nullptr ? t.v[run] : some;
    for (int32_t i = 0; i < t.run_keys; ++i) to[j + i] = at + i * step;
  }
}

void view_keys(const attend_item& item, const tile& t, const tile* next, int64_t blocks, float* scratch,
               key_view& k) {
  const kvc_plane& plane = item.kv->k;
  if (!keys_direct(item, t, blocks)) {
    pack_keys(item, t, blocks <= 2 ? next : nullptr, scratch);
    for (int32_t v = 0; v < key_vectors; ++v) k.keys[v] = bytes_of(scratch + v * lanes);
    k.stride = tile_keys * int64_t{sizeof(float)};
    k.type = KVC_F32;
    k.ahead = false;
    return;
  }
  point_at_keys(item, t, k.keys);
  k.ahead = next != nullptr && next->present != 0 && keys_direct(item, *next, blocks);
  if (k.ahead) point_at_keys(item, *next, k.next);
  k.stride = plane.dim_stride;
  k.type = plane.type;
}

void pack_values(const attend_item& item, const tile& t, float* scratch, value_view& v) {
  for (uint64_t rest = t.present; rest != 0; rest &= rest - 1) {
    const int32_t j = std::countr_zero(rest), run = j / t.run_keys;
    const kvc_plane& plane = (t.open >> run & 1) != 0 ? open_v_plane(*item.kv) : v_plane(*item.kv);
    const std::byte* from = t.v[run] + j % t.run_keys * plane.token_stride;
    float* to = scratch + int64_t{j} * item.kv->dim_v;
    v.rows[j] = bytes_of(to);
    if (plane.type == KVC_F32) {
      pack_value<float>(from, plane.dim_stride, item.kv->dim_v, to);
    } else if (plane.type == KVC_F16) {
      pack_value<f16>(from, plane.dim_stride, item.kv->dim_v, to);
    } else {
      pack_value<bf16>(from, plane.dim_stride, item.kv->dim_v, to);
    }
  }
}

void view_values(const attend_item& item, const tile& t, const tile* next, int64_t blocks, float* scratch,
                 value_view& v) {
  if (!values_direct(item, t, blocks)) {
    pack_values(item, t, scratch, v);
    v.type = KVC_F32;
    v.ahead = false;
    return;
  }
  point_at_values(item, t, v.rows);
  v.ahead = next != nullptr && next->present != 0 && values_direct(item, *next, blocks);
  if (v.ahead) point_at_values(item, *next, v.next);
  v.type = v_plane(*item.kv).type;
}

// ---- the kernel ----

void prepare(const attend_item& item, const attend_scratch& s) {
  const row_blocks blocks(item);
  const int32_t dim = item.kv->dim_k;
  const int64_t element = element_size(item.q->type);
  for (int64_t b = 0; b < blocks.count * item.heads; ++b) {
    const int64_t in_head = blocks.begin(b % blocks.count);
    const int64_t first = b / blocks.count * blocks.rows + in_head;
    const int64_t n = blocks.begin(b % blocks.count + 1) - in_head;
    for (int64_t i = 0; i < n; ++i) {
      const std::byte* from = bytes_of(item.q->data) + item.row_of(first + i) * item.q->row_stride +
                              item.q_head_of(first + i) * item.q->head_stride;
      float* to = s.q + first * dim + i;
      for (int32_t c = 0; c < dim; ++c) to[c * n] = load(from + c * element, item.q->type) * item.q_scale;
    }
  }
}

/// Keys that all rows of the block see or none does may be added together; between the first and the last
/// key they disagree on, each row goes on alone, so every row keeps its ascending order.
void add_values(const attend_item& item, const attend_scratch& s, const value_view& v, int64_t first,
                int64_t n) {
  const int32_t dim = item.kv->dim_v;
  const uint64_t lead = s.seen[first / item.group];
  uint64_t differ = 0;
  for (int64_t r = first; r < first + n; ++r) differ |= s.seen[r / item.group] ^ lead;
  const float* w = s.weights + first * tile_keys;
  float* acc = s.acc + first * dim;
  if (differ == 0) return add_any(n, v, lead, w, acc, dim);
  const int32_t from = std::countr_zero(differ), upto = tile_keys - std::countl_zero(differ);
  const uint64_t before = (uint64_t{1} << from) - 1;
  const uint64_t after = upto == tile_keys ? 0 : ~uint64_t{0} << upto;
  add_any(n, v, lead & before, w, acc, dim);
  for (int64_t r = 0; r < n; ++r) {
    const uint64_t own = s.seen[(first + r) / item.group] & ~before & ~after;
    add_any(1, v, own, w + r * tile_keys, acc + r * dim, dim);
  }
  add_any(n, v, lead & after, w, acc, dim);
}

/// Scores and weights of one row block.
void weigh(const attend_item& item, const attend_scratch& s, const key_view& k, int64_t first, int64_t last) {
  const int32_t dim_k = item.kv->dim_k, dim_v = item.kv->dim_v;
  uint64_t any = 0;
  for (int64_t r = first; r < last; ++r) any |= s.seen[r / item.group];
  if (any == 0) return;
  score_any(last - first, k, s.q + first * dim_k, dim_k, s.weights + first * tile_keys);
  for (int64_t r = first; r < last; ++r) {
    const uint64_t seen = s.seen[r / item.group];
    if (seen == 0) continue;
    soften(s.weights + r * tile_keys, seen, item.cap_log2, s.max[r], s.lanes + r * sum_lanes,
           s.acc + r * dim_v, dim_v);
  }
}

/// The scratch of one head of the item; weights, tiles and `seen` are shared.
attend_scratch head_scratch(const attend_item& item, attend_scratch s, int64_t head) {
  const int64_t first = head * item.per_head();
  s.q += first * item.kv->dim_k;
  s.acc += first * item.kv->dim_v;
  s.max += first;
  s.lanes += first * sum_lanes;
  return s;
}

/// One tile of one head.
void visit(const attend_item& item, const attend_scratch& s, const tile& t, const tile* next) {
  const row_blocks blocks(item);
  key_view k;
  value_view v;
  view_keys(item, t, next, blocks.count, s.k_tile, k);
  view_values(item, t, next, blocks.count, s.v_tile, v);
  for (int64_t b = 0; b < blocks.count; ++b) {
    weigh(item, s, k, blocks.begin(b), blocks.begin(b + 1));
    k.ahead = false;
  }
  for (int64_t b = 0; b < blocks.count; ++b) {
    const int64_t first = blocks.begin(b);
    add_values(item, s, v, first, blocks.begin(b + 1) - first);
    v.ahead = false;
  }
}

/// Tile by tile, in each the heads as they lie in memory: tile, next head ... next tile.
void split(const attend_item& item, const attend_scratch& s, tile_range range) {
  clear_states(s.acc, s.max, s.lanes, item.states(), item.kv->dim_v);
  // The tile after the last one is most likely the first of the next split: worth asking for.
  const int64_t tiles = (int64_t{item.kv_len} + tile_keys - 1) / tile_keys;
  tile two[2];
  int now = 0;
  resolve_tile(item, item.head, range.first, two[now]);
  for (int64_t index = range.first; index < range.last; ++index) {
    const bool any = seen_keys(item, two[now], s.seen) != 0;
    for (int32_t h = any ? 0 : item.heads - 1; h < item.heads; ++h) {
      const bool last = h + 1 == item.heads;
      const bool more = !last || index + 1 < tiles;
      if (more) resolve_tile(item, last ? item.head : item.head + h + 1, index + last, two[1 - now]);
      if (any) visit(item, head_scratch(item, s, h), two[now], more ? &two[1 - now] : nullptr);
      now = 1 - now;
    }
  }
}

const kernel body = {this_target, &prepare, &split};

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#if HWY_ARCH_X86
#include <cpuid.h>
#endif

namespace kvcache::detail {
namespace {

#if HWY_ARCH_X86
/// The processor and the system allow every instruction the target's code may contain.
bool has_avx2() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool half = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
  return half && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("aes") &&
         __builtin_cpu_supports("pclmul");
}
bool has_avx512() noexcept {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

struct abilities {
  bool avx2 = false, avx512 = false;
};

/// Asked once: under a hypervisor the question alone takes longer than attending over a short sequence.
[[maybe_unused]] abilities this_machine() noexcept {
#if HWY_ARCH_X86
  static const abilities found = {has_avx2(), has_avx512()};
  return found;
#else
  return {};
#endif
}

}  // namespace

const kernel* find_simd_kernel([[maybe_unused]] int32_t target) noexcept {
#if HWY_TARGETS & HWY_AVX3
  if ((target == KVC_TARGET_BEST || target == KVC_TARGET_AVX512) && this_machine().avx512)
    return &N_AVX3::body;
#endif
#if HWY_TARGETS & HWY_AVX2
  if ((target == KVC_TARGET_BEST || target == KVC_TARGET_AVX2) && this_machine().avx2) return &N_AVX2::body;
#endif
#if HWY_TARGETS & HWY_NEON
  if (target == KVC_TARGET_BEST || target == KVC_TARGET_NEON) return &N_NEON::body;
#endif
  return nullptr;
}

}  // namespace kvcache::detail
#endif
