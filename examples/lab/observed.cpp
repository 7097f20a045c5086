// SPDX-License-Identifier: Apache-2.0
#include "observed.hpp"

namespace lab {

using kvcache::any_retention;
using kvcache::observe;

/// Adds what it is shown to the log; if it is `Known`, asks for nothing and scores what the log has.
template <observe Needs, bool WholeLayer, bool Known>
struct observation_shelf::observed {
  shared_policy* shared = nullptr;

  static constexpr observe needs = Known ? observe::nothing : Needs;
  static constexpr bool whole_layer = WholeLayer;

  kvcache::keep_plan plan(const kvcache::retain_lengths& n) const noexcept { return shared->policy.plan(n); }
  std::int32_t must_recompute() const noexcept { return shared->policy.must_recompute(); }
  kvcache::watch_options watch() const noexcept { return shared->policy.watch(); }
  void score(const kvcache::observation& o, std::span<float> out) const noexcept {
    if constexpr (Known) {
      shared->policy.score(shared->log->at(shared->next++, o), out);
    } else {
      shared->log->add(o);
      shared->policy.score(o, out);
    }
  }
};

template <bool WholeLayer>
any_retention observation_shelf::wrap(shared_policy& p, bool known) const {
  if (known) return observed<observe::nothing, WholeLayer, true>{&p};
  switch (p.policy.needs()) {
    case observe::column_sums:
      return observed<observe::column_sums, WholeLayer, false>{&p};
    case observe::votes:
      return observed<observe::votes, WholeLayer, false>{&p};
    case observe::last_row:
      return observed<observe::last_row, WholeLayer, false>{&p};
    case observe::hits:
      return observed<observe::hits, WholeLayer, false>{&p};
    case observe::far_squares:
      return observed<observe::far_squares, WholeLayer, false>{&p};
    case observe::moved:
      return observed<observe::moved, WholeLayer, false>{&p};
    case observe::nothing:
      break;
  }
  return p.policy;
}

kvcache::retention observation_shelf::share(const kvcache::retention& from) {
  if (from.policy.needs() == observe::nothing || !from.policy.scores()) return from;
  const kvcache::watch_options w = from.policy.watch();
  observation_log& log = logs_[{from.policy.needs(), w.queries, w.distance, w.ahead, w.skip}];
  const bool known = log.size() == heads_;
  if (!known) log = {};  // of a drop that was not carried out
  shared_policy& p = policies_.emplace_back(shared_policy{from.policy, &log, 0});
  kvcache::retention out = from;
  out.policy = from.policy.whole_layer() ? wrap<true>(p, known) : wrap<false>(p, known);
  return out;
}

}  // namespace lab
