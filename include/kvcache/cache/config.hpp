// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a user says about his cache, and the geometry that follows from it. `resolve` is the only place where
// sizes are decided: the cache allocates what it says, and the planner (plan.hpp) prints what it says.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "kvcache/core/shape.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// Most groups of one cache: kinds of layers with a table of their own.
inline constexpr int32_t max_groups = 8;

/// Layers that share one block table.
struct group_config {
  group_shape shape{};      ///< of the layers in this group
  int32_t block_size = 16;  ///< tokens, a power of two
  blocks total{};           ///< 0 = this group's part of `cache_config::capacity`
  /// Open blocks of a lossy format; 0 = enough for every sequence's residual, and unless its seals are
  /// deferred for the new tokens of a step (`cache_config::max_step_tokens`).
  blocks open{};
  /// Tokens a sequence reserves at its first extend, for an allocator that shares no blocks (`contiguous`);
  /// 0 = grow by block.
  int32_t reserve = 0;
  block_format format{};  ///< how full blocks are stored; default: as they were written
  /// The group stores only the first `block_size` (1, 2 or 4) tokens of a text, in one block: exact copies of
  /// attention sinks beside packed ones. Only with the default format. `total` 0 = a block for every sequence
  /// twice, or for a quarter of the units if that is more, but not more than units.
  bool first_only = false;
};

/// Everything that bounds the memory of a cache. Nothing is allocated after creation.
struct cache_config {
  model_shape shape{};      ///< a model whose layers are all alike; else name `groups`
  int32_t block_size = 16;  ///< tokens per block of `shape`, a power of two
  bytes capacity{};  ///< of all blocks of all groups; every group gets room for the same number of tokens
  std::span<const group_config> groups{};  ///< replaces shape and block_size

  int32_t max_sequences = 256;      ///< open at the same time
  int32_t max_sequence_tokens = 0;  ///< per sequence; 0 = as many as the smallest group holds
  int32_t max_nodes = 0;      ///< units in the prefix index; 0 = as many as the blocks can fill, −1 = none
  int32_t max_scopes = 1024;  ///< sharing scopes with something cached or open
  int32_t max_events = 0;     ///< index events kept between two steps; 0 = none are recorded
  /// Queued between two steps, at most 65,535. 0 = four per sequence and group, or what one sequence can need
  /// if that is more: a seal per block, or to drop tokens (`retain`) a copy and a turn per block.
  int32_t max_commands = 0;
  int32_t max_gathers = 8;  ///< sequences of the longest kind that may drop tokens between two steps
  /// New tokens of all sequences in one step, for lossy formats: their open blocks live until the step's end.
  int32_t max_step_tokens = 512;
  /// Most blocks that each account may hold, all groups together. Empty = one account without a limit.
  std::span<const int32_t> account_limits{};
};

/// One group as it will be built.
struct group_geometry {
  group_shape shape{};         ///< of its layers
  int32_t block_size = 0;      ///< tokens
  int32_t total = 0;           ///< blocks
  int32_t open = 0;            ///< open blocks
  int32_t per_unit = 0;        ///< blocks of this group in one node
  int32_t unit_offset = 0;     ///< where they begin among the node's block ids
  int32_t columns = 0;         ///< table entries of one sequence
  int32_t reserve_blocks = 0;  ///< taken together by each sequence
  block_format format{};       ///< how full blocks are stored
  bool first_only = false;     ///< stores the first block_size tokens of a text

  /// Of the first `tokens` tokens of a text, those that the group stores.
  constexpr int32_t stored(int32_t tokens) const noexcept {
    return first_only ? std::min(tokens, block_size) : tokens;
  }
  /// Blocks that hold that many slots: without a division, which every extend would wait for. Requires: not
  /// negative.
  constexpr int32_t blocks_for(int32_t slots) const noexcept {
    const auto size = static_cast<uint32_t>(block_size);
    return static_cast<int32_t>((static_cast<uint32_t>(slots) + size - 1) >> std::countr_zero(size));
  }
  /// A slot's number in its block. Requires: not negative.
  constexpr int32_t inside(int32_t slot) const noexcept { return slot & (block_size - 1); }
  /// Blocks of the group in the first `units` nodes of a text.
  constexpr int32_t blocks_of_units(int32_t units) const noexcept {
    return first_only ? std::min(units, 1) : units * per_unit;
  }
  /// Whether the step that makes a block final also seals it.
  constexpr bool seals_in_step() const noexcept { return format.lossy && !format.deferred; }
  /// Leading tokens of a text that the query which is its `tokens`-th token reads packed; whole blocks.
  constexpr int32_t sealed_at(int32_t tokens) const noexcept {
    const int64_t final = int64_t{tokens} - format.residual;
    return final <= 0 ? 0 : static_cast<int32_t>(final & -int64_t{block_size});
  }

  /// Bytes of all its planes, open blocks included.
  bytes memory() const noexcept {
    return block_bytes(shape, block_size, format) * total +
           open_block_bytes(shape, block_size, format) * open;
  }
};

/// A whole cache as it will be built.
struct geometry {
  int32_t groups = 0;                  ///< entries of `group` in use
  group_geometry group[max_groups]{};  ///< in the order of the configuration
  int32_t unit = 0;                    ///< tokens of a node: the largest block size
  int32_t blocks_per_unit = 0;         ///< of all groups
  int32_t nodes = 0;                   ///< room of the prefix index
  int32_t max_sequences = 0;           ///< open at the same time
  int32_t max_sequence_tokens = 0;     ///< longest sequence
  int32_t max_scopes = 0;              ///< in use at the same time
  int32_t max_events = 0;              ///< between two steps
  int32_t max_commands = 0;            ///< between two steps
  int32_t max_gather_ids = 0;          ///< numbers in the lists of gathers, between two steps
  uint64_t format_fingerprint = 0;     ///< of the layouts of all groups; part of every scope

  /// Bytes of all planes.
  bytes memory() const noexcept {
    bytes sum{};
    for (int32_t g = 0; g < groups; ++g) sum = sum + group[g].memory();
    return sum;
  }
};

/// Decides every size. Fails: bad_argument or unsupported, naming the field and its value.
result<geometry> resolve(const cache_config& config) noexcept;

namespace detail {

inline status resolve_group(const group_config& in, group_geometry& out) noexcept {
  if (status s = validate(in.shape, in.block_size); !s) return s;
  if (in.shape.window != 0) return {errc::unsupported, "window", in.shape.window};
  if (in.total.count < 0) return {errc::bad_argument, "total", in.total.count};
  if (in.open.count < 0) return {errc::bad_argument, "open", in.open.count};
  if (in.reserve < 0) return {errc::bad_argument, "reserve", in.reserve};
  const block_format& f = in.format;
  constexpr int64_t most = int64_t{1} << 53;  // also the most that `validate` lets a block of the shape have
  if (f.block.count < 0 || f.block.count > most) return {errc::bad_argument, "format.block", f.block.count};
  if (f.open_block.count < 0 || f.open_block.count > most) {
    return {errc::bad_argument, "format.open_block", f.open_block.count};
  }
  if (f.residual < 0) return {errc::bad_argument, "format.residual", f.residual};
  if (f.deferred && !f.lossy) return {errc::bad_argument, "format.deferred", 1};
  if (f.exempt < 0 || f.exempt > in.block_size) return {errc::bad_argument, "format.exempt", f.exempt};
  if ((f.lossy || in.first_only) && in.reserve != 0) return {errc::unsupported, "reserve", in.reserve};
  if (in.first_only && in.block_size > 4) return {errc::bad_argument, "block_size", in.block_size};
  if (in.first_only && f != block_format{}) return {errc::unsupported, "format", 0};
  out = {.shape = in.shape,
         .block_size = in.block_size,
         .total = in.total.count,
         .open = in.open.count,
         .reserve_blocks = ceil_div(in.reserve, in.block_size),
         .format = f,
         .first_only = in.first_only};
  return {};
}

// What a node holds of each group. A group of first tokens does not count for the unit, but all it stores
// must lie in the first one.
inline status resolve_units(geometry& geo) noexcept {
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    if (!x.first_only) geo.unit = std::max(geo.unit, x.block_size);
  }
  for (int32_t g = 0; g < geo.groups; ++g) {
    group_geometry& x = geo.group[g];
    if (x.first_only && x.block_size > geo.unit) return {errc::bad_argument, "block_size", x.block_size};
    x.per_unit = x.first_only ? 1 : geo.unit / x.block_size;
    x.unit_offset = geo.blocks_per_unit;
    geo.blocks_per_unit += x.per_unit;
  }
  return {};
}

// Open blocks hold the residual, the block being filled and one more that fills while the oldest waits to be
// sealed; and what a step makes final stays open to its end.
inline status default_open(const cache_config& c, geometry& geo) noexcept {
  for (int32_t g = 0; g < geo.groups; ++g) {
    group_geometry& x = geo.group[g];
    if (!x.format.lossy) {
      x.open = 0;
    } else if (x.open == 0) {
      const int64_t each = int64_t{ceil_div(x.format.residual, x.block_size)} + 2;
      const int64_t step = x.format.deferred ? 0 : ceil_div(c.max_step_tokens, x.block_size);
      if (c.max_sequences * each + step > (1 << 30)) {
        return {errc::bad_argument, "format.residual", x.format.residual};
      }
      x.open = static_cast<int32_t>(c.max_sequences * each + step);
    }
  }
  return {};
}

// sum += a * b; false, with the sum unspecified, if that does not fit 64 bits.
constexpr bool add_product(int64_t& sum, int64_t a, int64_t b) noexcept {
  int64_t product = 0;
  return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(sum, product, &sum);
}

// Blocks of a group of first tokens where the user named none: one for each live text and, with luck, for
// each cached one.
constexpr int64_t first_blocks(const cache_config& c, int64_t units) noexcept {
  return std::min(std::max<int64_t>(units, 1), std::max(int64_t{2} * c.max_sequences, units / 4));
}

// Whether `units` of every group fit into the capacity.
inline bool units_fit(const cache_config& c, const geometry& geo, int64_t unit_bytes, int64_t rest,
                      int64_t units) noexcept {
  bool fit = add_product(rest, unit_bytes, units);
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    if (!x.first_only || x.total != 0) continue;
    fit = fit && add_product(rest, block_bytes(x.shape, x.block_size).count, first_blocks(c, units));
  }
  return fit && rest <= c.capacity.count;
}

// Groups of first tokens that name no total: as many as the units of the others want.
inline void share_first(const cache_config& c, geometry& geo) noexcept {
  int64_t units = INT32_MAX;
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    if (!x.first_only) units = std::min<int64_t>(units, x.total / x.per_unit);
  }
  for (int32_t g = 0; g < geo.groups; ++g) {
    group_geometry& x = geo.group[g];
    if (x.first_only && x.total == 0) x.total = static_cast<int32_t>(first_blocks(c, units));
  }
}

// Most units that fit: found by halving, as the blocks of a group of first tokens are no multiple of them.
inline int64_t most_units(const cache_config& c, const geometry& geo, int64_t unit_bytes,
                          int64_t rest) noexcept {
  int64_t fit = 0;
  int64_t more = c.capacity.count < rest ? 1 : (c.capacity.count - rest) / unit_bytes + 1;
  if (more > 1 && units_fit(c, geo, unit_bytes, rest, more - 1)) return more - 1;
  while (more - fit > 1) {
    const int64_t half = fit + (more - fit) / 2;
    (units_fit(c, geo, unit_bytes, rest, half) ? fit : more) = half;
  }
  return fit;
}

// Blocks from bytes: whole units only, so that no group can run out while another still has room for the same
// text.
inline status share_capacity(const cache_config& c, geometry& geo) noexcept {
  bool asked = false;
  int64_t unit_bytes = 0;
  int64_t rest = 0;
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    asked |= x.total == 0 && !x.first_only;
    const int64_t block = block_bytes(x.shape, x.block_size, x.format).count;
    const bool fit =
        x.first_only ? add_product(rest, block, x.total) : add_product(unit_bytes, block, x.per_unit);
    if (!fit) return {errc::bad_argument, "block_size", x.block_size};
    if (!add_product(rest, open_block_bytes(x.shape, x.block_size, x.format).count, x.open)) {
      return {errc::bad_argument, "open", x.open};
    }
  }
  const int64_t units = asked ? most_units(c, geo, unit_bytes, rest) : 0;
  if (asked && units < 1) return {errc::bad_argument, "capacity", c.capacity.count};
  for (int32_t g = 0; asked && g < geo.groups; ++g) {
    group_geometry& x = geo.group[g];
    if (x.total != 0 || x.first_only) continue;
    const int64_t step = std::max(1, x.reserve_blocks);
    const int64_t n = units * x.per_unit / step * step;
    if (n < 1 || n > (1 << 30)) return {errc::bad_argument, "capacity", c.capacity.count};
    x.total = static_cast<int32_t>(n);
  }
  share_first(c, geo);
  return {};
}

// An empty list must hold whatever one verb queues for one sequence, or it would be refused for ever: a copy
// per group, or the deferred seals of everything it holds. A drop (retain.hpp) may copy and turn every block:
// the default has room for that too.
inline status resolve_commands(const cache_config& c, geometry& geo) noexcept {
  constexpr int64_t most = 65535;  // command_list::max_capacity
  int64_t seals = 0;
  int64_t drop = 0;
  for (int32_t g = 0; g < geo.groups; ++g) {
    seals += geo.group[g].format.deferred ? geo.group[g].columns : 0;
    drop += (geo.group[g].format.lossy ? 1 : 2) * int64_t{geo.group[g].columns};
  }
  const int64_t least = std::max<int64_t>(geo.groups, seals);
  if (least > most) return {errc::bad_argument, "max_sequence_tokens", geo.max_sequence_tokens};
  const int64_t usual =
      std::max({least, std::min(most, int64_t{4} * c.max_sequences * geo.groups), std::min(most, drop)});
  const int64_t asked = c.max_commands != 0 ? c.max_commands : usual;
  if (asked < least || asked > most) return {errc::bad_argument, "max_commands", c.max_commands};
  geo.max_commands = static_cast<int32_t>(asked);
  int64_t each = 0;
  for (int32_t g = 0; g < geo.groups; ++g) each += 3 + 2 * int64_t{geo.group[g].columns};
  if (c.max_gathers < 0 || c.max_gathers * each > INT32_MAX) {
    return {errc::bad_argument, "max_gathers", c.max_gathers};
  }
  geo.max_gather_ids = static_cast<int32_t>(c.max_gathers * each);
  return {};
}

// Bounds that follow from the pools where the user named none.
inline status resolve_bounds(const cache_config& c, geometry& geo) noexcept {
  int64_t most = INT32_MAX / 2;
  int64_t nodes = 1 << 29;
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    if (x.first_only) continue;
    most = std::min(most, int64_t{x.total} * x.block_size);
    nodes = std::min<int64_t>(nodes, x.total / x.per_unit);
  }
  geo.max_sequence_tokens = c.max_sequence_tokens != 0 ? c.max_sequence_tokens : static_cast<int32_t>(most);
  if (geo.max_sequence_tokens < 1 || geo.max_sequence_tokens > INT32_MAX / 2) {
    return {errc::bad_argument, "max_sequence_tokens", c.max_sequence_tokens};
  }
  if (c.max_nodes < -1 || c.max_nodes > (1 << 29)) return {errc::bad_argument, "max_nodes", c.max_nodes};
  geo.nodes = c.max_nodes == 0 ? static_cast<int32_t>(nodes) : std::max(0, c.max_nodes);
  for (int32_t g = 0; g < geo.groups; ++g) {
    group_geometry& x = geo.group[g];
    if (x.reserve_blocks != 0 && x.total % x.reserve_blocks != 0) {
      return {errc::bad_argument, "total", x.total};
    }
    x.columns = std::max(ceil_div(x.stored(geo.max_sequence_tokens), x.block_size), x.reserve_blocks);
  }
  return resolve_commands(c, geo);
}

// geometry::memory() must not overflow.
inline status check_memory(const geometry& geo) noexcept {
  int64_t sum = 0;
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    if (!add_product(sum, block_bytes(x.shape, x.block_size, x.format).count, x.total) ||
        !add_product(sum, open_block_bytes(x.shape, x.block_size, x.format).count, x.open)) {
      return {errc::bad_argument, "total", x.total};
    }
  }
  return {};
}

}  // namespace detail

inline result<geometry> resolve(const cache_config& c) noexcept {
  geometry geo;
  group_config only{.shape = group_of(c.shape), .block_size = c.block_size};
  std::span<const group_config> groups = c.groups;
  if (groups.empty()) {
    if (stored_layers(c.shape) < 0) return {errc::bad_argument, "layer_owner", c.shape.layers};
    groups = {&only, 1};
  }
  const auto count = static_cast<int64_t>(groups.size());
  if (count > max_groups) return {errc::bad_argument, "groups", count};
  if (c.max_sequences < 1 || c.max_sequences > (1 << 20)) {
    return {errc::bad_argument, "max_sequences", c.max_sequences};
  }
  if (c.max_scopes < 1) return {errc::bad_argument, "max_scopes", c.max_scopes};
  if (c.max_step_tokens < 1) return {errc::bad_argument, "max_step_tokens", c.max_step_tokens};
  geo.groups = static_cast<int32_t>(count);
  geo.max_sequences = c.max_sequences;
  geo.max_scopes = c.max_scopes;
  if (c.max_events < 0 || c.max_events > (1 << 28)) return {errc::bad_argument, "max_events", c.max_events};
  geo.max_events = c.max_events;
  uint64_t print = 0;
  for (int32_t g = 0; g < geo.groups; ++g) {
    group_geometry& x = geo.group[g];
    if (status s = detail::resolve_group(groups[static_cast<size_t>(g)], x); !s) return s;
    print = mix64(print ^ (layout_fingerprint(x.shape, x.block_size, x.format) + x.first_only));
  }
  geo.format_fingerprint = print;
  if (status s = detail::resolve_units(geo); !s) return s;
  if (status s = detail::default_open(c, geo); !s) return s;
  if (status s = detail::share_capacity(c, geo); !s) return s;
  if (status s = detail::resolve_bounds(c, geo); !s) return s;
  if (status s = detail::check_memory(geo); !s) return s;
  return geo;
}

}  // namespace kvcache
