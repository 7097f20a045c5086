// SPDX-License-Identifier: Apache-2.0
#pragma once
// Spreads numbered items over the caller's executor. Each worker draws the next few numbers, fewer the fewer
// are left: neighbours, which share memory, mostly go to one worker, and uneven items even out. Nothing may
// depend on who draws which.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kvcache/kvcache.h"

namespace kvcache::detail {

/// Calls f(worker, item) once for every item in [0, items); worker is in [0, min(width, items)).
template <class F>
void for_each_item(const kvc_executor* executor, int32_t width, int64_t items, F& f) noexcept {
  struct context {
    std::atomic<int64_t> next{0};
    int64_t items;
    F* f;
    int64_t workers;
  } c{{}, items, &f, 1};
  const auto task = [](void* arg, int32_t worker) noexcept {
    auto& shared = *static_cast<context*>(arg);
    for (int64_t first = shared.next.load(std::memory_order_relaxed); first < shared.items;) {
      const int64_t count = std::max<int64_t>(1, (shared.items - first) / (2 * shared.workers));
      if (!shared.next.compare_exchange_weak(first, first + count, std::memory_order_relaxed)) continue;
      for (int64_t i = first; i < first + count; ++i) (*shared.f)(worker, i);
      first = shared.next.load(std::memory_order_relaxed);
    }
  };
  if (executor != nullptr) width = std::min(width, executor->width);
  const auto n = static_cast<int32_t>(std::min<int64_t>(width, items));
  if (executor == nullptr || n <= 1) return task(&c, 0);
  c.workers = n;
  executor->run(executor->self, task, &c, n);
}

}  // namespace kvcache::detail
