// SPDX-License-Identifier: Apache-2.0
// What keys got of query rows, added up per slot. Slots are independent of each other, so a sequence is cut
// into items by kv heads and slots; all rows pass through an item in their order, and however it is cut, a
// sum is the same chain of additions.
//
//   slots of a head   | item 0            | item 1            |
//   rows 0 .. 31        tile, tile, tile    tile, tile, tile      scores ──> weights ──> sum[slot]
//   rows 32 .. 63       tile, tile, tile    tile, tile, tile
#include <algorithm>
#include <optional>

#include "call.hpp"
#include "check.hpp"
#include "element.hpp"
#include "rope.hpp"
#include "state.hpp"
#include "workers.hpp"

namespace kvcache::detail {
namespace {

constexpr int64_t least_slots = 512;  ///< of an item: fewer, and packing its queries weighs too much

/// One score call.
struct score_job : attend_call {
  const kvc_score& score;
  int64_t slots = 0;              ///< of an item, a multiple of tile_keys
  int64_t* first_item = nullptr;  ///< [n+1]
  std::byte* scratch = nullptr;
  int64_t scratch_bytes = 0;

  int64_t ranges(int64_t i) const noexcept {
    const int64_t heads = batch.kv_len_head_stride != 0 ? plan.kv_heads : 1;
    int64_t longest = 0;
    for (int64_t h = 0; h < heads; ++h) longest = std::max<int64_t>(longest, kv_len(i, h));
    return (longest + slots - 1) / slots;
  }
  int32_t upto(int64_t row, int64_t head, const attend_item& item) const noexcept {
    return score.upto != nullptr ? score.upto[row * plan.kv_heads + head] : item.kv_len;
  }
  float* sum(const attend_item& item, int64_t head) const noexcept {
    return score.sum + item.sequence * score.sum_stride + head * score.sum_head_stride;
  }
  const float* lse2(int64_t row, int64_t q_head) const noexcept {
    return score.lse2 + row * lse_stride() + q_head;
  }
  int64_t lse_stride() const noexcept {
    return score.lse_row_stride != 0 ? score.lse_row_stride : plan.q_heads;
  }
};

/// A tile of one kv head of an item.
struct tile_rows {
  const attend_item& item;
  const attend_scratch& scratch;
  int64_t first;  ///< slot
  int32_t head;   ///< within the item

  int64_t kv_head() const noexcept { return item.head + head; }
  int64_t q_head() const noexcept { return kv_head() * item.group; }
  int64_t slots() const noexcept { return item.slots_in(first); }
};

/// Scores [rows][group][tile_keys] of the tile: computed just now, or where attend left them.
void find_scores(const score_job& job, const tile_rows& t, fold_rows& r) noexcept {
  const kvc_score& s = job.score;
  const attend_item& item = t.item;
  float* own = t.scratch.weights + t.head * item.per_head() * tile_keys;
  r.scores = own;
  r.score_head_stride = tile_keys;
  r.score_row_stride = item.group * tile_keys;
  if (s.key_score == nullptr) return;
  const float* stored =
      s.key_score + item.first_row * s.key_score_stride + t.q_head() * s.key_score_head_stride + t.first;
  if (t.slots() == tile_keys) {
    r.scores = stored;
    r.score_head_stride = s.key_score_head_stride;
    r.score_row_stride = s.key_score_stride;
    return;
  }
  for (int64_t row = 0; row < item.rows; ++row) {  // what lies behind a row is not read
    for (int64_t g = 0; g < item.group; ++g, own += tile_keys) {
      std::copy_n(stored + row * s.key_score_stride + g * s.key_score_head_stride, t.slots(), own);
    }
  }
}

/// Folds into the sums from `sum` on, whose last tile may be short.
void fold_into(const score_job& job, const tile_rows& t, fold_rows& r, float* sum, int64_t stride) noexcept {
  r.sum = sum;
  r.sum_head_stride = stride;
  if (t.slots() == tile_keys) return job.body.fold(r);
  fold_rows one = r;
  one.heads = 1;
  for (int32_t head = 0; head < r.heads; ++head, sum += stride) {
    float own[tile_keys] = {};
    std::copy_n(sum, t.slots(), own);
    one.sum = own;
    one.scores = r.scores + head * r.score_head_stride;
    one.lse2 = r.lse2 + head;
    job.body.fold(one);
    std::copy_n(own, t.slots(), sum);
  }
}

/// Adds the rows of the item to a tile of one kv head: a query head after the other, each with all its rows,
/// or a row after the other, each with all query heads.
void fold_tile(const score_job& job, const tile_rows& t, fold_rows r) noexcept {
  const attend_item& item = t.item;
  find_scores(job, t, r);
  r.lse2 = job.lse2(item.first_row, t.q_head());
  r.lse_row_stride = job.lse_stride();
  r.counted = t.scratch.counted;
  if (job.score.grouped == 0) {
    r.heads = item.group;
    r.rows = item.rows;
    r.counted_row_stride = 1;
    return fold_into(job, t, r, job.sum(item, t.q_head()) + t.first, job.score.sum_head_stride);
  }
  fold_rows of_row = r;
  of_row.heads = 1;
  of_row.rows = item.group;
  of_row.score_row_stride = r.score_head_stride;
  of_row.lse_row_stride = 1;
  of_row.least_row_stride = 0;
  for (int64_t row = 0; row < item.rows; ++row) {
    if (*of_row.counted != 0) fold_into(job, t, of_row, job.sum(item, t.kv_head()) + t.first, 0);
    of_row.scores += r.score_row_stride;
    of_row.lse2 += r.lse_row_stride;
    of_row.least += r.least != nullptr ? r.least_row_stride : 0;
    ++of_row.counted;
  }
}

/// Fills scratch.counted for one head of the item; false: no row adds to the tile.
bool counted_keys(const score_job& job, const tile_rows& t) noexcept {
  const attend_item& item = t.item;
  uint64_t any = 0;
  for (int64_t row = 0; row < item.rows; ++row) {
    const int64_t left = job.upto(item.first_row + row, item.head + t.head, item) - t.first;
    const uint64_t below = left >= tile_keys ? ~uint64_t{0} : left <= 0 ? 0 : (uint64_t{1} << left) - 1;
    any |= t.scratch.counted[row] = t.scratch.seen[row] & below;
  }
  return any != 0;
}

/// Tiles of [first, last) that some row adds to.
tile_range counted_tiles(const score_job& job, const attend_item& item, int64_t first,
                         int64_t last) noexcept {
  int64_t most = job.score.upto == nullptr ? last : 0;
  for (int64_t row = 0; job.score.upto != nullptr && row < item.rows; ++row) {
    for (int32_t h = item.head; h < item.head + item.heads; ++h) {
      most = std::max<int64_t>(most, job.upto(item.first_row + row, h, item));
    }
  }
  return visible_tiles(item, first, std::min(last, most));
}

/// End of the tiles from `first` on, at most `last`, all of whose keys all rows add to, for all heads.
int64_t end_of_whole(const score_job& job, const attend_item& item, int64_t first, int64_t last) noexcept {
  const kvc_softmax& s = job.softmax;
  if (s.window > 0 || (s.causal != 0 && job.batch.k_pos != nullptr)) return first;
  int64_t slots = item.kv_len;
  for (int64_t row = item.first_row; row < item.first_row + item.rows; ++row) {
    if (s.causal != 0) slots = std::min<int64_t>(slots, int64_t{job.batch.q_pos[row]} + 1);
    for (int32_t h = item.head; job.score.upto != nullptr && h < item.head + item.heads; ++h) {
      slots = std::min<int64_t>(slots, job.upto(row, h, item));
    }
  }
  const kvc_batch& b = job.batch;
  for (int64_t slot = first * tile_keys; slot < slots; slot += job.kv.block - slot % job.kv.block) {
    const int64_t column = slot / job.kv.block;
    const bool sealed = slot < item.sealed, open = slot >= item.open_from;  // both, of different rows
    if ((sealed && b.table[item.sequence * b.table_stride + column] < 0) ||
        (open && b.open_table[item.sequence * b.open_stride + column] < 0)) {
      slots = slot;
    }
  }
  return std::clamp(slots / tile_keys, first, last);
}

fold_rows rows_of(const score_job& job, const attend_item& item, int32_t head) noexcept {
  fold_rows r;
  r.kind = job.score.kind;
  r.ahead = job.score.key_score != nullptr;
  if (r.kind != KVC_SCORE_HIT) return r;
  r.least = job.score.least + item.first_row * job.plan.kv_heads + item.head + head;
  r.least_row_stride = job.plan.kv_heads;
  return r;
}

/// Tiles whose scores attend left and to which all rows add.
void add_whole(const score_job& job, const attend_item& item, const attend_scratch& s, int64_t first,
               int64_t last) noexcept {
  std::fill_n(s.counted, item.rows, ~uint64_t{0});
  for (int32_t h = 0; first < last && h < item.heads; ++h) {
    fold_rows r = rows_of(job, item, h);
    r.tiles = last - first;
    fold_tile(job, {item, s, first * tile_keys, h}, r);
  }
}

/// Adds the rows of an item to the keys in scratch.seen.
void add_tile(const score_job& job, const attend_item& item, const attend_scratch& s,
              int64_t index) noexcept {
  for (int32_t h = 0; h < item.heads; ++h) {
    const tile_rows t{item, s, index * tile_keys, h};
    if (counted_keys(job, t)) fold_tile(job, t, rows_of(job, item, h));
  }
}

/// Adds the rows of an item to the slots [first, last).
void add_rows(const score_job& job, const attend_item& item, const attend_scratch& s, int64_t first,
              int64_t last) noexcept {
  tile_range range = counted_tiles(job, item, first, last);
  if (range.first >= range.last) return;
  const bool stored = job.score.key_score != nullptr;
  if (stored) {
    const int64_t whole = end_of_whole(job, item, range.first, range.last);
    add_whole(job, item, s, range.first, whole);
    range.first = whole;
  } else {
    job.body.prepare(item, s);
  }
  const auto seen = [&](tile_pass pass) noexcept {
    if (!stored) return job.body.score(item, s, pass);
    tile now;
    resolve_tile(item, item.head, pass, now);
    return seen_keys(item, now, s.seen);
  };
  for (int64_t index = range.first; index < range.last; ++index) {
    // A key's rows come in order: those that read it while it was open are the earlier ones.
    const tile_pass first = first_pass(item, index), second = next_pass(item, first);
    for (const tile_pass pass : {second, first}) {
      if (pass.index == index && seen(pass) != 0) add_tile(job, item, s, index);
    }
  }
}

/// Rows of an item from the first on whose borders do not go down: in a tree of drafts they may.
int32_t rows_in_order(const attend_item& item) noexcept {
  if (item.row_sealed == nullptr) return item.rows;
  const int32_t* end = item.row_sealed + item.rows;
  return static_cast<int32_t>(std::is_sorted_until(item.row_sealed, end) - item.row_sealed);
}

/// Item `number`: all rows of a sequence, some kv heads, some slots.
void run_item(const score_job& job, int32_t worker, int64_t number) noexcept {
  const int64_t* end = job.first_item + job.batch.n + 1;
  const int64_t i = std::upper_bound<const int64_t*>(job.first_item, end, number) - job.first_item - 1;
  const int64_t rest = number - job.first_item[i], ranges = job.ranges(i);
  const auto head = static_cast<int32_t>(rest / ranges * job.head_block(i));
  const int64_t first = rest % ranges * job.slots;
  carver c(job.scratch + worker * job.scratch_bytes);
  const attend_scratch s = carve_scratch(c, job.plan);
  for (int64_t row = job.row_begin(i); row < job.row_begin(i + 1);) {
    attend_item item = job.item(i, head, row);
    item.rows = rows_in_order(item);
    add_rows(job, item, s, first, first + job.slots);
    row += item.rows;
  }
}

/// Slots per item, so that every worker finds a few items.
int64_t slots_per_item(const score_job& job) noexcept {
  const int64_t longest = std::max<int64_t>(longest_kv(job.batch, job.plan.kv_heads), 1);
  int64_t heads = 0;
  for (int64_t i = 0; i < job.batch.n; ++i) heads += job.head_blocks(i);
  const int64_t wanted = job.plan.width > 1 ? 4 * int64_t{job.plan.width} : 1;
  const int64_t cuts = (wanted + heads - 1) / std::max<int64_t>(heads, 1);
  const int64_t each = std::max((longest + cuts - 1) / cuts, least_slots);
  return (each + tile_keys - 1) / tile_keys * tile_keys;
}

size_t workspace_needed(const kvc_plan& p) noexcept {
  carver shared(nullptr), one(nullptr);
  (void)shared.take<int64_t>(int64_t{p.n} + 1);
  (void)carve_scratch(one, p);
  return static_cast<size_t>(shared.used() + one.used() * p.width + 63);
}

void run(score_job& job, kvc_buf workspace, const kvc_executor* executor) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(workspace.ptr);
  carver c(reinterpret_cast<void*>((address + 63) / 64 * 64)), measure(nullptr);
  job.first_item = c.take<int64_t>(int64_t{job.plan.n} + 1);
  (void)carve_scratch(measure, job.plan);
  job.scratch_bytes = measure.used();
  job.scratch = c.take<std::byte>(job.scratch_bytes * job.plan.width);
  job.slots = slots_per_item(job);
  int64_t total = 0;
  for (int64_t i = 0; i < job.batch.n; ++i) {
    job.first_item[i] = total;
    total += job.head_blocks(i) * job.ranges(i);
  }
  job.first_item[job.batch.n] = total;
  auto one = [&](int32_t worker, int64_t number) noexcept { run_item(job, worker, number); };
  for_each_item(executor, job.plan.width, total, one);
}

// ---- checks ----

kvc_status check_score(const kvc_score& s, const kvc_plan& plan, const kvc_batch& b, int64_t rows,
                       kvc_error* error) noexcept {
  if (s.kind < KVC_SCORE_WEIGHT || s.kind > KVC_SCORE_HIT) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_KIND, s.kind);
  }
  if (s.reserved != 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED, s.reserved);
  if (rows == 0) return KVC_OK;
  if (s.lse2 == nullptr || s.lse_row_stride < 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LSE, s.lse_row_stride);
  }
  if ((s.kind == KVC_SCORE_HIT) != (s.least != nullptr)) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_LEAST);
  }
  const int64_t longest = longest_kv(b, plan.kv_heads);
  const int64_t sums = s.grouped != 0 ? plan.kv_heads : plan.q_heads;
  if (s.sum == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SUM);
  if (sums > 1 && s.sum_head_stride < longest) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SUM, s.sum_head_stride);
  }
  if (b.n > 1 && s.sum_stride < longest) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SUM, s.sum_stride);
  if (s.key_score == nullptr) return KVC_OK;
  return check_key_score(s.key_score_stride, s.key_score_head_stride, b, rows, plan, error);
}

/// No row adds beyond its sequence.
kvc_status check_upto(const score_job& job, kvc_error* error) noexcept {
  if (job.score.upto == nullptr) return KVC_OK;
  for (int64_t i = 0; i < job.batch.n; ++i) {
    for (int64_t row = job.row_begin(i); row < job.row_begin(i + 1); ++row) {
      for (int64_t h = 0; h < job.plan.kv_heads; ++h) {
        const int32_t upto = job.score.upto[row * job.plan.kv_heads + h];
        if (upto < 0 || upto > job.kv_len(i, h)) {
          return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_UPTO, upto, row);
        }
      }
    }
  }
  return KVC_OK;
}

}  // namespace
}  // namespace kvcache::detail

using namespace kvcache::detail;

kvc_status kvc_cpu_score(const kvc_plan* plan, const kvc_kv* kv, const kvc_batch* batch, const kvc_rows* q,
                         const kvc_softmax* softmax, const kvc_score* score, kvc_buf workspace,
                         const kvc_executor* executor, kvc_error* error) {
  KVC_TRY(check_kv(kv, true, error));
  KVC_TRY(check_plan(plan, *kv, error));
  KVC_TRY(check_batch(*plan, *kv, batch, error));
  const int64_t rows = row_end(*batch);
  KVC_TRY(check_struct(score, KVC_FIELD_SCORE, error));
  if (score->key_score == nullptr) {
    if (q == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS);
    KVC_TRY(check_rows(*q, rows, plan->q_heads, plan->dim_k, KVC_FIELD_DIM_K, error));
  }
  KVC_TRY(check_softmax(softmax, *batch, rows, error));
  KVC_TRY(check_score(*score, *plan, *batch, rows, error));
  KVC_TRY(check_executor(executor, error));
  const kvc_batch b = with_strides(*batch);
  const kvc_rows none{};
  score_job job{{*plan, *kv, b, score->key_score == nullptr ? *q : none, *softmax}, *score};
  KVC_TRY(check_upto(job, error));
  std::optional<rotation> turning;
  if (kv->k_rope != nullptr) job.turning = &turning.emplace(*kv->k_rope);
  if (workspace.ptr == nullptr || workspace.bytes < workspace_needed(*plan)) {
    return fail(error, KVC_WORKSPACE, KVC_FIELD_WORKSPACE, static_cast<int64_t>(workspace.bytes));
  }
  run(job, workspace, executor);
  return KVC_OK;
}
