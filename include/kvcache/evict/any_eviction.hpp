// SPDX-License-Identifier: Apache-2.0
#pragma once
// Any eviction policy behind one type, for a choice at run time (configuration file, command line, C API).
// The cost is one indirect call per path that is pinned or released.
#include <memory>
#include <new>
#include <utility>

#include "kvcache/evict/concept.hpp"

namespace kvcache {

/// Holds one policy; an empty one evicts nothing and cannot be created.
class any_eviction {
 public:
  any_eviction() noexcept = default;
  /// Takes over a policy. Check `holds()`: it is empty if memory was refused.
  template <class E>
  requires(!std::same_as<std::remove_cvref_t<E>, any_eviction> &&
           eviction_policy<E>) explicit any_eviction(E policy) noexcept
      : policy_(new (std::nothrow) model<E>(std::move(policy))) {}

  /// Whether there is a policy inside.
  bool holds() const noexcept { return policy_ != nullptr; }
  /// Starts the policy over. Fails: as the policy, or bad_argument ("eviction") when there is none.
  status create(int32_t nodes, int32_t lanes) noexcept {
    return policy_ ? policy_->create(nodes, lanes) : status{errc::bad_argument, "eviction"};
  }
  /// As the policy inside.
  bool monotone() const noexcept { return policy_ == nullptr || policy_->monotone(); }
  /// A candidate for the policy inside. Requires: holds().
  void enter(node_id r, int32_t lane, const node_meta& m) noexcept { policy_->enter(r, lane, m); }
  /// No candidate any more. Requires: holds().
  void leave(node_id r, int32_t lane) noexcept { policy_->leave(r, lane); }
  /// Whether the policy is a `path_eviction_policy`; else the next two do nothing.
  bool takes_paths() const noexcept { return policy_ != nullptr && policy_->takes_paths(); }
  /// Candidates along a path come, the last one first.
  void enter_path(std::span<const node_id> path, int32_t lane) noexcept { policy_->enter_path(path, lane); }
  /// Candidates along a path go.
  void leave_path(std::span<const node_id> path, int32_t lane) noexcept { policy_->leave_path(path, lane); }
  /// Whether the policy is a `timed_eviction_policy`; else the next two do nothing.
  bool timed() const noexcept { return policy_ != nullptr && policy_->timed(); }
  /// Says what time it is.
  void advance(uint64_t now) noexcept { policy_->advance(now); }
  /// A candidate whose time is over, or `no_node`.
  node_id expired(int32_t lane) const noexcept { return policy_->expired(lane); }
  /// Whether the policy is a `learning_eviction_policy`; else the next two do nothing.
  bool learns() const noexcept { return policy_ != nullptr && policy_->learns(); }
  /// The victim of `lane` is about to be taken.
  void settle(int32_t lane) noexcept { policy_->settle(lane); }
  /// The candidate goes for good; it leaves.
  void evicted(node_id r, int32_t lane, const node_meta& m) noexcept { policy_->evicted(r, lane, m); }
  /// Whether it is a `remembering_eviction_policy`; else the next one does nothing.
  bool remembers() const noexcept { return policy_ != nullptr && policy_->remembers(); }
  /// A node was added.
  void stored(node_id r, int32_t lane, const node_meta& m) noexcept { policy_->stored(r, lane, m); }
  /// Which node of `lane` goes first; `no_node` without a candidate.
  node_id victim(int32_t lane) const noexcept { return policy_ ? policy_->victim(lane) : no_node; }

 private:
  struct base {
    virtual ~base() = default;
    virtual status create(int32_t, int32_t) noexcept = 0;
    virtual bool monotone() const noexcept = 0;
    virtual void enter(node_id, int32_t, const node_meta&) noexcept = 0;
    virtual void leave(node_id, int32_t) noexcept = 0;
    virtual bool takes_paths() const noexcept = 0;
    virtual void enter_path(std::span<const node_id>, int32_t) noexcept = 0;
    virtual void leave_path(std::span<const node_id>, int32_t) noexcept = 0;
    virtual bool timed() const noexcept = 0;
    virtual void advance(uint64_t) noexcept = 0;
    virtual node_id expired(int32_t) const noexcept = 0;
    virtual bool learns() const noexcept = 0;
    virtual bool remembers() const noexcept = 0;
    virtual void stored(node_id, int32_t, const node_meta&) noexcept = 0;
    virtual void settle(int32_t) noexcept = 0;
    virtual void evicted(node_id, int32_t, const node_meta&) noexcept = 0;
    virtual node_id victim(int32_t) const noexcept = 0;
  };
  template <class E>
  struct model final : base {
    explicit model(E e) noexcept : policy(std::move(e)) {}
    status create(int32_t nodes, int32_t lanes) noexcept override { return policy.create(nodes, lanes); }
    bool monotone() const noexcept override { return policy.monotone(); }
    void enter(node_id r, int32_t lane, const node_meta& m) noexcept override { policy.enter(r, lane, m); }
    void leave(node_id r, int32_t lane) noexcept override { policy.leave(r, lane); }
    bool takes_paths() const noexcept override { return detail::takes_paths(policy); }
    void enter_path(std::span<const node_id> path, int32_t lane) noexcept override {
      if constexpr (path_eviction_policy<E>) policy.enter_path(path, lane);
    }
    void leave_path(std::span<const node_id> path, int32_t lane) noexcept override {
      if constexpr (path_eviction_policy<E>) policy.leave_path(path, lane);
    }
    bool timed() const noexcept override { return detail::timed(policy); }
    void advance(uint64_t now) noexcept override { detail::tell_time(policy, now); }
    node_id expired(int32_t lane) const noexcept override { return detail::expired_of(policy, lane); }
    bool learns() const noexcept override { return detail::learns(policy); }
    bool remembers() const noexcept override { return detail::remembers(policy); }
    void stored(node_id r, int32_t lane, const node_meta& m) noexcept override {
      detail::tell_stored(policy, r, lane, m);
    }
    void settle(int32_t lane) noexcept override { detail::tell_settle(policy, lane); }
    void evicted(node_id r, int32_t lane, const node_meta& m) noexcept override {
      detail::tell_evicted(policy, r, lane, m);
    }
    node_id victim(int32_t lane) const noexcept override { return policy.victim(lane); }
    E policy;
  };
  std::unique_ptr<base> policy_;
};

static_assert(path_eviction_policy<any_eviction>);
static_assert(timed_eviction_policy<any_eviction>);
static_assert(remembering_eviction_policy<any_eviction>);

}  // namespace kvcache
