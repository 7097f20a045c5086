// SPDX-License-Identifier: Apache-2.0
#pragma once
// Errors as values: `status` for "done or why not", `result<T>` for "a T or why not". A failed call has
// changed nothing. `field` names the argument or the resource, `value` what it was (or how much was asked
// for).
#include <cstdint>
#include <utility>

namespace kvcache {

/// Why a call did not do what was asked.
enum class errc : uint8_t {
  ok,
  out_of_blocks,     ///< not enough free and evictable blocks; close, preempt or wait
  out_of_memory,     ///< the host refused memory at creation
  out_of_nodes,      ///< the prefix index is full of pinned nodes
  out_of_scopes,     ///< more sharing scopes are in use than the configuration names
  out_of_sequences,  ///< as many sequences are open as the configuration names
  over_quota,        ///< the account's block limit would be passed
  too_long,          ///< the sequence would pass the configured blocks per sequence
  unsupported,       ///< a combination this build or model of a concept does not have
  busy,              ///< not now: run the queued commands, accept the drafts or close the sequences first
  bad_argument,      ///< `field` names it
  stale_handle,      ///< the sequence was closed
  no_gain,           ///< dropping tokens would return no block; `value` says how many it would cost
};

/// Text of an error code: one lower-case word or two, stable, fit for logs and JSON.
constexpr const char* to_text(errc e) noexcept {
  switch (e) {
    case errc::ok:
      return "ok";
    case errc::out_of_blocks:
      return "out_of_blocks";
    case errc::out_of_memory:
      return "out_of_memory";
    case errc::out_of_nodes:
      return "out_of_nodes";
    case errc::out_of_scopes:
      return "out_of_scopes";
    case errc::out_of_sequences:
      return "out_of_sequences";
    case errc::over_quota:
      return "over_quota";
    case errc::too_long:
      return "too_long";
    case errc::unsupported:
      return "unsupported";
    case errc::busy:
      return "busy";
    case errc::bad_argument:
      return "bad_argument";
    case errc::stale_handle:
      return "stale_handle";
    case errc::no_gain:
      return "no_gain";
  }
  return "unknown";
}

/// Outcome of a call without a value. True means done.
struct [[nodiscard]] status {
  errc code = errc::ok;    ///< why it was not done
  const char* field = "";  ///< static text, never null
  int64_t value = 0;       ///< what the field was, or how much of a resource was missing; 0 if no number

  constexpr status() noexcept = default;
  /// From an error code alone, so that a function may `return errc::busy`, or with the field and its value.
  constexpr status(errc e, const char* f = "", int64_t v = 0) noexcept : code(e), field(f), value(v) {}
  /// True if the call did what was asked.
  constexpr explicit operator bool() const noexcept { return code == errc::ok; }
};

/// A value, or the reason why there is none. T must be default constructible and movable.
template <class T>
class [[nodiscard]] result {
 public:
  /// A success; a function may `return value`.
  constexpr result(T v) noexcept : value_(std::move(v)) {}
  /// A failure. Requires: `e` is not ok.
  constexpr result(status e) noexcept : error_(e) {}
  /// A failure, spelled out.
  constexpr result(errc e, const char* f = "", int64_t v = 0) noexcept : error_(e, f, v) {}

  /// True if there is a value.
  constexpr explicit operator bool() const noexcept { return bool(error_); }
  /// The value; a default constructed T after a failure, never undefined behaviour.
  constexpr T& operator*() & noexcept { return value_; }
  /// The value, to be read.
  constexpr const T& operator*() const& noexcept { return value_; }
  /// The value, to be moved out.
  constexpr T&& operator*() && noexcept { return std::move(value_); }
  /// Member of the value.
  constexpr T* operator->() noexcept { return &value_; }
  /// Member of the value, to be read.
  constexpr const T* operator->() const noexcept { return &value_; }
  /// The reason why there is no value; `errc::ok` if there is one.
  constexpr const status& error() const noexcept { return error_; }

 private:
  T value_{};
  status error_{};
};

}  // namespace kvcache
