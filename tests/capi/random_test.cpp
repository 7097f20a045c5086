// SPDX-License-Identifier: Apache-2.0
// Random operations on a cache through the C API and, beside it, the same on the C++ API: every answer,
// table, length, command, event and counter must be the same after each.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kvcache/cache.hpp"
#include "kvcache/evict/parse.hpp"
#include "kvcache/kvcache.h"
#include "support/environment.hpp"

namespace {

using namespace kvcache;
using kvcache::test::effort;
using kvcache::test::test_seed;

using cxx_cache = basic_cache<dynamic>;

enum group_kind { exact, packed, deferred, first_only };

struct setting {
  std::vector<int32_t> block_size;
  std::vector<int32_t> total;
  std::vector<group_kind> kind;  // of the groups
  const char* eviction;
  std::vector<int32_t> limits;
  int32_t max_nodes = 0, max_commands = 0, max_gathers = 0;
};

struct pair_of_sequences {
  kvc_sequence c;
  cxx_cache::sequence cxx;
  std::vector<int32_t> text;
};

// A statement of who shares, in both languages.
struct domain {
  kvc_scope c;
  scope cxx;
};

class twins {
 public:
  twins(const setting& s, uint64_t seed) : random_(seed), accounts_(s.limits.empty() ? 1 : s.limits.size()) {
    std::vector<kvc_group_config> groups;
    std::vector<group_config> cxx_groups;
    for (size_t g = 0; g < s.total.size(); ++g) {
      kvc_group_config x{};
      x.struct_size = sizeof x;
      x.block_size = s.block_size[g];
      x.layers = 2;
      x.kv_heads = 1;
      x.head_dim_k = 8;
      x.total = s.total[g];
      const bool lossy = s.kind[g] == packed || s.kind[g] == deferred;
      x.format.lossy = lossy;
      x.format.residual = lossy ? 3 : 0;
      x.format.deferred = s.kind[g] == deferred;
      x.format.exempt = lossy;
      x.first_only = s.kind[g] == first_only;
      groups.push_back(x);
      cxx_groups.push_back(
          {.shape = {.layers = 2, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8, .type = element::f32},
           .block_size = x.block_size,
           .total = {x.total},
           .format = {.residual = x.format.residual,
                      .lossy = lossy,
                      .deferred = x.format.deferred != 0,
                      .exempt = x.format.exempt},
           .first_only = x.first_only != 0});
    }
    kvc_cache_config c{};
    c.struct_size = sizeof c;
    c.n_groups = static_cast<int32_t>(groups.size());
    c.groups = groups.data();
    c.eviction = s.eviction;
    c.account_limits = s.limits.empty() ? nullptr : s.limits.data();
    c.n_accounts = static_cast<int32_t>(s.limits.size());
    c.max_sequences = 6;
    c.max_nodes = s.max_nodes;
    c.max_scopes = 5;
    c.max_events = 40;
    c.max_commands = s.max_commands;
    c.max_gathers = s.max_gathers;
    cache_config config{.groups = cxx_groups,
                        .max_sequences = 6,
                        .max_nodes = s.max_nodes,
                        .max_scopes = 5,
                        .max_events = 40,
                        .max_commands = s.max_commands,
                        .max_gathers = s.max_gathers != 0 ? s.max_gathers : 8,
                        .account_limits = s.limits};
    auto made = cxx_cache::create(config, make_eviction(parse_eviction(s.eviction).value));
    REQUIRE(made);
    cxx = std::move(*made);
    REQUIRE(kvc_cache_create(&c, &cache, nullptr) == KVC_OK);
  }
  ~twins() { CHECK(kvc_cache_destroy(cache, nullptr) == KVC_OK); }

  void operate() {
    const size_t k = live.empty() ? 0 : random_() % live.size();
    switch (live.empty() ? 0 : random_() % 17) {
      case 0:
      case 1:
        return open();
      case 2:
      case 3:
      case 4:
        return extend(live[k], false);
      case 5:
        return extend(live[k], true);
      case 6: {
        const int32_t n = number(5);
        const kvc_status c = kvc_accept(cache, live[k].c, n, &error);
        return agree(c, live[k].cxx.accept(n));
      }
      case 7:
        return agree(kvc_settle(cache, live[k].c, &error), live[k].cxx.settle());
      case 8:
        return truncate(live[k]);
      case 9:
      case 10:
        return commit(live[k]);
      case 11:
        return fork(live[k]);
      case 12:
        return assign(live[k], live[random_() % live.size()]);
      case 13:
        return close(k);
      case 14:
        return evict_or_peek();
      case 15:
        return retain(live[k]);
      default:
        REQUIRE(kvc_cache_end_step(cache, nullptr) == KVC_OK);
        return cxx.end_step();
    }
  }

  void compare() {
    kvc_stats c{};
    c.struct_size = sizeof c;
    REQUIRE(kvc_cache_count(cache, &c, nullptr) == KVC_OK);
    const stats s = cxx.count();
    REQUIRE(std::memcmp(&c.steps, &s, sizeof s) == 0);
    REQUIRE(kvc_cache_board(cache, &c, nullptr) == KVC_OK);
    const stats b = cxx.board().read();
    REQUIRE(std::memcmp(&c.steps, &b, sizeof b) == 0);
    const kvc_command* commands = nullptr;
    const kvc_event* events = nullptr;
    int32_t n = 0;
    REQUIRE(kvc_cache_commands(cache, &commands, &n, nullptr) == KVC_OK);
    REQUIRE(same(commands, n, cxx.commands().view()));
    REQUIRE(kvc_cache_seals(cache, &commands, &n, nullptr) == KVC_OK);
    REQUIRE(same(commands, n, cxx.seals()));
    const int32_t* ids = nullptr;
    REQUIRE(kvc_cache_gather_ids(cache, &ids, &n, nullptr) == KVC_OK);
    REQUIRE(same(ids, n, cxx.commands().ids()));
    REQUIRE(kvc_cache_events(cache, &events, &n, nullptr) == KVC_OK);
    REQUIRE(same(events, n, cxx.events()));
    for (size_t a = 0; a < accounts_; ++a) {
      REQUIRE(kvc_cache_charged(cache, static_cast<int32_t>(a), &n, nullptr) == KVC_OK);
      REQUIRE(n == cxx.charged(static_cast<int32_t>(a)));
    }
    for (const pair_of_sequences& s : live) compare(s);
  }

  kvc_cache cache{};
  cxx_cache cxx;
  std::vector<pair_of_sequences> live;
  kvc_error error{};
  int64_t refused = 0;
  int64_t drops[4] = {};  // by form

 private:
  int32_t number(int32_t n) {
    return static_cast<int32_t>(random_() % static_cast<uint64_t>(n + 1)) - (random_() % 32 == 0);
  }
  template <class T>
  static bool same(const T* c, int32_t n, std::span<const T> cxx) {
    return n == static_cast<int32_t>(cxx.size()) &&
           (n == 0 || std::memcmp(c, cxx.data(), cxx.size_bytes()) == 0);
  }
  static kvc_status code(errc e) {
    static constexpr kvc_status codes[] = {KVC_OK,           KVC_OUT_OF_BLOCKS, KVC_OUT_OF_MEMORY,
                                           KVC_OUT_OF_NODES, KVC_OUT_OF_SCOPES, KVC_OUT_OF_SEQUENCES,
                                           KVC_OVER_QUOTA,   KVC_TOO_LONG,      KVC_UNSUPPORTED,
                                           KVC_BUSY,         KVC_BAD_ARGUMENT,  KVC_STALE_HANDLE,
                                           KVC_NO_GAIN};
    return codes[static_cast<size_t>(e)];
  }
  void agree(kvc_status c, const status& s) {
    REQUIRE(c == code(s.code));
    if (s) return;
    ++refused;
    REQUIRE(std::string(kvc_field_text(error.field)) == (s.field[0] != 0 ? s.field : "none"));
    REQUIRE(error.value == s.value);
  }
  template <class T>
  void agree(kvc_status c, int32_t value, const result<T>& r) {
    agree(c, r.error());
    if constexpr (std::is_same_v<T, int32_t>) {
      if (r) REQUIRE(value == *r);
    }
  }

  domain any_domain() {
    static const char salts[] = "abc";
    domain d{{}, scope::shared()};
    d.c.struct_size = sizeof d.c;
    d.c.kind = KVC_SCOPE_SHARED;
    switch (random_() % 6) {
      case 0:
      case 1: {
        const size_t i = random_() % 3;
        d.c.kind = KVC_SCOPE_TENANT;
        d.c.salt = {salts + i, 1};
        d.cxx = scope::tenant({salts + i, 1});
        break;
      }
      case 2:
        d.c.adapter = {"lora", 4};
        d.c.generation = 1 + random_() % 2;
        d.cxx.adapter("lora", d.c.generation);
        break;
      case 3:
        inner_ = {};
        inner_.struct_size = sizeof inner_;
        inner_.kind = KVC_SCOPE_TENANT;
        inner_.salt = {"a", 1};
        inner_.weights = 3;
        inner_.first_token = 8;
        d.c.narrower = &inner_;
        d.cxx.from(8, scope::tenant("a").weights(3));
        break;
      default:
        break;
    }
    return d;
  }
  std::vector<int32_t> any_text() {
    std::vector<int32_t> t(random_() % 40);
    const auto kind = static_cast<int32_t>(random_() % 3);
    for (size_t i = 0; i < t.size(); ++i) t[i] = static_cast<int32_t>(i) + kind * (i > 12 ? 100 : 0);
    return t;
  }

  void open() {
    pair_of_sequences s;
    s.text = any_text();
    const domain d = any_domain();
    kvc_open_options o{};
    o.struct_size = sizeof o;
    o.account = static_cast<int32_t>(random_() % (accounts_ + 1));
    o.recompute = number(6);
    o.priority = random_() % 4 == 0 ? number(4) : 0;
    o.priority_ms = static_cast<uint32_t>(random_() % 3);
    int32_t reused = -1;
    const auto n = static_cast<int32_t>(s.text.size());
    auto opened = cxx.open(s.text, d.cxx,
                           {.account = o.account,
                            .recompute = o.recompute == 0 ? 1 : o.recompute,
                            .priority = o.priority,
                            .priority_ms = o.priority_ms});
    agree(kvc_open(cache, &d.c, s.text.data(), n, &o, &s.c, &reused, &error), 0, opened);
    if (!opened) return;
    REQUIRE(reused == opened->reused());
    s.cxx = std::move(*opened);
    live.push_back(std::move(s));
  }
  void extend(pair_of_sequences& s, bool draft) {
    int32_t n = random_() % 4 == 0 ? number(30) : number(4), got = -1;
    const kvc_status c = kvc_extend(cache, s.c, n, draft, &got, &error);
    agree(c, got, s.cxx.extend(n, draft));
    while (s.text.size() < static_cast<size_t>(s.cxx.held()))
      s.text.push_back(static_cast<int32_t>(random_() % 2));
  }
  void truncate(pair_of_sequences& s) {
    int32_t reached = -1;
    const int32_t n = number(s.cxx.held() + 1);
    const kvc_status c = kvc_truncate(cache, s.c, n, &reached, &error);
    agree(c, reached, s.cxx.truncate(n));
    if (c == KVC_OK) s.text.resize(static_cast<size_t>(reached));
  }
  void commit(pair_of_sequences& s) {
    int32_t indexed = -1;
    if (random_() % 16 == 0 && !s.text.empty())
      s.text[random_() % s.text.size()] ^= 1;  // may be another text now
    const auto n = static_cast<int32_t>(s.text.size());
    const kvc_status c = kvc_commit(cache, s.c, s.text.data(), n, &indexed, &error);
    agree(c, indexed, s.cxx.commit(s.text));
  }
  void retain(pair_of_sequences& s) {
    kvc_drop d{};
    d.struct_size = sizeof d;
    d.form = static_cast<int32_t>(random_() % 4);
    d.keep = number(s.cxx.held());
    d.sinks = random_() % 2 == 0 ? number(3) : d.keep / 16 * 8;
    d.recent = number(3);
    d.move_sinks = static_cast<int32_t>(random_() % 2);
    d.overwritten = number(3);
    d.at_a_loss = static_cast<int32_t>(random_() % 2);
    if (d.form == KVC_DROP_WHOLE_BLOCKS && random_() % 2 == 0) d.keep = s.cxx.held() - cxx.shape().unit;
    int32_t dropped = -1, returned = -1;
    const kvc_status c = kvc_retain(cache, s.c, &d, &dropped, &returned, &error);
    const auto r = s.cxx.retain({.form = static_cast<drop_form>(d.form),
                                 .keep = d.keep,
                                 .sinks = d.sinks,
                                 .recent = d.recent,
                                 .move_sinks = d.move_sinks != 0},
                                d.overwritten, d.at_a_loss != 0);
    agree(c, r.error());
    if (!r) return;
    REQUIRE(dropped == r->dropped);
    REQUIRE(returned == r->blocks_returned);
    drops[d.form] += r->dropped > 0;
  }
  void fork(pair_of_sequences& s) {
    pair_of_sequences f;
    f.text = s.text;
    auto forked = s.cxx.fork();
    agree(kvc_fork(cache, s.c, &f.c, &error), 0, forked);
    if (!forked) return;
    f.cxx = std::move(*forked);
    live.push_back(std::move(f));
  }
  void assign(pair_of_sequences& to, pair_of_sequences& from) {
    int32_t touched = -1;
    const kvc_status c = kvc_assign(cache, to.c, from.c, &touched, &error);
    agree(c, touched, to.cxx.assign(from.cxx));
    if (c == KVC_OK) to.text = from.text;
  }
  void close(size_t k) {
    const kvc_sequence gone = live[k].c;
    agree(kvc_close(cache, gone, &error), live[k].cxx.close());
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(k));
    REQUIRE(kvc_close(cache, gone, &error) == KVC_STALE_HANDLE);
  }
  void evict_or_peek() {
    int32_t c = -1;
    if (random_() % 8 == 0) {
      const int32_t n = static_cast<int32_t>(random_() % 4);
      REQUIRE(kvc_cache_evict(cache, n, &c, nullptr) == KVC_OK);
      REQUIRE(c == cxx.evict(n));
      time_ += random_() % 3 * 1'000'000;
      REQUIRE(kvc_cache_set_time(cache, time_, &c, nullptr) == KVC_OK);
      REQUIRE(c == cxx.set_time(time_));
      return;
    }
    const std::vector<int32_t> t = any_text();
    const domain d = any_domain();
    node_id scratch[64];
    REQUIRE(kvc_peek(cache, &d.c, t.data(), static_cast<int32_t>(t.size()), 2, &c, nullptr) == KVC_OK);
    REQUIRE(c == cxx.peek(t, d.cxx, scratch, 2));
  }

  void compare(const pair_of_sequences& s) {
    kvc_lengths l{};
    l.struct_size = sizeof l;
    REQUIRE(kvc_get_lengths(cache, s.c, &l, nullptr) == KVC_OK);
    REQUIRE(l.held == s.cxx.held());
    REQUIRE(l.accepted == s.cxx.accepted());
    REQUIRE(l.committed == s.cxx.committed());
    REQUIRE(l.reused == s.cxx.reused());
    REQUIRE(l.place == s.cxx.place());
    REQUIRE(l.dropped == s.cxx.dropped());
    REQUIRE(l.position == s.cxx.position());
    for (int32_t g = 0; g < cxx.shape().groups; ++g) {
      const int32_t* ids = nullptr;
      int32_t n = -1;
      REQUIRE(l.sealed[g] == s.cxx.sealed(g));
      REQUIRE(kvc_table(cache, s.c, g, &ids, &n, nullptr) == KVC_OK);
      const int32_t tokens = s.cxx.held() - s.cxx.held() / 3;
      int32_t sealed = -1;
      REQUIRE(kvc_sealed_at(cache, s.c, g, tokens, &sealed, nullptr) == KVC_OK);
      REQUIRE(sealed == s.cxx.sealed_at(tokens, g));
      const auto table = s.cxx.table(g), open = s.cxx.open_table(g);
      REQUIRE(same(ids, n, {reinterpret_cast<const int32_t*>(table.data()), table.size()}));
      REQUIRE(kvc_open_table(cache, s.c, g, &ids, &n, nullptr) == KVC_OK);
      REQUIRE(same(ids, n, {reinterpret_cast<const int32_t*>(open.data()), open.size()}));
    }
  }

  std::mt19937_64 random_;
  uint64_t time_ = 0;
  size_t accounts_;
  kvc_scope inner_{};
};

void drive(const char* name, const setting& s, uint64_t usual) {
  const uint64_t seed = test_seed(name, usual);
  twins t(s, seed);
  const int64_t all = 40000, n = effort(all);
  // Packed blocks allow few drops that are chosen without looking: a short run goes on until it has seen
  // some.
  const bool all_exact = std::count(s.kind.begin(), s.kind.end(), exact) == std::ssize(s.kind);
  const auto forms = [&t] {
    int seen = 0;
    for (int form = KVC_DROP_WHOLE_BLOCKS; form <= KVC_DROP_GATHER; ++form) seen += t.drops[form] > 0;
    return seen;
  };
  const int least_forms = all_exact ? 3 : 2;
  for (int64_t i = 0; i < n || (i < all && forms() < least_forms); ++i) {
    INFO("operation " << i);
    t.operate();
    t.compare();
    if (i % 500 != 0) continue;
    const char* broken = "not asked";
    REQUIRE(kvc_cache_check(t.cache, &broken, nullptr) == KVC_OK);
    REQUIRE(broken == nullptr);
  }
  CHECK(t.refused > n / 50);
  CHECK(forms() >= least_forms);
  CHECK(t.cxx.count().nodes_evicted > 0);
  CHECK(t.cxx.count().tokens_reused > 0);
}

}  // namespace

TEST_CASE("random operations through C answer as through C++: one group, least recently used") {
  drive("capi one group", {{4}, {24}, {exact}, "ttl:0", {}}, 1);
}
TEST_CASE("random operations through C answer as through C++: two groups, accounts, least frequently used") {
  drive("capi two groups", {{8, 4}, {16, 30}, {exact, exact}, "lfu", {14, 40}, 9, 3, 2}, 2);
}
TEST_CASE("random operations through C answer as through C++: a lossy group beside an exact one") {
  drive("capi lossy", {{4, 8}, {40, 20}, {packed, exact}, "priority", {60, 30, 20}, 0, 40}, 3);
}
TEST_CASE("random operations through C answer as through C++: deferred seals beside exact first tokens") {
  drive("capi deferred",
        {{8, 4, 2}, {20, 40, 12}, {deferred, packed, first_only}, "s3_fifo:30,uses=1", {}, 0, 40}, 4);
}
