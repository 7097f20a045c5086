// SPDX-License-Identifier: Apache-2.0
#pragma once
// What calls that read a batch have in common: its lengths and rows, how many heads and rows an item takes,
// and the scratch memory of a worker.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "check.hpp"
#include "element.hpp"
#include "kernel.hpp"

namespace kvcache::detail {

inline constexpr int32_t most_width = 1 << 12;
/// Rows times heads an item aims at: packing a tile then costs about 3 %.
inline constexpr int32_t item_states = 96;

/// Hands out 64-byte aligned pieces of a buffer, or only adds up their sizes.
class carver {
 public:
  explicit carver(void* base) noexcept : base_(static_cast<std::byte*>(base)) {}
  template <class T>
  T* take(int64_t count) noexcept {
    auto* p = base_ != nullptr ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * int64_t{sizeof(T)} + 63) / 64 * 64;
    return p;
  }
  int64_t used() const noexcept { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

inline attend_scratch carve_scratch(carver& c, const kvc_plan& p) noexcept {
  const int64_t in_head = int64_t{p.row_block} * (p.q_heads / p.kv_heads);
  const int64_t states = std::max<int64_t>(in_head, item_states);
  attend_scratch s;
  s.q = c.take<float>(states * p.dim_k);
  s.acc = c.take<float>(states * p.dim_v);
  s.max = c.take<float>(states);
  s.lanes = c.take<float>(states * sum_lanes);
  s.sum = c.take<float>(states);
  s.weights = c.take<float>(states * tile_keys);
  s.k_tile = c.take<float>(int64_t{p.dim_k} * tile_keys);
  s.v_tile = c.take<float>(int64_t{p.dim_v} * tile_keys);
  s.angles = c.take<float>(int64_t{p.dim_k} * tile_keys);
  s.q_rows = c.take<float>(states * round_up_lanes(p.dim_k));
  s.q_bytes = c.take<int8_t>(states * 2 * p.dim_k);
  s.q_dots = c.take<dot_query>(states * 2);
  s.total = c.take<float>(states * p.dim_v);
  s.total_max = c.take<float>(states);
  s.total_sum = c.take<float>(states);
  s.seen = c.take<uint64_t>(p.row_block);
  s.counted = c.take<uint64_t>(p.row_block);
  return s;
}

/// A call that was checked. Refers to the caller's structs; the batch has its strides filled in.
struct attend_call {
  const kvc_plan& plan;
  const kvc_kv& kv;
  const kvc_batch& batch;
  const kvc_rows& q;
  const kvc_softmax& softmax;
  const kernel& body = *find_kernel(plan.target);
  const rotation* turning = nullptr;

  int32_t group() const noexcept { return plan.q_heads / plan.kv_heads; }
  int64_t row_begin(int64_t i) const noexcept { return batch.q_start != nullptr ? batch.q_start[i] : i; }
  int64_t row_blocks(int64_t i) const noexcept {
    return (row_begin(i + 1) - row_begin(i) + plan.row_block - 1) / plan.row_block;
  }
  int32_t kv_len(int64_t i, int64_t head) const noexcept { return kv_len_of(batch, i, head, plan.kv_heads); }
  /// Kv heads an item of this sequence takes: as many as fit with all its rows.
  int64_t head_block(int64_t i) const noexcept {
    if (batch.kv_len_head_stride != 0 || batch.k_pos_head_stride != 0) return 1;
    const int64_t rows = std::clamp<int64_t>(row_begin(i + 1) - row_begin(i), 1, plan.row_block);
    return std::clamp<int64_t>(item_states / (rows * group()), 1, plan.head_block);
  }
  int64_t head_blocks(int64_t i) const noexcept {
    const int64_t heads = head_block(i);
    return (plan.kv_heads + heads - 1) / heads;
  }
  /// The item of the sequence's heads from `head` and rows from `first_row` on.
  attend_item item(int64_t i, int32_t head, int64_t first_row) const noexcept {
    const bool capped = softmax.soft_cap > 0;
    const double scale = double{softmax.scale};
    attend_item out;
    out.kv = &kv;
    out.batch = &batch;
    out.q = &q;
    out.softmax = &softmax;
    out.q_scale =
        static_cast<float>(capped ? scale / double{softmax.soft_cap} : scale * 1.44269504088896340736);
    out.cap_log2 = capped ? softmax.soft_cap * log2_e : 0.0f;
    out.sequence = static_cast<int32_t>(i);
    out.head = head;
    out.heads = static_cast<int32_t>(std::min<int64_t>(head_block(i), plan.kv_heads - head));
    out.first_row = first_row;
    out.rows = static_cast<int32_t>(std::min<int64_t>(plan.row_block, row_begin(i + 1) - first_row));
    out.group = group();
    out.kv_len = kv_len(i, head);
    out.sealed = batch.sealed != nullptr ? std::min(batch.sealed[i], out.kv_len) : out.kv_len;
    out.turning = turning;
    out.open_from = out.sealed;
    out.forms = is_code(kv.k.type) || is_code(v_plane(kv).type);
    if (batch.row_sealed == nullptr) return out;
    out.row_sealed = batch.row_sealed + first_row;
    out.open_from = std::min(out.sealed, *std::min_element(out.row_sealed, out.row_sealed + out.rows));
    out.forms = true;  // also where no border differs here: one may in another chunk
    return out;
  }
};

}  // namespace kvcache::detail
