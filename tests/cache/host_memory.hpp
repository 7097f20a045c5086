// SPDX-License-Identifier: Apache-2.0
#pragma once
// The host memory of a cache, seen from outside. The test program is linked with --wrap=calloc and
// --wrap=free, so it knows every array a cache took, can refuse the n-th one, and can compare or put back all
// bytes of a cache: "nothing changed" is then a comparison of memory, not of what an accessor shows.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvcache::test {

/// Every calloc and nothrow new of the program goes through here. Single-threaded tests only.
namespace host_memory {
/// The n-th request from now on (0 = the next) is refused, once; n < 0 refuses none.
void refuse(int64_t n) noexcept;
/// Requests so far.
int64_t requests() noexcept;
/// Requests refused so far.
int64_t refused() noexcept;
/// Arrays and objects taken and not given back.
int64_t outstanding() noexcept;
/// From now on, remembers the arrays that are taken.
void start_recording() noexcept;
/// The arrays remembered and still alive, in the order in which they were taken.
std::vector<std::span<std::byte>> stop_recording();
}  // namespace host_memory

/// All bytes of one cache: its object and its arrays. They hold ids and numbers; the only pointers are those
/// to the arrays, which do not move, so an image can also be put back.
class memory_image {
 public:
  void watch(std::vector<std::span<std::byte>> regions) { regions_ = std::move(regions); }
  void add(std::span<std::byte> region) { regions_.push_back(region); }
  void save() { save(saved_); }
  void save(std::vector<std::byte>& out) const;
  void restore(const std::vector<std::byte>& from) const;
  /// True if nothing outside `ignored` differs from what save() kept.
  bool same(std::span<const std::span<const std::byte>> ignored) const;
  size_t size() const;

 private:
  std::vector<std::span<std::byte>> regions_;
  std::vector<std::byte> saved_;
};

}  // namespace kvcache::test
