// SPDX-License-Identifier: Apache-2.0
#pragma once
// Array whose size is fixed when it is created: all memory of the control plane is taken once, in these, so
// that no later call allocates and a refusal of memory is a value. Zeroed pages come from the system
// untouched, so a large bound costs address space, not memory, until it is used.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <type_traits>
#include <utility>

namespace kvcache {

/// Owner of `size()` values of T, all bytes zero at first. Empty until `create`. Access is not
/// bounds-checked. Owns: its memory, from calloc.
template <class T>
class fixed_array {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  fixed_array() noexcept = default;
  fixed_array(const fixed_array&) = delete;
  fixed_array& operator=(const fixed_array&) = delete;
  /// Takes the memory over; `o` is then empty.
  fixed_array(fixed_array&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}
  /// Exchanges the memory with `o`, whose destructor then frees what was here.
  fixed_array& operator=(fixed_array&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
    return *this;
  }
  ~fixed_array() { std::free(data_); }

  /// Replaces the contents by `n` values whose bytes are all zero. Fails: false, unchanged, when memory is
  /// refused.
  [[nodiscard]] bool create(size_t n) noexcept {
    T* fresh = nullptr;
    if (n != 0) {
      if (n > SIZE_MAX / 2 / sizeof(T)) return false;
      fresh = static_cast<T*>(std::calloc(n, sizeof(T)));
      if (fresh == nullptr) return false;
    }
    std::free(data_);
    data_ = fresh;
    size_ = n;
    return true;
  }

  T& operator[](size_t i) noexcept { return data_[i]; }              ///< Requires: i < size().
  const T& operator[](size_t i) const noexcept { return data_[i]; }  ///< Requires: i < size().
  T* data() noexcept { return data_; }                     ///< First value; null while empty. It never moves.
  const T* data() const noexcept { return data_; }         ///< First value, to be read.
  size_t size() const noexcept { return size_; }           ///< Values, not bytes.
  T* begin() noexcept { return data_; }                    ///< For range-for and algorithms.
  T* end() noexcept { return data_ + size_; }              ///< One past the last value.
  const T* begin() const noexcept { return data_; }        ///< For range-for over a const array.
  const T* end() const noexcept { return data_ + size_; }  ///< One past the last value.
  std::span<T> view() noexcept { return {data_, size_}; }  ///< All values, to be written.
  std::span<const T> view() const noexcept { return {data_, size_}; }  ///< All values, to be read.

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvcache
