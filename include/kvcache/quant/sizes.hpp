// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a format costs per stored value, so that formats are compared at equal bytes: codes, scales, minima
// and the tokens that stay exact. Tokens that are not sealed yet are a matter of the moment and are not
// counted here; open_bits_per_value counts them.
#include <algorithm>
#include <cstdint>

#include "kvcache/core/shape.hpp"
#include "kvcache/core/units.hpp"
#include "kvcache/quant/format.hpp"

namespace kvcache {

/// Bytes of a layer's values at full precision for `tokens` tokens.
constexpr int64_t exact_layer_bytes(const group_shape& s, int64_t tokens) noexcept {
  return values_per_token_layer(s) * element_bytes(s.type) * tokens;
}

/// Bytes that a layer's exempt tokens take beside the sealed blocks; none where nothing is packed.
constexpr int64_t exempt_bytes(const kv_format& f, const group_shape& s) noexcept {
  const int64_t k = f.k.codes != code::exact ? s.head_dim_k : 0;
  const int64_t v = f.v.codes != code::exact ? s.head_dim_v : 0;
  return (k + v) * s.kv_heads * f.exempt * element_bytes(s.type);
}

/// Blocks that a query behind `tokens` tokens reads packed: those that end at or before tokens - residual.
constexpr int64_t sealed_blocks(const kv_format& f, int32_t block_size, int64_t tokens) noexcept {
  return lossy(f) ? std::max<int64_t>(tokens - f.residual, 0) / block_size : 0;
}

/// Bits per value of a text of `tokens` tokens that is sealed as far as it fills blocks: codes, scales and
/// minima of the sealed blocks (as if a block were filled up to 64 bytes with nothing), and the exempt
/// tokens, divided by the values of the sealed blocks. 0 if no block is full. Requires: valid format.
constexpr double bits_per_value(const kv_format& f, const group_shape& s, int32_t block_size,
                                int64_t tokens) noexcept {
  const int64_t full = tokens / block_size;
  if (full == 0) return 0;
  const int64_t block =
      layout_of(f.k, s, block_size, true).bytes + layout_of(f.v, s, block_size, false).bytes;
  const int64_t values = values_per_token_layer(s) * full * block_size;
  return 8.0 * static_cast<double>(full * block + exempt_bytes(f, s)) / static_cast<double>(values);
}

/// The same with everything a sequence holds at that moment: sealed blocks as allocated, whole open blocks
/// for the tokens that are not sealed (the last `residual` and what does not fill a block), exempt tokens;
/// divided by the text's values. Requires: valid format, tokens > 0.
constexpr double open_bits_per_value(const kv_format& f, const group_shape& s, int32_t block_size,
                                     int64_t tokens) noexcept {
  const int64_t sealed = sealed_blocks(f, block_size, tokens);
  const int64_t open = ceil_div(tokens - sealed * block_size, int64_t{block_size});
  const int64_t all = sealed * layer_block_bytes(f, s, block_size) + open * exact_layer_bytes(s, block_size) +
                      exempt_bytes(f, s);
  return 8.0 * static_cast<double>(all) / static_cast<double>(values_per_token_layer(s) * tokens);
}

}  // namespace kvcache
