// SPDX-License-Identifier: Apache-2.0
#pragma once
// Spreads numbered items over the caller's executor. Each worker draws the next number, so uneven items even
// out; nothing may depend on who draws which.
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
  } c{{}, items, &f};
  const auto task = [](void* arg, int32_t worker) noexcept {
    auto& shared = *static_cast<context*>(arg);
    for (;;) {
      const int64_t item = shared.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= shared.items) return;
      (*shared.f)(worker, item);
    }
  };
  if (executor != nullptr) width = std::min(width, executor->width);
  const auto n = static_cast<int32_t>(std::min<int64_t>(width, items));
  if (executor == nullptr || n <= 1) return task(&c, 0);
  executor->run(executor->self, task, &c, n);
}

}  // namespace kvcache::detail
