// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <unordered_map>

#include "drive.hpp"
#include "support/environment.hpp"

namespace {

using namespace kvcache;
using namespace kvcache::test;

// Bits of `pick` that mean: shared scope, account 0 or 1, no deliberately bad argument.
constexpr uint32_t plain = 258;
constexpr uint32_t other_account = 258 + 512;

// Depth-first over all calls that can be made on two sequences. With `prune` a state that was met before with
// at least as many calls left is not entered again.
template <class Traits>
class search {
 public:
  search(const rules& r, bool accounts) : m_(r, &make_policy<Traits>, 1), accounts_(accounts) {
    REQUIRE(m_.created().empty());
  }
  int64_t calls = 0, sequences = 0;

  void run(int32_t depth, bool prune) {
    prune_ = prune;
    visit(depth);
  }
  size_t states() const { return seen_.size(); }

 private:
  std::vector<operation> possible() {
    std::vector<operation> out;
    const auto add = [&](verb v, int32_t s, int32_t n, int32_t literal, uint32_t pick = plain) {
      out.push_back({.what = v, .s = s, .other = 1 - s, .n = n, .pick = pick, .literal = literal});
    };
    if (m_.model().live() < 2) {
      add(verb::open, 0, 5, 1);
      add(verb::open, 0, 5, 2);
      if (accounts_) add(verb::open, 0, 5, 1, other_account);
    }
    bool unwritten = m_.cache().commands().size() != 0;
    bool lossy = false;
    bool deferred = false;
    for (const group_rule& g : m_.model().bounds().groups) {
      lossy |= g.lossy;
      deferred |= g.deferred;
    }
    for (int32_t s = 0; s < 2; ++s) {
      const auto& q = m_.model().at(s);
      if (!q.live) continue;
      unwritten |= q.written < q.held();
      const int32_t drafts = q.held() - q.accepted;
      add(verb::extend, s, 1, 1);
      add(verb::extend, s, 1, 2);
      add(verb::extend, s, 3, 1);
      add(verb::draft, s, 2, 2);
      if (drafts > 0) {
        add(verb::accept, s, 0, 0);
        add(verb::accept, s, 1, 0);
      }
      if (q.held() > 0) add(verb::truncate, s, q.held() - 1, 0);
      if (q.held() > 1) add(verb::truncate, s, 1, 0);
      add(verb::commit, s, 0, 0);
      if (deferred) add(verb::settle, s, 0, 0);
      add(verb::fork, s, 0, 0);
      if (m_.model().at(1 - s).live) add(verb::assign, s, 0, 0);
      add(verb::close, s, 0, 0);
    }
    if (unwritten || m_.unfinished()) add(verb::step, 0, 0, 0);
    if (unwritten && lossy) add(verb::run, 0, 0, 0);
    if (lossy) add(verb::evict, 0, 1, 0);
    return out;
  }

  bool enter(int32_t depth) {
    m_.model().key(key_);
    digest d;
    for (const int32_t x : key_) d.add(static_cast<uint64_t>(x));
    for (int32_t s = 0; s < 2; ++s) d.add(static_cast<uint64_t>(m_.model().at(s).written));
    d.add(static_cast<uint64_t>(m_.cache().commands().size()));
    d.add(static_cast<uint64_t>(m_.cache().seals().size()));
    d.add(m_.unfinished());
    const auto [place, fresh] = seen_.try_emplace(d.value, depth);
    if (fresh || place->second < depth) {
      place->second = depth;
      return true;
    }
    return !prune_;
  }

  void visit(int32_t depth) {
    if (!enter(depth)) return;
    if (depth == 0) {
      ++sequences;
      return;
    }
    const auto here = m_.save();
    for (const operation& o : possible()) {
      path_.push_back(o);
      ++calls;
      if (const std::string why = m_.apply(o); !why.empty()) {
        std::string calls_made;
        for (const operation& p : path_)
          calls_made += "\n  " + describe(p) + " literal=" + std::to_string(p.literal);
        FAIL(why << calls_made);
      }
      visit(depth - 1);
      m_.restore(here);
      path_.pop_back();
    }
  }

  machine<Traits> m_;
  bool accounts_;
  bool prune_ = false;
  std::vector<operation> path_;
  std::vector<int32_t> key_;
  std::unordered_map<uint64_t, int32_t> seen_;
};

rules tiny(std::vector<group_rule> groups) {
  rules r;
  r.groups = std::move(groups);
  r.sequences = 2;
  r.max_tokens = 6;
  r.nodes = 3;
  r.scopes = 2;
  r.commands = 6;
  return r;
}

template <class Traits>
void explore(const char* what, const rules& r, int32_t all, int32_t pruned, bool accounts = false) {
  search<Traits> full(r, accounts);
  full.run(all, false);
  search<Traits> wide(r, accounts);
  wide.run(pruned, true);
  std::printf(
      "%s: all %lld sequences of %d calls; %d calls deep without entering a state twice: %zu states, %lld "
      "calls\n",
      what, static_cast<long long>(full.sequences), all, pruned, wide.states(),
      static_cast<long long>(wide.calls));
  CHECK(full.sequences > 0);
}

int32_t depth(int32_t usual) {
  return effort(100) < 50 ? usual - 1 : usual;
}

}  // namespace

TEST_CASE("every sequence of calls on two sequences and four blocks does what the model says",
          "[exhaustive]") {
  explore<lru_cache>("4 blocks, lru", tiny({{.block_size = 2, .total = 4}}), depth(6), depth(9));
}
TEST_CASE("every sequence of calls on two sequences and three blocks does what the model says",
          "[exhaustive]") {
  auto r = tiny({{.block_size = 2, .total = 3}});
  r.order.policy = 1;
  r.nodes = 2;
  explore<lfu_cache>("3 blocks, lfu", r, depth(6), depth(9));
}
TEST_CASE("every sequence of calls on two groups of other block sizes does what the model says",
          "[exhaustive]") {
  explore<lru_cache>("groups of 1 and 2",
                     tiny({{.block_size = 1, .total = 6}, {.block_size = 2, .total = 4}}), depth(6),
                     depth(9));
}
TEST_CASE("every sequence of calls on a lossy group does what the model says", "[exhaustive_lossy]") {
  explore<lru_cache>("lossy", tiny({{.block_size = 2, .total = 4, .open = 4, .lossy = true, .residual = 1}}),
                     depth(6), depth(9));
}
TEST_CASE("every sequence of calls on a packed group does what the model says, whatever the residual",
          "[exhaustive_lossy]") {
  for (const int32_t residual : {0, 1, 2, 5}) {
    for (const bool deferred : {false, true}) {
      for (const bool first : {false, true}) {
        std::vector<group_rule> groups{{.block_size = 2,
                                        .total = 4,
                                        .open = 5,
                                        .lossy = true,
                                        .residual = residual,
                                        .deferred = deferred}};
        if (first) groups.push_back({.block_size = 2, .total = 3, .first_only = true});
        const std::string what = "residual " + std::to_string(residual) + (deferred ? ", deferred" : "") +
                                 (first ? ", first tokens" : "");
        rules r = tiny(std::move(groups));
        r.max_tokens = 8;
        explore<lru_cache>(what.c_str(), r, depth(5), depth(8));
      }
    }
  }
}
TEST_CASE("every sequence of calls on a lossy beside an exact group does what the model says",
          "[exhaustive_lossy]") {
  explore<lru_cache>("lossy and exact",
                     tiny({{.block_size = 1, .total = 6, .open = 6, .lossy = true, .residual = 2},
                           {.block_size = 2, .total = 4}}),
                     depth(5), depth(8));
}
TEST_CASE("every sequence of calls of two accounts with limits does what the model says", "[exhaustive]") {
  auto r = tiny({{.block_size = 2, .total = 4}});
  r.limits = {3, 2};
  explore<lru_cache>("two accounts", r, depth(6), depth(9), true);
}
