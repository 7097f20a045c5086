// SPDX-License-Identifier: Apache-2.0
#pragma once
// What scheduling and the attention kernels agree on. Common code (compiled once) resolves tables, decides
// which keys a row may see, joins states and writes results; a kernel (one per instruction set, and the
// scalar twin) turns the keys of one split into a state.
//
//   slots of a sequence   0        64       128 ...           1024
//   tiles                 |---0----|---1----|---2----| ... 15 |---0----| ...
//   splits                |----------------- 0 ---------------|--- 1 ...
//
// Tiles and splits lie at absolute slots, whatever the block size, the chunk or the number of threads, and
// every arithmetic step has one order:
//   score   one accumulator per (row, key), fma over channels 0, 1, ...
//           packed keys where integer_dot is set: dot_query, below
//   weight  2^(score - running maximum), the polynomial of exp2.hpp, element by element
//   sum     lane i adds keys i, i+16, i+32, i+48 of a tile; 16 lanes are folded at the end of a split
//   value   one accumulator per (row, channel), fma over the row's own keys in ascending order
//   states  splits are joined in ascending order
// so a result does not depend on vector width, row grouping, batch or executor.
#include <cstddef>
#include <cstdint>

#include "kvcache/kvcache.h"

namespace kvcache {
struct f16;
struct side_format;
}  // namespace kvcache

namespace kvcache::detail {

inline constexpr int32_t tile_keys = 64;
inline constexpr int32_t split_keys = 1024;
inline constexpr int32_t sum_lanes = 16;
inline constexpr int32_t max_dim = 256;
inline constexpr float log2_e = 1.44269504088896340736f;

class rotation;

/// Rows of one sequence, all query heads of one or more kv heads: the unit a worker takes. Several heads
/// share an item only where they share lengths and positions; then a block's heads are read one behind the
/// other, as they lie in memory.
struct attend_item {
  const kvc_kv* kv = nullptr;
  const kvc_batch* batch = nullptr;
  const kvc_rows* q = nullptr;
  const kvc_softmax* softmax = nullptr;
  const kvc_out* out = nullptr;  ///< o == null: values are not wanted; key_score: scores are
  float q_scale = 0;             ///< multiplied into the query before the dot product
  float cap_log2 = 0;            ///< soft cap times log2 e, 0 = none
  int32_t sequence = 0;
  int32_t head = 0, heads = 0;  ///< first kv head and their number
  int64_t first_row = 0;
  int32_t rows = 0;   ///< query rows
  int32_t group = 0;  ///< query heads per kv head
  int32_t kv_len = 0, sealed = 0;
  const int32_t* row_sealed = nullptr;  ///< [rows], null: all rows read `sealed` slots from table
  int32_t open_from = 0;                ///< lowest slot that some row reads from open_table
  const rotation* turning = nullptr;    ///< of keys that are stored before rotation
  bool forms = false;                   ///< keys of sealed and of open blocks go apart (tile_pass)

  /// States of one kv head; state = (head within the item * rows + row) * group + query head of the group.
  int64_t per_head() const noexcept { return int64_t{rows} * group; }
  int64_t states() const noexcept { return per_head() * heads; }
  int64_t row_of(int64_t state) const noexcept { return first_row + state % per_head() / group; }
  int64_t q_head_of(int64_t state) const noexcept {
    return (head + state / per_head()) * group + state % group;
  }
  /// Slots in use of the tile that begins at `first`.
  int64_t slots_in(int64_t first) const noexcept {
    return kv_len - first < tile_keys ? kv_len - first : tile_keys;
  }
};

/// Whether queries meet keys that are rotated by the Hadamard matrix.
inline bool rotates_query(const kvc_kv& kv) noexcept {
  return (kv.hadamard & KVC_HADAMARD_K) != 0 && kv.k_rope == nullptr;
}

/// Where the scores of one row and query head go, slot by slot.
inline float* score_row(const kvc_out& out, int64_t row, int64_t q_head) noexcept {
  return out.key_score + row * out.key_score_stride + q_head * out.key_score_head_stride;
}

inline constexpr int32_t bias_lanes = 16;
/// Below, 127 / a is no float.
inline constexpr float least_product = 0x1p-119f;

/// A query for integer dot products with the keys of one group, whose scales s and minima z (of symmetric
/// codes the lowest level) belong to channels d:
///   h = 2^(bits - 1)    p_d = q_d * s_d    a = max |p_d|
///   i_d = p_d * (127 / a) to the nearest, ties to even; all 0 where a < least_product
///   bias = sum of q_d * fma(h, s_d, z_d): lane d % 16 by fma, d ascending, channels behind the last as
///   zeros; lanes are folded as those of `sum`
///   score_j = fma(float(sum of i_d * (code_jd - h)), a / 127, bias)
struct dot_query {
  float step = 0, bias = 0;
  int32_t base = 0;  ///< -h * sum of i_d, so that codes may be multiplied as they are
};
constexpr int32_t round_up_lanes(int32_t dim) noexcept {
  return (dim + bias_lanes - 1) / bias_lanes * bias_lanes;
}

/// Memory of one worker. States are those of the split being worked on, then of all splits so far.
struct attend_scratch {
  float* q = nullptr;         ///< [states][dim_k], scaled; order within a head is the kernel's business
  float* acc = nullptr;       ///< [states][dim_v]
  float* max = nullptr;       ///< [states]
  float* lanes = nullptr;     ///< [states][sum_lanes], while a split is being worked on
  float* sum = nullptr;       ///< [states] these folded, once it is done
  float* weights = nullptr;   ///< [states][tile_keys]
  float* k_tile = nullptr;    ///< [dim_k][tile_keys]
  float* v_tile = nullptr;    ///< [tile_keys][dim_v]
  float* angles = nullptr;    ///< [dim_k][tile_keys] cos and sin of each pair, for keys that are turned
  float* q_rows = nullptr;    ///< [states][dim_k, rounded up to 16] as q, filled with zeros, for integer dots
  int8_t* q_bytes = nullptr;  ///< [states][2][dim_k] i_d for the halves of a tile
  dot_query* q_dots = nullptr;  ///< [states][2]
  float* total = nullptr;       ///< [states][dim_v]
  float* total_max = nullptr;
  float* total_sum = nullptr;
  uint64_t* seen = nullptr;     ///< [rows] keys of the tile each row may see
  uint64_t* counted = nullptr;  ///< [rows] those of them that the row adds to
};

/// Which keys of a tile: all of them, or those read from sealed blocks, or those from open ones.
enum class tile_form : uint8_t { any, sealed, open };

/// One kv head's keys and values of one tile, block run by block run. A run is the part of a block that lies
/// in the tile. Pointers are to the first slot of the run, channel 0.
struct tile {
  int64_t first = 0;     ///< slot
  int32_t runs = 0;      ///< runs with a slot below kv_len
  int32_t run_keys = 0;  ///< slots per run, a power of two
  uint64_t present = 0;  ///< keys that are below kv_len and in a resident block
  uint64_t open = 0;     ///< runs that lie in the open space
  tile_form form = tile_form::any;
  int32_t head = 0;
  int32_t id[tile_keys];  ///< block of each run
  const std::byte* k[tile_keys];
  const std::byte* v[tile_keys];
};

/// Keys of a tile that are worked on together. Where a block may be read in two forms, a tile whose keys lie
/// on both sides of the border takes two passes, for every row alike, so that the order of operations depends
/// on the row's own border only.
struct tile_pass {
  int64_t index = 0;
  tile_form form = tile_form::any;
};

/// Tiles [first, last) that some row of the item may see, within one split.
struct tile_range {
  int64_t first = 0, last = 0;
};

/// Rows whose scores of a tile become weights and are added up, one after the other, for each of some heads;
/// the same for tiles that lie behind it, if any.
struct fold_rows {
  int32_t kind = 0;  ///< KVC_SCORE_*
  int32_t heads = 0, rows = 0;
  int64_t tiles = 1;
  const float* scores = nullptr;  ///< [tile_keys] of the first head and row
  int64_t score_head_stride = 0;  ///< elements from head to head
  int64_t score_row_stride = 0;   ///< and from row to row, as for the others
  const float* lse2 = nullptr;    ///< heads behind each other
  int64_t lse_row_stride = 0;
  const float* least = nullptr;  ///< [rows] smallest weight that is a hit, null for other kinds
  int64_t least_row_stride = 0;
  const uint64_t* counted = nullptr;  ///< [rows] keys that a row adds to
  int64_t counted_row_stride = 0;
  float* sum = nullptr;  ///< [tile_keys] of the first head
  int64_t sum_head_stride = 0;
  bool ahead = false;  ///< scores and sums go on behind these, and are not in caches
};

/// States that are joined with those of the splits before.
struct joined_states {
  int64_t count = 0;
  int32_t dim = 0;
  float* max = nullptr;  ///< [count] of the total, as sum
  float* sum = nullptr;
  float* acc = nullptr;             ///< [count][dim]
  const float* part_max = nullptr;  ///< `part_step` elements from state to state, as part_sum
  const float* part_sum = nullptr;
  const float* part_acc = nullptr;  ///< part_step * dim elements from state to state
  int64_t part_step = 1;
};

/// One cell of an open block, as rows of dense columns: channels of K, or slots of V.
struct cell_rows {
  const std::byte* at = nullptr;
  int32_t type = 0;
  int64_t stride = 0;  ///< bytes from row to row
  int32_t rows = 0, columns = 0;
};

/// Where a cell's codes and scales go; codes are dense.
struct packed_rows {
  std::byte* codes = nullptr;
  f16* scale = nullptr;
  f16* zero = nullptr;
  bool fitted = false;  ///< scales are there already, one for the cell
};

/// An attention kernel. All functions are pure in their arguments.
struct kernel {
  int32_t target = 0;
  /// Loads and scales the item's queries into scratch.q.
  void (*prepare)(const attend_item&, const attend_scratch&) = nullptr;
  /// Fresh states (acc, max, sum) of the keys in the given tiles, for all rows of the item.
  void (*split)(const attend_item&, const attend_scratch&, tile_range) = nullptr;
  /// total = join of total and part (state.hpp), for each state.
  void (*join)(const joined_states&) = nullptr;
  /// Scores of one pass for all rows of the item into scratch.weights [states][tile_keys], capped, those of
  /// unseen keys anything; fills scratch.seen and returns its union, 0 = nothing was computed.
  uint64_t (*score)(const attend_item&, const attend_scratch&, tile_pass) = nullptr;
  /// sum += weight 2^min(score - lse2, 0) of the counted keys, or its square, or 1 for a hit.
  void (*fold)(const fold_rows&) = nullptr;
  /// Codes of a block and head to [dim_k][block], or [block][dim_v].
  void (*unpack)(const kvc_kv&, bool keys, int32_t id, int32_t head, float* to) = nullptr;
  /// Whether every value can be packed. Null: not offered, as for pack.
  bool (*packable)(const cell_rows&) = nullptr;
  /// Packs a cell as pack_cell does, bit for bit; false: not in this format, nothing is written.
  bool (*pack)(const side_format&, bool keys, const cell_rows&, const packed_rows&) = nullptr;
};

/// Kernel of a target, null if this build or machine does not have it. KVC_TARGET_BEST picks the widest.
const kernel* find_kernel(int32_t target) noexcept;

/// Part of the split that is worth visiting: clipped to kv_len and to what windows and causality leave.
tile_range visible_tiles(const attend_item& item, int64_t split) noexcept;

/// The same for any slots [first, last) whose borders are those of tiles.
tile_range visible_tiles(const attend_item& item, int64_t first, int64_t last) noexcept;

/// The first pass over a tile, and what comes after a pass: ascending slots.
tile_pass first_pass(const attend_item& item, int64_t tile_index) noexcept;
tile_pass next_pass(const attend_item& item, tile_pass pass) noexcept;

/// Finds the blocks of one tile for one of the item's heads.
void resolve_tile(const attend_item& item, int32_t head, tile_pass pass, tile& out) noexcept;

/// Slots of the tile, counted from its first, that the pass stores scores of for a row of the item.
struct slot_range {
  int64_t first, last;
};
slot_range slots_of_form(const attend_item& item, const tile& t, int64_t row) noexcept;

/// Text position of a slot of the item's first head.
int64_t position_of(const attend_item& item, int64_t slot) noexcept;

/// Fills scratch.seen for the tile, for all heads of the item; returns the union over rows.
uint64_t seen_keys(const attend_item& item, const tile& t, uint64_t* seen) noexcept;

/// Sets the states of `rows` rows to empty.
void clear_states(float* acc, float* max, float* lanes, int64_t rows, int32_t dim_v) noexcept;

extern const kernel scalar_kernel;
#if defined(KVCACHE_WITH_HIGHWAY)
const kernel* find_simd_kernel(int32_t target) noexcept;
/// Whether AVX-512 kernels may multiply bytes as VNNI does.
bool may_use_vnni() noexcept;
/// Which order of asking memory is the faster; results do not depend on it.
bool is_intel() noexcept;
/// Makes it say so: tests run both orders on one machine. Not while anything attends.
void be_intel(bool yes) noexcept;
#endif

}  // namespace kvcache::detail
