// SPDX-License-Identifier: Apache-2.0
// Scores of queries against the keys of a tile: vectors run across keys, so no result needs a horizontal sum.
// Included once per instruction set, after simd_inner.hpp.
#include "lookahead.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

/// Keys of a tile as the inner loops see them.
struct key_view {
  const std::byte* keys[key_vectors];  ///< first channel of each vector of keys
  int64_t head;                        ///< bytes from there to the first head at work
  int32_t heads;                       ///< one after the other; their states lie dense
  int64_t head_stride;                 ///< bytes from one to the next
  int64_t stride;                      ///< bytes from channel to channel
  int64_t ahead;                       ///< bytes from a key to what is asked for with it, 0 = nothing
  lookahead* far;                      ///< or whence the lines to ask for come, null = none
  int32_t type;
};

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
HWY_INLINE void score_vectors(const key_view& k, int64_t head, int32_t first, const float* HWY_RESTRICT q,
                              int32_t dim, float* HWY_RESTRICT w) {
  const tag_f d;
  const std::byte* keys[NV];
  for (int v = 0; v < NV; ++v) keys[v] = k.keys[first + v] + head;
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

template <class T, int R, asking Ask>
HWY_INLINE void score_tile(const key_view& k, const float* q, int32_t dim, float* w) {
  constexpr int32_t step = std::min(vectors_of(R), key_vectors);
  int64_t head = k.head;
  for (int32_t h = 0; h < k.heads; ++h, head += k.head_stride, q += R * dim, w += R * tile_keys) {
    for (int32_t v = 0; v < key_vectors; v += step) score_vectors<T, R, step, Ask>(k, head, v, q, dim, w);
  }
}

template <class T, int R>
HWY_NOINLINE void score_rows(const key_view& k, const float* q, int32_t dim, float* w) {
  if (k.far != nullptr) return score_tile<T, R, asking::far>(k, q, dim, w);
  if (k.ahead != 0) return score_tile<T, R, asking::near>(k, q, dim, w);
  score_tile<T, R, asking::nothing>(k, q, dim, w);
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

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
