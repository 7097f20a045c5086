// SPDX-License-Identifier: Apache-2.0
#pragma once
// Host memory for the keys and values of one group: one region, cut into planes.
//
//   region  | layer 0 | layer 1 | ...
//   layer   | block 0 | block 1 | ...
//   block   | K cell of head 0 | of head 1 | ... | V cell of head 0 | of head 1 | ...
//   K cell  [dim][slot]   keys transposed inside a block (the default), or
//           [slot][dim]   row-major
//   V cell  [slot][dim]
//
// With formats, cells are packed as drawn in quant/format.hpp, and behind all layers lie the open blocks,
// layer by layer and unpacked, then the exempt rows.
//
// A block of a layer is one run of bytes: what attention reads of a shuffled table is as long as it can be
// (docs/decisions/0002).
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <utility>

#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/shape.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"
#include "kvcache/kvcache.h"
#include "kvcache/quant/format.hpp"

namespace kvcache {

/// Order of a K cell. `transposed` lets one vector load fetch a channel of many keys, which is what decode
/// from memory wants; `row_major` is what most other kernels expect.
enum class k_order : uint8_t { transposed, row_major };

/// What host_planes are made of, beyond the shape.
struct host_planes_config {
  group_shape shape;                    ///< the group's layers, heads, dimensions and type
  int32_t block_size = 16;              ///< slots, a power of two
  int32_t blocks = 0;                   ///< ids are 0 .. blocks - 1
  int32_t group = 0;                    ///< id that commands name; group + 1 is that of the exempt rows
  k_order order = k_order::transposed;  ///< of every K cell
  /// Memory to use instead of allocating: at least host_planes::size_of(config) bytes, aligned to 64. The
  /// caller keeps it alive.
  void* memory = nullptr;
  /// Asks the system for large pages where memory is allocated here (Linux, transparent huge pages): decode
  /// reads shuffled blocks up to a third faster. The region is then taken 2 MiB at a time.
  bool large_pages = true;
  /// Cross-layer sharing: entry i is the model layer whose planes layer i reads (itself: its own). Empty =
  /// one layer per stored layer.
  std::span<const int32_t> layer_owner{};
  /// How full blocks are packed: one format for all stored layers, or one for each; empty = as written. With
  /// a format that rounds, `order` is that of open blocks.
  std::span<const kv_format> formats{};
  int32_t open_blocks = 0;    ///< ids of the open space; above 0 with a format that rounds
  int32_t exempt_blocks = 0;  ///< ids of the exempt space, for formats that exempt tokens
  /// Rotation of K at reading, for formats that store it before (k_before_rope). Outlives the planes.
  const kvc_rope* k_rope = nullptr;
};

/// Planes of all layers of a group, and the kvc_kv that describes each.
/// Memory: exactly blocks x block_bytes(shape, block_size), or what the formats say, zero when allocated here
/// and taken from the system page by page as it is written. Thread safety: as the bytes it describes. Owns:
/// its region, unless the configuration lent one.
class host_planes {
 public:
  host_planes() noexcept = default;
  /// Takes the region over; `o` is then empty.
  host_planes(host_planes&& o) noexcept { swap(o); }
  /// Exchanges the regions.
  host_planes& operator=(host_planes&& o) noexcept {
    swap(o);
    return *this;
  }
  ~host_planes() { std::free(owned_); }

  /// Fails: bad_argument naming the field, out_of_memory.
  static result<host_planes> create(const host_planes_config& config) noexcept;
  /// Bytes the planes of a valid configuration take.
  static constexpr bytes size_of(const host_planes_config& c) noexcept {
    bytes sum{};
    for (int32_t i = 0; i < c.shape.layers; ++i) {
      sum = sum + bytes{layer_block_bytes(format_at(c, i), c.shape, c.block_size)} * c.blocks;
    }
    if (!rounds(c)) return block_bytes(c.shape, c.block_size) * c.blocks;
    return sum + bytes_per_token(c.shape) * c.block_size * c.open_blocks +
           bytes_per_token(c.shape) * exempt_of(c) * c.exempt_blocks;
  }

  /// The planes layer `i` reads: its own, or those of the layer it borrows from. Requires: 0 ≤ i <
  /// layers().size().
  const kvc_kv& layer(int32_t i) const noexcept { return layers_[static_cast<size_t>(i)]; }
  /// All layers, as `run` takes them; behind them those of the exempt rows, if there are any.
  std::span<const kvc_kv> layers() const noexcept { return layers_.view(); }
  /// Bytes of the region.
  bytes size() const noexcept { return size_; }
  /// First byte of the region, aligned to 64.
  void* data() const noexcept { return data_; }

 private:
  static constexpr size_t alignment = 64;
  static constexpr size_t large_page = size_t{2} << 20;

  /// Format of the stored layer `i`.
  static constexpr kv_format format_at(const host_planes_config& c, int32_t i) noexcept {
    if (c.formats.empty()) return {};
    return c.formats[c.formats.size() == 1 ? 0 : static_cast<size_t>(i)];
  }
  static constexpr int32_t exempt_of(const host_planes_config& c) noexcept {
    return rounds(c) ? format_at(c, 0).exempt : 0;
  }
  static constexpr bool rounds(const host_planes_config& c) noexcept {
    for (const kv_format& f : c.formats) {
      if (lossy(f)) return true;
    }
    return false;
  }
  static status check_formats(const host_planes_config& c) noexcept;
  static bool has_exempt(const host_planes_config& c) noexcept {
    return exempt_of(c) != 0 && c.exempt_blocks != 0;
  }

  void swap(host_planes& o) noexcept {
    std::swap(owned_, o.owned_);
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
    std::swap(layers_, o.layers_);
  }
  status place(const host_planes_config& config) noexcept;
  void* allocate(size_t size, bool large_pages) noexcept;
  void describe(const host_planes_config& config) noexcept;
  static void describe_packed(const host_planes_config& c, int32_t stored, std::byte* at,
                              kvc_kv& kv) noexcept;
  void describe_tail(const host_planes_config& c, std::byte* at) noexcept;
  void describe_exempt(const host_planes_config& c) noexcept;

  void* owned_ = nullptr;  // as calloc gave it
  std::byte* data_ = nullptr;
  bytes size_{};
  fixed_array<kvc_kv> layers_;
};

namespace detail {

/// A plane of cells [slot][dim], or [dim][slot] when transposed, `block_stride` bytes from block to block.
constexpr kvc_plane plane_of_cells(void* data, const group_shape& s, int32_t block, int32_t dim,
                                   bool transposed, int64_t block_stride) noexcept {
  const int64_t element = element_bytes(s.type);
  kvc_plane p{};
  p.data = data;
  p.type = static_cast<int16_t>(s.type);
  p.head_stride = element * block * dim;
  p.block_stride = block_stride;
  p.token_stride = transposed ? element : element * dim;
  p.dim_stride = transposed ? element * block : element;
  return p;
}

/// K or V of sealed blocks under a format.
constexpr kvc_plane plane_of_side(const side_format& f, const group_shape& s, int32_t block_size, bool keys,
                                  std::byte* at, int64_t block_stride) noexcept {
  const int32_t dim = keys ? s.head_dim_k : s.head_dim_v;
  if (f.codes == code::exact) return plane_of_cells(at, s, block_size, dim, keys, block_stride);
  const side_layout l = layout_of(f, s, block_size, keys);
  kvc_plane p{};
  p.data = at;
  p.type = static_cast<int16_t>(f.codes);
  p.block_stride = p.scale_block_stride = block_stride;
  p.head_stride = l.head_stride;
  (keys ? p.dim_stride : p.token_stride) = l.code_row;
  p.scale = at + l.scale;
  p.zero = l.minimum != 0 ? at + l.minimum : nullptr;
  p.scale_head_stride = l.scale_stride;
  p.scale_kind = static_cast<int16_t>(static_cast<int32_t>(f.axis) + KVC_SCALE_TENSOR);
  p.clip = static_cast<int16_t>(f.clip);
  if (f.axis == scale_axis::token || f.axis == scale_axis::channel) {
    p.scale_group = static_cast<int16_t>(group_of(f, block_size, dim));
  }
  return p;
}

/// Every owner owns itself, comes first, and there are as many as the shape stores.
constexpr status validate_owners(std::span<const int32_t> owner, int32_t stored) noexcept {
  int32_t own = 0;
  for (size_t i = 0; i < owner.size(); ++i) {
    if (owner[i] < 0 || static_cast<size_t>(owner[i]) > i ||
        owner[static_cast<size_t>(owner[i])] != owner[i]) {
      return {errc::bad_argument, "layer_owner", owner[i]};
    }
    own += static_cast<size_t>(owner[i]) == i;
  }
  if (!owner.empty() && own != stored) return {errc::bad_argument, "layer_owner", own};
  return {};
}

}  // namespace detail

inline result<host_planes> host_planes::create(const host_planes_config& config) noexcept {
  if (const status s = validate(config.shape, config.block_size); !s) return s;
  if (config.blocks < 1) return status{errc::bad_argument, "blocks", config.blocks};
  if (config.group < 0 || config.group > UINT8_MAX) return status{errc::bad_argument, "group", config.group};
  if (block_bytes(config.shape, config.block_size).count > INT64_MAX / 2 / config.blocks) {
    return status{errc::bad_argument, "blocks", config.blocks};
  }
  if (const status s = detail::validate_owners(config.layer_owner, config.shape.layers); !s) return s;
  if (const status s = check_formats(config); !s) return s;
  host_planes p;
  if (const status s = p.place(config); !s) return s;
  p.describe(config);
  return p;
}

inline status host_planes::place(const host_planes_config& config) noexcept {
  size_ = size_of(config);
  size_t layers =
      config.layer_owner.empty() ? static_cast<size_t>(config.shape.layers) : config.layer_owner.size();
  if (has_exempt(config)) layers += static_cast<size_t>(config.shape.layers);
  if (!layers_.create(layers)) return {errc::out_of_memory, "layers", config.shape.layers};
  void* start = config.memory;
  if (start == nullptr) {
    start = allocate(static_cast<size_t>(size_.count), config.large_pages);
    if (start == nullptr) return {errc::out_of_memory, "blocks", config.blocks};
  } else if (reinterpret_cast<uintptr_t>(start) % alignment != 0) {
    return {errc::bad_argument, "memory", static_cast<int64_t>(reinterpret_cast<uintptr_t>(start))};
  }
  data_ = static_cast<std::byte*>(start);
  return {};
}

/// Zeroed memory that is not touched yet, so that the system may still choose the size of its pages.
inline void* host_planes::allocate(size_t size, bool large_pages) noexcept {
#if defined(__linux__)
  const bool large = large_pages && size >= 2 * large_page;
#else
  const bool large = false;
  static_cast<void>(large_pages);
#endif
  const size_t align = large ? large_page : alignment;
  owned_ = std::calloc(size + align, 1);
  if (owned_ == nullptr) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(owned_);
  void* start = static_cast<std::byte*>(owned_) + (align - address % align) % align;
#if defined(__linux__)
  if (large) static_cast<void>(::madvise(start, size / large_page * large_page, MADV_HUGEPAGE));
#endif
  return start;
}

inline status host_planes::check_formats(const host_planes_config& c) noexcept {
  if (c.formats.empty()) return {};
  const auto f = block_format_of(c.formats, c.shape, c.block_size);
  if (!f) return f.error();
  if (!f->lossy) return {errc::bad_argument, "formats", static_cast<int64_t>(c.formats.size())};
  if (c.open_blocks < 1) return {errc::bad_argument, "open_blocks", c.open_blocks};
  for (const kv_format& one : c.formats) {
    if (one.k_before_rope && c.k_rope == nullptr) return {errc::bad_argument, "k_rope", 0};
  }
  if (c.exempt_blocks < 0) return {errc::bad_argument, "exempt_blocks", c.exempt_blocks};
  return {};
}

inline void host_planes::describe(const host_planes_config& config) noexcept {
  const group_shape& s = config.shape;
  std::byte* at = data_;
  const size_t count = layers_.size() - (has_exempt(config) ? static_cast<size_t>(s.layers) : 0);
  int32_t stored = 0;
  for (size_t i = 0; i < count; ++i) {
    kvc_kv& kv = layers_[i];
    if (!config.layer_owner.empty() && static_cast<size_t>(config.layer_owner[i]) != i) {
      kv = layers_[static_cast<size_t>(config.layer_owner[i])];
      kv.owner = 1 + config.layer_owner[i];
      continue;
    }
    kv = {};
    kv.struct_size = sizeof kv;
    kv.group = config.group;
    kv.kv_heads = s.kv_heads;
    kv.dim_k = s.head_dim_k;
    kv.dim_v = s.head_dim_v;
    kv.block = config.block_size;
    kv.blocks = config.blocks;
    if (rounds(config)) {
      describe_packed(config, stored++, at, kv);
      at += kv.k.block_stride * kv.blocks;
      continue;
    }
    const int64_t slot = element_bytes(s.type) * int64_t{kv.block};
    const int64_t k_cell = slot * kv.dim_k, v_cell = s.v_aliases_k ? 0 : slot * kv.dim_v;
    const bool transposed = config.order == k_order::transposed;
    const int64_t block = (k_cell + v_cell) * kv.kv_heads;
    kv.k = detail::plane_of_cells(at, s, kv.block, kv.dim_k, transposed, block);
    if (v_cell != 0) {
      kv.v = detail::plane_of_cells(at + k_cell * kv.kv_heads, s, kv.block, kv.dim_v, false, block);
    }
    at += kv.k.block_stride * kv.blocks;
    kv.layout = kvc_layout(&kv);
  }
  if (!rounds(config)) return;
  describe_tail(config, at);
  for (size_t i = 0; i < count; ++i) {
    if (layers_[i].owner == 0) continue;
    const int32_t owner = layers_[i].owner;
    layers_[i] = layers_[static_cast<size_t>(owner - 1)];
    layers_[i].owner = owner;
  }
  if (has_exempt(config)) describe_exempt(config);
}

/// Sealed planes of one layer.
inline void host_planes::describe_packed(const host_planes_config& c, int32_t stored, std::byte* at,
                                         kvc_kv& kv) noexcept {
  const kv_format f = format_at(c, stored);
  const int64_t block = layer_block_bytes(f, c.shape, c.block_size);
  const int64_t keys = layout_of(f.k, c.shape, c.block_size, true).bytes;
  kv.k = detail::plane_of_side(f.k, c.shape, c.block_size, true, at, block);
  kv.v = detail::plane_of_side(f.v, c.shape, c.block_size, false, at + keys, block);
  kv.exempt = f.exempt;
  kv.k_rope = f.k_before_rope ? c.k_rope : nullptr;
  kv.hadamard = (f.k.hadamard ? KVC_HADAMARD_K : 0) | (f.v.hadamard ? KVC_HADAMARD_V : 0);
  kv.integer_dot = f.integer_dot ? 1 : 0;
  kv.open_blocks = c.open_blocks;
  kv.exempt_blocks = f.exempt != 0 ? c.exempt_blocks : 0;
}

/// Open blocks and exempt rows of all layers, from `at` on.
inline void host_planes::describe_tail(const host_planes_config& c, std::byte* at) noexcept {
  const group_shape& s = c.shape;
  for (int32_t turn = 0; turn < 2; ++turn) {
    const int32_t slots = turn == 0 ? c.block_size : exempt_of(c),
                  count = turn == 0 ? c.open_blocks : c.exempt_blocks;
    const int64_t slot = element_bytes(s.type) * int64_t{slots};
    const int64_t keys = slot * s.head_dim_k * s.kv_heads, block = keys + slot * s.head_dim_v * s.kv_heads;
    for (kvc_kv& kv : layers_) {
      if (kv.owner != 0 || kv.kv_heads == 0 || slots == 0 || count == 0) continue;
      const bool transposed = turn == 0 && c.order == k_order::transposed;
      (turn == 0 ? kv.open_k : kv.exempt_k) =
          detail::plane_of_cells(at, s, slots, s.head_dim_k, transposed, block);
      (turn == 0 ? kv.open_v : kv.exempt_v) =
          detail::plane_of_cells(at + keys, s, slots, s.head_dim_v, false, block);
      at += block * count;
    }
  }
  for (kvc_kv& kv : layers_) {
    if (kv.kv_heads != 0) kv.layout = kvc_layout(&kv);
  }
}

/// The exempt rows as layers of a group of their own, for commands.
inline void host_planes::describe_exempt(const host_planes_config& c) noexcept {
  size_t to = layers_.size() - static_cast<size_t>(c.shape.layers);
  for (size_t i = 0; to < layers_.size(); ++i) {
    const kvc_kv& from = layers_[i];
    if (from.owner != 0) continue;
    kvc_kv& kv = layers_[to++];
    kv = {};
    kv.struct_size = sizeof kv;
    kv.group = c.group + 1;
    kv.kv_heads = from.kv_heads;
    kv.dim_k = from.dim_k;
    kv.dim_v = from.dim_v;
    kv.block = from.exempt;
    kv.blocks = from.exempt_blocks;
    kv.k = from.exempt_k;
    kv.v = from.exempt_v;
    kv.layout = kvc_layout(&kv);
  }
}

}  // namespace kvcache
