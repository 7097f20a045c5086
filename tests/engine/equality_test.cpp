// SPDX-License-Identifier: Apache-2.0
// The promise that paging changes nothing: the logits of a sequence are the same bits whatever the block
// size, the chunks a prompt is cut into, the neighbours in the batch and the number of threads, after a fork,
// after preemption and resumption, and with a cached prefix. The baseline is the contiguous kind in one chunk
// on one thread; the reference kind, which shares no attention code with it, must agree to rounding.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "cache_kind.hpp"
#include "model.hpp"
#include "numeric.hpp"
#include "sampling.hpp"
#include "support/environment.hpp"
#include "support/seeded_model.hpp"

using namespace engine;
using namespace engine::test;

namespace {

constexpr int text_tokens = 101;  // more than one tile of keys, no multiple of any block

struct setting {
  std::string_view kind = "paged";
  int block = 16;
  int chunk = text_tokens;
  int batch = 1;
  int threads = 1;
  kv_type type = kv_type::f32;
};

std::unique_ptr<cache_kind> cache_for(const setting& s) {
  cache_config config = machine(s.threads).config(16, 256);
  config.type = s.type;
  config.block_size = s.block;
  return open_cache(s.kind, config);
}

// Text of sequence `number`; number 0 is the one that is compared.
std::vector<token_id> text_of(int number, int tokens = text_tokens) {
  return some_text(tokens, 1000 + static_cast<std::uint64_t>(number));
}

using logits_by_position = std::vector<std::vector<float>>;

struct runner {
  int slot;
  std::vector<token_id> text;
};

// Runs all sequences to the end of their texts, `chunk` rows of each per step, and keeps the logits of the
// first one.
void run_to_end(const setting& s, cache_kind& cache, const std::vector<runner>& all,
                logits_by_position& kept) {
  llama_model& model = *machine(s.threads).model;
  const auto vocabulary = static_cast<std::size_t>(model.shape().vocabulary);
  for (;;) {
    std::vector<step_segment> segments;
    std::vector<token_id> tokens;
    for (const runner& r : all) {
      const int at = cache.length(r.slot);
      const int rows = std::min(s.chunk, static_cast<int>(r.text.size()) - at);
      if (rows <= 0) continue;
      REQUIRE(cache.extend(r.slot, rows));
      segments.push_back({r.slot, at, rows});
      tokens.insert(tokens.end(), r.text.begin() + at, r.text.begin() + at + rows);
    }
    if (segments.empty()) return;
    std::vector<int> wanted;
    if (segments[0].slot == all[0].slot) {
      wanted.resize(static_cast<std::size_t>(segments[0].rows));
      std::iota(wanted.begin(), wanted.end(), 0);
    }
    std::vector<float> logits(wanted.size() * vocabulary);
    REQUIRE(model.forward(tokens, segments, wanted, cache.backend(), logits));
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      auto& to = kept[static_cast<std::size_t>(segments[0].position) + i];
      to.assign(logits.begin() + static_cast<std::ptrdiff_t>(i * vocabulary),
                logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocabulary));
    }
  }
}

int open_slot_of(cache_kind& cache, const std::vector<token_id>& text, int* reused = nullptr) {
  const auto opened = cache.open(text, cache_scope::everyone());
  if (!opened) FAIL(describe(opened.error()));
  if (reused != nullptr) *reused = opened->reused;
  return opened->slot;
}

// The compared sequence among neighbours whose lengths differ.
logits_by_position run_cold(const setting& s, cache_kind& cache) {
  std::vector<runner> all;
  for (int i = 0; i < s.batch; ++i) {
    std::vector<token_id> text = text_of(i, i == 0 ? text_tokens : 20 + 17 * i);
    const int slot = open_slot_of(cache, text);
    all.push_back({slot, std::move(text)});
  }
  logits_by_position kept(text_tokens);
  run_to_end(s, cache, all, kept);
  for (const runner& r : all) {
    REQUIRE(cache.commit(r.slot, r.text));
    cache.close(r.slot);
  }
  return kept;
}

logits_by_position baseline(kv_type type) {
  setting s;
  s.kind = "contiguous";
  s.type = type;
  const auto cache = cache_for(s);
  return run_cold(s, *cache);
}

const logits_by_position& baseline_of(kv_type type) {
  static const logits_by_position of[] = {baseline(kv_type::f32), baseline(kv_type::f16),
                                          baseline(kv_type::bf16)};
  return of[static_cast<int>(type)];
}

// Same bits at every position that was computed; returns how many were.
int compare(const setting& s, const logits_by_position& got, int first = 0) {
  const logits_by_position& expected = baseline_of(s.type);
  CAPTURE(s.kind, s.block, s.chunk, s.batch, s.threads, name_of(s.type));
  int compared = 0;
  for (int p = first; p < text_tokens; ++p) {
    const auto& row = got[static_cast<std::size_t>(p)];
    if (row.empty()) continue;
    ++compared;
    if (fingerprint(row) != fingerprint(expected[static_cast<std::size_t>(p)])) {
      FAIL("other bits at position " << p);
    }
  }
  return compared;
}

const std::vector<int> block_sizes = {8, 16, 32, 64, 128};
const std::vector<int> chunks = {1, 7, 16, 40, text_tokens};

template <class Body>
void for_every_setting(Body body) {
  for (const int block : block_sizes) {
    for (const int chunk : chunks) {
      for (int batch = 1; batch <= 8; ++batch) {
        for (const int threads : {1, 2}) {
          setting s;
          s.block = block;
          s.chunk = chunk;
          s.batch = batch;
          s.threads = threads;
          body(s);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE(
    "a paged sequence has the bits of a contiguous one, in every block size, chunking, batch and thread "
    "count",
    "[threads]") {
  int settings = 0;
  for_every_setting([&](const setting& s) {
    if (kvcache::test::effort(100) < 100 && (settings++ % 29) != 0) return;
    const auto cache = cache_for(s);
    CHECK(compare(s, run_cold(s, *cache)) == text_tokens);
  });
}

TEST_CASE("a cached prefix gives the bits of a cold run, in every block size, chunking and thread count",
          "[threads]") {
  for (const int block : block_sizes) {
    for (const int chunk : {1, 7, text_tokens}) {
      for (const int threads : {1, 2}) {
        setting s;
        s.block = block;
        s.chunk = chunk;
        s.threads = threads;
        const auto cache = cache_for(s);
        (void)run_cold(s, *cache);
        int reused = 0;
        const std::vector<token_id> text = text_of(0);
        const int slot = open_slot_of(*cache, text, &reused);
        CHECK(reused == (text_tokens - 1) / block * block);
        logits_by_position kept(text_tokens);
        run_to_end(s, *cache, {{slot, text}}, kept);
        CHECK(compare(s, kept) == text_tokens - reused);
      }
    }
  }
}

TEST_CASE("both branches of a fork keep the bits they have alone") {
  for (const int block : block_sizes) {
    for (const int at : {1, 15, 16, 33, 64, 90}) {
      setting s;
      s.block = block;
      s.chunk = 13;
      const auto cache = cache_for(s);
      const std::vector<token_id> text = text_of(0);
      const std::vector<token_id> head(text.begin(), text.begin() + at);
      logits_by_position kept(text_tokens);
      const int slot = open_slot_of(*cache, head);
      run_to_end(s, *cache, {{slot, head}}, kept);
      const auto copy = cache->fork(slot);
      REQUIRE(copy);
      // The original goes another way first, in one batch with the branch that is compared.
      std::vector<token_id> other = head;
      const std::vector<token_id> tail = text_of(9, 60);
      other.insert(other.end(), tail.begin(), tail.end());
      run_to_end(s, *cache, {{*copy, text}, {slot, other}}, kept);
      CHECK(compare(s, kept) == text_tokens);
      // And the other branch: what it has is what a run of its text alone gives.
      setting alone = s;
      alone.kind = "contiguous";
      const auto lone = cache_for(alone);
      const auto forked = cache->fork(slot);
      REQUIRE(forked);
      std::vector<token_id> more = other;
      more.push_back(5);
      logits_by_position expected(more.size());
      logits_by_position got(more.size());
      run_to_end(alone, *lone, {{open_slot_of(*lone, more), more}}, expected);
      run_to_end(s, *cache, {{*forked, more}}, got);
      CHECK(fingerprint(got.back()) == fingerprint(expected.back()));
    }
  }
}

TEST_CASE("preemption and resumption change no bit") {
  for (const int block : block_sizes) {
    for (const int at : {1, 16, 50, 97, 100}) {
      setting s;
      s.block = block;
      s.chunk = 13;
      const auto cache = cache_for(s);
      const std::vector<token_id> text = text_of(0);
      const std::vector<token_id> head(text.begin(), text.begin() + at);
      logits_by_position kept(text_tokens);
      const int slot = open_slot_of(*cache, text);
      run_to_end(s, *cache, {{slot, head}}, kept);
      REQUIRE(cache->commit(slot, text));
      cache->close(slot);
      int reused = 0;
      const int again = open_slot_of(*cache, text, &reused);
      CHECK(reused == at / block * block);
      run_to_end(s, *cache, {{again, text}}, kept);
      CHECK(compare(s, kept) == text_tokens);
    }
  }
}

TEST_CASE("half and bfloat storage are paged without changing a bit") {
  for (const kv_type type : {kv_type::f16, kv_type::bf16}) {
    for (const int block : block_sizes) {
      setting s;
      s.type = type;
      s.block = block;
      s.chunk = 7;
      s.batch = 3;
      s.threads = 2;
      const auto cache = cache_for(s);
      CHECK(compare(s, run_cold(s, *cache)) == text_tokens);
    }
  }
}

TEST_CASE("the reference, which shares no attention code, agrees with the library to rounding") {
  for (const kv_type type : {kv_type::f32, kv_type::f16, kv_type::bf16}) {
    setting s;
    s.kind = "reference";
    s.type = type;
    const auto cache = cache_for(s);
    const logits_by_position got = run_cold(s, *cache);
    // Rounding to 16 bit amplifies the last bit of f32 sums where it sits on an edge.
    const double tolerance = type == kv_type::f32 ? 1e-4 : type == kv_type::f16 ? 2e-2 : 1e-1;
    double most = 0;
    for (std::size_t p = 0; p < got.size(); ++p) {
      REQUIRE(got[p].size() == baseline_of(type)[p].size());
      for (std::size_t i = 0; i < got[p].size(); ++i) {
        most = std::max(most, std::abs(double(got[p][i]) - baseline_of(type)[p][i]));
      }
    }
    CAPTURE(name_of(type), most);
    CHECK(most <= tolerance);
    CHECK(most > 0);  // the oracle really is other code
  }
}
