// SPDX-License-Identifier: Apache-2.0
#include "gemm.hpp"

namespace engine {

void panel_product_baseline(const float* panel, int depth, const float* x, int columns, float* y);
#ifdef ENGINE_GEMM_X86
void panel_product_avx2(const float* panel, int depth, const float* x, int columns, float* y);
void panel_product_avx512(const float* panel, int depth, const float* x, int columns, float* y);
#endif

bool can_run(simd_target target) {
  if (target == simd_target::baseline) return true;
#ifdef ENGINE_GEMM_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (target == simd_target::avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

simd_target best_simd_target() {
  if (can_run(simd_target::avx512)) return simd_target::avx512;
  if (can_run(simd_target::avx2)) return simd_target::avx2;
  return simd_target::baseline;
}

std::string_view name_of(simd_target target) {
  if (target == simd_target::avx512) return "avx512";
  if (target == simd_target::avx2) return "avx2";
  return "baseline";
}

panel_product panel_product_for(simd_target target) {
#ifdef ENGINE_GEMM_X86
  if (target == simd_target::avx512) return panel_product_avx512;
  if (target == simd_target::avx2) return panel_product_avx2;
#endif
  static_cast<void>(target);
  return panel_product_baseline;
}

}  // namespace engine
