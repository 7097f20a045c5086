// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <catch2/catch.hpp>
#include <random>
#include <thread>
#include <vector>

#include "kvcache/cache.hpp"
#include "support/environment.hpp"

namespace {

using namespace kvcache;
using kvcache::test::effort;
using kvcache::test::test_seed;

struct reader_findings {
  uint64_t reads = 0, broken = 0, backwards = 0, last = 0;
};

void read_until(const stats_board& board, std::atomic<int>& started, const std::atomic<bool>& stop,
                reader_findings& f) {
  while (!stop.load(std::memory_order_relaxed)) {
    const stats s = board.read();
    if (f.reads++ == 0) ++started;
    f.broken += s.blocks_used + s.blocks_cached + s.blocks_free + s.blocks_moving != s.blocks_total;
    f.broken += s.tokens_reused > s.tokens_asked || s.nodes_evicted > s.nodes_stored;
    f.broken += s.nodes != s.nodes_stored - s.nodes_evicted || s.blocks_total != 48;
    f.backwards += s.steps < f.last;
    f.last = s.steps;
  }
}

// Opens, extends, commits, forks and closes under pressure, one step after each.
void work(cache& c, int64_t steps, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<sequence> live;
  std::vector<std::vector<token_id>> text;
  for (int64_t i = 0; i < steps; ++i) {
    if (live.size() < 4) {
      std::vector<token_id> prompt(8 + random() % 56);
      for (size_t t = 0; t < prompt.size(); ++t)
        prompt[t] = static_cast<token_id>(t / 8 * (random() % 16 == 0));
      auto s = c.open(prompt, scope::shared());
      if (s && s->extend(static_cast<int32_t>(prompt.size()) - s->reused())) {
        live.push_back(*std::move(s));
        text.push_back(prompt);
      }
    }
    const size_t k = live.empty() ? 0 : random() % live.size();
    if (!live.empty()) {
      if (live[k].extend(1)) text[k].push_back(static_cast<token_id>(random() % 4));
      if (random() % 2 == 0) (void)live[k].commit(text[k]);
      if (random() % 4 == 0) {
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(k));
        text.erase(text.begin() + static_cast<std::ptrdiff_t>(k));
      }
    }
    c.end_step();
  }
}

}  // namespace

TEST_CASE("readers of the board see whole snapshots while the owner works", "[threads]") {
  const uint64_t seed = test_seed("board readers", 20260106);
  const group_config group{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 1, .head_dim_v = 1},
                           .block_size = 4,
                           .total = {48}};
  auto c =
      cache::create({.groups = {&group, 1}, .max_sequences = 8, .max_sequence_tokens = 128, .max_nodes = 24});
  REQUIRE(c);
  std::atomic<bool> stop{false};
  std::atomic<int> started{0};
  reader_findings found[3];
  std::vector<std::thread> readers;
  for (reader_findings& f : found) {
    readers.emplace_back([&board = c->board(), &started, &stop, &f] { read_until(board, started, stop, f); });
  }
  // However busy the machine is, every reader is at it before the owner begins.
  while (started.load() < 3) std::this_thread::yield();
  work(*c, effort(200'000), seed);
  REQUIRE(c->reset());  // the board outlives it
  const uint64_t steps_before = c->board().read().steps;
  stop = true;
  for (std::thread& t : readers) t.join();
  CHECK(steps_before == 0);
  uint64_t reads = 0;
  for (const reader_findings& f : found) {
    CHECK(f.broken == 0);
    CHECK(f.backwards <= 1);  // once, by the reset
    CHECK(f.reads > 0);
    reads += f.reads;
  }
  std::printf("board readers: %llu snapshots\n", static_cast<unsigned long long>(reads));
  CHECK(c->check_invariants() == nullptr);
}
