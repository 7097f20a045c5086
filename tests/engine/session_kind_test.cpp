// SPDX-License-Identifier: Apache-2.0
// Requests served under a retention policy: whatever the scheduler does, each gets the tokens, and the logits
// bit for bit, of a session of its own.
#include "session_kind.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "scheduler_support.hpp"
#include "support/environment.hpp"

using namespace engine;
using namespace engine::test;

namespace {

bool brief() {
  return kvcache::test::effort(100) < 100;
}

struct setting {
  std::string policy = "window:40";
  drop_mode mode = drop_mode::stream;
  int batch = 8;
  int chunk = 32;
  int block = 16;
  std::int64_t blocks = 0;
  int max_tokens = 320;
};

kvcache::retention policy(const std::string& text) {
  const auto parsed = parse_policy(text);
  if (!parsed) FAIL(describe(parsed.error()));
  return *parsed;
}

cache_config config_of(const setting& s) {
  cache_config config = machine().config(s.batch, s.max_tokens);
  config.block_size = s.block;
  config.blocks = s.blocks;
  return config;
}

std::unique_ptr<cache_kind> cache_for(const setting& s) {
  auto made = make_session_kind(*machine().model, {policy(s.policy), s.mode}, config_of(s));
  if (!made) FAIL(describe(made.error()));
  return std::move(*made);
}

struct expected_answer {
  std::vector<token_id> ids;
  std::uint64_t fnv = chain_start;
  int dropped = 0;  ///< at the end
  int served = -1;  ///< what the first serving says
};

/// The answer of a session of its own, in a cache of its own.
expected_answer alone(const setting& s, const answer& a) {
  setting roomy = s;
  roomy.batch = 1;
  roomy.blocks = 0;
  auto cache = session_cache::create(config_of(roomy));
  REQUIRE(cache);
  generation_options options;
  options.max_new = a.from->max_new;
  options.how = a.from->how;
  options.how.seed += static_cast<std::uint64_t>(a.sample);
  const auto prompt = std::span(a.text).first(static_cast<std::size_t>(a.prompt_tokens));
  expected_answer out;
  const auto made = generate(
      *machine().model, **cache, {policy(s.policy), s.mode}, prompt, a.from->scope, kv_type::f32, options,
      is_stop, [](token_id) {},
      [&](int, std::span<const float> logits) { out.fnv = chain(out.fnv, fingerprint(logits)); });
  REQUIRE(made);
  out.ids = made->ids;
  out.dropped = made->dropped;
  return out;
}

// Remembered by all that the answer may depend on.
expected_answer& expected(const setting& s, const answer& a) {
  using key = std::tuple<std::string, drop_mode, int, std::vector<token_id>, std::uint64_t, int, double, int>;
  static std::map<key, expected_answer> known;
  const auto& how = a.from->how;
  const key k{s.policy, s.mode,   s.block,         {a.text.begin(), a.text.begin() + a.prompt_tokens},
              how.seed, a.sample, how.temperature, a.from->max_new};
  const auto [at, fresh] = known.try_emplace(k);
  if (fresh) at->second = alone(s, a);
  return at->second;
}

serve_totals serve_and_compare(const setting& s, cache_kind& cache, const std::vector<job>& jobs) {
  CAPTURE(s.policy, name_of(s.mode), s.batch, s.chunk, s.block, s.blocks);
  scheduler serve(*machine().model, cache, jobs, {s.batch, s.chunk, is_stop});
  REQUIRE(serve.run({}));
  CHECK_FALSE(serve.failure());
  int dropped = 0;
  for (const answer* a : serve.answers()) {
    expected_answer& e = expected(s, *a);
    const auto ids = a->ids();
    INFO(a->from->id << " turn " << a->turn << " sample " << a->sample);
    CHECK(std::vector<token_id>(ids.begin(), ids.end()) == e.ids);
    CHECK(a->fnv == e.fnv);
    // The last drop may still be due when the answer ends; that is all.
    if (e.served < 0) e.served = a->dropped;
    CHECK(a->dropped == e.served);
    CHECK(a->dropped <= e.dropped);
    CHECK(a->reused + a->prefilled == a->prompt_tokens);
    dropped += a->dropped;
  }
  const serve_totals& totals = serve.totals();
  CHECK(totals.dropped == dropped);
  CHECK(totals.peak_held <= totals.peak_reserved);
  const serve_progress p = serve.progress();
  CHECK(p.answered == p.answers_expected);
  CHECK(p.tokens_done == p.tokens_expected);
  CHECK(cache.bytes().held == 0);
  CHECK(cache.counts().blocks_used == 0);
  return totals;
}

serve_totals serve_and_compare(const setting& s, const std::vector<job>& jobs) {
  const auto cache = cache_for(s);
  return serve_and_compare(s, *cache, jobs);
}

// One of each form: overwriting, whole blocks, several at a time, gathering, tables per head.
const char* const policies[] = {"window:24",
                                "streaming_llm:sinks=4,window=28",
                                "h2o:heavy=12,recent=12",
                                "h2o:heavy=20,recent=12,every=8",
                                "tova:24",
                                "snapkv:capacity=32,window=8",
                                "far_rms:capacity=32,recent=8,sinks=2,distance=8",
                                "far_rms:capacity=32,recent=8,sinks=2,distance=8,budget=global"};

}  // namespace

TEST_CASE("a policy that keeps everything is the paged kind, to the bit and to the block") {
  splitmix64 random(kvcache::test::test_seed("sessions and pages", 3));
  std::int64_t preemptions = 0;
  for (std::int64_t round = std::max<std::int64_t>(4, kvcache::test::effort(20)); round > 0; --round) {
    const auto jobs = mixed_jobs(random.next() % 4);
    std::int64_t longest = 0;
    for (const job& j : jobs) longest = std::max(longest, most_tokens(j, j.follow_ups.size()));
    setting s;
    s.policy = "full";
    s.mode = static_cast<drop_mode>(round % 3);
    s.block = 8 << random.next() % 3;
    s.blocks =
        round % 2 == 0 ? 0 : (longest + s.block - 1) / s.block + static_cast<std::int64_t>(random.next() % 6);
    s.batch = 2 + static_cast<int>(random.next() % 7);
    s.chunk = 1 + static_cast<int>(random.next() % 64);
    CAPTURE(name_of(s.mode), s.batch, s.chunk, s.block, s.blocks);
    const auto sessions = cache_for(s);
    const auto pages = open_cache("paged", config_of(s));
    scheduler a(*machine().model, *sessions, jobs, {s.batch, s.chunk, is_stop});
    scheduler b(*machine().model, *pages, jobs, {s.batch, s.chunk, is_stop});
    REQUIRE(a.run({}));
    REQUIRE(b.run({}));
    const auto ours = a.answers(), theirs = b.answers();
    REQUIRE(ours.size() == theirs.size());
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CHECK(ours[i]->text == theirs[i]->text);
      CHECK(ours[i]->fnv == theirs[i]->fnv);
      CHECK(ours[i]->dropped == 0);
    }
    // oneshot resumes from the prompt only, and steps of out_of_blocks end where blocks do.
    if (s.mode != drop_mode::stream) continue;
    CHECK(a.totals().steps == b.totals().steps);
    CHECK(a.totals().reused == b.totals().reused);
    CHECK(a.totals().recomputed == b.totals().recomputed);
    CHECK(a.totals().preemptions == b.totals().preemptions);
    CHECK(a.totals().peak_blocks == b.totals().peak_blocks);
    CHECK(a.totals().peak_held == b.totals().peak_held);
    CHECK(a.totals().held_steps == b.totals().held_steps);
    CHECK(sessions->counts().evictions == pages->counts().evictions);
    CHECK(sessions->counts().copies == pages->counts().copies);
    preemptions += a.totals().preemptions;
  }
  CHECK(preemptions > 0);
}

TEST_CASE(
    "under a policy a request's answer is the one it gets alone, for every batch, chunk and block size") {
  const auto jobs = mixed_jobs(kvcache::test::test_seed("mixed jobs", 21));
  int settings = 0;
  for (const char* p : policies) {
    for (const drop_mode mode : {drop_mode::stream, drop_mode::oneshot}) {
      std::int64_t dropped = 0;
      for (const int batch : {1, 3, 8}) {
        for (const int chunk : {1, 9, 200}) {
          for (const int block : {8, 32}) {
            if (settings++ % 37 != 0 && brief()) continue;
            setting s;
            s.policy = p;
            s.mode = mode;
            s.batch = batch;
            s.chunk = chunk;
            s.block = block;
            dropped += serve_and_compare(s, jobs).dropped;
          }
        }
      }
      if (!brief()) CHECK(dropped > 0);
    }
  }
}

TEST_CASE("requests under a policy that are preempted for want of blocks drop again what they had dropped") {
  splitmix64 random(kvcache::test::test_seed("small pools", 5));
  std::int64_t preemptions = 0, recomputed = 0, dropped = 0;
  for (std::int64_t round = std::max<std::int64_t>(4, kvcache::test::effort(48)); round > 0; --round) {
    const auto jobs = mixed_jobs(random.next() % 4);
    std::int64_t longest = 0;
    for (const job& j : jobs) longest = std::max(longest, most_tokens(j, j.follow_ups.size()));
    setting s;
    s.policy = policies[static_cast<std::size_t>(round) % std::size(policies)];
    s.mode = random.next() % 3 == 0 ? drop_mode::oneshot : drop_mode::stream;
    s.block = 8 << random.next() % 2;
    s.blocks = (longest + s.block - 1) / s.block + static_cast<std::int64_t>(random.next() % 4);
    s.batch = 4 + static_cast<int>(random.next() % 5);
    s.chunk = 1 + static_cast<int>(random.next() % 64);
    const auto cache = cache_for(s);
    const serve_totals totals = serve_and_compare(s, *cache, jobs);
    preemptions += totals.preemptions;
    recomputed += totals.recomputed;
    dropped += totals.dropped;
  }
  CHECK(preemptions > 0);
  CHECK(recomputed > 0);
  CHECK(dropped > 0);
}

TEST_CASE("a preemption of a text under a policy at any moment loses nothing") {
  splitmix64 random(kvcache::test::test_seed("refusals", 6));
  std::int64_t preemptions = 0;
  for (std::int64_t round = std::max<std::int64_t>(4, kvcache::test::effort(32)); round > 0; --round) {
    setting s;
    s.policy = policies[static_cast<std::size_t>(round) % std::size(policies)];
    s.mode = random.next() % 2 == 0 ? drop_mode::oneshot : drop_mode::stream;
    s.batch = 2 + static_cast<int>(random.next() % 7);
    s.chunk = 1 + static_cast<int>(random.next() % 40);
    watched_cache cache(cache_for(s), random.next(), 3 + static_cast<int>(random.next() % 8));
    preemptions += serve_and_compare(s, cache, mixed_jobs(random.next() % 4)).preemptions;
    CHECK(cache.open_sequences() == 0);
  }
  CHECK(preemptions > 0);
}

TEST_CASE(
    "what a prompt finds in the cache ends before the first drop, and what the policy must see is computed") {
  const auto common = some_text(96, 72);
  std::vector<job> jobs;
  for (int i = 0; i < 4; ++i) {
    auto prompt = common;
    const auto own = some_text(10, static_cast<std::uint64_t>(i));
    prompt.insert(prompt.end(), own.begin(), own.end());
    jobs.push_back(simple_job("job " + std::to_string(i), std::move(prompt), 6, 40 * i));
  }
  jobs[3].scope = cache_scope::only("another");
  const auto found = [&](const char* text, drop_mode mode) {
    setting s;
    s.policy = text;
    s.mode = mode;
    s.block = 8;
    s.chunk = 200;
    const auto cache = cache_for(s);
    scheduler serve(*machine().model, *cache, jobs, {s.batch, s.chunk, is_stop});
    REQUIRE(serve.run({}));
    std::vector<int> reused;
    for (const answer* a : serve.answers()) {
      const expected_answer& e = expected(s, *a);
      CHECK(a->fnv == e.fnv);
      reused.push_back(a->reused);
    }
    return reused;
  };
  using list = std::vector<int>;
  CHECK(found("full", drop_mode::stream) == list{0, 96, 96, 0});
  CHECK(found("window:40", drop_mode::stream) == list{0, 40, 40, 0});
  CHECK(found("window:39", drop_mode::stream) == list{0, 32, 32, 0});  // of 40, one is computed
  CHECK(found("window:40", drop_mode::oneshot) == list{0, 96, 96, 0});
  CHECK(found("snapkv:capacity=40,window=9", drop_mode::stream) == list{0, 32, 32, 0});  // 41 - 9
  CHECK(found("snapkv:capacity=40,window=9", drop_mode::oneshot) == list{0, 96, 96, 0});
  CHECK(found("h2o:heavy=20,recent=20", drop_mode::oneshot) == list{0, 0, 0, 0});
  CHECK(found("window:40", drop_mode::out_of_blocks) == list{0, 0, 0, 0});
}

TEST_CASE("a stream does not take a prefix behind its first drop from a text that dropped nothing") {
  const auto text = some_text(120);
  for (const char* p : {"window:40", "snapkv:capacity=40,window=8", "tova:40"}) {
    CAPTURE(p);
    auto cache = session_cache::create(config_of({}));
    REQUIRE(cache);
    session_options with;
    with.mode = drop_mode::stream;
    auto apart = session::create(*machine().model, **cache, policy(p), with);
    REQUIRE(apart);
    const auto expected_logits = apart->feed(text, observe::last);
    REQUIRE(expected_logits);
    with.prompt = text;
    auto whole = session::create(*machine().model, **cache, policy("full"), with);
    REQUIRE(whole);
    REQUIRE(whole->feed(text, observe::last));
    REQUIRE(*whole->commit(text) == 112);
    auto sharing = session::create(*machine().model, **cache, policy(p), with);
    REQUIRE(sharing);
    CHECK(sharing->reused() > 0);
    CHECK(sharing->reused() <= 40);
    const auto logits =
        sharing->feed(std::span(text).subspan(static_cast<std::size_t>(sharing->reused())), observe::last);
    REQUIRE(logits);
    CHECK(*logits == *expected_logits);
    CHECK((*cache)->check() == nullptr);
  }
}

TEST_CASE("a drop for which there was no room is made up for by the next step") {
  const auto text = some_text(70);
  setting s;
  s.block = 8;
  for (const char* p : {"h2o:heavy=24,recent=16,every=8", "snapkv:capacity=40,window=8"}) {
    CAPTURE(p);
    const auto run = [&](std::int64_t blocks, bool fork) {
      s.blocks = blocks;
      auto cache = session_cache::create(config_of(s));
      REQUIRE(cache);
      session_options with;
      with.mode = drop_mode::stream;
      auto made = session::create(*machine().model, **cache, policy(p), with);
      REQUIRE(made);
      REQUIRE(made->feed(std::span(text).first(32), observe::last));
      if (fork) {
        auto other = made->fork();
        REQUIRE(other);
        const auto refused = made->feed(std::span(text).subspan(32), observe::last);
        REQUIRE_FALSE(refused);
        CHECK(refused.error().code == "out_of_blocks");
        CHECK(made->dropped() == 0);
        CHECK(made->position() > 40);
        CHECK(made->extend(1).error().code == "out_of_blocks");
      }
      const auto rest = std::span(text).subspan(static_cast<std::size_t>(made->position()));
      auto logits = made->feed(rest, observe::last);
      REQUIRE(logits);
      CHECK(made->dropped() >= 22);
      CHECK((*cache)->check() == nullptr);
      return *logits;
    };
    CHECK(run(7, true) == run(0, false));
  }
}

TEST_CASE("in a small pool texts of any length are served one by one, dropping when blocks run out") {
  std::vector<job> jobs;
  for (int i = 0; i < 5; ++i)
    jobs.push_back(
        simple_job("job " + std::to_string(i), some_text(100, static_cast<std::uint64_t>(i % 2)), 30, i));
  jobs[3].samples = 2;
  for (const char* p : policies) {
    for (const int batch : {1, 4}) {
      if (brief() && batch == 1) continue;
      CAPTURE(p, batch);
      setting s;
      s.policy = p;
      s.mode = drop_mode::out_of_blocks;
      s.block = 8;
      s.blocks = 10;
      s.batch = batch;
      const auto cache = cache_for(s);
      scheduler serve(*machine().model, *cache, jobs, {s.batch, s.chunk, {}});
      REQUIRE(serve.run({}));
      CHECK_FALSE(serve.failure());
      REQUIRE(serve.answers().size() == 6);
      for (const answer* a : serve.answers()) {
        CHECK(a->ids().size() == 30);
        CHECK(a->dropped > 0);
      }
      CHECK(cache->counts().blocks_used == 0);
      if (batch == 1) CHECK(serve.totals().preemptions == 0);
    }
  }
}

TEST_CASE("a text that fits under its policy alone is served, whether or not there is room to share it") {
  const auto prompt = some_text(brief() ? 70 : 150, 5);
  const std::vector<job> jobs = {simple_job("a", prompt, 20), simple_job("b", prompt, 20, 300)};
  for (const char* p : policies) {
    setting s;
    s.policy = p;
    s.block = 8;
    for (const std::int64_t blocks : {6, 9, 11, 14, 24}) {
      if (brief() && blocks % 3 != 0) continue;
      s.blocks = blocks;
      const auto cache = cache_for(s);
      serve_and_compare(s, *cache, jobs);
      if (std::string(p) == "window:24") CHECK((cache->counts().blocks_cached > 0) == (blocks > 8));
    }
  }
}

TEST_CASE("a text that does not fit even under its policy is named, and the others are served") {
  const std::vector<job> jobs = {simple_job("first", some_text(30), 12),
                                 simple_job("giant", some_text(200), 4),
                                 simple_job("last", some_text(30), 12, 4)};
  setting s;
  s.policy = "window:100";
  s.block = 8;
  s.blocks = 8;
  const auto cache = cache_for(s);
  scheduler serve(*machine().model, *cache, jobs, {s.batch, s.chunk, {}});
  REQUIRE(serve.run({}));
  REQUIRE(serve.failure());
  CHECK(serve.failure()->code == "out_of_blocks");
  CHECK(serve.failure()->value == "giant");
  CHECK(std::string(serve.answers()[1]->stop) == "out_of_blocks");
  for (const std::size_t i : {0u, 2u}) CHECK(serve.answers()[i]->ids().size() == 12);
  CHECK(cache->counts().blocks_used == 0);
}

TEST_CASE("a cache of sessions forks, says what it holds, and refuses what it does not do") {
  setting s;
  s.policy = "window:16";
  const auto cache = cache_for(s);
  CHECK(cache->open({}, cache_scope::everyone()).error().field == "prompt");
  CHECK(cache->open(some_text(321), cache_scope::everyone()).error().code == "too_long");
  const auto text = some_text(40);
  const auto opened = cache->open(text, cache_scope::everyone());
  REQUIRE(opened);
  std::vector<float> none;
  while (cache->length(opened->slot) < 40) {
    const int at = cache->length(opened->slot);
    const auto rows = cache->extend(opened->slot, 40 - at);
    REQUIRE(rows);
    CHECK(*rows == (at == 0 ? 17 : 1));
    const step_segment segment{opened->slot, at, *rows};
    const auto now = std::span(text).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(*rows));
    REQUIRE(machine().model->forward(now, {&segment, 1}, {}, cache->backend(), none));
  }
  const auto copy = cache->fork(opened->slot);
  REQUIRE(copy);
  CHECK(cache->length(*copy) == 40);
  CHECK(cache->dropped(*copy) == 24);
  CHECK(cache->counts().blocks_used == 2);
  const std::size_t token = cache->counts().block_bytes / 16;
  CHECK(cache->bytes().held == 17 * token);  // the slot of the one that went last counts
  CHECK(cache->bytes().reserved == 32 * token);
  const auto shape = machine().model->shape().kv;
  std::vector<float> k(static_cast<std::size_t>(shape.kv_heads * shape.head_dim)), v = k;
  cache->read(*copy, 1, 30, k.data(), v.data());
  CHECK(std::none_of(k.begin(), k.end(), [](float x) { return std::isnan(x); }));
  cache->read(*copy, 1, 10, k.data(), v.data());
  CHECK(std::all_of(v.begin(), v.end(), [](float x) { return std::isnan(x); }));
  CHECK(cache->draft(*copy, 2).error().code == "unsupported");
  CHECK(cache->accept(*copy, 2).error().code == "unsupported");
  CHECK(cache->assign(*copy, opened->slot).error().code == "unsupported");
  cache->close(*copy);
  cache->close(opened->slot);
  CHECK(cache->counts().blocks_used == 0);
  cache_config other = config_of(s);
  other.eviction = "lfu";
  CHECK(make_session_kind(*machine().model, {policy("full"), drop_mode::stream}, other).error().field ==
        "eviction");
}
