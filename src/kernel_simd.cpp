// SPDX-License-Identifier: Apache-2.0
// The SIMD kernels, written once with Highway and compiled for every target that has fused multiply-add.
// Vectors run across keys for scores and across channels for values, so no result ever needs a horizontal
// sum and all targets perform the operations of kernel.hpp in the same order per element.
//
// Registers hold R rows x NV vectors. Rows are (query row, head of the group) pairs; how they are grouped
// changes speed, never bits.
#include "kernel.hpp"
#include "simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernel_simd.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <bit>

#include "element.hpp"
#include "lookahead.hpp"
#include "simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

void fold(const fold_rows&);  // score_simd.cpp

constexpr int32_t max_rows = 6;                         ///< rows of a register block where there are many
constexpr int32_t only_rows = registers >= 16 ? 8 : 6;  ///< where one block can hold all rows of an item
/// Accumulator vectors per row of a block of `rows` rows.
constexpr int32_t vectors_of(int64_t rows) {
  return rows == 1 ? 8 : rows * 4 <= registers ? 4 : 2;
}

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

// ---- what a tile looks like to the inner loops ----

struct key_view {
  const std::byte* keys[key_vectors];  ///< first channel of each vector of keys
  int64_t head;                        ///< bytes from there to the head at work
  int64_t stride;                      ///< bytes from channel to channel
  int64_t ahead;                       ///< bytes from a key to what is asked for with it, 0 = nothing
  lookahead* far;                      ///< or whence the lines to ask for come, null = none
  int32_t type;
};
struct value_view {
  const std::byte* rows[tile_keys];  ///< first channel of each present key
  int64_t head;                      ///< bytes from there to the head at work
  int64_t ahead;                     ///< bytes from a value to what is asked for with it, 0 = nothing
  lookahead* far;                    ///< or whence the lines to ask for come, null = none
  int32_t heads;                     ///< that are added alike, one after the other; their states lie dense
  int64_t head_stride;               ///< bytes from one to the next
  int32_t type;
};

// Decode reads every byte once, and memory answers at full speed only if it is asked early and evenly: a
// processor drops requests that come in bursts. So every inner loop asks for a line or two per row of
// arithmetic, about as many as it reads. Two ways, by what the loops have time for:
//   near  what the work comes to a fixed number of bytes later, straight into the first level. The least
//         to keep in caches, but requests follow the order of the work: keys of all blocks of a tile side by
//         side, then values block by block
//   far   the whole next tile, block by block as it lies in memory, into the second level. Where arithmetic
//         takes about as long as reading, requests early enough matter more than the first level
enum class asking { nothing, near, far };
constexpr int64_t line_bytes = 64;
constexpr int64_t bytes_ahead = 8192;

/// Asks for one line. Code around it stays in order.
HWY_INLINE void fetch(const std::byte* at) {
#if HWY_ARCH_X86
  asm volatile("prefetcht0 %0" ::"m"(*at));
#else
  __builtin_prefetch(at, 0, 3);
#endif
}

template <int First, int Last, size_t N>
HWY_INLINE void fetch_some(const std::byte* const (&ask)[N]) {
  if constexpr (First < Last) {
    fetch(ask[First]);
    fetch_some<First + 1, Last>(ask);
  }
}

/// Multiplies `factors` (one per row, `stride` apart) with NV vectors and adds to the rows' accumulators, and
/// asks for P lines between the rows. Rows are a recursion, because compilers keep accumulators in memory
/// when a loop that asks is not unrolled early.
template <int P, int Row, int R, int NV, class D, class V, size_t N>
HWY_INLINE void multiply_rows(D d, const float* HWY_RESTRICT factors, int32_t stride, const V (&value)[NV],
                              V (&sum)[R][NV], const std::byte* const (&ask)[N]) {
  if constexpr (Row < R) {
    const auto x = hn::Set(d, factors[Row * stride]);
    for (int i = 0; i < NV; ++i) sum[Row][i] = hn::MulAdd(x, value[i], sum[Row][i]);
    constexpr int first = Row * P / R, last = (Row + 1) * P / R;
    fetch_some<first, last>(ask);
    multiply_rows<P, Row + 1>(d, factors, stride, value, sum, ask);
  }
}

/// Rows of one head of an item in register blocks, as even as possible.
struct row_blocks {
  int64_t rows, count;
  explicit row_blocks(const attend_item& item)
      : rows(item.per_head()), count(rows <= only_rows ? 1 : (rows + max_rows - 1) / max_rows) {}
  int64_t begin(int64_t i) const { return i * (rows / count) + std::min(i, rows % count); }
};

// ---- scores ----

/// One channel of score_vectors: U channels share the lines of U vectors, channel `Turn` of them asks for
/// every U-th, or for the next lines at `at`.
template <class T, int R, int NV, int U, asking Ask, int Turn>
HWY_INLINE void score_channels(const std::byte* const (&keys)[NV], int64_t stride, int64_t ahead,
                               const std::byte* at, const float* HWY_RESTRICT q, vec_f (&sum)[R][NV]) {
  if constexpr (Turn < U) {
    const tag_f d;
    vec_f key[NV];
    for (int v = 0; v < NV; ++v) key[v] = load_as(d, reinterpret_cast<const T*>(keys[v] + Turn * stride));
    constexpr int lines = Ask == asking::nothing ? 0 : NV / U;
    const std::byte* ask[std::max(lines, 1)];
    for (int i = 0; i < lines; ++i) {
      ask[i] = Ask == asking::far ? at + (Turn * lines + i) * line_bytes
                                  : keys[i * U + (U - Turn) % U] + Turn * stride + ahead;
    }
    multiply_rows<lines, 0>(d, q + Turn * R, 1, key, sum, ask);
    score_channels<T, R, NV, U, Ask, Turn + 1>(keys, stride, ahead, at, q, sum);
  }
}

/// Scores of R rows against NV vectors of keys; q is [dim][R].
template <class T, int R, int NV, asking Ask>
HWY_INLINE void score_vectors(const key_view& k, int32_t first, const float* HWY_RESTRICT q, int32_t dim,
                              float* HWY_RESTRICT w) {
  const tag_f d;
  const std::byte* keys[NV];
  for (int v = 0; v < NV; ++v) keys[v] = k.keys[first + v] + k.head;
  vec_f sum[R][NV];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < NV; ++v) sum[r][v] = hn::Zero(d);
  }
  constexpr int step = Ask == asking::nothing ? 1 : std::min<int>(NV, line_bytes / (lanes * sizeof(T)));
  for (int32_t c = 0; c < dim;) {
    lookahead::share next{nullptr, 0, (dim - c) / step};
    if constexpr (Ask == asking::far) next = k.far->take(NV, next.count);
    for (const int32_t end = c + next.count * step; c < end; c += step, next.at += next.step) {
      score_channels<T, R, NV, step, Ask, 0>(keys, k.stride, k.ahead, next.at, q + c * R, sum);
      for (int v = 0; v < NV; ++v) keys[v] += step * k.stride;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < NV; ++v) hn::StoreU(sum[r][v], d, w + r * tile_keys + (first + v) * lanes);
  }
}

template <class T, int R>
HWY_NOINLINE void score_rows(const key_view& k, const float* q, int32_t dim, float* w) {
  constexpr int32_t step = std::min(vectors_of(R), key_vectors);
  for (int32_t v = 0; v < key_vectors; v += step) {
    if (k.far != nullptr) {
      score_vectors<T, R, step, asking::far>(k, v, q, dim, w);
    } else if (k.ahead != 0) {
      score_vectors<T, R, step, asking::near>(k, v, q, dim, w);
    } else {
      score_vectors<T, R, step, asking::nothing>(k, v, q, dim, w);
    }
  }
}

template <class T, int R = 1>
void score_block(int64_t rows, const key_view& k, const float* q, int32_t dim, float* w) {
  if constexpr (R < only_rows) {
    if (rows > R) return score_block<T, R + 1>(rows, k, q, dim, w);
  }
  score_rows<T, R>(k, q, dim, w);
}

void score_any(int64_t rows, const key_view& k, const float* q, int32_t dim, float* w) {
  if (k.type == KVC_F32) return score_block<float>(rows, k, q, dim, w);
  if (k.type == KVC_F16) return score_block<f16>(rows, k, q, dim, w);
  score_block<bf16>(rows, k, q, dim, w);
}

// ---- weights ----

/// A vector of scores, capped and masked.
HWY_INLINE vec_f admit(vec_f s, int32_t v, uint64_t seen, float cap_log2) {
  const tag_f d;
  if (cap_log2 != 0) s = hn::Mul(hn::Set(d, cap_log2), tanh_fixed(s));
  if (seen == ~uint64_t{0}) return s;
  const uint64_t bits = seen >> (v * lanes);
  uint8_t raw[8];
  std::memcpy(raw, &bits, sizeof raw);
  return hn::IfThenElse(hn::LoadMaskBits(d, raw), s, hn::Set(d, -HUGE_VALF));
}

/// Caps and masks a row's scores in place; returns their maximum and `top`.
HWY_INLINE float admit_row(float* HWY_RESTRICT w, uint64_t seen, float cap_log2, float top) {
  const tag_f d;
  const bool as_they_are = cap_log2 == 0 && seen == ~uint64_t{0};
  auto highest = hn::Set(d, top);
  for (int32_t v = 0; v < key_vectors; ++v) {
    auto s = hn::LoadU(d, w + v * lanes);
    if (!as_they_are) {
      s = admit(s, v, seen, cap_log2);
      hn::StoreU(s, d, w + v * lanes);
    }
    highest = hn::Max(highest, s);
  }
  return hn::GetLane(hn::MaxOfLanes(d, highest));
}

/// Scores to weights, given their maximum `top`: weights, lane sums, rescaled accumulators.
HWY_INLINE void soften(float* HWY_RESTRICT w, float top, float& max, float* HWY_RESTRICT sums,
                       float* HWY_RESTRICT acc, int32_t dim_v) {
  const tag_f d;
  vec_f s[key_vectors];
  const auto base = hn::Set(d, top);
  for (int32_t v = 0; v < key_vectors; ++v) {
    s[v] = exp2_weight(hn::Sub(hn::LoadU(d, w + v * lanes), base));
    hn::StoreU(s[v], d, w + v * lanes);
  }
  const float shrink = top == max ? 1.0f : detail::exp2_weight(max - top);
  max = top;
  constexpr int32_t per = sum_lanes / lanes;
  for (int32_t i = 0; i < per; ++i) {
    const auto sum = hn::Add(hn::Add(s[i], s[per + i]), hn::Add(s[2 * per + i], s[3 * per + i]));
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
template <class T, int R, int NV, asking Ask, class D>
HWY_INLINE void add_vectors(D d, const value_view& v, int32_t channel, uint64_t seen,
                            const float* HWY_RESTRICT w, float* HWY_RESTRICT acc, int32_t dim) {
  constexpr int32_t n = static_cast<int32_t>(hn::MaxLanes(D()));
  constexpr int lines = Ask == asking::nothing ? 0 : std::max<int>(1, NV * n * sizeof(T) / line_bytes);
  const int64_t offset = v.head + channel * int64_t{sizeof(T)};
  hn::Vec<D> sum[R][NV];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < NV; ++i) sum[r][i] = hn::LoadU(d, acc + r * dim + i * n);
  }
  while (seen != 0) {
    const int32_t first = std::countr_zero(seen);
    const int32_t last = first + std::countr_one(seen >> first);
    for (int32_t j = first; j < last;) {
      lookahead::share next{nullptr, 0, last - j};
      if constexpr (Ask == asking::far) next = v.far->take(lines, last - j);
      for (const int32_t end = j + next.count; j < end; ++j, next.at += next.step) {
        const std::byte* row = v.rows[j] + offset;
        hn::Vec<D> value[NV];
        for (int i = 0; i < NV; ++i) value[i] = load_as(d, reinterpret_cast<const T*>(row) + i * n);
        const std::byte* ask[std::max(lines, 1)];
        for (int i = 0; i < lines; ++i) {
          ask[i] = (Ask == asking::far ? next.at : row + v.ahead) + i * line_bytes;
        }
        multiply_rows<lines, 0>(d, w + j, tile_keys, value, sum, ask);
      }
    }
    seen = last == tile_keys ? 0 : seen & (~uint64_t{0} << last);
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < NV; ++i) hn::StoreU(sum[r][i], d, acc + r * dim + i * n);
  }
}

/// What is left of a head dim, from channel `c`, that is no multiple of the widths of add_channels.
template <class T, int R>
HWY_NOINLINE void add_rest(const value_view& v, uint64_t seen, const float* w, float* acc, int32_t dim,
                           int32_t c) {
  const tag_f d;
  constexpr asking none = asking::nothing;
  if constexpr (vectors_of(R) > 2) {
    for (; c + 2 * lanes <= dim; c += 2 * lanes) add_vectors<T, R, 2, none>(d, v, c, seen, w, acc + c, dim);
  }
  for (; c + lanes <= dim; c += lanes) add_vectors<T, R, 1, none>(d, v, c, seen, w, acc + c, dim);
  if constexpr (lanes > 8) {
    if (c < dim) add_vectors<T, R, 1, none>(tag_8(), v, c, seen, w, acc + c, dim);
  }
}

template <class T, int R, asking Ask>
HWY_INLINE void add_channels(const value_view& v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  const tag_f d;
  constexpr int32_t wide = vectors_of(R);
  int32_t c = 0;
  for (; c + wide * lanes <= dim; c += wide * lanes) {
    add_vectors<T, R, wide, Ask>(d, v, c, seen, w, acc + c, dim);
  }
  if constexpr (wide > 4) {
    for (; c + 4 * lanes <= dim; c += 4 * lanes) add_vectors<T, R, 4, Ask>(d, v, c, seen, w, acc + c, dim);
  }
  if (c < dim) add_rest<T, R>(v, seen, w, acc, dim, c);
}

template <class T, int R>
HWY_NOINLINE void add_rows(value_view v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  for (int32_t h = 0; h < v.heads; ++h) {
    if (v.far != nullptr) {
      add_channels<T, R, asking::far>(v, seen, w, acc, dim);
    } else if (v.ahead != 0) {
      add_channels<T, R, asking::near>(v, seen, w, acc, dim);
    } else {
      add_channels<T, R, asking::nothing>(v, seen, w, acc, dim);
    }
    v.head += v.head_stride;
    w += R * tile_keys;
    acc += R * int64_t{dim};
  }
}

template <class T, int R = 1>
void add_block(int64_t rows, const value_view& v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  if constexpr (R < only_rows) {
    if (rows > R) return add_block<T, R + 1>(rows, v, seen, w, acc, dim);
  }
  add_rows<T, R>(v, seen, w, acc, dim);
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
      for (int i = 0; i < 8; ++i) fetch(k.next[i] + c * int64_t{sizeof(T)});
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
void point_at_keys(const attend_item& item, const tile& t, key_view& k) {
  const int64_t step = item.kv->k.token_stride;
  const std::byte* some = nullptr;
  for (int32_t v = 0; v < key_vectors; ++v) {
    const int32_t run = v * lanes / t.run_keys;
    const bool there = run < t.runs && t.k[run] != nullptr;
    k.keys[v] = there ? t.k[run] + v * lanes % t.run_keys * step : nullptr;
    some = there ? k.keys[v] : some;
  }
  for (auto& key : k.keys) key = key == nullptr ? some : key;
  k.stride = item.kv->k.dim_stride;
  k.type = item.kv->k.type;
}

/// Where values lie; absent runs repeat a present one, whose keys are not visited.
void point_at_values(const attend_item& item, const tile& t, value_view& v) {
  const int64_t step = v_plane(*item.kv).token_stride;
  const std::byte* some = nullptr;
  for (int32_t r = 0; r < t.runs; ++r) some = t.v[r] != nullptr ? t.v[r] : some;
  for (int32_t j = 0; j < tile_keys; j += t.run_keys) {
    const int32_t run = j / t.run_keys;
    const std::byte* at = run < t.runs && t.v[run] != nullptr ? t.v[run] : some;
    for (int32_t i = 0; i < t.run_keys; ++i) v.rows[j + i] = at + i * step;
  }
  v.type = v_plane(*item.kv).type;
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
/// key they disagree on, each row goes on alone, so every row keeps its ascending order. Only keys `within`
/// are added.
void add_values(const attend_item& item, const attend_scratch& s, const value_view& v, int64_t first,
                int64_t n, uint64_t within) {
  const int32_t dim = item.kv->dim_v;
  const uint64_t lead = s.seen[first / item.group] & within;
  uint64_t differ = 0;
  for (int64_t r = item.rows == 1 ? n : 0; r < n; ++r) {
    differ |= (s.seen[(first + r) / item.group] & within) ^ lead;
  }
  const float* w = s.weights + first * tile_keys;
  float* acc = s.acc + first * dim;
  if (differ == 0) return add_any(n, v, lead, w, acc, dim);
  const int32_t from = std::countr_zero(differ), upto = tile_keys - std::countl_zero(differ);
  const uint64_t before = (uint64_t{1} << from) - 1;
  const uint64_t after = upto == tile_keys ? 0 : ~uint64_t{0} << upto;
  add_any(n, v, lead & before, w, acc, dim);
  for (int64_t r = 0; r < n; ++r) {
    const uint64_t own = s.seen[(first + r) / item.group] & within & ~before & ~after;
    add_any(1, v, own, w + r * tile_keys, acc + r * dim, dim);
  }
  add_any(n, v, lead & after, w, acc, dim);
}

/// The scratch of one head of the item; tiles and `seen` are shared.
attend_scratch head_scratch(const attend_item& item, attend_scratch s, int64_t head) {
  const int64_t first = head * item.per_head();
  s.q += first * item.kv->dim_k;
  s.acc += first * item.kv->dim_v;
  s.max += first;
  s.lanes += first * sum_lanes;
  s.weights += first * tile_keys;
  return s;
}

/// A tile at work and the one that comes next, for all heads of an item.
struct tile_work {
  const attend_item& item;
  const attend_scratch& scratch;
  const row_blocks& blocks;
  const tile& now;
  const tile* next;  ///< null: nothing to ask for
  lookahead* far;    ///< its lines, null: ask for what is near
};

/// What to ask for: nothing where so many rows share a tile that memory does not matter, the whole next tile
/// where arithmetic takes about as long as reading or blocks are short.
asking asking_for(const attend_item& item, const row_blocks& blocks) {
  if (blocks.count > 2) return asking::nothing;
  const kvc_plane& k = item.kv->k;
  if (item.kv->block < 16) return asking::far;
  if (k.token_stride != element_size(k.type)) return asking::near;
  const bool slow = blocks.rows >= 2 * element_size(k.type) || (blocks.rows >= 4 && item.kv->block >= 32);
  return slow ? asking::far : asking::near;
}

/// Keys of one head in scratch. While it packs, it asks for the head after.
void pack_key_view(const tile_work& t, int32_t head, key_view& k) {
  const attend_item& item = t.item;
  const bool last = head + 1 == item.heads;
  tile own = t.now, next{};
  if (head != 0) resolve_tile(item, item.head + head, t.now.first / tile_keys, own);
  if (t.next != nullptr && last) next = *t.next;
  if (t.next != nullptr && !last) resolve_tile(item, item.head + head + 1, t.now.first / tile_keys, next);
  pack_keys(item, own, t.next != nullptr && t.far == nullptr ? &next : nullptr, t.scratch.k_tile);
  k.far = t.far;
  for (int32_t v = 0; v < key_vectors; ++v) k.keys[v] = bytes_of(t.scratch.k_tile + v * lanes);
  k.stride = tile_keys * int64_t{sizeof(float)};
  k.type = KVC_F32;
}

/// Values of one head in scratch.
void pack_value_view(const tile_work& t, int32_t head, value_view& v) {
  tile own = t.now;
  if (head != 0) resolve_tile(t.item, t.item.head + head, t.now.first / tile_keys, own);
  pack_values(t.item, own, t.scratch.v_tile, v);
  v.type = KVC_F32;
  v.heads = 1;
}

/// Scores of all heads.
void score_heads(const tile_work& t) {
  const attend_item& item = t.item;
  const bool direct = keys_direct(item, t.now, t.blocks.count);
  key_view k{};
  if (direct) point_at_keys(item, t.now, k);
  for (int32_t h = 0; h < item.heads; ++h) {
    const attend_scratch s = head_scratch(item, t.scratch, h);
    if (direct) {
      k.head = h * item.kv->k.head_stride;
      k.far = t.far;
      k.ahead = t.next != nullptr ? bytes_ahead / tile_keys * t.now.run_keys : 0;
    } else {
      pack_key_view(t, h, k);
    }
    for (int64_t b = 0; b < t.blocks.count; ++b, k.ahead = 0, k.far = nullptr) {
      const int64_t first = t.blocks.begin(b), n = t.blocks.begin(b + 1) - first;
      uint64_t any = item.rows == 1 ? 1 : 0;
      for (int64_t r = first; any == 0 && r < first + n; ++r) any |= s.seen[r / item.group];
      if (any == 0) continue;
      score_any(n, k, s.q + first * item.kv->dim_k, item.kv->dim_k, s.weights + first * tile_keys);
    }
  }
}

/// Hands out scores of `n` states of one row, or of heads of one row, as they stand, as far as the tile has
/// slots.
void keep_scores(const tile_work& t, int64_t first, int64_t n) {
  const int64_t slots = t.item.slots_in(t.now.first), stride = t.item.out->key_score_head_stride;
  float* to = score_row(*t.item.out, t.item.row_of(first), t.item.q_head_of(first)) + t.now.first;
  const float* from = t.scratch.weights + first * tile_keys;
  for (int64_t i = 0; i < n; ++i, to += stride, from += tile_keys) {
    if (slots < tile_keys) {
      std::memcpy(to, from, static_cast<size_t>(slots) * sizeof(float));
    } else {
      for (int32_t v = 0; v < tile_keys; v += lanes)
        hn::StoreU(hn::LoadU(tag_f(), from + v), tag_f(), to + v);
    }
  }
}

/// Scores to weights for states [first, last), which see the same keys. All maxima come first: each takes a
/// chain of shuffles, and the chains of several rows overlap.
void soften_states(const tile_work& t, int64_t first, int64_t last, uint64_t seen) {
  constexpr int64_t most = 16;
  const attend_scratch& s = t.scratch;
  const int32_t dim = t.item.kv->dim_v;
  float top[most];
  for (; first < last; first += most) {
    const int64_t n = std::min(most, last - first);
    for (int64_t i = 0; i < n; ++i) {
      top[i] = admit_row(s.weights + (first + i) * tile_keys, seen, t.item.cap_log2, s.max[first + i]);
    }
    if (t.item.out->key_score != nullptr) keep_scores(t, first, n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = first + i;
      soften(s.weights + at * tile_keys, top[i], s.max[at], s.lanes + at * sum_lanes, s.acc + at * dim, dim);
    }
  }
}

/// Scores to weights, all heads. Meanwhile memory is asked for the first values, as far as keys have not.
void soften_heads(const tile_work& t) {
  const attend_item& item = t.item;
  const std::byte* ask = t.next != nullptr && t.far == nullptr ? t.now.v[0] : nullptr;
  const int64_t each = ask != nullptr ? bytes_ahead / line_bytes / item.states() : 0;
  const bool alike = item.rows == 1;  // all heads see the same keys
  const int64_t step = alike ? std::min<int64_t>(item.states(), 8) : item.group;
  for (int64_t first = 0; first < item.states(); first += step) {
    const int64_t last = std::min(first + step, item.states());
    for (int64_t line = 0; line < each * (last - first); ++line, ask += line_bytes) fetch(ask);
    const uint64_t seen = t.scratch.seen[alike ? 0 : first % item.per_head() / item.group];
    if (seen != 0) soften_states(t, first, last, seen);
  }
}

void add_head(const tile_work& t, int32_t head, value_view& v, uint64_t within) {
  const attend_scratch s = head_scratch(t.item, t.scratch, head);
  for (int64_t b = 0; b < t.blocks.count; ++b, v.ahead = 0, v.far = nullptr) {
    const int64_t first = t.blocks.begin(b);
    add_values(t.item, s, v, first, t.blocks.begin(b + 1) - first, within);
  }
}

/// Bits of the keys [first, first + n) of a tile.
uint64_t key_bits(int32_t first, int32_t n) {
  return n == tile_keys ? ~uint64_t{0} : ((uint64_t{1} << n) - 1) << first;
}

/// Heads [first, last), keys `within`, asking `ahead` bytes further on.
void add_some_heads(const tile_work& t, value_view& v, int32_t first, int32_t last, uint64_t within,
                    int64_t ahead) {
  const bool alike = t.blocks.count == 1 && t.item.rows == 1;
  v.heads = alike ? last - first : 1;
  for (int32_t h = first; h < last; h += v.heads) {
    v.head = h * v.head_stride;
    v.ahead = ahead;
    v.far = t.far;
    add_head(t, h, v, within);
  }
}

/// The last values of a tile ask for the first keys of the next one, `keys` of them for one block's.
void add_and_turn(const tile_work& t, value_view& v, int32_t head, int32_t first, int32_t keys, int32_t run) {
  const tile& next = *t.next;
  const bool there = run < next.runs && next.k[run] != nullptr;
  const std::byte* from = v.rows[first] + head * v.head_stride;
  add_some_heads(t, v, head, head + 1, key_bits(first, keys), there ? next.k[run] - from : 0);
}

/// Values of all heads, block after block as they lie in memory.
void add_by_block(const tile_work& t, value_view& v, int32_t far) {
  const int32_t keys = t.now.run_keys, heads = t.item.heads, near = heads - far;
  for (int32_t r = 0; r < t.now.runs; ++r) {
    const uint64_t within = key_bits(r * keys, keys);
    add_some_heads(t, v, 0, near, within, far * v.head_stride);
    if (r + 1 < t.now.runs) {
      const int64_t ahead = v.rows[(r + 1) * keys] - v.rows[r * keys] - near * v.head_stride;
      add_some_heads(t, v, near, heads, within, ahead);
      continue;
    }
    const auto streams = static_cast<uint32_t>(std::clamp(t.next->runs / far, 1, keys / 4));
    const auto parts = static_cast<int32_t>(std::bit_floor(streams)), each = keys / parts;
    for (int32_t i = 0; i < far * parts; ++i) {
      add_and_turn(t, v, near + i / parts, r * keys + i % parts * each, each, i);
    }
  }
}

/// Values of all heads, head after head: where a head's values in the tile are few, going through blocks
/// again and again costs more than it saves.
void add_by_head(const tile_work& t, value_view& v) {
  const int32_t keys = t.now.run_keys, last = t.item.heads - 1;
  add_some_heads(t, v, 0, last, ~uint64_t{0}, v.head_stride);
  for (int32_t r = 0; r < t.now.runs; ++r) add_and_turn(t, v, last, r * keys, keys, r);
}

/// Weighted values of all heads.
void add_heads(const tile_work& t) {
  const attend_item& item = t.item;
  const kvc_plane& plane = v_plane(*item.kv);
  const bool direct = values_direct(item, t.now, t.blocks.count);
  value_view v{};
  v.head_stride = plane.head_stride;
  if (direct) point_at_values(item, t.now, v);
  if (direct && t.far == nullptr && t.next != nullptr && t.now.run_keys >= 16) {
    const int64_t cell = int64_t{t.now.run_keys} * item.kv->dim_v * element_size(plane.type);
    if (cell * t.now.runs <= bytes_ahead) return add_by_head(t, v);
    return add_by_block(t, v, static_cast<int32_t>(std::clamp<int64_t>(bytes_ahead / cell, 1, item.heads)));
  }
  if (direct) return add_some_heads(t, v, 0, item.heads, ~uint64_t{0}, 0);
  for (int32_t h = 0; h < item.heads; ++h) {
    pack_value_view(t, h, v);
    v.head_stride = 0;
    add_head(t, h, v, ~uint64_t{0});
  }
}

/// Tile by tile; in each the scores of all heads, then all values.
void split(const attend_item& item, const attend_scratch& s, tile_range range) {
  clear_states(s.acc, s.max, s.lanes, item.states(), item.kv->dim_v);
  // The tile after the last one is most likely the first of the next split: worth asking for.
  const int64_t tiles = (int64_t{item.kv_len} + tile_keys - 1) / tile_keys;
  const row_blocks blocks(item);
  const asking ask = asking_for(item, blocks);
  lookahead far;
  tile two[2];
  resolve_tile(item, item.head, range.first, two[0]);
  for (int64_t index = range.first; index < range.last; ++index) {
    const tile& now = two[(index - range.first) % 2];
    tile& next = two[(index - range.first + 1) % 2];
    const bool more = index + 1 < tiles && ask != asking::nothing;
    if (index + 1 < tiles) resolve_tile(item, item.head, index + 1, next);
    if (seen_keys(item, now, s.seen) == 0) continue;
    const bool whole = more && ask == asking::far && next.present != 0;
    if (whole) far.aim(item, next);
    const tile_work work{item, s, blocks, now, more ? &next : nullptr, whole ? &far : nullptr};
    score_heads(work);
    soften_heads(work);
    if (item.out->o != nullptr) add_heads(work);
  }
}

/// One tile's scores, capped. Rows read it again and again, so nothing is asked for ahead.
uint64_t score(const attend_item& item, const attend_scratch& s, int64_t index) {
  tile now;
  resolve_tile(item, item.head, index, now);
  const uint64_t any = seen_keys(item, now, s.seen);
  if (any == 0) return 0;
  const row_blocks blocks(item);
  score_heads({item, s, blocks, now, nullptr, nullptr});
  for (int64_t i = 0; item.cap_log2 != 0 && i < item.states(); ++i) {
    (void)admit_row(s.weights + i * tile_keys, ~uint64_t{0}, item.cap_log2, 0);
  }
  return any;
}

const kernel body = {this_target, &prepare, &split, &score, &fold};

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
