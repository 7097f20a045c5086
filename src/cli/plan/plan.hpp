// SPDX-License-Identifier: Apache-2.0
#pragma once

// The plan: what a model's cache needs for a batch of texts, what a memory holds, and what a decode step
// reads. Sizes are those of the library (`resolve`, plan.hpp), so they are what a cache of the same
// configuration hands out. Windows are the exception: this library keeps their layers in full, the plan
// counts them as an engine has them that keeps the window only, and says beside it what the library takes.
//
//   layers ──by kind──> pools ──> blocks of a sequence ──> kv_bytes, blocks, max_batch, max_context
//                          └────> tokens that a step reads ──> step, regime, levers

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/cache/config.hpp"
#include "kvcache/quant/format.hpp"
#include "plan/architecture.hpp"

namespace kvcache::cli {

/// How the cache stores its values.
struct kv_choice {
  std::string text;  ///< as the person wrote it
  element type = element::f16;
  kv_format format{};
  bool preset = false;  ///< a name that stands for a format, not a format in all its parts
};

/// f32, f16, bf16, or a format as parse_format reads it. Fails: usage, saying what is allowed where.
kv_choice parse_kv(std::string_view option, std::string_view text);

/// Layers that are alike: a block table of their own.
struct pool {
  layer_kind kind = layer_kind::full;
  std::int32_t window = 0;  ///< tokens, 0 = the whole text
  group_shape shape{};      ///< without the window
  std::int32_t block_size = 0;
  kv_format format{};  ///< of all its layers
  block_format block{};
};

/// What to plan for.
struct plan_request {
  model subject;
  kv_choice kv;
  std::int32_t context = 4096;         ///< tokens per sequence
  std::int32_t batch = 1;              ///< sequences
  std::int32_t weights_bits = 0;       ///< 0 = as the file has them, else 16
  std::optional<std::int64_t> memory;  ///< bytes for weights and cache
  double bandwidth = 0;                ///< bytes per second, 0 = not said
  std::int32_t block = 0;              ///< tokens per block, 0 = 16, packed 64
};

/// What is held, and what fits.
struct holding {
  std::int64_t bytes_per_token = 0;    ///< over all layers
  std::int64_t sequence_bytes = 0;     ///< one sequence of the context, whole blocks and open ones
  std::int64_t kv_bytes = 0;           ///< the whole batch
  std::int64_t blocks_needed = 0;      ///< of the whole batch, all pools
  std::int64_t open_needed = 0;        ///< open blocks beside them
  std::optional<std::int64_t> blocks;  ///< that the memory holds, all pools; only with a memory
  std::optional<std::int64_t> open_blocks;
  std::optional<std::int64_t> max_batch;    ///< sequences of the context
  std::optional<std::int64_t> max_context;  ///< tokens of each sequence of the batch; -1 = no limit
};

/// One way to make a step shorter.
struct lever {
  std::string name;
  double step_time_factor = 1;
  double weights_bits = 0;
  double kv_bits = 0;     ///< per value that is read, scales and open tokens included
  std::string kv_format;  ///< empty: as now; "none": a format this library does not have for this shape
};

/// The answer.
struct plan {
  plan_request asked;
  std::int32_t block_size = 0;
  std::vector<pool> pools;
  holding held;                    ///< windows counted as windows
  std::optional<holding> library;  ///< with windows only: what this library takes, windows in full
  std::int64_t weight_bytes = 0;   ///< 0 = not known
  double weights_bits = 0;         ///< per parameter, of what weight_bytes counts
  std::int64_t weights_read = 0;   ///< by one step: without experts that no token of the batch chooses
  std::int64_t kv_read = 0;        ///< by one step
  std::int64_t kv_written = 0;     ///< by one step: the new token of each sequence
  std::vector<lever> levers;       ///< none if the weights are not known
  std::vector<std::string> notes;
};

/// Works it out. Fails: usage, where an option does not suit the model; cannot_run for what the library does
/// not store.
plan make_plan(plan_request request);

/// The pools of a model. `block`: 0 = the default of the format. Adds to `notes` what it decided.
std::vector<pool> pools_of(const model& m, const kv_choice& kv, std::int32_t block,
                           std::vector<std::string>& notes);

/// The groups that a cache of this library has for these pools, windows in full.
std::vector<group_config> groups_of(const std::vector<pool>& pools);

/// Bytes that one decode step reads of a sequence of `tokens`, its own token counted.
std::int64_t read_bytes(const std::vector<pool>& pools, std::int32_t tokens);

/// Values of the same tokens.
std::int64_t read_values(const std::vector<pool>& pools, std::int32_t tokens);

/// a * b. Fails: cannot_run naming `field` if it takes 2^62 or more.
std::int64_t times(std::int64_t a, std::int64_t b, const char* field);

}  // namespace kvcache::cli
