// SPDX-License-Identifier: Apache-2.0
// Dropping tokens in a shared cache: what every table reads is compared with a list per sequence after every
// step, on a plane whose slots remember which text they were computed from.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "kvcache/blocks/contiguous.hpp"
#include "kvcache/cache.hpp"
#include "support/environment.hpp"

using namespace kvcache;

namespace {

/// Key and value of one token: they depend on everything the token was computed from, and on how far the key
/// was turned since.
struct cell {
  uint64_t content = 0;
  int32_t turned = 0;
  bool operator==(const cell&) const = default;
};

struct plane {
  int32_t block_size;
  std::vector<cell> slots;
  cell& at(int32_t block, int32_t i) {
    return slots.at(static_cast<size_t>(block) * static_cast<size_t>(block_size) + static_cast<size_t>(i));
  }
};

constexpr int32_t groups = 2;
constexpr int32_t block_sizes[groups] = {4, 8};

struct live {
  sequence seq;
  std::vector<token_id> text;
  std::vector<cell> expected;  // by slot
  uint64_t state = 0;          // what the next token is computed from
  std::vector<int32_t> keep;   // for the gather of this step
  int32_t written = 0;         // slots of `expected` that lie in the planes
  bool dropped = false;
};

class driver {
 public:
  driver(uint32_t seed, int32_t accounts) : random_(seed) {
    for (int32_t g = 0; g < groups; ++g) {
      configs_[g] = {.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                     .block_size = block_sizes[g],
                     .total = {96 / block_sizes[g] * 3}};
      planes_.push_back({block_sizes[g], std::vector<cell>(96 * 3)});
    }
    const std::vector<int32_t> limits(static_cast<size_t>(accounts), 60);
    accounts_ = accounts;
    cache_ = *cache::create({.groups = configs_,
                             .max_sequences = 6,
                             .max_sequence_tokens = 96,
                             .max_commands = 40,
                             .max_gathers = 2,
                             .account_limits = limits});
  }

  void step() {
    if (static_cast<int>(live_.size()) < 6 && below(3) == 0) open();
    std::vector<size_t> order(live_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    const size_t acting = std::min<size_t>(order.size(), 1 + static_cast<size_t>(below(3)));
    if (below(4) == 0 && order.size() > acting) copy(order[acting], order);
    std::vector<size_t> closed;
    for (size_t k = 0; k < acting; ++k) {
      live& s = *live_[order[k]];
      switch (below(8)) {
        case 0:
        case 1:
        case 2:
          extend(s, 1 + below(20));
          break;
        case 3:
        case 4:
        case 5:
          retain(s);
          break;
        case 6:
          truncate(s);
          break;
        default:
          if (below(2) == 0) {
            commit(s);
          } else {
            closed.push_back(order[k]);
          }
      }
    }
    std::sort(closed.rbegin(), closed.rend());
    for (const size_t i : closed) live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
    finish();
  }
  int drops[4] = {};
  int refused = 0;

 private:
  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(n)); }
  static uint64_t next(uint64_t state, token_id t) {
    return mix64(state * 31 + static_cast<uint64_t>(t) + 1);
  }

  void open() {
    std::vector<token_id> prompt;
    const int32_t n = below(40);
    for (int32_t i = 0; i < n; ++i) prompt.push_back(below(i < 16 ? 2 : 1) * i);  // a few common beginnings
    auto s = cache_.open(prompt, scope::shared(), {.account = below(accounts_)});
    if (!s) return;
    auto l = std::make_unique<live>();
    l->seq = *std::move(s);
    for (int32_t i = 0; i < l->seq.reused(); ++i) put(*l, prompt[static_cast<size_t>(i)]);
    l->written = l->seq.reused();
    live_.push_back(std::move(l));
  }
  void put(live& s, token_id t) {
    s.state = next(s.state, t);
    s.text.push_back(t);
    s.expected.push_back({s.state, 0});
  }
  void extend(live& s, int32_t n) {
    const auto got = s.seq.extend(n);
    if (!got) return void(++refused);
    REQUIRE(*got == n);
    for (int32_t i = 0; i < n; ++i) put(s, below(2));
  }
  void commit(live& s) {
    const auto n = s.seq.commit(s.text);
    REQUIRE(n);
    if (s.dropped) REQUIRE(*n == 0);
  }
  void truncate(live& s) {
    const int32_t want = below(s.seq.held() + 1);
    const auto n = s.seq.truncate(want);
    REQUIRE(n);
    REQUIRE(*n <= want);
    if (!s.dropped) REQUIRE(*n == want);
    if (*n == 0) {
      s.dropped = false;
      s.text.clear();
      s.state = 0;
    } else {
      // Texts of different histories must never look alike, so a shortened one that has dropped goes on from
      // a state of its own.
      s.text.resize(s.text.size() - (s.expected.size() - static_cast<size_t>(*n)));
      s.state = s.dropped ? random_() : s.expected[static_cast<size_t>(*n - 1)].content;
    }
    s.expected.resize(static_cast<size_t>(*n));
    s.written = std::min(s.written, *n);
  }
  void copy(size_t from, const std::vector<size_t>& order) {
    live& a = *live_[from];
    auto l = std::make_unique<live>();
    if (live_.size() < 6) {
      auto f = a.seq.fork();
      if (!f) return;
      l->seq = *std::move(f);
      copy_state(*l, a);
      live_.push_back(std::move(l));
    } else if (order.size() > 4) {
      live& b = *live_[order[order.size() - 1]];
      if (&a == &b || !b.seq.assign(a.seq)) return;
      copy_state(b, a);
    }
  }
  static void copy_state(live& to, const live& from) {
    to.text = from.text;
    to.expected = from.expected;
    to.state = from.state;
    to.written = from.written;
    to.dropped = from.dropped;
  }

  void retain(live& s) {
    const int32_t held = s.seq.held();
    if (held == 0) return;
    keep_plan p;
    const int32_t form = 1 + below(3);
    p.form = static_cast<drop_form>(form);
    p.keep = 1 + below(held);
    p.sinks = below(p.keep + 1);
    p.recent = below(p.keep - p.sinks + 1);
    if (p.form == drop_form::whole_blocks) {
      p.sinks = below(held / 8 + 1) / 2 * 8;
      p.keep = held - below((held - p.sinks) / 8 + 1) * 8;
      p.recent = 0;
      p.move_sinks = below(2) == 0;
      if (p.keep < std::max(p.sinks, 1)) return;
    }
    const bool at_a_loss = below(3) == 0;
    const int32_t overwritten = p.form == drop_form::overwrite ? below(std::min(held, 3) + 1) : 0;
    const stats before = cache_.count();
    const std::vector<block_id> table(s.seq.table(0).begin(), s.seq.table(0).end());
    const auto r = s.seq.retain(p, overwritten, at_a_loss);
    const stats after = cache_.count();
    if (!r) {
      ++refused;
      INFO(to_text(r.error().code) << " " << r.error().field << " " << r.error().value);
      REQUIRE((r.error().code == errc::no_gain || r.error().code == errc::out_of_blocks ||
               r.error().code == errc::busy || r.error().code == errc::over_quota));
      REQUIRE(after.blocks_used == before.blocks_used);
      REQUIRE(after.nodes == before.nodes);
      REQUIRE(std::equal(table.begin(), table.end(), s.seq.table(0).begin(), s.seq.table(0).end()));
      return;
    }
    REQUIRE(static_cast<int64_t>(before.blocks_used) - static_cast<int64_t>(after.blocks_used) ==
            r->blocks_returned);
    if (!at_a_loss && r->dropped > 0 && p.form != drop_form::overwrite) REQUIRE(r->blocks_returned > 0);
    if (r->dropped == 0 && p.form != drop_form::overwrite) return;
    ++drops[form];
    s.dropped = true;
    if (r->dropped == 0) return;
    s.state = random_();
    apply(s, p, overwritten);
    REQUIRE(s.seq.held() == static_cast<int32_t>(s.expected.size()));
    REQUIRE(s.seq.position() == static_cast<int32_t>(s.text.size()));
    REQUIRE(s.seq.committed() == 0);
  }
  // What the plan means for a list.
  void apply(live& s, const keep_plan& p, int32_t overwritten) {
    const auto held = static_cast<int32_t>(s.expected.size());
    if (p.form == drop_form::gather) {
      std::vector<int32_t> middle;
      for (int32_t i = p.sinks; i < held - p.recent; ++i) middle.push_back(i);
      std::shuffle(middle.begin(), middle.end(), random_);
      middle.resize(static_cast<size_t>(p.keep - p.sinks - p.recent));
      for (int32_t i = 0; i < p.sinks; ++i) middle.push_back(i);
      for (int32_t i = held - p.recent; i < held; ++i) middle.push_back(i);
      std::sort(middle.begin(), middle.end());
      s.keep = middle;
      std::vector<cell> kept;
      for (const int32_t i : middle) kept.push_back(s.expected[static_cast<size_t>(i)]);
      s.expected = kept;
    } else if (p.form == drop_form::whole_blocks) {
      const int32_t drop = held - p.keep;
      for (int32_t i = 0; p.move_sinks && i < p.sinks; ++i) s.expected[static_cast<size_t>(i)].turned += drop;
      s.expected.erase(s.expected.begin() + p.sinks, s.expected.begin() + p.sinks + drop);
    } else {
      for (int32_t k = 0; k < overwritten; ++k) {
        const auto i = static_cast<size_t>(below(held));
        s.state = next(s.state, k);
        s.text.push_back(k);
        s.expected[i] = {s.state, 0};
        rewritten_.push_back({&s, static_cast<int32_t>(i)});
      }
    }
    s.written = static_cast<int32_t>(s.expected.size());
  }

  // Runs the commands, stage by stage and in any order within one, then writes the new tokens.
  void finish() {
    const command_list& list = cache_.commands();
    for (int32_t stage = 0; stage < list.stages(); ++stage) {
      std::vector<kvc_command> now;
      for (const kvc_command& c : list.view()) {
        if (c.stage == stage) now.push_back(c);
      }
      std::shuffle(now.begin(), now.end(), random_);
      for (const kvc_command& c : now) run(c, list.ids());
    }
    for (auto& l : live_) {
      for (; l->written < static_cast<int32_t>(l->expected.size()); ++l->written) write(*l, l->written);
      l->keep.clear();
    }
    for (const auto& r : rewritten_) {
      const bool open =
          std::any_of(live_.begin(), live_.end(), [&](const auto& x) { return x.get() == r.first; });
      if (open) write(*r.first, r.second);
    }
    rewritten_.clear();
    cache_.end_step();
    const char* broken = cache_.check_invariants();
    INFO((broken == nullptr ? "" : broken));
    REQUIRE(broken == nullptr);
    for (const auto& l : live_) compare(*l);
  }
  void write(live& s, int32_t slot) {
    for (int32_t g = 0; g < groups; ++g) {
      const block_id b = s.seq.table(g)[static_cast<size_t>(slot / block_sizes[g])];
      REQUIRE_FALSE((cache_.pool(g).immutable(b) && slot >= s.seq.committed()));
      planes_[static_cast<size_t>(g)].at(raw(b), slot % block_sizes[g]) =
          s.expected[static_cast<size_t>(slot)];
    }
  }
  void run(const kvc_command& c, std::span<const int32_t> ids) {
    plane& p = planes_[c.group];
    if (c.op == KVC_OP_COPY) {
      for (int32_t i = 0; i < c.tokens; ++i) p.at(c.dst, i) = p.at(c.src, i);
    } else if (c.op == KVC_OP_ROTATE) {
      for (int32_t i = 0; i < c.tokens; ++i) p.at(c.dst, i).turned += c.arg;
    } else {
      REQUIRE(c.op == KVC_OP_GATHER);
      const int32_t* id = ids.data() + c.arg;
      const int32_t *src = id + 3, *dst = id + 3 + id[0];
      const auto owner =
          std::find_if(live_.begin(), live_.end(), [&](const auto& l) { return l->seq.place() == id[2]; });
      if (owner == live_.end()) return;  // closed in the same step: nobody reads it
      for (int32_t t = 0; t < c.tokens; ++t) {
        const int32_t k = (*owner)->keep.at(static_cast<size_t>(t));
        p.at(dst[t / p.block_size], t % p.block_size) = p.at(src[k / p.block_size], k % p.block_size);
      }
    }
  }
  void compare(live& s) {
    for (int32_t g = 0; g < groups; ++g) {
      for (size_t i = 0; i < s.expected.size(); ++i) {
        const block_id b = s.seq.table(g)[i / static_cast<size_t>(block_sizes[g])];
        const cell& got =
            planes_[static_cast<size_t>(g)].at(raw(b), static_cast<int32_t>(i) % block_sizes[g]);
        if (got != s.expected[i]) {
          INFO("group " << g << " slot " << i << " turned " << got.turned << " not " << s.expected[i].turned);
          REQUIRE(got.content == s.expected[i].content);
          REQUIRE(got.turned == s.expected[i].turned);
        }
      }
    }
  }

  std::mt19937 random_;
  int32_t accounts_ = 1;
  group_config configs_[groups];
  cache cache_;
  std::vector<plane> planes_;
  std::vector<std::unique_ptr<live>> live_;
  std::vector<std::pair<live*, int32_t>> rewritten_;
};

cache small_cache(int32_t max_sequence_tokens = 0, int32_t gathers = 1, int32_t sequences = 4,
                  int32_t commands = 0) {
  static group_config g;
  g = {.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
       .block_size = 4,
       .total = {32}};
  return *cache::create({.groups = {&g, 1},
                         .max_sequences = sequences,
                         .max_sequence_tokens = max_sequence_tokens,
                         .max_commands = commands,
                         .max_gathers = gathers});
}

}  // namespace

TEST_CASE("whatever is dropped, forked, committed and shared, every table reads what its sequence wrote") {
  const int effort = static_cast<int>(test::effort(40));
  int drops[4] = {};
  int refused = 0;
  for (int seed = 0; seed < effort; ++seed) {
    INFO("seed " << seed);
    driver d(static_cast<uint32_t>(seed), 1 + seed % 3);
    for (int i = 0; i < 400; ++i) d.step();
    for (int k = 0; k < 4; ++k) drops[k] += d.drops[k];
    refused += d.refused;
  }
  CHECK(drops[static_cast<int>(drop_form::gather)] > 5 * effort);
  CHECK(drops[static_cast<int>(drop_form::whole_blocks)] > effort);
  CHECK(drops[static_cast<int>(drop_form::overwrite)] > 5 * effort);
  CHECK(refused > effort);
}

TEST_CASE("dropping beside a live sharer is refused where it would cost memory, unless asked for") {
  cache c = small_cache();
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(16));
  auto b = a->fork();
  const keep_plan half{.form = drop_form::gather, .keep = 8};
  const auto refused = b->retain(half);
  CHECK(refused.error().code == errc::no_gain);
  CHECK(refused.error().value == -2);
  CHECK(c.count().blocks_used == 4);
  const auto done = b->retain(half, 0, true);
  REQUIRE(done);
  CHECK(done->dropped == 8);
  CHECK(done->blocks_returned == -2);
  CHECK(c.count().blocks_used == 6);
  CHECK(b->position() == 16);
  CHECK(b->held() == 8);
}

TEST_CASE("what a drop left cannot be shortened piecemeal: the engine computes from the start") {
  cache c = small_cache();
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(16));
  REQUIRE(a->retain({.form = drop_form::gather, .keep = 8}));
  c.end_step();
  REQUIRE(a->extend(5));
  CHECK(*a->truncate(9) == 9);
  CHECK(a->position() == 17);
  CHECK(*a->truncate(7) == 0);
  CHECK(a->position() == 0);
}

TEST_CASE("a plan that contradicts itself is refused by name and changes nothing") {
  cache c = small_cache(20);
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(16));
  const auto refused = [&](keep_plan p, const char* field, int32_t overwritten = 0) {
    const auto r = a->retain(p, overwritten);
    CHECK(r.error().code == errc::bad_argument);
    CHECK(std::string(r.error().field) == field);
    CHECK(a->held() == 16);
  };
  refused({.form = static_cast<drop_form>(9), .keep = 8}, "plan");
  refused({.form = drop_form::gather, .keep = 0}, "keep");
  refused({.form = drop_form::gather, .keep = 17}, "keep");
  refused({.form = drop_form::gather, .keep = 8, .sinks = 9}, "sinks");
  refused({.form = drop_form::gather, .keep = 8, .sinks = 4, .recent = 5}, "recent");
  refused({.form = drop_form::whole_blocks, .keep = 8, .sinks = 3}, "sinks");
  refused({.form = drop_form::whole_blocks, .keep = 7, .sinks = 4}, "keep");
  refused({.form = drop_form::overwrite, .keep = 16}, "overwritten", 17);
  REQUIRE(a->extend(2, true));
  CHECK(a->retain({.form = drop_form::gather, .keep = 8}).error().code == errc::busy);
  REQUIRE(a->accept(0));
  REQUIRE(a->retain({.form = drop_form::gather, .keep = 12}));
  // The list of gathers has room for one sequence: run the commands first.
  CHECK(a->retain({.form = drop_form::gather, .keep = 8}).error().code == errc::busy);
  c.end_step();
  CHECK(a->retain({.form = drop_form::gather, .keep = 8}));
}

TEST_CASE("regions are not dropped from, and nothing changes") {
  struct reserving : serving {
    using allocator_type = contiguous;
  };
  group_config g{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                 .block_size = 4,
                 .total = {32},
                 .reserve = 32};
  auto regions = *basic_cache<reserving>::create({.groups = {&g, 1}, .max_sequences = 2});
  auto a = regions.open({}, scope::shared());
  REQUIRE(a->extend(16));
  const auto region = a->retain({.form = drop_form::whole_blocks, .keep = 8});
  CHECK(region.error().code == errc::unsupported);
  CHECK(std::string(region.error().field) == "contiguous");
  CHECK(a->held() == 16);
  CHECK(regions.check_invariants() == nullptr);
}

TEST_CASE("a drop whose copies find no blocks is refused, names how many are missing, and changes nothing") {
  cache c = small_cache();
  std::vector<token_id> text(128);
  std::iota(text.begin(), text.end(), 0);
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(128));  // all blocks
  c.end_step();
  REQUIRE(*a->commit(text) == 128);  // none of them may be written any more
  const auto refused = a->retain({.form = drop_form::gather, .keep = 8});
  CHECK(refused.error().code == errc::out_of_blocks);
  CHECK(refused.error().value == 2);
  CHECK(a->committed() == 128);
  CHECK(a->held() == 128);
  CHECK(c.commands().size() == 0);
  CHECK(c.check_invariants() == nullptr);
  REQUIRE(*a->truncate(120) == 120);  // two blocks in the cache: gone when they are needed
  CHECK(a->retain({.form = drop_form::gather, .keep = 8}));
  CHECK(c.count().blocks_used == 2);
  CHECK(c.check_invariants() == nullptr);
}

TEST_CASE("a sequence is gathered once per step, since its keep-list is named by its place") {
  cache c = small_cache(0, 4);
  auto a = c.open({}, scope::shared());
  auto b = c.open({}, scope::shared());
  REQUIRE(a->extend(16));
  REQUIRE(b->extend(16));
  c.end_step();
  REQUIRE(a->retain({.form = drop_form::gather, .keep = 12}));
  const auto again = a->retain({.form = drop_form::gather, .keep = 8});
  CHECK(again.error().code == errc::busy);
  CHECK(std::string(again.error().field) == "commands");
  CHECK(a->held() == 12);
  CHECK(b->retain({.form = drop_form::gather, .keep = 8}));
  c.end_step();
  CHECK(a->retain({.form = drop_form::gather, .keep = 8}));
}

TEST_CASE("a drop that no empty list of commands could hold is refused for good, not as busy") {
  cache c = small_cache(0, 0, 1, 4);
  std::vector<token_id> text(20);
  std::iota(text.begin(), text.end(), 0);
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(20));
  c.end_step();
  REQUIRE(*a->commit(text) == 20);
  const auto copies = a->retain({.form = drop_form::overwrite, .keep = 20}, 1);
  CHECK(copies.error().code == errc::unsupported);
  CHECK(std::string(copies.error().field) == "max_commands");
  CHECK(copies.error().value == 5);
  const auto gather = a->retain({.form = drop_form::gather, .keep = 4});
  CHECK(gather.error().code == errc::unsupported);
  CHECK(std::string(gather.error().field) == "max_gathers");
  CHECK(a->committed() == 20);
  CHECK(a->held() == 20);
}

TEST_CASE("the usual list of commands holds any drop of one sequence") {
  cache c = small_cache(128, 1, 1);
  std::vector<token_id> text(64);
  std::iota(text.begin(), text.end(), 0);
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(64));
  c.end_step();
  REQUIRE(*a->commit(text) == 64);
  REQUIRE(a->retain({.form = drop_form::overwrite, .keep = 64}, 1));
  CHECK(c.commands().size() == 16);  // a copy of every block
  c.end_step();
  auto b = c.open({}, scope::shared());
  CHECK_FALSE(b);  // one sequence
  REQUIRE(a->close());
  b = c.open(text, scope::shared());
  REQUIRE(b);
  REQUIRE(b->reused() == 60);
  REQUIRE(b->retain({.form = drop_form::whole_blocks, .keep = 56, .sinks = 52, .move_sinks = true}, 0, true));
  CHECK(c.commands().size() == 26);  // a copy and a turn of every sink
}

TEST_CASE("tokens that may be taken back overwrite first and are counted once they are final") {
  cache c = small_cache();
  std::vector<token_id> text(16);
  std::iota(text.begin(), text.end(), 0);
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(16));
  c.end_step();
  auto b = a->fork();
  const auto own = a->retain({.form = drop_form::overwrite, .keep = 16}, 0);
  REQUIRE(own);
  CHECK(own->dropped == 0);
  CHECK(own->blocks_returned == -4);
  CHECK(c.commands().size() == 4);
  CHECK(a->position() == 16);
  c.end_step();
  CHECK(*a->commit(text) == 0);  // a draft may have been there
  CHECK(*b->commit(text) == 16);
  const auto counted = a->retain({.form = drop_form::overwrite, .keep = 16}, 1);
  REQUIRE(counted);
  CHECK(counted->dropped == 1);
  CHECK(counted->blocks_returned == 0);
  CHECK(c.commands().size() == 0);
  CHECK(a->position() == 17);
  CHECK(a->held() == 16);
  CHECK(c.check_invariants() == nullptr);
}

TEST_CASE("a cut in the middle pays for its copies with the blocks that it gives back") {
  cache c = small_cache();
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(8));  // two sinks that a sibling sees
  c.end_step();
  auto b = a->fork();
  REQUIRE(a->extend(30 * 4));  // all blocks are taken
  CHECK(c.pool().free_blocks() == 0);
  c.end_step();
  const keep_plan cut{.form = drop_form::whole_blocks, .keep = 116, .sinks = 8, .move_sinks = true};
  const auto even = a->retain({.form = drop_form::whole_blocks, .keep = 120, .sinks = 8, .move_sinks = true});
  CHECK(even.error().code == errc::no_gain);  // two for two
  const auto one =
      a->retain({.form = drop_form::whole_blocks, .keep = 124, .sinks = 8, .move_sinks = true}, 0, true);
  CHECK(one.error().code == errc::out_of_blocks);
  CHECK(one.error().value == 1);
  const auto done = a->retain(cut);
  REQUIRE(done);
  CHECK(done->dropped == 12);
  CHECK(done->blocks_returned == 1);
  CHECK(c.commands().size() == 4);
  CHECK(c.pool().free_blocks() == 1);
  CHECK(b->held() == 8);
  CHECK(c.check_invariants() == nullptr);
  c.end_step();

  // The same where what goes is in the index, and where the account is at its limit.
  group_config g{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                 .block_size = 4,
                 .total = {32}};
  const int32_t limits[] = {20};
  cache d = *cache::create({.groups = {&g, 1}, .max_sequences = 2, .account_limits = limits});
  std::vector<token_id> text(80);
  std::iota(text.begin(), text.end(), 0);
  auto e = d.open({}, scope::shared());
  REQUIRE(e->extend(80));
  d.end_step();
  REQUIRE(*e->commit(text) == 80);
  REQUIRE(e->retain({.form = drop_form::whole_blocks, .keep = 64, .sinks = 8, .move_sinks = true}, 0, true));
  CHECK(d.charged(0) <= 20);
  CHECK(d.check_invariants() == nullptr);
}

TEST_CASE("positions end at 32 bits, by overwriting and by growing alike") {
  group_config g{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                 .block_size = 65536,
                 .total = {16384}};
  cache c = *cache::create({.groups = {&g, 1}, .max_sequences = 1});
  auto a = c.open({}, scope::shared());
  const int32_t held = c.shape().max_sequence_tokens - 16;
  REQUIRE(a->extend(held));
  const int32_t rest = INT32_MAX - held - 8;
  REQUIRE(a->retain({.form = drop_form::overwrite, .keep = 1}, rest / 2));
  REQUIRE(a->retain({.form = drop_form::overwrite, .keep = 1}, rest - rest / 2));
  CHECK(a->position() == INT32_MAX - 8);
  const auto refused = a->retain({.form = drop_form::overwrite, .keep = 1}, 9);
  CHECK(refused.error().code == errc::too_long);
  CHECK(std::string(refused.error().field) == "position");
  REQUIRE(a->extend(1));
  CHECK(a->extend(8).error().code == errc::too_long);
  REQUIRE(a->extend(7));
  CHECK(a->position() == INT32_MAX);
  CHECK(a->extend(1).error().code == errc::too_long);
  CHECK(c.check_invariants() == nullptr);
}

TEST_CASE("endless text in constant blocks: the middle goes, the sinks are turned by what went") {
  cache c = small_cache();
  auto a = c.open({}, scope::shared());
  int32_t turned = 0;
  for (int32_t i = 0; i < 20000; ++i) {
    if (a->held() == 16) {
      const auto r = a->retain({.form = drop_form::whole_blocks, .keep = 12, .sinks = 4, .move_sinks = true});
      REQUIRE(r);
      CHECK(r->blocks_returned == 1);
      REQUIRE(c.commands().size() == 1);
      turned += c.commands().view()[0].arg;
    }
    REQUIRE(a->extend(1));
    c.end_step();
    REQUIRE(c.count().blocks_used <= 4);
  }
  CHECK(a->position() == 20000);
  CHECK(turned == a->dropped());
  CHECK(turned == 20000 - a->held());
}
