// SPDX-License-Identifier: Apache-2.0
// What the files written once and compiled per instruction set share: the target at work, its vectors, and
// the functions of exp2.hpp on them. No include guard: such a file includes this once per instruction set,
// after <hwy/highway.h>.
#include "exp2.hpp"
#include "kernel.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3
constexpr int32_t this_target = KVC_TARGET_AVX512, lanes = 16, registers = 24;
#elif HWY_TARGET == HWY_AVX2
constexpr int32_t this_target = KVC_TARGET_AVX2, lanes = 8, registers = 12;
#else
constexpr int32_t this_target = KVC_TARGET_NEON, lanes = 4, registers = 24;
#endif
constexpr int32_t key_vectors = tile_keys / lanes;

using tag_f = hn::FixedTag<float, lanes>;
using vec_f = hn::Vec<tag_f>;
using tag_8 = hn::FixedTag<float, 8>;

HWY_INLINE vec_f exp2_core(vec_f x) {
  const tag_f d;
  const hn::RebindToUnsigned<tag_f> du;
  const auto magic = hn::Set(d, round_magic);
  const auto shifted = hn::Add(x, magic);
  const auto f = hn::Sub(x, hn::Sub(shifted, magic));
  auto p = hn::Set(d, exp2_c[5]);
  for (int i = 4; i >= 0; --i) p = hn::MulAdd(p, f, hn::Set(d, exp2_c[i]));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto n = hn::Sub(hn::BitCast(du, shifted), hn::BitCast(du, magic));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(du, 127u)))));
}

HWY_INLINE vec_f exp2_weight(vec_f x) {
  const auto least = hn::Set(tag_f(), exp2_min);
  return hn::IfThenZeroElse(hn::Lt(x, least), exp2_core(hn::Max(least, x)));
}

HWY_INLINE vec_f tanh_fixed(vec_f y) {
  const tag_f d;
  const auto one = hn::Set(d, 1.0f);
  const auto a = hn::Abs(y);
  const auto e = exp2_core(hn::Mul(hn::Min(hn::Set(d, tanh_large), a), hn::Set(d, two_log2_e)));
  const auto big = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  const auto y2 = hn::Mul(y, y);
  auto p = hn::Set(d, tanh_c[4]);
  for (int i = 3; i >= 0; --i) p = hn::MulAdd(p, y2, hn::Set(d, tanh_c[i]));
  const auto small = hn::MulAdd(hn::Mul(y, y2), p, y);
  return hn::IfThenElse(hn::Lt(a, hn::Set(d, tanh_small)), small, hn::CopySign(big, y));
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
