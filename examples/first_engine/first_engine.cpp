// SPDX-License-Identifier: Apache-2.0
// The cache under an engine, in 80 lines: the regions of this file are the code of docs/first_engine.md. The
// engine's own part, a toy model, is in toy_model.hpp; below the regions the program checks what it claims.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/attend/rope.hpp"
#include "kvcache/blocks/batch_view.hpp"
#include "kvcache/cache.hpp"
#include "toy_model.hpp"

namespace kvc = kvcache;

namespace {

// [parts]
struct engine {
  toy model;
  kvc::cache cache;         // which block every token lives in; holds no bytes
  kvc::host_planes planes;  // the bytes: K and V of every block, layer by layer
  kvc::attention attention;
  kvc::rope rope;
};

kvc::result<engine> make_engine(kvc::bytes memory) {
  auto cache = kvc::cache::create({.shape = toy::shape, .capacity = memory, .max_sequences = 16});
  if (!cache) return cache.error();
  const kvc::group_geometry& g = cache->shape().group[0];
  auto planes = kvc::host_planes::create({.shape = g.shape, .block_size = g.block_size, .blocks = g.total});
  if (!planes) return planes.error();
  auto attention = kvc::attention::create(
      planes->layer(0), {.q_heads = toy::q_heads, .rows = toy::chunk, .slots = g.columns * g.block_size});
  if (!attention) return attention.error();
  auto rope = kvc::rope::create({.dims = g.shape.head_dim_k});
  if (!rope) return rope.error();
  return engine{{}, std::move(*cache), std::move(*planes), std::move(*attention), std::move(*rope)};
}
// [parts]

// [step]
// Computes the next `tokens` of a sequence and returns the one that the model puts after them.
kvc::result<kvc::token_id> step(engine& e, kvc::sequence& seq, std::span<const kvc::token_id> tokens) {
  const int32_t first = seq.held(), n = static_cast<int32_t>(tokens.size());
  const int32_t end = first + n, starts[] = {0, n};
  if (auto got = seq.extend(n); !got) return got.error();  // out_of_blocks: nothing has changed
  if (auto s = kvc::run(e.planes.layers(), e.cache.commands().view()); !s) return s;  // before any append
  std::vector<int64_t> slots(tokens.size());
  if (auto s = kvc::write_slots(seq.table(), e.planes.layer(0).block, first, slots); !s) return s;
  std::vector<int32_t> table(seq.table().size()), pos(tokens.size());
  if (auto s = kvc::write_row(seq.table(), -1, table); !s) return s;
  std::iota(pos.begin(), pos.end(), first);  // places in the text; slots say nothing about them
  kvc_batch batch{};
  batch.struct_size = sizeof batch, batch.n = 1, batch.table_columns = static_cast<int32_t>(table.size());
  batch.table = table.data(), batch.kv_len = &end, batch.q_start = starts, batch.q_pos = pos.data();
  std::vector<float> x = e.model.embed(tokens);
  head_rows q, k, v, out{toy::q_heads, x};
  for (int32_t l = 0; l < toy::layers; ++l) {
    e.model.project(l, x, q, k, v);
    const kvc_kv& kv = e.planes.layer(l);
    kvc::status s = kvc::append(kv, rows(k), rows(v), slots, {.rope = &e.rope.view(), .positions = pos});
    if (s) s = e.rope.turn(rows(q), pos, q.values.data());
    if (s) s = e.attention.run(kv, batch, rows(q), kvc::causal_softmax(toy::scale), results(out));
    if (!s) return s;
    e.model.finish(l, out, x);
  }
  e.cache.end_step();  // the commands have been run and may be forgotten
  return e.model.sample(x);
}
// [step]

// [serve]
struct request {
  std::vector<kvc::token_id> text;          // the prompt, then the answer too
  int left = 0, reused = 0, preempted = 0;  // tokens still wanted, tokens found, times sent away
  kvc::sequence seq{};
};

kvc::status put_away(request& r) {  // what was computed stays cached until somebody needs the blocks
  const auto done = r.seq.commit(r.text);
  return done ? r.seq.close() : done.error();
}

kvc::status advance(engine& e, std::span<request> all, request& r) {
  if (!r.seq.live()) {
    auto seq = e.cache.open(r.text, kvc::scope::tenant("acme"));  // shares the longest cached prefix
    if (!seq) return seq.error();
    r.seq = std::move(*seq), r.reused = r.seq.reused();
  }
  const auto rest = std::span(r.text).subspan(static_cast<size_t>(r.seq.held()));
  const auto now = rest.first(std::min<size_t>(rest.size(), toy::chunk));
  auto next = step(e, r.seq, now);
  while (!next && next.error().code == kvc::errc::out_of_blocks) {  // preempt the youngest, perhaps this one
    if (e.cache.count().sequences_live == 1) return next.error();   // does not fit even alone
    request& victim = *std::find_if(all.rbegin(), all.rend(), [](auto& o) { return o.seq.live(); });
    ++victim.preempted;
    if (auto s = put_away(victim); !s || &victim == &r) return s;
    next = step(e, r.seq, now);
  }
  if (!next || now.size() < rest.size()) return next.error();  // an error, or the rest of the prompt first
  r.text.push_back(*next);
  return --r.left == 0 ? put_away(r) : kvc::status{};
}
// [serve]

kvc::status serve(engine& e, std::span<request> all) {
  while (std::any_of(all.begin(), all.end(), [](const request& r) { return r.left > 0; })) {
    for (request& r : all) {
      if (r.left == 0) continue;
      if (auto s = advance(e, all, r); !s) return s;
    }
  }
  return {};
}

std::vector<kvc::token_id> prompt(int user) {
  std::vector<kvc::token_id> text(200);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<kvc::token_id>(i * i + 7 * i) % 101;
  for (int i = 0; i < 20; ++i) text.push_back((user * 31 + i * 5) % 101);  // after the 200 that all share
  return text;
}

// Computes the prompt, forks, and lets both branches follow the known answer, the fork first: it writes to
// the shared last block, so it gets a copy.
bool branches_agree(engine& e, kvc::sequence& trunk, size_t prompt, std::span<const kvc::token_id> known) {
  const auto held = static_cast<size_t>(trunk.held());
  if (!step(e, trunk, known.subspan(held, prompt - held))) return false;
  auto branch = trunk.fork();
  if (!branch) return false;
  bool equal = true;
  for (size_t i = prompt; i + 1 < known.size(); ++i) {
    for (kvc::sequence* s : {&*branch, &trunk}) {
      const auto next = step(e, *s, known.subspan(i, 1));
      equal = equal && next && *next == known[i + 1];
    }
  }
  return equal;
}

int failures = 0;
void expect(bool right, const char* what) {
  std::printf("%-68s %s\n", what, right ? "yes" : "NO");
  failures += !right;
}

}  // namespace

int main() {
  // One request after the other, in plenty of memory.
  auto e = make_engine(kvc::mebibytes(4));
  if (!e) return 1;
  std::vector<request> alone;
  for (int user = 0; user < 4; ++user) {
    alone.push_back({prompt(user), 40});
    if (!serve(*e, std::span(alone).last(1))) return 1;
  }
  expect(alone[0].reused == 0, "the first request finds nothing");
  expect(alone[1].reused == 192, "the next one finds the full blocks of what they share");
  request again{prompt(0), 40};
  if (!serve(*e, {&again, 1})) return 1;
  expect(again.reused == 208, "the first one again finds its prompt, up to the last full block");
  expect(again.text == alone[0].text && alone[0].text != alone[1].text, "and gets the same answer");

  auto trunk = e->cache.open(prompt(0), kvc::scope::tenant("acme"));
  expect(trunk && branches_agree(*e, *trunk, prompt(0).size(), alone[0].text),
         "both branches of a fork get it too");

  // All at once, in the memory of 24 blocks: each needs 17, of which 12 are shared.
  auto small = make_engine(kvc::kibibytes(24 * 8));
  if (!small) return 1;
  std::vector<request> together;
  for (int user = 0; user < 4; ++user) together.push_back({prompt(user), 40});
  if (!serve(*small, together)) return 1;
  int preempted = 0;
  bool equal = true;
  for (size_t i = 0; i < together.size(); ++i) {
    preempted += together[i].preempted;
    equal = equal && together[i].text == alone[i].text;
  }
  expect(preempted > 0, "with too few blocks somebody is preempted");
  expect(equal, "and everybody gets the answer he gets alone");
  request huge{std::vector<kvc::token_id>(380, 1), 40};  // 24 blocks are 384 tokens
  expect(serve(*small, {&huge, 1}).code == kvc::errc::too_long, "what cannot fit even alone is told so");
  expect(bool(huge.seq.close()), "and is closed like any other");
  expect(small->cache.count().blocks_used == 0, "nothing is held at the end");
  expect(small->cache.check_invariants() == nullptr, "the cache's own books agree");
  std::printf("%d of %zu prompt tokens reused by the last of four; %d preemptions in 24 blocks\n",
              alone[3].reused, prompt(3).size(), preempted);
  return failures;
}
