// SPDX-License-Identifier: Apache-2.0
// Conformance of prefix indexes: random operations beside a map of whole keys. The hash must not matter, so
// the tree also runs with hashes that are constant or nearly so.
#include <catch2/catch.hpp>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/violations.hpp"
#include "kvcache/prefix/radix_tree.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using test::violations;

namespace {

struct constant_hash {
  uint32_t operator()(int32_t, node_id, std::span<const token_id>) const noexcept { return 42; }
};
/// Collides often, and at the end of the table, where probing wraps round.
struct crowded_hash {
  uint32_t operator()(int32_t scope, node_id parent, std::span<const token_id> t) const noexcept {
    return UINT32_MAX - (unit_hash{}(scope, parent, t) & 3);
  }
};
using models = std::tuple<radix_tree, basic_radix_tree<constant_hash>, basic_radix_tree<crowded_hash>>;

using text = std::vector<token_id>;

template <class X>
X made(int32_t nodes, int32_t unit) {
  X x;
  REQUIRE(x.create(nodes, unit));
  return x;
}

/// The naive index: whole keys in a map.
struct oracle {
  struct entry {
    int32_t scope;
    node_id parent;
    text tokens;
    auto operator<=>(const entry&) const = default;
  };
  std::map<entry, node_id> node;
  std::map<node_id, entry> key;

  int32_t children(node_id r) const {
    int32_t n = 0;
    for (const auto& [id, e] : key) n += e.parent == r;
    return n;
  }
  std::vector<node_id> match(int32_t scope, node_id parent, const text& t, size_t unit, size_t most) const {
    std::vector<node_id> out;
    for (size_t i = 0; i + unit <= t.size() && out.size() < most; i += unit) {
      const auto it = node.find({scope, parent, text(t.begin() + long(i), t.begin() + long(i + unit))});
      if (it == node.end()) break;
      out.push_back(parent = it->second);
    }
    return out;
  }
};

template <class X>
std::set<node_id> children_of(const X& x, node_id r) {
  std::set<node_id> s;
  for (node_id c = x.first_child(r); c != no_node; c = x.sibling(c)) REQUIRE(s.insert(c).second);
  return s;
}

template <class X>
void compare(const X& x, const oracle& o) {
  REQUIRE(x.size() == static_cast<int32_t>(o.key.size()));
  std::map<node_id, std::set<node_id>> below;
  for (const auto& [id, e] : o.key) {
    below[e.parent].insert(id);
    REQUIRE(x.parent(id) == e.parent);
    REQUIRE(x.scope_of(id) == e.scope);
    REQUIRE(text(x.tokens(id).begin(), x.tokens(id).end()) == e.tokens);
  }
  REQUIRE(children_of(x, no_node) == below[no_node]);
  for (const auto& [id, e] : o.key) {
    REQUIRE(x.leaf(id) == below[id].empty());
    REQUIRE(children_of(x, id) == below[id]);
  }
}

template <class X>
void random_walk(int32_t unit, int32_t nodes, int64_t steps, std::mt19937_64& random) {
  const auto any = [&](size_t n) { return static_cast<int32_t>(random() % n); };
  X x = made<X>(nodes, unit);
  oracle o;
  const auto some_node = [&] {
    if (o.key.empty() || any(4) == 0) return no_node;
    auto it = o.key.begin();
    std::advance(it, any(o.key.size()));
    return it->first;
  };
  const auto some_text = [&](size_t n) {
    text t(n);
    for (token_id& v : t) v = any(2);
    if (!t.empty()) t.back() = any(3) - 1;
    return t;
  };
  for (int64_t i = 0; i < steps; ++i) {
    const int32_t scope = any(2);
    const node_id parent = some_node();
    if (const int32_t what = any(10); what < 5) {
      const oracle::entry e{scope, parent, some_text(static_cast<size_t>(unit))};
      const inserted in = x.insert(scope, parent, e.tokens);
      if (const auto it = o.node.find(e); it != o.node.end()) {
        REQUIRE(in.node == it->second);
        REQUIRE_FALSE(in.fresh);
      } else if (static_cast<int32_t>(o.key.size()) == nodes) {
        REQUIRE(in.node == no_node);
      } else {
        REQUIRE(in.fresh);
        REQUIRE(o.key.count(in.node) == 0);
        o.node[e] = in.node;
        o.key[in.node] = e;
      }
    } else if (what < 8) {
      if (parent == no_node || o.children(parent) != 0) continue;
      x.erase(parent);
      o.node.erase(o.key[parent]);
      o.key.erase(parent);
    } else {
      const text t = some_text(random() % static_cast<size_t>(5 * unit));
      std::vector<node_id> out(random() % 6, no_node);
      const auto expected = o.match(scope, parent, t, static_cast<size_t>(unit), out.size());
      const int32_t n = x.match(scope, parent, t, out);
      REQUIRE(std::vector<node_id>(out.begin(), out.begin() + n) == expected);
    }
    if (i % 16 == 0) compare(x, o);
  }
  compare(x, o);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("an index agrees with a map of whole keys after random operations (B26)", "[prefix]",
                        models) {
  std::mt19937_64 random(test::test_seed("prefix_index", 1234));
  violations watch;
  for (const int32_t unit : {1, 2, 3, 8}) random_walk<TestType>(unit, 60, test::effort(4000), random);
  random_walk<TestType>(4, 7, test::effort(4000), random);  // full most of the time
  CHECK(watch.take() == 0);
}

TEMPLATE_LIST_TEST_CASE("units that differ in any one token, or in swapped tokens, are different", "[prefix]",
                        models) {
  TestType x = made<TestType>(64, 16);
  text base(16);
  for (int i = 0; i < 16; ++i) base[static_cast<size_t>(i)] = 1000 + 3 * i;
  std::set<node_id> seen{x.insert(0, no_node, base).node};
  for (size_t i = 0; i < 16; ++i) {
    text t = base;
    t[i] ^= 1 << 16;  // equal in the low 16 bits
    CHECK(seen.insert(x.insert(0, no_node, t).node).second);
    if (i == 15) break;
    t = base;
    t[i] += 31;  // the pair of changes that a polynomial hash of base 31 does not see
    t[i + 1] -= 1;
    CHECK(seen.insert(x.insert(0, no_node, t).node).second);
    t = base;
    std::swap(t[i], t[i + 1]);
    CHECK(seen.insert(x.insert(0, no_node, t).node).second);
  }
  CHECK(x.size() == static_cast<int32_t>(seen.size()));
}

TEMPLATE_LIST_TEST_CASE("scope and parent are part of a unit's identity", "[prefix]", models) {
  TestType x = made<TestType>(8, 2);
  const text t{5, 6};
  const node_id a = x.insert(0, no_node, t).node;
  const node_id b = x.insert(1, no_node, t).node;
  const node_id c = x.insert(0, a, t).node;
  const node_id d = x.insert(0, b, t).node;
  const node_id e = x.insert(1, a, t).node;
  CHECK(std::set<node_id>{a, b, c, d, e}.size() == 5);
  CHECK_FALSE(x.insert(1, a, t).fresh);
  std::vector<node_id> out(4);
  CHECK(x.match(-1, no_node, t, out) == 0);  // a scope that nobody has
  CHECK(x.match(1, a, t, out) == 1);
  CHECK(out[0] == e);
}

TEMPLATE_LIST_TEST_CASE("a lookup changes nothing", "[prefix]", models) {
  TestType x = made<TestType>(16, 2);
  const text t{1, 2, 3, 4, 5, 6, 7};
  node_id r = x.insert(0, no_node, std::span(t).first(2)).node;
  r = x.insert(0, r, std::span(t).subspan(2, 2)).node;
  const TestType& c = x;
  std::vector<node_id> first(4, no_node), second(4, no_node);
  CHECK(c.match(0, no_node, t, first) == 2);
  for (int i = 0; i < 10; ++i) CHECK(c.match(0, no_node, text{1, 2, 9, 9}, second) == 1);
  CHECK(c.match(0, no_node, t, second) == 2);
  CHECK(first == second);
  CHECK(x.size() == 2);
}

TEMPLATE_LIST_TEST_CASE("a lookup writes no more nodes than fit, and follows whole units only", "[prefix]",
                        models) {
  TestType x = made<TestType>(16, 3);
  const text t{1, 2, 3, 4, 5, 6, 7, 8, 9};
  node_id r = no_node;
  for (size_t i = 0; i < 9; i += 3) r = x.insert(0, r, std::span(t).subspan(i, 3)).node;
  std::vector<node_id> out(8, no_node);
  for (size_t n = 0; n <= 9; ++n) {
    CHECK(x.match(0, no_node, std::span(t).first(n), out) == static_cast<int32_t>(n / 3));
  }
  for (size_t n = 0; n <= 3; ++n) {
    std::fill(out.begin(), out.end(), no_node);
    CHECK(x.match(0, no_node, t, std::span(out).first(n)) == static_cast<int32_t>(n));
    for (size_t i = n; i < out.size(); ++i) CHECK(out[i] == no_node);
  }
}

TEMPLATE_LIST_TEST_CASE("erasing an inner node, a free node or none at all is detected and changes nothing",
                        "[prefix]", models) {
  TestType x = made<TestType>(8, 1);
  const node_id a = x.insert(0, no_node, text{1}).node;
  const node_id b = x.insert(0, a, text{2}).node;
  const node_id c = x.insert(0, a, text{3}).node;
  violations watch;
  x.erase(a);
  CHECK(watch.take() == 1);
  x.erase(c);
  CHECK(watch.take() == 0);
  x.erase(c);
  CHECK(watch.take() == 1);
  x.erase(no_node);
  x.erase(node_id{8});
  x.erase(node_id{7});
  CHECK(watch.take() == 3);
  std::vector<node_id> out(2);
  CHECK(x.match(0, no_node, text{1, 2}, out) == 2);
  CHECK(out == std::vector<node_id>{a, b});
  CHECK(x.size() == 2);
}

TEMPLATE_LIST_TEST_CASE("a unit of the wrong length is detected and not inserted", "[prefix]", models) {
  TestType x = made<TestType>(8, 4);
  violations watch;
  CHECK(x.insert(0, no_node, text{1, 2, 3}).node == no_node);
  CHECK(x.insert(0, no_node, text{1, 2, 3, 4, 5}).node == no_node);
  CHECK(x.insert(0, no_node, text{}).node == no_node);
  CHECK(watch.take() == 3);
  CHECK(x.size() == 0);
}

TEMPLATE_LIST_TEST_CASE("bad sizes are refused and leave the index unchanged", "[prefix]", models) {
  TestType x = made<TestType>(4, 2);
  const node_id a = x.insert(0, no_node, text{1, 2}).node;
  CHECK(std::string(x.create(-1, 2).field) == "nodes");
  CHECK(std::string(x.create(INT32_MAX, 2).field) == "nodes");
  CHECK(std::string(x.create(4, 0).field) == "unit");
  CHECK(x.create(4, -2).value == -2);
  CHECK(x.size() == 1);
  std::vector<node_id> out(1);
  CHECK(x.match(0, no_node, text{1, 2}, out) == 1);
  CHECK(out[0] == a);
}

TEMPLATE_LIST_TEST_CASE("creation starts over with the ids of a new index", "[prefix]", models) {
  TestType x = made<TestType>(4, 2);
  (void)x.insert(0, no_node, text{1, 2});
  (void)x.insert(0, no_node, text{3, 4});
  REQUIRE(x.create(4, 1));
  TestType y = made<TestType>(4, 1);
  CHECK(x.size() == 0);
  CHECK(x.first_child(no_node) == no_node);
  for (token_id t = 0; t < 5; ++t) {
    const inserted a = x.insert(0, no_node, {&t, 1}), b = y.insert(0, no_node, {&t, 1});
    CHECK(a.node == b.node);
    CHECK(a.fresh == b.fresh);
  }
}

TEST_CASE("an index without room inserts nothing and finds nothing", "[prefix]") {
  radix_tree x = made<radix_tree>(0, 2);
  CHECK(x.insert(0, no_node, text{1, 2}).node == no_node);
  std::vector<node_id> out(2);
  CHECK(x.match(0, no_node, text{1, 2}, out) == 0);
  CHECK(x.size() == 0);
}

TEST_CASE("the index of no reuse misses always", "[prefix]") {
  no_index x;
  REQUIRE(x.create(100, 16));
  CHECK(x.unit() == 16);
  CHECK(x.capacity() == 0);
  const text t(32, 1);
  CHECK(x.insert(0, no_node, std::span(t).first(16)).node == no_node);
  std::vector<node_id> out(2);
  CHECK(x.match(0, no_node, t, out) == 0);
  CHECK(x.size() == 0);
  CHECK(x.first_child(no_node) == no_node);
  violations watch;
  x.erase(no_node);
  CHECK(watch.take() == 0);
}

namespace {

/// Counts how often the hash is asked for.
struct counting_hash {
  static inline int64_t calls = 0;
  uint32_t operator()(int32_t scope, node_id parent, std::span<const token_id> t) const noexcept {
    ++calls;
    return unit_hash{}(scope, parent, t);
  }
};

}  // namespace

TEST_CASE("a chain of only children is followed without hashing", "[prefix]") {
  auto x = made<basic_radix_tree<counting_hash>>(1000, 4);
  text t(4000);
  for (size_t i = 0; i < t.size(); ++i) t[i] = static_cast<token_id>(i);
  node_id r = no_node;
  for (size_t i = 0; i < t.size(); i += 4) r = x.insert(0, r, std::span(t).subspan(i, 4)).node;
  std::vector<node_id> out(1000);
  counting_hash::calls = 0;
  CHECK(x.match(0, no_node, t, out) == 1000);
  CHECK(counting_hash::calls == 1);  // the first unit
}

TEST_CASE("erasing hashes nothing and keeps every other unit findable", "[prefix]") {
  auto x = made<basic_radix_tree<counting_hash>>(512, 1);
  std::vector<node_id> id;
  for (token_id t = 0; t < 512; ++t) id.push_back(x.insert(0, no_node, {&t, 1}).node);
  std::mt19937_64 random(5);
  std::vector<token_id> order(512);
  for (token_id t = 0; t < 512; ++t) order[static_cast<size_t>(t)] = t;
  std::shuffle(order.begin(), order.end(), random);
  for (size_t n = 0; n < order.size(); ++n) {
    counting_hash::calls = 0;
    x.erase(id[static_cast<size_t>(order[n])]);
    REQUIRE(counting_hash::calls == 0);
    node_id out;
    for (size_t k = 0; k < order.size(); k += 7)
      REQUIRE(x.match(0, no_node, {&order[k], 1}, {&out, 1}) == (k > n));
  }
  CHECK(x.size() == 0);
}
