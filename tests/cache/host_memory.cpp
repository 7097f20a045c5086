// SPDX-License-Identifier: Apache-2.0
#include "host_memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

constexpr size_t most_records = 512;
struct record {
  void* data;
  size_t size;
};

record records[most_records];
size_t record_count = 0;
bool recording = false;
int64_t until_refusal = -1;
int64_t requests_made = 0;
int64_t refusals = 0;
int64_t alive = 0;

bool refuse_now() noexcept {
  ++requests_made;
  if (until_refusal < 0) return false;
  if (until_refusal-- > 0) return false;
  ++refusals;
  return true;
}

}  // namespace

extern "C" {
void* __real_calloc(size_t n, size_t size);
void __real_free(void* p);
void* __wrap_calloc(size_t n, size_t size);
void __wrap_free(void* p);

void* __wrap_calloc(size_t n, size_t size) {
  if (refuse_now()) return nullptr;
  void* p = __real_calloc(n, size);
  if (p == nullptr) return nullptr;
  ++alive;
  if (recording && record_count < most_records) records[record_count++] = {p, n * size};
  return p;
}

void __wrap_free(void* p) {
  if (p != nullptr) {
    --alive;
    record* end = records + record_count;
    record* r = std::find_if(records, end, [p](const record& x) { return x.data == p; });
    if (r != end) {
      std::copy(r + 1, end, r);
      --record_count;
    }
  }
  __real_free(p);
}
}

// The cache takes its few objects with new (std::nothrow).
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  if (refuse_now()) return nullptr;
  try {
    return ::operator new(size);
  } catch (...) {
    return nullptr;
  }
}

namespace kvcache::test {

void host_memory::refuse(int64_t n) noexcept {
  until_refusal = n;
}
int64_t host_memory::requests() noexcept {
  return requests_made;
}
int64_t host_memory::refused() noexcept {
  return refusals;
}
int64_t host_memory::outstanding() noexcept {
  return alive;
}
void host_memory::start_recording() noexcept {
  recording = true;
  record_count = 0;
}
std::vector<std::span<std::byte>> host_memory::stop_recording() {
  recording = false;
  std::vector<std::span<std::byte>> out;
  for (size_t i = 0; i < record_count; ++i)
    out.push_back({static_cast<std::byte*>(records[i].data), records[i].size});
  return out;
}

size_t memory_image::size() const {
  size_t n = 0;
  for (const auto r : regions_) n += r.size();
  return n;
}

void memory_image::save(std::vector<std::byte>& out) const {
  out.resize(size());
  size_t at = 0;
  for (const auto r : regions_) {
    std::memcpy(out.data() + at, r.data(), r.size());
    at += r.size();
  }
}

void memory_image::restore(const std::vector<std::byte>& from) const {
  size_t at = 0;
  for (const auto r : regions_) {
    std::memcpy(r.data(), from.data() + at, r.size());
    at += r.size();
  }
}

bool memory_image::same(std::span<const std::span<const std::byte>> ignored) const {
  size_t at = 0;
  for (const auto r : regions_) {
    const std::byte* was = saved_.data() + at;
    at += r.size();
    if (std::memcmp(was, r.data(), r.size()) == 0) continue;
    for (size_t i = 0; i < r.size(); ++i) {
      if (was[i] == r[i]) continue;
      const std::byte* p = r.data() + i;
      const bool may = std::any_of(ignored.begin(), ignored.end(), [p](std::span<const std::byte> m) {
        return p >= m.data() && p < m.data() + m.size();
      });
      if (!may) return false;
    }
  }
  return true;
}

}  // namespace kvcache::test
