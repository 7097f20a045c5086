// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one matrix product of the engine: a panel of 96 weight rows times a tile of token columns.
//
// Equal bits for a token, whatever stands beside it, come from three choices:
//   - a panel always has 96 rows (the last one is padded with zeros). 96 is a multiple of the row block of
//     Eigen's kernel for every instruction set used here (8, 24, 48), so each row runs in the same kernel;
//   - tiles have a multiple of 4 columns (padded with zeros), so no column runs in a tail kernel and a single
//     token is a matrix product, never a matrix-vector product;
//   - Eigen's blocking of the depth depends on the depth and on cache sizes, which are set to constants.
// Threads share the panels of a matrix, so their borders do not depend on the number of threads.
//
// The kernel is compiled once per instruction set from gemm_panel.cpp, and chosen at run time.

#include <string_view>

namespace engine {

inline constexpr int panel_rows = 96;
inline constexpr int column_step = 4;

/// `columns` rounded up to whole column steps.
constexpr int padded_columns(int columns) {
  return (columns + column_step - 1) / column_step * column_step;
}

/// y = panel * x.  panel: [depth][96] (the 96 rows of one input feature are adjacent), x: [columns][depth],
/// y: [columns][96]; columns is a multiple of 4.
using panel_product = void (*)(const float* panel, int depth, const float* x, int columns, float* y);

enum class simd_target { baseline, avx2, avx512 };

/// Whether this build has the target and this machine can run it.
bool can_run(simd_target target);

/// The widest target that can run.
simd_target best_simd_target();

std::string_view name_of(simd_target target);

/// Requires: can_run(target).
panel_product panel_product_for(simd_target target);

}  // namespace engine
