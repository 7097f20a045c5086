// SPDX-License-Identifier: Apache-2.0
// Every policy beside its definition (support/naive_order.hpp): told the same events, and in a whole cache on
// thousands of small random traces.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <random>
#include <vector>

#include "kvcache/cache.hpp"
#include "support/environment.hpp"
#include "support/naive_order.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

const char* const texts[] = {"lru",
                             "lfu",
                             "fifo",
                             "slru",
                             "ttl:4",
                             "priority",
                             "gdsf:3",
                             "gdsf:even=0",
                             "s3_fifo",
                             "two_q",
                             "s3_fifo:30,uses=1",
                             "two_q:in=40,out=20"};

eviction_choice read(const char* text) {
  const parsed_eviction p = parse_eviction(text);
  REQUIRE(p.ok());
  return p.value;
}

/// One policy and its definition, under random events on few nodes.
class duel {
 public:
  duel(const eviction_choice& what, uint64_t seed)
      : random_(seed), policy_(make_eviction(what)), naive_(what, nodes, lanes), node_(nodes) {
    REQUIRE(policy_.create(nodes, lanes));
  }
  void step() {
    const int32_t i = any(nodes);
    node& n = node_[static_cast<size_t>(i)];
    if (any(16) == 0) {
      now_ += 500'000'000ull * static_cast<uint64_t>(any(3));
      policy_.advance(now_);
      naive_.advance(now_);
    } else if (n.where == absent) {
      store(i);
    } else if (n.where == pinned) {
      enter(i);
    } else if (any(2) == 0) {
      policy_.leave(node_id{i}, n.lane);
      naive_.leave(i);
      n.where = pinned;
    } else {
      take(any(lanes));
    }
    for (int32_t lane = 0; lane < lanes; ++lane) {
      REQUIRE(raw(policy_.victim(lane)) == naive_.victim(lane));
      REQUIRE(raw(policy_.expired(lane)) == naive_.expired(lane));
    }
  }
  int64_t taken() const { return taken_; }

 private:
  static constexpr int32_t nodes = 24, lanes = 2;
  enum place { absent, pinned, waiting };
  struct node {
    place where = absent;
    int32_t lane = 0;
    node_meta meta;
  };
  int32_t any(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }

  void store(int32_t i) {
    node& n = node_[static_cast<size_t>(i)];
    n = {pinned, any(lanes), {}};
    n.meta.born = n.meta.last = ++clock_ / 2;  // ties now and then
    n.meta.uses = 1;
    n.meta.depth = any(5);
    n.meta.priority = any(4) - 1;
    n.meta.priority_ms = static_cast<uint32_t>(any(3)) * 700;
    n.meta.print = random_() % 40;
    policy_.stored(node_id{i}, n.lane, n.meta);
    naive_.stored(i, n.lane, n.meta);
  }
  void enter(int32_t i) {
    node& n = node_[static_cast<size_t>(i)];
    n.meta.last = ++clock_ / 2;
    n.meta.uses += static_cast<uint32_t>(any(3));
    n.meta.time = any(4) == 0 ? now_ / 2 : now_;  // an inner node becomes a leaf long after it was used
    policy_.enter(node_id{i}, n.lane, n.meta);
    naive_.enter(i, n.meta);
    n.where = waiting;
  }
  void take(int32_t lane) {
    policy_.settle(lane);
    naive_.settle(lane);
    const node_id v = policy_.victim(lane);
    REQUIRE(raw(v) == naive_.victim(lane));
    if (v == no_node) return;
    node& n = node_[index(v)];
    policy_.evicted(v, lane, n.meta);
    naive_.evicted(raw(v));
    n.where = absent;
    ++taken_;
  }

  std::mt19937_64 random_;
  any_eviction policy_;
  naive_order naive_;
  std::vector<node> node_;
  uint64_t clock_ = 0, now_ = 0;
  int64_t taken_ = 0;
};

/// A cache without blocks: prefixes, and an order in which its leaves go. Requests come one at a time.
class naive_cache {
 public:
  naive_cache(const eviction_choice& what, int32_t capacity) : order_(what, capacity, 1), room_(capacity) {}

  void set_time(uint64_t ns) {
    now_ = ns;
    order_.advance(ns);
    for (int32_t v; (v = order_.expired(0)) >= 0;) evict(leaf_below(v));
  }
  /// Returns the units found.
  size_t request(const std::vector<token_id>& text, int32_t priority, uint32_t ms) {
    ++clock_;
    std::vector<int32_t> path;
    for (int32_t p = -1; path.size() < text.size();) {
      p = child(p, text[path.size()]);
      if (p < 0) break;
      path.push_back(p);
    }
    const size_t found = path.size();
    for (const int32_t x : path) use(x, priority, ms);
    while (alive_ + static_cast<int32_t>(text.size() - found) > room_) {
      order_.settle(0);
      const int32_t v = order_.victim(0);
      REQUIRE(v >= 0);
      evict(leaf_below(v));
    }
    while (path.size() < text.size()) path.push_back(store(path, text[path.size()], priority, ms));
    ++clock_;
    for (size_t i = path.size(); i-- > 0;) {
      node& n = at(path[i]);
      n.pinned = false;
      n.meta.last = clock_;
      n.meta.time = now_;
      if (order_.monotone() || leaf(path[i])) enter(path[i]);
    }
    return found;
  }
  int64_t evictions() const { return evictions_; }

 private:
  struct node {
    int32_t parent = -1;
    token_id token = 0;
    bool alive = false, pinned = false, candidate = false;
    node_meta meta;
  };
  node& at(int32_t i) { return node_[static_cast<size_t>(i)]; }
  int32_t child(int32_t parent, token_id token) {
    for (int32_t i = 0; i < static_cast<int32_t>(node_.size()); ++i) {
      if (at(i).alive && at(i).parent == parent && at(i).token == token) return i;
    }
    return -1;
  }
  bool leaf(int32_t p) {
    return std::none_of(node_.begin(), node_.end(), [&](const node& n) { return n.alive && n.parent == p; });
  }
  int32_t leaf_below(int32_t x) {
    for (int32_t i = 0; i < static_cast<int32_t>(node_.size()); ++i) {
      if (at(i).alive && at(i).parent == x) return leaf_below(i);
    }
    return x;
  }
  void enter(int32_t x) {
    order_.enter(x, at(x).meta);
    at(x).candidate = true;
  }
  void use(int32_t x, int32_t priority, uint32_t ms) {
    node& n = at(x);
    if (n.candidate) order_.leave(x);
    n.candidate = false;
    n.pinned = true;
    if (naive_order::level(n.meta, now_) != n.meta.priority) n.meta.priority = 0, n.meta.priority_ms = 0;
    const auto longer = [](uint32_t a, uint32_t b) { return a == 0 || b == 0 ? 0 : std::max(a, b); };
    if (priority == n.meta.priority) n.meta.priority_ms = longer(ms, n.meta.priority_ms);
    if (priority > n.meta.priority) n.meta.priority_ms = ms;
    n.meta.priority = std::max(priority, n.meta.priority);
    ++n.meta.uses;
  }
  // Ids are given as the index of the cache gives them: the one that came back last, then the lowest.
  int32_t store(const std::vector<int32_t>& path, token_id token, int32_t priority, uint32_t ms) {
    int32_t x = static_cast<int32_t>(node_.size());
    if (!free_.empty()) {
      x = free_.back();
      free_.pop_back();
    } else {
      node_.emplace_back();
    }
    node& n = at(x);
    n = {path.empty() ? -1 : path.back(), token, true, true, false, {}};
    n.meta.born = clock_;
    n.meta.uses = 1;
    n.meta.depth = static_cast<int32_t>(path.size());
    n.meta.priority = priority;
    n.meta.priority_ms = ms;
    n.meta.print = static_cast<uint64_t>(token) + 1;
    if (n.parent >= 0) n.meta.print += at(n.parent).meta.print * 10;  // the text itself, in decimal
    order_.stored(x, 0, n.meta);
    ++alive_;
    return x;
  }
  void evict(int32_t x) {
    order_.evicted(x);
    at(x).alive = false;
    free_.push_back(x);
    --alive_;
    ++evictions_;
    const int32_t p = at(x).parent;
    if (p >= 0 && !order_.monotone() && !at(p).pinned && leaf(p)) enter(p);
  }

  naive_order order_;
  std::vector<node> node_;
  std::vector<int32_t> free_;
  int32_t room_;
  int32_t alive_ = 0;
  uint64_t clock_ = 0, now_ = 0;
  int64_t evictions_ = 0;
};

struct random_trace {
  explicit random_trace(uint64_t seed) : random(seed) {}
  int32_t any(int32_t n) { return static_cast<int32_t>(random() % static_cast<uint64_t>(n)); }
  std::vector<token_id> text(int32_t longest) {
    std::vector<token_id> t(static_cast<size_t>(1 + any(longest)));
    for (token_id& x : t) x = any(3);
    return t;
  }
  std::mt19937_64 random;
};

// Plays one random trace into a cache of `capacity` units of one token and into the naive one.
void play(const eviction_choice& what, uint64_t seed, int64_t (&sum)[2]) {
  random_trace trace(seed);
  const int32_t capacity = 4 + trace.any(12);
  const group_config group{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 1, .head_dim_v = 1},
                           .block_size = 1,
                           .total = {capacity}};
  auto cache = basic_cache<dynamic>::create({.groups = {&group, 1}, .max_sequences = 1}, make_eviction(what));
  REQUIRE(cache);
  naive_cache naive(what, capacity);
  uint64_t now = 1;
  for (int i = 0; i < 40; ++i) {
    now += static_cast<uint64_t>(trace.any(3)) * 1'000'000'000;
    cache->set_time(now);
    naive.set_time(now);
    const std::vector<token_id> text = trace.text(std::min(capacity - 1, 8));
    const int32_t priority = trace.any(3) == 0 ? trace.any(4) - 1 : 0;
    const auto ms = static_cast<uint32_t>(priority == 0 ? 0 : trace.any(3) * 2000);
    std::vector<token_id> prompt = text;
    prompt.push_back(99);  // the last token of a prompt is always computed
    auto s = cache->open(prompt, scope::shared(), {.priority = priority, .priority_ms = ms});
    REQUIRE(s);
    const auto found = static_cast<size_t>(s->reused());
    REQUIRE(s->extend(static_cast<int32_t>(text.size() - found)));
    REQUIRE(*s->commit(text) == static_cast<int32_t>(text.size()));
    REQUIRE(s->close());
    REQUIRE(found == naive.request(text, priority, ms));
    REQUIRE(static_cast<int64_t>(cache->count().nodes_evicted) == naive.evictions());
    sum[0] += static_cast<int64_t>(found);
  }
  REQUIRE(cache->check_invariants() == nullptr);
  sum[1] += naive.evictions();
}

}  // namespace

TEST_CASE("every policy names the victim that its definition names, whatever comes and goes", "[order]") {
  const uint64_t seed = test_seed("order", 20261101);
  for (const char* text : texts) {
    const eviction_choice what = read(text);
    INFO(text << ", KVCACHE_TEST_SEED=" << seed);
    int64_t taken = 0;
    for (uint64_t k = 0; k < 8; ++k) {
      duel d(what, mix64(seed + k));
      for (int64_t i = 0; i < effort(2500); ++i) d.step();
      taken += d.taken();
    }
    CHECK(taken > effort(2500));
  }
}

TEST_CASE("a cache of any policy finds and evicts what the naive one does on thousands of small traces",
          "[order]") {
  const uint64_t seed = test_seed("traces", 20261102);
  for (const char* text : texts) {
    const eviction_choice what = read(text);
    int64_t sum[2] = {};
    for (uint64_t k = 0; k < static_cast<uint64_t>(effort(1000)); ++k) {
      INFO(text << ", KVCACHE_TEST_SEED=" << seed << ", trace " << k);
      play(what, mix64(seed + k), sum);
    }
    std::printf("%s: %lld units found, %lld evicted\n", text, static_cast<long long>(sum[0]),
                static_cast<long long>(sum[1]));
    CHECK(sum[0] > 0);
    CHECK(sum[1] > 0);
  }
}
