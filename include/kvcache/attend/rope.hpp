// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rotary position embedding with its table: angles in double, rounded once, shared by append, query rotation
// and the rotate command.
#include <cstdint>
#include <span>
#include <utility>

#include "kvcache/attend/outcome.hpp"
#include "kvcache/core/fixed_array.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/kvcache.h"

namespace kvcache {

/// Which channels turn together: (2i, 2i+1) or (i, i + dims/2).
enum class rope_style : uint8_t { interleaved = KVC_ROPE_INTERLEAVED, half_split = KVC_ROPE_HALF_SPLIT };

/// What a model's rotary embedding is.
struct rope_config {
  rope_style style = rope_style::half_split;  ///< how the model pairs channels
  int32_t dims = 0;                           ///< leading channels that turn; even
  double theta = 10000.0;                     ///< base: pair i turns by theta^(-2i/dims) radians per position
  /// [dims/2] radians per position, for scaled variants; empty = theta^(-2i/dims). Copied.
  std::span<const double> frequency{};
  int32_t table_positions = 0;  ///< positions below this are looked up, others computed: same values
};

/// Frequencies and table of one model. Memory: table_positions x dims floats. Thread safety: const after
/// creation.
class rope {
 public:
  rope() noexcept = default;
  rope(rope&&) noexcept = default;             ///< The table stays where it is.
  rope& operator=(rope&&) noexcept = default;  ///< The source is not to be used again.

  /// Fails: bad_argument naming the field, out_of_memory.
  static result<rope> create(const rope_config& config) noexcept {
    rope r;
    r.view_.struct_size = sizeof r.view_;
    r.view_.style = static_cast<int32_t>(config.style);
    r.view_.dims = config.dims;
    r.view_.theta = config.theta;
    if (config.table_positions < 0) return status{errc::bad_argument, "rope.table", config.table_positions};
    if (!config.frequency.empty()) {
      if (config.frequency.size() * 2 != static_cast<size_t>(config.dims)) {
        return status{errc::bad_argument, "rope.frequency", static_cast<int64_t>(config.frequency.size())};
      }
      if (!r.frequency_.create(config.frequency.size())) return status{errc::out_of_memory, "rope.frequency"};
      for (size_t i = 0; i < config.frequency.size(); ++i) r.frequency_[i] = config.frequency[i];
      r.view_.frequency = r.frequency_.data();
    }
    if (const status s = r.fill(config.table_positions); !s) return s;
    return r;
  }

  /// What append and the rotate command take. Valid while this object lives and is not moved.
  const kvc_rope& view() const noexcept { return view_; }

  /// Rotates rows in place or into `out` (same type and strides). `positions`: one per row.
  status turn(const kvc_rows& rows, std::span<const int32_t> positions, void* out,
              const kvc_executor* executor = nullptr) const noexcept {
    kvc_error e{};
    const kvc_status s = kvc_cpu_rope(&view_, &rows, static_cast<int32_t>(positions.size()), positions.data(),
                                      out, executor, &e);
    return to_status(s, e);
  }

 private:
  status fill(int32_t positions) noexcept {
    kvc_error e{};
    if (const status s = to_status(kvc_cpu_rope_table(&view_, 0, nullptr, &e), e); !s) return s;
    if (positions == 0) return {};
    if (!table_.create(static_cast<size_t>(positions) * static_cast<size_t>(view_.dims))) {
      return {errc::out_of_memory, "rope.table", positions};
    }
    const status s = to_status(kvc_cpu_rope_table(&view_, positions, table_.data(), &e), e);
    view_.table = table_.data();
    view_.table_positions = positions;
    return s;
  }

  kvc_rope view_{};
  fixed_array<double> frequency_;
  fixed_array<float> table_;
};

}  // namespace kvcache
