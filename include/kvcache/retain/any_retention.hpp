// SPDX-License-Identifier: Apache-2.0
#pragma once
// A retention policy whose type is chosen at run time, with what is said beside it: over which heads a budget
// is shared. A value, copied without allocating; any policy of small trivially copyable type goes in, also
// one of the caller's own.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "kvcache/retain/concept.hpp"
#include "kvcache/retain/observation.hpp"

namespace kvcache {

/// Among whom the tokens that may stay are divided by score.
enum class budget_scope : uint8_t {
  uniform,  ///< every kv head of every layer keeps as many
  head,     ///< the heads of a layer share; every layer keeps as many
  layer,    ///< the layers share; the heads of a layer keep as many as each other
  global,   ///< all heads of all layers share
};

/// How a budget is divided. The share that every head is sure of is a fraction, never a float.
struct budget_rule {
  budget_scope scope = budget_scope::uniform;  ///< among whom
  int32_t floor_above = 1;                     ///< numerator of the sure share of the uniform budget
  int32_t floor_below = 5;                     ///< its denominator

  /// Equal in every number.
  constexpr bool operator==(const budget_rule&) const noexcept = default;
};

/// Any retention policy. Memory: itself. Thread safety: const calls from any thread if the policy's are.
class any_retention {
 public:
  /// Largest policy that goes in, in bytes.
  static constexpr size_t room = 48;

  /// Drops nothing.
  any_retention() noexcept : any_retention(keep_all{}) {}
  /// Holds `policy`.
  template <class R>
  requires(!std::same_as<R, any_retention> && retention_policy<R>) any_retention(const R& policy)
  noexcept : calls_(&calls_of<R>) {
    static_assert(std::is_trivially_copyable_v<R> && sizeof(R) <= room, "a policy is a small plain value");
    std::memcpy(value_, &policy, sizeof policy);
  }

  /// What it needs to see.
  observe needs() const noexcept { return calls_->needs; }
  /// As retention_policy.
  keep_plan plan(const retain_lengths& n) const noexcept { return calls_->plan(value_, n); }
  /// As retention_policy.
  int32_t must_recompute() const noexcept { return calls_->must_recompute(value_); }
  /// Whether it chooses by score.
  bool scores() const noexcept { return calls_->score != nullptr; }
  /// Whether the heads of a layer keep the same tokens.
  bool whole_layer() const noexcept { return calls_->whole_layer; }
  /// As token_scorer; nothing for a policy that does not score.
  watch_options watch() const noexcept {
    return calls_->watch != nullptr ? calls_->watch(value_) : watch_options{};
  }
  /// As token_scorer. Requires: scores().
  void score(const observation& o, std::span<float> out) const noexcept { calls_->score(value_, o, out); }
  /// The policy, if it is an R; else null.
  template <class R>
  const R* get() const noexcept {
    return calls_ == &calls_of<R> ? reinterpret_cast<const R*>(value_) : nullptr;
  }

 private:
  struct calls {
    observe needs;
    bool whole_layer;
    keep_plan (*plan)(const std::byte*, const retain_lengths&) noexcept;
    int32_t (*must_recompute)(const std::byte*) noexcept;
    watch_options (*watch)(const std::byte*) noexcept;
    void (*score)(const std::byte*, const observation&, std::span<float>) noexcept;
  };

  template <class R>
  static const R& as(const std::byte* value) noexcept {
    return *reinterpret_cast<const R*>(value);
  }
  template <class R>
  static constexpr calls make_calls() noexcept {
    calls c{};
    c.needs = R::needs;
    c.whole_layer = keeps_whole_layer<R>();
    c.plan = [](const std::byte* v, const retain_lengths& n) noexcept { return as<R>(v).plan(n); };
    c.must_recompute = [](const std::byte* v) noexcept { return as<R>(v).must_recompute(); };
    if constexpr (token_scorer<R>) {
      c.watch = [](const std::byte* v) noexcept { return as<R>(v).watch(); };
      c.score = [](const std::byte* v, const observation& o, std::span<float> s) noexcept {
        as<R>(v).score(o, s);
      };
    }
    return c;
  }
  template <class R>
  static constexpr calls calls_of = make_calls<R>();

  const calls* calls_;
  alignas(8) std::byte value_[room] = {};
};

/// What a user chooses for a text: a policy and how its budget is divided.
struct retention {
  any_retention policy;  ///< which tokens stay
  budget_rule budget;    ///< among whom the budget is divided
};

}  // namespace kvcache
