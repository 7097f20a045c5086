// SPDX-License-Identifier: Apache-2.0
// Planning and running attention: checks, the division of a batch into items, and the joining of splits.
#include <algorithm>
#include <cmath>
#include <optional>

#include "call.hpp"
#include "check.hpp"
#include "kvcache/quant/hadamard.hpp"
#include "rope.hpp"
#include "state.hpp"
#include "workers.hpp"

namespace kvcache::detail {
namespace {

constexpr int32_t most_heads = 1 << 16;
constexpr double most_parts = 1 << 26;  ///< split states kept at a time; beyond, splits are not dealt out

int64_t splits_of(int64_t kv_len) noexcept {
  return (kv_len + split_keys - 1) / split_keys;
}

/// States of all splits, kept apart until the last is there; used when splits are dealt to workers.
struct partials {
  float* acc = nullptr;  ///< [rows][q_heads][splits][dim_v]
  float* max = nullptr;  ///< [rows][q_heads][splits], as sum
  float* sum = nullptr;
  int64_t splits = 0;
};

partials carve_partials(carver& c, const kvc_plan& p) noexcept {
  partials out;
  if (p.splits == 0) return out;
  out.splits = splits_of(p.max_kv);
  const int64_t count = int64_t{p.n} * p.max_q * p.q_heads * out.splits;
  out.acc = c.take<float>(count * p.dim_v);
  out.max = c.take<float>(count);
  out.sum = c.take<float>(count);
  return out;
}

/// What run() will carve, and what aligning its start may cost.
size_t workspace_needed(const kvc_plan& p) noexcept {
  carver shared(nullptr), one(nullptr);
  (void)shared.take<int64_t>(int64_t{p.n} + 1);
  (void)carve_partials(shared, p);
  (void)carve_scratch(one, p);
  return static_cast<size_t>(shared.used() + one.used() * p.width + 63);
}

/// One attend call.
struct attend_job : attend_call {
  const kvc_out& out;
  int64_t* first_item = nullptr;  ///< [n+1]
  partials parts{};
  std::byte* scratch = nullptr;
  int64_t scratch_bytes = 0;

  int64_t splits(int64_t i) const noexcept {
    int32_t longest = 0;
    const int32_t heads = batch.kv_len_head_stride != 0 ? plan.kv_heads : 1;
    for (int32_t h = 0; h < heads; ++h) longest = std::max(longest, kv_len(i, h));
    return std::max<int64_t>(splits_of(longest), 1);
  }
  int64_t part_index(int64_t row, int64_t q_head) const noexcept {
    return ((row - row_begin(0)) * plan.q_heads + q_head) * parts.splits;
  }
  attend_scratch scratch_of(int32_t worker) const noexcept {
    carver c(scratch + worker * scratch_bytes);
    return carve_scratch(c, plan);
  }
};

/// Numbers the items: sequence by sequence, within it head by head, so that neighbours share keys.
int64_t number_items(const attend_job& job, bool by_split) noexcept {
  int64_t total = 0;
  for (int64_t i = 0; i < job.batch.n; ++i) {
    job.first_item[i] = total;
    total += job.row_blocks(i) * job.head_blocks(i) * (by_split ? job.splits(i) : 1);
  }
  job.first_item[job.batch.n] = total;
  return total;
}

/// Finds item number `number`; `split` is its split if items are numbered by split.
attend_item locate(const attend_job& job, int64_t number, bool by_split, int64_t& split) noexcept {
  const int64_t* end = job.first_item + job.batch.n + 1;
  const int64_t i = std::upper_bound<const int64_t*>(job.first_item, end, number) - job.first_item - 1;
  const int64_t splits = by_split ? job.splits(i) : 1;
  const int64_t blocks = job.row_blocks(i);
  const int64_t rest = number - job.first_item[i];
  split = rest % splits;
  const int64_t block = rest / splits % blocks;
  const auto head = static_cast<int32_t>(rest / splits / blocks * job.head_block(i));
  attend_item item = job.item(i, head, job.row_begin(i) + block * job.plan.row_block);
  item.out = &job.out;
  return item;
}

/// `acc` may be rotated in place.
void write_row(const attend_job& job, int64_t row, int64_t q_head, state s, float* acc) noexcept {
  if ((job.kv.hadamard & KVC_HADAMARD_V) != 0 && !s.empty()) hadamard(acc, job.plan.dim_v);
  const float* sink = job.softmax.sink_logit != nullptr ? job.softmax.sink_logit + q_head : nullptr;
  const float lse = finish(s, acc, sink, out_row(job.out, row, q_head), job.out.type, job.plan.dim_v);
  if (job.out.lse2 != nullptr) *lse_of(job.out, row, q_head) = lse;
}

void clear_totals(const attend_scratch& s, int64_t states) noexcept {
  std::fill_n(s.total_max, states, minus_infinity);
  std::fill_n(s.total_sum, states, 0.0f);
}

/// All splits of an item, one after the other.
void run_whole(const attend_job& job, int32_t worker, int64_t number) noexcept {
  int64_t unused = 0;
  const attend_item item = locate(job, number, false, unused);
  const attend_scratch s = job.scratch_of(worker);
  const int32_t dim = job.plan.dim_v;
  clear_totals(s, item.states());
  job.body.prepare(item, s);
  for (int64_t split = 0; split < splits_of(item.kv_len); ++split) {
    const tile_range range = visible_tiles(item, split);
    if (range.first >= range.last) continue;
    job.body.split(item, s, range);
    job.body.join({item.states(), dim, s.total_max, s.total_sum, s.total, s.max, s.sum, s.acc});
  }
  for (int64_t i = 0; i < item.states(); ++i) {
    write_row(job, item.row_of(i), item.q_head_of(i), {s.total_max[i], s.total_sum[i]}, s.total + i * dim);
  }
}

/// One split of an item; its states wait in the workspace.
void run_split(const attend_job& job, int32_t worker, int64_t number) noexcept {
  int64_t split = 0;
  const attend_item item = locate(job, number, true, split);
  const attend_scratch s = job.scratch_of(worker);
  const int32_t dim = job.plan.dim_v;
  const tile_range range = visible_tiles(item, split);
  const bool any = range.first < range.last;
  if (any) {
    job.body.prepare(item, s);
    job.body.split(item, s, range);
  }
  for (int64_t i = 0; i < item.states(); ++i) {
    const int64_t at = job.part_index(item.row_of(i), item.q_head_of(i)) + split;
    job.parts.max[at] = any ? s.max[i] : minus_infinity;
    job.parts.sum[at] = any ? s.sum[i] : 0.0f;
    if (any) std::memcpy(job.parts.acc + at * dim, s.acc + i * dim, sizeof(float) * static_cast<size_t>(dim));
  }
}

/// Joins the splits of an item in ascending order.
void join_splits(const attend_job& job, int32_t worker, int64_t number) noexcept {
  int64_t unused = 0;
  const attend_item item = locate(job, number, false, unused);
  const attend_scratch s = job.scratch_of(worker);
  const partials& parts = job.parts;
  const int32_t dim = job.plan.dim_v;
  const int64_t splits = job.splits(item.sequence);
  clear_totals(s, item.states());
  // The states of one row and kv head are neighbours here and there.
  for (int64_t first = 0; first < item.states(); first += item.group) {
    const int64_t at = job.part_index(item.row_of(first), item.q_head_of(first));
    for (int64_t i = at; i < at + splits; ++i) {
      job.body.join({item.group, dim, s.total_max + first, s.total_sum + first, s.total + first * dim,
                     parts.max + i, parts.sum + i, parts.acc + i * dim, parts.splits});
    }
  }
  for (int64_t i = 0; i < item.states(); ++i) {
    write_row(job, item.row_of(i), item.q_head_of(i), {s.total_max[i], s.total_sum[i]}, s.total + i * dim);
  }
}

void run(attend_job& job, kvc_buf workspace, const kvc_executor* executor) noexcept {
  auto address = reinterpret_cast<uintptr_t>(workspace.ptr);
  carver c(reinterpret_cast<void*>((address + 63) / 64 * 64));
  job.first_item = c.take<int64_t>(int64_t{job.plan.n} + 1);
  job.parts = carve_partials(c, job.plan);
  carver measure(nullptr);
  (void)carve_scratch(measure, job.plan);
  job.scratch_bytes = measure.used();
  job.scratch = c.take<std::byte>(job.scratch_bytes * job.plan.width);
  const bool by_split = job.plan.splits != 0;
  auto first = [&](int32_t worker, int64_t number) noexcept {
    by_split ? run_split(job, worker, number) : run_whole(job, worker, number);
  };
  for_each_item(executor, job.plan.width, number_items(job, by_split), first);
  if (!by_split) return;
  auto second = [&](int32_t worker, int64_t number) noexcept { join_splits(job, worker, number); };
  for_each_item(executor, job.plan.width, number_items(job, false), second);
}

// ---- checks ----

kvc_status check_plan_in(const kvc_plan_in* in, kvc_error* error) noexcept {
  KVC_TRY(check_struct(in, KVC_FIELD_PLAN, error));
  KVC_TRY(check_kv(in->kv, false, error));
  if (in->q_heads < 1 || in->q_heads > most_heads || in->q_heads % in->kv->kv_heads != 0) {
    return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_Q_HEADS, in->q_heads);
  }
  for (const int32_t type : {in->q_type, in->out_type}) {
    if (element_size(type) == 0) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TYPE, type);
  }
  if (in->n < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_N, in->n);
  if (in->max_q < 1) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_Q, in->max_q);
  if (in->max_kv < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_MAX_KV, in->max_kv);
  if (in->width < 0) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_EXECUTOR, in->width);
  constexpr uint32_t have = KVC_USE_WINDOW | KVC_USE_SOFT_CAP | KVC_USE_SINK | KVC_USE_LSE | KVC_USE_K_POS |
                            KVC_USE_OPEN | KVC_USE_KEY_SCORE;
  if ((in->features & ~have) != 0) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_FEATURES, in->features & ~have);
  }
  if (find_kernel(in->target) == nullptr) {
    return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TARGET, in->target);
  }
  return KVC_OK;
}

}  // namespace
}  // namespace kvcache::detail

using namespace kvcache::detail;

kvc_status kvc_cpu_plan(const kvc_plan_in* in, kvc_plan* plan, kvc_error* error) {
  KVC_TRY(check_plan_in(in, error));
  KVC_TRY(check_struct(plan, KVC_FIELD_PLAN, error));
  const kvc_kv& kv = *in->kv;
  const int32_t group = in->q_heads / kv.kv_heads;
  kvc_plan p{};
  p.struct_size = sizeof p;
  p.target = find_kernel(in->target)->target;
  p.width = std::clamp(in->width, 1, most_width);
  p.row_block = std::clamp(item_states / group, 1, in->max_q);
  p.q_heads = in->q_heads;
  p.kv_heads = kv.kv_heads;
  p.dim_k = kv.dim_k;
  p.dim_v = kv.dim_v;
  p.block = kv.block;
  p.n = in->n;
  p.max_q = in->max_q;
  p.max_kv = in->max_kv;
  // Heads of a block lie behind each other, so an item takes several: the longer the run of bytes, the faster
  // memory. Few long sequences would then leave workers idle, so their splits are dealt out too, and heads
  // where that is less than two items for each.
  const int64_t least = p.width > 1 ? 2 * int64_t{p.width} : 1;
  const double parts = double(in->n) * in->max_q * in->q_heads * double(splits_of(in->max_kv));
  const bool few = p.width > 1 && in->n < 2 * least;
  p.splits = few && in->max_q <= p.row_block && in->max_kv > split_keys && parts < most_parts;
  const int64_t items = std::max<int64_t>(in->n, 1) * (p.splits != 0 ? splits_of(in->max_kv) : 1);
  const int64_t cuts = std::min<int64_t>((least + items - 1) / items, kv.kv_heads);
  p.head_block = static_cast<int32_t>((kv.kv_heads + cuts - 1) / cuts);
  p.workspace_bytes = workspace_needed(p);
  *plan = p;
  return KVC_OK;
}

kvc_status kvc_cpu_attend(const kvc_plan* plan, const kvc_kv* kv, const kvc_batch* batch, const kvc_rows* q,
                          const kvc_softmax* softmax, const kvc_out* out, kvc_buf workspace,
                          const kvc_executor* executor, kvc_error* error) {
  KVC_TRY(check_kv(kv, true, error));
  KVC_TRY(check_plan(plan, *kv, error));
  KVC_TRY(check_batch(*plan, *kv, batch, error));
  const int64_t rows = row_end(*batch);
  if (q == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_ROWS);
  KVC_TRY(check_rows(*q, rows, plan->q_heads, plan->dim_k, KVC_FIELD_DIM_K, error));
  KVC_TRY(check_softmax(softmax, *batch, rows, error));
  KVC_TRY(check_out(out, rows, plan->q_heads, plan->dim_v, true, error));
  if (out->key_score != nullptr) {
    KVC_TRY(check_key_score(out->key_score_stride, out->key_score_head_stride, *batch, rows, *plan, error));
  }
  KVC_TRY(check_executor(executor, error));
  const kvc_batch b = with_strides(*batch);
  attend_job job{{*plan, *kv, b, *q, *softmax}, *out};
  std::optional<rotation> turning;
  if (kv->k_rope != nullptr) job.turning = &turning.emplace(*kv->k_rope);
  if (workspace.ptr == nullptr || workspace.bytes < workspace_needed(*plan)) {
    return fail(error, KVC_WORKSPACE, KVC_FIELD_WORKSPACE, static_cast<int64_t>(workspace.bytes));
  }
  run(job, workspace, executor);
  return KVC_OK;
}
