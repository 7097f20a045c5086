// SPDX-License-Identifier: Apache-2.0
// Dropping tokens of packed sequences: random operations on a cache with lossy groups against a list per
// sequence, on planes whose slots remember what was written and whether it was packed.
#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvcache/cache.hpp"
#include "kvcache/cache/compatible.hpp"
#include "kvcache/quant/presets.hpp"
#include "kvcache/retain/parse.hpp"
#include "support/environment.hpp"

using namespace kvcache;

namespace {

struct world_rules {
  int32_t residual = 0;
  bool deferred = false;
  int32_t exempt = 0;
  bool both_lossy = false;
};

struct plane {
  int32_t block_size;
  std::vector<uint64_t> slots;
  uint64_t& at(int32_t block, int32_t i) {
    return slots.at(static_cast<size_t>(block) * static_cast<size_t>(block_size) + static_cast<size_t>(i));
  }
};

/// What a slot holds once its block is packed.
uint64_t packed_form(uint64_t content) {
  return mix64(content + 7);
}

struct live {
  sequence seq;
  std::vector<uint64_t> text;             // by slot, as written
  std::vector<std::vector<char>> packed;  // [group] by block
  std::vector<int32_t> keep;
  int32_t written = 0;
};

constexpr int32_t max_tokens = 96;

class driver {
 public:
  driver(uint32_t seed, const world_rules& r) : rules_(r), random_(seed) {
    const block_format lossy{.block = bytes{64},
                             .open_block = bytes{256},
                             .residual = r.residual,
                             .lossy = true,
                             .deferred = r.deferred,
                             .exempt = r.exempt};
    add(4, lossy, false);
    add(8, r.both_lossy ? lossy : block_format{}, false);
    if (r.exempt != 0) add(r.exempt, {}, true);
    cache_ = *cache::create({.groups = configs_,
                             .max_sequences = 5,
                             .max_sequence_tokens = max_tokens,
                             .max_commands = 120,
                             .max_gathers = 2,
                             .max_step_tokens = 80});
  }

  void step() {
    if (live_.size() < 4 && below(3) == 0) open();
    if (!live_.empty()) act(below(static_cast<int32_t>(live_.size())));
    finish();
  }
  int drops[4] = {};
  int refused = 0;
  int sealed_drops = 0, late_drops = 0;

 private:
  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(n)); }
  int32_t groups() const { return static_cast<int32_t>(configs_.size()); }
  bool lossy(int32_t g) const { return configs_[static_cast<size_t>(g)].format.lossy; }
  bool first_only(int32_t g) const { return configs_[static_cast<size_t>(g)].first_only; }
  int32_t block(int32_t g) const { return configs_[static_cast<size_t>(g)].block_size; }

  void add(int32_t block_size, const block_format& f, bool first_only) {
    const int32_t total = first_only ? 24 : 192 / block_size;
    configs_.push_back({.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                        .block_size = block_size,
                        .total = {total},
                        .open = {f.lossy ? total / 2 : 0},
                        .format = f,
                        .first_only = first_only});
    closed_.push_back({block_size, std::vector<uint64_t>(static_cast<size_t>(total * block_size))});
    open_.push_back(closed_.back());
  }

  void open() {
    std::vector<token_id> prompt(static_cast<size_t>(below(40)));
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = below(i < 8 ? 2 : 1);
    auto s = cache_.open(prompt, scope::shared());
    if (!s) return;
    auto l = std::make_unique<live>();
    l->seq = *std::move(s);
    l->packed.resize(static_cast<size_t>(groups()));
    for (int32_t i = 0; i < l->seq.reused(); ++i) put(*l, prompt[static_cast<size_t>(i)]);
    for (int32_t g = 0; g < groups(); ++g) {
      l->packed[static_cast<size_t>(g)].assign(l->text.size() / static_cast<size_t>(block(g)), lossy(g));
    }
    l->written = l->seq.reused();
    live_.push_back(std::move(l));
  }
  void put(live& s, token_id t) {
    s.text.push_back(mix64((s.text.empty() ? 0 : s.text.back()) * 31 + static_cast<uint64_t>(t) + 1));
  }
  void act(int32_t k) {
    live& s = *live_[static_cast<size_t>(k)];
    const int32_t what = below(10);
    if (what < 4) {
      const int32_t n = 1 + below(24);
      if (!s.seq.extend(n)) return void(++refused);
      for (int32_t i = 0; i < n; ++i) s.text.push_back(random_());
      if (!rules_.deferred) seal(s);
    } else if (what < 7) {
      retain(s);
    } else if (what == 7 && live_.size() < 5) {
      fork(s);
    } else if (what == 8 && rules_.deferred) {
      if (s.seq.settle()) seal(s);
    } else if (below(3) == 0) {
      live_.erase(live_.begin() + k);
    } else {
      truncate(s);
    }
  }
  /// The rule, from its words: a block is packed if its end and the residual lie within the text.
  void seal(live& s) {
    for (int32_t g = 0; g < groups(); ++g) {
      if (!lossy(g)) continue;
      auto& flags = s.packed[static_cast<size_t>(g)];
      flags.resize(s.text.size() / static_cast<size_t>(block(g)));
      for (size_t j = 0; j < flags.size(); ++j) {
        const auto end = static_cast<int32_t>(j + 1) * block(g);
        if (end + rules_.residual <= static_cast<int32_t>(s.text.size())) flags[j] = 1;
      }
    }
  }
  void fork(live& s) {
    auto f = s.seq.fork();
    if (!f) return;
    auto l = std::make_unique<live>();
    l->seq = *std::move(f);
    l->text = s.text;
    l->packed = s.packed;
    l->written = s.written;
    live_.push_back(std::move(l));
  }
  void truncate(live& s) {
    const auto n = s.seq.truncate(below(s.seq.held() + 1));
    REQUIRE(n);
    s.text.resize(static_cast<size_t>(*n));
    s.written = std::min(s.written, *n);
    for (int32_t g = 0; g < groups(); ++g) {
      auto& flags = s.packed[static_cast<size_t>(g)];
      flags.resize(std::min(flags.size(), static_cast<size_t>(*n / block(g))));
      if (lossy(g)) REQUIRE(s.seq.sealed(g) <= *n);
    }
  }

  bool any_packed(const live& s) const {
    bool any = false;
    for (const auto& flags : s.packed) any |= std::count(flags.begin(), flags.end(), 1) > 0;
    return any;
  }
  keep_plan choose(const live& s) {
    const int32_t held = s.seq.held();
    keep_plan p;
    p.form = static_cast<drop_form>(1 + below(3));
    p.keep = 1 + below(held);
    p.sinks = std::min(p.keep, below(2) == 0 ? rules_.exempt : below(p.keep + 1));
    p.recent = below(p.keep - p.sinks + 1);
    if (p.form != drop_form::whole_blocks) return p;
    p.sinks = below(held / 8 + 1) / 2 * 8;
    p.keep = held - below((held - p.sinks) / 8 + 1) * 8;
    p.recent = 0;
    p.move_sinks = below(6) == 0;
    return p;
  }
  void retain(live& s) {
    if (s.seq.held() == 0 || s.written != s.seq.held()) return;
    const keep_plan p = choose(s);
    if (p.keep < std::max(p.sinks, 1)) return;
    const int32_t overwritten = p.form == drop_form::overwrite ? below(std::min(s.seq.held(), 2) + 1) : 0;
    const bool packed = any_packed(s);
    const bool allowed =
        !(p.form == drop_form::whole_blocks ? p.move_sinks : packed) && p.sinks >= rules_.exempt;
    const int32_t returned = expected_return(s, p);
    const uint64_t before = everything();
    const bool at_a_loss = below(3) == 0;
    const auto r = s.seq.retain(p, overwritten, at_a_loss);
    INFO("form " << static_cast<int>(p.form) << " keep " << p.keep << " sinks " << p.sinks << ": "
                 << to_text(r.error().code) << " " << r.error().field << " " << r.error().value);
    if (!r) {
      ++refused;
      REQUIRE(everything() == before);
      if (!allowed) REQUIRE(r.error().code == errc::unsupported);
      if (allowed) REQUIRE(r.error().code != errc::unsupported);
      return;
    }
    REQUIRE((allowed));
    if (r->dropped == 0) return;
    REQUIRE(r->blocks_returned == returned);
    ++drops[static_cast<int>(p.form)];
    sealed_drops += packed;
    apply(s, p, overwritten);
  }
  /// Blocks that nobody holds any more, less the new ones, counted over all tables.
  int32_t expected_return(const live& s, const keep_plan& p) {
    int32_t n = 0;
    for (int32_t g = 0; g < groups(); ++g) {
      if (first_only(g)) continue;
      const auto table = s.seq.table(g);
      const int32_t kept = ceil_div(p.keep, block(g)), columns = static_cast<int32_t>(table.size());
      const bool cut = p.form == drop_form::whole_blocks;
      const int32_t from = cut ? p.sinks / block(g) : kept,
                    to = cut ? from + (s.seq.held() - p.keep) / block(g) : columns;
      const int32_t own = cut ? 0 : p.form == drop_form::gather ? kept : columns;
      for (int32_t k = 0; k < columns; ++k) {
        const block_id b = table[static_cast<size_t>(k)];
        int32_t holders = 0;
        for (const auto& l : live_) {
          const auto t = l->seq.table(g);
          holders += static_cast<int32_t>(std::count(t.begin(), t.end(), b));
        }
        const bool goes = k >= from && k < to && p.form != drop_form::overwrite;
        const bool replaced = k < own && cache_.pool(g).immutable(b);
        n += (goes || replaced) && holders == 1;
        n -= replaced;
      }
    }
    return n;
  }
  void apply(live& s, const keep_plan& p, int32_t overwritten) {
    const auto held = static_cast<int32_t>(s.text.size());
    if (p.form == drop_form::gather) {
      std::vector<int32_t> kept(static_cast<size_t>(held));
      std::iota(kept.begin(), kept.end(), 0);
      std::shuffle(kept.begin() + p.sinks, kept.end() - p.recent, random_);
      const int32_t middle = p.keep - p.sinks - p.recent;
      kept.erase(kept.begin() + p.sinks + middle, kept.end() - p.recent);
      std::sort(kept.begin(), kept.end());
      std::vector<uint64_t> text;
      for (const int32_t i : kept) text.push_back(s.text[static_cast<size_t>(i)]);
      s.text = text;
      s.keep = kept;
      for (auto& flags : s.packed) flags.clear();
    } else if (p.form == drop_form::whole_blocks) {
      const int32_t drop = held - p.keep;
      s.text.erase(s.text.begin() + p.sinks, s.text.begin() + p.sinks + drop);
      for (int32_t g = 0; g < groups(); ++g) {
        auto& flags = s.packed[static_cast<size_t>(g)];
        if (!lossy(g)) continue;
        flags.resize(static_cast<size_t>(held / block(g)));
        const auto at = flags.begin() + p.sinks / block(g);
        flags.erase(at, at + std::min<std::ptrdiff_t>(drop / block(g), flags.end() - at));
      }
    } else {
      for (int32_t k = 0; k < overwritten && held > rules_.exempt; ++k) {
        const auto i = rules_.exempt + below(held - rules_.exempt);
        s.text[static_cast<size_t>(i)] = random_();
        rewritten_.push_back({&s, i});
      }
    }
    s.written = static_cast<int32_t>(s.text.size());
  }
  /// Everything that an engine can see.
  uint64_t everything() {
    uint64_t h = 0;
    const auto see = [&](uint64_t x) { h = mix64(h ^ x) + x; };
    for (const auto& l : live_) {
      for (const int32_t n : {l->seq.held(), l->seq.position(), l->seq.committed()})
        see(static_cast<uint64_t>(n));
      for (int32_t g = 0; g < groups(); ++g) {
        see(static_cast<uint64_t>(l->seq.sealed(g)));
        for (const block_id b : l->seq.table(g)) see(static_cast<uint64_t>(raw(b)) + 2);
        for (const block_id b : l->seq.open_table(g)) see(static_cast<uint64_t>(raw(b)) + 3);
      }
    }
    const stats s = cache_.count();
    for (const uint64_t n : {s.blocks_used, s.blocks_cached, s.nodes, s.blocks_copied}) see(n);
    see(static_cast<uint64_t>(cache_.commands().size()));
    see(cache_.seals().size());
    return h;
  }

  void finish() {
    run_commands(0);
    for (auto& l : live_) {
      for (; l->written < static_cast<int32_t>(l->text.size()); ++l->written) write(*l, l->written);
      l->keep.clear();
    }
    write_over();
    for (const kvc_command& c : cache_.seals()) run(c, {});
    if (below(3) == 0 && !live_.empty()) {  // after the step's attention, before it ends
      const int32_t done = cache_.commands().size();
      late_drops -= drops[1];
      retain(*live_[static_cast<size_t>(below(static_cast<int32_t>(live_.size())))]);
      late_drops += drops[1];
      run_commands(done);
      for (auto& l : live_) l->keep.clear();
      write_over();
    }
    cache_.end_step();
    const char* broken = cache_.check_invariants();
    INFO((broken == nullptr ? "" : broken));
    REQUIRE(broken == nullptr);
    for (const auto& l : live_) compare(*l);
  }
  void run_commands(int32_t from) {
    const command_list& list = cache_.commands();
    for (int32_t stage = 0; stage < list.stages(); ++stage) {
      std::vector<kvc_command> now;
      for (const kvc_command& c : list.view().subspan(static_cast<size_t>(from))) {
        if (c.stage == stage) now.push_back(c);
      }
      std::shuffle(now.begin(), now.end(), random_);
      for (const kvc_command& c : now) run(c, list.ids());
    }
  }
  void write_over() {
    for (const auto& r : rewritten_) {
      if (std::any_of(live_.begin(), live_.end(), [&](const auto& x) { return x.get() == r.first; }))
        write(*r.first, r.second);
    }
    rewritten_.clear();
  }
  void write(live& s, int32_t slot) {
    for (int32_t g = 0; g < groups(); ++g) {
      if (first_only(g) && slot >= block(g)) continue;
      const auto column = static_cast<size_t>(slot / block(g));
      const block_id b = (lossy(g) ? s.seq.open_table(g) : s.seq.table(g))[column];
      REQUIRE(b != no_block);
      if (!lossy(g)) REQUIRE_FALSE(cache_.pool(g).immutable(b));
      auto& p = (lossy(g) ? open_ : closed_)[static_cast<size_t>(g)];
      p.at(raw(b), slot % block(g)) = s.text[static_cast<size_t>(slot)];
    }
  }
  void run(const kvc_command& c, std::span<const int32_t> ids) {
    plane& closed = closed_[c.group];
    plane& open = open_[c.group];
    if (c.op == KVC_OP_COPY) {
      for (int32_t i = 0; i < c.tokens; ++i) closed.at(c.dst, i) = closed.at(c.src, i);
    } else if (c.op == KVC_OP_COPY_OPEN) {
      for (int32_t i = 0; i < c.tokens; ++i) open.at(c.dst, i) = open.at(c.src, i);
    } else if (c.op == KVC_OP_SEAL) {
      for (int32_t i = 0; i < c.tokens; ++i) {
        closed.at(c.dst, i) = i < c.arg ? 0 : packed_form(open.at(c.src, i));
      }
    } else {
      REQUIRE(c.op == KVC_OP_GATHER);
      gather(lossy(c.group) ? open : closed, ids.data() + c.arg, c.tokens);
    }
  }
  void gather(plane& p, const int32_t* id, int32_t tokens) {
    const int32_t *src = id + 3, *dst = id + 3 + id[0];
    const auto owner =
        std::find_if(live_.begin(), live_.end(), [&](const auto& l) { return l->seq.place() == id[2]; });
    if (owner == live_.end()) return;
    for (int32_t t = 0; t < tokens; ++t) {
      const int32_t k = (*owner)->keep.at(static_cast<size_t>(t));
      p.at(dst[t / p.block_size], t % p.block_size) = p.at(src[k / p.block_size], k % p.block_size);
    }
  }
  void compare(live& s) {
    for (int32_t g = 0; g < groups(); ++g) {
      auto& flags = s.packed[static_cast<size_t>(g)];
      for (int32_t i = 0; i < static_cast<int32_t>(s.text.size()); ++i) {
        if (first_only(g) && i >= block(g)) break;
        INFO("group " << g << " slot " << i << " of " << s.text.size());
        const auto column = static_cast<size_t>(i / block(g));
        const bool packed = lossy(g) && column < flags.size() && flags[column] != 0;
        if (lossy(g)) REQUIRE(packed == (i < s.seq.sealed(g)));
        const uint64_t exact = s.text[static_cast<size_t>(i)];
        uint64_t want = packed ? packed_form(exact) : exact;
        if (packed && i < rules_.exempt) want = 0;
        const bool in_open = lossy(g) && !packed;
        const block_id b = (in_open ? s.seq.open_table(g) : s.seq.table(g))[column];
        REQUIRE(b != no_block);
        auto& p = (in_open ? open_ : closed_)[static_cast<size_t>(g)];
        REQUIRE(p.at(raw(b), i % block(g)) == want);
      }
    }
  }

  world_rules rules_;
  std::mt19937 random_;
  std::vector<group_config> configs_;
  cache cache_;
  std::vector<plane> closed_, open_;
  std::vector<std::unique_ptr<live>> live_;
  std::vector<std::pair<live*, int32_t>> rewritten_;
};

status fits(const char* policy, kv_format format, bool deferred, drop_times when = drop_times::every_token) {
  const parsed_retention how = parse_retention(policy);
  REQUIRE(how.ok());
  return compatible(how.value, {&format, 1}, 64, deferred, when);
}

}  // namespace

TEST_CASE("whatever is dropped from packed sequences, every table reads what stayed in the form it has") {
  // Below twelve not every kind of sequence occurs.
  const int effort = std::max(12, static_cast<int>(test::effort(24)));
  int drops[4] = {};
  int refused = 0, sealed_drops = 0, late_drops = 0;
  for (int seed = 0; seed < effort; ++seed) {
    const world_rules r{.residual = (seed % 3) * 5,
                        .deferred = seed / 3 % 2 == 1,
                        .exempt = seed / 6 % 2 * 2,
                        .both_lossy = seed / 12 % 2 == 1};
    INFO("seed " << seed << " residual " << r.residual << " deferred " << r.deferred << " exempt "
                 << r.exempt);
    driver d(static_cast<uint32_t>(seed), r);
    for (int i = 0; i < 600; ++i) d.step();
    for (int k = 0; k < 4; ++k) drops[k] += d.drops[k];
    refused += d.refused;
    sealed_drops += d.sealed_drops;
    late_drops += d.late_drops;
  }
  CHECK(drops[static_cast<int>(drop_form::gather)] > effort);
  CHECK(drops[static_cast<int>(drop_form::whole_blocks)] > effort);
  CHECK(drops[static_cast<int>(drop_form::overwrite)] > effort);
  CHECK(sealed_drops > effort);
  CHECK(late_drops > effort / 4);
  CHECK(refused > effort);
}

TEST_CASE(
    "packed tokens are not moved, nor sinks turned, nor exempt tokens dropped: each is refused by name") {
  group_config g[] = {{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                       .block_size = 4,
                       .total = {32},
                       .format = {.block = bytes{64}, .residual = 0, .lossy = true, .exempt = 1}},
                      {.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                       .block_size = 1,
                       .total = {4},
                       .first_only = true}};
  cache c = *cache::create({.groups = g, .max_sequences = 2});
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(16));
  const auto refused = [&](const keep_plan& p, const char* field, int64_t value) {
    const auto r = a->retain(p);
    CHECK(r.error().code == errc::unsupported);
    CHECK(std::string(r.error().field) == field);
    CHECK(r.error().value == value);
    CHECK(a->held() == 16);
    CHECK(c.seals().size() == 4);
  };
  refused({.form = drop_form::gather, .keep = 8, .sinks = 1}, "sealed", 16);
  refused({.form = drop_form::overwrite, .keep = 8, .sinks = 1}, "sealed", 16);
  refused({.form = drop_form::whole_blocks, .keep = 12, .sinks = 4, .move_sinks = true}, "move_sinks", 0);
  refused({.form = drop_form::whole_blocks, .keep = 12}, "sinks", 0);
  const auto done = a->retain({.form = drop_form::whole_blocks, .keep = 8, .sinks = 4});
  REQUIRE(done);
  CHECK(done->blocks_returned == 2);
  CHECK(c.seals().size() == 2);  // those of the dropped blocks were taken out
  CHECK(a->sealed() == 8);
  CHECK(a->table(1).size() == 1);  // the exact copy of the first token stays
  c.end_step();
  CHECK(c.check_invariants() == nullptr);
}

TEST_CASE("a policy and a format are known to fit or not before there is a cache") {
  const kv_format packed = find_preset("kv4")->format;  // exempts the first token
  CHECK(fits("full", packed, false));
  CHECK(fits("snapkv:capacity=256,window=32", {}, false));
  const auto refused = [](const status& s, const char* field) {
    CHECK(s.code == errc::unsupported);
    CHECK(std::string(s.field) == field);
  };
  refused(fits("snapkv:capacity=256,window=32", packed, true), "sinks");
  refused(fits("window:256", packed, true), "sinks");
  refused(fits("far_rms:capacity=256,sinks=4", packed, false), "sealed");
  refused(fits("far_rms:capacity=256,sinks=4", packed, true), "sealed");  // while decoding
  CHECK(fits("far_rms:capacity=256,sinks=4", packed, true, drop_times::prompt_end));
  refused(fits("far_rms:capacity=256,sinks=4", packed, false, drop_times::prompt_end), "sealed");
  refused(fits("streaming_llm:sinks=4,window=252", packed, false), "move_sinks");
  kv_format plain = packed;
  plain.exempt = 0;
  CHECK(fits("streaming_llm:sinks=0,window=252", plain, false));
  CHECK(fits("snapkv:capacity=256,window=32", plain, true, drop_times::prompt_end));
  plain.residual = 256;  // nothing of a text of 257 tokens is packed
  CHECK(fits("h2o:heavy=128,recent=128", plain, true));
  const kv_format uneven[] = {packed, plain};
  const parsed_retention full = parse_retention("full");
  CHECK(std::string(compatible(full.value, uneven, 64, true, drop_times::prompt_end).field) == "residual");
}

TEST_CASE("what a drop left is not cut inside a packed block: the sequence then begins anew") {
  group_config g{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                 .block_size = 8,
                 .total = {32},
                 .format = {.block = bytes{64}, .lossy = true, .deferred = true}};
  cache c = *cache::create({.groups = {&g, 1}, .max_sequences = 2});
  auto a = c.open({}, scope::shared());
  REQUIRE(a->extend(20));
  c.end_step();
  REQUIRE(a->retain({.form = drop_form::gather, .keep = 10}));
  REQUIRE(a->extend(10));
  c.end_step();
  REQUIRE(a->settle());
  c.end_step();
  CHECK(a->sealed() == 16);
  CHECK(*a->truncate(17) == 17);
  CHECK(*a->truncate(12) == 0);  // an edge below, where the drop left slots in no order of the text
  CHECK(a->position() == 0);
  CHECK(c.check_invariants() == nullptr);
}

TEST_CASE(
    "blocks that a sibling packed before it closed are packed anew once their open forms were gathered") {
  group_config g{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                 .block_size = 4,
                 .total = {32},
                 .format = {.block = bytes{64}, .lossy = true, .deferred = true}};
  for (const drop_form form : {drop_form::gather, drop_form::overwrite}) {
    cache c = *cache::create({.groups = {&g, 1}, .max_sequences = 2});
    auto a = c.open({}, scope::shared());
    REQUIRE(a->extend(12));
    c.end_step();
    auto b = a->fork();
    REQUIRE(b->settle());
    CHECK(c.commands().size() == 3);
    c.end_step();
    REQUIRE(b->close());
    REQUIRE(a->retain({.form = form, .keep = 8}, form == drop_form::overwrite ? 1 : 0));
    c.end_step();
    REQUIRE(a->settle());
    CHECK(c.commands().size() == (form == drop_form::gather ? 2 : 3));
    c.end_step();
    CHECK(c.check_invariants() == nullptr);
  }
}
