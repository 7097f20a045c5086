// SPDX-License-Identifier: Apache-2.0
#pragma once
// One case or more for every function of cuda/ptx.cuh, compiled by nvcc as kernels (twins.cu) and by g++ for
// the machine of tests/simt (twins_on_machine.cpp). A new function: a struct with `about` and `lane`, and its
// name in `run_all`; tests/gpu/check_twins.py fails until it is there. Lanes of a warp run together, one warp
// per block.
#include "gpu/twin_case.hpp"
#include "ptx.cuh"

namespace kvcache::gpu_check::KVCACHE_TWIN_SIDE {

using namespace detail::gpu;

// ---- who am I, meeting, shuffles, votes ----

struct index_case {
  static constexpr twin_case about{.name = "indices", .in = {word::any}, .out_words = 4};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    out[0] = thread_index();
    out[1] = block_index();
    out[2] = anew(*anew(in));
    out[3] = static_cast<uint32_t>(ld_constant(reinterpret_cast<const int32_t*>(in)));
  }
};

struct shuffle_case {
  static constexpr twin_case about{
      .name = "shuffle", .in = {word::any, word::lane, word::lane}, .out_words = 2};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    out[0] = shuffle(in[0], in[1]);
    const uint32_t x = shuffle(in[2], 0);
    out[1] = bits_of(shuffle_xor(float_of(in[0] & 0x3fffffffu), x));  // no NaN
  }
};

struct vote_case {
  static constexpr twin_case about{
      .name = "ballot, any", .in = {word::any, word::any}, .out_words = 3, .warps = 512};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    out[0] = warp_ballot((in[0] & 1u) != 0);
    out[1] = warp_any(in[0] % 41 == 0) ? 1 : 0;
    out[2] = warp_any(in[0] > in[1] && in[1] < 1u << 27) ? 1 : 0;
  }
};

// ---- shared memory ----

/// What another lane stored, behind a barrier of the warp and one of the block.
struct shared_case {
  static constexpr twin_case about{.name = "st.shared, ld.shared, barriers",
                                   .in = {word::any, word::floats, word::lane},
                                   .out_words = 2,
                                   .shared_bytes = 256};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    const uint32_t base = shared_base();
    st_shared(base + thread_index() * 8, in[0]);
    st_shared(base + thread_index() * 8 + 4, float_of(in[1]));
    warp_barrier();
    out[0] = ld_shared_word(base + in[2] * 8);
    block_barrier();
    out[1] = bits_of(ld_shared(base + in[2] * 8 + 4));
  }
};

/// The same for single halves and pairs of words.
struct shared_width_case {
  static constexpr twin_case about{.name = "shared memory, 16 and 64 bits",
                                   .in = {word::any, word::any, word::lane},
                                   .out_words = 3,
                                   .shared_bytes = 256};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    const uint32_t mine = shared_base() + thread_index() * 8, other = shared_base() + in[2] * 8;
    st_shared(mine, in[0]);
    st_shared16(mine + 4, static_cast<uint16_t>(in[1]));
    st_shared16(mine + 6, static_cast<uint16_t>(in[1] >> 16));
    warp_barrier();
    ld_shared2(other, out[0], out[1]);
    out[2] = ld_shared16(other + 2);
  }
};

/// Zeros where nothing is read, in place of what lay there, which stays where no copy is wanted; groups
/// arrive in order.
struct cp_async_case {
  static constexpr word any = word::any;
  static constexpr twin_case about{.name = "cp.async",
                                   .in = {any, any, any, any, any, any, any, any},
                                   .out_words = 16,
                                   .warps = 256,
                                   .shared_bytes = 32 * 64};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    const uint32_t at = shared_base() + thread_index() * 64;
    for (uint32_t i = 0; i < 16; ++i) st_shared(at + 4 * i, ~in[i % 8]);
    const bool real = (in[0] & 1u) != 0, wanted = (in[0] & 2u) != 0;
    cp_async16(at, in, real);
    cp_async16(at + 16, nullptr, false);
    cp_async_commit();
    cp_async16(at + 32, in + 4);
    cp_async16_if(wanted, at + 48, in, real);
    cp_async_commit();
    cp_async_wait<1>();
    for (uint32_t i = 0; i < 8; ++i) out[i] = ld_shared_word(at + 4 * i);
    cp_async_wait<0>();
    for (uint32_t i = 8; i < 16; ++i) out[i] = ld_shared_word(at + 4 * i);
  }
};

/// Rows in an order that the warp's first lane chooses.
template <bool Transposed>
struct ldmatrix_case {
  static constexpr twin_case about{.name = Transposed ? "ldmatrix, transposed" : "ldmatrix",
                                   .in = {word::any, word::any, word::any, word::any, word::any},
                                   .out_words = 4,
                                   .warps = 256,
                                   .shared_bytes = 512};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    const uint32_t odd = shuffle(in[4], 0) | 1u;
    const uint32_t row = shared_base() + thread_index() * odd % 32 * 16;
    for (uint32_t i = 0; i < 4; ++i) st_shared(row + 4 * i, in[i]);
    warp_barrier();
    uint32_t r[4];
    if constexpr (Transposed) {
      ldmatrix4_transposed(r, row);
    } else {
      ldmatrix4(r, row);
    }
    for (uint32_t i = 0; i < 4; ++i) out[i] = r[i];
  }
};

struct movmatrix_case {
  static constexpr twin_case about{.name = "movmatrix", .in = {word::any}, .warps = 256};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) { out[0] = movmatrix(in[0]); }
};

// ---- tensor core ----

/// d = c + a b, and the same of magnitudes, which says what rounding may do. The order of the sum, and how
/// many bits are kept in it, are the processor's; whole numbers come out exactly.
template <half_kind Kind>
KVCACHE_DEVICE void mma_lane(const uint32_t* in, uint32_t* out) {
  float d[4], size[4];
  uint32_t a[4], positive[4];
  for (uint32_t i = 0; i < 4; ++i) {
    a[i] = in[i];
    positive[i] = in[i] & 0x7fff7fffu;
    d[i] = float_of(in[6 + i]);
    size[i] = float_of(in[6 + i] & 0x7fffffffu);
  }
  mma<Kind>(d, a, in[4], in[5]);
  mma<Kind>(size, positive, in[4] & 0x7fff7fffu, in[5] & 0x7fff7fffu);
  for (uint32_t i = 0; i < 4; ++i) {
    out[i] = bits_of(d[i]);
    out[4 + i] = bits_of(size[i]);
  }
}
constexpr std::array<word, 12> mma_words(word ab, word c) {
  return {ab, ab, ab, ab, ab, ab, c, c, c, c};
}

template <half_kind Kind>
struct mma_ints_case {
  static constexpr bool bf = Kind == half_kind::bf16;
  static constexpr twin_case about{.name = bf ? "mma bf16, whole numbers" : "mma f16, whole numbers",
                                   .in = mma_words(bf ? word::bf16_ints : word::f16_ints, word::float_ints),
                                   .out_words = 8,
                                   .warps = 256};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) { mma_lane<Kind>(in, out); }
};
template <half_kind Kind>
struct mma_usual_case {
  static constexpr bool bf = Kind == half_kind::bf16;
  static constexpr twin_case about{.name = bf ? "mma bf16" : "mma f16",
                                   .in = mma_words(bf ? word::bf16_pair : word::f16_pair, word::normal),
                                   .out_words = 8,
                                   .same = rule::scaled,
                                   .relative = 0x1p-18,
                                   .warps = 1024};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) { mma_lane<Kind>(in, out); }
};
/// A subnormal matrix times a usual one.
template <half_kind Kind>
struct mma_tiny_case {
  static constexpr bool bf = Kind == half_kind::bf16;
  static constexpr word t = bf ? word::bf16_tiny : word::f16_tiny, u = bf ? word::bf16_pair : word::f16_pair;
  static constexpr twin_case about{.name = bf ? "mma bf16, subnormal" : "mma f16, subnormal",
                                   .in = {t, t, t, t, u, u, word::any, word::any, word::any, word::any},
                                   .out_words = 8,
                                   .same = rule::scaled,
                                   .relative = 0x1p-18,
                                   .warps = 256};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    uint32_t mine[10];
    for (uint32_t i = 0; i < 10; ++i) mine[i] = i < 6 ? in[i] : 0;
    mma_lane<Kind>(mine, out);
  }
};
/// Any bits, infinities and NaN among them.
struct mma_any_case {
  static constexpr twin_case about{.name = "mma f16, any bits",
                                   .in = mma_words(word::any, word::normal),
                                   .out_words = 8,
                                   .same = rule::scaled,
                                   .relative = 0x1p-18,
                                   .warps = 256};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) { mma_lane<half_kind::f16>(in, out); }
};

// ---- arithmetic ----

struct exp2_case {
  static constexpr twin_case about{.name = "fast_exp2",
                                   .in = {word::exponent, word::unit},
                                   .out_words = 2,
                                   .same = rule::f32,
                                   .ulps = 3,
                                   .absolute = 0x1.00002p-126,  // at the border to 0
                                   .warps = 8192};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    out[0] = bits_of(fast_exp2(float_of(in[0])));
    out[1] = bits_of(fast_exp2(float_of(in[1])));
  }
};
struct log2_case {
  static constexpr twin_case about{.name = "fast_log2",
                                   .in = {word::floats, word::unit},
                                   .out_words = 2,
                                   .same = rule::f32,
                                   .ulps = 3,
                                   .absolute = 0x1p-22,  // beside 1 the logarithm is near 0
                                   .warps = 8192};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    out[0] = bits_of(fast_log2(float_of(in[0])));
    out[1] = bits_of(fast_log2(float_of(in[1]) + 1.5f));
  }
};
struct angle_case {
  static constexpr twin_case about{.name = "sin_cos_pi",
                                   .in = {word::unit},
                                   .out_words = 2,
                                   .same = rule::f32,
                                   .ulps = 2,
                                   .absolute = 0x1p-50,  // the twin's multiple of pi is not quite one
                                   .warps = 8192};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    float s, c;
    sin_cos_pi(float_of(in[0]), s, c);
    out[0] = bits_of(s);
    out[1] = bits_of(c);
  }
};
struct rounding_case {
  static constexpr twin_case about{
      .name = "mul_rn, add_rn, div_rn, fused, larger",
      .in = {word::floats, word::floats, word::floats, word::normal, word::normal, word::normal},
      .out_words = 10,
      .same = rule::f32,
      .warps = 4096};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    for (uint32_t i = 0; i < 2; ++i) {
      const float a = float_of(in[3 * i]), b = float_of(in[3 * i + 1]), c = float_of(in[3 * i + 2]);
      out[5 * i] = bits_of(mul_rn(a, b));
      out[5 * i + 1] = bits_of(add_rn(a, b));
      out[5 * i + 2] = bits_of(fused(a, b, c));
      out[5 * i + 3] = bits_of(div_rn(a, b));
      out[5 * i + 4] = bits_of(add_rn(larger(a, b), 0.0f));  // of two zeros, either
    }
  }
};

// ---- conversions ----

template <half_kind Kind>
struct narrow_case {
  static constexpr bool bf = Kind == half_kind::bf16;
  static constexpr twin_case about{.name = bf ? "pack2, narrow1 bf16" : "pack2, narrow1 f16",
                                   .in = {bf ? word::near_bf16 : word::near_f16, word::floats},
                                   .out_words = 3,
                                   .same = bf ? rule::bf16x2 : rule::f16x2,
                                   .warps = 4 * warps_of_16_bits};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    const float a = float_of(in[0]), b = float_of(in[1]);
    out[0] = narrow1<Kind>(a);
    out[1] = narrow1<Kind>(b);
    out[2] = pack2<Kind>(a, b);
  }
};
template <half_kind Kind>
struct widen_case {
  static constexpr twin_case about{.name = Kind == half_kind::bf16 ? "widen bf16" : "widen f16",
                                   .in = {word::counter},
                                   .same = rule::f32,
                                   .warps = warps_of_16_bits};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    out[0] = bits_of(widen<Kind>(static_cast<uint16_t>(in[0])));
  }
};

struct mul2_case {
  static constexpr twin_case about{
      .name = "mul2", .in = {word::any, word::any}, .same = rule::f16x2, .warps = 8192};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) { out[0] = mul2(in[0], in[1]); }
};
struct pick_bytes_case {
  static constexpr twin_case about{
      .name = "pick_bytes", .in = {word::any, word::any, word::any}, .warps = 1024};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    out[0] = pick_bytes(in[0], in[1], in[2]);
  }
};
struct e4m3_case {
  static constexpr twin_case about{.name = "convert4_e4m3",
                                   .in = {word::counter, word::any},
                                   .out_words = 4,
                                   .same = rule::f16x2,
                                   .warps = warps_of_16_bits,
                                   .from_arch = 89};
  KVCACHE_DEVICE static void lane(const uint32_t* in, uint32_t* out) {
    convert4_e4m3(in[0] | in[0] << 16, out[0], out[1]);
    convert4_e4m3(in[1], out[2], out[3]);
  }
};

/// Calls f.template operator()<Case>() for every case.
template <class F>
void run_all(F&& f) {
  const auto each = [&]<class... Cases>() { (f.template operator()<Cases>(), ...); };
  constexpr half_kind f16 = half_kind::f16, bf16 = half_kind::bf16;
  each.template operator()<index_case, shuffle_case, vote_case, shared_case, shared_width_case, cp_async_case,
                           ldmatrix_case<false>, ldmatrix_case<true>, movmatrix_case>();
  each.template operator()<mma_ints_case<f16>, mma_ints_case<bf16>, mma_usual_case<f16>, mma_usual_case<bf16>,
                           mma_tiny_case<f16>, mma_tiny_case<bf16>, mma_any_case>();
  each.template operator()<exp2_case, log2_case, angle_case, rounding_case>();
  each.template operator()<narrow_case<f16>, narrow_case<bf16>, widen_case<f16>, widen_case<bf16>, mul2_case,
                           pick_bytes_case, e4m3_case>();
}

template <class Case>
inline constexpr uint32_t in_words = in_words_of(Case::about);
template <class Case>
inline constexpr uint32_t out_words = Case::about.out_words;

template <class Case>
KVCACHE_KERNEL(32)
run_case(const uint32_t* in, uint32_t* out) {
  const uint64_t at = uint64_t{block_index()} * 32 + thread_index();
  Case::lane(in + at * in_words<Case>, out + at * out_words<Case>);
}

}  // namespace kvcache::gpu_check::KVCACHE_TWIN_SIDE
