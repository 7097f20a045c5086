// SPDX-License-Identifier: Apache-2.0
#pragma once
// What fits, and what a decode step costs, before anything is built. The sizes come from `resolve`, which is
// what the cache itself allocates by, so the planner cannot be of another opinion than the allocator.
//
//   one decode step reads:  | weights, once per batch | K and V of every token of every sequence |
//                            weight-dominated          cache-dominated
#include <algorithm>
#include <cstdint>
#include <span>

#include "kvcache/cache/config.hpp"
#include "kvcache/quant/format.hpp"

namespace kvcache {

/// Bytes stored for one token over all groups, in sealed blocks. Exact where a block's bytes divide by its
/// tokens; else rounded up. Groups of first tokens do not count: theirs do not grow with the text.
constexpr bytes bytes_per_token(const geometry& geo) noexcept {
  bytes sum{};
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    if (x.first_only) continue;
    sum = sum + bytes{ceil_div(block_bytes(x.shape, x.block_size, x.format).count, int64_t{x.block_size})};
  }
  return sum;
}

/// Blocks that one unshared sequence of `tokens` takes in group `g`: what `extend` hands out.
constexpr int32_t blocks_for(const geometry& geo, int32_t g, int32_t tokens) noexcept {
  const group_geometry& x = geo.group[g];
  return tokens == 0 ? 0 : std::max(ceil_div(x.stored(tokens), x.block_size), x.reserve_blocks);
}

/// Open blocks that one unshared sequence holds in group `g` between two steps, at `tokens` and all that is
/// due sealed; with `step` above 0, in a step that brought it there by so many tokens: what that step seals
/// stays open to its end. Before its settle a deferred text holds all its blocks open: `step` = tokens.
constexpr int32_t open_blocks_for(const geometry& geo, int32_t g, int32_t tokens, int32_t step = 0) noexcept {
  const group_geometry& x = geo.group[g];
  if (!x.format.lossy) return 0;
  return ceil_div(tokens, x.block_size) - x.sealed_at(tokens - step) / x.block_size;
}

/// The most that open_blocks_for gives for any length: ceil((residual + block_size - 1 + step) / block_size).
constexpr int32_t most_open_blocks(const geometry& geo, int32_t g, int32_t step = 0) noexcept {
  const group_geometry& x = geo.group[g];
  if (!x.format.lossy) return 0;
  const int64_t tokens = int64_t{x.format.residual} + x.block_size - 1 + step;
  return static_cast<int32_t>(ceil_div(tokens, int64_t{x.block_size}));
}

/// Bytes of the open blocks of one unshared sequence, as open_blocks_for counts them.
constexpr bytes sequence_open_bytes(const geometry& geo, int32_t tokens, int32_t step = 0) noexcept {
  bytes sum{};
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    sum = sum + open_block_bytes(x.shape, x.block_size, x.format) * open_blocks_for(geo, g, tokens, step);
  }
  return sum;
}

/// What a packed block consists of, over all layers.
struct block_parts {
  bytes codes{};    ///< codes, rows filled up to 32 counted
  bytes scales{};   ///< one half float per group of values
  bytes minima{};   ///< the same, of the groups that have one
  bytes exact{};    ///< K or V of layers that do not pack it
  bytes filling{};  ///< to 64 bytes per layer

  /// Bytes of the block.
  constexpr bytes total() const noexcept { return codes + scales + minima + exact + filling; }
};

/// The parts of a block of `shape`. `layers`: one format for all layers, or one per layer. Requires: valid
/// formats (block_format_of).
constexpr block_parts parts_of(std::span<const kv_format> layers, const group_shape& shape,
                               int32_t block_size) noexcept {
  block_parts sum;
  for (const kv_format& f : layers) {
    const int64_t each = layers.size() == 1 ? shape.layers : 1;
    int64_t all = 0;
    for (const bool keys : {true, false}) {
      const side_format& side = keys ? f.k : f.v;
      const side_layout l = layout_of(side, shape, block_size, keys);
      all += l.bytes;
      if (side.codes == code::exact) {
        sum.exact = sum.exact + bytes{l.bytes} * each;
        continue;
      }
      const int64_t scale_sets = has_minimum(side) ? 2 : 1;
      const int64_t scales = int64_t{2} *
                             scales_of_cell(side, block_size, keys ? shape.head_dim_k : shape.head_dim_v) *
                             (side.axis == scale_axis::tensor ? 1 : shape.kv_heads);
      sum.codes = sum.codes + bytes{l.bytes - scales * scale_sets} * each;
      sum.scales = sum.scales + bytes{scales} * each;
      sum.minima = sum.minima + bytes{scales * (scale_sets - 1)} * each;
    }
    sum.filling = sum.filling + bytes{layer_block_bytes(f, shape, block_size) - all} * each;
  }
  return sum;
}

/// Bytes that one unshared sequence of `tokens` holds in its tables, whole blocks counted: packed blocks are
/// reserved while their open form is written, and groups of first tokens (exempt rows) count. Open blocks lie
/// beside them: sequence_open_bytes.
constexpr bytes sequence_bytes(const geometry& geo, int32_t tokens) noexcept {
  bytes sum{};
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    sum = sum + block_bytes(x.shape, x.block_size, x.format) * blocks_for(geo, g, tokens);
  }
  return sum;
}

/// Most sequences of `tokens` each that fit at once without sharing, also bounded by the configured number of
/// sequences. 0 if one does not fit.
constexpr int32_t max_batch(const geometry& geo, int32_t tokens) noexcept {
  if (tokens > geo.max_sequence_tokens) return 0;
  int32_t n = geo.max_sequences;
  for (int32_t g = 0; g < geo.groups && tokens > 0; ++g) {
    n = std::min(n, geo.group[g].total / blocks_for(geo, g, tokens));
  }
  return n;
}

/// Longest text that `batch` sequences can reach at once without sharing. 0 if not even one token fits.
constexpr int32_t max_context(const geometry& geo, int32_t batch) noexcept {
  if (batch < 1 || batch > geo.max_sequences) return 0;
  int64_t most = geo.max_sequence_tokens;
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    const int32_t each = x.total / batch;
    if (each < x.reserve_blocks || (x.first_only && each < 1)) return 0;
    if (x.first_only) continue;
    most = std::min(most, int64_t{each} * x.block_size);
  }
  return static_cast<int32_t>(most);
}

/// Which of the two streams of a decode step is the longer one.
enum class regime : uint8_t { weight_dominated, cache_dominated };

/// Bytes that one decode step of a whole batch reads, and what follows from them.
struct step_traffic {
  bytes weights{};  ///< read once per step, whatever the batch
  bytes cache{};    ///< K and V of all tokens of all sequences

  /// Bytes of both streams.
  constexpr bytes total() const noexcept { return weights + cache; }
  /// How many bytes of cache are read for each byte of weights. Requires: weights above 0.
  constexpr double cache_over_weights() const noexcept {
    return static_cast<double>(cache.count) / static_cast<double>(weights.count);
  }
  /// The longer stream; the weights if they are equal.
  constexpr regime dominated_by() const noexcept {
    return cache.count > weights.count ? regime::cache_dominated : regime::weight_dominated;
  }
  /// Least seconds of a step at `bytes_per_second` of memory bandwidth.
  constexpr double seconds(double bytes_per_second) const noexcept {
    return static_cast<double>(total().count) / bytes_per_second;
  }
  /// Step time relative to now if the weights shrink to `weight_factor` and the cache to `cache_factor` of
  /// their bytes.
  constexpr double factor(double weight_factor, double cache_factor) const noexcept {
    return (static_cast<double>(weights.count) * weight_factor +
            static_cast<double>(cache.count) * cache_factor) /
           static_cast<double>(total().count);
  }
};

/// Bytes of `parameters` weights at `bits` each, rounded up to whole bytes. Requires: parameters < 2^56, bits
/// <= 32.
constexpr bytes weight_bytes(int64_t parameters, int32_t bits) noexcept {
  return {ceil_div(parameters * bits, int64_t{8})};
}

/// Traffic of a step of `batch` sequences of `context` tokens each. Windows and shared reads are not counted
/// off.
constexpr step_traffic decode_step(const group_shape& shape, bytes weights, int32_t batch,
                                   int32_t context) noexcept {
  return {.weights = weights, .cache = bytes_per_token(shape) * batch * context};
}

}  // namespace kvcache
