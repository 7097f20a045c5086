// SPDX-License-Identifier: Apache-2.0
#pragma once
// The groups of a cache whose blocks are packed: from the formats of its layers to what cache_config wants.
//
//   group 0   the layers' blocks, packed when they are final
//   group 1   exact copies of the first tokens of a text, where the formats exempt some
#include <span>

#include "kvcache/cache/config.hpp"
#include "kvcache/quant/format.hpp"

namespace kvcache {

/// Groups of a packed cache, to be changed where wanted (totals) and given to `cache_config::groups`.
struct packed_group_set {
  group_config group[2]{};  ///< the packed blocks; the exempt tokens
  int32_t count = 1;        ///< groups in use

  /// The groups in use. It must not outlive the set.
  std::span<const group_config> span() const noexcept { return {group, static_cast<size_t>(count)}; }
};

/// The groups for layers of `shape`. `layers`: one format for all of them, or one per layer. `deferred`: see
/// block_format. Fails: as block_format_of.
inline result<packed_group_set> packed_groups(const group_shape& shape, int32_t block_size,
                                              std::span<const kv_format> layers,
                                              bool deferred = false) noexcept {
  const result<block_format> format = block_format_of(layers, shape, block_size);
  if (!format) return format.error();
  packed_group_set out;
  out.group[0].shape = shape;
  out.group[0].block_size = block_size;
  out.group[0].format = *format;
  out.group[0].format.deferred = deferred && format->lossy;
  if (!format->lossy || layers[0].exempt == 0) return out;
  out.group[1].shape = shape;
  out.group[1].block_size = layers[0].exempt;
  out.group[1].first_only = true;
  out.count = 2;
  return out;
}

}  // namespace kvcache
