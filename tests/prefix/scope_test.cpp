// SPDX-License-Identifier: Apache-2.0
// Who shares with whom: by the bytes of a scope, and as a cache acts on it. Isolation tests come in pairs:
// the same scope hits and the other one misses, so that a cache which never hits does not pass.
#include "kvcache/prefix/scope.hpp"

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/cache.hpp"

using namespace kvcache;

namespace {

using text = std::vector<token_id>;

text ascending(size_t n) {
  text t(n);
  for (size_t i = 0; i < n; ++i) t[i] = static_cast<token_id>(i);
  return t;
}

cache made(int32_t block_size = 16, int32_t max_scopes = 64) {
  const group_config g{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                       .block_size = block_size,
                       .total = {256}};
  auto c = cache::create({.groups = {&g, 1}, .max_sequences = 16, .max_scopes = max_scopes});
  REQUIRE(c);
  return *std::move(c);
}
void publish(cache& c, const text& t, const scope& who) {
  auto s = c.open(t, who);
  REQUIRE(s);
  REQUIRE(s->extend(static_cast<int32_t>(t.size()) - s->held()));
  REQUIRE(s->commit(t));
}
/// Tokens that a sequence gets from the cache; one more token than `t` is asked, so that all of `t` may hit.
int32_t hit(cache& c, text t, const scope& who) {
  t.push_back(-1);
  std::vector<node_id> scratch(64);
  const int32_t peeked = c.peek(t, who, scratch);
  auto s = c.open(t, who);
  REQUIRE(s);
  CHECK(s->reused() == peeked);
  return s->reused();
}

/// Two scopes that must not share.
void isolated(const scope& a, const scope& b) {
  cache c = made();
  const text t = ascending(48);
  publish(c, t, a);
  CHECK(hit(c, t, a) == 48);
  CHECK(hit(c, t, b) == 0);
  publish(c, t, b);
  CHECK(hit(c, t, b) == 48);
  CHECK(hit(c, t, a) == 48);
  CHECK(c.count().nodes == 6);
  CHECK(c.check_invariants() == nullptr);
}

void refused(const status& s, const char* field, int64_t value) {
  CHECK(s.code == errc::bad_argument);
  CHECK(std::string(s.field) == field);
  CHECK(s.value == value);
}

}  // namespace

TEST_CASE("adapter x, salt x, media x, the empty salt and no salt are different scopes (S3)") {
  const std::vector<scope> all{
      scope::shared(),
      scope::tenant(""),
      scope::tenant("x"),
      scope::tenant("xx"),
      scope::shared().adapter("x", 0),
      scope::shared().adapter("", 0),
      scope::shared().media("x"),
      scope::shared().media(""),
      scope::shared().weights(0),
      scope::tenant("x").adapter("x", 0),
      scope::tenant("x").media("x"),
  };
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t k = i + 1; k < all.size(); ++k) {
      INFO(i << " against " << k);
      isolated(all[i], all[k]);
    }
  }
}

TEST_CASE("the same adapter name with new weights misses, and hits again under its own generation (B23)") {
  isolated(scope::shared().adapter("tone", 1), scope::shared().adapter("tone", 2));
  isolated(scope::shared().adapter("tone", 1), scope::shared().adapter("tone", 1 + (uint64_t{1} << 32)));
  isolated(scope::shared().weights(7), scope::shared().weights(7 + (uint64_t{1} << 32)));
}

TEST_CASE("equal placeholder tokens with different pictures or embeddings miss (T9, B25)") {
  isolated(scope::shared().media("digest of one picture"), scope::shared().media("digest of another one"));
}

TEST_CASE("media digests are compared whole, not by their low bits (C26)") {
  const std::string a{"\x12\x34\x56\x78\x9a\xbc\xde\xf0", 8};
  std::string b = a;
  b[0] = '\x13';  // equal in the low 16, 32 and 56 bits
  isolated(scope::shared().media(a), scope::shared().media(b));
  std::string high = a;
  high[7] = '\x00';
  isolated(scope::shared().media(a), scope::shared().media(high));
}

TEST_CASE("digests with zero bytes inside are compared to their end") {
  isolated(scope::shared().media(std::string_view("a\0b", 3)),
           scope::shared().media(std::string_view("a\0c", 3)));
  isolated(scope::tenant(std::string_view("\0", 1)), scope::tenant(""));
}

TEST_CASE("parts cannot be shifted into each other: their lengths are part of the key") {
  isolated(scope::shared().media("ab").media("c"), scope::shared().media("a").media("bc"));
  isolated(scope::shared().media("ab"), scope::shared().media("a").media("b"));
  isolated(scope::shared().media("a").media("b"), scope::shared().media("b").media("a"));
}

TEST_CASE("a salt that imitates the bytes of another scope does not enter it") {
  const std::string imitation = std::string(scope::tenant("x").key(0)) + std::string(scope::shared().key(0));
  isolated(scope::tenant(imitation), scope::tenant("x"));
  const std::string tail(scope::shared().media("m").key(0).substr(3));
  isolated(scope::tenant(tail), scope::shared().media("m"));
  // One part whose value is two parts with their headers: behind "shared" and one header come "a", a header
  // and "b".
  const scope two = scope::shared().media("a").media("b");
  isolated(two, scope::shared().media(two.key(0).substr(6)));
}

TEST_CASE("a scope too long to keep is refused by every verb, and a picture is not silently cut off") {
  cache c = made();
  const std::string longest(scope::max_bytes - 3, 's');
  CHECK(scope::tenant(longest).check());
  const scope over = scope::tenant(longest + "t");
  refused(over.check(), "scope", static_cast<int64_t>(scope::max_bytes) - 2);
  const stats before = c.count();
  refused(c.open(ascending(8), over).error(), "scope", static_cast<int64_t>(scope::max_bytes) - 2);
  refused(c.open(ascending(8), scope::tenant(longest).media("d")).error(), "scope", 1);
  CHECK(c.count().sequences_opened == before.sequences_opened);
  std::vector<node_id> scratch(4);
  CHECK(c.peek(ascending(64), over, scratch) == 0);
  CHECK(scope::tenant(std::string(1 << 20, 'x')).check().code == errc::bad_argument);
  CHECK(c.check_invariants() == nullptr);
}

TEST_CASE("segments out of order, too many or nested are refused") {
  refused(scope::shared().from(0, scope::tenant("x")).check(), "scope.from", 0);
  refused(scope::shared().from(-4, scope::tenant("x")).check(), "scope.from", -4);
  refused(scope::shared().from(32, scope::tenant("x")).from(32, scope::tenant("y")).check(), "scope.from",
          32);
  const scope nested = scope::shared().from(16, scope::tenant("x"));
  refused(scope::shared().from(32, nested).check(), "scope.from", 32);
  scope many = scope::shared();
  for (int32_t i = 1; i < scope::max_segments; ++i) CHECK(many.from(16 * i, scope::tenant("x")).check());
  refused(many.from(256, scope::tenant("x")).check(), "scope.from", 256);
  const scope bad = scope::tenant(std::string(scope::max_bytes, 'x'));
  CHECK(scope::shared().from(16, bad).check().code == errc::bad_argument);
}

TEST_CASE("a public system prompt is shared and what follows is the tenant's own") {
  cache c = made();
  const text t = ascending(96);
  const auto of = [](const char* name) { return scope::shared().from(32, scope::tenant(name)); };
  publish(c, t, of("a"));
  CHECK(hit(c, t, of("a")) == 96);
  CHECK(hit(c, t, of("b")) == 32);
  CHECK(hit(c, t, scope::shared()) == 32);
  CHECK(hit(c, t, scope::tenant("a")) == 0);
  publish(c, t, of("b"));
  CHECK(hit(c, t, of("b")) == 96);
  CHECK(c.count().nodes == 2 + 4 + 4);
  CHECK(c.check_invariants() == nullptr);
}

TEST_CASE("a unit that straddles the border is private") {
  for (int32_t border = 33; border < 48; ++border) {
    cache c = made();
    const text t = ascending(96);
    publish(c, t, scope::shared().from(border, scope::tenant("a")));
    CHECK(hit(c, t, scope::shared().from(border, scope::tenant("a"))) == 96);
    CHECK(hit(c, t, scope::shared().from(border, scope::tenant("b"))) == 32);
    CHECK(hit(c, t, scope::shared()) == 32);
  }
}

TEST_CASE("texts with a picture share what comes before it, and everything only with the same picture (T9)") {
  cache c = made();
  const text t = ascending(96);
  const auto with = [](const char* digest) {
    return scope::shared().from(40, scope::shared().media(digest));
  };
  publish(c, t, with("cat"));
  CHECK(hit(c, t, with("cat")) == 96);
  CHECK(hit(c, t, with("dog")) == 32);
  CHECK(hit(c, t, scope::shared()) == 32);
}

TEST_CASE("the key of a unit that spans two pictures carries both (T9)") {
  const auto with = [](const char* first, const char* second) {
    return scope::shared().from(20, scope::shared().media(first)).from(28, scope::shared().media(second));
  };
  cache c = made();
  const text t = ascending(64);
  publish(c, t, with("cat", "tree"));
  CHECK(hit(c, t, with("cat", "tree")) == 64);
  CHECK(hit(c, t, with("dog", "tree")) == 16);
  CHECK(hit(c, t, with("cat", "lake")) == 16);
  CHECK(hit(c, t, scope::shared().from(20, scope::shared().media("tree"))) == 16);
}

TEST_CASE("the key of the first unit carries every segment that begins in it") {
  const auto with = [](const char* first, const char* second) {
    return scope::shared().media(first).from(5, scope::shared().media(second));
  };
  cache c = made();
  const text t = ascending(32);
  publish(c, t, with("cat", "tree"));
  CHECK(hit(c, t, with("cat", "tree")) == 32);
  CHECK(hit(c, t, with("dog", "tree")) == 0);
  CHECK(hit(c, t, scope::shared().media("tree")) == 0);
}

TEST_CASE("segments of one unit that do not fit a key together are refused, not shortened") {
  const std::string half(scope::max_bytes / 2, 'h');
  cache c = made();
  const scope together = scope::tenant(half).from(4, scope::tenant(half));
  REQUIRE(together.check());
  CHECK(c.open(ascending(32), together).error().code == errc::bad_argument);
  CHECK(std::string(c.open(ascending(32), together).error().field) == "scope");
  std::vector<node_id> scratch(4);
  CHECK(c.peek(ascending(32), together, scratch) == 0);
  CHECK(c.open(ascending(32), scope::tenant(half).from(16, scope::tenant(half))));
  CHECK(c.check_invariants() == nullptr);
}

TEST_CASE("more scopes in use than configured are refused, and one that is left behind makes room") {
  cache c = made(16, 2);
  auto a = c.open(ascending(4), scope::tenant("a"));
  auto b = c.open(ascending(4), scope::tenant("b"));
  REQUIRE(a);
  REQUIRE(b);
  const status s = c.open(ascending(4), scope::tenant("c")).error();
  CHECK(s.code == errc::out_of_scopes);
  CHECK(std::string(s.field) == "max_scopes");
  CHECK(s.value == 2);
  CHECK(c.open(ascending(4), scope::tenant("a")));
  // A scope of two segments needs two places; the one it got first is given back on refusal.
  REQUIRE(b->close());
  CHECK(c.open(ascending(4), scope::tenant("c").from(16, scope::tenant("d"))).error().code ==
        errc::out_of_scopes);
  CHECK(c.check_invariants() == nullptr);
  CHECK(c.open(ascending(4), scope::tenant("c")));
}

TEST_CASE("a scope stays known while something of it is cached, and its id is reused afterwards") {
  cache c = made(16, 2);
  const text t = ascending(48);
  publish(c, t, scope::tenant("a"));
  CHECK(hit(c, t, scope::tenant("b")) == 0);  // takes the other place and leaves it
  CHECK(hit(c, t, scope::tenant("c")) == 0);
  CHECK(hit(c, t, scope::tenant("a")) == 48);
}

TEST_CASE("caches of other formats never meet: the codec is part of every key") {
  scope_table a, b;
  REQUIRE(a.create(4, 1));
  REQUIRE(b.create(4, 2));
  // The table compares whole keys, so the same table under another codec would miss; ids are its own.
  const auto ids = a.acquire(scope::tenant("x"), 16);
  REQUIRE(ids);
  CHECK(a.find(scope::tenant("x"), 16).id[0] == ids->id[0]);
  CHECK(b.find(scope::tenant("x"), 16).id[0] == -1);
}

TEST_CASE("references of a scope are counted, and a bad scope finds nothing") {
  scope_table t;
  CHECK(std::string(t.create(0, 0).field) == "max_scopes");
  REQUIRE(t.create(4, 0));
  const auto a = t.acquire(scope::tenant("x"), 16);
  const auto b = t.acquire(scope::tenant("x"), 16);
  REQUIRE(a);
  REQUIRE(b);
  CHECK(*a == *b);
  CHECK(t.references(a->id[0]) == 2);
  CHECK(t.size() == 1);
  t.release(*a);
  CHECK(t.size() == 1);
  t.release(*b);
  CHECK(t.size() == 0);
  CHECK(t.find(scope::tenant("x"), 16).id[0] == -1);
  CHECK(t.find(scope::tenant(std::string(300, 'x')), 16).count == 0);
}

TEST_CASE("a sequence's scope ids name the segment of each unit's last token") {
  scope_table t;
  REQUIRE(t.create(8, 0));
  const auto ids = t.acquire(scope::shared().from(40, scope::tenant("a")).from(64, scope::tenant("b")), 16);
  REQUIRE(ids);
  REQUIRE(ids->count == 3);
  for (const int32_t unit : {0, 1}) CHECK(ids->at(unit) == ids->id[0]);
  for (const int32_t unit : {2, 3}) CHECK(ids->at(unit) == ids->id[1]);
  for (const int32_t unit : {4, 5, 1000000}) CHECK(ids->at(unit) == ids->id[2]);
}
