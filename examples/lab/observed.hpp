// SPDX-License-Identifier: Apache-2.0
#pragma once

// A prompt's attention is looked at once, however many policies are applied to it: what heads showed depends
// on what a policy asked to see, not on how many tokens it keeps.
//
//   first policy that asks for it     attention ──> observation ──> score        and a copy of the
//   observation the next ones                                 the copy      ──> score        nothing is
//   looked at

#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "kvcache/retain/any_retention.hpp"

namespace lab {

/// What the heads of one text showed at one moment, in the order in which they were scored.
class observation_log {
 public:
  void add(const kvcache::observation& o) {
    heads_.push_back({o.queries, {o.weights.begin(), o.weights.end()}, {o.seen.begin(), o.seen.end()}});
  }
  std::size_t size() const { return heads_.size(); }
  /// `o`, with what head `index` showed.
  kvcache::observation at(std::size_t index, kvcache::observation o) const {
    const head& h = heads_[index];
    o.queries = h.queries;
    o.weights = h.weights;
    o.seen = h.seen;
    return o;
  }

 private:
  struct head {
    std::int32_t queries = 0;
    std::vector<float> weights;
    std::vector<std::int32_t> seen;
  };
  std::vector<head> heads_;
};

/// For one-shot policies on forks of one text. Outlives the sessions that run what it made.
class observation_shelf {
 public:
  /// `heads`: that a drop scores, over all layers.
  explicit observation_shelf(std::size_t heads) : heads_(heads) {}

  /// A policy that does what `from` does. Only one of them may be applied at a time.
  kvcache::retention share(const kvcache::retention& from);

 private:
  struct shared_policy {
    kvcache::any_retention policy;
    observation_log* log;
    std::size_t next;  ///< head that is scored next, of a log that is complete
  };
  template <kvcache::observe Needs, bool WholeLayer, bool Known>
  struct observed;
  template <bool WholeLayer>
  kvcache::any_retention wrap(shared_policy& p, bool known) const;

  using request = std::tuple<kvcache::observe, int, int, int, int>;  // needs, and what watch() says
  std::size_t heads_;
  std::map<request, observation_log> logs_;
  std::deque<shared_policy> policies_;
};

}  // namespace lab
