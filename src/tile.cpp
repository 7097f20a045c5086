// SPDX-License-Identifier: Apache-2.0
// Which keys an item reads and where they lie: shared by every kernel, so that only arithmetic differs
// between instruction sets.
#include <algorithm>
#include <bit>
#include <limits>

#include "element.hpp"
#include "kernel.hpp"

namespace kvcache::detail {
namespace {

/// Bits [first, last) of a tile, clipped to [0, 64).
uint64_t bit_range(int64_t first, int64_t last) noexcept {
  first = std::clamp<int64_t>(first, 0, tile_keys);
  last = std::clamp<int64_t>(last, 0, tile_keys);
  if (first >= last) return 0;
  const uint64_t upto = last == tile_keys ? ~uint64_t{0} : (uint64_t{1} << last) - 1;
  return upto & (~uint64_t{0} << first);
}

bool positional(const kvc_softmax& s) noexcept {
  return s.causal != 0 || s.window > 0;
}

const int32_t* key_positions(const attend_item& item) noexcept {
  const kvc_batch& b = *item.batch;
  if (b.k_pos == nullptr) return nullptr;
  return b.k_pos + item.sequence * b.k_pos_stride + item.head * b.k_pos_head_stride;
}

/// Takes away the keys that rows read in the other form.
uint64_t keep_form(const attend_item& item, const tile& t, uint64_t* seen) noexcept {
  uint64_t any = 0;
  for (int32_t r = 0; r < item.rows; ++r) {
    const uint64_t sealed = bit_range(0, item.row_sealed[r] - t.first);
    any |= seen[r] &= t.form == tile_form::sealed ? sealed : ~sealed;
  }
  return any;
}

/// What causality, windows and absent blocks leave.
uint64_t seen_in_any_form(const attend_item& item, const tile& t, uint64_t* seen) noexcept {
  const kvc_softmax& s = *item.softmax;
  if (!positional(s)) {
    std::fill_n(seen, item.rows, t.present);
    return t.present;
  }
  const int32_t* q_pos = item.batch->q_pos + item.first_row;
  const int32_t* k_pos = key_positions(item);
  uint64_t any = 0;
  for (int32_t r = 0; r < item.rows; ++r) {
    const int64_t q = q_pos[r];
    const int64_t low = s.window > 0 ? q - s.window + 1 : std::numeric_limits<int64_t>::min() / 2;
    const int64_t high = s.causal != 0 ? q + 1 : std::numeric_limits<int64_t>::max() / 2;
    uint64_t bits = 0;
    if (k_pos == nullptr) {
      bits = t.present & bit_range(low - t.first, high - t.first);
    } else {
      for (uint64_t rest = t.present; rest != 0; rest &= rest - 1) {
        const int j = std::countr_zero(rest);
        const int64_t k = k_pos[t.first + j];
        bits |= uint64_t{k >= low && k < high} << j;
      }
    }
    seen[r] = bits;
    any |= bits;
  }
  return any;
}

}  // namespace

tile_range visible_tiles(const attend_item& item, int64_t split) noexcept {
  return visible_tiles(item, split * split_keys, (split + 1) * split_keys);
}

tile_range visible_tiles(const attend_item& item, int64_t first, int64_t last) noexcept {
  last = std::min<int64_t>(last, item.kv_len);
  const kvc_softmax& s = *item.softmax;
  if (positional(s) && item.batch->k_pos == nullptr) {
    const int32_t* pos = item.batch->q_pos + item.first_row;
    const auto [low, high] = std::minmax_element(pos, pos + item.rows);
    if (s.window > 0) first = std::max<int64_t>(first, int64_t{*low} - s.window + 1);
    if (s.causal != 0) last = std::min<int64_t>(last, int64_t{*high} + 1);
  }
  if (first >= last) return {0, 0};
  return {first / tile_keys, (last + tile_keys - 1) / tile_keys};
}

tile_pass first_pass(const attend_item& item, int64_t tile_index) noexcept {
  if (!item.forms) return {tile_index, tile_form::any};
  return {tile_index, tile_index * tile_keys < item.sealed ? tile_form::sealed : tile_form::open};
}

tile_pass next_pass(const attend_item& item, tile_pass pass) noexcept {
  const bool both = pass.form == tile_form::sealed && (pass.index + 1) * tile_keys > item.open_from;
  return both ? tile_pass{pass.index, tile_form::open} : first_pass(item, pass.index + 1);
}

void resolve_tile(const attend_item& item, int32_t head, tile_pass pass, tile& out) noexcept {
  const kvc_kv& kv = *item.kv;
  const kvc_batch& b = *item.batch;
  out.first = pass.index * tile_keys;
  out.form = pass.form;
  out.head = head;
  out.run_keys = std::min(kv.block, tile_keys);
  const int64_t left = std::min<int64_t>(item.kv_len - out.first, tile_keys);
  out.runs = static_cast<int32_t>((left + out.run_keys - 1) / out.run_keys);
  out.present = out.open = 0;
  const int shift = std::countr_zero(static_cast<uint32_t>(kv.block));
  const int32_t* table = b.table + item.sequence * b.table_stride;
  const int32_t* open = b.open_table != nullptr ? b.open_table + item.sequence * b.open_stride : nullptr;
  for (int32_t r = 0; r < out.runs; ++r) {
    const int64_t slot = out.first + int64_t{r} * out.run_keys;
    const bool in_open = pass.form == tile_form::any ? slot >= item.sealed : pass.form == tile_form::open;
    const bool other = in_open ? slot < item.open_from : slot >= item.sealed;
    const int32_t id = other ? -1 : (in_open ? open : table)[slot >> shift];
    out.id[r] = id;
    if (id < 0) {
      out.k[r] = out.v[r] = nullptr;
      continue;
    }
    const int64_t offset = slot & (kv.block - 1);
    out.k[r] = cell(in_open ? kv.open_k : kv.k, id, head, offset);
    out.v[r] = cell(in_open ? open_v_plane(kv) : v_plane(kv), id, head, offset);
    out.open |= uint64_t{in_open} << r;
    out.present |= bit_range(slot - out.first, std::min(slot - out.first + out.run_keys, left));
  }
}

int64_t position_of(const attend_item& item, int64_t slot) noexcept {
  const int32_t* positions = key_positions(item);
  return positions != nullptr ? positions[slot] : slot;
}

slot_range slots_of_form(const attend_item& item, const tile& t, int64_t row) noexcept {
  const int64_t slots = item.slots_in(t.first);
  if (t.form == tile_form::any) return {0, slots};
  const int64_t border = item.row_sealed != nullptr ? item.row_sealed[row] : item.sealed;
  const int64_t at = std::clamp<int64_t>(border - t.first, 0, slots);
  return t.form == tile_form::sealed ? slot_range{0, at} : slot_range{at, slots};
}

uint64_t seen_keys(const attend_item& item, const tile& t, uint64_t* seen) noexcept {
  const uint64_t any = seen_in_any_form(item, t, seen);
  return any == 0 || t.form == tile_form::any || item.row_sealed == nullptr ? any : keep_form(item, t, seen);
}

void clear_states(float* acc, float* max, float* lanes, int64_t rows, int32_t dim_v) noexcept {
  std::fill_n(acc, rows * dim_v, 0.0f);
  std::fill_n(max, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(lanes, rows * sum_lanes, 0.0f);
}

}  // namespace kvcache::detail
