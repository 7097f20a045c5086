// SPDX-License-Identifier: Apache-2.0
// The registry behind kvc_cache, the check of every handle, and the way from C++ statuses to C ones.
#include <atomic>
#include <cstring>

#include "capi.hpp"

namespace kvcache::detail {
namespace {

constexpr int32_t slot_bits = 12;
constexpr int32_t place_bits = 20;
constexpr uint64_t slot_mask = (uint64_t{1} << slot_bits) - 1;
constexpr uint64_t place_mask = (uint64_t{1} << place_bits) - 1;
static_assert(slot_mask + 1 == KVC_MAX_CACHES);

// id: 0 = vacant, 1 = between vacant and live, else the handle. `cache` is written before the id that names
// it and read after it.
struct slot {
  std::atomic<uint64_t> id;
  std::atomic<host_cache*> cache;
};
constexpr uint64_t vacant = 0, claimed = 1;

constinit slot registry[KVC_MAX_CACHES]{};
constinit std::atomic<uint64_t> serials{1};

kvc_status code_of(errc e) noexcept {
  switch (e) {
    case errc::ok:
      return KVC_OK;
    case errc::out_of_blocks:
      return KVC_OUT_OF_BLOCKS;
    case errc::out_of_memory:
      return KVC_OUT_OF_MEMORY;
    case errc::out_of_nodes:
      return KVC_OUT_OF_NODES;
    case errc::out_of_scopes:
      return KVC_OUT_OF_SCOPES;
    case errc::out_of_sequences:
      return KVC_OUT_OF_SEQUENCES;
    case errc::over_quota:
      return KVC_OVER_QUOTA;
    case errc::too_long:
      return KVC_TOO_LONG;
    case errc::unsupported:
      return KVC_UNSUPPORTED;
    case errc::busy:
      return KVC_BUSY;
    case errc::bad_argument:
      return KVC_BAD_ARGUMENT;
    case errc::stale_handle:
      return KVC_STALE_HANDLE;
    case errc::no_gain:
      return KVC_NO_GAIN;
  }
  return KVC_BAD_ARGUMENT;
}

// C++ statuses carry the field's name. A search is good enough: it runs on failure only.
int32_t field_of(const char* name) noexcept {
  if (name[0] == 0) return KVC_FIELD_NONE;
  for (int32_t i = 0; i < KVC_FIELD_OTHER; ++i) {
    if (std::strcmp(kvc_field_text(i), name) == 0) return i;
  }
  return KVC_FIELD_OTHER;
}

}  // namespace

uint64_t next_serial() noexcept {
  return serials.fetch_add(1, std::memory_order_relaxed);
}

kvc_status fail(kvc_error* error, const status& s, int64_t index) noexcept {
  return s ? KVC_OK : fail(error, code_of(s.code), field_of(s.field), s.value, index);
}

uint64_t enrol(std::unique_ptr<host_cache>& cache) noexcept {
  const uint64_t serial = next_serial();
  for (uint64_t k = 0; k <= slot_mask; ++k) {
    const uint64_t i = (serial + k) & slot_mask;
    uint64_t expected = vacant;
    if (!registry[i].id.compare_exchange_strong(expected, claimed, std::memory_order_acquire)) continue;
    const uint64_t id = serial << slot_bits | i;
    registry[i].cache.store(cache.release(), std::memory_order_relaxed);
    registry[i].id.store(id, std::memory_order_release);
    return id;
  }
  return 0;
}

kvc_status find(kvc_cache handle, host_cache*& cache, kvc_error* error) noexcept {
  const slot& s = registry[handle.id & slot_mask];
  if (handle.id <= claimed || s.id.load(std::memory_order_acquire) != handle.id) {
    return fail(error, KVC_STALE_HANDLE, KVC_FIELD_CACHE, static_cast<int64_t>(handle.id));
  }
  cache = s.cache.load(std::memory_order_relaxed);
  return KVC_OK;
}

kvc_status find(const host_cache& cache, kvc_sequence handle, host_sequence*& sequence, kvc_error* error,
                int64_t index) noexcept {
  const auto place = static_cast<size_t>(handle.id & place_mask);
  if (handle.id == 0 || place >= cache.id.size() || cache.id[place] != handle.id) {
    return fail(error, KVC_STALE_HANDLE, KVC_FIELD_SEQUENCE, static_cast<int64_t>(handle.id), index);
  }
  sequence = &cache.sequence[place];
  return KVC_OK;
}

}  // namespace kvcache::detail

using namespace kvcache::detail;

kvc_status kvc_cache_destroy(kvc_cache cache, kvc_error* error) {
  host_cache* h = nullptr;
  KVC_TRY(find(cache, h, error));
  // Of two threads that destroy the same cache one must find the handle stale.
  slot& s = registry[cache.id & slot_mask];
  uint64_t expected = cache.id;
  if (!s.id.compare_exchange_strong(expected, claimed, std::memory_order_acquire)) {
    return fail(error, KVC_STALE_HANDLE, KVC_FIELD_CACHE, static_cast<int64_t>(cache.id));
  }
  delete s.cache.load(std::memory_order_relaxed);
  s.cache.store(nullptr, std::memory_order_relaxed);
  s.id.store(vacant, std::memory_order_release);
  return KVC_OK;
}
