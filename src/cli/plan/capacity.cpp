// SPDX-License-Identifier: Apache-2.0
#include "plan/capacity.hpp"

#include <algorithm>

#include "error.hpp"
#include "kvcache/plan.hpp"
#include "kvcache/quant/sizes.hpp"

namespace kvcache::cli {
namespace {

constexpr std::int32_t most_sequences = 1 << 20;  ///< of a cache
constexpr std::int32_t most_context = 1 << 30;

// The largest n in [0, most] for which `fits`. Requires: it fits below some number and not above.
template <class Fits>
std::int64_t largest(std::int64_t most, Fits fits) {
  std::int64_t low = 0;
  for (std::int64_t high = most + 1; high - low > 1;) {
    const std::int64_t half = low + (high - low) / 2;
    (fits(half) ? low : high) = half;
  }
  return low;
}

[[noreturn]] void refuse(const status& s) {
  const std::string field = s.field;
  throw error(failure::cannot_run, "unsupported", field == "capacity" ? "--memory" : field,
              std::to_string(s.value))
      .wanting("a configuration that the library accepts");
}

// The geometry that a memory gives, or nothing if not even one unit fits.
std::optional<geometry> geometry_of(const std::vector<group_config>& groups, std::int64_t memory,
                                    std::int32_t sequences) {
  const result<geometry> made = resolve(config_of(groups, memory, sequences));
  if (made) return *made;
  std::int64_t unit = 0;
  for (const group_config& g : groups) unit += block_bytes(g.shape, g.block_size, g.format).count;
  const bool too_much = memory / unit >= (1 << 30);
  if (std::string_view(made.error().field) != "capacity" || too_much) refuse(made.error());
  return std::nullopt;
}

// Formats and block sizes without room: what one sequence takes.
geometry bare_geometry(std::vector<group_config> groups, std::int32_t context) {
  for (group_config& g : groups) g.total = blocks{1};
  const result<geometry> made = resolve({.groups = groups,
                                         .max_sequences = 1,
                                         .max_sequence_tokens = context,
                                         .max_commands = 65535,
                                         .max_gathers = 0});
  if (!made) refuse(made.error());
  return *made;
}

std::int64_t blocks_of(const geometry& geo, std::int32_t context) {
  std::int64_t sum = 0;
  for (std::int32_t g = 0; g < geo.groups; ++g)
    sum += geo.group[g].first_only ? 0 : blocks_for(geo, g, context);
  return sum;
}

/// What a pool takes for one sequence.
struct pool_need {
  std::int64_t blocks = 0;
  std::int64_t open = 0;        ///< open blocks at rest
  std::int64_t most_open = 0;   ///< to be kept for it
  std::int64_t bytes = 0;       ///< of blocks and exempt tokens
  std::int64_t open_bytes = 0;  ///< of one open block
};

pool_need need_of(const pool& p, std::int64_t tokens) {
  pool_need n;
  const std::int64_t size = p.block_size;
  n.blocks = ceil_div(tokens, size);
  if (p.window != 0) {
    const std::int64_t ring = p.block.lossy ? ceil_div(std::int64_t{p.window} - 1, size) + 1
                                            : ceil_div(std::int64_t{p.window}, size);
    n.blocks = std::min(n.blocks, ring);
  }
  n.bytes = times(n.blocks, block_bytes(p.shape, p.block_size, p.block).count, "--context");
  if (!p.block.lossy) return n;
  const std::int64_t sealed = sealed_blocks(p.format, p.block_size, tokens);
  n.open = std::min(ceil_div(tokens, size) - sealed, n.blocks);
  n.most_open = ceil_div(std::int64_t{p.block.residual}, size) + 2;
  n.open_bytes = open_block_bytes(p.shape, p.block_size, p.block).count;
  if (p.format.exempt != 0) n.bytes += bytes_per_token(p.shape).count * p.format.exempt;
  return n;
}

// Bytes that `sequences` of `tokens` each need, open blocks kept for all of them and for a step included;
// false if that is more than `memory`.
bool fits(const std::vector<pool>& pools, std::int64_t sequences, std::int64_t tokens, std::int64_t memory) {
  std::int64_t sum = 0;
  for (const pool& p : pools) {
    const pool_need n = need_of(p, tokens);
    const std::int64_t step = p.block.lossy ? ceil_div(cache_config{}.max_step_tokens, p.block_size) : 0;
    std::int64_t each = 0;
    if (__builtin_mul_overflow(n.bytes + n.most_open * n.open_bytes, sequences, &each) ||
        __builtin_add_overflow(sum, each, &sum) || __builtin_add_overflow(sum, step * n.open_bytes, &sum)) {
      return false;
    }
  }
  return sum <= memory;
}

void fill_capacity(const std::vector<pool>& pools, const capacity_question& q, holding& out) {
  out.blocks = out.open_blocks = 0;
  out.max_batch =
      largest(most_sequences, [&](std::int64_t n) { return fits(pools, n, q.context, *q.memory); });
  std::int64_t longest =
      largest(most_context, [&](std::int64_t t) { return fits(pools, q.batch, t, *q.memory); });
  if (longest < 1) {
    out.max_context = 0;
    return;
  }
  for (const pool& p : pools) {
    const pool_need n = need_of(p, longest);
    *out.blocks += n.blocks * q.batch;
    *out.open_blocks += n.most_open * q.batch;
    if (p.block.lossy) *out.open_blocks += ceil_div(cache_config{}.max_step_tokens, p.block_size);
  }
  const bool all_windows =
      std::all_of(pools.begin(), pools.end(), [](const pool& p) { return p.window != 0; });
  out.max_context = all_windows && longest == most_context ? -1 : longest;
}

}  // namespace

cache_config config_of(const std::vector<group_config>& groups, std::int64_t memory, std::int32_t sequences) {
  return {.capacity = bytes{memory}, .groups = groups, .max_sequences = sequences};
}

holding library_holding(const std::vector<group_config>& groups, const capacity_question& q) {
  holding out;
  const geometry one = bare_geometry(groups, q.context);
  out.bytes_per_token = bytes_per_token(one).count;
  out.sequence_bytes = (sequence_bytes(one, q.context) + sequence_open_bytes(one, q.context)).count;
  out.kv_bytes = times(out.sequence_bytes, q.batch, "--batch");
  out.blocks_needed = blocks_of(one, q.context) * q.batch;
  for (std::int32_t g = 0; g < one.groups; ++g) {
    out.open_needed += std::int64_t{open_blocks_for(one, g, q.context)} * q.batch;
  }
  if (!q.memory) return out;
  out.blocks = out.open_blocks = out.max_context = 0;
  out.max_batch = largest(most_sequences, [&](std::int64_t n) {
    const auto sequences = static_cast<std::int32_t>(n);
    const auto geo = geometry_of(groups, *q.memory, sequences);
    return geo && max_batch(*geo, q.context) >= sequences;
  });
  const auto geo = geometry_of(groups, *q.memory, q.batch);
  if (!geo) return out;
  for (std::int32_t g = 0; g < geo->groups; ++g) {
    *out.blocks += geo->group[g].first_only ? 0 : geo->group[g].total;
    *out.open_blocks += geo->group[g].open;
  }
  out.max_context = max_context(*geo, q.batch);
  return out;
}

holding windowed_holding(const std::vector<pool>& pools, const capacity_question& q) {
  holding out;
  for (const pool& p : pools) {
    const pool_need n = need_of(p, q.context);
    out.bytes_per_token +=
        ceil_div(block_bytes(p.shape, p.block_size, p.block).count, std::int64_t{p.block_size});
    out.sequence_bytes += n.bytes + n.open * n.open_bytes;
    out.blocks_needed += n.blocks * q.batch;
    out.open_needed += n.open * q.batch;
  }
  out.kv_bytes = times(out.sequence_bytes, q.batch, "--batch");
  if (q.memory) fill_capacity(pools, q, out);
  return out;
}

}  // namespace kvcache::cli
