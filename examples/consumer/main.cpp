// SPDX-License-Identifier: Apache-2.0
// What a user of an installed kvcache writes first: two requests with the same system prompt, the second of
// which reuses what the first one computed. The engine is only hinted at: this program needs the headers
// alone.
#include <cstdio>
#include <vector>

#include "kvcache/blocks/batch_view.hpp"
#include "kvcache/cache.hpp"

namespace kvc = kvcache;

namespace {

int report(const kvc::status& s) {
  std::fprintf(stderr, "error: %s (%s = %lld)\n", kvc::to_text(s.code), s.field,
               static_cast<long long>(s.value));
  return 1;
}

// Stands for a forward pass: runs the queued copies, writes K and V of the new tokens to `slots`, samples a
// token.
kvc::token_id forward(const kvc::command_list& /*copies*/, const std::vector<int64_t>& slots) {
  return static_cast<kvc::token_id>(slots.size());
}

// [example]
// Serves one request and returns how many of its prompt tokens were already in the cache.
kvc::result<int> serve(kvc::cache& cache, std::vector<kvc::token_id> text, int new_tokens) {
  auto seq = cache.open(text, kvc::scope::tenant("acme"));  // longest cached prefix: shared and pinned
  if (!seq) return seq.error();
  const int reused = seq->reused();
  for (int i = 0; i < new_tokens; ++i) {
    const int from = seq->held();
    const int n = static_cast<int>(text.size()) - from;       // first the rest of the prompt, then one by one
    if (auto got = seq->extend(n); !got) return got.error();  // out of blocks: nothing has changed; preempt
    std::vector<int64_t> slots(static_cast<size_t>(n));
    if (auto s = kvc::write_slots(seq->table(), cache.shape().group[0].block_size, from, slots); !s) return s;
    text.push_back(forward(cache.commands(), slots));
    cache.end_step();
  }
  if (auto done = seq->commit(text); !done) return done.error();  // full blocks become prefixes for others
  return reused;
}
// [example]

}  // namespace

int main() {
  auto cache = kvc::cache::create({.shape = {.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128},
                                   .capacity = kvc::gibibytes(1)});
  if (!cache) return report(cache.error());
  const std::vector<kvc::token_id> prompt(600, 7);
  for (const int expected : {0, 592}) {
    const auto reused = serve(*cache, prompt, 20);
    if (!reused) return report(reused.error());
    std::printf("%d of %zu prompt tokens reused\n", *reused, prompt.size());
    if (*reused != expected) return 1;
  }
  return 0;
}
