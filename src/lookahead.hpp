// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory of a tile as one sequence of cache lines, in the order in which it lies: block by block, in each
// the cells of all heads. Loops that compute one tile take the lines of the next from it.
//
//   computed    tile t:      head 0 of blocks 5, 2, 9, 4 | head 1 of blocks 5, 2, 9, 4 | ...
//   asked for   tile t + 1:  all of block 7 | all of block 1 | ...
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "element.hpp"
#include "kernel.hpp"

namespace kvcache::detail {

class lookahead {
 public:
  static constexpr int64_t line = 64;  ///< bytes

  /// Lines for `count` iterations: a number of neighbours at `at`, `step` bytes further in each iteration.
  struct share {
    const std::byte* at;
    int64_t step;
    int32_t count;
  };

  /// Goes through the runs of `t`, as resolved for the item's first head; it must stay where it is.
  void aim(const attend_item& item, const tile& t) noexcept;

  /// `lines` lines for each of the next iterations, at most `wanted` of them. Where there is nothing left to
  /// ask for, the line asked for last.
  share take(int32_t lines, int32_t wanted) noexcept {
    while (left_ < lines) {
      if (!next_stretch()) return {idle_, 0, wanted};
    }
    const auto count = static_cast<int32_t>(std::min<int64_t>(wanted, left_ / lines));
    const share s{at_, lines * line, count};
    at_ += count * s.step;
    left_ -= int64_t{count} * lines;
    return s;
  }

 private:
  /// A plane's part of a run and head: `rows` stretches of `bytes`, `stride` bytes apart, the first of them
  /// `skip` bytes behind where the run begins.
  struct part {
    int64_t rows = 0, bytes = 0, stride = 0, head_stride = 0, skip = 0;
  };

  static part part_of(const kvc_plane& p, int32_t dim, int32_t keys) noexcept;
  static part part_of_codes(const kvc_plane& p, const tile& t, int32_t block) noexcept;
  void merge() noexcept;
  bool next_stretch() noexcept;

  const tile* tile_ = nullptr;
  part parts_[2];
  int32_t planes_ = 0, heads_ = 0;
  int32_t run_ = 0, head_ = 0, plane_ = 0;  ///< of the stretch that comes next
  int64_t row_ = 0;
  const std::byte* at_ = nullptr;  ///< in the stretch being asked for
  int64_t left_ = 0;               ///< its lines
  const std::byte* idle_ = nullptr;
};

inline lookahead::part lookahead::part_of(const kvc_plane& p, int32_t dim, int32_t keys) noexcept {
  const int64_t element = element_size(p.type);
  part out;
  if (p.token_stride == element) out = {dim, keys * element, p.dim_stride, p.head_stride};
  if (p.dim_stride == element) out = {keys, dim * element, p.token_stride, p.head_stride};
  if (out.bytes == out.stride) out = {1, out.rows * out.bytes, 0, p.head_stride};
  return out;
}

/// Codes and scales of a cell lie together. Of a block of more keys than a tile each tile asks for its share;
/// a row of K codes crosses all of them.
inline lookahead::part lookahead::part_of_codes(const kvc_plane& p, const tile& t, int32_t block) noexcept {
  const int64_t skip = p.token_stride != 0 ? 0 : (t.first & (block - 1)) * p.head_stride / block;
  return {1, p.head_stride * t.run_keys / block, 0, p.head_stride, skip};
}

/// Joins stretches that touch: a head behind the one before, V behind K.
inline void lookahead::merge() noexcept {
  const auto touch = [](const part& p) { return p.rows == 1 && p.bytes == p.head_stride; };
  if (!touch(parts_[0]) || !touch(parts_[planes_ - 1])) return;
  for (part& p : parts_) p.bytes *= heads_;
  heads_ = 1;
  const std::byte* const* first =
      std::find_if(tile_->k, tile_->k + tile_->runs, [](const std::byte* k) { return k != nullptr; });
  const auto run = first - tile_->k;
  if (planes_ == 1 || run == tile_->runs || *first + parts_[0].bytes != tile_->v[run]) return;
  parts_[0].bytes += parts_[1].bytes;
  planes_ = 1;
}

inline void lookahead::aim(const attend_item& item, const tile& t) noexcept {
  const kvc_kv& kv = *item.kv;
  tile_ = &t;
  const auto part = [&](const kvc_plane& p, int32_t dim) {
    return is_code(p.type) ? part_of_codes(p, t, kv.block) : part_of(p, dim, t.run_keys);
  };
  parts_[0] = part(kv.k, kv.dim_k);
  parts_[1] = part(v_plane(kv), kv.dim_v);
  planes_ = kv.v.data != nullptr ? 2 : 1;
  heads_ = item.heads;
  merge();
  run_ = head_ = plane_ = 0;
  row_ = left_ = 0;
  idle_ = *std::find_if(t.k, t.k + t.runs - 1, [](const std::byte* k) { return k != nullptr; });
}

/// False at the end of the tile.
inline bool lookahead::next_stretch() noexcept {
  for (; run_ < tile_->runs; ++run_, head_ = 0) {
    if (tile_->k[run_] == nullptr || (tile_->open >> run_ & 1) != 0) continue;
    for (; head_ < heads_; ++head_, plane_ = 0) {
      for (; plane_ < planes_; ++plane_, row_ = 0) {
        const part& p = parts_[plane_];
        if (row_ == p.rows) continue;
        const std::byte* const* runs = plane_ == 0 ? tile_->k : tile_->v;
        at_ = idle_ = runs[run_] + p.skip + head_ * p.head_stride + row_ * p.stride;
        left_ = (p.bytes + line - 1) / line;
        ++row_;
        return true;
      }
    }
  }
  left_ = 0;
  return false;
}

}  // namespace kvcache::detail
