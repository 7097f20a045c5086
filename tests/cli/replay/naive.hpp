// SPDX-License-Identifier: Apache-2.0
#pragma once
// The rules of docs/replay.md once more, as slow as they can be: every node of every request by a map, every
// victim by a look at all that is resident. Nothing of the library or of the replay is used.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trace/trace.hpp"

namespace naive {

using kvcache::cli::request;
using kvcache::cli::trace;

/// The nodes of each request: (parent node, id), numbered as they appear.
struct forest {
  std::vector<std::vector<int>> path;  // [request]
  std::vector<int> parent, depth;      // [node]

  explicit forest(const trace& t) {
    std::map<std::pair<int, int>, int> number;
    for (const request& r : t.requests) {
      std::vector<int>& p = path.emplace_back();
      for (const std::int32_t id : t.units_of(r)) {
        const int above = p.empty() ? -1 : p.back();
        const auto [it, fresh] = number.try_emplace({above, id}, int(parent.size()));
        if (fresh) {
          parent.push_back(above);
          depth.push_back(int(p.size()));
        }
        p.push_back(it->second);
      }
    }
  }
  int nodes() const { return int(parent.size()); }
};

constexpr int never = std::numeric_limits<int>::max();

/// next[r][i]: the request after r that uses the i-th node of r's path.
inline std::vector<std::vector<int>> next_uses(const forest& f) {
  std::vector<std::vector<int>> next(f.path.size());
  std::vector<int> of_node(std::size_t(f.nodes()), never);
  for (std::size_t r = f.path.size(); r-- > 0;) {
    for (const int n : f.path[r]) next[r].push_back(std::exchange(of_node[std::size_t(n)], int(r)));
  }
  return next;
}

/// One cache of the family "prefix-closed, pinned", and the optimum with bypass.
class cache {
 public:
  /// `ordered`: victims come from a set in the order of keys instead of a look at all.
  cache(const forest& f, const std::vector<std::vector<int>>& next, std::string policy, std::int64_t room,
        bool ordered)
      : f_(f),
        next_(next),
        policy_(std::move(policy)),
        room_(room),
        ordered_(ordered),
        state_(std::size_t(f.nodes())) {}

  std::int64_t hits(int r) const {
    std::int64_t k = 0;
    for (const int n : f_.path[std::size_t(r)]) {
      if (!at(n).resident) break;
      ++k;
    }
    return k;
  }
  void serve(int r) {
    const std::vector<int>& path = f_.path[std::size_t(r)];
    const std::int64_t k = hits(r), n = std::int64_t(path.size());
    const bool bypass = policy_ == "belady_bypass";
    const std::int64_t m = bypass ? n : std::min(n, room_);
    for (std::int64_t i = 0; i < k; ++i) touch(path[std::size_t(i)], r, i);
    if (!bypass) {
      for (std::int64_t i = 0; i < k; ++i) pin(path[std::size_t(i)], true);
      while (count_ + (m - k) > room_) evict();
      for (std::int64_t i = 0; i < k; ++i) pin(path[std::size_t(i)], false);
    }
    for (std::int64_t i = k; i < m; ++i) {
      node& x = at(path[std::size_t(i)]);
      x.resident = true;
      x.born = r;
      x.uses = 0;
      if (i > 0) {
        ++at(path[std::size_t(i - 1)]).children;
        refresh(path[std::size_t(i - 1)]);
      }
      ++count_;
      if (!ordered_) resident_.push_back(path[std::size_t(i)]);
      touch(path[std::size_t(i)], r, i);
    }
    while (bypass && count_ > room_) evict();
    missed += n - k;
  }

  std::int64_t resident() const { return count_; }
  std::int64_t evictions = 0, missed = 0;

 private:
  using key = std::array<std::int64_t, 4>;
  struct node {
    bool resident = false, pinned = false;
    int children = 0, born = 0, last = 0, uses = 0, next = never;
    bool listed = false;
    key listed_as{};
  };

  node& at(int n) { return state_[std::size_t(n)]; }
  const node& at(int n) const { return state_[std::size_t(n)]; }
  void touch(int n, int r, std::int64_t i) {
    at(n).last = r;
    ++at(n).uses;
    at(n).next = next_[std::size_t(r)][std::size_t(i)];
    refresh(n);
  }
  void pin(int n, bool pinned) {
    at(n).pinned = pinned;
    refresh(n);
  }
  bool candidate(int n) const { return at(n).resident && at(n).children == 0 && !at(n).pinned; }
  /// Something of the node has changed.
  void refresh(int n) {
    if (!ordered_) return;
    node& x = at(n);
    if (x.listed) order_.erase({x.listed_as, n});
    x.listed = candidate(n);
    x.listed_as = key_of(n);
    if (x.listed) order_.insert({x.listed_as, n});
  }
  key key_of(int n) const {
    const node& x = at(n);
    const std::int64_t deep = -f_.depth[std::size_t(n)];
    if (policy_ == "lru" || policy_ == "priority") return {x.last, deep, n, 0};
    if (policy_ == "fifo") return {x.born, deep, n, 0};
    if (policy_ == "lfu") return {x.uses, x.last, deep, n};
    if (policy_ == "slru") return {x.uses >= 2 ? 1 : 0, x.last, deep, n};
    return {-std::int64_t{x.next}, deep, n, 0};  // both optima
  }
  void evict() {
    const int gone = ordered_ ? order_.begin()->second : least_of_all();
    at(gone).resident = false;
    refresh(gone);
    --count_;
    ++evictions;
    if (const int above = f_.parent[std::size_t(gone)]; above >= 0) {
      --at(above).children;
      refresh(above);
    }
    if (!ordered_) resident_.erase(std::find(resident_.begin(), resident_.end(), gone));
  }
  int least_of_all() const {
    int best = -1;
    for (const int n : resident_) {
      if (candidate(n) && (best < 0 || key_of(n) < key_of(best))) best = n;
    }
    return best;
  }

  const forest& f_;
  const std::vector<std::vector<int>>& next_;
  std::string policy_;
  std::int64_t room_;
  bool ordered_;
  std::vector<node> state_;
  std::int64_t count_ = 0;
  std::vector<int> resident_;            // unless ordered
  std::set<std::pair<key, int>> order_;  // if ordered: the candidates
};

struct outcome {
  std::int64_t hit_blocks = 0, hit_tokens = 0, requests_with_hit = 0, evictions = 0, resident_end = 0;
  double mean_resident = 0;
};

inline void count(const trace& t, int r, std::int64_t hits, outcome& to) {
  const request& q = t.requests[std::size_t(r)];
  to.hit_blocks += hits;
  to.hit_tokens += std::min(hits * t.block_tokens, q.input_tokens);
  to.requests_with_hit += hits > 0;
}

/// `route` as in the options; random is not here.
inline outcome replay(const trace& t, const forest& f, const std::string& policy, std::int64_t capacity,
                      int workers = 1, const std::string& route = "round_robin", bool ordered = false) {
  const auto next = next_uses(f);
  std::vector<cache> w(std::size_t(workers), cache(f, next, policy, capacity / workers, ordered));
  outcome to;
  double area = 0, sum = 0;
  for (int r = 0; r < int(t.requests.size()); ++r) {
    std::size_t best = 0;
    if (route == "round_robin") best = std::size_t(r % workers);
    const std::int64_t n = std::int64_t(f.path[std::size_t(r)].size());
    for (std::size_t i = 1; i < w.size(); ++i) {
      if (route == "prefix_affinity") {
        const auto a = w[i].hits(r), b = w[best].hits(r);
        if (a > b || (a == b && w[i].missed < w[best].missed)) best = i;
      }
      if (route == "affinity_load" && n - w[i].hits(r) + w[i].missed < n - w[best].hits(r) + w[best].missed) {
        best = i;
      }
    }
    count(t, r, w[best].hits(r), to);
    w[best].serve(r);
    double resident = 0;
    for (const cache& c : w) resident += double(c.resident());
    sum += resident;
    const auto& q = t.requests;
    if (r + 1 < int(q.size()))
      area += resident * double(q[std::size_t(r + 1)].time_us - q[std::size_t(r)].time_us);
  }
  for (const cache& c : w) {
    to.evictions += c.evictions;
    to.resident_end += c.resident();
  }
  if (t.requests.empty()) return to;
  const double span = double(t.requests.back().time_us - t.requests.front().time_us);
  to.mean_resident = span > 0 ? area / span : sum / double(t.requests.size());
  return to;
}

/// Time to live without bound: a block is a hit up to `life_us` after its last use.
inline outcome ttl(const trace& t, const forest& f, std::int64_t life_us) {
  std::vector<std::int64_t> last(std::size_t(f.nodes()), -1);
  outcome to;
  double area = 0;
  std::int64_t stored = 0;
  const std::int64_t end = t.requests.empty() ? 0 : t.requests.back().time_us;
  for (int r = 0; r < int(t.requests.size()); ++r) {
    const std::int64_t now = t.requests[std::size_t(r)].time_us;
    std::int64_t k = 0;
    bool leading = true;
    for (const int n : f.path[std::size_t(r)]) {
      std::int64_t& used = last[std::size_t(n)];
      const bool alive = used >= 0 && now - used <= life_us;
      leading &= alive;
      k += leading;
      stored += !alive;
      if (used >= 0) area += double(std::min(now - used, life_us));
      used = now;
    }
    count(t, r, k, to);
  }
  for (const std::int64_t used : last) {
    area += double(std::min(end - used, life_us));
    to.resident_end += end - used <= life_us;
  }
  to.evictions = stored - to.resident_end;
  if (t.requests.empty()) return to;
  const double span = double(end - t.requests.front().time_us);
  if (span > 0) to.mean_resident = area / span;
  return to;
}

/// The most hits that any choice of victims reaches: all choices are tried. For a handful of nodes.
class best_of_all {
 public:
  best_of_all(const forest& f, std::int64_t room, bool bypass) : f_(f), room_(room), bypass_(bypass) {}
  std::int64_t hits() { return from(0, 0); }

 private:
  using set = std::uint32_t;  // of nodes
  static std::int64_t size(set s) { return __builtin_popcount(s); }
  set bit(int n) const { return set{1} << n; }

  std::int64_t from(std::size_t r, set resident) {
    if (r == f_.path.size()) return 0;
    const auto [it, fresh] = known_.try_emplace({r, resident}, -1);
    if (!fresh) return it->second;
    const std::vector<int>& path = f_.path[r];
    std::int64_t k = 0;
    while (k < std::int64_t(path.size()) && (resident & bit(path[std::size_t(k)]))) ++k;
    const std::int64_t best = bypass_ ? with_bypass(r, resident) : pinned(r, resident, k);
    return known_[{r, resident}] = k + best;
  }
  std::int64_t with_bypass(std::size_t r, set all) {
    for (const int n : f_.path[r]) all |= bit(n);
    if (size(all) <= room_) return from(r + 1, all);
    std::int64_t best = 0;
    for (set s = all;; s = (s - 1) & all) {
      if (size(s) == room_) best = std::max(best, from(r + 1, s));
      if (s == 0) break;
    }
    return best;
  }
  std::int64_t pinned(std::size_t r, set resident, std::int64_t k) {
    const std::vector<int>& path = f_.path[r];
    const std::int64_t m = std::min(std::int64_t(path.size()), room_);
    set own = 0;
    for (std::int64_t i = 0; i < k; ++i) own |= bit(path[std::size_t(i)]);
    if (size(resident) + (m - k) <= room_) {
      for (std::int64_t i = k; i < m; ++i) resident |= bit(path[std::size_t(i)]);
      return from(r + 1, resident);
    }
    std::int64_t best = -1;
    for (int n = 0; n < f_.nodes(); ++n) {
      if (!(resident & bit(n)) || (own & bit(n)) || has_child(resident, n)) continue;
      best = std::max(best, pinned(r, resident & ~bit(n), k));
    }
    return best;
  }
  bool has_child(set resident, int n) const {
    for (int c = 0; c < f_.nodes(); ++c) {
      if ((resident & bit(c)) && f_.parent[std::size_t(c)] == n) return true;
    }
    return false;
  }

  const forest& f_;
  std::int64_t room_;
  bool bypass_;
  std::map<std::pair<std::size_t, set>, std::int64_t> known_;
};

}  // namespace naive
