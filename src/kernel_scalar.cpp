// SPDX-License-Identifier: Apache-2.0
// The scalar twin: the arithmetic of kernel.hpp in its plainest form, one row and one key at a time, through
// strides. It is the reference of the SIMD kernels, bit for bit, and the kernel of machines without one.
#include <algorithm>
#include <bit>
#include <limits>

#include "codes.hpp"
#include "element.hpp"
#include "exp2.hpp"
#include "kernel.hpp"
#include "kvcache/quant/hadamard.hpp"
#include "rope.hpp"
#include "state.hpp"

namespace kvcache::detail {
namespace {

void prepare(const attend_item& item, const attend_scratch& s) noexcept {
  const int32_t dim = item.kv->dim_k;
  const int64_t element = element_size(item.q->type);
  for (int64_t i = 0; i < item.states(); ++i) {
    const std::byte* from = bytes_of(item.q->data) + item.row_of(i) * item.q->row_stride +
                            item.q_head_of(i) * item.q->head_stride;
    float* to = s.q + i * dim;
    for (int32_t d = 0; d < dim; ++d) to[d] = load(from + d * element, item.q->type);
    if (rotates_query(*item.kv)) hadamard(to, dim);
    for (int32_t d = 0; d < dim; ++d) to[d] *= item.q_scale;
  }
}

/// Channels of a key, or of a value.
void load_slot(const attend_item& item, const tile& t, int32_t j, bool keys, float* to) noexcept {
  const kvc_kv& kv = *item.kv;
  const int32_t run = j / t.run_keys, dim = keys ? kv.dim_k : kv.dim_v;
  const bool open = (t.open >> run & 1) != 0;
  const kvc_plane& sealed = keys ? kv.k : v_plane(kv);
  const bool coded = is_code(sealed.type);
  const std::byte* exempt = coded && j < kv.exempt ? exempt_cell(item, t, keys) : nullptr;
  if (coded && !open && exempt == nullptr) {
    const code_cell c(kv, keys, t.id[run], t.head);
    const auto slot = static_cast<int32_t>((t.first + j) & (kv.block - 1));
    for (int32_t d = 0; d < dim; ++d) to[d] = c.value(slot, d);
    return;
  }
  const kvc_plane& plane = exempt != nullptr ? (keys ? kv.exempt_k : kv.exempt_v)
                           : !open           ? sealed
                           : keys            ? kv.open_k
                                             : open_v_plane(kv);
  const std::byte* from = exempt != nullptr ? exempt + j * plane.token_stride
                                            : (keys ? t.k : t.v)[run] + (j % t.run_keys) * plane.token_stride;
  for (int32_t d = 0; d < dim; ++d) to[d] = load(from + d * plane.dim_stride, plane.type);
}

/// A key as the query meets it.
void load_key(const attend_item& item, const tile& t, int32_t j, float* k) noexcept {
  load_slot(item, t, j, true, k);
  if (item.turning == nullptr) return;
  if ((item.kv->hadamard & KVC_HADAMARD_K) != 0) hadamard(k, item.kv->dim_k);
  float angles[max_dim];
  item.turning->turn(k, item.turning->cos_sin(position_of(item, t.first + j), angles));
}

/// The rule at dot_query, for one key and query.
float score_integers(const code_cell& c, int32_t slot, const float* q) noexcept {
  const int32_t h = middle_code(c.type);
  float largest = 0, lanes[bias_lanes] = {};
  for (int32_t d = 0; d < round_up_lanes(c.dim); ++d) {
    const int64_t at = d < c.dim ? c.scale_index(slot, d) : 0;
    const float s = d < c.dim ? c.scale_at(at) : 0, z = d < c.dim ? c.zero_at(at) : 0;
    const float own = d < c.dim ? q[d] : 0;
    largest = std::max(largest, std::fabs(own * s));
    float& lane = lanes[d % bias_lanes];
    lane = std::fma(own, std::fma(static_cast<float>(h), s, z), lane);
  }
  const float up = largest >= least_product ? 127 / largest : 0;
  int32_t sum = 0;
  for (int32_t d = 0; d < c.dim; ++d) {
    const float x = q[d] * c.scale_at(c.scale_index(slot, d)) * up;
    const float i = x >= -127 ? std::min(x, 127.0f) : -127.0f;  // of infinities and NaN a number
    sum += static_cast<int32_t>(std::nearbyint(i)) * (static_cast<int32_t>(c.code_at(slot, d)) - h);
  }
  return std::fma(static_cast<float>(sum), largest / 127, fold_lanes(lanes));
}

/// Whether the key's score is an integer dot product.
bool dots_integers(const attend_item& item, const tile& t, int32_t j) noexcept {
  if (item.kv->integer_dot == 0 || (t.open >> (j / t.run_keys) & 1) != 0) return false;
  return j >= item.kv->exempt || exempt_cell(item, t, true) == nullptr;
}

/// An integer dot product, or one sequential fma chain over the channels; then the soft cap.
float score(const attend_item& item, const tile& t, int32_t j, const float* q) noexcept {
  float sum = 0;
  if (dots_integers(item, t, j)) {
    const code_cell c(*item.kv, true, t.id[j / t.run_keys], t.head);
    sum = score_integers(c, static_cast<int32_t>((t.first + j) & (item.kv->block - 1)), q);
  } else {
    float k[max_dim];
    load_key(item, t, j, k);
    for (int32_t d = 0; d < item.kv->dim_k; ++d) sum = std::fma(q[d], k[d], sum);
  }
  return item.cap_log2 != 0 ? item.cap_log2 * tanh_fixed(sum) : sum;
}

/// Scores of the keys in `seen`, -infinity for the others.
void score_seen(const attend_item& item, const tile& t, uint64_t seen, const float* q, float* w) noexcept {
  std::fill_n(w, tile_keys, -std::numeric_limits<float>::infinity());
  for (; seen != 0; seen &= seen - 1) {
    const int32_t j = std::countr_zero(seen);
    w[j] = score(item, t, j, q);
  }
}

/// Scores to weights: new maximum, weights, lane sums, rescaled accumulators.
void soften(float* w, float& max, float* lanes, float* acc, int32_t dim_v) noexcept {
  float top = max;
  for (int32_t j = 0; j < tile_keys; ++j) top = top > w[j] ? top : w[j];
  const float shrink = exp2_weight(max - top);
  for (int32_t j = 0; j < tile_keys; ++j) w[j] = exp2_weight(w[j] - top);
  for (int32_t i = 0; i < sum_lanes; ++i) {
    const float sum = (w[i] + w[i + 16]) + (w[i + 32] + w[i + 48]);
    lanes[i] = std::fma(lanes[i], shrink, sum);
  }
  for (int32_t d = 0; d < dim_v; ++d) acc[d] *= shrink;
  max = top;
}

void add_values(const attend_item& item, const tile& t, uint64_t seen, const float* w, float* acc) noexcept {
  for (; seen != 0; seen &= seen - 1) {
    const int32_t j = std::countr_zero(seen);
    float v[max_dim];
    load_slot(item, t, j, false, v);
    for (int32_t d = 0; d < item.kv->dim_v; ++d) acc[d] = std::fma(w[j], v[d], acc[d]);
  }
}

void split(const attend_item& item, const attend_scratch& s, tile_range range) noexcept {
  const int32_t dim_k = item.kv->dim_k, dim_v = item.kv->dim_v;
  clear_states(s.acc, s.max, s.lanes, item.states(), dim_v);
  for (tile_pass pass = first_pass(item, range.first); pass.index < range.last;
       pass = next_pass(item, pass)) {
    for (int64_t state = 0; state < item.states(); ++state) {
      tile t;
      resolve_tile(item, item.head + static_cast<int32_t>(state / item.per_head()), pass, t);
      if (seen_keys(item, t, s.seen) == 0) break;
      const uint64_t seen = s.seen[state % item.per_head() / item.group];
      if (seen == 0) continue;
      float* w = s.weights;
      score_seen(item, t, seen, s.q + state * dim_k, w);
      if (item.out->key_score != nullptr) {
        float* row = score_row(*item.out, item.row_of(state), item.q_head_of(state)) + t.first;
        const slot_range kept = slots_of_form(item, t, state % item.per_head() / item.group);
        std::copy(w + kept.first, w + kept.last, row + kept.first);
      }
      soften(w, s.max[state], s.lanes + state * sum_lanes, s.acc + state * dim_v, dim_v);
      if (item.out->o != nullptr) add_values(item, t, seen, w, s.acc + state * dim_v);
    }
  }
  for (int64_t i = 0; i < item.states(); ++i) s.sum[i] = fold_lanes(s.lanes + i * sum_lanes);
}

void join_states(const joined_states& j) noexcept {
  for (int64_t i = 0; i < j.count; ++i) {
    const int64_t at = i * j.part_step;
    state total{j.max[i], j.sum[i]};
    join(total, j.acc + i * j.dim, {j.part_max[at], j.part_sum[at]}, j.part_acc + at * j.dim, j.dim);
    j.max[i] = total.max;
    j.sum[i] = total.sum;
  }
}

uint64_t score_tile(const attend_item& item, const attend_scratch& s, tile_pass pass) noexcept {
  uint64_t any = 0;
  for (int64_t state = 0; state < item.states(); ++state) {
    tile t;
    resolve_tile(item, item.head + static_cast<int32_t>(state / item.per_head()), pass, t);
    any = seen_keys(item, t, s.seen);
    if (any == 0) break;
    const uint64_t seen = s.seen[state % item.per_head() / item.group];
    score_seen(item, t, seen, s.q + state * item.kv->dim_k, s.weights + state * tile_keys);
  }
  return any;
}

void fold_row(const fold_rows& r, int32_t head, int32_t row) noexcept {
  const float* scores = r.scores + head * r.score_head_stride + row * r.score_row_stride;
  const float lse = r.lse2[head + row * r.lse_row_stride];
  float* sum = r.sum + head * r.sum_head_stride;
  for (uint64_t rest = r.counted[row * r.counted_row_stride]; rest != 0; rest &= rest - 1) {
    const int32_t j = std::countr_zero(rest);
    const float x = scores[j] - lse;
    const float w = exp2_weight(0.0f < x ? 0.0f : x);
    if (r.kind == KVC_SCORE_WEIGHT) sum[j] += w;
    if (r.kind == KVC_SCORE_SQUARE) sum[j] += w * w;
    if (r.kind == KVC_SCORE_HIT) sum[j] += w >= r.least[row * r.least_row_stride] ? 1.0f : 0.0f;
  }
}

void fold(const fold_rows& all) noexcept {
  fold_rows r = all;
  for (int64_t tile = 0; tile < all.tiles; ++tile, r.scores += tile_keys, r.sum += tile_keys) {
    for (int32_t head = 0; head < r.heads; ++head) {
      for (int32_t row = 0; row < r.rows; ++row) fold_row(r, head, row);
    }
  }
}

void unpack(const kvc_kv& kv, bool keys, int32_t id, int32_t head, float* to) noexcept {
  const code_cell c(kv, keys, id, head);
  const int32_t rows = keys ? c.dim : c.tokens, columns = keys ? c.tokens : c.dim;
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t i = 0; i < columns; ++i) to[r * columns + i] = keys ? c.value(i, r) : c.value(r, i);
  }
}

}  // namespace

const kernel scalar_kernel = {KVC_TARGET_SCALAR, &prepare, &split, &join_states, &score_tile, &fold, &unpack};

}  // namespace kvcache::detail
