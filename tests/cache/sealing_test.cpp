// SPDX-License-Identifier: Apache-2.0
// When packed blocks are sealed, in which form every query reads every block, and what becomes of seals and
// open blocks when something else happens before the step ends.
#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <string>
#include <vector>

#include "kvcache/cache.hpp"
#include "support/environment.hpp"

namespace {

using namespace kvcache;

constexpr int32_t B = 4;

struct setup {
  int32_t residual = 0;
  bool deferred = false;
  int32_t first = 0;  // tokens of a group that stores only these
  int32_t total = 64;
  int32_t open = 0;
  int32_t sequences = 4;
  int32_t step = 64;  // max_step_tokens
};

cache make(const setup& s) {
  group_config g[2];
  g[0] = {.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
          .block_size = B,
          .total = {s.total},
          .open = {s.open},
          .format = {.residual = s.residual, .lossy = true, .deferred = s.deferred, .exempt = 1}};
  g[1] = {.shape = g[0].shape, .block_size = s.first, .total = {4}, .first_only = true};
  auto c = cache::create(
      {.groups = {g, s.first != 0 ? 2u : 1u}, .max_sequences = s.sequences, .max_step_tokens = s.step});
  REQUIRE(c);
  return *std::move(c);
}

std::vector<token_id> text_of(int32_t n) {
  std::vector<token_id> t(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) t[static_cast<size_t>(i)] = i * 7;
  return t;
}

sequence begin(cache& c, const std::vector<token_id>& prompt = {}) {
  auto s = c.open(prompt, scope::shared());
  REQUIRE(s);
  return *std::move(s);
}

void sound(const cache& c) {
  const char* broken = c.check_invariants();
  INFO((broken != nullptr ? broken : ""));
  CHECK(broken == nullptr);
}

int32_t rule(int32_t residual, int32_t tokens) {
  return tokens <= residual ? 0 : (tokens - residual) / B * B;
}

// forms[p] = leading tokens that the query at p read packed.
using forms = std::vector<int32_t>;

// Records what the queries from `first` on read, and that it is there to be read.
void attend(const sequence& s, int32_t first, forms& out) {
  out.resize(static_cast<size_t>(s.held()));
  for (int32_t p = first; p < s.held(); ++p) {
    const int32_t n = s.sealed_at(p + 1);
    out[static_cast<size_t>(p)] = n;
    CHECK(n % B == 0);
    for (int32_t j = n / B; j <= p / B; ++j) CHECK(s.open_table()[static_cast<size_t>(j)] != no_block);
  }
}

void extend_to(cache& c, sequence& s, int32_t n, int32_t chunk, forms& out) {
  while (s.held() < n) {
    const int32_t from = s.held();
    REQUIRE(s.extend(std::min(chunk, n - from)));
    attend(s, from, out);
    c.end_step();
    sound(c);
  }
}

constexpr int32_t residuals[] = {0, 1, B / 2, B, B + 3};

std::vector<kvc_command> seals(const cache& c) {
  return {c.seals().begin(), c.seals().end()};
}

}  // namespace

TEST_CASE("in whatever pieces a text is computed, every query reads every block in the form of the rule") {
  for (const int32_t residual : residuals) {
    for (const int32_t chunk : {1, 2, 3, 4, 5, 7, 16, 40}) {
      cache c = make({.residual = residual});
      sequence s = begin(c);
      forms read;
      extend_to(c, s, 40, chunk, read);
      for (int32_t p = 0; p < 40; ++p) {
        INFO("residual " << residual << ", chunks of " << chunk << ", query " << p);
        CHECK(read[static_cast<size_t>(p)] == rule(residual, p + 1));
      }
    }
  }
}

TEST_CASE("with speculation every query reads the same forms, those of rejected drafts too") {
  const uint64_t seed = kvcache::test::test_seed("speculation", 20261101);
  std::mt19937_64 random(seed);
  for (const int32_t residual : residuals) {
    for (int32_t run = 0; run < 40; ++run) {
      cache c = make({.residual = residual});
      sequence s = begin(c);
      forms read;
      while (s.held() < 60) {
        const bool draft = random() % 4 != 0;
        const int32_t from = s.held();
        const auto got = s.extend(1 + static_cast<int32_t>(random() % 6), draft);
        REQUIRE(got);
        attend(s, from, read);
        for (int32_t p = from; p < s.held(); ++p)
          CHECK(read[static_cast<size_t>(p)] == rule(residual, p + 1));
        if (draft) CHECK(c.seals().empty());
        c.end_step();
        if (draft) REQUIRE(s.accept(static_cast<int32_t>(random() % static_cast<uint64_t>(*got + 1))));
        CHECK(c.seals().empty());
        sound(c);
      }
    }
  }
}

TEST_CASE("drafts stop before the next seal, and the next token brings it") {
  cache c = make({.residual = 2});
  sequence s = begin(c);
  CHECK(*s.extend(9, true) == B + 2 - 1);
  CHECK(*s.extend(1, true) == 0);
  REQUIRE(s.accept(5));
  CHECK((s.sealed() == 0 && c.seals().empty()));
  REQUIRE(s.extend(1));
  CHECK((s.sealed() == B && c.seals().size() == 1));
}

TEST_CASE("a hit reads the forms of a cold run with a residual of at most 1, and only then indexes more") {
  for (const int32_t residual : residuals) {
    for (const int32_t chunk : {1, 3, 40}) {
      cache c = make({.residual = residual});
      const auto text = text_of(40);
      forms cold, hit;
      sequence s = begin(c);
      extend_to(c, s, 24 + residual, 40, cold);
      CHECK(*s.commit(text_of(24 + residual)) == 24);
      extend_to(c, s, 40, 40, cold);
      REQUIRE(s.close());
      sequence again = begin(c, text);
      REQUIRE(again.reused() == 24);
      extend_to(c, again, 40, chunk, hit);
      bool same = true;
      for (size_t p = 24; p < 40; ++p) same &= hit[p] == cold[p];
      INFO("residual " << residual << ", chunks of " << chunk);
      CHECK(same == (residual <= 1));
      CHECK(*again.commit(text) == (residual <= 1 ? rule(residual, 40) : 24));
      sound(c);
    }
  }
}

TEST_CASE("after a cut into packed blocks only what a cold run computes alike is indexed") {
  for (const int32_t residual : residuals) {
    for (int32_t cut = 0; cut <= 30; ++cut) {
      cache c = make({.residual = residual});
      forms cold, read;
      sequence s = begin(c);
      extend_to(c, s, 30, 30, cold);
      const int32_t packed = s.sealed();
      const auto reached = s.truncate(cut);
      REQUIRE(reached);
      CHECK(*reached == (cut < packed ? cut / B * B : cut));
      extend_to(c, s, 30, 3, read);
      bool same = true;
      for (auto p = static_cast<size_t>(*reached); p < 30; ++p) same &= read[p] == cold[p];
      INFO("residual " << residual << ", cut at " << cut);
      if (residual <= 1) CHECK(same);
      CHECK(*s.commit(text_of(30)) == (same ? packed : std::min(packed, *reached / B * B)));
      sound(c);
    }
  }
}

TEST_CASE("branches keep the length up to which their text may be indexed") {
  cache c = make({.residual = 4});
  const auto text = text_of(32);
  forms read;
  sequence s = begin(c);
  extend_to(c, s, 32, 32, read);
  REQUIRE(*s.commit(text_of(12)) == 12);
  sequence hit = begin(c, text);
  REQUIRE(hit.reused() == 12);
  extend_to(c, hit, 32, 32, read);
  auto branch = hit.fork();
  REQUIRE(branch);
  CHECK(*branch->commit(text) == 12);
  REQUIRE(s.assign(hit));
  CHECK(*s.commit(text) == 12);
  REQUIRE(s.truncate(0));  // what follows is computed from the first token on
  extend_to(c, s, 32, 32, read);
  CHECK(*s.commit(text) == 28);
}

TEST_CASE("seals are queued at once, in a list of their own, and both forms stay until the step ends") {
  cache c = make({.residual = 1});
  sequence s = begin(c);
  REQUIRE(s.extend(6));
  CHECK((s.sealed() == 4 && c.commands().size() == 0));
  REQUIRE(s.extend(4));  // the same step
  const auto list = seals(c);
  REQUIRE(list.size() == 2);
  for (size_t j = 0; j < 2; ++j) {
    CHECK((list[j].op == KVC_OP_SEAL && list[j].group == 0 && list[j].stage == 0 && list[j].tokens == B));
    CHECK(list[j].src == raw(s.open_table()[j]));
    CHECK(list[j].dst == raw(s.table()[j]));
    CHECK(list[j].arg == (j == 0 ? 1 : 0));  // exempt tokens lie in the first block only
  }
  CHECK((s.sealed_at(4) == 0 && s.sealed_at(5) == 4 && s.sealed_at(8) == 4 && s.sealed_at(9) == 8));
  CHECK(c.commands().size() == 0);
  c.end_step();
  CHECK(c.seals().empty());
  CHECK((s.open_table()[0] == no_block && s.open_table()[1] == no_block && s.open_table()[2] != no_block));
  sound(c);
}

TEST_CASE("a step that is taken back leaves no seal and gives back what it took") {
  for (const int32_t residual : residuals) {
    for (int32_t n = 1; n < 20; ++n) {
      cache c = make({.residual = residual});
      forms read;
      sequence s = begin(c);
      extend_to(c, s, 11, 11, read);
      const stats before = c.count();
      const std::vector<block_id> table(s.table().begin(), s.table().end());
      const std::vector<block_id> open(s.open_table().begin(), s.open_table().end());
      const int32_t sealed = s.sealed();
      REQUIRE(s.extend(n));
      CHECK(*s.truncate(11) == 11);
      CHECK((c.seals().empty() && s.sealed() == sealed));
      CHECK(std::equal(table.begin(), table.end(), s.table().begin(), s.table().end()));
      CHECK(std::equal(open.begin(), open.end(), s.open_table().begin(), s.open_table().end()));
      CHECK(c.count().blocks_free == before.blocks_free);
      sound(c);
      extend_to(c, s, 30, 4, read);
      for (int32_t p = 11; p < 30; ++p) CHECK(read[static_cast<size_t>(p)] == rule(residual, p + 1));
      CHECK(*s.commit(text_of(30)) == rule(residual, 30));
    }
  }
}

TEST_CASE("a block that is freed takes its seal with it, so that its next owner is not overwritten") {
  cache c = make({.total = 4, .open = 8});
  sequence a = begin(c);
  sequence b = begin(c);
  REQUIRE(a.extend(16));
  REQUIRE(c.seals().size() == 4);
  const std::vector<block_id> had(a.table().begin(), a.table().end());
  SECTION("by close") {
    REQUIRE(a.close());
    CHECK(c.seals().empty());
    REQUIRE(b.extend(15));
    CHECK(c.seals().size() == 3);
  }
  SECTION("by truncate") {
    REQUIRE(*a.truncate(6) == 6);
    CHECK(c.seals().size() == 1);
    REQUIRE(b.extend(7));
    CHECK(c.seals().size() == 2);
  }
  for (const kvc_command& s : c.seals()) {
    const auto holds = [&](const sequence& q) {
      const auto t = q.table(), o = q.open_table();
      for (size_t j = 0; j < t.size(); ++j) {
        if (raw(t[j]) == s.dst) return raw(o[j]) == s.src;
      }
      return false;
    };
    CHECK((holds(a) || holds(b)));
  }
  sound(c);
  c.end_step();
  sound(c);
  CHECK(had.size() == 4);
}

TEST_CASE("whoever lives in a place at the end of a step keeps what he has not sealed") {
  cache c = make({.residual = 3, .sequences = 1});
  sequence a = begin(c);
  REQUIRE(a.extend(20));
  const int32_t place = a.place();
  REQUIRE(a.close());
  sequence b = begin(c);
  REQUIRE(b.place() == place);
  REQUIRE(b.extend(6));  // nothing is final
  c.end_step();
  for (const block_id o : b.open_table()) CHECK(o != no_block);
  sound(c);
  REQUIRE(b.extend(1));
  CHECK((b.sealed() == 4 && c.seals().size() == 1));
  c.end_step();
  CHECK(b.open_table()[0] == no_block);
  sound(c);
}

TEST_CASE("branches made between a step's work and its end let go of the open forms as well") {
  for (const bool assigned : {false, true}) {
    cache c = make({});
    sequence a = begin(c);
    sequence b = begin(c);
    REQUIRE(b.extend(3));
    c.end_step();
    REQUIRE(a.extend(10));
    if (assigned) {
      REQUIRE(b.assign(a));
    } else {
      b = std::move(*a.fork());
    }
    CHECK(b.open_table()[0] == a.open_table()[0]);
    sound(c);
    REQUIRE(a.close());
    CHECK(c.seals().size() == 2);  // b reads them
    c.end_step();
    CHECK((b.sealed() == 8 && b.open_table()[0] == no_block && b.open_table()[2] != no_block));
    sound(c);
  }
}

TEST_CASE("siblings seal a block that they share once, each when its own text is long enough") {
  cache c = make({.residual = 4});
  sequence a = begin(c);
  REQUIRE(a.extend(7));
  c.end_step();
  auto b = a.fork();
  REQUIRE(b);
  REQUIRE(a.extend(1));
  REQUIRE(c.seals().size() == 1);
  CHECK((a.sealed() == 4 && b->sealed() == 0));
  SECTION("in the same step") {
    REQUIRE(b->extend(1));
    CHECK((b->sealed() == 4 && c.seals().size() == 1));
    REQUIRE(a.close());
    CHECK(c.seals().size() == 1);
  }
  SECTION("in a later step") {
    c.end_step();
    CHECK(b->open_table()[0] != no_block);
    REQUIRE(b->extend(1));
    CHECK((b->sealed() == 4 && c.seals().empty()));
  }
  c.end_step();
  CHECK(b->open_table()[0] == no_block);
  sound(c);
}

TEST_CASE("a block that is written to again is not sealed by whoever left it") {
  cache c = make({.residual = 2});
  sequence a = begin(c);
  REQUIRE(a.extend(5));
  c.end_step();
  auto b = a.fork();
  REQUIRE(b);
  REQUIRE(a.extend(1));  // seals the block that b shares
  REQUIRE(c.seals().size() == 1);
  const int32_t source = c.seals()[0].src;
  REQUIRE(*b->truncate(2) == 2);
  REQUIRE(a.close());
  CHECK(c.seals().size() == 1);
  REQUIRE(b->extend(1));
  CHECK(c.seals().empty());
  REQUIRE(c.commands().size() == 2);            // a copied its last block
  CHECK(c.commands().view()[1].src == source);  // and this was still to be read
  REQUIRE(b->extend(3));
  REQUIRE(c.seals().size() == 1);
  CHECK(c.seals()[0].src == raw(b->open_table()[0]));
  sound(c);
  c.end_step();
  sound(c);
}

TEST_CASE("the seal of a block that was copied on write reads the copy") {
  cache c = make({});
  sequence a = begin(c);
  REQUIRE(a.extend(3));
  c.end_step();
  auto b = a.fork();
  REQUIRE(b);
  REQUIRE(a.extend(1));
  REQUIRE(b->extend(1));
  const auto list = seals(c);
  REQUIRE(list.size() == 2);
  REQUIRE(c.commands().size() == 1);
  const kvc_command& copy = c.commands().view()[0];
  CHECK(copy.op == KVC_OP_COPY_OPEN);
  CHECK(copy.dst == raw(a.open_table()[0]));
  CHECK((list[0].src == copy.dst && list[0].dst == raw(a.table()[0])));
  CHECK((list[1].src == copy.src && list[1].dst == raw(b->table()[0])));
  CHECK(list[0].dst != list[1].dst);
  sound(c);
}

TEST_CASE(
    "what is indexed before the step ends is sealed though its sequence has gone, unless it is evicted") {
  cache c = make({.residual = 4, .total = 8, .open = 8});
  sequence a = begin(c);
  REQUIRE(a.extend(8));
  REQUIRE(*a.commit(text_of(8)) == 4);
  const int32_t open = raw(a.open_table()[0]);
  REQUIRE(a.close());
  REQUIRE(c.seals().size() == 1);
  sequence b = begin(c);
  REQUIRE(b.extend(24));  // takes every open block but the one that is still to be read
  for (const block_id o : b.open_table()) CHECK(raw(o) != open);
  CHECK(c.evict(1) == 1);
  for (const kvc_command& s : c.seals()) CHECK(s.src != open);
  sound(c);
  c.end_step();
  sound(c);
}

TEST_CASE("more new tokens than a step may have are refused by the open blocks, and nothing changes") {
  cache c = make({.residual = 3, .sequences = 2, .step = 16});
  REQUIRE(c.shape().group[0].open == 2 * (1 + 2) + 4);
  sequence a = begin(c);
  const auto refused = a.extend(41);
  CHECK((refused.error().code == errc::out_of_blocks && std::string(refused.error().field) == "open"));
  CHECK(refused.error().value == 1);
  CHECK((a.held() == 0 && c.seals().empty()));
  CHECK(c.count().refusals == 1);
  REQUIRE(a.extend(40));
  c.end_step();
  CHECK(a.extend(16));
  sound(c);
}

TEST_CASE("steps of at most max_step_tokens new tokens never want for open blocks") {
  const uint64_t seed = kvcache::test::test_seed("open blocks", 20261102);
  std::mt19937_64 random(seed);
  for (const int32_t residual : residuals) {
    const int32_t step = 5 + static_cast<int32_t>(random() % 30);
    cache c = make({.residual = residual, .total = 400, .sequences = 6, .step = step});
    std::vector<sequence> all;
    for (int64_t i = 0; i < kvcache::test::effort(3000); ++i) {
      while (all.size() < 6) {
        const bool branch = !all.empty() && random() % 3 == 0;
        all.push_back(branch ? std::move(*all[random() % all.size()].fork()) : begin(c));
      }
      for (int32_t left = step; left > 0;) {
        const int32_t n = 1 + static_cast<int32_t>(random() % static_cast<uint64_t>(left));
        const auto got = all[random() % all.size()].extend(n);
        if (!got) REQUIRE(std::string(got.error().field) == "blocks");
        left -= n;
      }
      c.end_step();
      if (random() % 4 == 0) all.erase(all.begin() + static_cast<std::ptrdiff_t>(random() % all.size()));
    }
    sound(c);
  }
}

TEST_CASE("deferred blocks are sealed when the owner says so, and text computed afterwards is not indexed") {
  cache c = make({.residual = 2, .deferred = true});
  const auto text = text_of(24);
  sequence s = begin(c);
  REQUIRE(s.extend(16));
  CHECK((s.sealed() == 0 && s.sealed_at(16) == 0 && c.seals().empty()));
  c.end_step();
  CHECK(*s.commit(text_of(16)) == 0);
  CHECK(*s.extend(5, true) == 5);  // drafts are not cut short
  REQUIRE(s.accept(0));
  REQUIRE(s.settle());
  CHECK((s.sealed() == 12 && c.commands().size() == 3 && c.commands().view()[0].op == KVC_OP_SEAL));
  CHECK((c.commands().view()[0].arg == 1 && c.commands().view()[1].arg == 0));
  CHECK(s.open_table()[2] == no_block);
  REQUIRE(s.extend(8));
  CHECK((s.sealed() == 12 && s.sealed_at(17) == 12));
  c.end_step();
  REQUIRE(s.settle());
  CHECK(s.sealed() == 20);
  c.end_step();
  CHECK(*s.commit(text) == 16);  // tokens 16 to 19 read blocks packed; a prompt of 20 would not have
  sequence hit = begin(c, text);
  CHECK(hit.reused() == 16);
  REQUIRE(hit.extend(8));
  c.end_step();
  REQUIRE(hit.settle());
  c.end_step();
  CHECK(*hit.commit(text) == 16);
  REQUIRE(hit.truncate(0));
  REQUIRE(hit.extend(24));
  c.end_step();
  REQUIRE(hit.settle());
  CHECK(*hit.commit(text) == 20);
  sound(c);
}

TEST_CASE("drafts that are rejected after deferred seals take the length that may be indexed with them") {
  cache c = make({.deferred = true});
  const auto text = text_of(16);
  sequence s = begin(c);
  REQUIRE(s.extend(4));
  REQUIRE(*s.extend(8, true) == 8);
  c.end_step();
  REQUIRE(s.settle());  // 4 tokens are final; the drafts were computed exactly
  CHECK(s.sealed() == 4);
  SECTION("all kept") {
    REQUIRE(s.accept(8));
    CHECK(*s.commit(text) == 4);
    REQUIRE(s.settle());
    CHECK(*s.commit(text) == 12);
  }
  SECTION("some rejected") {
    REQUIRE(s.accept(1));
    REQUIRE(s.extend(7));
    REQUIRE(s.settle());
    CHECK(*s.commit(text) == 4);  // from token 5 on the first block was read packed
  }
  sound(c);
}

TEST_CASE("settle has nothing to do where steps seal") {
  cache c = make({});
  sequence s = begin(c);
  REQUIRE(s.extend(9));
  const auto before = seals(c).size();
  REQUIRE(s.settle());
  CHECK((c.commands().size() == 0 && seals(c).size() == before && s.sealed() == 8));
}

TEST_CASE("a group of first tokens is shared by hits, copied by writers and not asked by longer texts") {
  cache c = make({.first = 4});
  const auto text = text_of(20);
  sequence a = begin(c);
  REQUIRE(a.extend(3));
  REQUIRE(a.table(1).size() == 1);
  c.end_step();
  auto b = a.fork();
  REQUIRE(b);
  REQUIRE(a.extend(17));
  REQUIRE(c.commands().size() == 2);  // its open block, and the first tokens
  const kvc_command& copy = c.commands().view()[1];
  CHECK((copy.op == KVC_OP_COPY && copy.group == 1 && copy.tokens == 3));
  CHECK((copy.src == raw(b->table(1)[0]) && copy.dst == raw(a.table(1)[0])));
  c.end_step();
  CHECK(*a.commit(text) == 20);
  sequence hit = begin(c, text_of(19));
  CHECK((hit.reused() == 16 && hit.table(1).size() == 1 && hit.table(1)[0] == a.table(1)[0]));
  REQUIRE(hit.extend(3));
  CHECK(c.commands().size() == 0);  // it is shared, and nobody writes to it
  CHECK(hit.table(1)[0] == a.table(1)[0]);
  REQUIRE(*hit.truncate(0) == 0);
  CHECK(hit.table(1).empty());
  REQUIRE(hit.extend(1));
  CHECK(hit.table(1)[0] != a.table(1)[0]);
  c.end_step();
  const keep_plan plan{.form = drop_form::gather, .keep = 8};
  CHECK(a.retain(plan).error().code == errc::unsupported);
  sound(c);
}

TEST_CASE("only the first unit of a text holds its first tokens, and evicting it frees their block") {
  cache c = make({.first = 2});
  const auto text = text_of(20);
  sequence a = begin(c);
  REQUIRE(a.extend(20));
  c.end_step();
  REQUIRE(*a.commit(text) == 20);
  node_id path[5];
  REQUIRE(c.peek(text, scope::shared(), path) == 16);  // one token is left to compute
  block_id ids[5];
  CHECK(c.list_blocks({path, 4}, ids, 1) == 1);
  CHECK(ids[0] == a.table(1)[0]);
  REQUIRE(a.close());
  const auto& pool = c.pool(1);
  CHECK((pool.cached_blocks() == 1 && pool.free_blocks() == 3));
  CHECK(c.evict(4) == 4);  // the deepest first
  CHECK(pool.cached_blocks() == 1);
  CHECK(c.evict(1) == 1);
  CHECK(pool.free_blocks() == 4);
  sound(c);
}

TEST_CASE("when the blocks of first tokens run out, cached texts make room") {
  cache c = make({.first = 1, .sequences = 5});
  for (int32_t i = 0; i < 4; ++i) {
    std::vector<token_id> text(8, i);
    sequence s = begin(c);
    REQUIRE(s.extend(8));
    c.end_step();
    REQUIRE(*s.commit(text) == 8);
  }
  CHECK(c.pool(1).free_blocks() == 0);
  std::vector<sequence> live;
  for (int32_t i = 0; i < 4; ++i) {
    live.push_back(begin(c));
    REQUIRE(live.back().extend(1));
  }
  CHECK(c.count().nodes == 0);
  sequence one_more = begin(c);
  const auto refused = one_more.extend(1);
  CHECK(refused.error().code == errc::out_of_blocks);
  sound(c);
}
