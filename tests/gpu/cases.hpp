// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which attention calls are measured, how their layers lie in memory, and how many bytes and operations each
// needs. Plain arithmetic; needs no GPU.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvcache/kvcache.h"

namespace kvcache::gpu_check {

/// How keys and values are stored: a row of every table.
struct storage {
  const char* name;
  int32_t type;        ///< of open blocks and queries: KVC_F16, KVC_BF16
  const char* format;  ///< of sealed blocks as in quant/parse.hpp, null: blocks hold what was written
};
const std::vector<storage>& storages();

inline constexpr int32_t measured_kv_heads = 8;

/// One call: every sequence has the same number of tokens, and `rows` query rows at the end of them.
struct attend_case {
  storage stored;
  int32_t batch = 1, tokens = 1024, group = 4, block = 16, dim = 128, rows = 1;
};

/// Decode. Without `full`: the grid of batches and lengths at one group, block and dim, and at three points
/// of it the other groups, blocks and dims; the points first. With `full` every combination.
std::vector<attend_case> decode_cases(bool full);
/// Causal chunks of a prompt, alone and behind a context.
std::vector<attend_case> prefill_cases();

/// A layer of a case, with `blocks` blocks in `memory`, or why there is none: the field.
struct layer_or_reason {
  kvc_kv layer{};
  int64_t bytes = 0;   ///< of memory that it needs
  std::string reason;  ///< empty: the layer is described
};
layer_or_reason describe_layer(const attend_case& c, int32_t blocks, void* memory);

/// Blocks that the sequences of a case use.
int64_t blocks_of(const attend_case& c);
/// Bytes of keys, values and their scales that the call has to read: every one once.
int64_t kv_bytes(const attend_case& c);
/// Multiplications and additions of both products, of pairs that the causal mask leaves.
double attend_flops(const attend_case& c);

/// The plan for a case, or why there is none.
struct plan_or_reason {
  kvc_plan plan{};
  std::string reason;
};
plan_or_reason plan_case(const attend_case& c, const kvc_kv& layer, int32_t multiprocessors);

}  // namespace kvcache::gpu_check
