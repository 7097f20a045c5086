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
#include "kvcache/quant/hadamard.hpp"
#include "lookahead.hpp"
#include "simd.hpp"
#include "simd_inner.hpp"
#include "simd_scores.hpp"
#include "simd_states.hpp"
#include "simd_values.hpp"
// These need what those above define.
#include "simd_codes.hpp"
#include "simd_pack.hpp"
#include "simd_packed.hpp"
//
#include "simd_dot.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

void fold(const fold_rows&);      // score_simd.cpp
bool packable(const cell_rows&);  // seal_simd.cpp
bool pack(const side_format&, bool keys, const cell_rows&, const packed_rows&);

// ---- the kernel ----

void prepare(const attend_item& item, const attend_scratch& s) {
  const row_blocks blocks(item);
  const int32_t dim = item.kv->dim_k;
  for (int64_t b = 0; b < blocks.count * item.heads; ++b) {
    const int64_t in_head = blocks.begin(b % blocks.count);
    const int64_t first = b / blocks.count * blocks.rows + in_head;
    const int64_t n = blocks.begin(b % blocks.count + 1) - in_head;
    for (int64_t i = 0; i < n; ++i) {
      const std::byte* from = bytes_of(item.q->data) + item.row_of(first + i) * item.q->row_stride +
                              item.q_head_of(first + i) * item.q->head_stride;
      float* to = s.q + first * dim + i;
      if (rotates_query(*item.kv)) {
        float x[max_dim];
        with_type(item.q->type, [&](auto* tag) {
          using T = std::remove_cv_t<std::remove_pointer_t<decltype(tag)>>;
          for (int32_t c = 0; c < dim; ++c) x[c] = to_float(read<T>(from + c * int64_t{sizeof(T)}));
        });
        hadamard(x, dim);
        for (int32_t c = 0; c < dim; ++c) to[c * n] = x[c] * item.q_scale;
        continue;
      }
      with_type(item.q->type, [&](auto* tag) {
        using T = std::remove_cv_t<std::remove_pointer_t<decltype(tag)>>;
        for (int32_t c = 0; c < dim; ++c)
          to[c * n] = to_float(read<T>(from + c * int64_t{sizeof(T)})) * item.q_scale;
      });
    }
  }
  if (item.kv->integer_dot != 0) copy_query_rows(item, s);
}

/// Keys that all rows of the block see or none does may be added together; between the first and the last
/// key they disagree on, each row goes on alone, so every row keeps its ascending order.
void add_values(const attend_item& item, const attend_scratch& s, const value_view& v, int64_t first,
                int64_t n) {
  const int32_t dim = item.kv->dim_v;
  const uint64_t lead = s.seen[first / item.group];
  uint64_t differ = 0;
  for (int64_t r = item.rows == 1 ? n : 0; r < n; ++r) {
    differ |= s.seen[(first + r) / item.group] ^ lead;
  }
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
  bool whole;        ///< every row sees every key
  bool alike;        ///< all rows see the same keys
};

/// What to ask for: nothing where so many rows share a tile that memory does not matter, the whole next tile
/// where arithmetic takes about as long as reading or blocks are short; Intel's processors run ahead of four
/// pages read side by side so well that asking for more only takes their place.
asking asking_for(const attend_item& item, const row_blocks& blocks) {
  if (blocks.count > 2) return asking::nothing;
  const kvc_plane& k = item.kv->k;
  if (item.kv->block < 16 || blocks.count == 2 || item.forms) return asking::far;
  if (k.token_stride != element_size(k.type) || is_intel()) return asking::near;
  const bool slow = blocks.rows >= 2 * element_size(k.type) || (blocks.rows >= 4 && item.kv->block >= 32);
  return slow ? asking::far : asking::near;
}

tile_pass pass_of(const tile& t) {
  return {t.first / tile_keys, t.form};
}

/// Keys of one head in scratch. While it packs, it asks for the head after.
void pack_key_view(const tile_work& t, int32_t head, key_view& k) {
  const attend_item& item = t.item;
  const bool last = head + 1 == item.heads;
  tile own = t.now, next{};
  if (head != 0) resolve_tile(item, item.head + head, pass_of(t.now), own);
  if (t.next != nullptr && last) next = *t.next;
  if (t.next != nullptr && !last) resolve_tile(item, item.head + head + 1, pass_of(t.now), next);
  pack_keys(item, own, t.next != nullptr && t.far == nullptr ? &next : nullptr, t.scratch.k_tile);
  if (item.turning != nullptr) turn_keys(item, t.scratch.angles, t.scratch.k_tile);
  k.far = t.far;
  for (int32_t v = 0; v < key_vectors; ++v) k.keys[v] = bytes_of(t.scratch.k_tile + v * lanes);
  k.stride = tile_keys * int64_t{sizeof(float)};
  k.type = KVC_F32;
}

/// Values of one head in scratch.
void pack_value_view(const tile_work& t, int32_t head, value_view& v) {
  tile own = t.now;
  if (head != 0) resolve_tile(t.item, t.item.head + head, pass_of(t.now), own);
  pack_values(t.item, own, t.scratch.v_tile, v);
  v.type = KVC_F32;
  v.heads = 1;
}

/// Scores of `k.heads` heads from `head` on.
void score_some_heads(const tile_work& t, int32_t head, key_view& k) {
  const attend_item& item = t.item;
  const attend_scratch s = head_scratch(item, t.scratch, head);
  for (int64_t b = 0; b < t.blocks.count; ++b, k.ahead = 0, k.far = nullptr) {
    const int64_t first = t.blocks.begin(b), n = t.blocks.begin(b + 1) - first;
    uint64_t any = item.rows == 1 ? 1 : 0;
    for (int64_t r = first; any == 0 && r < first + n; ++r) any |= s.seen[r / item.group];
    if (any == 0) continue;
    score_any(n, k, s.q + first * item.kv->dim_k, item.kv->dim_k, s.weights + first * tile_keys);
  }
}

/// Scores of all heads from codes.
void score_packed_heads(const tile_work& t) {
  const attend_item& item = t.item;
  packed_view k;
  k.far = t.far;
  for (int32_t h = 0; h < item.heads; ++h) {
    const attend_scratch s = head_scratch(item, t.scratch, h);
    point_at_packed_keys(item, t.now, item.head + h, k);
    with_code(item.kv->k.type, [&](auto type) {
      score_codes<decltype(type)::value>(t.blocks.rows, k, s.q, item.kv->dim_k, s.weights);
    });
  }
}

/// Weighted values of all heads from codes. Rows that do not see the same keys go one by one.
void add_packed_heads(const tile_work& t) {
  const attend_item& item = t.item;
  const int32_t dim = item.kv->dim_v;
  packed_view v;
  v.far = t.far;
  for (int32_t h = 0; h < item.heads; ++h) {
    const attend_scratch s = head_scratch(item, t.scratch, h);
    point_at_packed_values(item, t.now, item.head + h, v);
    with_code(item.kv->v.type, [&](auto type) {
      const int64_t step = t.alike ? t.blocks.rows : 1;
      for (int64_t r = 0; r < t.blocks.rows; r += step) {
        const uint64_t seen = s.seen[r / item.group];
        add_codes<decltype(type)::value>(step, v, seen, s.weights + r * tile_keys, s.acc + r * dim, dim);
      }
    });
  }
}

/// Scores of all heads.
void score_heads(const tile_work& t) {
  const attend_item& item = t.item;
  if (item.kv->integer_dot != 0 && t.now.form == tile_form::sealed) {
    return score_dots(item, t.scratch, t.now, t.far);
  }
  if (codes_direct(item, t.now, true, t.blocks.count)) return score_packed_heads(t);
  const bool direct = keys_direct(item, t.now, t.blocks.count);
  if (item.turning != nullptr) find_angles(item, t.now, t.scratch.angles);
  key_view k{};
  if (direct) point_at_keys(item, t.now, k);
  k.head_stride = item.kv->k.head_stride;
  k.heads = direct && t.blocks.count == 1 ? item.heads : 1;
  for (int32_t h = 0; h < item.heads; h += k.heads) {
    if (direct) {
      k.head = h * k.head_stride;
      k.far = t.far;
      k.ahead = t.next != nullptr ? bytes_ahead / tile_keys * t.now.run_keys : 0;
    } else {
      pack_key_view(t, h, k);
    }
    score_some_heads(t, h, k);
  }
}

/// Hands out scores of `n` states of one row, or of heads of one row, as they stand, as far as the tile has
/// slots.
void keep_scores(const tile_work& t, int64_t first, int64_t n) {
  const slot_range kept = slots_of_form(t.item, t.now, first % t.item.per_head() / t.item.group);
  const int64_t slots = kept.last - kept.first, stride = t.item.out->key_score_head_stride;
  float* to =
      score_row(*t.item.out, t.item.row_of(first), t.item.q_head_of(first)) + t.now.first + kept.first;
  const float* from = t.scratch.weights + first * tile_keys + kept.first;
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
void soften_states(const tile_work& t, int64_t first, int64_t last, uint64_t seen, const std::byte* ask,
                   int64_t each) {
  constexpr int64_t most = 16;
  const attend_scratch& s = t.scratch;
  const int32_t dim = t.item.kv->dim_v;
  float top[most];
  for (; first < last; first += most) {
    const int64_t n = std::min(most, last - first);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t line = 0; line < each; ++line, ask += line_bytes) fetch(ask);
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
    const uint64_t seen = t.scratch.seen[alike ? 0 : first % item.per_head() / item.group];
    if (seen != 0) soften_states(t, first, last, seen, ask + first * each * line_bytes, each);
  }
}

void add_head(const tile_work& t, int32_t head, value_view& v) {
  const attend_scratch s = head_scratch(t.item, t.scratch, head);
  for (int64_t b = 0; b < t.blocks.count; ++b, v.far = nullptr) {
    const int64_t first = t.blocks.begin(b);
    add_values(t.item, s, v, first, t.blocks.begin(b + 1) - first);
  }
}

/// Values of all heads, head after head.
void add_by_head(const tile_work& t, value_view& v) {
  v.heads = t.blocks.count == 1 && t.item.rows == 1 ? t.item.heads : 1;
  for (int32_t h = 0; h < t.item.heads; h += v.heads) {
    v.head = h * v.head_stride;
    v.far = t.far;
    add_head(t, h, v);
  }
}

/// Values of all heads, block after block as they lie in memory.
void add_by_block(const tile_work& t, value_view& v) {
  const int64_t cell = v.stride * t.now.run_keys;
  const auto far = static_cast<int32_t>(std::clamp<int64_t>(bytes_ahead / cell, 1, t.item.heads));
  const auto streams = static_cast<uint32_t>(std::clamp(t.next->runs / far, 1, t.now.run_keys / 4));
  block_walk b{v, t.now.runs, t.now.run_keys, far, static_cast<int32_t>(std::bit_floor(streams)), {}};
  v.heads = t.item.heads;
  for (int32_t i = 0; i < far * b.parts; ++i) {
    const bool there = i < t.next->runs && t.next->k[i] != nullptr;
    b.next[i] = there ? t.next->k[i] : v.rows[0];
  }
  walk_any(t.blocks.rows, b, t.scratch.weights, t.scratch.acc, t.item.kv->dim_v);
}

/// Values of all heads, head after head, for keys that all rows see.
void add_beside(const tile_work& t, value_view& v) {
  const std::byte* after[tile_keys];
  for (int32_t j = 0; j < tile_keys; ++j) {
    const int32_t run = j / t.now.run_keys;
    const bool there = run < t.next->runs && t.next->k[run] != nullptr;
    after[j] = there ? t.next->k[run] + j % t.now.run_keys * v.stride : v.rows[j];
  }
  v.after = after;
  v.heads = t.item.heads;
  add_any(t.blocks.rows, v, ~uint64_t{0}, t.scratch.weights, t.scratch.acc, t.item.kv->dim_v);
}

/// Weighted values of all heads.
void add_heads(const tile_work& t) {
  const attend_item& item = t.item;
  if (codes_direct(item, t.now, false, t.blocks.count)) return add_packed_heads(t);
  const kvc_plane& plane = v_plane(*item.kv);
  const bool direct = values_direct(item, t.now, t.blocks.count);
  value_view v{};
  v.head_stride = plane.head_stride;
  if (direct) point_at_values(item, t.now, v);
  const bool near = t.far == nullptr && t.next != nullptr && t.now.run_keys >= 16;
  if (direct && near && t.whole && t.blocks.count == 1) {
    return is_intel() ? add_beside(t, v) : add_by_block(t, v);
  }
  if (direct) return add_by_head(t, v);
  for (int32_t h = 0; h < item.heads; ++h) {
    pack_value_view(t, h, v);
    v.head_stride = 0;
    add_head(t, h, v);
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
  tile_pass pass = first_pass(item, range.first);
  resolve_tile(item, item.head, pass, two[0]);
  for (int turn = 0; pass.index < range.last; turn ^= 1) {
    const tile& now = two[turn];
    tile& next = two[turn ^ 1];
    pass = next_pass(item, pass);
    const bool more = pass.index < tiles && ask != asking::nothing;
    if (pass.index < tiles) resolve_tile(item, item.head, pass, next);
    if (seen_keys(item, now, s.seen) == 0) continue;
    const bool whole = more && ask == asking::far && next.present != 0;
    if (whole) far.aim(item, next);
    const bool alike =
        std::all_of(s.seen, s.seen + item.rows, [&s](uint64_t bits) { return bits == s.seen[0]; });
    const bool all = alike && s.seen[0] == ~uint64_t{0};
    const tile_work work{item, s, blocks, now, more ? &next : nullptr, whole ? &far : nullptr, all, alike};
    score_heads(work);
    soften_heads(work);
    if (item.out->o != nullptr) add_heads(work);
  }
  for (int64_t i = 0; i < item.states(); ++i) s.sum[i] = fold_lanes(s.lanes + i * sum_lanes);
}

/// One tile's scores, capped. Rows read it again and again, so nothing is asked for ahead.
uint64_t score(const attend_item& item, const attend_scratch& s, tile_pass pass) {
  tile now;
  resolve_tile(item, item.head, pass, now);
  const uint64_t any = seen_keys(item, now, s.seen);
  if (any == 0) return 0;
  const row_blocks blocks(item);
  score_heads({item, s, blocks, now, nullptr, nullptr, false, false});
  for (int64_t i = 0; item.cap_log2 != 0 && i < item.states(); ++i) {
    (void)admit_row(s.weights + i * tile_keys, ~uint64_t{0}, item.cap_log2, 0);
  }
  return any;
}

void unpack(const kvc_kv& kv, bool keys, int32_t id, int32_t head, float* to) {
  const int32_t rows = keys ? kv.dim_k : kv.block, columns = keys ? kv.block : kv.dim_v;
  unpack_any(code_cell(kv, keys, id, head), {0, rows, 0, columns}, {to, columns});
}

const kernel body = {this_target, &prepare, &split, &join_states, &score, &fold, &unpack, &packable, &pack};

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
bool has_vnni() noexcept {
  return has_avx512() && __builtin_cpu_supports("avx512vnni");
}
#endif

struct abilities {
  bool avx2 = false, avx512 = false, vnni = false, intel = false;
};

/// Asked once: under a hypervisor the question alone takes longer than attending over a short sequence.
[[maybe_unused]] abilities& this_machine() noexcept {
#if HWY_ARCH_X86
  static abilities found = {has_avx2(), has_avx512(), has_vnni(), __builtin_cpu_is("intel") != 0};
#else
  static abilities found;
#endif
  return found;
}

}  // namespace

bool may_use_vnni() noexcept {
  return this_machine().vnni;
}

bool is_intel() noexcept {
  return this_machine().intel;
}

void be_intel(bool yes) noexcept {
  this_machine().intel = yes;
}

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
