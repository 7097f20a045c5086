// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cache kinds made of the library: `paged` (blocks on demand, shared prefixes) and `contiguous` (one
// region of the longest length per sequence). Both are this one class; what differs is the allocator.
//
//   scheduler:  open ── extend ── commit ── close          kvcache::basic_cache decides which blocks
//   model:      begin_step ── attend per layer ── end_step  kvcache::run, append, attention move and read the
//   bytes
//
// An engine author finds every call into the library in library_cache.cpp.

#include <memory>

#include "cache_kind.hpp"

namespace engine {

/// `paged` or `contiguous`. Fails: cannot_run when the library refuses the shape, type, block size or number
/// of blocks.
result<std::unique_ptr<cache_kind>> make_library_cache(bool paged, const cache_config& config);

}  // namespace engine
