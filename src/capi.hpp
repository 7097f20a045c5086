// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the host half of the C API stands on: handles that are checked before they are followed, and the way
// from the C++ statuses to the C ones.
//
//   kvc_cache.id     | serial 52 | slot 12 |      slot of the process-wide registry
//   kvc_sequence.id  | serial 44 | place 20 |     place of the sequence in its cache
//
// A serial is given once per process, to a cache or a sequence, so a number fits at most the one object it
// was made for: a stale handle, one of another cache and one of the other kind are the same case. The 44 bits
// last for fifty years of ten thousand sequences a second.
#include <cstdint>
#include <memory>

#include "check.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/evict/parse.hpp"
#include "kvcache/kvcache.h"
#include "kvcache/quant/format.hpp"

namespace kvcache::detail {

using host_sequence = basic_cache<dynamic>::sequence;

/// What a kvc_cache stands for.
struct host_cache {
  basic_cache<dynamic> cache;
  std::unique_ptr<host_sequence[]> sequence;  // [place]; closed before the cache goes
  fixed_array<uint64_t> id;                   // [place] handle of the live sequence there, 0 = none
  fixed_array<node_id> scratch;               // of peek
  eviction_choice policy;
  int32_t accounts = 1;
};

/// Never 0, never twice. Thread safety: any thread.
uint64_t next_serial() noexcept;

/// Takes over a cache and names it. Fails: 0 when KVC_MAX_CACHES are live; then nothing is taken. Thread
/// safety: any thread.
uint64_t enrol(std::unique_ptr<host_cache>& cache) noexcept;

/// The cache of a handle. Cost: O(1). Thread safety: any thread.
kvc_status find(kvc_cache handle, host_cache*& cache, kvc_error* error) noexcept;

/// The live sequence of a handle.
kvc_status find(const host_cache& cache, kvc_sequence handle, host_sequence*& sequence, kvc_error* error,
                int64_t index = -1) noexcept;

/// Both.
inline kvc_status find(kvc_cache handle, kvc_sequence id, host_sequence*& sequence,
                       kvc_error* error) noexcept {
  host_cache* cache = nullptr;
  KVC_TRY(find(handle, cache, error));
  return find(*cache, id, sequence, error);
}

/// Records a failed C++ status and returns its C form; KVC_OK for success.
kvc_status fail(kvc_error* error, const status& s, int64_t index = -1) noexcept;

/// Refuses a missing output or a negative count.
inline kvc_status need(bool given, int32_t field, kvc_error* error, int64_t value = 0) noexcept {
  return given ? KVC_OK : fail(error, KVC_BAD_ARGUMENT, field, value);
}

/// A C configuration in C++ terms; refers to its own group array.
struct host_config {
  group_config group[max_groups]{};
  cache_config config{};
  eviction_choice policy;
};
kvc_status convert(const kvc_cache_config* in, host_config& out, kvc_error* error) noexcept;

/// Formats given as text, `n` of them for `layers` layers; none at all if they store values as written.
kvc_status parse_formats(const char* const* text, int32_t n, int32_t layers, fixed_array<kv_format>& out,
                         kvc_error* error) noexcept;

/// One group in C++ terms.
kvc_status convert_group(const kvc_group_config& in, int64_t index, group_config& out,
                         kvc_error* error) noexcept;

/// Writes sizes into a checked kvc_geometry.
void describe(const geometry& geo, kvc_geometry& out) noexcept;

}  // namespace kvcache::detail
