// SPDX-License-Identifier: Apache-2.0
// The example engine with the real model (KVCACHE_MODEL), one thread. Rows, /f16 with half-precision K and V:
//   engine/decode_paged_vs_contiguous    a decode step; the limit is the same step over reserved contiguous
//   engine/prefill_paged_vs_contiguous   memory, taken in turn; prefill is a whole prompt in chunks of 128
//   engine/decode_step_4096_minus_0      what 4,096 tokens of history add to a decode step; the limit is one
//                                        read of their keys and values
//   engine/column_sums_of_prompt         what all keys of a prompt of 768 tokens got of all its queries, 30
//                                        layers, from the queries; the limit is the prompt's prefill
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/attend/host_planes.hpp"
#include "program.hpp"
#include "runner.hpp"
#include "session.hpp"
#include "support/machine.hpp"
#include "support/rounds.hpp"

namespace {

constexpr int threads = 1;

/// The model, loaded once; null if it cannot be.
engine::loaded* model() {
  static const std::unique_ptr<engine::loaded> parts = [] {
    const char* path = std::getenv("KVCACHE_MODEL");
    engine::common_options o;
    o.model = path != nullptr ? path : "";
    o.threads = threads;
    auto made = engine::load_model(o);
    return made ? std::move(*made) : nullptr;
  }();
  return parts.get();
}

/// A cache with sequences in it that grow by whole chunks or single tokens.
class server {
 public:
  server(const char* kind, engine::kv_type type, int max_tokens, int sequences) {
    engine::cache_config c;
    c.shape = model()->model->shape().kv;
    c.type = type;
    c.max_sequences = sequences;
    c.max_tokens = max_tokens;
    c.pool = &model()->pool;
    auto made = engine::make_cache(kind, c);
    ok_ = bool(made);
    if (made) cache_ = std::move(*made);
  }

  bool ok() const { return ok_; }

  int open() {
    const engine::token_id first = 1;
    auto opened = cache_->open({&first, 1}, engine::cache_scope::only("bench"));
    ok_ = ok_ && bool(opened);
    return opened ? opened->slot : 0;
  }
  void close(int slot) { cache_->close(slot); }

  /// Runs tokens through the model, `chunk` at a time.
  void feed(int slot, std::span<const engine::token_id> tokens, int chunk) {
    ok_ = ok_ && bool(engine::feed(*model()->model, *cache_, slot, tokens, chunk, engine::observe::last,
                                   [](int, std::span<const float>) {}));
  }

  /// Stores `tokens` random keys and values: what a prompt of that length leaves behind, without the model.
  void fill(int slot, int tokens) {
    const engine::kv_shape& s = model()->model->shape().kv;
    constexpr int chunk = 512;
    std::vector<float> q(size_t(chunk) * size_t(s.query_heads) * size_t(s.head_dim)), out(q.size());
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& x : q) x = normal(random);
    for (int done = 0; ok_ && done < tokens; done += chunk) {
      const int rows = std::min(chunk, tokens - done);
      const engine::step_segment segment{slot, done, rows};
      ok_ = cache_->extend(slot, rows) && cache_->backend().begin_step({&segment, 1});
      if (!ok_) return;
      for (int layer = 0; layer < s.layers; ++layer) {
        cache_->backend().attend(layer, q.data(), q.data(), q.data(), out.data());
      }
      cache_->backend().end_step();
    }
  }

 private:
  std::unique_ptr<engine::cache_kind> cache_;
  bool ok_ = false;
};

std::vector<engine::token_id> some_tokens(int count) {
  std::mt19937 random(3);
  std::uniform_int_distribution<engine::token_id> any(100, model()->model->shape().vocabulary - 1);
  std::vector<engine::token_id> ids(static_cast<size_t>(count));
  for (engine::token_id& id : ids) id = any(random);
  return ids;
}

/// Adds the time of `work` to `to`, in nanoseconds; returns seconds.
template <class Work>
double timed(bench::rounds& to, Work&& work) {
  const double start = bench::seconds_now(threads);
  work();
  const double took = bench::seconds_now(threads) - start;
  to.add(took * 1e9);
  return took;
}

void decode_paged_vs_contiguous(benchmark::State& state, engine::kv_type type) {
  if (bench::failed(state, model() != nullptr, "KVCACHE_MODEL names no model")) return;
  const int history = bench::quick() ? 128 : 1024;
  server paged("paged", type, 2048, 1), contiguous("contiguous", type, 2048, 1);
  const int a = paged.open(), b = contiguous.open();
  paged.fill(a, history);
  contiguous.fill(b, history);
  const std::vector<engine::token_id> ids = some_tokens(512);
  bench::rounds work, limit;
  size_t next = 0;
  for (auto _ : state) {
    const std::span<const engine::token_id> token{&ids[next++ % ids.size()], 1};
    const double took = timed(work, [&] { paged.feed(a, token, 1); });
    timed(limit, [&] { contiguous.feed(b, token, 1); });
    state.SetIterationTime(took);
  }
  if (bench::failed(state, paged.ok() && contiguous.ok(), "the engine refused a step")) return;
  bench::report(state, "ns/step", work, limit, bench::at_most_ratio(1.03));
}

void prefill_paged_vs_contiguous(benchmark::State& state, engine::kv_type type) {
  if (bench::failed(state, model() != nullptr, "KVCACHE_MODEL names no model")) return;
  const std::vector<engine::token_id> prompt = some_tokens(bench::quick() ? 128 : 512);
  server paged("paged", type, 1024, 1), contiguous("contiguous", type, 1024, 1);
  const auto whole = [&](server& s) {
    const int slot = s.open();
    s.feed(slot, prompt, 128);
    s.close(slot);
  };
  bench::rounds work, limit;
  for (auto _ : state) {
    const double took = timed(work, [&] { whole(paged); });
    timed(limit, [&] { whole(contiguous); });
    state.SetIterationTime(took);
  }
  if (bench::failed(state, paged.ok() && contiguous.ok(), "the engine refused a step")) return;
  bench::report(state, "ns/prompt", work, limit, bench::at_most_ratio(1.03));
}

void decode_step_4096_minus_0(benchmark::State& state, engine::kv_type type) {
  if (bench::failed(state, model() != nullptr, "KVCACHE_MODEL names no model")) return;
  const int history = bench::quick() ? 512 : 4096;
  const engine::kv_shape& s = model()->model->shape().kv;
  const kvcache::group_shape shape = {
      .layers = s.layers,
      .kv_heads = s.kv_heads,
      .head_dim_k = s.head_dim,
      .head_dim_v = s.head_dim,
      .type = type == engine::kv_type::f16 ? kvcache::element::f16 : kvcache::element::f32};
  // As much memory as the history takes, allocated alike, only to be read.
  auto same = kvcache::host_planes::create({.shape = shape, .blocks = history / 16, .layer_owner = {}});
  if (bench::failed(state, bool(same), "no memory")) return;
  const auto bytes = static_cast<size_t>(same->size().count);
  std::fill_n(static_cast<std::byte*>(same->data()), bytes, std::byte{1});
  server at("paged", type, history + 1024, 2);
  const int longer = at.open(), shorter = at.open();
  at.fill(longer, history);
  const std::vector<engine::token_id> ids = some_tokens(64);
  bench::crew crew(threads);
  bench::rounds deep, shallow, limit;
  size_t next = 0;
  for (auto _ : state) {
    const std::span<const engine::token_id> token{&ids[next++ % ids.size()], 1};
    limit.add(bench::read_ns_per_byte(crew, same->data(), bytes) * double(bytes));
    const double took = timed(deep, [&] { at.feed(longer, token, 1); });
    timed(shallow, [&] { at.feed(shorter, token, 1); });
    state.SetIterationTime(took);
  }
  if (bench::failed(state, at.ok(), "the engine refused a step")) return;
  bench::report(state, "ns/step", deep.median() - shallow.median(), limit.median(),
                bench::at_most_ratio(1.5));
  state.counters["step_at_0_ns"] = shallow.median();
}

void column_sums_of_prompt(benchmark::State& state, engine::kv_type type) {
  if (bench::failed(state, model() != nullptr, "KVCACHE_MODEL names no model")) return;
  const std::vector<engine::token_id> prompt = some_tokens(bench::quick() ? 128 : 768);
  engine::cache_config c;
  c.shape = model()->model->shape().kv;
  c.type = type;
  c.max_sequences = 2;
  c.max_tokens = static_cast<int>(prompt.size());
  c.pool = &model()->pool;
  const auto cache = engine::session_cache::create(c);
  const auto full = engine::parse_policy("full"), heavy = engine::parse_policy("h2o:heavy=64,recent=64");
  bool done = cache && full && heavy;
  bench::rounds work, limit;
  for (auto _ : state) {
    auto text = engine::session::create(*model()->model, **cache, *full, {.remember = true});
    done = done && text;
    if (!done) break;
    timed(limit, [&] { done = done && text->feed(prompt, engine::observe::last); });
    state.SetIterationTime(timed(work, [&] {
      const auto seen = text->fork_as(*heavy);
      done = done && seen && seen->bytes_state() >= prompt.size() * sizeof(float);
    }));
  }
  if (bench::failed(state, done, "the engine refused a step")) return;
  bench::report(state, "ns/prompt", work, limit, bench::no_target());
}

void add(const char* name, void (*row)(benchmark::State&, engine::kv_type), int64_t iterations) {
  for (const engine::kv_type type : {engine::kv_type::f32, engine::kv_type::f16}) {
    if (bench::quick() && type != engine::kv_type::f32) continue;
    std::string full = name;
    if (type == engine::kv_type::f16) full.append("/f16");
    benchmark::RegisterBenchmark(full.c_str(), row, type)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(bench::quick() ? 5 : iterations);
  }
}

const bool registered = [] {
  add("engine/decode_paged_vs_contiguous", decode_paged_vs_contiguous, 41);
  add("engine/prefill_paged_vs_contiguous", prefill_paged_vs_contiguous, 5);
  add("engine/decode_step_4096_minus_0", decode_step_4096_minus_0, 25);
  add("engine/column_sums_of_prompt", column_sums_of_prompt, 3);
  return true;
}();

}  // namespace
