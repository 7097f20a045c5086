// SPDX-License-Identifier: Apache-2.0
#pragma once
// Version numbers, the inline-namespace tag and the contract check that every other header uses.
//
// A contract violation is a bug of the caller: releasing a block twice, sharing a free block. It is never
// silent: the operation is refused and the violation handler runs. Scarcity and bad input data are values
// instead (status.hpp).
#include <atomic>
#include <cstdint>

#define KVCACHE_VERSION_MAJOR 0  ///< 0 while a new minor version may break an interface
#define KVCACHE_VERSION_MINOR 1  ///< second part of the version, equal to the CMake package's
#define KVCACHE_VERSION_PATCH 0  ///< third part: corrections only

namespace kvcache {

/// What happens when a caller breaks a contract. `what` is the broken condition.
using violation_handler = void (*)(const char* what, const char* file, int line) noexcept;

namespace detail {
inline std::atomic<uint64_t> violation_count{0};
inline void default_violation(const char*, const char*, int) noexcept {
#ifndef NDEBUG
  __builtin_trap();
#endif
}
inline std::atomic<violation_handler> violation{&default_violation};
[[gnu::cold, gnu::noinline]] inline bool violated(const char* what, const char* file, int line) noexcept {
  violation_count.fetch_add(1, std::memory_order_relaxed);
  violation.load(std::memory_order_relaxed)(what, file, line);
  return false;
}
}  // namespace detail

/// Number of contract violations seen by this process. Thread safety: any thread.
inline uint64_t contract_violations() noexcept {
  return detail::violation_count.load(std::memory_order_relaxed);
}

/// Installs the handler that runs on a contract violation and returns the one before.
/// The default one traps in debug builds and does nothing (beyond counting) in release builds.
/// Thread safety: any thread.
inline violation_handler set_violation_handler(violation_handler handler) noexcept {
  return detail::violation.exchange(handler != nullptr ? handler : &detail::default_violation);
}

}  // namespace kvcache

/// True when the condition holds; otherwise reports a contract violation and is false, so that the caller can
/// refuse: `if (!KVCACHE_CONTRACT(x)) return;`
#define KVCACHE_CONTRACT(cond) \
  (__builtin_expect(!!(cond), 1) ? true : ::kvcache::detail::violated(#cond, __FILE__, __LINE__))
