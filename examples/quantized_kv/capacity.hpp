// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many texts fit into so many bytes: what the planner says, and what can really be opened. The control
// plane alone: it hands out blocks without a byte behind them, so a gibibyte costs nothing to try.
//
//   capacity | packed blocks of all texts ............ | open blocks: f16 | exact first tokens |
//              as many as the rest leaves room for       one per text, and those of a step

#include <algorithm>
#include <utility>
#include <vector>

#include "error.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/cache/packed.hpp"
#include "kvcache/plan.hpp"
#include "library_terms.hpp"

namespace quantized {

/// The texts to fit.
struct demand {
  kvcache::group_shape shape;
  int block_size = 0;
  int tokens = 0;  ///< of each text
  int step = 0;    ///< of a prompt, computed at once
  kvcache::bytes capacity;
};

/// What fits.
struct fit {
  int planned = 0;
  int opened = 0;
  kvcache::bytes token;   ///< in a full block
  kvcache::bytes memory;  ///< of all blocks, at most the capacity
};

namespace detail {

// A cache for n texts at a time. The blocks that are still written are f16, and somebody has to pay for them:
// one of each text, and those of the step under way.
inline kvcache::result<kvcache::packed_group_set> groups_of(const kvcache::kv_format& format, const demand& d,
                                                            int n) {
  auto set = kvcache::packed_groups(d.shape, d.block_size, {&format, 1});
  if (set && kvcache::lossy(format))
    set->group[0].open = kvcache::blocks{n + kvcache::ceil_div(d.step, d.block_size) + 1};
  return set;
}

// Opens texts until there is no block for the next one.
inline kvcache::result<int> open_all(kvcache::cache& cache, const demand& d) {
  std::vector<kvcache::sequence> texts;
  for (;;) {
    auto text = cache.open({}, kvcache::scope::shared());
    if (!text) return text.error();
    while (text->held() < d.tokens) {
      const auto got = text->extend(std::min(d.step, d.tokens - text->held()));
      if (!got && got.error().code == kvcache::errc::out_of_blocks) return static_cast<int>(texts.size());
      if (!got) return got.error();
      cache.end_step();  // what the step made full is packed now
    }
    texts.push_back(std::move(*text));
  }
}

}  // namespace detail

/// The most texts of a format. Every further text takes an open block from the packed ones, so caches for
/// more and more texts are planned until one does not hold all of its texts.
inline engine::result<fit> most_texts(const kvcache::kv_format& format, const demand& d) {
  for (int n = 1;; ++n) {
    const auto set = detail::groups_of(format, d, n);
    if (!set) return engine::to_error(set.error());
    const kvcache::cache_config config{.capacity = d.capacity,
                                       .groups = set->span(),
                                       .max_sequences = n,
                                       .max_sequence_tokens = d.tokens,
                                       .max_step_tokens = d.step};
    const auto planned = kvcache::resolve(config);
    if (!planned) return engine::to_error(planned.error());
    if (kvcache::max_batch(*planned, d.tokens) == n) continue;
    auto cache = kvcache::cache::create(config);
    if (!cache) return engine::to_error(cache.error());
    const auto opened = detail::open_all(*cache, d);
    if (!opened) return engine::to_error(opened.error());
    return fit{kvcache::max_batch(*planned, d.tokens), *opened, kvcache::bytes_per_token(*planned),
               planned->memory()};
  }
}

}  // namespace quantized
