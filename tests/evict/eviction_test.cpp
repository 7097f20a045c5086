// SPDX-License-Identifier: Apache-2.0
// Conformance of eviction policies: every model beside a list of candidates that is searched anew each time.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kvcache/evict/any_eviction.hpp"
#include "kvcache/evict/fifo.hpp"
#include "kvcache/evict/lfu.hpp"
#include "kvcache/evict/lru.hpp"
#include "kvcache/evict/priority.hpp"
#include "kvcache/evict/slru.hpp"
#include "kvcache/evict/ttl.hpp"
#include "support/environment.hpp"

using namespace kvcache;

namespace {

struct candidate {
  node_id node;
  int32_t lane;
  node_meta meta;
  uint64_t entered;
};
using rank = std::tuple<uint64_t, uint64_t, int32_t>;

struct by_entry {
  static constexpr bool monotone = true;
  static rank of(const candidate& c) { return {c.entered, 0, 0}; }
};
struct by_uses {
  static constexpr bool monotone = false;
  static rank of(const candidate& c) { return {c.meta.uses, c.meta.last, raw(c.node)}; }
};
struct by_birth {
  static constexpr bool monotone = false;
  static rank of(const candidate& c) { return {c.meta.born, 0, raw(c.node)}; }
};
struct by_segment {
  static constexpr bool monotone = false;
  static rank of(const candidate& c) { return {c.meta.uses < 2 ? 0 : 1, c.meta.last, raw(c.node)}; }
};
struct by_level {
  static constexpr bool monotone = false;
  static rank of(const candidate& c) {
    return {static_cast<uint64_t>(c.meta.priority + 1000), c.meta.last, raw(c.node)};
  }
};
/// Deepest first: shows that a policy is one function.
struct depth_key {
  static uint64_t key(const node_meta& m) noexcept { return UINT64_MAX - static_cast<uint64_t>(m.depth); }
};
struct by_depth {
  static constexpr bool monotone = false;
  static rank of(const candidate& c) {
    return {UINT64_MAX - static_cast<uint64_t>(c.meta.depth), 0, raw(c.node)};
  }
};

template <class E>
struct plain {
  static E make() { return {}; }
};
template <class E>
struct erased {
  static any_eviction make() { return any_eviction(E{}); }
};
template <class Make, class Rank>
struct model {
  static auto make() { return Make::make(); }
  using order = Rank;
};
using models =
    std::tuple<model<plain<lru>, by_entry>, model<plain<lfu>, by_uses>, model<plain<fifo>, by_birth>,
               model<plain<slru>, by_segment>, model<plain<ttl>, by_entry>,
               model<plain<priority_levels>, by_level>, model<plain<ranked<priority_key>>, by_level>,
               model<erased<lru>, by_entry>, model<erased<lfu>, by_uses>,
               model<erased<priority_levels>, by_level>, model<plain<ranked<depth_key>>, by_depth>>;

struct oracle {
  std::vector<candidate> all;
  uint64_t clock = 0;

  template <class Rank>
  node_id victim(int32_t lane) const {
    const candidate* best = nullptr;
    for (const candidate& c : all) {
      if (c.lane == lane && (best == nullptr || Rank::of(c) < Rank::of(*best))) best = &c;
    }
    return best == nullptr ? no_node : best->node;
  }
};

node_meta meta_of(uint64_t last, uint32_t uses, int32_t depth = 0) {
  node_meta m;
  m.last = last;
  m.uses = uses;
  m.depth = depth;
  return m;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("a policy names the victim that a search over all candidates finds", "[evict]",
                        models) {
  std::mt19937_64 random(test::test_seed("eviction", 77));
  const auto any = [&](size_t n) { return static_cast<int32_t>(random() % n); };
  constexpr int32_t nodes = 40, lanes = 3;
  auto e = TestType::make();
  REQUIRE(e.create(nodes, lanes));
  CHECK(e.monotone() == TestType::order::monotone);
  oracle o;
  for (int64_t i = 0; i < test::effort(30000); ++i) {
    const node_id r{any(nodes)};
    const auto it = std::find_if(o.all.begin(), o.all.end(), [&](auto& c) { return c.node == r; });
    if (it != o.all.end()) {
      const int32_t lane = it->lane;
      o.all.erase(it);
      e.leave(r, lane);
    } else if (any(8) == 0) {  // the victim goes
      const int32_t lane = any(lanes);
      const node_id v = e.victim(lane);
      if (v != no_node) {
        o.all.erase(std::find_if(o.all.begin(), o.all.end(), [&](auto& c) { return c.node == v; }));
        e.leave(v, lane);
      }
    } else {
      // Few different values, so that ties are common.
      candidate c{r, any(lanes), meta_of(random() % 3, static_cast<uint32_t>(random() % 3), any(3)),
                  ++o.clock};
      c.meta.born = random() % 3;
      c.meta.priority = any(3) - 1;
      o.all.push_back(c);
      e.enter(r, c.lane, c.meta);
    }
    for (int32_t lane = 0; lane < lanes; ++lane) {
      REQUIRE(e.victim(lane) == o.template victim<typename TestType::order>(lane));
      REQUIRE(e.victim(lane) == e.victim(lane));  // asking changes nothing
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a lane without candidates has no victim", "[evict]", models) {
  auto e = TestType::make();
  REQUIRE(e.create(4, 2));
  CHECK(e.victim(0) == no_node);
  e.enter(node_id{3}, 1, {});
  CHECK(e.victim(0) == no_node);
  CHECK(e.victim(1) == node_id{3});
  e.leave(node_id{3}, 1);
  CHECK(e.victim(1) == no_node);
}

TEMPLATE_LIST_TEST_CASE("creation starts over", "[evict]", models) {
  auto e = TestType::make();
  REQUIRE(e.create(8, 1));
  for (int32_t i = 0; i < 8; ++i) e.enter(node_id{i}, 0, {});
  REQUIRE(e.create(8, 2));
  CHECK(e.victim(0) == no_node);
  CHECK(e.victim(1) == no_node);
  e.enter(node_id{5}, 1, {});
  CHECK(e.victim(1) == node_id{5});
}

TEMPLATE_LIST_TEST_CASE("a policy for no nodes can be made", "[evict]", models) {
  auto e = TestType::make();
  REQUIRE(e.create(0, 1));
  CHECK(e.victim(0) == no_node);
}

TEST_CASE("least recently used goes by the order of release, whatever the stamps say", "[evict]") {
  lru e;
  REQUIRE(e.create(4, 1));
  e.enter(node_id{2}, 0, meta_of(900, 9));  // a clock that ran backwards does not matter
  e.enter(node_id{0}, 0, meta_of(5, 1));
  CHECK(e.victim(0) == node_id{2});
  e.leave(node_id{2}, 0);
  e.enter(node_id{2}, 0, meta_of(1, 1));
  CHECK(e.victim(0) == node_id{0});
}

TEST_CASE("least frequently used prefers fewer uses, then the older access, then the lower id", "[evict]") {
  lfu e;
  REQUIRE(e.create(8, 1));
  std::vector<node_id> gone;
  e.enter(node_id{7}, 0, meta_of(3, 1));
  e.enter(node_id{1}, 0, meta_of(9, 1));
  e.enter(node_id{4}, 0, meta_of(3, 1));
  e.enter(node_id{0}, 0, meta_of(1, 2));
  while (e.victim(0) != no_node) {
    gone.push_back(e.victim(0));
    e.leave(gone.back(), 0);
  }
  CHECK(gone == std::vector<node_id>{node_id{4}, node_id{7}, node_id{1}, node_id{0}});
}

TEST_CASE("a count of uses that no longer fits its bits saturates instead of wrapping", "[evict]") {
  CHECK(lfu_key::key(meta_of(0, UINT32_MAX)) > lfu_key::key(meta_of((uint64_t{1} << 40) - 1, 1000)));
  CHECK(lfu_key::key(meta_of(5, UINT32_MAX)) == lfu_key::key(meta_of(5, 1u << 24)));
  CHECK(lfu_key::key(meta_of(5, 1)) < lfu_key::key(meta_of(4, 2)));
  // The clock wraps at 2^40 without spilling into the uses.
  CHECK(lfu_key::key(meta_of(uint64_t{1} << 40, 1)) < lfu_key::key(meta_of(0, 2)));
}

TEST_CASE("an empty choice of policy evicts nothing and cannot be created", "[evict]") {
  any_eviction none;
  CHECK_FALSE(none.holds());
  CHECK(none.victim(0) == no_node);
  const status s = none.create(4, 1);
  CHECK(s.code == errc::bad_argument);
  CHECK(std::string(s.field) == "eviction");
  any_eviction some(lru{});
  CHECK(some.holds());
  none = std::move(some);
  CHECK(none.holds());
  CHECK_FALSE(some.holds());
  CHECK(none.create(4, 1));
}
