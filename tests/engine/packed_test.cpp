// SPDX-License-Identifier: Apache-2.0
// Packed blocks in the engine: a format changes what is stored, and nothing else may change a bit: not the
// chunks of a prompt, the neighbours in a batch, threads, a cached prefix or drafts.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kvcache/attend/rope.hpp"
#include "kvcache/quant/parse.hpp"
#include "policy_text.hpp"
#include "session.hpp"
#include "session_kind.hpp"
#include "support/environment.hpp"
#include "support/seeded_model.hpp"

using namespace engine;
using namespace engine::test;

namespace {

constexpr int text_tokens = 170;  // two blocks of 64 and a rest

bool brief() {
  return kvcache::test::effort(100) < 100;
}

struct setting {
  std::vector<std::string> formats = {"kv4"};
  int block = 64;
  int chunk = text_tokens;
  int batch = 1;
  int threads = 1;
};

kvcache::kv_format format(const std::string& text) {
  const auto parsed = kvcache::parse_format(text);
  REQUIRE(parsed.ok());
  return parsed.value;
}

cache_config config_of(const setting& s) {
  cache_config config = machine(s.threads).config(10, 320);
  config.block_size = s.block;
  config.step_tokens = 8 * text_tokens;
  for (const std::string& text : s.formats) config.formats.push_back(format(text));
  return config;
}

// Several schemes, with and without a residual and exempt tokens; several: one per layer.
const std::vector<std::vector<std::string>>& schemes() {
  static const std::vector<std::vector<std::string>> all = {
      {"kv8"},
      {"kv4"},
      {"int4:k=channel,v=token,group=32,residual=32,exempt=sinks,hadamard=both"},
      {"kv2:residual=1"},
      {"fp8"},
      {"int3:k=head,v=tensor,symmetric=both"},
      {"k=f16,v=int4,exempt=2"},
      {"kv8:residual=7", "k5v4:residual=7,exempt=1"},
      {"f16:residual=0", "int4"},
      {"kv3:rope=before,residual=3"},
      {"kv4:dot=integer"},
  };
  return all;
}

struct runner {
  int slot;
  std::vector<token_id> text;
};

using prints =
    std::vector<std::uint64_t>;  // of the logits at each position of the first text; 0: not computed

int open_text(cache_kind& cache, std::span<const token_id> text, int* reused = nullptr) {
  const auto opened = cache.open(text, cache_scope::everyone());
  if (!opened) FAIL(describe(opened.error()));
  if (reused != nullptr) *reused = opened->reused;
  return opened->slot;
}

// `chunk` rows of each text per step, to their ends.
prints run_to_end(const setting& s, cache_kind& cache, const std::vector<runner>& all) {
  llama_model& model = *machine(s.threads).model;
  const auto vocabulary = static_cast<std::size_t>(model.shape().vocabulary);
  prints out(all.front().text.size(), 0);
  for (;;) {
    std::vector<step_segment> segments;
    std::vector<token_id> tokens;
    for (const runner& r : all) {
      const int at = cache.length(r.slot);
      const int rows = std::min(s.chunk, static_cast<int>(r.text.size()) - at);
      if (rows <= 0) continue;
      const auto room = cache.extend(r.slot, rows);
      if (!room) FAIL(describe(room.error()));
      segments.push_back({r.slot, at, rows});
      tokens.insert(tokens.end(), r.text.begin() + at, r.text.begin() + at + rows);
    }
    if (segments.empty()) return out;
    const bool first = segments[0].slot == all[0].slot;
    std::vector<int> wanted(first ? static_cast<std::size_t>(segments[0].rows) : 0);
    std::iota(wanted.begin(), wanted.end(), 0);
    std::vector<float> logits(wanted.size() * vocabulary);
    REQUIRE(model.forward(tokens, segments, wanted, cache.backend(), logits));
    for (std::size_t i = 0; i < wanted.size(); ++i)
      out[static_cast<std::size_t>(segments[0].position) + i] =
          fingerprint(std::span<const float>(logits).subspan(i * vocabulary, vocabulary));
  }
}

prints run_cold(const setting& s, cache_kind& cache) {
  std::vector<runner> all;
  for (int i = 0; i < s.batch; ++i) {
    auto text = some_text(i == 0 ? text_tokens : 30 + 19 * i, 1000 + static_cast<std::uint64_t>(i));
    const int slot = open_text(cache, text);
    all.push_back({slot, std::move(text)});
  }
  const prints out = run_to_end(s, cache, all);
  for (const runner& r : all) {
    REQUIRE(cache.commit(r.slot, r.text));
    cache.close(r.slot);
  }
  return out;
}

prints run_cold(const setting& s) {
  const auto cache = open_cache("paged", config_of(s));
  return run_cold(s, *cache);
}

kvcache::retention keep_all() {
  return parse_cache_policy("full")->keep;
}

}  // namespace

TEST_CASE("packed blocks give the same bits in every chunking, batch and thread count", "[threads]") {
  for (const auto& formats : schemes()) {
    for (const int block : {32, 64}) {
      const setting whole{formats, block};
      const prints expected = run_cold(whole);
      for (const int chunk : {1, 7, 33, 64}) {
        for (const int batch : {1, 8}) {
          if (brief() && (chunk != 33 || batch != 8)) continue;
          const int threads = chunk == 7 || batch == 8 ? 2 : 1;
          CAPTURE(formats, block, chunk, batch, threads);
          CHECK(run_cold({formats, block, chunk, batch, threads}) == expected);
        }
      }
    }
  }
}

TEST_CASE("a packed prefix that is found gives the bits of a cold run") {
  for (const auto& formats : schemes()) {
    const setting s{formats, 32, 20};
    if (format(formats.front()).residual > 1) continue;  // such a prefix is read packed earlier
    const auto cache = open_cache("paged", config_of(s));
    const prints cold = run_cold(s, *cache);
    int reused = 0;
    const auto text = some_text(text_tokens, 1000);
    const int slot = open_text(*cache, text, &reused);
    CAPTURE(formats);
    CHECK(reused == 160);
    const prints hit = run_to_end(s, *cache, {{slot, text}});
    for (std::size_t p = 160; p < hit.size(); ++p) CHECK(hit[p] == cold[p]);
  }
}

TEST_CASE("both branches of a fork inside an open block keep the bits they have alone") {
  for (const int at : {1, 31, 32, 50}) {
    const setting s{{"kv4:residual=8"}, 32, 13};
    const auto cache = open_cache("paged", config_of(s));
    const auto text = some_text(text_tokens, 1000);
    const std::vector<token_id> head(text.begin(), text.begin() + at);
    const int slot = open_text(*cache, head);
    (void)run_to_end(s, *cache, {{slot, head}});
    const auto copy = cache->fork(slot);
    REQUIRE(copy);
    std::vector<token_id> other = head;
    const auto tail = some_text(90, 9);
    other.insert(other.end(), tail.begin(), tail.end());
    const prints got = run_to_end(s, *cache, {{*copy, text}, {slot, other}});
    CHECK(got.back() == run_cold(s).back());
  }
}

TEST_CASE("drafts over packed blocks stop before a seal, and leave the bits of a run without them") {
  const setting s{{"kv3:residual=5"}, 32, 16};
  const prints plain = run_cold(s);
  const auto cache = open_cache("paged", config_of(s));
  llama_model& model = *machine().model;
  const auto vocabulary = static_cast<std::size_t>(model.shape().vocabulary);
  const auto text = some_text(text_tokens, 1000);
  const int slot = open_text(*cache, text);
  splitmix64 random(3);
  bool stopped = false, refused = false;
  while (cache->length(slot) < text_tokens) {
    const int at = cache->length(slot), left = text_tokens - at;
    const int wanted = std::min(left, 1 + static_cast<int>(random.next() % 9));
    const auto room = cache->draft(slot, wanted);
    REQUIRE(room);
    stopped = stopped || (*room > 0 && *room < wanted);
    refused = refused || *room == 0;
    if (*room == 0) REQUIRE(cache->extend(slot, 1));
    const int rows = std::max(1, *room);
    // Some tokens of the draft are wrong from a random one on.
    const int right = *room == 0 ? 1 : static_cast<int>(random.next() % static_cast<std::uint64_t>(rows + 1));
    std::vector<token_id> tokens(text.begin() + at, text.begin() + at + rows);
    for (int i = right; i < rows; ++i) tokens[static_cast<std::size_t>(i)] = 5;
    const step_segment segment{slot, at, rows};
    std::vector<int> all(tokens.size());
    std::iota(all.begin(), all.end(), 0);
    std::vector<float> logits(tokens.size() * vocabulary);
    REQUIRE(model.forward(tokens, {&segment, 1}, all, cache->backend(), logits));
    if (*room > 0) REQUIRE(cache->accept(slot, right));
    for (int i = 0; i < right; ++i) {
      const auto row =
          std::span<const float>(logits).subspan(static_cast<std::size_t>(i) * vocabulary, vocabulary);
      REQUIRE(fingerprint(row) == plain[static_cast<std::size_t>(at + i)]);
    }
  }
  CHECK(stopped);
  CHECK(refused);
}

TEST_CASE("room that a step does not use packs nothing") {
  const setting s{{"kv4"}, 32, 16};
  const prints plain = run_cold(s);
  const auto cache = open_cache("paged", config_of(s));
  const auto text = some_text(text_tokens, 1000), other = some_text(40, 77);
  const int slot = open_text(*cache, text), beside = open_text(*cache, other);
  (void)run_to_end(s, *cache, {{slot, {text.begin(), text.begin() + 30}}});
  REQUIRE(cache->extend(slot, 5));  // would fill a block, but the step is another sequence's
  (void)run_to_end(s, *cache, {{beside, other}});
  const prints got = run_to_end(s, *cache, {{slot, text}});
  for (std::size_t p = 30; p < got.size(); ++p) CHECK(got[p] == plain[p]);
}

TEST_CASE("a format that rounds nothing is the lossless cache") {
  setting plain;
  plain.formats.clear();
  const prints expected = run_cold(plain);
  CHECK(run_cold({{"f16"}, 64, 7}) == expected);
  CHECK(run_cold({{"f16:residual=3,exempt=1"}, 64, 40, 8, 2}) == expected);
  CHECK(run_cold({{"kv8"}}) != expected);
}

TEST_CASE("sessions have the bits of the paged cache, with drafts and in batches") {
  for (const auto& formats : {schemes()[1], schemes()[2], schemes()[7]}) {
    const setting s{formats, 32, 21};
    const prints expected = run_cold(s);
    auto cache = session_cache::create(config_of(s));
    REQUIRE(cache);
    llama_model& model = *machine().model;
    const auto vocabulary = static_cast<std::size_t>(model.shape().vocabulary);
    session_options options;
    options.mode = drop_mode::stream;
    options.chunk = s.chunk;
    auto made = session::create(model, **cache, keep_all(), options);
    if (!made) FAIL(describe(made.error()));
    const auto text = some_text(text_tokens, 1000);
    const auto check = [&](const std::vector<float>& logits, int first, int rows) {
      for (int i = 0; i < rows; ++i)
        REQUIRE(fingerprint(std::span<const float>(logits).subspan(static_cast<std::size_t>(i) * vocabulary,
                                                                   vocabulary)) ==
                expected[static_cast<std::size_t>(first + i)]);
    };
    const auto fed = made->feed(std::span(text).first(50));
    REQUIRE(fed);
    check(*fed, 0, 50);
    while (made->position() < text_tokens - 8) {
      const int at = made->position();
      const auto drafted = made->draft(std::span(text).subspan(static_cast<std::size_t>(at), 6));
      REQUIRE(drafted);
      const int rows = static_cast<int>(drafted->size() / vocabulary);
      check(*drafted, at, rows);
      if (rows > 0) {
        REQUIRE(made->accept((rows + 1) / 2));
      } else {
        REQUIRE(made->feed(std::span(text).subspan(static_cast<std::size_t>(at), 1)));
      }
    }
    auto other = made->fork();
    REQUIRE(other);
    session* both[] = {&*made, &*other};
    while (made->position() < text_tokens) {
      const int at = made->position();
      const token_id next[] = {text[static_cast<std::size_t>(at)], 5};
      std::vector<float> logits;
      REQUIRE(session::advance(both, next, logits));
      check(logits, at, 1);
    }
    CHECK((*cache)->check() == nullptr);
  }
}

TEST_CASE("a deferred format reads the prompt exactly, packs it once, and keeps what follows") {
  setting plain;
  plain.formats.clear();
  const prints exact = run_cold(plain);
  prints first;
  for (const int chunk : {1, 19, text_tokens}) {
    setting s{{"int4:group=32,residual=32,exempt=1"}, 32, chunk};
    cache_config config = config_of(s);
    config.deferred = true;
    auto cache = session_cache::create(config);
    REQUIRE(cache);
    session_options options;
    options.chunk = chunk;
    auto made = session::create(*machine().model, **cache, keep_all(), options);
    REQUIRE(made);
    const auto text = some_text(text_tokens, 1000);
    const auto vocabulary = static_cast<std::size_t>(machine().model->shape().vocabulary);
    prints got;
    const auto feed = [&](int from, int count) {
      const auto logits = made->feed(
          std::span(text).subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(count)));
      REQUIRE(logits);
      for (std::size_t i = 0; i < logits->size(); i += vocabulary)
        got.push_back(fingerprint(std::span<const float>(*logits).subspan(i, vocabulary)));
    };
    feed(0, 150);
    CHECK(std::equal(got.begin(), got.end(), exact.begin()));
    const std::size_t before = made->bytes_held();
    REQUIRE(made->compress());
    CHECK(made->bytes_held() < before);
    feed(150, 20);
    CHECK(!std::equal(got.begin() + 150, got.end(), exact.begin() + 150));
    if (first.empty()) first = got;
    CHECK(got == first);
  }
}

TEST_CASE("a policy and a format in one text are read together, and written as they are read") {
  for (const char* text :
       {"full", "kv4", "kv4:residual=32", "h2o:heavy=64,recent=64+kv8", "window:256+int4:group=32",
        "k=int8,v=int4,group=32/64", "streaming_llm:sinks=4,window=252,positions=text+kv3:exempt=none"}) {
    INFO(text);
    const auto read = parse_cache_policy(text);
    REQUIRE(read);
    const std::string all = policy_text(*read);
    const auto again = parse_cache_policy(all);
    REQUIRE(again);
    CHECK(policy_text(*again) == all);
    CHECK(again->format == read->format);
  }
  for (const char* text :
       {"", "+", "kv4+", "+kv4", "kv9", "kv4+kv8", "h2o+", "full+kv4+kv4", "int4:exempt=9", "kv4:residual=-1",
        "kv4:residual=x", "kv4:group=7", "int4:k=row", "h2o:heavy=64,recent=64+kv4:exempt=3",

        "kv4:residual", "kv4:residual=1,residual=2", "KV4", "int7", "kv4 "}) {
    INFO("'" << text << "'");
    const auto read = parse_cache_policy(text);
    REQUIRE(!read);
    CHECK(!read.error().code.empty());
    CHECK(!read.error().value.empty());
  }
}

TEST_CASE("policies and formats that cannot work together are refused where a text begins") {
  struct pair {
    const char* text;
    drop_mode mode;
    bool deferred, works;
  };
  for (const pair& p :
       {pair{"full+kv4", drop_mode::stream, false, true},
        pair{"h2o:heavy=32,recent=32+kv4", drop_mode::stream, false, false},
        pair{"h2o:heavy=32,recent=32+kv4", drop_mode::oneshot, true, true},
        pair{"streaming_llm:sinks=4,window=60,positions=text+kv4", drop_mode::stream, false, true},
        pair{"streaming_llm:sinks=4,window=60+kv4", drop_mode::stream, false, false},
        pair{"snapkv:capacity=64,window=16,budget=head+kv4", drop_mode::oneshot, true, false},
        pair{"streaming_llm:sinks=4,window=60,positions=text+kv4:rope=before", drop_mode::stream, false,
             false},
        pair{"full+kv4:rope=before", drop_mode::stream, false, true},
        pair{"full+kv4", drop_mode::stream, true, false}}) {
    INFO(p.text << ", " << name_of(p.mode) << (p.deferred ? ", deferred" : ""));
    const auto read = parse_cache_policy(p.text);
    REQUIRE(read);
    cache_config config = config_of({{}, 32});
    config.formats = {read->format};
    config.deferred = p.deferred;
    auto cache = session_cache::create(config);
    REQUIRE(cache);
    const auto made = session::create(*machine().model, **cache, read->keep, {.mode = p.mode});
    CHECK(bool(made) == p.works);
    if (!made) {
      CHECK(made.error().code == "unsupported");
      CHECK(made.error().value.size() > 10);  // the reason
    }
  }
}
