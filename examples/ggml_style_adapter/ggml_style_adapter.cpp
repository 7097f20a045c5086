// SPDX-License-Identifier: Apache-2.0
// The cache calls of an engine that thinks in token cells (find cells for a batch, then remove, copy, keep
// and shift ranges of positions per sequence id), mapped onto kvcache, so that such an engine gets paging,
// sharing between requests, copy on write and admission control without rewriting its graph. What is learned:
// which call becomes which verb (the comments on `cell_cache`), which calls are refused and what to do
// instead, and that a batch gets all its cells or none. Needs the headers only; the driver below compares
// every sequence with a plain model after each of 20,000 random calls.
#include <cstdio>
#include <map>
#include <random>
#include <vector>

#include "kvcache/blocks/batch_view.hpp"
#include "kvcache/cache.hpp"

namespace kvc = kvcache;
using tokens = std::vector<kvc::token_id>;

namespace {

// [adapter]
class cell_cache {
 public:
  struct part {  // n tokens of a batch, all of sequence id, at the positions after its last
    int32_t id, n;
  };

  explicit cell_cache(kvc::cache cache) : cache_(std::move(cache)) {}

  // New: what of a prompt needs no decoding. The cell calls have no word for it: their cells have one owner.
  int32_t seq_begin(int32_t id, const tokens& prompt) {
    auto s = cache_.open(prompt, kvc::scope::shared());
    return s ? (seq_[id] = std::move(*s)).reused() : 0;
  }
  // New: the engine has computed these tokens; others may find them.
  void seq_publish(int32_t id, const tokens& text) { (void)at(id).commit(text); }

  // find_slot: a cell for every token of a batch, all or none (then decode something smaller, or preempt).
  bool find_slot(const std::vector<part>& batch, std::vector<int64_t>& cells) {
    std::map<int32_t, int32_t> before;
    cells.clear();
    for (const part& p : batch) {
      before.emplace(p.id, at(p.id).held());
      const int32_t from = at(p.id).held();
      if (!at(p.id).extend(p.n)) {
        for (const auto& [id, length] : before) (void)at(id).truncate(length);
        return false;
      }
      cells.resize(cells.size() + static_cast<size_t>(p.n));
      const std::span<int64_t> mine = std::span(cells).last(static_cast<size_t>(p.n));
      (void)kvc::write_slots(at(p.id).table(), block_size(), from, mine);
    }
    return true;
  }
  // seq_rm [p0, p1), negative = open: a tail is `truncate`, all of it `close`. A hole is refused: what lies
  // behind it was computed with what is removed. Remove [p0, end) and decode the rest again.
  bool seq_rm(int32_t id, int32_t p0, int32_t p1) {
    p0 = std::max(p0, 0);
    if (p1 < 0 || p1 > length(id)) p1 = length(id);
    if (p0 >= p1) return true;
    if (p1 != length(id)) return false;
    return p0 == 0 ? bool(at(id).close()) : bool(at(id).truncate(p0));
  }
  // seq_cp of a beginning: `fork`, or `assign` onto a live branch; no cell is written until they differ.
  bool seq_cp(int32_t from, int32_t to, int32_t p0, int32_t p1) {
    if (p0 > 0) return false;  // a middle without its beginning is no text
    if (from == to) return true;
    if (!at(to).live() || !at(to).assign(at(from))) {
      auto f = at(from).fork();
      if (!f) return false;
      seq_[to] = std::move(*f);
    }
    return p1 < 0 || p1 >= length(to) || bool(at(to).truncate(p1));
  }
  void seq_keep(int32_t id) {
    std::erase_if(seq_, [id](const auto& s) { return s.first != id; });  // a sequence that goes closes itself
  }
  // seq_add, seq_div: refused, as cached keys may be shared and carry their position. Truncate and decode
  // again, or store unrotated keys and rotate when reading.
  static bool seq_add(int32_t, int32_t, int32_t, int32_t delta) { return delta == 0; }
  static bool can_shift() { return false; }
  int32_t seq_pos_max(int32_t id) { return length(id) - 1; }  // seq_pos_min is 0

  int32_t length(int32_t id) { return at(id).held(); }
  // To be run before the batch is computed.
  std::span<const kvc_command> copies() const { return cache_.commands().view(); }
  void end_batch() { cache_.end_step(); }
  int32_t block_size() const { return cache_.shape().unit; }
  // For the mask or the gather of attention: the cell of position i of a sequence.
  int64_t cell(int32_t id, int32_t i) {
    return int64_t{kvc::raw(at(id).table()[static_cast<size_t>(i / block_size())])} * block_size() +
           i % block_size();
  }
  const kvc::cache& cache() const { return cache_; }

 private:
  kvc::sequence& at(int32_t id) { return seq_[id]; }
  kvc::cache cache_;
  std::map<int32_t, kvc::sequence> seq_;  // destroyed before the cache
};
// [adapter]

// The driver: what a cell holds is its token and position; a model of plain texts says what must be found.
struct driver {
  cell_cache cells;
  std::vector<std::pair<kvc::token_id, int32_t>> memory;
  std::map<int32_t, tokens> text;
  std::mt19937 random{1};
  int64_t refused = 0, reused = 0;
  bool ok = true;

  int32_t pick(int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); }

  void begin(int32_t id) {
    tokens prompt(static_cast<size_t>(1 + pick(60)));
    for (size_t i = 0; i < prompt.size(); ++i)
      prompt[i] = static_cast<kvc::token_id>(i < 32 ? i : i + random() % 2);
    (void)cells.seq_rm(id, -1, -1);
    const int32_t found = cells.seq_begin(id, prompt);
    reused += found;
    text[id].assign(prompt.begin(), prompt.begin() + found);
    decode({{id, static_cast<int32_t>(prompt.size()) - found}},
           {tokens(prompt.begin() + found, prompt.end())});
  }
  void decode(const std::vector<cell_cache::part>& batch, const std::vector<tokens>& what) {
    std::vector<int64_t> slots;
    const bool fits = cells.find_slot(batch, slots);
    for (const kvc_command& c : cells.copies()) copy(c);  // also of a batch that was given up
    refused += !fits;
    auto slot = slots.begin();
    for (size_t i = 0; fits && i < batch.size(); ++i) {
      for (const kvc::token_id t : what[i]) {
        memory[static_cast<size_t>(*slot++)] = {t, static_cast<int32_t>(text[batch[i].id].size())};
        text[batch[i].id].push_back(t);
      }
    }
    cells.end_batch();
  }
  void copy(const kvc_command& c) {
    const auto from = memory.begin() + int64_t{c.src} * cells.block_size();
    std::copy_n(from, c.tokens, memory.begin() + int64_t{c.dst} * cells.block_size());
  }
  void decode_all() {
    std::vector<cell_cache::part> batch;
    std::vector<tokens> what;
    for (auto& [id, t] : text) {
      if (t.empty()) continue;
      batch.push_back({id, 1 + pick(3)});
      what.emplace_back();
      for (int32_t i = 0; i < batch.back().n; ++i) what.back().push_back(pick(50));
    }
    decode(batch, what);
  }
  bool same() {
    for (auto& [id, t] : text) {
      if (cells.seq_pos_max(id) + 1 != static_cast<int32_t>(t.size())) return false;
      for (int32_t i = 0; i < cells.length(id); ++i) {
        if (memory[static_cast<size_t>(cells.cell(id, i))] != std::pair{t[static_cast<size_t>(i)], i})
          return false;
      }
    }
    return cells.cache().check_invariants() == nullptr;
  }
  void act() {
    const int32_t id = pick(6), other = pick(6), n = cells.length(id), at = n > 0 ? pick(n) : 0,
                  what = pick(12);
    if (what < 2) begin(id);
    if (what == 2 && n > 0) cells.seq_publish(id, text[id]);
    if (what == 3 && cells.seq_rm(id, at, -1)) text[id].resize(static_cast<size_t>(at));
    if (what == 4 && at > 0) ok &= !cells.seq_rm(id, 0, at) && !cells.seq_cp(id, other, at, -1);
    if (what == 5 && n > 0 && cells.seq_cp(id, other, 0, at + 1) && id != other) {
      text[other].assign(text[id].begin(), text[id].begin() + at + 1);
    }
    if (what == 6 && pick(20) == 0) {
      cells.seq_keep(id);
      std::erase_if(text, [id](const auto& t) { return t.first != id; });
    }
    if (what > 6) decode_all();
    ok &= same();
  }
};

}  // namespace

int main() {
  auto cache = kvc::cache::create({.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 8},
                                   .block_size = 8,
                                   .capacity = kvc::bytes{24 * 256},
                                   .max_sequences = 16});
  if (!cache) return 1;
  const auto slots = static_cast<size_t>(cache->pool().total_blocks()) * 8;
  driver d{cell_cache(std::move(*cache)), {slots, {-1, -1}}, {}};
  for (int i = 0; i < 20000 && d.ok; ++i) d.act();
  const kvc::stats s = d.cells.cache().count();
  std::printf("20000 calls, every cell %s; batches refused for want of cells: %lld; copies: %llu\n",
              d.ok ? "right" : "WRONG AT SOME CALL", static_cast<long long>(d.refused),
              static_cast<unsigned long long>(s.blocks_copied));
  std::printf("prompt tokens that needed no decoding: %lld\n", static_cast<long long>(d.reused));
  return d.ok && d.refused > 0 && d.reused > 0 ? 0 : 1;
}
