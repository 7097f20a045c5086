// SPDX-License-Identifier: Apache-2.0
// What the inner loops over keys and over values share: register blocks, loads that widen, and how they ask
// memory for what comes later. Included once per instruction set, like simd.hpp.
#include "kernel.hpp"
#include "lookahead.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvcache::detail::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

/// Register blocks: `max_rows` rows where there are many, `only_rows` where one holds all rows of an item.
constexpr int32_t max_rows = 6;
constexpr int32_t only_rows = registers >= 16 ? 8 : 6;
/// Accumulator vectors per row of a block of `rows` rows.
constexpr int32_t vectors_of(int64_t rows) {
  return rows == 1 ? 8 : rows * 4 <= registers ? 4 : 2;
}

/// Rows of one head of an item in register blocks, as even as possible.
struct row_blocks {
  int64_t rows, count;
  explicit row_blocks(const attend_item& item)
      : rows(item.per_head()), count(rows <= only_rows ? 1 : (rows + max_rows - 1) / max_rows) {}
  int64_t begin(int64_t i) const { return i * (rows / count) + std::min(i, rows % count); }
};

// ---- loads that widen ----

template <class D>
HWY_INLINE hn::Vec<D> load_as(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load_as(D d, const f16* p) {
  const hn::Rebind<hwy::float16_t, D> dh;
  return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p)));
}
template <class D>
HWY_INLINE hn::Vec<D> load_as(D d, const bf16* p) {
  const hn::Rebind<uint16_t, D> dh;
  const hn::Rebind<uint32_t, D> du;
  const auto wide = hn::PromoteTo(du, hn::LoadU(dh, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(d, hn::ShiftLeft<16>(wide));
}

// ---- asking memory ahead ----

// Decode reads every byte once, and one core's memory answers at full speed only while requests never stop:
// what limits it is how many are on their way, so any instruction that keeps the next request waiting costs
// its own time. So every inner loop asks for a line or two per row of arithmetic, about as many as it reads,
// and goes through all heads in one function. Two ways, by what the loops have time for:
//   near  what the work comes to a fixed number of bytes later, straight into the first level. The least
//         to keep in caches, but requests follow the order of the work: keys of all blocks of a tile side by
//         side, then values block by block; on Intel's processors values of all blocks side by side too
//   far   the whole next tile, block by block as it lies in memory, into the second level. Where arithmetic
//         takes about as long as reading, requests early enough matter more than the first level
enum class asking { nothing, near, far };
constexpr int64_t line_bytes = 64;
constexpr int64_t bytes_ahead = 8192;

/// Asks for one line. Code around it stays in order.
HWY_INLINE void fetch(const std::byte* at) {
#if HWY_ARCH_X86
  asm volatile("prefetcht0 %0" ::"m"(*at));
#else
  __builtin_prefetch(at, 0, 3);
#endif
}

template <int First, int Last, size_t N>
HWY_INLINE void fetch_some(const std::byte* const (&ask)[N]) {
  if constexpr (First < Last) {
    fetch(ask[First]);
    fetch_some<First + 1, Last>(ask);
  }
}

/// Multiplies `factors` (one per row, `stride` apart) with NV vectors and adds to the rows' accumulators, and
/// asks for P lines between the rows. Rows are a recursion, because compilers keep accumulators in memory
/// when a loop that asks is not unrolled early.
template <int P, int Row, int R, int NV, class D, class V, size_t N>
HWY_INLINE void multiply_rows(D d, const float* HWY_RESTRICT factors, int32_t stride, const V (&value)[NV],
                              V (&sum)[R][NV], const std::byte* const (&ask)[N]) {
  if constexpr (Row < R) {
    const auto x = hn::Set(d, factors[Row * stride]);
    for (int i = 0; i < NV; ++i) sum[Row][i] = hn::MulAdd(x, value[i], sum[Row][i]);
    constexpr int first = Row * P / R, last = (Row + 1) * P / R;
    fetch_some<first, last>(ask);
    multiply_rows<P, Row + 1>(d, factors, stride, value, sum, ask);
  }
}

#endif
}  // namespace kvcache::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
