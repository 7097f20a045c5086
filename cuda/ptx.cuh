// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every machine instruction the kernels name, in one place: as inline PTX under nvcc, and under g++
// (KVCACHE_SIMT) as a twin that says in plain C++ what PTX promises and runs on tests/simt/machine.hpp.
// Kernels contain no other assembly and no other built-in, so the very same source runs in both.
//
// Shared memory is spoken of by 32-bit addresses, as ldmatrix and cp.async take them. Warp-wide functions are
// called by all 32 lanes. Fragments of mma.m16n8k16, lane = 4 g + t:
//
//   A  a0 row g, a1 row g + 8, a2 a3 the same 8 columns on; a pair holds columns 2t, 2t + 1
//   B  b0 rows 2t, 2t + 1 of column g, b1 the same 8 rows on
//   C  c0 c1 row g, c2 c3 row g + 8, columns 2t, 2t + 1
#include <cstdint>

#if defined(KVCACHE_SIMT)
#include <bit>
#include <cmath>
#include <cstring>

#include "kvcache/core/numeric.hpp"
#include "simt/machine.hpp"
#define KVCACHE_DEVICE inline
#define KVCACHE_KERNEL(threads) inline void
#define KVCACHE_KERNEL_BLOCKS(threads, blocks) inline void
#define KVCACHE_CONSTANT const
#define KVCACHE_UNROLL
#define KVCACHE_NO_UNROLL
#else
#define KVCACHE_DEVICE __device__ __forceinline__
#define KVCACHE_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
/// The same with registers for so many blocks on a multiprocessor.
#define KVCACHE_KERNEL_BLOCKS(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define KVCACHE_CONSTANT __grid_constant__ const
#define KVCACHE_UNROLL _Pragma("unroll")
#define KVCACHE_NO_UNROLL _Pragma("unroll 1")
#endif

namespace kvcache::detail::gpu {

/// The 16-bit type that a tensor core multiplies.
enum class half_kind { f16, bf16 };

/// Four words that move together.
struct alignas(16) words4 {
  uint32_t w[4];
};

#if !defined(KVCACHE_SIMT)

extern __shared__ __align__(1024) unsigned char kvcache_shared_arena[];

KVCACHE_DEVICE uint32_t thread_index() {
  return threadIdx.x;
}
KVCACHE_DEVICE uint32_t block_index() {
  return blockIdx.x;
}
KVCACHE_DEVICE uint32_t shared_base() {
  return static_cast<uint32_t>(__cvta_generic_to_shared(kvcache_shared_arena));
}
KVCACHE_DEVICE void block_barrier() {
  __syncthreads();
}
KVCACHE_DEVICE void warp_barrier() {
  __syncwarp();
}
/// The same number, of which the compiler knows nothing: what follows from it is computed here and now, not
/// kept in registers through a loop; and it is kept itself, not computed again.
KVCACHE_DEVICE uint32_t anew(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
template <class T>
KVCACHE_DEVICE T* anew(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}
KVCACHE_DEVICE float shuffle_xor(float v, uint32_t x) {
  return __shfl_xor_sync(~0u, v, x);
}
KVCACHE_DEVICE uint32_t shuffle(uint32_t v, uint32_t lane) {
  return __shfl_sync(~0u, v, lane);
}
KVCACHE_DEVICE bool warp_any(bool p) {
  return __any_sync(~0u, p);
}
KVCACHE_DEVICE uint32_t warp_ballot(bool p) {
  return __ballot_sync(~0u, p);
}

/// 16 bytes from global to shared memory, past the L1 cache; all zero and nothing read unless `real`.
KVCACHE_DEVICE void cp_async16(uint32_t to, const void* from, bool real) {
  const uint32_t bytes = real ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
KVCACHE_DEVICE void cp_async16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// The same where `wanted`; else nothing.
KVCACHE_DEVICE void cp_async16_if(bool wanted, uint32_t to, const void* from, bool real) {
  const uint32_t bytes = real ? 16 : 0;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
KVCACHE_DEVICE void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Pending>
KVCACHE_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// Four 8 x 8 matrices of 16-bit values; lane 8 i + r gives the address of row r of matrix i.
KVCACHE_DEVICE void ldmatrix4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
KVCACHE_DEVICE void ldmatrix4_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

/// d += a * b, m16n8k16.
template <half_kind Kind>
KVCACHE_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (Kind == half_kind::f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// An 8 x 8 matrix of 16-bit values over the warp's registers, transposed.
KVCACHE_DEVICE uint32_t movmatrix(uint32_t v) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v));
  return d;
}

/// 2^x and log2 x to about two units in the last place; results below 2^-126 are 0.
KVCACHE_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVCACHE_DEVICE float fast_log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// The larger of two numbers; a NaN is passed over.
KVCACHE_DEVICE float larger(float a, float b) {
  return fmaxf(a, b);
}
/// Products, sums and quotients that no compiler fuses.
KVCACHE_DEVICE float mul_rn(float a, float b) {
  return __fmul_rn(a, b);
}
KVCACHE_DEVICE float add_rn(float a, float b) {
  return __fadd_rn(a, b);
}
KVCACHE_DEVICE float fused(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
KVCACHE_DEVICE float div_rn(float a, float b) {
  return __fdiv_rn(a, b);
}
/// The bits of a float, and the float of some bits.
KVCACHE_DEVICE uint32_t bits_of(float v) {
  return __float_as_uint(v);
}
KVCACHE_DEVICE float float_of(uint32_t bits) {
  return __uint_as_float(bits);
}
/// sin and cos of pi x.
KVCACHE_DEVICE void sin_cos_pi(float x, float& s, float& c) {
  sincospif(x, &s, &c);
}

/// Two floats rounded to 16 bits, `low` in the low half.
template <half_kind Kind>
KVCACHE_DEVICE uint32_t pack2(float low, float high) {
  uint32_t d;
  if constexpr (Kind == half_kind::f16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  }
  return d;
}
/// One float rounded to 16 bits, to nearest even; past the largest one infinity.
template <half_kind Kind>
KVCACHE_DEVICE uint16_t narrow1(float v) {
  uint16_t d;
  if constexpr (Kind == half_kind::f16) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
  } else {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
  }
  return d;
}
/// The value of 16 bits, exactly.
template <half_kind Kind>
KVCACHE_DEVICE float widen(uint16_t v) {
  if constexpr (Kind == half_kind::bf16) return __uint_as_float(static_cast<uint32_t>(v) << 16);
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(v));
  return d;
}

/// Products of two pairs of f16, each rounded.
KVCACHE_DEVICE uint32_t mul2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
/// Bytes of b:a (a holds numbers 0 to 3) by number, the lowest nibble of `which` names the lowest byte.
KVCACHE_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t which) {
  return __byte_perm(a, b, which);
}

/// A number in global memory that no kernel at work changes.
KVCACHE_DEVICE int32_t ld_constant(const int32_t* from) {
  int32_t v;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
KVCACHE_DEVICE void st_shared(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
KVCACHE_DEVICE void st_shared(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
KVCACHE_DEVICE float ld_shared(uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}
KVCACHE_DEVICE uint32_t ld_shared_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
KVCACHE_DEVICE void ld_shared2(uint32_t from, uint32_t& a, uint32_t& b) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}
KVCACHE_DEVICE uint16_t ld_shared16(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}
KVCACHE_DEVICE void st_shared16(uint32_t to, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(v) : "memory");
}
/// Four e4m3 codes as f16, exactly: the lower two, and the upper two.
KVCACHE_DEVICE void convert4_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  low = high = codes;  // not there: see e4m3_by_hardware
#endif
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool e4m3_by_hardware = true;
#else
inline constexpr bool e4m3_by_hardware = false;
#endif

#else  // the twins

KVCACHE_DEVICE uint32_t thread_index() {
  return simt::thread_index();
}
KVCACHE_DEVICE uint32_t block_index() {
  return simt::block_index();
}
KVCACHE_DEVICE uint32_t shared_base() {
  return 0;
}
template <class T>
T anew(T v) {
  return v;
}
KVCACHE_DEVICE void block_barrier() {
  simt::block_barrier();
}
KVCACHE_DEVICE void warp_barrier() {
  simt::collective(
      ~0u, [](void**, uint32_t) {}, nullptr);
}

/// `value` of lane `from`, for every lane.
template <class T>
T shuffle_twin(T value, uint32_t from) {
  struct operands {
    T value;
    uint32_t from;
    T result;
  } mine{value, from & 31u, value};
  simt::collective(
      ~0u,
      [](void** args, uint32_t mask) {
        for (uint32_t l = 0; l < 32; ++l) {
          auto* me = static_cast<operands*>(args[l]);
          if ((mask >> me->from & 1u) == 0) simt::fail("a shuffle reads a lane that does not take part");
          me->result = static_cast<operands*>(args[me->from])->value;
        }
      },
      &mine);
  return mine.result;
}
KVCACHE_DEVICE float shuffle_xor(float v, uint32_t x) {
  return shuffle_twin(v, simt::lane() ^ x);
}
KVCACHE_DEVICE uint32_t shuffle(uint32_t v, uint32_t lane) {
  return shuffle_twin(v, lane);
}
KVCACHE_DEVICE uint32_t warp_ballot(bool p) {
  struct operands {
    bool p;
    uint32_t result;
  } mine{p, 0};
  simt::collective(
      ~0u,
      [](void** args, uint32_t) {
        uint32_t all = 0;
        for (uint32_t l = 0; l < 32; ++l) all |= uint32_t{static_cast<operands*>(args[l])->p} << l;
        for (uint32_t l = 0; l < 32; ++l) static_cast<operands*>(args[l])->result = all;
      },
      &mine);
  return mine.result;
}
KVCACHE_DEVICE bool warp_any(bool p) {
  return warp_ballot(p) != 0;
}

KVCACHE_DEVICE void cp_async16(uint32_t to, const void* from, bool real) {
  simt::async_copy(to, from, real ? 16 : 0);
}
KVCACHE_DEVICE void cp_async16(uint32_t to, const void* from) {
  simt::async_copy(to, from, 16);
}
KVCACHE_DEVICE void cp_async16_if(bool wanted, uint32_t to, const void* from, bool real) {
  if (wanted) simt::async_copy(to, from, real ? 16 : 0);
}
KVCACHE_DEVICE void cp_async_commit() {
  simt::async_commit();
}
template <int Pending>
KVCACHE_DEVICE void cp_async_wait() {
  simt::async_wait(Pending);
}

template <bool Transposed>
void ldmatrix_twin(uint32_t (&r)[4], uint32_t row) {
  struct operands {
    uint32_t row;
    uint32_t* result;
  } mine{row, r};
  simt::collective(
      ~0u,
      [](void** args, uint32_t) {
        uint16_t m[8][8];
        for (uint32_t i = 0; i < 4; ++i) {
          uint32_t rows[8];
          for (uint32_t k = 0; k < 8; ++k) {
            rows[k] = static_cast<operands*>(args[8 * i + k])->row;
            std::memcpy(m[k], simt::shared(rows[k], 16, 16), 16);
          }
          simt::count_rows(rows);
          for (uint32_t l = 0; l < 32; ++l) {
            const uint32_t g = l / 4, t = l % 4;
            const uint32_t low = Transposed ? m[2 * t][g] : m[g][2 * t];
            const uint32_t high = Transposed ? m[2 * t + 1][g] : m[g][2 * t + 1];
            static_cast<operands*>(args[l])->result[i] = low | high << 16;
          }
        }
      },
      &mine);
}
KVCACHE_DEVICE void ldmatrix4(uint32_t (&r)[4], uint32_t row) {
  ldmatrix_twin<false>(r, row);
}
KVCACHE_DEVICE void ldmatrix4_transposed(uint32_t (&r)[4], uint32_t row) {
  ldmatrix_twin<true>(r, row);
}

template <half_kind Kind>
KVCACHE_DEVICE float widen(uint16_t v) {
  if constexpr (Kind == half_kind::bf16) return to_float(bf16{v});
  return to_float(f16{v});
}
template <half_kind Kind>
KVCACHE_DEVICE uint16_t narrow1(float v) {
  if constexpr (Kind == half_kind::bf16) return to_bf16(v).bits;
  return to_f16(v).bits;
}
template <half_kind Kind>
KVCACHE_DEVICE uint32_t pack2(float low, float high) {
  return uint32_t{narrow1<Kind>(low)} | uint32_t{narrow1<Kind>(high)} << 16;
}
/// Half `i` of register fragments.
template <half_kind Kind>
float half_of(const uint32_t* r, uint32_t i) {
  return widen<Kind>(static_cast<uint16_t>(r[i / 2] >> (16 * (i % 2))));
}

template <half_kind Kind>
KVCACHE_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct operands {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  } mine{d, a, {b0, b1}};
  simt::collective(
      ~0u,
      [](void** args, uint32_t) {
        float a[16][16], b[16][8];
        for (uint32_t l = 0; l < 32; ++l) {
          const auto* x = static_cast<operands*>(args[l]);
          const uint32_t g = l / 4, t = l % 4;
          for (uint32_t i = 0; i < 8; ++i) {
            a[g + 8 * (i / 2 % 2)][2 * t + i % 2 + 8 * (i / 4)] = half_of<Kind>(x->a, i);
          }
          for (uint32_t i = 0; i < 4; ++i) b[2 * t + i % 2 + 8 * (i / 2)][g] = half_of<Kind>(x->b, i);
        }
        for (uint32_t l = 0; l < 32; ++l) {
          float* d = static_cast<operands*>(args[l])->d;
          for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t row = l / 4 + 8 * (i / 2), column = l % 4 * 2 + i % 2;
            for (uint32_t k = 0; k < 16; ++k) d[i] += a[row][k] * b[k][column];
          }
        }
      },
      &mine);
}

KVCACHE_DEVICE uint32_t movmatrix(uint32_t v) {
  struct operands {
    uint32_t value, result;
  } mine{v, 0};
  simt::collective(
      ~0u,
      [](void** args, uint32_t) {
        auto at = [&](uint32_t row, uint32_t column) {
          return static_cast<operands*>(args[row * 4 + column / 2])->value >> (16 * (column % 2)) & 0xffffu;
        };
        for (uint32_t l = 0; l < 32; ++l) {
          const uint32_t g = l / 4, t = l % 4;
          static_cast<operands*>(args[l])->result = at(2 * t, g) | at(2 * t + 1, g) << 16;
        }
      },
      &mine);
  return mine.result;
}

KVCACHE_DEVICE float fast_exp2(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
KVCACHE_DEVICE float fast_log2(float x) {
  return std::log2(x);
}
KVCACHE_DEVICE float larger(float a, float b) {
  return std::fmax(a, b);
}
KVCACHE_DEVICE float mul_rn(float a, float b) {
  return a * b;
}
KVCACHE_DEVICE float add_rn(float a, float b) {
  return a + b;
}
KVCACHE_DEVICE float fused(float a, float b, float c) {
  return std::fma(a, b, c);
}
KVCACHE_DEVICE float div_rn(float a, float b) {
  return a / b;
}
KVCACHE_DEVICE uint32_t bits_of(float v) {
  return std::bit_cast<uint32_t>(v);
}
KVCACHE_DEVICE float float_of(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
KVCACHE_DEVICE void sin_cos_pi(float x, float& s, float& c) {
  constexpr double pi = 3.14159265358979323846;
  s = static_cast<float>(std::sin(pi * double{x}));
  c = static_cast<float>(std::cos(pi * double{x}));
}

KVCACHE_DEVICE uint32_t mul2(uint32_t a, uint32_t b) {
  constexpr auto kind = half_kind::f16;
  return pack2<kind>(half_of<kind>(&a, 0) * half_of<kind>(&b, 0),
                     half_of<kind>(&a, 1) * half_of<kind>(&b, 1));
}
KVCACHE_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t all = uint64_t{b} << 32 | a;
  uint32_t d = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t number = which >> (4 * i) & 7u;
    d |= static_cast<uint32_t>(all >> (8 * number) & 0xffu) << (8 * i);
  }
  return d;
}

KVCACHE_DEVICE int32_t ld_constant(const int32_t* from) {
  return *from;
}
KVCACHE_DEVICE void st_shared(uint32_t to, float v) {
  std::memcpy(simt::shared_access(to, 4), &v, 4);
}
KVCACHE_DEVICE void st_shared(uint32_t to, uint32_t v) {
  std::memcpy(simt::shared_access(to, 4), &v, 4);
}
KVCACHE_DEVICE float ld_shared(uint32_t from) {
  float v;
  std::memcpy(&v, simt::shared_access(from, 4), 4);
  return v;
}
KVCACHE_DEVICE uint32_t ld_shared_word(uint32_t from) {
  uint32_t v;
  std::memcpy(&v, simt::shared_access(from, 4), 4);
  return v;
}
KVCACHE_DEVICE void ld_shared2(uint32_t from, uint32_t& a, uint32_t& b) {
  uint32_t v[2];
  std::memcpy(v, simt::shared_access(from, 8), 8);
  a = v[0];
  b = v[1];
}
KVCACHE_DEVICE uint16_t ld_shared16(uint32_t from) {
  uint16_t v;
  std::memcpy(&v, simt::shared_access(from, 2), 2);
  return v;
}
KVCACHE_DEVICE void st_shared16(uint32_t to, uint16_t v) {
  std::memcpy(simt::shared_access(to, 2), &v, 2);
}
KVCACHE_DEVICE void convert4_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  const auto value = [&](int shift) { return to_float(f8_e4m3{static_cast<uint8_t>(codes >> shift)}); };
  low = pack2<half_kind::f16>(value(0), value(8));
  high = pack2<half_kind::f16>(value(16), value(24));
}
inline constexpr bool e4m3_by_hardware = true;

#endif

}  // namespace kvcache::detail::gpu
