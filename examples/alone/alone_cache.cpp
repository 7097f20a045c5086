// SPDX-License-Identifier: Apache-2.0
// Verbs of the cache that need no bytes: forks, drafts, accounts, events. Regions are shown in docs/cache.md.
#include <vector>

#include "expect.hpp"
#include "kvcache/cache.hpp"

namespace kvc = kvcache;

namespace {

const kvc::model_shape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 8};

kvc::status show_fork() {
  auto made = kvc::cache::create({.shape = shape, .capacity = kvc::kibibytes(64)});
  if (!made) return made.error();
  kvc::cache& cache = *made;
  const std::vector<kvc::token_id> prompt(40, 1);
  // [fork]
  auto seq = cache.open(prompt, kvc::scope::shared());
  if (!seq) return seq.error();
  if (auto got = seq->extend(40); !got) return got.error();  // 3 blocks, the last holds 8 tokens
  auto branch = seq->fork();                                 // the same 3 blocks
  if (!branch) return branch.error();
  if (auto got = branch->extend(1); !got) return got.error();
  const kvc_command copy = cache.commands().view()[0];  // 8 tokens of the last block, into a new one
  // [fork]
  expect(cache.commands().size() == 1 && copy.op == KVC_OP_COPY && copy.tokens == 8,
         "a fork copies one block");
  expect(seq->table()[1] == branch->table()[1] && seq->table()[2] != branch->table()[2],
         "and shares the others");
  return {};
}

kvc::status show_draft() {
  auto made = kvc::cache::create({.shape = shape, .capacity = kvc::kibibytes(64)});
  if (!made) return made.error();
  auto seq = made->open({}, kvc::scope::shared());
  if (!seq) return seq.error();
  if (auto got = seq->extend(14); !got) return got.error();
  // [draft]
  auto slots = seq->extend(5, true);  // five speculative tokens
  if (!slots) return slots.error();
  const int32_t kept = 2;  // as far as the model agrees
  if (auto s = seq->accept(kept); !s) return s;
  // [draft]
  expect(*slots == 5 && seq->held() == 16 && seq->table().size() == 1,
         "rejected drafts give their blocks back");
  return {};
}

kvc::status show_accounts() {
  // [accounts]
  const int32_t most[] = {4, 1000};  // blocks that accounts 0 and 1 may hold
  auto cache = kvc::cache::create({.shape = shape, .capacity = kvc::kibibytes(64), .account_limits = most});
  if (!cache) return cache.error();
  auto seq = cache->open({}, kvc::scope::tenant("zero"), {.account = 0});
  if (!seq) return seq.error();
  const auto refused = seq->extend(16 * 5);  // over_quota; nothing has changed
  // [accounts]
  expect(refused.error().code == kvc::errc::over_quota && cache->charged(0) == 0,
         "an account stays in its limit");
  return {};
}

kvc::status show_events() {
  auto cache = kvc::cache::create({.shape = shape, .capacity = kvc::kibibytes(64), .max_events = 100});
  if (!cache) return cache.error();
  const std::vector<kvc::token_id> text(32, 3);
  auto seq = cache->open(text, kvc::scope::shared());
  if (!seq) return seq.error();
  if (auto got = seq->extend(32); !got) return got.error();
  if (auto done = seq->commit(text); !done) return done.error();
  // [events]
  int stored = 0;
  for (const kvc_event& e : cache->events()) {  // parents before children, in the order of the step
    if (e.kind == KVC_EVENT_STORED) ++stored;   // tokens: cache->tokens(kvc::node_id{e.node})
  }
  cache->end_step();                              // forgets them
  const kvc::stats seen = cache->board().read();  // any thread may do this
  // [events]
  expect(stored == 2 && seen.nodes == 2, "events and the board tell of two cached units");
  expect(seen.blocks_used + seen.blocks_cached + seen.blocks_free == seen.blocks_total,
         "every block is counted once");
  return {};
}

}  // namespace

int main() {
  for (const auto show : {show_fork, show_draft, show_accounts, show_events}) expect(bool(show()), "done");
  return wrong;
}
