// SPDX-License-Identifier: Apache-2.0
// Looking prefixes up (W2, W3, W4, W11), in trees that were inserted text by text and unit by unit. A lookup
// writes out every block id of the hit. The limit is memcmp of the same tokens, which lie as the tree's
// labels do: in one piece per text, or scattered by unit.
#include <cstring>

#include "support/limits.hpp"
#include "support/rounds.hpp"
#include "support/traffic.hpp"

namespace {

using namespace bench;
using kvcache::block_id;
using kvcache::cache;
using kvcache::node_id;
using kvcache::scope;
using kvcache::token_id;

const tree_t& tree(insertion how) {
  static const tree_t in_order(0);
  static const tree_t shuffled(0, insertion::shuffled);
  static const tree_t scattered(0, insertion::scattered);
  if (how == insertion::scattered) return scattered;
  return how == insertion::in_order ? in_order : shuffled;
}

struct workload {
  size_t first, count;  // texts of T
  size_t step;          // they are visited in the order first + step * i mod count
  size_t hit;           // tokens
  int repeat;
};
constexpr workload w2{1000, 16, 1, 4096, 20};
constexpr workload w3{1016, 4, 1, 32768, 20};
constexpr workload w11{0, 1000, 7, 1024, 1};

/// The same tokens, compared without any index.
class plain_compare {
 public:
  plain_compare(const workload& w, insertion how, const std::vector<text>& texts) : w_(w), texts_(texts) {
    piece_ = how == insertion::scattered ? size_t{block_size} : w.hit;
    const size_t pieces = w.count * w.hit / piece_;
    const size_t of_tree = how == insertion::scattered ? size_t{tree_t::blocks_of_t} : pieces;
    store_.resize(of_tree * piece_);
    const std::vector<int32_t> order = shuffled(static_cast<int32_t>(of_tree));
    for (size_t i = 0; i < pieces; ++i) {
      place_.push_back((how == insertion::scattered ? static_cast<size_t>(order[i]) : i) * piece_);
      const text& t = texts[w.first + i * piece_ / w.hit];
      std::copy_n(t.data() + i * piece_ % w.hit, piece_, store_.data() + place_.back());
    }
  }
  bool run(size_t k) const {
    const token_id* t = texts_[w_.first + k].data();
    bool equal = true;
    for (size_t at = 0; at < w_.hit; at += piece_) {
      const token_id* mine = store_.data() + place_[(k * w_.hit + at) / piece_];
      equal &= std::memcmp(t + at, mine, piece_ * sizeof(token_id)) == 0;
    }
    benchmark::ClobberMemory();
    return equal;
  }

 private:
  workload w_;
  const std::vector<text>& texts_;
  size_t piece_ = 0;
  text store_;
  std::vector<size_t> place_;
};

void match(benchmark::State& state, const workload& w, insertion how, target bound) {
  const tree_t& t = tree(how);
  const plain_compare limit_of(w, how, t.texts);
  std::vector<node_id> nodes(w.hit / block_size + 1);
  std::vector<block_id> ids(nodes.size());
  const auto items = static_cast<int64_t>(w.count);
  rounds work, limit;
  for (auto _ : state) {
    bool exact = true;
    double seconds = 0;
    for (int k = 0; k < w.repeat; ++k) {
      seconds += work.time(items, [&] {
        for (size_t i = 0; i < w.count; ++i) {
          const text& q = t.texts[w.first + w.step * i % w.count];
          const int32_t hit = t.c.peek(q, scope::shared(), nodes);
          const size_t n = static_cast<size_t>(hit) / block_size;
          exact &= t.c.list_blocks({nodes.data(), n}, ids) * block_size == static_cast<int32_t>(w.hit);
          benchmark::DoNotOptimize(ids.data());
        }
      });
      limit.time(items, [&] {
        for (size_t i = 0; i < w.count; ++i) exact &= limit_of.run(w.step * i % w.count);
      });
    }
    state.SetIterationTime(seconds);
    if (failed(state, exact, "a hit of another length")) return;
  }
  report(state, "ns/match", work, limit, bound);
}

void miss_at_4096_children(benchmark::State& state) {
  constexpr int32_t texts = 4096;
  cache c = make(texts * 16, 4);
  for (uint64_t s = 0; s < texts; ++s) {
    if (failed(state, store(c, tokens(s, 256)), "not stored")) return;
  }
  std::vector<text> absent;
  for (uint64_t s = 100000; s < 100064; ++s) absent.push_back(tokens(s, 256));
  std::vector<node_id> nodes(16);
  random_loads loads(size_t{texts} * 16 * 16);  // as large as the hash table
  rounds work, limit;
  for (auto _ : state) {
    bool miss = true;
    state.SetIterationTime(work.time(64, [&] {
      for (const text& t : absent) miss &= c.peek(t, scope::shared(), nodes) == 0;
    }));
    limit.time(64, [&] { loads.run(64); });
    if (failed(state, miss, "a hit")) return;
  }
  report(state, "ns/match", work, limit, at_most_ns(50));
}

// A scattered text is a chain of loads that depend on each other, while its limit knows all places: no
// target.
constexpr auto in_order = insertion::in_order, mixed = insertion::shuffled, scattered = insertion::scattered;
BENCHMARK_CAPTURE(match, w2, w2, in_order, at_most_ratio(4))->Name("W2/match_4096")->UseManualTime();
BENCHMARK_CAPTURE(match, w2m, w2, mixed, at_most_ratio(4))->Name("W2/match_4096_shuffled")->UseManualTime();
BENCHMARK_CAPTURE(match, w2s, w2, scattered, no_target())->Name("W2/match_4096_scattered")->UseManualTime();
BENCHMARK_CAPTURE(match, w3, w3, in_order, at_most_ratio(2.5))->Name("W3/match_32768")->UseManualTime();
BENCHMARK_CAPTURE(match, w3m, w3, mixed, at_most_ratio(2.5))
    ->Name("W3/match_32768_shuffled")
    ->UseManualTime();
BENCHMARK_CAPTURE(match, w3s, w3, scattered, no_target())->Name("W3/match_32768_scattered")->UseManualTime();
BENCHMARK_CAPTURE(match, w11, w11, in_order, at_most_ratio(3))->Name("W11/match_1024")->UseManualTime();
BENCHMARK_CAPTURE(match, w11m, w11, mixed, at_most_ratio(3))
    ->Name("W11/match_1024_shuffled")
    ->UseManualTime();
BENCHMARK_CAPTURE(match, w11s, w11, scattered, no_target())
    ->Name("W11/match_1024_scattered")
    ->UseManualTime();
BENCHMARK(miss_at_4096_children)->Name("W4/miss_4096_children")->UseManualTime();

}  // namespace
