// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that notices: arrays whose last byte touches a page that cannot be accessed, and an arena much
// larger than the machine's memory, for offsets beyond 32 bits. In the program that runs the same cases on a
// GPU (KVCACHE_ON_GPU) arrays are pinned memory, which both sides reach: what is written beside one is
// noticed when it is released, what is read there by compute-sanitizer.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <utility>
#include <vector>

#if defined(KVCACHE_ON_GPU)
namespace kvcache::simt {
void* reachable_memory(size_t bytes);
void release_reachable(void* memory);
}  // namespace kvcache::simt
#endif

namespace kvcache::test {

/// n values of T that end where an inaccessible page begins; the page before them is inaccessible too. Filled
/// with bytes 0xff: NaN in every float type, -1 in every integer.
template <class T>
class guarded {
 public:
  guarded() = default;
#if defined(KVCACHE_ON_GPU)
  explicit guarded(size_t n) : size_(n * sizeof(T)), n_(n) {
    base_ = simt::reachable_memory(size_);
    data_ = static_cast<T*>(base_);
  }
#else
  explicit guarded(size_t n) : n_(n) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (n * sizeof(T) + page - 1) / page * page;
    size_ = used + 2 * page;
    base_ = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    auto* first = static_cast<std::byte*>(base_) + page;
    if (used != 0 && mprotect(first, used, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    data_ = reinterpret_cast<T*>(first + used - n * sizeof(T));
    if (n != 0) std::memset(static_cast<void*>(data_), 0xff, n * sizeof(T));
  }
#endif
  guarded(const std::vector<T>& v) : guarded(v.size()) {  // NOLINT: a test array is a guarded array
    if (!v.empty()) std::memcpy(static_cast<void*>(data_), v.data(), v.size() * sizeof(T));
  }
  guarded(guarded&& b) noexcept {
    swap(b);
  }
  guarded& operator=(guarded&& b) noexcept {
    guarded moved(std::move(b));
    swap(moved);
    return *this;
  }
  ~guarded() {
#if defined(KVCACHE_ON_GPU)
    simt::release_reachable(base_);
#else
    if (base_ != nullptr) munmap(base_, size_);
#endif
  }

  T* data() {
    return data_;
  }
  const T* data() const {
    return data_;
  }
  size_t size() const {
    return n_;
  }
  T& operator[](size_t i) {
    return data_[i];
  }
  const T& operator[](size_t i) const {
    return data_[i];
  }
  T* begin() {
    return data_;
  }
  T* end() {
    return data_ + n_;
  }
  const T* begin() const {
    return data_;
  }
  const T* end() const {
    return data_ + n_;
  }

 private:
  void swap(guarded& b) noexcept {
    std::swap(base_, b.base_);
    std::swap(size_, b.size_);
    std::swap(data_, b.data_);
    std::swap(n_, b.n_);
  }
  void* base_ = nullptr;
  size_t size_ = 0;
  T* data_ = nullptr;
  size_t n_ = 0;
};

/// Address space of which only touched pages take memory.
class sparse_arena {
 public:
  explicit sparse_arena(size_t bytes) : size_(bytes) {
    base_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
  }
  sparse_arena(const sparse_arena&) = delete;
  sparse_arena& operator=(const sparse_arena&) = delete;
  ~sparse_arena() { munmap(base_, size_); }
  std::byte* data() { return static_cast<std::byte*>(base_); }

 private:
  void* base_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvcache::test
