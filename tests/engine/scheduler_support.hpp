// SPDX-License-Identifier: Apache-2.0
#pragma once
// Workloads for a scheduler, and a cache that watches what it does.
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "scheduler.hpp"
#include "support/seeded_model.hpp"

namespace engine::test {

inline bool is_stop(token_id id) {
  return id % 61 == 7;  // now and then, so that some answers end early
}

inline job simple_job(const std::string& id, std::vector<token_id> prompt, int max_new,
                      std::int64_t arrival = 0) {
  job j;
  j.id = id;
  j.prompt = std::move(prompt);
  j.max_new = max_new;
  j.arrival = arrival;
  j.scope = cache_scope::everyone();
  return j;
}

/// A mixed workload: short and long prompts, some with a common beginning, sampled ones, a conversation.
inline std::vector<job> mixed_jobs(std::uint64_t seed) {
  splitmix64 random(seed);
  const std::vector<token_id> common = some_text(random, 70);
  std::vector<job> jobs;
  for (int i = 0; i < 9; ++i) {
    std::vector<token_id> prompt;
    if (i % 3 == 0) prompt = common;
    const auto own = some_text(random, 1 + static_cast<int>(random.next() % 60));
    prompt.insert(prompt.end(), own.begin(), own.end());
    job& j = jobs.emplace_back(simple_job("job " + std::to_string(i), std::move(prompt),
                                          static_cast<int>(random.next() % 14),
                                          static_cast<std::int64_t>(random.next() % 12)));
    j.how.seed = random.next() % 1000;
    if (i % 2 == 0) j.how.temperature = 0.9;
    if (i == 4) j.samples = 3;
    if (i == 7) {
      j.end_of_turn = 2;
      j.follow_ups = {some_text(random, 9), some_text(random, 12), some_text(random, 1)};
    }
  }
  return jobs;
}

/// Passes everything on to a real cache; watches the steps and can claim that there are no blocks.
class watched_cache final : public cache_kind, private kv_backend {
 public:
  watched_cache(std::unique_ptr<cache_kind> inner, std::uint64_t seed, int refuse_one_in)
      : inner_(std::move(inner)), random_(seed), refuse_one_in_(refuse_one_in) {}

  std::string_view name() const override { return inner_->name(); }
  kv_backend& backend() override { return *this; }
  result<opened_sequence> open(std::span<const token_id> prompt, const cache_scope& scope) override {
    auto opened = inner_->open(prompt, scope);
    if (opened) ++open_;
    return opened;
  }
  result<opened_sequence> resume(std::span<const token_id> text, int prompt,
                                 const cache_scope& scope) override {
    auto opened = inner_->resume(text, prompt, scope);
    if (opened) ++open_;
    return opened;
  }
  result<int> extend(int slot, int tokens) override {
    if (!broken.empty()) return cannot_run(broken, "test", "");
    if (++extends_ == refuse_call) return cannot_run("out_of_blocks", "test", "");
    if (refuse_one_in_ > 0 && open_ > 1 && random_.next() % static_cast<std::uint64_t>(refuse_one_in_) == 0)
      return cannot_run("out_of_blocks", "test", "");
    return inner_->extend(slot, tokens);
  }
  status commit(int slot, std::span<const token_id> text) override {
    CHECK(static_cast<int>(text.size()) <= inner_->length(slot));
    return inner_->commit(slot, text);
  }
  result<int> fork(int slot) override {
    auto copy = inner_->fork(slot);
    if (copy) ++open_;
    return copy;
  }
  void close(int slot) override {
    --open_;
    inner_->close(slot);
  }
  int length(int slot) const override { return inner_->length(slot); }
  int dropped(int slot) const override { return inner_->dropped(slot); }
  cache_bytes bytes() const override { return inner_->bytes(); }
  cache_counts counts() const override { return inner_->counts(); }
  void read(int slot, int layer, int position, float* k, float* v) const override {
    inner_->read(slot, layer, position, k, v);
  }

  int open_sequences() const { return open_; }
  std::vector<std::vector<step_segment>> steps;
  std::string broken;   ///< extend fails with this code
  int refuse_call = 0;  ///< this call of extend, from 1, finds no blocks

 private:
  status begin_step(std::span<const step_segment> segments) override {
    steps.emplace_back(segments.begin(), segments.end());
    return inner_->backend().begin_step(segments);
  }
  void attend(int layer, const float* q, const float* k, const float* v, float* out) override {
    inner_->backend().attend(layer, q, k, v, out);
  }
  void end_step() override { inner_->backend().end_step(); }

  std::unique_ptr<cache_kind> inner_;
  splitmix64 random_;
  int refuse_one_in_;
  int open_ = 0;
  int extends_ = 0;
};

}  // namespace engine::test
