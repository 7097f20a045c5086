// SPDX-License-Identifier: Apache-2.0
//
// The panel product for one instruction set; ENGINE_GEMM_TARGET names it and the compiler flags of the file
// fit to it. Eigen's templates are inline, so two copies compiled with other flags would be merged by the
// linker into whichever comes first: each copy gets its own namespace name. This is the only file that
// includes Eigen.

#define ENGINE_GEMM_JOIN2(a, b) a##b
#define ENGINE_GEMM_JOIN(a, b) ENGINE_GEMM_JOIN2(a, b)

#define EIGEN_DONT_PARALLELIZE
#define EIGEN_MPL2_ONLY
#define EIGEN_NO_DEBUG
#define Eigen ENGINE_GEMM_JOIN(Eigen_, ENGINE_GEMM_TARGET)
#include <Eigen/Core>

namespace engine {
namespace {

constexpr int rows = 96;

// The k-blocking follows the cache sizes Eigen assumes; constants make the order of additions the same on
// every machine of one instruction set, and independent of the number of columns.
bool fix_cache_sizes() {
  Eigen::setCpuCacheSizes(48 * 1024, 1024 * 1024, 8 * 1024 * 1024);
  return true;
}

}  // namespace

void ENGINE_GEMM_JOIN(panel_product_, ENGINE_GEMM_TARGET)(const float* panel, int depth, const float* x,
                                                          int columns, float* y) {
  static const bool sizes_fixed = fix_cache_sizes();
  static_cast<void>(sizes_fixed);
  using left = Eigen::Matrix<float, rows, Eigen::Dynamic, Eigen::ColMajor>;
  using right = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;
  const Eigen::Map<const left> w(panel, rows, depth);
  const Eigen::Map<const right> tokens(x, depth, columns);
  Eigen::Map<left> out(y, rows, columns);
  out.noalias() = w * tokens;
}

}  // namespace engine
