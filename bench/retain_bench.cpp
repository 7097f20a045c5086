// SPDX-License-Identifier: Apache-2.0
// What dropping tokens costs beside the attention that goes on meanwhile, one thread. An item is a step of
// all layers, 24 of them over 400 MB in f32: 8 kv heads, 3 query heads each, head dim 64. Names:
//   streaming_llm/<type>   one token more: room for it, stored, attended to among 4,096, and what the policy
//   then
//                          drops; the limit is storing and attending alone, in turn over the same blocks
//   h2o/<type>             one token more: per kv head a victim among 4,096, its slot overwritten, attention
//   with
//                          column sums; the limit is attention alone over as many
// and of the example engine's shape, 9 query and 3 kv heads, 6 layers:
//   snapkv_at_4k/<type>    votes of the last 32 queries, pooling, selection, the drop and its gather, for a
//   prompt
//                          of 4,096 tokens of which 256 stay; the limit is the prompt's prefill attention
#include <benchmark/benchmark.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/attend/rope.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/retain/select.hpp"
#include "kvcache/retain/snapkv.hpp"
#include "kvcache/retain/streaming_llm.hpp"
#include "support/machine.hpp"
#include "support/rounds.hpp"

using namespace kvcache;

namespace {

constexpr int32_t block = 16, dim = 64;

struct model {
  element type;
  int32_t layers, q_heads, kv_heads, rows, slots;
  int32_t group() const { return q_heads / kv_heads; }
};

std::vector<float> normal(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> one;
  std::vector<float> v(n);
  for (float& x : v) x = one(random);
  return v;
}

/// One long text of a model without weights: a cache, planes full of random keys and values, attention.
class text {
 public:
  explicit text(const model& m) : m_(m) {
    const group_shape shape{
        .layers = m.layers, .kv_heads = m.kv_heads, .head_dim_k = dim, .head_dim_v = dim, .type = m.type};
    const group_config groups[] = {{.shape = shape, .block_size = block, .total = {m.slots / block}}};
    auto made = cache::create({.groups = groups,
                               .max_sequences = 1,
                               .max_sequence_tokens = m.slots,
                               .max_nodes = -1,
                               .max_gathers = 1});
    auto memory = host_planes::create(
        {.shape = shape, .block_size = block, .blocks = m.slots / block, .layer_owner = {}});
    if (!made || !memory) return;
    cache_.emplace(std::move(*made));
    planes_ = std::move(*memory);
    auto with = attention::create(planes_.layer(0), {.q_heads = m.q_heads, .rows = m.rows, .slots = m.slots});
    auto turning = rope::create({.dims = dim, .frequency = {}, .table_positions = 1 << 14});
    if (!with || !turning) return;
    attend_ = std::move(*with);
    rope_ = std::move(*turning);
    const auto rows = static_cast<size_t>(m.rows);
    q_ = normal(rows * static_cast<size_t>(m.q_heads * dim), 1);
    kv_ = normal(static_cast<size_t>(std::max(m.rows, block) * m.kv_heads * dim), 2);
    out_.resize(q_.size());
    lse2_.resize(rows * static_cast<size_t>(m.q_heads));
    ok_ = true;
    open();
    fill();
  }

  bool ok() const { return ok_; }
  int32_t held() const { return held_; }
  const kvcache::cache& cache() const { return *cache_; }
  const kvc_kv& layer(int32_t i) const { return planes_.layer(i); }
  std::span<const float> lse2() const { return lse2_; }
  double seconds() const { return crew_.seconds(); }

  /// Begins the text anew; the blocks keep what lies in them.
  void open() {
    seq_ = {};
    auto opened = cache_->open({}, scope::shared());
    ok_ = ok_ && opened;
    if (opened) seq_ = std::move(*opened);
    held_ = 0;
  }
  bool extend(int32_t tokens) {
    held_ += tokens;
    return bool(seq_.extend(tokens)) && run({});
  }
  /// Stores one row per slot of all kv heads, or one per kv head in the slots given.
  bool append(int32_t layer, std::span<const int64_t> slots, bool by_head = false) {
    kvc_append a{};
    a.struct_size = sizeof a;
    a.rows = by_head ? 1 : static_cast<int32_t>(slots.size());
    a.k = a.v = dense_rows(kv_.data(), element::f32, m_.kv_heads, dim);
    a.slot = slots.data();
    a.slot_head_stride = by_head ? 1 : 0;
    return kvc_cpu_append(&planes_.layer(layer), &a, nullptr, nullptr) == KVC_OK;
  }
  /// The last `rows` rows attend to the first `slots` slots.
  bool attend(int32_t layer, int32_t slots, int32_t rows, float* scores = nullptr) {
    kvc_out out = dense_out(out_.data(), element::f32, m_.q_heads, dim, lse2_.data());
    out.key_score = scores;
    out.key_score_head_stride = m_.slots;
    const kvc_batch b = batch(slots, rows);
    return bool(attend_.run(planes_.layer(layer), b, queries(), causal_softmax(0.1f), out));
  }
  bool score(int32_t layer, int32_t slots, int32_t rows, const kvc_score& what) {
    return bool(
        attend_.score(planes_.layer(layer), batch(slots, rows), queries(), causal_softmax(0.1f), what));
  }
  int64_t slot(int32_t at) const {
    return int64_t{raw(seq_.table()[static_cast<size_t>(at / block)])} * block + at % block;
  }
  bool retain(const keep_plan& plan, std::span<const kvc_keep> keeps) {
    const auto done = seq_.retain(plan);
    if (!done) return false;
    held_ -= done->dropped;
    return run(keeps);
  }

 private:
  kvc_batch batch(int32_t slots, int32_t rows) {
    table_.resize(seq_.table().size());
    for (size_t i = 0; i < table_.size(); ++i) table_[i] = raw(seq_.table()[i]);
    length_ = slots;
    starts_[1] = rows;
    positions_.resize(static_cast<size_t>(rows));
    std::iota(positions_.begin(), positions_.end(), slots - rows);
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = 1;
    b.table = table_.data();
    b.table_columns = static_cast<int32_t>(table_.size());
    b.kv_len = &length_;
    b.q_start = starts_;
    b.q_pos = positions_.data();
    return b;
  }
  kvc_rows queries() const { return dense_rows(q_.data(), element::f32, m_.q_heads, dim); }
  bool run(std::span<const kvc_keep> keeps) {
    const auto& list = cache_->commands();
    const status done = kvcache::run(planes_.layers(), list.view(),
                                     {.ids = list.ids(), .keeps = keeps, .rope = &rope_.view()});
    cache_->end_step();
    return bool(done);
  }
  void fill() {
    ok_ = ok_ && extend(m_.slots);
    std::vector<int64_t> slots(block);
    for (int32_t at = 0; ok_ && at < m_.slots; at += block) {
      for (int32_t i = 0; i < block; ++i) slots[static_cast<size_t>(i)] = slot(at + i);
      for (int32_t i = 0; i < m_.layers; ++i) ok_ = ok_ && append(i, slots);
    }
  }

  model m_;
  bench::crew crew_{1};
  std::optional<kvcache::cache> cache_;
  host_planes planes_;
  attention attend_;
  kvcache::rope rope_;
  sequence seq_;
  int32_t held_ = 0, length_ = 0, starts_[2] = {};
  std::vector<int32_t> table_, positions_;
  std::vector<float> q_, kv_, out_, lse2_;
  bool ok_ = false;
};

model long_text(element type) {
  // Two blocks more than 4,096 tokens take.
  const int32_t layers = bench::quick() ? 2 : type == element::f32 ? 24 : 48;
  return {type, layers, 24, 8, 1, 4096 + 2 * block};
}

void streaming_llm(benchmark::State& state, element type) {
  const model m = long_text(type);
  text at(m);
  if (bench::failed(state, at.ok(), "no memory")) return;
  const kvcache::streaming_llm policy{4, 4096 - block};
  bool done = true;
  int64_t dropped = 0;
  const auto drop = [&] {
    const keep_plan plan =
        policy.plan({.held = at.held(), .incoming = 0, .unit = block, .prefill_end = false});
    if (plan.form == drop_form::nothing) return;
    dropped += at.held() - plan.keep;
    done = done && at.retain(plan, {});
  };
  const auto attend = [&] {
    const int64_t slots[] = {at.slot(at.held() - 1)};
    for (int32_t i = 0; i < m.layers; ++i) done = done && at.append(i, slots) && at.attend(i, at.held(), 1);
  };
  drop();
  bench::rounds work, limit;
  for (auto _ : state) {
    double with = 0, plain = 0;
    for (int32_t token = 0; token < block; ++token) {
      const double start = at.seconds();
      done = done && at.extend(1);
      attend();
      drop();
      const double middle = at.seconds();
      attend();
      with += middle - start;
      plain += at.seconds() - middle;
    }
    work.add(with * 1e9 / block);
    limit.add(plain * 1e9 / block);
    state.SetIterationTime(with);
  }
  done = done && dropped >= block * static_cast<int64_t>(state.iterations());
  if (bench::failed(state, done && at.cache().check_invariants() == nullptr, "a step failed")) return;
  bench::report(state, "ns/token", work, limit, bench::at_most_ratio(1.02));
}

/// Heavy hitters in their steady state: as many tokens as slots, a sum for each, another per kv head and
/// layer.
class heavy_hitters {
 public:
  static constexpr int32_t slots = 4096, recent = 2048;

  heavy_hitters(text& at, const model& m) : at_(at), m_(m), to_(heads()) {
    sums_.resize(static_cast<size_t>(m.layers) * heads() * slots);
    positions_.resize(sums_.size());
    for (size_t i = 0; i < positions_.size(); ++i) positions_[i] = static_cast<int32_t>(i % slots);
    scores_.resize(static_cast<size_t>(m.q_heads * m.slots));
  }

  /// One layer of the token at text position `position`.
  bool step(int32_t layer, int32_t position) {
    const size_t base = static_cast<size_t>(layer) * heads() * slots;
    for (size_t h = 0; h < heads(); ++h) {
      const auto sum = std::span(sums_).subspan(base + h * slots, slots);
      const auto place = std::span(positions_).subspan(base + h * slots, slots);
      const int32_t victim = victim_slot(sum, place, position - recent);
      if (victim < 0) return false;
      sum[static_cast<size_t>(victim)] = 0;
      place[static_cast<size_t>(victim)] = position;
      to_[h] = at_.slot(victim);
    }
    kvc_score what = dense_score(KVC_SCORE_WEIGHT, sums_.data() + base, slots, at_.lse2().data(), true);
    what.key_score = scores_.data();
    what.key_score_head_stride = m_.slots;
    return at_.append(layer, to_, true) && at_.attend(layer, slots, 1, scores_.data()) &&
           at_.score(layer, slots, 1, what);
  }
  /// Slots whose token came in a step.
  int64_t taken() const {
    return std::count_if(positions_.begin(), positions_.end(), [](int32_t p) { return p >= slots; });
  }

 private:
  size_t heads() const { return static_cast<size_t>(m_.kv_heads); }

  text& at_;
  const model m_;
  std::vector<float> sums_;         ///< [layers][kv heads][slots]
  std::vector<int32_t> positions_;  ///< the same
  std::vector<float> scores_;
  std::vector<int64_t> to_;
};

void h2o(benchmark::State& state, element type) {
  constexpr int32_t slots = heavy_hitters::slots;
  const model m = long_text(type);
  text at(m);
  if (bench::failed(state, at.ok(), "no memory")) return;
  heavy_hitters kept(at, m);
  bool done = true;
  int32_t position = slots;
  bench::rounds work, limit;
  for (auto _ : state) {
    const double start = at.seconds();
    for (int32_t layer = 0; layer < m.layers; ++layer) done = done && kept.step(layer, position);
    const double middle = at.seconds();
    for (int32_t layer = 0; layer < m.layers; ++layer) done = done && at.attend(layer, slots, 1);
    work.add((middle - start) * 1e9);
    limit.add((at.seconds() - middle) * 1e9);
    state.SetIterationTime(middle - start);
    ++position;
  }
  // In every step each head takes one token in and lets one go.
  done = done && kept.taken() == int64_t{m.kv_heads} * m.layers * static_cast<int64_t>(state.iterations());
  if (bench::failed(state, done, "a step failed")) return;
  bench::report(state, "ns/token", work, limit, bench::at_most_ratio(1.25));
}

/// Votes, pooling and selection of one layer; its keep-lists [kv heads][keep].
bool decide(text& at, const model& m, int32_t layer, int32_t slots, const snapkv& policy,
            std::span<int32_t> kept) {
  const size_t held = static_cast<size_t>(slots), group = static_cast<size_t>(m.group());
  std::vector<float> votes(static_cast<size_t>(m.q_heads) * held), scores(held);
  std::vector<int32_t> scratch(held), list(held);
  const kvc_score what = dense_score(KVC_SCORE_WEIGHT, votes.data(), slots, at.lse2().data());
  if (!at.score(layer, slots, policy.window, what)) return false;
  const keep_plan plan = policy.plan({.held = slots, .incoming = 0, .unit = block, .prefill_end = true});
  for (size_t h = 0; h < static_cast<size_t>(m.kv_heads); ++h) {
    const observation seen{.held = slots,
                           .queries = m.group(),
                           .weights = std::span(votes).subspan(h * group * held, group * held),
                           .seen = {},
                           .value_norms = {},
                           .positions = {}};
    policy.score(seen, scores);
    const auto n = select_slots(scores, {plan.sinks, plan.recent, {}}, plan.keep, scratch, list);
    if (!n || *n != plan.keep) return false;
    std::copy_n(list.begin(), plan.keep, kept.begin() + static_cast<std::ptrdiff_t>(h) * plan.keep);
  }
  return true;
}

void snapkv_at_4k(benchmark::State& state, element type) {
  constexpr int32_t chunk = 512;
  const int32_t prompt = bench::quick() ? 1024 : 4096;
  const model m{type, bench::quick() ? 2 : 6, 9, 3, chunk, prompt};
  text at(m);
  if (bench::failed(state, at.ok(), "no memory")) return;
  const snapkv policy{256, 32, 7};
  const auto lists = static_cast<size_t>(m.kv_heads * policy.capacity);
  std::vector<int32_t> kept(static_cast<size_t>(m.layers) * lists);
  const kvc_keep keeps[] = {{kept.data(), policy.capacity, static_cast<int64_t>(lists)}};
  bool done = true;
  bench::rounds work, limit;
  for (auto _ : state) {
    at.open();
    done = done && at.extend(prompt);
    const double start = at.seconds();
    for (int32_t i = 0; i < m.layers; ++i) {
      for (int32_t end = chunk; end <= prompt; end += chunk) done = done && at.attend(i, end, chunk);
    }
    const double prefill = at.seconds() - start;
    done = done && at.attend(0, prompt, policy.window);  // lse2 of the window's queries, which prefill knew
    const double middle = at.seconds();
    for (int32_t i = 0; i < m.layers; ++i) {
      done = done && decide(at, m, i, prompt, policy, std::span(kept).subspan(size_t(i) * lists, lists));
    }
    const keep_plan plan = policy.plan({.held = prompt, .incoming = 0, .unit = block, .prefill_end = true});
    done = done && at.retain(plan, keeps) && at.held() == policy.capacity;
    const double end = at.seconds();
    work.add((end - middle) * 1e9);
    limit.add(prefill * 1e9);
    state.SetIterationTime(end - middle);
  }
  if (bench::failed(state, done && at.cache().check_invariants() == nullptr, "a drop failed")) return;
  bench::report(state, "ns/prompt", work, limit, bench::at_most_ratio(0.02));
}

void add(const char* name, void (*row)(benchmark::State&, element), int64_t iterations) {
  for (const element type : {element::f32, element::f16}) {
    std::string full = name;
    full.append(type == element::f32 ? "/f32" : "/f16");
    benchmark::RegisterBenchmark(full.c_str(), row, type)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(bench::quick() ? 3 : iterations);
  }
}

const bool registered = [] {
  add("streaming_llm", streaming_llm, 7);
  add("h2o", h2o, 31);
  add("snapkv_at_4k", snapkv_at_4k, 5);
  return true;
}();

}  // namespace
