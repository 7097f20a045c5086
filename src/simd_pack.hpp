// SPDX-License-Identifier: Apache-2.0
// Tiles for the inner loops: views of keys and values where they lie as the loops want them, otherwise copies
// of any strides and types as floats. Included once per instruction set, after simd_scores.hpp and
// simd_values.hpp.
#include <bit>
#include <cstring>

#include "element.hpp"
#include "kvcache/quant/hadamard.hpp"
#include "rope.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

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

/// Whether the tile's keys, or values, are codes.
bool packed(const tile& t, const kvc_plane& p) {
  return t.form == tile_form::sealed && is_code(p.type);
}

void pack_keys(const attend_item& item, const tile& t, const tile* next, float* scratch) {
  if (packed(t, item.kv->k)) return unpack_keys(item, t, scratch);
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

/// cos and sin of the tile's keys, [dim][tile_keys], for pair i in rows 2i and 2i + 1.
void find_angles(const attend_item& item, const tile& t, float* HWY_RESTRICT angles) {
  const int32_t dims = item.kv->k_rope->dims;
  for (uint64_t rest = t.present; rest != 0; rest &= rest - 1) {
    const int32_t j = std::countr_zero(rest);
    float own[max_dim];
    const float* from = item.turning->cos_sin(position_of(item, t.first + j), own);
    for (int32_t i = 0; i < dims; ++i) angles[i * tile_keys + j] = from[i];
  }
}

/// Hadamard rotation of all keys of a tile, as hadamard() does it for one.
void rotate_keys(float* HWY_RESTRICT tile_of_keys, int32_t dim) {
  const tag_f d;
  for (int32_t h = 1; h < dim; h *= 2) {
    for (int32_t i = 0; i < dim; ++i) {
      if ((i & h) != 0) continue;
      for (int32_t v = 0; v < tile_keys; v += lanes) {
        float* at = tile_of_keys + i * tile_keys + v;
        const auto a = hn::LoadU(d, at), b = hn::LoadU(d, at + h * tile_keys);
        hn::StoreU(hn::Add(a, b), d, at);
        hn::StoreU(hn::Sub(a, b), d, at + h * tile_keys);
      }
    }
  }
  const auto factor = hn::Set(d, hadamard_factor(dim));
  for (int32_t i = 0; i < dim * tile_keys; i += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, tile_of_keys + i), factor), d, tile_of_keys + i);
  }
}

/// Keys that were stored before rotation, turned by their positions.
void turn_keys(const attend_item& item, const float* HWY_RESTRICT angles, float* HWY_RESTRICT keys) {
  const tag_f d;
  const kvc_rope& rope = *item.kv->k_rope;
  if ((item.kv->hadamard & KVC_HADAMARD_K) != 0) rotate_keys(keys, item.kv->dim_k);
  const int32_t half = rope.dims / 2;
  const bool interleaved = rope.style == KVC_ROPE_INTERLEAVED;
  for (int32_t i = 0; i < half; ++i) {
    float* first = keys + (interleaved ? 2 * i : i) * tile_keys;
    float* second = keys + (interleaved ? 2 * i + 1 : i + half) * tile_keys;
    for (int32_t v = 0; v < tile_keys; v += lanes) {
      const auto a = hn::LoadU(d, first + v), b = hn::LoadU(d, second + v);
      const auto c = hn::LoadU(d, angles + 2 * i * tile_keys + v);
      const auto s = hn::LoadU(d, angles + (2 * i + 1) * tile_keys + v);
      hn::StoreU(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), d, first + v);
      hn::StoreU(hn::Add(hn::Mul(a, s), hn::Mul(b, c)), d, second + v);
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
  return t.open == 0 && !is_code(p.type) && item.turning == nullptr &&
         p.token_stride == element_size(p.type) && t.run_keys >= lanes && !widen_once(blocks, p.type);
}
bool values_direct(const attend_item& item, const tile& t, int64_t blocks) {
  const kvc_plane& p = v_plane(*item.kv);
  return t.open == 0 && !is_code(p.type) && p.dim_stride == element_size(p.type) &&
         !widen_once(blocks, p.type);
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

/// Where values lie; absent ones repeat a present one, whose keys are not visited.
void point_at_values(const attend_item& item, const tile& t, value_view& v) {
  v.stride = v_plane(*item.kv).token_stride;
  v.type = v_plane(*item.kv).type;
  const std::byte* some = nullptr;
  for (int32_t r = 0; r < t.runs; ++r) some = t.v[r] != nullptr ? t.v[r] : some;
  for (int32_t j = 0; j < tile_keys; j += t.run_keys) {
    const int32_t run = j / t.run_keys;
    const std::byte* at = run < t.runs && t.v[run] != nullptr ? t.v[run] : some;
    for (int32_t i = 0; i < t.run_keys; ++i) v.rows[j + i] = at + i * v.stride;
  }
  for (int32_t i = 0; i < keys_near; ++i) v.rows[tile_keys + i] = v.rows[i] + v.head_stride;
}

void pack_values(const attend_item& item, const tile& t, float* scratch, value_view& v) {
  if (packed(t, v_plane(*item.kv))) {
    for (int32_t j = 0; j < tile_keys; ++j) v.rows[j] = bytes_of(scratch + int64_t{j} * item.kv->dim_v);
    return unpack_values(item, t, scratch);
  }
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

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
