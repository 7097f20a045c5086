// SPDX-License-Identifier: Apache-2.0
// Conformance of block allocators: every model runs the same random operations beside a naive record, and
// breaks the contract in the same ways.
#include <catch2/catch.hpp>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/violations.hpp"
#include "kvcache/blocks/block_pool.hpp"
#include "kvcache/blocks/checked.hpp"
#include "kvcache/blocks/contiguous.hpp"
#include "kvcache/blocks/fail_nth.hpp"
#include "support/environment.hpp"

using namespace kvcache;
using test::violations;

namespace {

constexpr int32_t region = 4;
constexpr int32_t total = 24;

template <class A>
A made(int32_t n = total) {
  A a;
  REQUIRE(a.create(blocks{n}, region));
  return a;
}
template <class A>
std::vector<block_id> take(A& a, int32_t n) {
  std::vector<block_id> out(static_cast<size_t>(n), no_block);
  REQUIRE(a.admit(n));
  REQUIRE(a.allocate(out));
  return out;
}
template <class A>
void give(A& a, block_id b) {
  a.release({&b, 1});
}

/// Everything that can be seen of an allocator.
template <class A>
std::vector<int32_t> seen(const A& a) {
  std::vector<int32_t> all{a.free_blocks(), a.cached_blocks(), a.total_blocks()};
  for (int32_t i = 0; i < a.total_blocks(); ++i) {
    all.insert(all.end(), {a.shares(block_id{i}), a.indexed(block_id{i}), a.immutable(block_id{i})});
  }
  return all;
}

/// The record: shares and nodes of each block, and the stack of free ids (of whole regions for a baseline).
struct oracle {
  struct block {
    int32_t shares = 0, nodes = 0;
  };
  int32_t step;  // blocks that come and go together
  std::vector<block> block_of;
  std::vector<int32_t> free;

  oracle(int32_t n, int32_t s) : step(s), block_of(static_cast<size_t>(n)) {
    for (int32_t i = n / s; i-- > 0;) free.push_back(i);
  }
  block& at(block_id b) { return block_of[index(b)]; }
  bool region_free(int32_t r) const {
    for (int32_t i = r * step; i < (r + 1) * step; ++i) {
      const block& b = block_of[static_cast<size_t>(i)];
      if (b.shares != 0 || b.nodes != 0) return false;
    }
    return true;
  }
  void freed(block_id b) {
    if (at(b).shares == 0 && at(b).nodes == 0 && region_free(raw(b) / step)) free.push_back(raw(b) / step);
  }
  template <class A>
  void compare(const A& a) const {
    int32_t cached = 0;
    for (size_t i = 0; i < block_of.size(); ++i) {
      const block_id b{static_cast<int32_t>(i)};
      const block& x = block_of[i];
      cached += x.shares == 0 && x.nodes > 0;
      REQUIRE(a.shares(b) == x.shares);
      REQUIRE(a.indexed(b) == (x.nodes > 0));
      REQUIRE(a.immutable(b) == (x.shares > 1 || (x.shares == 1 && x.nodes > 0)));
    }
    REQUIRE(a.cached_blocks() == cached);
    REQUIRE(a.free_blocks() == static_cast<int32_t>(free.size()) * step);
    REQUIRE(a.total_blocks() == static_cast<int32_t>(block_of.size()));
  }
};

// One random legal operation on both; the ids handed out must be those on top of the free stack.
template <class A>
void random_step(A& a, oracle& o, std::mt19937_64& random) {
  const auto any = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint64_t>(n)); };
  const block_id b{any(total)};
  switch (any(A::shareable ? 6 : 2)) {
    case 0: {
      const int32_t n = A::shareable ? any(8) : region;
      std::vector<block_id> out(static_cast<size_t>(n), no_block);
      const bool fits = n / o.step <= static_cast<int32_t>(o.free.size());
      int32_t cached = 0;
      for (const auto& x : o.block_of) cached += x.shares == 0 && x.nodes > 0;
      REQUIRE(bool(a.admit(n)) == (n <= static_cast<int32_t>(o.free.size()) * o.step + cached));
      REQUIRE(bool(a.allocate(out)) == fits);
      if (!fits) break;
      for (int32_t i = 0; i < n; i += o.step) {
        const int32_t r = o.free.back();
        o.free.pop_back();
        for (int32_t k = 0; k < o.step; ++k) {
          REQUIRE(raw(out[static_cast<size_t>(i + k)]) == r * o.step + k);
          o.at(out[static_cast<size_t>(i + k)]) = {1, 0};
        }
      }
      break;
    }
    case 1:
      if (o.at(b).shares == 0) break;
      give(a, b);
      --o.at(b).shares;
      o.freed(b);
      break;
    case 2: {
      if (o.at(b).shares + o.at(b).nodes == 0) break;
      const block_id in[] = {no_block, b, no_block};
      a.share(in);
      ++o.at(b).shares;
      break;
    }
    case 3:
      if (o.at(b).shares + o.at(b).nodes == 0) break;
      a.index(b);
      ++o.at(b).nodes;
      break;
    default:
      if (o.at(b).nodes == 0) break;
      a.unindex(b);
      --o.at(b).nodes;
      o.freed(b);
  }
}

using pool_models =
    std::tuple<block_pool, fail_nth<block_pool>, checked<block_pool>, checked<fail_nth<block_pool>>>;
using baseline_models = std::tuple<contiguous, fail_nth<contiguous>, checked<contiguous>>;
using all_models =
    std::tuple<block_pool, fail_nth<block_pool>, checked<block_pool>, checked<fail_nth<block_pool>>,
               contiguous, fail_nth<contiguous>, checked<contiguous>>;

}  // namespace

TEMPLATE_LIST_TEST_CASE("an allocator agrees with a naive record after every random operation", "[blocks]",
                        all_models) {
  std::mt19937_64 random(test::test_seed("allocator", 20240701));
  const int64_t steps = test::effort(20000);
  violations watch;
  TestType a = made<TestType>();
  oracle o(total, TestType::shareable ? 1 : region);
  for (int64_t i = 0; i < steps; ++i) {
    random_step(a, o, random);
    o.compare(a);
  }
  CHECK(watch.take() == 0);
}

TEMPLATE_LIST_TEST_CASE("creation starts over: what came before leaves no trace", "[blocks]", all_models) {
  std::mt19937_64 random(7);
  TestType used = made<TestType>();
  oracle o(total, TestType::shareable ? 1 : region);
  for (int i = 0; i < 500; ++i) random_step(used, o, random);
  REQUIRE(used.create(blocks{total}, region));
  TestType fresh = made<TestType>();
  CHECK(seen(used) == seen(fresh));
  for (int i = 0; i < total / region; ++i) CHECK(take(used, region) == take(fresh, region));
  CHECK(used.free_blocks() == 0);
}

TEMPLATE_LIST_TEST_CASE("a creation that is refused changes nothing", "[blocks]", all_models) {
  TestType a = made<TestType>();
  (void)take(a, region);
  const auto before = seen(a);
  const status s = a.create(blocks{-3}, region);
  CHECK(s.code == errc::bad_argument);
  CHECK(std::string(s.field) == "blocks");
  CHECK(s.value == -3);
  CHECK(seen(a) == before);
}

TEMPLATE_LIST_TEST_CASE("an empty allocator hands out nothing and takes nothing back", "[blocks]",
                        all_models) {
  TestType a = made<TestType>(0);
  std::vector<block_id> out(region, no_block);
  CHECK_FALSE(a.admit(region));
  CHECK_FALSE(a.allocate(out));
  CHECK(out == std::vector<block_id>(region, no_block));
  CHECK(a.admit(0));
  CHECK(a.allocate({}));
  violations watch;
  give(a, block_id{0});
  CHECK(watch.take() == 1);
  a.release(out);  // absent entries
  CHECK(watch.take() == 0);
}

TEMPLATE_LIST_TEST_CASE("allocation is all or nothing", "[blocks]", all_models) {
  TestType a = made<TestType>(2 * region);
  (void)take(a, region);
  const auto before = seen(a);
  std::vector<block_id> out(2 * region, block_id{99});
  CHECK_FALSE(a.allocate(out));
  CHECK(seen(a) == before);
  CHECK(out == std::vector<block_id>(2 * region, block_id{99}));
}

TEMPLATE_LIST_TEST_CASE("fresh ids ascend and what was released last is handed out first (B34)", "[blocks]",
                        pool_models) {
  TestType a = made<TestType>(8);
  const auto ids = take(a, 5);
  for (int32_t i = 0; i < 5; ++i) CHECK(raw(ids[static_cast<size_t>(i)]) == i);
  const block_id back[] = {block_id{1}, block_id{4}, block_id{0}};
  a.release(back);
  CHECK(take(a, 5) == std::vector<block_id>{block_id{0}, block_id{4}, block_id{1}, block_id{5}, block_id{6}});
}

TEMPLATE_LIST_TEST_CASE("a block becomes free in the order in which its last user or node goes", "[blocks]",
                        pool_models) {
  TestType a = made<TestType>(4);
  const auto ids = take(a, 4);
  a.index(ids[0]);
  a.index(ids[0]);
  a.release(ids);
  CHECK(a.free_blocks() == 3);
  CHECK(a.cached_blocks() == 1);
  a.unindex(ids[0]);
  CHECK(a.cached_blocks() == 1);
  a.unindex(ids[0]);
  CHECK(a.free_blocks() == 4);
  CHECK(take(a, 2) == std::vector<block_id>{ids[0], ids[3]});
}

TEMPLATE_LIST_TEST_CASE("cached blocks count for admission but are not handed out", "[blocks]", pool_models) {
  TestType a = made<TestType>(2);
  const auto ids = take(a, 2);
  a.index(ids[0]);
  a.release(ids);
  CHECK(a.admit(2));
  const status s = a.admit(5);
  CHECK(s.code == errc::out_of_blocks);
  CHECK(s.value == 3);  // that many are missing
  std::vector<block_id> out(2);
  CHECK_FALSE(a.allocate(out));
  CHECK(a.shares(ids[0]) == 0);
}

TEMPLATE_LIST_TEST_CASE(
    "releasing a block twice in one call with one share left is detected and frees it once (B1)", "[blocks]",
    pool_models) {
  TestType a = made<TestType>();
  const block_id b = take(a, 1)[0];
  violations watch;
  const block_id twice[] = {b, b};
  a.release(twice);
  CHECK(watch.take() == 1);
  CHECK(a.free_blocks() == total);
  const auto all = take(a, total);
  CHECK(std::set<block_id>(all.begin(), all.end()).size() == static_cast<size_t>(total));
}

TEMPLATE_LIST_TEST_CASE("two shares are given back by one call that names the block twice (B1)", "[blocks]",
                        pool_models) {
  TestType a = made<TestType>();
  const block_id b = take(a, 1)[0];
  a.share({&b, 1});
  violations watch;
  const block_id twice[] = {b, b};
  a.release(twice);
  CHECK(watch.take() == 0);
  CHECK(a.free_blocks() == total);
}

TEMPLATE_LIST_TEST_CASE("a second release is detected and changes nothing (B2)", "[blocks]", all_models) {
  TestType a = made<TestType>();
  const auto held = take(a, region);
  const auto gone = take(a, region);
  a.release(gone);
  const auto before = seen(a);
  violations watch;
  a.release(gone);
  CHECK(watch.take() == static_cast<uint64_t>(region));
  CHECK(seen(a) == before);
  CHECK(take(a, region) == (TestType::shareable ? std::vector<block_id>(gone.rbegin(), gone.rend()) : gone));
}

TEMPLATE_LIST_TEST_CASE("ids that name no block are detected and change nothing", "[blocks]", all_models) {
  TestType a = made<TestType>();
  (void)take(a, region);
  const auto before = seen(a);
  violations watch;
  for (const block_id b : {block_id{total}, block_id{INT32_MAX}, block_id{-2}, block_id{INT32_MIN}}) {
    give(a, b);
    a.share({&b, 1});
    a.index(b);
    a.unindex(b);
    CHECK(watch.take() == 4);
  }
  CHECK(seen(a) == before);
}

TEMPLATE_LIST_TEST_CASE("sharing or indexing a free block and unindexing an unindexed one change nothing",
                        "[blocks]", pool_models) {
  TestType a = made<TestType>();
  const block_id used = take(a, 1)[0];
  const block_id free{5};
  const auto before = seen(a);
  violations watch;
  a.share({&free, 1});
  CHECK(watch.take() == 1);
  a.index(free);
  CHECK(watch.take() == 1);
  a.unindex(free);
  CHECK(watch.take() == 1);
  a.unindex(used);
  CHECK(watch.take() == 1);
  CHECK(seen(a) == before);
}

TEMPLATE_LIST_TEST_CASE("a cached block cannot be released, only shared again", "[blocks]", pool_models) {
  TestType a = made<TestType>();
  const block_id b = take(a, 1)[0];
  a.index(b);
  give(a, b);
  const auto before = seen(a);
  violations watch;
  give(a, b);
  CHECK(watch.take() == 1);
  CHECK(seen(a) == before);
  a.share({&b, 1});
  CHECK(watch.take() == 0);
  CHECK(a.shares(b) == 1);
  CHECK(a.cached_blocks() == 0);
}

TEMPLATE_LIST_TEST_CASE("the reservation baseline hands out whole regions and refuses anything else",
                        "[blocks]", baseline_models) {
  TestType a = made<TestType>();
  for (const int32_t n : {1, region - 1, region + 1, 2 * region}) {
    CHECK(a.admit(n).code == errc::unsupported);
    std::vector<block_id> out(static_cast<size_t>(n));
    CHECK(a.allocate(out).code == errc::unsupported);
  }
  const auto r = take(a, region);
  for (int32_t i = 0; i < region; ++i) CHECK(raw(r[static_cast<size_t>(i)]) == i);
  a.release(std::span(r).first(3));
  CHECK(a.free_blocks() == total - region);  // the region is held until its last block is back
  give(a, r[3]);
  CHECK(a.free_blocks() == total);
}

TEMPLATE_LIST_TEST_CASE("the reservation baseline refuses to share or index", "[blocks]", baseline_models) {
  TestType a = made<TestType>();
  const auto r = take(a, region);
  const auto before = seen(a);
  violations watch;
  a.share(r);
  CHECK(watch.take() >= 1);
  a.index(r[0]);
  CHECK(watch.take() >= 1);
  a.unindex(r[0]);
  CHECK(watch.take() >= 1);
  CHECK(seen(a) == before);
}

TEST_CASE("regions must divide the blocks", "[blocks]") {
  contiguous a;
  CHECK(a.create(blocks{12}, 4));
  CHECK(std::string(a.create(blocks{13}, 4).field) == "blocks");
  CHECK(std::string(a.create(blocks{12}, 0).field) == "reserve");
  CHECK(a.create(blocks{12}, -4).code == errc::bad_argument);
  CHECK(a.total_blocks() == 12);
}

TEST_CASE("the n-th admission is refused, and only that one", "[blocks]") {
  for (int64_t n = 0; n < 5; ++n) {
    fail_nth<block_pool> a = made<fail_nth<block_pool>>();
    a.arm(n);
    for (int64_t i = 0; i < 8; ++i) {
      CHECK(a.admit(0));  // asks for nothing: not counted
      CHECK(bool(a.admit(1)) == (i != n));
    }
    CHECK(a.refused() == 1);
  }
}

TEST_CASE("admissions can fail from the n-th on, until disarmed", "[blocks]") {
  fail_nth<block_pool> a = made<fail_nth<block_pool>>();
  a.arm(2, true);
  CHECK(a.admit(1));
  CHECK(a.admit(1));
  for (int i = 0; i < 3; ++i) CHECK(a.admit(1).code == errc::out_of_blocks);
  CHECK(a.refused() == 3);
  a.arm(-1);
  CHECK(a.admit(1));
  CHECK(a.free_blocks() == total);
}

namespace {

/// Hands out the same ids again.
struct repeating_pool : block_pool {
  status allocate(std::span<block_id> out) noexcept {
    if (status s = block_pool::allocate(out); !s) return s;
    for (size_t i = 0; i < out.size(); ++i) out[i] = block_id{static_cast<int32_t>(i)};
    return {};
  }
};
/// Counts a cached block as free (the field fault: two blocks for one).
struct drifting_pool : block_pool {
  int32_t free_blocks() const noexcept { return block_pool::free_blocks() + 2 * cached_blocks(); }
};
/// Loses the count of cached blocks.
struct forgetful_pool : block_pool {
  int32_t cached_blocks() const noexcept { return 0; }
};

}  // namespace

TEST_CASE("the checking adaptor notices an allocator that hands out a block twice", "[blocks]") {
  checked<repeating_pool> a;
  REQUIRE(a.create(blocks{4}));
  violations watch;
  block_id b = no_block;
  REQUIRE(a.allocate({&b, 1}));
  CHECK(watch.take() == 0);
  REQUIRE(a.allocate({&b, 1}));
  CHECK(watch.take() >= 1);
}

TEMPLATE_TEST_CASE("the checking adaptor notices counts that drift", "[blocks]", drifting_pool,
                   forgetful_pool) {
  checked<TestType> a;
  REQUIRE(a.create(blocks{4}));
  violations watch;
  block_id b = no_block;
  REQUIRE(a.allocate({&b, 1}));
  a.index(b);
  CHECK(watch.take() == 0);
  a.release({&b, 1});
  CHECK(watch.take() >= 1);
}
