// SPDX-License-Identifier: Apache-2.0
// Weighted values of the keys of a tile: vectors run across channels, keys are added in ascending order.
// Included once per instruction set, after simd_inner.hpp.
#include <bit>

#include "lookahead.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

/// Where the whole next tile is asked for, a value's lines have come into the second level a tile ago. What
/// is read this many keys later is asked for once more, into the first.
constexpr int32_t keys_near = 16;

/// Values of a tile as the inner loops see them.
struct value_view {
  /// First channel of each present key, then, only to be asked for, of the first keys of the head after.
  const std::byte* rows[tile_keys + keys_near];
  int64_t stride;       ///< bytes from key to key of a run
  int64_t head;         ///< bytes from rows to the first head at work
  int32_t heads;        ///< that are added alike, one after the other; their states lie dense
  int64_t head_stride;  ///< bytes from one to the next
  lookahead* far;       ///< whence the lines to ask for come, null: nothing far to ask for
  /// Or the keys of the next tile's first head, where each head is to ask for the one after, runs side by
  /// side; null: not so.
  const std::byte* const* after;
  int32_t type;
};

/// Adds the weighted value at `row` to NV vectors of R accumulator rows, and asks for P lines at `near` and
/// at `far`.
template <class T, int P, int R, int NV, class D>
HWY_INLINE void add_key(D d, const std::byte* row, const std::byte* near, const std::byte* far,
                        const float* HWY_RESTRICT w, hn::Vec<D> (&sum)[R][NV]) {
  constexpr int32_t n = static_cast<int32_t>(hn::MaxLanes(D()));
  hn::Vec<D> value[NV];
  for (int i = 0; i < NV; ++i) value[i] = load_as(d, reinterpret_cast<const T*>(row) + i * n);
  const std::byte* ask[std::max(2 * P, 1)];
  for (int i = 0; i < P; ++i) {
    ask[2 * i] = near + i * line_bytes;
    ask[2 * i + 1] = far + i * line_bytes;
  }
  multiply_rows<2 * P, 0>(d, w, tile_keys, value, sum, ask);
}

/// Adds the weighted values of the keys in `seen`, ascending, to NV vectors of R accumulator rows, and asks
/// for as many lines of what is far, and of what comes soon.
template <class T, int R, int NV, bool Far, class D>
HWY_INLINE void add_vectors(D d, const value_view& v, int64_t offset, uint64_t seen,
                            const float* HWY_RESTRICT w, float* HWY_RESTRICT acc, int32_t dim) {
  constexpr int32_t n = static_cast<int32_t>(hn::MaxLanes(D()));
  constexpr int lines = Far ? std::max<int>(1, NV * n * sizeof(T) / line_bytes) : 0;
  hn::Vec<D> sum[R][NV];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < NV; ++i) sum[r][i] = hn::LoadU(d, acc + r * dim + i * n);
  }
  while (seen != 0) {
    const int32_t first = std::countr_zero(seen);
    const int32_t last = first + std::countr_one(seen >> first);
    for (int32_t j = first; j < last;) {
      lookahead::share next{nullptr, 0, last - j};
      if constexpr (Far) next = v.far->take(lines, last - j);
      for (const int32_t end = j + next.count; j < end; ++j, next.at += next.step) {
        const std::byte* near = nullptr;
        if constexpr (Far) near = v.rows[j + keys_near] + offset;
        add_key<T, lines>(d, v.rows[j] + offset, near, next.at, w + j, sum);
      }
    }
    seen = last == tile_keys ? 0 : seen & (~uint64_t{0} << last);
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < NV; ++i) hn::StoreU(sum[r][i], d, acc + r * dim + i * n);
  }
}

/// Adds the weighted values of all keys of a tile, and asks for as many lines at four places in turn. A
/// processor that runs ahead of what is read does so within a page: four pages keep more on its way than one.
/// `later`: the rows to ask for, `skip` bytes behind where these point.
template <class T, int R, int NV>
HWY_INLINE void add_vectors_beside(const value_view& v, int64_t offset, const std::byte* const* later,
                                   int64_t skip, const float* HWY_RESTRICT w, float* HWY_RESTRICT acc,
                                   int32_t dim) {
  const tag_f d;
  constexpr int places = 4;
  constexpr int64_t step = NV * lanes * int64_t{sizeof(T)};
  constexpr int lines = std::max<int>(1, step / line_bytes);
  vec_f sum[R][NV];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < NV; ++i) sum[r][i] = hn::LoadU(d, acc + r * dim + i * lanes);
  }
  const std::byte* at[places];
  for (int i = 0; i < places; ++i) at[i] = later[i * tile_keys / places] + skip;
  for (int32_t j = 0; j < tile_keys; j += places) {
    for (int turn = 0; turn < places; ++turn, at[turn - 1] += step) {
      const auto* row = reinterpret_cast<const T*>(v.rows[j + turn] + offset);
      vec_f value[NV];
      for (int i = 0; i < NV; ++i) value[i] = load_as(d, row + i * lanes);
      const std::byte* ask[lines];
      for (int i = 0; i < lines; ++i) ask[i] = at[turn] + i * line_bytes;
      multiply_rows<lines, 0>(d, w + j + turn, tile_keys, value, sum, ask);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < NV; ++i) hn::StoreU(sum[r][i], d, acc + r * dim + i * lanes);
  }
}

/// Bits of the keys [first, first + n) of a tile.
uint64_t key_bits(int32_t first, int32_t n) {
  return n == tile_keys ? ~uint64_t{0} : ((uint64_t{1} << n) - 1) << first;
}

/// What is left of a head dim, from channel `c`, that is no multiple of the widths of add_channels.
template <class T, int R>
HWY_NOINLINE void add_rest(const value_view& v, int64_t head, uint64_t seen, const float* w, float* acc,
                           int32_t dim, int32_t c) {
  const tag_f d;
  if constexpr (vectors_of(R) > 2) {
    for (; c + 2 * lanes <= dim; c += 2 * lanes)
      add_vectors<T, R, 2, false>(d, v, head + c * int64_t{sizeof(T)}, seen, w, acc + c, dim);
  }
  for (; c + lanes <= dim; c += lanes)
    add_vectors<T, R, 1, false>(d, v, head + c * int64_t{sizeof(T)}, seen, w, acc + c, dim);
  if constexpr (lanes > 8) {
    if (c < dim)
      add_vectors<T, R, 1, false>(tag_8(), v, head + c * int64_t{sizeof(T)}, seen, w, acc + c, dim);
  }
}

template <class T, int R, bool Far>
HWY_INLINE void add_channels(const value_view& v, int64_t head, uint64_t seen, const float* w, float* acc,
                             int32_t dim) {
  const tag_f d;
  constexpr int32_t wide = vectors_of(R);
  int32_t c = 0;
  for (; c + wide * lanes <= dim; c += wide * lanes) {
    add_vectors<T, R, wide, Far>(d, v, head + c * int64_t{sizeof(T)}, seen, w, acc + c, dim);
  }
  if constexpr (wide > 4) {
    for (; c + 4 * lanes <= dim; c += 4 * lanes)
      add_vectors<T, R, 4, Far>(d, v, head + c * int64_t{sizeof(T)}, seen, w, acc + c, dim);
  }
  if (c < dim) add_rest<T, R>(v, head, seen, w, acc, dim, c);
}

/// One head. What is left of a head dim that is no multiple of the width asks for nothing.
template <class T, int R>
HWY_INLINE void add_channels_beside(const value_view& v, int32_t h, int64_t head, const float* w, float* acc,
                                    int32_t dim) {
  constexpr int32_t wide = vectors_of(R);
  const bool last = h + 1 == v.heads;
  const int64_t next = last ? 0 : head + v.head_stride;
  int32_t c = 0;
  for (; c + wide * lanes <= dim; c += wide * lanes) {
    const int64_t offset = c * int64_t{sizeof(T)}, skip = next + offset * tile_keys / 4;
    add_vectors_beside<T, R, wide>(v, head + offset, last ? v.after : v.rows, skip, w, acc + c, dim);
  }
  if constexpr (wide > 4) {
    for (; c + 4 * lanes <= dim; c += 4 * lanes) {
      const int64_t offset = c * int64_t{sizeof(T)}, skip = next + offset * tile_keys / 4;
      add_vectors_beside<T, R, 4>(v, head + offset, last ? v.after : v.rows, skip, w, acc + c, dim);
    }
  }
  if (c < dim) add_rest<T, R>(v, head, ~uint64_t{0}, w, acc, dim, c);
}

template <class T, int R>
HWY_NOINLINE void add_rows(const value_view& v, uint64_t seen, const float* w, float* acc, int32_t dim) {
  int64_t head = v.head;
  for (int32_t h = 0; h < v.heads; ++h, head += v.head_stride) {
    if (v.after != nullptr) {
      add_channels_beside<T, R>(v, h, head, w, acc, dim);
    } else if (v.far != nullptr) {
      add_channels<T, R, true>(v, head, seen, w, acc, dim);
    } else {
      add_channels<T, R, false>(v, head, seen, w, acc, dim);
    }
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

// ---- whole tiles, near ----

/// The values of a tile whose keys all rows see, and where the first keys of the next tile lie.
struct block_walk {
  const value_view& v;
  int32_t runs, keys;                ///< of this tile, keys of each
  int32_t cells;                     ///< of a head in a block, that are asked for ahead
  int32_t parts;                     ///< into which the last ones are cut to ask for as many runs of keys
  const std::byte* next[tile_keys];  ///< [cells * parts] first keys
};

/// One key, from vector I on: every vector is loaded once, for R rows with factors `x`. Of the lines at `at`,
/// every `Passes`-th is asked for. A recursion for the reason that multiply_rows is one.
template <class T, int Pass, int Passes, int I, int R, int NV>
HWY_INLINE void add_whole_key(const std::byte* row, const std::byte* at, const vec_f (&x)[R],
                              vec_f (&sum)[R][NV]) {
  if constexpr (I < NV) {
    constexpr int per_line = line_bytes / (lanes * sizeof(T));
    const auto value = load_as(tag_f(), reinterpret_cast<const T*>(row) + I * lanes);
    for (int r = 0; r < R; ++r) sum[r][I] = hn::MulAdd(x[r], value, sum[r][I]);
    if constexpr (I % per_line == 0 && I / per_line % Passes == Pass) fetch(at + I / per_line * line_bytes);
    add_whole_key<T, Pass, Passes, I + 1>(row, at, x, sum);
  }
}

/// NV vectors of a cell of `n` keys, R rows in as many passes as registers allow.
template <class T, int NV, int R, int Pass = 0>
HWY_INLINE void add_passes(const std::byte* row, const std::byte* at, int64_t stride, int32_t n,
                           const float* HWY_RESTRICT w, float* HWY_RESTRICT acc, int32_t dim) {
  constexpr int passes = (R * NV + registers - 1) / registers;
  if constexpr (Pass < passes) {
    const tag_f d;
    constexpr int first = R * Pass / passes, rows = R * (Pass + 1) / passes - first;
    vec_f sum[rows][NV];
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < NV; ++i) sum[r][i] = hn::LoadU(d, acc + (first + r) * dim + i * lanes);
    }
    const float* weights = w + first * tile_keys;
    const std::byte* from = row;
    const std::byte* ask = at;
    for (const float* end = weights + n; weights < end; ++weights, from += stride, ask += stride) {
      vec_f x[rows];
      for (int r = 0; r < rows; ++r) x[r] = hn::Set(d, weights[r * tile_keys]);
      add_whole_key<T, Pass, passes, 0>(from, ask, x, sum);
    }
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < NV; ++i) hn::StoreU(sum[r][i], d, acc + (first + r) * dim + i * lanes);
    }
    add_passes<T, NV, R, Pass + 1>(row, at, stride, n, w, acc, dim);
  }
}

/// One cell. What is left of a head dim that is no multiple of the widths asks for nothing.
template <class T, int R>
HWY_INLINE void add_cell(const block_walk& b, int64_t head, const std::byte* row, const std::byte* at,
                         int32_t key, int32_t n, const float* w, float* acc, int32_t dim) {
  constexpr int32_t most = registers / 3;
  int32_t c = 0;
  for (; c + most * lanes <= dim; c += most * lanes) {
    add_passes<T, most, R>(row + c * sizeof(T), at + c * sizeof(T), b.v.stride, n, w + key, acc + c, dim);
  }
  if constexpr (most > 4) {
    for (; c + 4 * lanes <= dim; c += 4 * lanes) {
      add_passes<T, 4, R>(row + c * sizeof(T), at + c * sizeof(T), b.v.stride, n, w + key, acc + c, dim);
    }
  }
  if (c < dim) add_rest<T, R>(b.v, head, key_bits(key, n), w, acc, dim, c);
}

/// Values of all heads, block after block as they lie in memory.
template <class T, int R>
HWY_NOINLINE void add_blocks(const block_walk& b, const float* w, float* acc, int32_t dim) {
  const value_view& v = b.v;
  const int32_t keys = b.keys, near = v.heads - b.cells, each = keys / b.parts;
  for (int32_t r = 0; r < b.runs; ++r) {
    for (int32_t h = 0; h < v.heads; ++h) {
      const int64_t head = h * v.head_stride;
      const std::byte* row = v.rows[r * keys] + head;
      const float* weights = w + h * R * tile_keys;
      float* to = acc + h * R * int64_t{dim};
      if (h < near || r + 1 < b.runs) {
        const std::byte* at =
            h < near ? row + b.cells * v.head_stride : v.rows[(r + 1) * keys] + (h - near) * v.head_stride;
        add_cell<T, R>(b, head, row, at, r * keys, keys, weights, to, dim);
        continue;
      }
      for (int32_t p = 0; p < b.parts; ++p, row += each * v.stride) {
        add_cell<T, R>(b, head, row, b.next[(h - near) * b.parts + p], r * keys + p * each, each, weights, to,
                       dim);
      }
    }
  }
}

template <class T, int R = 1>
void walk_block(int64_t rows, const block_walk& b, const float* w, float* acc, int32_t dim) {
  if constexpr (R < only_rows) {
    if (rows > R) return walk_block<T, R + 1>(rows, b, w, acc, dim);
  }
  add_blocks<T, R>(b, w, acc, dim);
}

void walk_any(int64_t rows, const block_walk& b, const float* w, float* acc, int32_t dim) {
  if (b.v.type == KVC_F32) return walk_block<float>(rows, b, w, acc, dim);
  if (b.v.type == KVC_F16) return walk_block<f16>(rows, b, w, acc, dim);
  walk_block<bf16>(rows, b, w, acc, dim);
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
