// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the machine can do at most: reading memory, fused multiply-adds, on one thread or several. Measured
// beside the work it is compared with, because both change with the neighbours of a shared machine.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kvcache/kvcache.h"

namespace bench {

/// Seconds: of this thread's own work where one thread is measured (what others do on its core does not
/// count), of the wall clock where several are.
inline double seconds_now(int threads) {
  if (threads > 1) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

/// Threads that wait for work without sleeping, so that starting a call costs no wake-up.
class crew {
 public:
  explicit crew(int threads) : view_{this, threads, &run} {
    for (int i = 1; i < threads; ++i) {
      workers_.emplace_back([this, i] { serve(i); });
    }
  }
  crew(const crew&) = delete;
  crew& operator=(const crew&) = delete;
  ~crew() {
    task_ = nullptr;
    round_.fetch_add(1);
    for (std::thread& t : workers_) t.join();
  }

  const kvc_executor* executor() const { return &view_; }
  int size() const { return view_.width; }

  /// What time it is for work that these threads share.
  double seconds() const { return seconds_now(size()); }

  /// Calls f(i) for every i in [0, n), n at most size().
  template <class F>
  void each(int n, F&& f) {
    run(
        this, [](void* arg, int32_t i) { (*static_cast<std::remove_reference_t<F>*>(arg))(i); }, &f, n);
  }

 private:
  static void run(void* self, void (*task)(void*, int32_t), void* arg, int32_t n) {
    crew& c = *static_cast<crew*>(self);
    c.task_ = task;
    c.arg_ = arg;
    c.n_ = n;
    c.busy_.store(static_cast<int>(c.workers_.size()), std::memory_order_relaxed);
    c.round_.fetch_add(1, std::memory_order_release);
    task(arg, 0);
    while (c.busy_.load(std::memory_order_acquire) != 0) pause();
  }
  void serve(int index) {
    for (int seen = 0;;) {
      int spins = 0;
      while (round_.load(std::memory_order_acquire) == seen) {
        if (++spins > 100'000) std::this_thread::yield();
        pause();
      }
      ++seen;
      if (task_ == nullptr) return;
      if (index < n_) task_(arg_, index);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  kvc_executor view_;
  void (*task_)(void*, int32_t) = nullptr;
  void* arg_ = nullptr;
  int32_t n_ = 0;
  std::atomic<int> round_{0}, busy_{0};
  std::vector<std::thread> workers_;
};

namespace detail {

constexpr size_t ahead = 8192;

#if defined(__x86_64__)
inline bool wide() {
  return __builtin_cpu_supports("avx512f");
}
/// Reads [p, p + n); with `next`, asks for what is read `ahead` bytes later, which goes on there.
__attribute__((target("avx512f"))) inline void read_512(const char* p, size_t n, const char* next) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t i = 0; i + 256 <= n; i += 256) {
    if (next != nullptr) {
      const char* ask = i + ahead < n ? p + i + ahead : next + (i + ahead - n);
      for (size_t k = 0; k < 256; k += 64) __builtin_prefetch(ask + k, 0, 3);
    }
    a = _mm512_or_si512(a, _mm512_loadu_si512(p + i));
    b = _mm512_or_si512(b, _mm512_loadu_si512(p + i + 64));
    c = _mm512_or_si512(c, _mm512_loadu_si512(p + i + 128));
    d = _mm512_or_si512(d, _mm512_loadu_si512(p + i + 192));
  }
  char sum[64];
  _mm512_storeu_si512(sum, _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
  benchmark::DoNotOptimize(sum[0]);
}
/// Twelve chains of fused multiply-adds, as many as two units of four cycles need and some to spare.
#define KVCACHE_BENCH_FMA(vector, set1, store)                                                             \
  const vector x = set1(0.999f), y = set1(0.001f);                                                         \
  vector a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;               \
  for (int64_t r = 0; r < rounds; ++r) {                                                                   \
    asm("vfmadd213ps %[y], %[x], %[a]\n\tvfmadd213ps %[y], %[x], %[b]\n\tvfmadd213ps %[y], %[x], %[c]\n\t" \
        "vfmadd213ps %[y], %[x], %[d]\n\tvfmadd213ps %[y], %[x], %[e]\n\tvfmadd213ps %[y], %[x], %[f]\n\t" \
        "vfmadd213ps %[y], %[x], %[g]\n\tvfmadd213ps %[y], %[x], %[h]\n\tvfmadd213ps %[y], %[x], %[i]\n\t" \
        "vfmadd213ps %[y], %[x], %[j]\n\tvfmadd213ps %[y], %[x], %[k]\n\tvfmadd213ps %[y], %[x], %[l]"     \
        : [a] "+v"(a), [b] "+v"(b), [c] "+v"(c), [d] "+v"(d), [e] "+v"(e), [f] "+v"(f), [g] "+v"(g),       \
          [h] "+v"(h), [i] "+v"(i), [j] "+v"(j), [k] "+v"(k), [l] "+v"(l)                                  \
        : [x] "v"(x), [y] "v"(y));                                                                         \
  }                                                                                                        \
  float out[16];                                                                                           \
  for (const vector& v : {a, b, c, d, e, f, g, h, i, j, k, l}) {                                           \
    store(out, v);                                                                                         \
    benchmark::DoNotOptimize(out[0]);                                                                      \
  }
__attribute__((target("avx512f"))) inline void fma_512(int64_t rounds) {
  KVCACHE_BENCH_FMA(__m512, _mm512_set1_ps, _mm512_storeu_ps)
}
__attribute__((target("avx2,fma"))) inline void fma_256(int64_t rounds) {
  KVCACHE_BENCH_FMA(__m256, _mm256_set1_ps, _mm256_storeu_ps)
}
#undef KVCACHE_BENCH_FMA
#endif

}  // namespace detail

/// Reads `n` bytes from `p` once, as fast as one thread can: unrolled, widest loads, nothing done with them.
/// With `next`, asks for what is read 8 KiB later: of this memory, then of that at `next`.
inline void read_bytes(const void* p, size_t n, const void* next = nullptr) {
  const char* at = static_cast<const char*>(p);
#if defined(__x86_64__)
  if (detail::wide()) return detail::read_512(at, n, static_cast<const char*>(next));
#endif
  uint64_t a[16] = {};
  for (size_t i = 0; i + sizeof a <= n; i += sizeof a) {
    const size_t later = i + detail::ahead;
    if (next != nullptr) {
      const char* ask = later < n ? at + later : static_cast<const char*>(next) + (later - n);
      for (size_t k = 0; k < sizeof a; k += 64) __builtin_prefetch(ask + k, 0, 3);
    }
    const auto* q = reinterpret_cast<const uint64_t*>(at + i);
    for (size_t k = 0; k < 16; ++k) a[k] |= q[k];
  }
  for (const uint64_t& v : a) benchmark::DoNotOptimize(v);
}

/// Nanoseconds per byte of reading [p, p + n) once: it is read in five parts, each shared by all threads, and
/// the fastest part counts ("best of five").
inline double read_ns_per_byte(crew& threads, const void* p, size_t n) {
  double best = 0;
  const size_t part = n / 5 / static_cast<size_t>(threads.size()) & ~size_t{255};
  const char* at = static_cast<const char*>(p);
  for (int i = 0; i < 5; ++i) {
    const double start = threads.seconds();
    threads.each(threads.size(), [&](int t) { read_bytes(at + static_cast<size_t>(t) * part, part); });
    const double took = threads.seconds() - start;
    const size_t bytes = part * static_cast<size_t>(threads.size());
    at += bytes;
    const double ns = took * 1e9 / static_cast<double>(bytes);
    if (i == 0 || ns < best) best = ns;
  }
  return best;
}

/// Nanoseconds per floating-point operation of independent fused multiply-adds (two operations each) on all
/// threads together, best of five; 0 where it is not known how to measure it.
inline double fma_ns_per_flop(crew& threads) {
  double best = 0;
#if defined(__x86_64__)
  const bool wide = detail::wide();
  if (!wide && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return 0;
  constexpr int64_t rounds = 100'000;
  for (int i = 0; i < 5; ++i) {
    const double start = threads.seconds();
    threads.each(threads.size(), [&](int) { wide ? detail::fma_512(rounds) : detail::fma_256(rounds); });
    const double took = threads.seconds() - start;
    const double ns = took * 1e9 / (double(rounds) * 12 * (wide ? 32 : 16) * threads.size());
    if (i == 0 || ns < best) best = ns;
  }
#else
  static_cast<void>(threads);
#endif
  return best;
}

}  // namespace bench
