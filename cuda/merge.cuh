// SPDX-License-Identifier: Apache-2.0
#pragma once
// Joins results over disjoint keys by their log-sum-exp (base 2): the splits of a decode, or what a caller
// computed apart. A sink counts once, here. One block per row and head. Joining rule: Milakov and Gimelshein,
// "Online normalizer calculation for softmax", section 3.
#include "element.cuh"

namespace kvcache::detail::gpu {

/// Part i of a row and head.
struct part_place {
  const char* o;
  float lse2;
  int32_t type;
};
KVCACHE_DEVICE part_place part_of(const merge_params& p, int64_t row, int32_t head, int32_t i) {
  if (p.splits > 0) {
    const int64_t at = (row * p.heads + head) * p.splits + i;
    return {p.part[0].o + at * p.dim * 4, p.part[0].lse2[at], KVC_F32};
  }
  const merge_part& m = p.part[i];
  return {m.o + row * m.row_stride + head * m.head_stride, m.lse2[row * m.lse_row_stride + head], m.type};
}

KVCACHE_KERNEL(threads_of_block) merge(const merge_params p) {
  const int64_t row = block_index() / static_cast<uint32_t>(p.heads);
  const int32_t head = static_cast<int32_t>(block_index() % static_cast<uint32_t>(p.heads));
  int64_t to = row;
  if (p.max_q > 0) {  // rows of a plan: [n][max_q], of which the sequence may have fewer
    const int64_t sequence = row / p.max_q, inside = row % p.max_q;
    const int64_t first = p.q_start != nullptr ? p.q_start[sequence] : sequence;
    const int64_t end = p.q_start != nullptr ? p.q_start[sequence + 1] : sequence + 1;
    to = first + inside;
    if (to >= end) return;
    if (p.only_short != 0 && end - first > p.max_q) return;
  }
  const int32_t n = p.splits > 0 ? p.splits : p.n_parts;
  const float sink = p.sink_logit != nullptr ? p.sink_logit[head] * 1.44269504088896341f : minus_infinity();
  float top = sink;
  for (int32_t i = 0; i < n; ++i) {
    const float lse = part_of(p, row, head, i).lse2;
    top = lse > top ? lse : top;
  }
  const bool none = top == minus_infinity();
  float sum = 0;
  for (int32_t d = static_cast<int32_t>(thread_index()); d < p.dim; d += threads_of_block) {
    float acc = 0;
    sum = none || sink == minus_infinity() ? 0.0f : fast_exp2(sink - top);
    for (int32_t i = 0; i < n && !none; ++i) {
      const part_place part = part_of(p, row, head, i);
      if (part.lse2 == minus_infinity()) continue;  // its values may be anything
      const float weight = fast_exp2(part.lse2 - top);
      sum += weight;
      acc += weight * load_value(part.o, part.type, d);
    }
    if (p.out.data != nullptr) {
      store_value(row_of(p.out, to, head), p.out.type, d, none ? 0.0f : acc / sum);
    }
  }
  block_barrier();  // out may be one of the parts: its lse2 is read by all
  if (thread_index() == 0 && p.lse2 != nullptr) {
    p.lse2[to * p.lse_row_stride + head] = none ? minus_infinity() : fast_log2(sum) + top;
  }
}

}  // namespace kvcache::detail::gpu
