// SPDX-License-Identifier: Apache-2.0
// Continuous batching on a seeded 2-layer model: whatever the scheduler does, a request gets the tokens, and
// the logits bit for bit, that it gets alone.
#include "scheduler.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <numeric>
#include <vector>

#include "runner.hpp"
#include "scheduler_support.hpp"
#include "support/environment.hpp"
#include "support/seeded_model.hpp"

using namespace engine;
using namespace engine::test;

namespace {

/// Whether this build (sanitizers) runs a part of each product only.
bool brief() {
  return kvcache::test::effort(100) < 100;
}

struct setting {
  std::string_view kind = "paged";
  int batch = 8;
  int chunk = 32;
  int block = 16;
  std::int64_t blocks = 0;
  int threads = 1;
  const char* eviction = "lru";
  int max_tokens = 320;
};

std::unique_ptr<cache_kind> cache_for(const setting& s) {
  cache_config config = machine(s.threads).config(s.batch, s.max_tokens);
  config.block_size = s.block;
  config.blocks = s.blocks;
  config.eviction = s.eviction;
  return open_cache(s.kind, config);
}

struct expected_answer {
  std::vector<token_id> ids;
  std::uint64_t fnv = chain_start;
};

/// The answer of a run of its own, without a scheduler. The library's kinds share one result.
expected_answer alone(std::string_view kind, const job& from, const std::vector<token_id>& prompt,
                      int sample) {
  setting s;
  s.kind = kind == "reference" ? "reference" : "contiguous";
  s.batch = 1;
  const auto cache = cache_for(s);
  generation_options options;
  options.max_new = from.max_new;
  options.how = from.how;
  options.how.seed += static_cast<std::uint64_t>(sample);
  expected_answer out;
  const auto made = generate(
      *machine().model, *cache, prompt, from.scope, options, is_stop, [](token_id) {},
      [&](int, std::span<const float> logits) { out.fnv = chain(out.fnv, fingerprint(logits)); });
  REQUIRE(made);
  out.ids = made->ids;
  return out;
}

/// What must hold for every answer that was given.
void compare(std::string_view kind, const answer& a) {
  const std::vector<token_id> prompt(a.text.begin(), a.text.begin() + a.prompt_tokens);
  static std::map<std::pair<bool, std::vector<token_id>>, std::map<int, expected_answer>> known;
  // Jobs of different tests may share a prompt, so the parameters are part of the key.
  std::vector<token_id> key = prompt;
  key.push_back(static_cast<token_id>(a.from->how.seed));
  key.push_back(static_cast<token_id>(a.from->how.temperature * 1000));
  key.push_back(a.from->max_new);
  auto& answers = known[{kind == "reference", key}];
  const auto [at, fresh] = answers.try_emplace(a.sample);
  if (fresh) at->second = alone(kind, *a.from, prompt, a.sample);
  INFO(kind << " " << a.from->id << " turn " << a.turn << " sample " << a.sample);
  const auto ids = a.ids();
  CHECK(std::vector<token_id>(ids.begin(), ids.end()) == at->second.ids);
  CHECK(a.fnv == at->second.fnv);
  CHECK(a.reused + a.prefilled == a.prompt_tokens);
  CHECK(a.finish_step >= a.from->arrival);
  if (a.from->max_new > 0) CHECK(a.first_token_step >= a.from->arrival);
}

/// Runs the jobs to the end and compares every answer.
serve_totals serve_and_compare(const setting& s, cache_kind& cache, const std::vector<job>& jobs) {
  CAPTURE(s.kind, s.batch, s.chunk, s.block, s.blocks, s.threads, s.eviction);
  scheduler serve(*machine(s.threads).model, cache, jobs, {s.batch, s.chunk, is_stop});
  REQUIRE(serve.run({}));
  CHECK_FALSE(serve.failure());
  std::size_t expected = 0;
  for (const job& j : jobs) expected += (j.follow_ups.size() + 1) * static_cast<std::size_t>(j.samples);
  const auto answers = serve.answers();
  CHECK(answers.size() == expected);
  serve_totals sum;
  for (const answer* a : answers) {
    compare(s.kind, *a);
    CHECK(*a->stop != 0);
    sum.asked += a->prompt_tokens;
    sum.reused += a->reused;
    sum.prefilled += a->prefilled;
    sum.recomputed += a->recomputed;
    sum.preemptions += a->preempted;
    sum.generated += static_cast<std::int64_t>(a->ids().size());
  }
  const serve_totals& totals = serve.totals();
  CHECK(totals.asked == sum.asked);
  CHECK(totals.reused == sum.reused);
  CHECK(totals.prefilled == sum.prefilled);
  CHECK(totals.recomputed == sum.recomputed);
  CHECK(totals.preemptions == sum.preemptions);
  CHECK(totals.generated == sum.generated);
  CHECK(totals.peak_running <= s.batch);
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

}  // namespace

TEST_CASE("a request's answer is the one it gets alone, for every kind, batch, chunk and block size",
          "[threads]") {
  const auto jobs = mixed_jobs(kvcache::test::test_seed("mixed jobs", 21));
  int settings = 0;
  for (const std::string_view kind : cache_kind_names()) {
    for (int batch = 1; batch <= 8; ++batch) {
      for (const int chunk : {1, 5, 32, 200}) {
        for (const int block : {8, 32, 128}) {
          if (kind == "reference" && block != 8) continue;  // it has no blocks
          if (settings++ % 37 != 0 && brief()) continue;
          setting s;
          s.kind = kind;
          s.batch = batch;
          s.chunk = chunk;
          s.block = block;
          s.threads = 1 + settings % 2;
          serve_and_compare(s, jobs);
        }
      }
    }
  }
}

TEST_CASE("threads change no answer", "[threads]") {
  const auto jobs = mixed_jobs(22);
  for (const int threads : {1, 2}) {
    setting s;
    s.threads = threads;
    s.blocks = 24;
    serve_and_compare(s, jobs);
  }
}

TEST_CASE("requests that are preempted for want of blocks resume and get the same bits") {
  splitmix64 random(kvcache::test::test_seed("small pools", 5));
  std::int64_t preemptions = 0;
  std::int64_t evictions = 0;
  std::int64_t recomputed = 0;
  for (std::int64_t round = std::max<std::int64_t>(3, kvcache::test::effort(30)); round > 0; --round) {
    const auto jobs = mixed_jobs(random.next() % 4);
    std::int64_t longest = 0;
    for (const job& j : jobs) longest = std::max(longest, most_tokens(j, j.follow_ups.size()));
    setting s;
    s.block = 8 << random.next() % 3;
    s.blocks = (longest + s.block - 1) / s.block + static_cast<std::int64_t>(random.next() % 6);
    s.batch = 2 + static_cast<int>(random.next() % 7);
    s.chunk = 1 + static_cast<int>(random.next() % 64);
    s.eviction = random.next() % 2 == 0 ? "lru" : "lfu";
    const auto cache = cache_for(s);
    const serve_totals totals = serve_and_compare(s, *cache, jobs);
    CHECK(totals.peak_blocks <= s.blocks);
    preemptions += totals.preemptions;
    recomputed += totals.recomputed;
    evictions += cache->counts().evictions;
  }
  CHECK(preemptions > 0);
  CHECK(evictions > 0);
  CHECK(recomputed > 0);
}

TEST_CASE("a preemption at any moment, in any kind, loses nothing") {
  splitmix64 random(kvcache::test::test_seed("refusals", 6));
  for (const std::string_view kind : cache_kind_names()) {
    std::int64_t preemptions = 0;
    for (std::int64_t round = std::max<std::int64_t>(2, kvcache::test::effort(20)); round > 0; --round) {
      setting s;
      s.kind = kind;
      s.batch = 2 + static_cast<int>(random.next() % 7);
      s.chunk = 1 + static_cast<int>(random.next() % 40);
      watched_cache cache(cache_for(s), random.next(), 2 + static_cast<int>(random.next() % 8));
      preemptions += serve_and_compare(s, cache, mixed_jobs(random.next() % 4)).preemptions;
      CHECK(cache.open_sequences() == 0);
    }
    INFO(kind);
    CHECK(preemptions > 0);
  }
}

TEST_CASE("the youngest goes first, waits for the old one, and finds again what was not needed meanwhile") {
  splitmix64 random(31);
  std::vector<job> jobs = {simple_job("old", some_text(random, 60), 40),
                           simple_job("young", some_text(random, 60), 4)};
  setting s;
  s.batch = 2;
  s.blocks = 9;
  s.chunk = 120;
  const auto cache = cache_for(s);
  scheduler roomy(*machine().model, *cache, jobs, {s.batch, s.chunk, {}});
  REQUIRE(roomy.run({}));
  CHECK(roomy.totals().preemptions == 0);  // the young one ends before a tenth block is needed

  jobs[1].max_new = 40;
  const auto again = cache_for(s);
  scheduler tight(*machine().model, *again, jobs, {s.batch, s.chunk, {}});
  REQUIRE(tight.run({}));
  const auto answers = tight.answers();
  CHECK(answers[0]->preempted == 0);
  CHECK(answers[0]->recomputed == 0);
  CHECK(answers[0]->finish_step == 39);
  CHECK(answers[1]->preempted == 1);
  // It had 64 tokens in 4 blocks; the old one, 99 tokens in 7 blocks at its end, left 2 of them.
  CHECK(answers[1]->recomputed == 32);
  CHECK(answers[1]->first_token_step == 0);
  CHECK(answers[1]->finish_step > 39);
}

TEST_CASE("a preempted request sits out one step and finds what it had generated, too") {
  splitmix64 random(32);
  const std::vector<job> jobs = {simple_job("old", some_text(random, 20), 40),
                                 simple_job("young", some_text(random, 20), 40)};
  watched_cache cache(cache_for({}), 1, 0);
  cache.refuse_call = 2 + 2 * 29 + 1;  // the old one's row in step 30; the young one has written 49 tokens
  scheduler serve(*machine().model, cache, jobs, {2, 64, {}});
  REQUIRE(serve.run({}));
  const auto answers = serve.answers();
  CHECK(answers[0]->finish_step == 39);
  CHECK(answers[0]->preempted == 0);
  CHECK(answers[1]->preempted == 1);
  CHECK(answers[1]->recomputed == 1);  // 48 are three whole blocks
  CHECK(answers[1]->finish_step == 40);
}

TEST_CASE("a request that is preempted when its row was planned already leaves the step") {
  splitmix64 random(33);
  std::vector<job> jobs = {simple_job("two", some_text(random, 30), 10),
                           simple_job("young", some_text(random, 5), 10)};
  jobs[0].samples = 2;
  setting s;
  s.kind = "contiguous";  // no forks: the second sample is computed while the young request decodes
  s.batch = 3;
  s.chunk = 20;
  watched_cache cache(cache_for(s), 1, 0);
  // Calls: 1 | 2 3 | 4 5 6 | 7 8 9. In the fourth step the first sample and the young request are planned
  // when the second sample, older than the latter, finds no room for its last 12 tokens.
  cache.refuse_call = 9;
  CHECK(serve_and_compare(s, cache, jobs).preemptions == 1);
  REQUIRE(cache.steps.size() > 3);
  CHECK(cache.steps[3].size() == 2);
  CHECK(cache.steps[3][1].rows == 12);
}

TEST_CASE("a prompt with samples enters when there is a place for each of them") {
  splitmix64 random(34);
  std::vector<job> jobs = {simple_job("first", some_text(random, 12), 6),
                           simple_job("samples", some_text(random, 40), 12),
                           simple_job("behind", some_text(random, 12), 6)};
  jobs[1].samples = 3;
  jobs[1].how.temperature = 1;
  setting s;
  s.batch = 4;
  s.chunk = 24;
  const auto cache = cache_for(s);
  scheduler serve(*machine().model, *cache, jobs, {s.batch, s.chunk, {}});
  REQUIRE(serve.run({}));
  const auto answers = serve.answers();
  REQUIRE(answers.size() == 5);
  for (const std::size_t i : {2u, 3u}) CHECK(answers[i]->reused == 40);
  CHECK(answers[4]->first_token_step > answers[0]->finish_step);
  CHECK(serve.totals().peak_running == 4);
}

TEST_CASE("a step holds at most the chunk's rows and the batch's sequences") {
  for (const int chunk : {1, 3, 16, 64}) {
    for (const int batch : {1, 2, 5, 8}) {
      if (brief() && (chunk != 16 || batch != 5)) continue;
      setting s;
      s.chunk = chunk;
      s.batch = batch;
      watched_cache cache(cache_for(s), 1, 0);
      serve_and_compare(s, cache, mixed_jobs(2));
      for (const auto& segments : cache.steps) {
        int rows = 0;
        for (const step_segment& segment : segments) rows += segment.rows;
        CHECK(rows <= chunk);
        CHECK(static_cast<int>(segments.size()) <= batch);
      }
    }
  }
}

TEST_CASE("a long prompt does not hold up those that are decoding") {
  splitmix64 random(41);
  const std::vector<job> jobs = {simple_job("decoding", some_text(random, 8), 30),
                                 simple_job("long", some_text(random, 200), 4, 3)};
  setting s;
  s.chunk = 16;
  const auto cache = cache_for(s);
  scheduler serve(*machine().model, *cache, jobs, {s.batch, s.chunk, {}});
  REQUIRE(serve.run({}));
  const auto answers = serve.answers();
  CHECK(answers[0]->first_token_step == 0);
  CHECK(answers[0]->finish_step == 29);           // one token per step
  CHECK(answers[1]->first_token_step == 3 + 13);  // 200 rows, 15 per step beside the other
}

TEST_CASE("time is the number of the step and jumps over idle stretches") {
  splitmix64 random(43);
  const std::vector<job> jobs = {simple_job("late", some_text(random, 10), 3, 5000),
                                 simple_job("early", some_text(random, 10), 3, 7)};
  const auto cache = cache_for({});
  scheduler serve(*machine().model, *cache, jobs, {8, 32, {}});
  REQUIRE(serve.run({}));
  CHECK(serve.answers()[0]->first_token_step == 5000);
  CHECK(serve.answers()[1]->first_token_step == 7);
  CHECK(serve.totals().steps == 6);
}

TEST_CASE("samples of a prompt share one prefill by forking, and each has its own seeded stream") {
  splitmix64 random(51);
  job j = simple_job("poem", some_text(random, 45), 12);
  j.samples = 4;
  j.how.temperature = 1.5;
  j.how.seed = 77;
  for (const std::string_view kind : cache_kind_names()) {
    for (const int batch : {1, 3, 4, 8}) {
      if (brief() && batch != 3) continue;
      setting s;
      s.kind = kind;
      s.batch = batch;
      const auto cache = cache_for(s);
      serve_and_compare(s, *cache, {j});
      const auto other = cache_for(s);
      const std::vector<job> jobs{j};
      scheduler serve(*machine().model, *other, jobs, {s.batch, s.chunk, is_stop});
      REQUIRE(serve.run({}));
      const auto answers = serve.answers();
      REQUIRE(answers.size() == 4);
      CHECK(answers[0]->prefilled == 45);
      for (std::size_t i = 1; i < 4; ++i) {
        INFO(kind << " batch " << batch << " sample " << i);
        const bool forked = kind != "contiguous" && static_cast<int>(i) < batch;
        const bool found = kind == "paged" && !forked;
        CHECK(answers[i]->reused == (forked ? 45 : found ? 32 : 0));
        CHECK(answers[i]->text != answers[0]->text);
      }
      if (kind == "paged") CHECK(other->counts().copies == std::min(batch, 4) - 1);
    }
  }
}

TEST_CASE("greedy samples of a prompt are equal, and none is lost when nothing is to be generated") {
  splitmix64 random(52);
  job j = simple_job("same", some_text(random, 20), 6);
  j.samples = 3;
  for (const std::string_view kind : cache_kind_names()) {
    for (const int max_new : {0, 6}) {
      j.max_new = max_new;
      setting s;
      s.kind = kind;
      const auto cache = cache_for(s);
      const std::vector<job> jobs{j};
      scheduler serve(*machine().model, *cache, jobs, {s.batch, s.chunk, {}});
      REQUIRE(serve.run({}));
      const auto answers = serve.answers();
      REQUIRE(answers.size() == 3);
      for (const answer* a : answers) {
        CHECK(a->text == answers[0]->text);
        CHECK(a->fnv == answers[0]->fnv);
        CHECK(static_cast<int>(a->ids().size()) == max_new);
        CHECK(std::string(a->stop) == "length");
      }
      CHECK((answers[0]->fnv == chain_start) == (max_new == 0));
    }
  }
}

TEST_CASE("a conversation resends its exact history, and only paging reuses it") {
  splitmix64 random(61);
  job j = simple_job("agent", some_text(random, 40), 10);
  j.end_of_turn = 2;
  for (int i = 0; i < 6; ++i) j.follow_ups.push_back(some_text(random, 11));
  for (const std::string_view kind : cache_kind_names()) {
    setting s;
    s.kind = kind;
    serve_and_compare(s, {j});
    const auto cache = cache_for(s);
    const std::vector<job> jobs{j};
    scheduler serve(*machine().model, *cache, jobs, {s.batch, s.chunk, is_stop});
    REQUIRE(serve.run({}));
    const auto answers = serve.answers();
    REQUIRE(answers.size() == 7);
    for (std::size_t turn = 1; turn < 7; ++turn) {
      INFO(kind << " turn " << turn);
      std::vector<token_id> history = answers[turn - 1]->text;
      const int written = static_cast<int>(history.size()) - 1;  // its last token was never an input
      if (history.back() != 2) history.push_back(2);
      history.insert(history.end(), j.follow_ups[turn - 1].begin(), j.follow_ups[turn - 1].end());
      const auto& text = answers[turn]->text;
      REQUIRE(answers[turn]->prompt_tokens == static_cast<int>(history.size()));
      CHECK(std::equal(history.begin(), history.end(), text.begin()));
      CHECK(answers[turn]->reused == (kind == "paged" ? written / 16 * 16 : 0));
      CHECK(answers[turn]->first_token_step > answers[turn - 1]->finish_step);
    }
  }
}

TEST_CASE("a prompt is reused within its scope only") {
  splitmix64 random(71);
  const auto prompt = some_text(random, 50);
  std::vector<job> jobs;
  for (const char* tenant : {"a", "b", "", "a", "b", ""}) {
    job& j = jobs.emplace_back(
        simple_job("job " + std::to_string(jobs.size()), prompt, 3, static_cast<int>(jobs.size()) * 10));
    if (*tenant != 0) j.scope = cache_scope::only(tenant);
  }
  const auto cache = cache_for({});
  serve_and_compare({}, *cache, jobs);
  const auto other = cache_for({});
  scheduler serve(*machine().model, *other, jobs, {8, 64, is_stop});
  REQUIRE(serve.run({}));
  const auto answers = serve.answers();
  for (std::size_t i = 0; i < 6; ++i) {
    INFO("job " << i);
    CHECK(answers[i]->reused == (i < 3 ? 0 : 48));
  }
}

TEST_CASE("requests that share a prefix find it while the first one is still running") {
  splitmix64 random(72);
  const auto common = some_text(random, 96);
  std::vector<job> jobs;
  for (int i = 0; i < 6; ++i) {
    auto prompt = common;
    const auto own = some_text(random, 10);
    prompt.insert(prompt.end(), own.begin(), own.end());
    jobs.push_back(simple_job("job " + std::to_string(i), std::move(prompt), 20));
  }
  setting s;
  s.chunk = 110;
  const serve_totals totals = serve_and_compare(s, jobs);
  CHECK(totals.peak_running > 1);
  CHECK(totals.reused >= 4 * 96);
  s.kind = "contiguous";
  CHECK(serve_and_compare(s, jobs).reused == 0);
}

TEST_CASE("a request that does not fit even alone is named, and the others are served") {
  splitmix64 random(81);
  for (const int max_new : {4, 200}) {  // too long as a prompt, and by what it generates
    std::vector<job> jobs = {simple_job("first", some_text(random, 30), 12),
                             simple_job("giant", some_text(random, max_new == 4 ? 150 : 60), max_new),
                             simple_job("last", some_text(random, 30), 12, 4)};
    jobs[1].line = 17;
    for (const int chunk : {8, 300}) {
      setting s;
      s.blocks = 8;
      s.chunk = chunk;
      watched_cache cache(cache_for(s), 1, 0);
      scheduler serve(*machine().model, cache, jobs, {s.batch, s.chunk, {}});
      REQUIRE(serve.run({}));
      REQUIRE(serve.failure());
      const error& e = *serve.failure();
      CHECK(e.kind == failure::cannot_run);
      CHECK(e.code == "out_of_blocks");
      CHECK(e.field == "id");
      CHECK(e.value == "giant");
      CHECK(e.line == 17);
      const auto answers = serve.answers();
      REQUIRE(answers.size() == 3);
      CHECK(std::string(answers[1]->stop) == "out_of_blocks");
      for (const std::size_t i : {0u, 2u}) {
        CHECK(std::string(answers[i]->stop) == "length");
        CHECK(answers[i]->ids().size() == 12);
      }
      CHECK(cache.open_sequences() == 0);
      CHECK(cache.counts().blocks_used == 0);
      const serve_progress p = serve.progress();
      CHECK(p.tokens_done == p.tokens_expected);
      CHECK(p.answered == p.answers_expected);
    }
  }
}

TEST_CASE("a conversation ends where a turn does not fit") {
  splitmix64 random(82);
  job j = simple_job("agent", some_text(random, 40), 10);
  j.end_of_turn = 2;
  for (int i = 0; i < 6; ++i) j.follow_ups.push_back(some_text(random, 20));
  setting s;
  s.blocks = 8;
  const auto cache = cache_for(s);
  const std::vector<job> jobs{j};
  scheduler serve(*machine().model, *cache, jobs, {s.batch, s.chunk, {}});
  REQUIRE(serve.run({}));
  REQUIRE(serve.failure());
  const auto answers = serve.answers();
  REQUIRE(answers.size() == 4);  // 40, 71, 102, 133 tokens
  CHECK(std::string(answers[2]->stop) == "length");
  CHECK(std::string(answers[3]->stop) == "out_of_blocks");
  const serve_progress p = serve.progress();
  CHECK(p.tokens_done == p.tokens_expected);
}

TEST_CASE("another refusal of the cache ends the run and leaves no sequence open") {
  splitmix64 random(91);
  const std::vector<job> jobs = {simple_job("a", some_text(random, 30), 12),
                                 simple_job("b", some_text(random, 30), 12)};
  for (const int after : {0, 1, 5}) {
    watched_cache cache(cache_for({}), 1, 0);
    {
      scheduler serve(*machine().model, cache, jobs, {8, 16, {}});
      for (int i = 0; i < after; ++i) REQUIRE(serve.step());
      cache.broken = "too_long";
      const status s = serve.run({});
      REQUIRE_FALSE(s);
      CHECK(s.error().code == "too_long");
    }
    CHECK(cache.open_sequences() == 0);
    CHECK(cache.counts().blocks_used == 0);
  }
}

TEST_CASE("waste is the part of the set aside memory in which no token lies") {
  splitmix64 random(95);
  const std::vector<job> jobs = {simple_job("a", some_text(random, 20), 1)};
  setting s;
  s.chunk = 64;
  CHECK(serve_and_compare(s, jobs).waste_percent() == Approx(100.0 * (32 - 20) / 32));
  s.kind = "contiguous";
  CHECK(serve_and_compare(s, jobs).waste_percent() == Approx(100.0 * (320 - 20) / 320));
}

TEST_CASE("the chain is FNV-1a over the fingerprints, lowest byte first") {
  CHECK(chain(chain_start, 0) != chain_start);
  std::uint64_t byte_wise = chain_start;
  for (const std::uint64_t byte : {0x08u, 0x07u, 0x06u, 0x05u, 0x04u, 0x03u, 0x02u, 0x01u}) {
    byte_wise = (byte_wise ^ byte) * 0x100000001B3u;
  }
  CHECK(chain(chain_start, 0x0102030405060708u) == byte_wise);
}
