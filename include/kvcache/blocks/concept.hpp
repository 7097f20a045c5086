// SPDX-License-Identifier: Apache-2.0
#pragma once
// Contract of a block allocator. A block is in one of three states, stored and never inferred:
//
//      free ──allocate──> used (shares > 0) ──last release, in no node──> free
//                          ^      │ last release, in a node
//                          └share─┴──> cached (shares == 0, in a node) ──last unindex──> free
//
// used + cached + free == total at every moment, each of them counted, not inferred.
#include <concepts>
#include <cstdint>
#include <span>

#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvcache {

/// What the cache needs of an allocator. One owner thread; nothing allocates host memory after creation.
///
///  - `create(total, reserve)` starts over; `reserve` = blocks that every sequence asks for at once, 0 =
///  none.
///  - `admit(n)` says whether n blocks may be taken now, counting cached ones that the caller would free
///  first. It is
///    asked before anything changes; after a yes (and enough evictions) `allocate` of these n must not fail.
///  - `allocate(out)` is all or nothing; each block starts with one share. No id is handed out twice.
///  - `share`/`release` skip absent entries (`no_block`). Sharing a free block, releasing an unshared one or
///  indexing
///    a free one is a contract violation and changes nothing.
///  - `immutable(b)`: shared more than once or indexed, so a writer must copy first.
///  - `shareable`: false for a baseline whose blocks cannot be in two tables or in the index.
// clang-format off
template <class A>
concept block_allocator =
    std::movable<A> && requires(A& a, const A& c, std::span<block_id> out, std::span<const block_id> in, block_id b,
                                int32_t n) {
      { A::shareable } -> std::convertible_to<bool>;
      { a.create(blocks{}, n) } noexcept -> std::same_as<status>;
      { a.admit(n) } noexcept -> std::same_as<status>;
      { a.allocate(out) } noexcept -> std::same_as<status>;
      { a.share(in) } noexcept;
      { a.release(in) } noexcept;
      { a.index(b) } noexcept;
      { a.unindex(b) } noexcept;
      { c.shares(b) } noexcept -> std::same_as<int32_t>;
      { c.indexed(b) } noexcept -> std::same_as<bool>;
      { c.immutable(b) } noexcept -> std::same_as<bool>;
      { c.free_blocks() } noexcept -> std::same_as<int32_t>;
      { c.used_blocks() } noexcept -> std::same_as<int32_t>;
      { c.cached_blocks() } noexcept -> std::same_as<int32_t>;
      { c.total_blocks() } noexcept -> std::same_as<int32_t>;
    };
// clang-format on

}  // namespace kvcache
