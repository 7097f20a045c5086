// SPDX-License-Identifier: Apache-2.0
#pragma once

// Weights of one linear layer, widened to f32 and stored as the panel product reads them:
//
//   panel 0: rows 0..95     [in][96]      one input feature's 96 weights are adjacent
//   panel 1: rows 96..191   [in][96]
//   ...                                   the last panel is filled up with zero rows

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "gemm.hpp"
#include "gguf.hpp"
#include "thread_pool.hpp"

namespace engine {

/// A weight matrix of `out` rows and `in` columns. Movable, not copyable.
class panel_matrix {
 public:
  panel_matrix() = default;

  /// Dequantises a checked two-dimensional tensor.
  panel_matrix(const gguf_tensor& tensor, thread_pool& pool)
      : out_(static_cast<int>(tensor.rows())), in_(static_cast<int>(tensor.row_length())) {
    const std::size_t floats = static_cast<std::size_t>(panels()) * panel_floats();
    values_.reset(static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float))));
    if (values_ == nullptr) throw std::bad_alloc();
    pool.parallel_for(panels(), [&](int index, int) { fill(tensor, index); });
  }

  int out() const { return out_; }
  int in() const { return in_; }
  int panels() const { return (out_ + panel_rows - 1) / panel_rows; }
  const float* panel(int index) const {
    return values_.get() + static_cast<std::size_t>(index) * panel_floats();
  }
  /// Rows of the panel that are not padding.
  int rows_in(int index) const { return std::min(panel_rows, out_ - index * panel_rows); }

  /// Copies row `row` to `to` ([in]).
  void read_row(int row, float* to) const {
    const float* from = panel(row / panel_rows) + row % panel_rows;
    for (int k = 0; k < in_; ++k) to[k] = from[static_cast<std::size_t>(k) * panel_rows];
  }

 private:
  struct release {
    void operator()(float* memory) const { std::free(memory); }
  };

  std::size_t panel_floats() const { return static_cast<std::size_t>(in_) * panel_rows; }

  void fill(const gguf_tensor& tensor, int index) {
    float* to = values_.get() + static_cast<std::size_t>(index) * panel_floats();
    std::fill_n(to, panel_floats(), 0.0f);
    std::vector<float> row(static_cast<std::size_t>(in_));
    for (int r = 0; r < rows_in(index); ++r) {
      dequantise_row(tensor, static_cast<std::uint64_t>(index) * panel_rows + r, row.data());
      for (int k = 0; k < in_; ++k) to[static_cast<std::size_t>(k) * panel_rows + r] = row[k];
    }
  }

  int out_ = 0;
  int in_ = 0;
  std::unique_ptr<float[], release> values_;
};

}  // namespace engine
